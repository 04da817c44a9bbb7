"""Ways in which user code reaches a split tensor beside torch functions: hooks of gradients,
``.data``, NumPy, torch.func.

Each sees whole tensors, or is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._C import _functorch

from lightning_topt.techniques.tensor_parallel import moves
from lightning_topt.techniques.tensor_parallel.layout import (
    REPLICATE,
    Layout,
    layout_of,
    with_layout,
)
from lightning_topt.techniques.tensor_parallel.tensor_axes import TensorAxes

_DATA: Any = torch.Tensor.data
SET_DATA = _DATA.__set__
Hook = Callable[[Tensor], Tensor | None]


def hook_of_slices(hook: Hook, layout: Layout, axes: TensorAxes) -> Hook:
    """Return a hook for the gradient of a split tensor that gives `hook` the whole one."""
    whole, same = (REPLICATE,) * len(axes), (False,) * len(axes)

    def run(gradient: Tensor) -> Tensor | None:
        with torch._C.DisableTorchFunction(), torch.no_grad():
            full = moves.move(gradient, layout.placements, whole, same, axes)
        changed = hook(full)
        if changed is None:
            return None
        with torch._C.DisableTorchFunction():
            return moves.move(changed, whole, layout.placements, same, axes)

    return run


def set_data(tensor: Tensor, value: Tensor, axes: TensorAxes) -> None:
    """Set ``tensor.data``, a split tensor, to `value`, which is split or whole. Raises ValueError
    for another shape.
    """
    layout, given = layout_of(tensor), layout_of(value)
    assert layout is not None
    shape = tuple(value.shape) if given is None else given.shape
    if shape != layout.shape:
        raise ValueError(
            f"the data of a tensor of shape {layout.shape}, which is split "
            f"{' x '.join(map(str, layout.placements))}, are set to those of one of shape {shape}; "
            "keep the shape, or keep the tensor's block whole"
        )
    source = (REPLICATE,) * len(axes) if given is None else given.placements
    with torch._C.DisableTorchFunction(), torch.no_grad():
        tensor.data = moves.move(value, source, layout.placements, (False,) * len(axes), axes)


def gradients(
    whole: Callable[[Any], Any],
    outputs: Any,
    inputs: Any,
    grad_outputs: Any = None,
    *rest: Any,
    **more: Any,
) -> Any:
    """Return what `torch.autograd.grad` does, of split tensors too: each gradient is where its
    tensor is.
    """
    outputs, grad_outputs = whole(outputs), whole(grad_outputs)
    with torch._C.DisableTorchFunction():
        found: tuple[Tensor | None, ...] = torch.autograd.grad(
            outputs, inputs, grad_outputs, *rest, **more
        )
    for tensor, gradient in zip(
        [inputs] if isinstance(inputs, Tensor) else inputs, found, strict=True
    ):
        if gradient is not None and (layout := layout_of(tensor)) is not None:
            with_layout(gradient, layout)
    return found


def written_besides(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, in_place: bool
) -> Iterator[Any]:
    """Yield what a call writes to, or lists of it, besides a tensor that is its first argument."""
    if kwargs.get("out") is not None:
        yield kwargs["out"]
    if in_place and args and not isinstance(args[0], Tensor):
        yield args[0]
    max_norm = args[3] if len(args) > 3 else kwargs.get("max_norm")
    if func in (F.embedding, F.embedding_bag) and max_norm is not None:
        yield args[1] if len(args) > 1 else kwargs["weight"]


def read_only(result: Any) -> Any:
    """Return an array of NumPy so that it cannot be written to: the memory is that of a gathered
    copy.
    """
    if isinstance(result, np.ndarray):
        result.flags.writeable = False
    return result


def refuse_transforms(tensors: Iterable[Tensor]) -> None:
    """Raise ValueError where a transform of torch.func has wrapped a split tensor: it would compute
    on the slice alone.
    """
    for tensor in tensors:
        while _functorch.is_functorch_wrapped_tensor(tensor):
            tensor = _functorch.get_unwrapped(tensor)
            if layout_of(tensor) is not None:
                raise ValueError(
                    "a transform of torch.func (vmap, grad, ...) is applied to a tensor that is "
                    "split, of which it would see one slice; keep the parameters of this module "
                    "and of those around it whole"
                )


def transforms_are_on() -> bool:
    """Return whether code runs inside of a transform of torch.func."""
    return _functorch.peek_interpreter_stack() is not None

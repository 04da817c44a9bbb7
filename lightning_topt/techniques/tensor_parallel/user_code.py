"""What user code may ask of a split tensor beside torch functions, and what runs it then.

    attributes           the shape is the full one, the rest that of the local tensor
    torch in Python      functions that torch writes with other torch functions run as they are
                         written: attention as `torch.nn.MultiheadAttention` calls it, losses,
                         norms; each function inside takes a row of its own
    hooks, ``.data``,    see full tensors, or are refused
    NumPy, torch.func
    views of copies      may be read; a change in place would change the copy alone: refused
    autograd functions   of users and of torch.distributed get unsharded tensors: what they compute
                         is not known
    checkpoints          what `torch.utils.checkpoint` runs again in backward, when the mode is off,
                         runs under the mode again, on tensors that carry their layouts
    collectives          among all ranks are refused: some of these have the same samples
    tensors kept         in buffers and attributes beyond a step are unsharded at its end: code
                         between steps, checkpoints and other ranks know nothing of slices

`SplitMode` calls what is here; `PythonFunctionMode` is its base, since torch runs autograd
functions and checkpoints outside of function modes.
"""

from __future__ import annotations

import sys
import types
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import cache
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch._C import _functorch
from torch.distributed import distributed_c10d
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils import checkpoint

from lightning_topt.graph.errors import line_of_caller
from lightning_topt.techniques.tensor_parallel import moves
from lightning_topt.techniques.tensor_parallel.layout import (
    REPLICATE,
    Layout,
    TensorAxes,
    layout_of,
    with_layout,
)
from lightning_topt.techniques.tensor_parallel.op_rules.rules import tensors_in


def _shape(tensor: Tensor) -> torch.Size:
    layout = layout_of(tensor)
    assert layout is not None
    return torch.Size(layout.shape)


def _size(tensor: Tensor, dim: int | None = None) -> Any:
    return _shape(tensor) if dim is None else _shape(tensor)[dim]


def _gradient(tensor: Tensor) -> Tensor | None:
    gradient, layout = tensor.grad, layout_of(tensor)
    return gradient if gradient is None or layout is None else with_layout(gradient, layout)


_TENSOR: Any = torch.Tensor  # its attributes are descriptors, which type checkers take for values

ATTRIBUTES: dict[Callable[..., Any], Callable[..., Any]] = {
    _TENSOR.shape.__get__: _shape,
    torch.Tensor.size: _size,
    torch.Tensor.numel: lambda tensor: _shape(tensor).numel(),
    torch.Tensor.nelement: lambda tensor: _shape(tensor).numel(),
    torch.numel: lambda tensor: _shape(tensor).numel(),
    torch.Tensor.__len__: lambda tensor: _shape(tensor)[0],
    _TENSOR.grad.__get__: _gradient,
}

_GETTERS = (
    "dtype device requires_grad grad_fn is_leaf is_cuda is_cpu is_meta is_sparse is_quantized "
    "is_mps is_nested layout ndim _version names itemsize is_inference output_nr retains_grad "
    "is_mkldnn is_xpu is_sparse_csr _backward_hooks name _grad_fn"
)
_METHODS = (
    "dim ndimension is_floating_point is_complex is_contiguous is_signed element_size data_ptr "
    "get_device requires_grad_ retain_grad is_inference storage_offset __hash__ is_conj is_neg "
    "is_pinned is_shared untyped_storage register_hook register_post_accumulate_grad_hook "
    "is_set_to has_names detach_ new_zeros new_ones new_empty new_full new_tensor"
)


def _functions() -> set[Callable[..., Any]]:
    # The functions that run on the local tensor as they are
    found: set[Callable[..., Any]] = set()
    for name in _GETTERS.split():
        if hasattr(getattr(_TENSOR, name, None), "__get__"):
            found.add(getattr(_TENSOR, name).__get__)
    found.update(
        function
        for name in _METHODS.split()
        if (function := getattr(torch.Tensor, name, None)) is not None
    )
    found.update(
        {
            _TENSOR.requires_grad.__set__,
            _TENSOR.grad.__set__,
            torch.is_floating_point,
            torch.is_complex,
            torch.is_tensor,
        }
    )
    found.add(torch.Tensor.backward)
    return found


LOCAL = _functions()

_VIEWS = (
    "view select narrow squeeze unsqueeze transpose permute t swapaxes swapdims movedim moveaxis "
    "adjoint expand expand_as view_as unbind split split_with_sizes chunk tensor_split diagonal "
    "unfold detach unflatten __getitem__ __iter__"
)


def _aliases() -> set[Callable[..., Any]]:
    # The functions whose results are views of their first argument
    names = [*_VIEWS.split(), "real", "imag", "data", "T", "mT", "H", "mH"]
    found = {
        function
        for name in names
        for place in (torch, _TENSOR)
        if (function := getattr(place, name, None)) is not None
    }
    return {each.__get__ if not callable(each) else each for each in found}


ALIASES = _aliases()

# ---- functions of torch written in Python --------------------------------------------------------

_CHECKS = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")
_PLACES = (vars(F), vars(torch.functional), vars(torch._tensor))


@cache
def body_of(func: Callable[..., Any]) -> Callable[..., Any] | None:
    """Return what `func` does once it has checked for overrides; None if it is not Python's."""
    if not isinstance(func, types.FunctionType) or not any(
        func.__globals__ is place for place in _PLACES
    ):
        return None
    # a copy of the function whose checks for overrides find nobody
    names = {**func.__globals__, **dict.fromkeys(_CHECKS, _nobody)}
    body = types.FunctionType(
        func.__code__, names, func.__name__, func.__defaults__, func.__closure__
    )
    body.__kwdefaults__ = func.__kwdefaults__
    return body


def _nobody(*_: Any) -> bool:
    return False


# ---- hooks, .data, autograd.grad, NumPy, torch.func ----------------------------------------------

_DATA: Any = torch.Tensor.data
SET_DATA = _DATA.__set__
Hook = Callable[[Tensor], Tensor | None]


def hook_of_slices(hook: Hook, layout: Layout, axes: TensorAxes) -> Hook:
    """Return a hook for the gradient of a split tensor that gives `hook` the full one."""

    def run(gradient: Tensor) -> Tensor | None:
        with torch._C.DisableTorchFunction(), torch.no_grad():
            full = moves.unsharded(gradient, layout.placements, axes)
        changed = hook(full)
        if changed is None:
            return None
        with torch._C.DisableTorchFunction():
            return moves.sliced(changed, layout.placements, axes)

    return run


def set_data(tensor: Tensor, value: Tensor, axes: TensorAxes) -> None:
    """Set ``tensor.data``, of a split tensor, to `value`, which is split or unsharded.

    Raises:
        ValueError: `value` has another shape
    """
    # full shapes are compared, local ones are stored
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
    """Return what `torch.autograd.grad` does; each gradient is placed as its tensor is."""
    outputs, grad_outputs = whole(outputs), whole(grad_outputs)
    # each gradient comes out where its tensor is
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
    """Yield what a call writes to beside a tensor that is its first argument, or lists of it."""
    if kwargs.get("out") is not None:
        yield kwargs["out"]
    if in_place and args and not isinstance(args[0], Tensor):
        yield args[0]
    max_norm = args[3] if len(args) > 3 else kwargs.get("max_norm")
    if func in (F.embedding, F.embedding_bag) and max_norm is not None:
        yield args[1] if len(args) > 1 else kwargs["weight"]


def read_only(result: object) -> Any:
    """Return an array of NumPy read-only: its memory is that of a gathered copy."""
    if isinstance(result, np.ndarray):
        result.flags.writeable = False
    return result


def refuse_transforms(tensors: Iterable[Tensor]) -> None:
    """Raise ValueError if a transform of torch.func has wrapped a split tensor.

    It would compute on the slice alone.
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


# ---- views of gathered copies --------------------------------------------------------------------

COPIED = "_topt_copied"


def note_copies(tensors: Sequence[Tensor], local: Sequence[Tensor], result: object) -> None:
    """Mark the views in `result` of what was gathered, not of the tensor that user code has.

    `tensors` are the arguments of the call, `local` what it ran on.
    """
    # a view of a copy, or of what is itself a view of one
    first, memory = tensors[0], local[0].untyped_storage()._cdata
    if COPIED in first.__dict__ or (
        local[0] is not first and memory != first.untyped_storage()._cdata
    ):
        for each in tensors_in((result,)):
            if each.untyped_storage()._cdata == memory:
                each.__dict__[COPIED] = True


def refuse_copies(func: Callable[..., Any], tensor: Tensor) -> None:
    """Raise ValueError if `func` would change a view of a gathered copy in place."""
    if COPIED in tensor.__dict__:
        raise ValueError(
            f"{func.__name__} changes a view of a split tensor in place, which would not change "
            "that tensor; write it without the in-place call, or keep the tensor's block whole"
        )


# ---- autograd functions, checkpoints, collectives ------------------------------------------------

_OWN = ("torch.", "lightning_topt.")
_COLLECTIVES = "torch.distributed.nn."
_apply: Any = torch.autograd.Function.__dict__["apply"]
# what all checkpoints without reentrant autograd run: the second name in torch 2.13 and before
_GENERATOR = next(
    name
    for name in (
        "_checkpoint_without_reentrant_generator_impl",
        "_checkpoint_without_reentrant_generator",
    )
    if hasattr(checkpoint, name)
)
_generator: Any = getattr(checkpoint, _GENERATOR)
_make_subclass: Any = torch.Tensor._make_subclass
_NOT_IN_GROUP = "_rank_not_in_group"  # all functions of torch.distributed call it first
_not_in_group: Any = getattr(distributed_c10d, _NOT_IN_GROUP)
_eager = ExitStack()
_users = 0
_among_all: list[bool] = []


class PythonFunctionMode(TorchFunctionMode):
    """A mode that also sees calls of autograd functions and checkpoints.

    Autograd functions get unsharded arguments (`whole`). Compiled code runs uncompiled.
    """

    def __enter__(self) -> Any:
        """Watch those calls while any such mode is on."""
        # the patches of torch are shared by all modes, and counted
        global _users
        _users += 1
        if _users == 1:
            # compiled code runs as it is written: a compiler would trace the mode, which changes
            # while it runs
            if "torch._dynamo.eval_frame" in sys.modules:  # else nothing is compiled
                _eager.enter_context(torch.compiler.set_stance("force_eager"))
            torch.Tensor._make_subclass = staticmethod(  # type: ignore[method-assign]
                _watched_subclass
            )
            apply: Any = classmethod(_watched_apply)
            torch.autograd.Function.apply = apply  # type: ignore[method-assign]
            setattr(checkpoint, _GENERATOR, _watched_generator)
            setattr(distributed_c10d, _NOT_IN_GROUP, _watched_group)
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *error: Any) -> None:
        """Leave torch as it was."""
        global _users
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        _users -= 1
        if _users == 0:
            _eager.close()
            del torch.Tensor._make_subclass  # the base class has torch's own
            torch.autograd.Function.apply = _apply  # type: ignore[method-assign]
            setattr(checkpoint, _GENERATOR, _generator)
            setattr(distributed_c10d, _NOT_IN_GROUP, _not_in_group)

    def whole(self, value: object) -> Any:
        """Return `value` with unsharded tensors."""
        raise NotImplementedError

    def as_now(self) -> Callable[[], AbstractContextManager[None]]:
        """Return what makes a context in which calls run as they would now."""
        return nullcontext


def _watched_subclass(cls: Any, data: Tensor, *args: Any, **kwargs: Any) -> Any:
    # Give a parameter that is made of a split tensor its layout
    made = _make_subclass(cls, data, *args, **kwargs)
    layout = layout_of(data)
    return made if layout is None else with_layout(made, layout)


def _current() -> PythonFunctionMode | None:
    if not torch._C._len_torch_function_stack():
        return None
    stack = _get_current_function_mode_stack()
    modes = (mode for mode in reversed(stack) if isinstance(mode, PythonFunctionMode))
    return next(modes, None)


def _watched_apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
    # Call an autograd function, with unsharded arguments if what it computes is not known.
    # A reentrant checkpoint runs again in the mode.
    mode = _current()
    if mode is not None and cls is checkpoint.CheckpointFunction:
        args = (_again_under(mode, args[0], args[2:]), *args[1:])
    elif mode is not None:
        module = cls.__module__
        is_unknown = not module.startswith(_OWN) or module.startswith(_COLLECTIVES)
        if is_unknown and any(map(layout_of, tensors_in(args))):
            args = mode.whole(args)
    return _apply.__get__(None, cls)(*args, **kwargs)  # a C function since torch 2.14


def _watched_group(group: dist.ProcessGroup | None) -> Any:
    # Refuse what exchanges tensors among all ranks
    # the function of torch.distributed that asks
    name = sys._getframe(1).f_code.co_name
    exchanges = not name.startswith("get_") and "barrier" not in name
    if exchanges and (group is None or group is dist.group.WORLD) and not _among_all:
        raise ValueError(
            f"a step calls torch.distributed.{name} among all ranks, and under this plan several "
            "of them have the same "
            "samples, which would count more than once: call self.all_gather or "
            "self.trainer.strategy.reduce, which know the "
            f"ranks of the data, or choose a plan without tensor axes\n{line_of_caller()}"
        )
    return _not_in_group(group)


@contextmanager
def among_all_ranks() -> Generator[None]:
    """Allow collectives among all ranks within it, as where a step is only looked at."""
    _among_all.append(True)
    try:
        yield
    finally:
        _among_all.pop()


def _again_under(
    mode: PythonFunctionMode, function: Callable[..., Any], args: tuple[Any, ...]
) -> Callable[..., Any]:
    # `function` for a reentrant checkpoint, which runs it in the mode in backward too
    # the checkpoint keeps tensors without their layouts
    layouts, as_now = [layout_of(arg) for arg in args], mode.as_now()

    def run(*given: Any) -> Any:
        if _current() is not None:
            return function(*given)
        for arg, layout in zip(given, layouts, strict=True):
            if isinstance(arg, Tensor) and layout is not None:
                with_layout(arg, layout)
        with mode, as_now():
            return function(*given)

    return run


def _watched_generator(function: object, *args: Any, **options: Any) -> Any:
    # Let a checkpoint recompute in the mode
    if (mode := _current()) is None:
        return _generator(function, *args, **options)
    as_now = mode.as_now()

    def under(context_fn: Callable[[], tuple[Any, Any]]) -> Callable[[], tuple[Any, Any]]:
        def contexts() -> tuple[Any, Any]:
            forward, recompute = context_fn()
            return forward, _Under(mode, recompute, as_now)

        return contexts

    # the first takes it by name; the second as the third argument, before those of the function
    if _GENERATOR.endswith("_impl"):
        options["context_fn"] = under(options.get("context_fn", checkpoint.noop_context_fn))
    else:
        preserve, context_fn, *rest = args
        args = preserve, under(context_fn), *rest
    return _generator(function, *args, **options)


class _Under(AbstractContextManager[None]):
    # A context in the mode; it may be entered again, by a backward pass in two parts.

    def __init__(
        self,
        mode: PythonFunctionMode,
        context: AbstractContextManager[Any],
        as_now: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._mode, self._context, self._as_now = mode, context, as_now
        self._entered: list[ExitStack] = []

    def __enter__(self) -> None:
        with ExitStack() as stack:
            stack.enter_context(self._context)
            if _current() is None:
                stack.enter_context(self._mode)
                stack.enter_context(self._as_now())
            self._entered.append(stack.pop_all())

    def __exit__(self, *error: Any) -> bool | None:
        return self._entered.pop().__exit__(*error)


# ---- tensors that modules keep -------------------------------------------------------------------

_INTERNAL = frozenset(vars(nn.Module()))
_FEW = 256  # items of a dictionary that may hold tensors; larger ones are other tables
Whole = Callable[[Any], Any]


def places_of(module: nn.Module) -> list[dict[str, Any]]:
    """Return the dictionaries where modules keep tensors.

    That is buffers, and attributes of modules whose class is not torch's.
    """
    places: list[dict[str, Any]] = [each._buffers for each in module.modules() if each._buffers]
    return places + [
        vars(each) for each in module.modules() if not type(each).__module__.startswith("torch.nn.")
    ]


def keep_whole(places: Sequence[dict[str, Any]], whole: Whole) -> None:
    """Replace split tensors in `places`, and in lists and dictionaries there, by unsharded ones.

    Of a list those at its end: what is before them was there after the last step. A collective
    call.
    """
    for place in places:
        for name, value in list(place.items()):
            if name in _INTERNAL:
                continue
            if isinstance(value, Tensor):
                if (new := whole(value)) is not value:
                    place[name] = new
            elif isinstance(value, list | deque):
                _end_of(value, whole)
            elif type(value) is dict and len(value) <= _FEW:
                for key, item in value.items():
                    if isinstance(item, list | deque):
                        _end_of(item, whole)
                    elif isinstance(item, Tensor | tuple) and (new := whole(item)) is not item:
                        value[key] = new


def _end_of(values: Any, whole: Whole) -> None:
    # Replace the split tensors at the end of a list
    for index in range(len(values) - 1, -1, -1):
        item = values[index]
        if not isinstance(item, Tensor | tuple | list | dict) or (new := whole(item)) is item:
            return
        values[index] = new

"""Low-level operator calls: what they cost, how they are written down, how they are made again on a
device.

quantity   rule                                                           source
flops      2 per multiply-add of matrix products, convolutions,           `flop_formulas`
           attention; otherwise 0
bytes      every tensor read and every tensor written, once               roofline convention
allocated  the storages of the results that are not those of arguments    torch's allocators
workspace  convolutions on CPU copy their arguments into oneDNN's         measured: at most that
           blocked layouts                                                much
allocated  results, and what convolutions copy again for each of their    measured: page faults
           passes
saved      oneDNN's LSTM keeps a workspace for backward, of no size in    measured, see
           shapes                                                         `hidden_bytes`
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from lightning_topt.graph.collective_ops import is_collective
from lightning_topt.graph.flop_formulas import FLOPS
from lightning_topt.graph.op_graph import Kernel
from lightning_topt.graph.replayable import is_replayable

Frozen = Any  # nested tuples: hashable arguments

# Share their input's storage, although their schema does not say so.
UNDECLARED_VIEWS = {"aten::_unsafe_view", "aten::unsafe_split", "aten::unsafe_split_with_sizes"}
# Read from their first argument only the rows that they return.
LOOKUPS = {"aten::embedding", "aten::index_select", "aten::gather", "aten::index"}
# Change only those elements of their first argument that the last one is for.
SCATTERS = {
    f"aten::{name}_"
    for name in ("scatter", "scatter_add", "scatter_reduce", "index_add", "index_copy")
}
# Overwrite their first argument, or look at its shape only.
UNREAD = {
    *(
        "aten::fill_",
        "aten::zero_",
        "aten::copy_",
        "aten::bernoulli_",
        "aten::uniform_",
        "aten::normal_",
    ),
    *(
        "aten::ones_like",
        "aten::zeros_like",
        "aten::full_like",
        "aten::rand_like",
        "aten::randn_like",
    ),
    *("aten::new_zeros", "aten::new_ones", "aten::new_full"),
}
# oneDNN's convolutions, which hold copies of their arguments while they run.
REORDERED = {"aten::convolution", "aten::convolution_backward"}
_CHANNEL_BLOCK = 16  # floats of a 512-bit register
# Allocate and touch nothing.
ALLOCATIONS = {
    *("aten::empty", "aten::empty_like", "aten::empty_strided", "aten::empty_permuted"),
    *("aten::new_empty", "aten::new_empty_strided"),
}
# Compute nothing.
QUERIES = {"prim::device", "prim::layout", "aten::sym_size", "aten::sym_stride", "aten::sym_numel"}


@dataclass(frozen=True)
class Measured:
    """One low-level call at one batch size; `arguments` as `encode_arguments` writes them."""

    name: str
    arguments: Any
    flops: float
    bytes: float
    allocated: float = 0.0
    workspace: float = 0.0


@functools.cache
def is_view(func: OpOverload) -> bool:
    """Return whether `func` returns views of its inputs and touches no element."""
    schema = func._schema
    if schema.name in UNDECLARED_VIEWS:
        return True
    aliases = [result.alias_info for result in schema.returns]
    return bool(aliases) and all(alias is not None and not alias.is_write for alias in aliases)


def freeze(value: Any, tensors: list[Tensor]) -> Frozen:
    """Return `value` as nested tuples which are equal only for equal calls; its tensors are
    appended to `tensors`.
    """
    if isinstance(value, Tensor):
        if value.layout is not torch.strided:
            return ("opaque", f"{value.layout} tensor")
        tensors.append(value)
        return ("tensor", tuple(value.shape), tuple(value.stride()), str(value.dtype)[6:])
    if value is None or type(value) is int or isinstance(value, str):
        return value
    if isinstance(value, (bool, float, complex)):
        return (type(value).__name__, value)
    if isinstance(value, (list, tuple)):
        return ("list", *(freeze(item, tensors) for item in value))
    if isinstance(value, (torch.dtype, torch.layout, torch.memory_format)):
        return (type(value).__name__, str(value).removeprefix("torch."))
    if isinstance(value, torch.device):
        return ("device",)
    if isinstance(value, torch.Generator):
        return None
    return ("opaque", type(value).__name__)


def thaw(value: Frozen) -> Any:
    """Return what `freeze` returned as a JSON value."""
    if not isinstance(value, tuple):
        return value
    kind, *items = value
    if kind == "list":
        return [thaw(item) for item in items]
    if kind == "tensor":
        return {"tensor": [list(items[0]), list(items[1]), items[2]]}
    if kind == "bool" or (kind == "float" and math.isfinite(items[0])):
        return items[0]
    return {kind: str(items[0]) if items else ""}


def encode_arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the arguments of a low-level call as a JSON value: tensors by shape, stride (elements)
    and dtype, no values.
    """
    return {
        "args": [thaw(freeze(value, [])) for value in args],
        "kwargs": {name: thaw(freeze(value, [])) for name, value in kwargs.items()},
    }


def measure(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Measured:
    """Return the FLOPs and bytes of the call ``func(*args, **kwargs)`` that returned `out`; a
    collective computes nothing.
    """
    if is_collective(func):
        return Measured(str(func), {"args": [], "kwargs": {}}, 0.0, 0.0)
    formula = FLOPS.get(func._overloadpacket)
    flops = float(formula(*args, **kwargs, out_val=out)) if formula else 0.0
    given: list[Tensor] = []
    freeze((args, tuple(kwargs.values())), given)
    size, allocated, workspace = (
        float(_bytes(func, given[:], out)),
        float(_allocated(given, out)),
        0.0,
    )
    if _on_cpu(given):
        workspace = float(_workspace(func, args, given, out))
        allocated += float(_copied_again(func, args, given, out))
    return Measured(str(func), encode_arguments(args, kwargs), flops, size, allocated, workspace)


def hidden_bytes(func: OpOverload, args: tuple[Any, ...]) -> float:
    """Return the bytes that the call's last result has on a device and does not have in shapes: the
    workspace of oneDNN's LSTM.

    8 floats per step, sample and hidden unit stay resident after forward (320 units, 800 steps of
    samples).
    """
    if func._schema.name != "aten::mkldnn_rnn_layer":
        return 0.0
    x, w_hidden = args[0], args[2]  # (step, sample, input), (4 * unit, unit)
    return float(32 * math.prod(x.shape[:2]) * w_hidden.shape[1])


def _workspace(func: OpOverload, args: tuple[Any, ...], given: list[Tensor], out: Any) -> float:
    name = func._schema.name
    if name in REORDERED:
        is_backward = name.endswith("backward")
        transposed, results = (
            args[7 if is_backward else 6],
            [] if is_backward else list(_tensors(out)),
        )
        # The result too where its channels do not fill the layout's blocks, and of a transposed
        # convolution.
        copied = [t for t in results if transposed or t.shape[1] % _CHANNEL_BLOCK]
        return sum(map(_blocked, [t for t in given if t.ndim > 1] + copied))
    if name in ("aten::mkldnn_rnn_layer", "aten::mkldnn_rnn_layer_backward"):
        x, w_input, w_hidden = args[:3]
        copies = 4.0 * (w_input.numel() + w_hidden.numel())
        # what only backward touches
        rest = 4.0 * math.prod(x.shape[:2]) * (5 * w_hidden.shape[1] + 2 * x.shape[2])
        return float(copies + rest if name.endswith("backward") else copies)
    return 0.0


def _copied_again(func: OpOverload, args: tuple[Any, ...], given: list[Tensor], out: Any) -> float:
    """Bytes that a convolution takes and gives back before or after its `_workspace`: oneDNN copies
    all tensors for each pass.

    Counted as page faults: forward is one pass, backward one for the input and one for the weight.
    """
    name = func._schema.name
    if name == "aten::convolution":
        return sum(
            _blocked(t) for t in _tensors(out) if not (args[6] or t.shape[1] % _CHANNEL_BLOCK)
        )
    if name == "aten::convolution_backward" and all(args[10][:2]):
        return sum(_blocked(t) for t in given if t.ndim > 1)
    return 0.0


def _blocked(tensor: Tensor) -> int:
    """Bytes of a copy of (sample, channel, ...) whose channels are padded to whole blocks."""
    channels = max(tensor.shape[1], 1)
    return _touched(tensor) // channels * -(-channels // _CHANNEL_BLOCK) * _CHANNEL_BLOCK


def make_call(kernel: Kernel, device: torch.device | str) -> Callable[[], None]:
    """Return a function that makes the call of `kernel` on `device`, on tensors of the same shape,
    stride and dtype.

    Floating-point tensors are uniform in [0, 1), all others zero, which is a valid index and mask.
    A call with random numbers uses the device's generator. Raises ValueError when the operator is
    not known here, might misread invented values (see `is_replayable`), or has an argument that
    cannot be made again; the function raises it when the operator does not exist for `device`.
    """
    namespace, name, overload = kernel.name.split(".")
    try:
        func = getattr(getattr(getattr(torch.ops, namespace), name), overload)
    except AttributeError:
        raise ValueError(
            f"operator {kernel.name} is unknown in this process; import the library it is from"
        ) from None
    if not is_replayable(func):
        raise ValueError(
            f"operator {kernel.name} is not called on invented arguments, which it might misread"
        )
    target = torch.device(device)
    args = [_revive(value, target) for value in kernel.arguments["args"]]
    kwargs = {key: _revive(value, target) for key, value in kernel.arguments["kwargs"].items()}

    def call() -> None:
        with torch.no_grad():
            try:
                func(*args, **kwargs)
            except NotImplementedError as error:
                raise ValueError(f"operator {kernel.name} does not run on {target}") from error

    return call


def _revive(value: Any, device: torch.device) -> Any:
    if isinstance(value, list):
        return [_revive(item, device) for item in value]
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "tensor":
        shape, stride, dtype = content
        return _random_tensor(shape, stride, dtype, device)
    if kind == "device":
        return device
    if kind in ("dtype", "layout", "memory_format"):
        return getattr(torch, content)
    if kind in ("float", "complex"):
        return {"float": float, "complex": complex}[kind](content)
    raise ValueError(f"an argument of type {content} cannot be made again")


_RANDOM_ELEMENTS = 1 << 16


def _random_tensor(shape: list[int], stride: list[int], dtype: str, device: torch.device) -> Tensor:
    size = (
        0 if 0 in shape else 1 + sum((n - 1) * step for n, step in zip(shape, stride, strict=True))
    )
    element = getattr(torch, dtype)
    if element.is_floating_point:
        # Random numbers cost more than most kernels take to read them: a block of them is repeated.
        block = torch.rand(max(1, min(size, _RANDOM_ELEMENTS)), device=device).to(element)
        flat = block.repeat(-(-size // block.numel()))[:size]
    else:
        flat = torch.zeros(size, dtype=element, device=device)
    return flat.as_strided(shape, stride)


def _bytes(func: OpOverload, read: list[Tensor], out: Any) -> int:
    written = list(_tensors(out))
    if func._schema.name in LOOKUPS:
        read[:1] = written
    elif func._schema.name in UNREAD:
        del read[:1]
    elif func._schema.name in SCATTERS:
        read[:1] = written = read[-1:]
    return sum(_touched(tensor) for tensor in (*read, *written))


def _allocated(given: list[Tensor], out: Any) -> int:
    old = {tensor.untyped_storage()._cdata for tensor in given}
    new = {
        t.untyped_storage()._cdata: t.untyped_storage().nbytes()
        for t in _tensors(out)
        if _is_strided(t)
    }
    return sum(size for storage, size in new.items() if storage not in old)


def _on_cpu(tensors: list[Tensor]) -> bool:
    return all(tensor.device.type == "cpu" for tensor in tensors)


def _is_strided(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided


def _touched(tensor: Tensor) -> int:
    """Bytes of `tensor` in memory; an expanded dimension is there once."""
    sizes = [
        size
        for size, step in zip(tensor.shape, tensor.stride(), strict=True)
        if step != 0 or size == 0
    ]
    return math.prod(sizes) * tensor.element_size()


def _tensors(out: Any) -> Iterator[Tensor]:
    for item in out if isinstance(out, (list, tuple)) else (out,):
        if isinstance(item, Tensor) and item.layout is torch.strided:
            yield item

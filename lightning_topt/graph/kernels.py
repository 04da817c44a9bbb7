"""Low-level operator calls: what they cost, how they are written down and made again on a device.

quantity   rule                                                           source
flops      2 per multiply-add of matrix products, convolutions,           torch.utils.flop_counter,
           attention (causal: of one half of the scores); otherwise 0     `_extra_formulas`
bytes      every tensor read and every tensor written, once               roofline convention
allocated  the storages of the results that are not those of arguments,   torch's allocators;
           and what convolutions copy again for each of their passes      measured: page faults
workspace  convolutions on CPU copy their arguments into oneDNN's         measured: at most that
           blocked layouts                                                much
saved      recurrent layers of oneDNN and cuDNN keep a workspace for      measured (oneDNN), see
           backward, of no size in shapes                                 `hidden_bytes`

`measure` returns these of a call that has run; `make_call` makes it again on invented arguments,
where `is_replayable` allows that. Dispatch modes ask the rest: whether a call makes views only
(`is_view`), which tensors it writes to (`written_tensors`), whether it communicates
(`is_collective`).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.library import Library
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from lightning_topt.graph.op_graph import Kernel
from lightning_topt.graph.structures import tensors_in

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
# Overwrite their first argument, or need its shape only.
UNREAD = {
    f"aten::{name}"
    for name in (
        *("fill_", "zero_", "copy_", "bernoulli_", "uniform_", "normal_"),
        *("ones_like", "zeros_like", "full_like", "rand_like", "randn_like"),
        *("new_zeros", "new_ones", "new_full"),
    )
}
# oneDNN's convolutions, which hold copies of their arguments while they run.
REORDERED = {"aten::convolution", "aten::convolution_backward"}
# Arguments that a CUDA operator reads in host memory.
_ON_HOST = {
    "aten::_scaled_dot_product_efficient_attention_backward": ("philox_seed", "philox_offset")
}
# Per unit and step of a sample, by cuDNN's number of the kind: of ReLU, tanh, LSTM and GRU.
_CUDNN_VALUES = (2, 2, 6, 5)
_CHANNEL_BLOCK = 16  # floats of a 512-bit register
_WIDEST_HEAD = 256  # of flash attention
# Allocate and touch nothing.
ALLOCATIONS = {
    *("aten::empty", "aten::empty_like", "aten::empty_strided", "aten::empty_permuted"),
    *("aten::new_empty", "aten::new_empty_strided"),
}
# Compute nothing, and are asked all the time.
QUERIES = {"prim::device", "prim::layout", "aten::sym_size", "aten::sym_stride", "aten::sym_numel"}
# Update running statistics (arguments 3 and 4) when training (argument 5).
BATCH_NORMS = {"aten::native_batch_norm", "aten::cudnn_batch_norm", "aten::miopen_batch_norm"}
SEEN = "topt.collective_.default"
NAMESPACES = {"c10d", "_c10d_functional", "_c10d_functional_autograd", "symm_mem"}
# An operator that does nothing, and stands for a collective along a tensor axis (by its index)
# while the step of one rank is captured.
LIBRARY = Library("topt", "DEF")
LIBRARY.define("collective_(Tensor(a!) tensor, str op, int axis) -> ()")
LIBRARY.impl("collective_", lambda tensor, op, axis: None, "CompositeExplicitAutograd")


# ---- costs ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Measured:
    """One low-level call at one batch size; `arguments` as `encode_arguments` writes them."""

    name: str
    arguments: Any
    flops: float
    bytes: float
    allocated: float = 0.0
    workspace: float = 0.0


def measure(
    func: OpOverload, args: tuple[object, ...], kwargs: dict[str, object], out: object
) -> Measured:
    """Return the FLOPs and bytes of the call ``func(*args, **kwargs)`` that returned `out`.

    A collective computes nothing.
    """
    if is_collective(func):
        return Measured(str(func), {"args": [], "kwargs": {}}, 0.0, 0.0)
    formula = FLOPS.get(func._overloadpacket)
    flops = float(formula(*args, **kwargs, out_val=out)) if formula else 0.0
    if flops and _is_causal(func, args, kwargs):
        flops /= 2
    given: list[Tensor] = []
    freeze((args, tuple(kwargs.values())), given)
    old = {tensor.untyped_storage()._cdata for tensor in given}
    new = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in _tensors(out)}
    # results whose storages are not those of arguments
    allocated = float(sum(size for storage, size in new.items() if storage not in old))
    size, workspace = float(_bytes(func, given[:], out)), 0.0
    if all(tensor.device.type == "cpu" for tensor in given):
        workspace = float(_workspace(func, args, given, out))
        allocated += float(_copied_again(func, args, given, out))
    return Measured(str(func), encode_arguments(args, kwargs), flops, size, allocated, workspace)


def _is_causal(func: OpOverload, args: tuple[object, ...], kwargs: dict[str, object]) -> bool:
    # Whether the call is attention that leaves out later positions. Kernels pass over them; torch
    # counts all.
    place = _argument_place(func, "is_causal")
    if place is None:
        return False
    return bool(args[place] if place < len(args) else kwargs.get("is_causal", False))


@functools.cache
def _argument_place(func: OpOverload, name: str) -> int | None:
    # The place of an argument of `func`, None where it has none of this name
    names = [argument.name for argument in func._schema.arguments]
    return names.index(name) if name in names else None


def hidden_bytes(func: OpOverload, args: tuple[Any, ...]) -> tuple[int, float]:
    """Return a result of the call (-1: the last) and the bytes that it has beyond its shape.

    That is the workspace of recurrent layers, which stays resident after forward. Of oneDNN's LSTM
    8 floats per step, sample and hidden unit (measured: 320 units, 800 steps of samples). Of cuDNN
    what backward needs per step, sample, unit, direction and layer: each gate, and of an LSTM the
    cell and the output, of a GRU its hidden part and the output.
    """
    if func._schema.name == "aten::mkldnn_rnn_layer":
        x, w_hidden = args[0], args[2]  # (step, sample, input), (4 * unit, unit)
        return -1, float(32 * math.prod(x.shape[:2]) * w_hidden.shape[1])
    if func._schema.name == "aten::_cudnn_rnn" and args[12]:
        x, (mode, units), (layers, is_both_ways) = args[0], args[6:8], (args[9], args[13])
        values = _CUDNN_VALUES[mode] * units * layers * (2 if is_both_ways else 1)
        return 3, float(math.prod(x.shape[:-1]) * values * x.element_size())
    return -1, 0.0


def _bytes(func: OpOverload, read: list[Tensor], out: object) -> int:
    # The bytes read and written; `read` are the tensors among the arguments
    written = list(_tensors(out))
    if func._schema.name in LOOKUPS:
        read[:1] = written
    elif func._schema.name in UNREAD:
        del read[:1]
    elif func._schema.name in SCATTERS:
        read[:1] = written = read[-1:]
    return sum(_touched(tensor) for tensor in (*read, *written))


def _workspace(func: OpOverload, args: tuple[Any, ...], given: list[Tensor], out: object) -> float:
    # The bytes that a CPU kernel takes for copies while it runs
    name = func._schema.name
    if name in REORDERED:
        is_backward = name.endswith("backward")
        transposed = args[7 if is_backward else 6]
        results = [] if is_backward else list(_tensors(out))
        # All arguments but the bias are copied; the result too where its channels do not fill the
        # layout's blocks, and of a transposed convolution.
        copied = [t for t in results if transposed or t.shape[1] % _CHANNEL_BLOCK]
        return sum(map(_blocked, [t for t in given if t.ndim > 1] + copied))
    if name in ("aten::mkldnn_rnn_layer", "aten::mkldnn_rnn_layer_backward"):
        x, w_input, w_hidden = args[:3]
        copies = 4.0 * (w_input.numel() + w_hidden.numel())
        # what only backward touches
        rest = 4.0 * math.prod(x.shape[:2]) * (5 * w_hidden.shape[1] + 2 * x.shape[2])
        return float(copies + rest if name.endswith("backward") else copies)
    return 0.0


def _copied_again(
    func: OpOverload, args: tuple[Any, ...], given: list[Tensor], out: object
) -> float:
    # What a convolution takes and gives back before or after its `_workspace`. oneDNN copies all
    # tensors for each pass: forward is one pass, backward one for the input and one for the weight.
    # Counted as page faults.
    name = func._schema.name
    # argument 6: transposed; 10: which gradients are wanted (input, weight, bias)
    if name == "aten::convolution":
        return sum(
            _blocked(t) for t in _tensors(out) if not (args[6] or t.shape[1] % _CHANNEL_BLOCK)
        )
    if name == "aten::convolution_backward" and all(args[10][:2]):
        return sum(_blocked(t) for t in given if t.ndim > 1)
    return 0.0


def _blocked(tensor: Tensor) -> int:
    # The bytes of (sample, channel, ...) with channels padded to full blocks
    channels = max(tensor.shape[1], 1)
    return _touched(tensor) // channels * -(-channels // _CHANNEL_BLOCK) * _CHANNEL_BLOCK


def _touched(tensor: Tensor) -> int:
    # The bytes of `tensor` in memory; an expanded dim is there once
    sizes = [
        size
        for size, step in zip(tensor.shape, tensor.stride(), strict=True)
        if step != 0 or size == 0
    ]
    return math.prod(sizes) * tensor.element_size()


def _tensors(out: object) -> Iterator[Tensor]:
    for item in out if isinstance(out, (list, tuple)) else (out,):
        if isinstance(item, Tensor) and item.layout is torch.strided:
            yield item


# ---- arguments as values -------------------------------------------------------------------------


def freeze(value: object, tensors: list[Tensor]) -> Frozen:
    """Return `value` as nested tuples which are equal only for equal calls.

    Its tensors are appended to `tensors`.
    """
    if isinstance(value, Tensor):
        if value.layout is not torch.strided:
            return ("opaque", f"{value.layout} tensor", tuple(value.shape), str(value.dtype))
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


def thaw(value: Frozen) -> object:
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


def encode_arguments(args: tuple[object, ...], kwargs: dict[str, object]) -> object:
    """Return the arguments of a low-level call as a JSON value.

    Tensors are written by shape, stride (in elements) and dtype, without values.
    """
    return {
        "args": [thaw(freeze(value, [])) for value in args],
        "kwargs": {name: thaw(freeze(value, [])) for name, value in kwargs.items()},
    }


# ---- calls made again ----------------------------------------------------------------------------


def make_call(kernel: Kernel, device: torch.device | str) -> Callable[[], None]:
    """Return a function that makes the call of `kernel` on `device`.

    Its tensors have the same shapes, strides and dtypes. Floating-point ones are uniform in [0, 1),
    all others zero, which is a valid index and mask. A call with random numbers uses the device's
    generator.

    Raises:
        ValueError: the operator is not known here, might misread invented values (see
            `is_replayable`), or has an argument that cannot be made again; the function raises it
            when the operator does not exist for `device`.
    """
    namespace, name, overload = kernel.name.split(".")
    if name in _RECURRENT and namespace == "aten":
        return _recurrent_call(kernel.arguments["args"], torch.device(device), _RECURRENT[name])
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
    target, on_host = torch.device(device), _ON_HOST.get(func._schema.name, ())
    args = [
        _revive(value, torch.device("cpu") if declared.name in on_host else target)
        for value, declared in zip(kernel.arguments["args"], func._schema.arguments, strict=False)
    ]
    kwargs = {key: _revive(value, target) for key, value in kernel.arguments["kwargs"].items()}

    def call() -> None:
        with torch.no_grad():
            try:
                func(*args, **kwargs)
            except NotImplementedError as error:
                raise ValueError(f"operator {kernel.name} does not run on {target}") from error

    return call


# cuDNN's recurrent layers. A workspace of no size in shapes goes from one to the other, so a module
# makes the calls; by what a gradient is asked of besides, in the arguments of the second.
_RECURRENT = {"_cudnn_rnn": 0, "_cudnn_rnn_backward": 4}
_MODES = ("relu", "tanh", "lstm", "gru")


def _recurrent_call(arguments: list[Any], device: torch.device, more: int) -> Callable[[], None]:
    # A call of recurrent layers; with `more` arguments before the mode, of their gradients. Many
    # small kernels that the host launches one by one: it is timed with them, as it may be what
    # takes long.
    given = [_revive(value, device) for value in (*arguments[:2], *arguments[4:6])]
    x, weights, hidden, cells = given
    mode, units, projected, layers, batch_first, dropout, train, both_ways, sizes = arguments[
        6 + more : 15 + more
    ]
    if sizes or (train and _revive(dropout, device)):
        raise ValueError("recurrent layers with dropout or of packed sequences are not made again")
    kind = {"lstm": nn.LSTM, "gru": nn.GRU}.get(_MODES[mode], nn.RNN)
    options: dict[str, Any] = {"nonlinearity": _MODES[mode]} if kind is nn.RNN else {}
    options |= {"proj_size": projected} if kind is nn.LSTM else {}
    options |= {"bias": len(weights) > (2 + (projected > 0)) * layers * (1 + both_ways)}
    module = kind(
        *(x.shape[-1], units, layers),
        **options,
        batch_first=batch_first,
        bidirectional=both_ways,
        device=device,
        dtype=x.dtype,
    )
    state = hidden if cells is None else (hidden, cells)
    if not more:

        def forward() -> None:
            with torch.no_grad():
                module(x, state)

        return forward
    with torch.enable_grad():
        output, _ = module(x.requires_grad_(), state)
    gradient, inputs = torch.ones_like(output), (x, *module.parameters())

    def backward() -> None:
        torch.autograd.grad(output, inputs, gradient, retain_graph=True)

    return backward


def _revive(value: object, device: torch.device) -> Any:
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


# ---- what dispatch modes ask ---------------------------------------------------------------------


@functools.cache
def is_view(func: OpOverload) -> bool:
    """Return whether `func` returns views of its inputs and touches no element."""
    schema = func._schema
    if schema.name in UNDECLARED_VIEWS:
        return True
    aliases = [result.alias_info for result in schema.returns]
    return bool(aliases) and all(alias is not None and not alias.is_write for alias in aliases)


def is_strided(tensor: Tensor) -> bool:
    """Return whether `tensor` is plain memory: not sparse, nested or packed for a library."""
    return tensor.layout is torch.strided


def written_tensors(
    func: OpOverload, args: tuple[object, ...], kwargs: dict[str, object]
) -> list[Tensor]:
    """Return the strided tensors among the arguments that ``func(*args, **kwargs)`` may write to.

    These are also running statistics, and what a collective is given, of which schemas say nothing.
    """
    written = [
        args[i] if i < len(args) else kwargs.get(name) for i, name in _written_arguments(func)
    ]
    if func._schema.name in BATCH_NORMS and args[5]:
        written += args[3:5]
    if is_collective(func):
        written.append(args)
    return [tensor for tensor in tensors_in(written) if is_strided(tensor)] if written else []


@functools.cache
def _written_arguments(func: OpOverload) -> tuple[tuple[int, str], ...]:
    # (position, name) of the arguments that the schema of `func` marks as written
    return tuple(
        (index, argument.name)
        for index, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )


def is_collective(func: OpOverload) -> bool:
    """Return whether `func` communicates with other ranks."""
    return func.namespace in NAMESPACES


def skip_collective(func: OpOverload, args: tuple[object, ...], kwargs: dict[str, object]) -> Any:
    """Return what `func` returns, but send nothing.

    Outputs stay as they are, and the work is finished: a capture on fake tensors runs on one rank,
    so no collective may wait for others.
    """
    if func.namespace != "c10d":  # functional collectives have shape-only kernels
        return func(*args, **kwargs)
    results = [
        torch._C._distributed_c10d.FakeWork().boxed() if "Work" in str(result.type) else args[0]
        for result in func._schema.returns
    ]
    return results[0] if len(results) == 1 else tuple(results) or None


def show_collective(tensor: Tensor, *, op: str, axis: int) -> None:
    """Let a capture see that ranks along tensor axis `axis` run the collective `op`.

    `tensor` is the larger one of what is given and received.
    """
    torch.ops.topt.collective_(tensor, op, axis)


def shown_collective(kernel: Kernel) -> tuple[str, int] | None:
    """Return the op and tensor axis of a kernel that `show_collective` made.

    None for other kernels.
    """
    if kernel.name != SEEN:
        return None
    _, op, axis = kernel.arguments["args"]
    return op, axis


# ---- operators that may run on invented arguments ------------------------------------------------


@functools.cache
def is_replayable(func: OpOverload) -> bool:
    """Return whether `func` may be called on tensors of the right shapes with any values.

    A tensor may hold lengths, offsets, packed weights, reserved space or the state of a generator.
    With invented ones a kernel may read or write beyond its memory, and end the process. So what
    may run is listed: arithmetic on dense tensors, and lookups, for which index zero is valid.
    """
    if func.namespace != "aten":
        return False
    return func._schema.name in REPLAYABLE or torch.Tag.pointwise in func.tags


_MATRIX = (
    "mm bmm addmm baddbmm addbmm _addmm_activation dot vdot mv addmv addr ger outer linear "
    "_cdist_forward _scaled_mm"
)
_CONVOLUTION = (
    "convolution convolution_overrideable _convolution mkldnn_convolution cudnn_convolution "
    "miopen_convolution _slow_conv2d_forward slow_conv3d_forward conv_depthwise3d "
    "_conv_depthwise2d convolution_backward convolution_backward_overrideable im2col col2im"
)
_NORMALIZATION = (
    "native_layer_norm native_layer_norm_backward native_group_norm native_group_norm_backward "
    "native_batch_norm native_batch_norm_backward _native_batch_norm_legit "
    "_native_batch_norm_legit_no_training _fused_rms_norm _fused_rms_norm_backward "
    "cudnn_batch_norm _weight_norm_interface _weight_norm_interface_backward"
)
_SOFTMAX = (
    "_softmax _softmax_backward_data _log_softmax _log_softmax_backward_data _safe_softmax "
    "_masked_softmax _masked_softmax_backward logsumexp _logcumsumexp"
)
# of recurrent layers; their products are calls of their own
_CELLS = (
    "_thnn_fused_lstm_cell _thnn_fused_lstm_cell_backward_impl _thnn_fused_gru_cell "
    "_thnn_fused_gru_cell_backward"
)
_ATTENTION = (
    "_scaled_dot_product_flash_attention_for_cpu "
    "_scaled_dot_product_flash_attention_for_cpu_backward _scaled_dot_product_flash_attention "
    "_scaled_dot_product_flash_attention_backward _scaled_dot_product_efficient_attention "
    "_scaled_dot_product_efficient_attention_backward _scaled_dot_product_attention_math "
    "_scaled_dot_product_cudnn_attention _scaled_dot_product_cudnn_attention_backward"
)
_LOSSES = (
    "nll_loss_forward nll_loss_backward nll_loss2d_forward nll_loss2d_backward mse_loss "
    "mse_loss_backward smooth_l1_loss smooth_l1_loss_backward huber_loss huber_loss_backward "
    "binary_cross_entropy binary_cross_entropy_backward binary_cross_entropy_with_logits"
)
_REDUCTIONS = (
    "sum mean prod amax amin max min argmax argmin all any var var_mean std std_mean norm "
    "linalg_vector_norm nansum aminmax count_nonzero median cumsum cumprod logcumsumexp cummax "
    "cummin sort topk"
)
_COPIES = (
    "clone copy copy_ _to_copy contiguous cat stack repeat constant_pad_nd flip roll tril triu "
    "tril_ triu_ diagonal_copy select_backward slice_backward diagonal_backward select_scatter "
    "slice_scatter diagonal_scatter as_strided_copy split_with_sizes_copy unfold_backward "
    "channel_shuffle pixel_shuffle pixel_unshuffle native_channel_shuffle reflection_pad1d "
    "reflection_pad2d reflection_pad3d replication_pad1d replication_pad2d replication_pad3d "
    "reflection_pad1d_backward reflection_pad2d_backward replication_pad1d_backward "
    "replication_pad2d_backward view_as_real view_as_complex _conj_physical"
)
_FILLED = (
    "arange full full_like ones ones_like zeros zeros_like new_full new_ones new_zeros "
    "scalar_tensor eye linspace fill_ zero_ zero fill rand rand_like randn randn_like randint "
    "randint_like bernoulli bernoulli_ uniform_ normal_ random_ exponential_ native_dropout "
    "native_dropout_backward _fused_dropout"
)
_LOOKUPS = (
    "embedding embedding_dense_backward index index_select gather gather_backward index_put "
    "index_put_ _index_put_impl_ _unsafe_index _unsafe_index_put index_add index_add_ index_fill "
    "index_fill_ index_copy index_copy_ scatter scatter_ scatter_add scatter_add_ scatter_reduce "
    "scatter_reduce_ index_select_backward"
)
_POOLING = (
    "max_pool2d_with_indices max_pool2d_with_indices_backward max_pool3d_with_indices "
    "max_pool3d_with_indices_backward avg_pool2d avg_pool2d_backward avg_pool3d "
    "avg_pool3d_backward _adaptive_avg_pool2d _adaptive_avg_pool2d_backward _adaptive_avg_pool3d "
    "_adaptive_avg_pool3d_backward upsample_nearest1d upsample_nearest2d upsample_nearest3d "
    "upsample_nearest1d_backward upsample_nearest2d_backward upsample_nearest3d_backward "
    "upsample_bilinear2d upsample_bilinear2d_backward upsample_linear1d upsample_linear1d_backward "
    "upsample_trilinear3d upsample_trilinear3d_backward upsample_bicubic2d "
    "upsample_bicubic2d_backward _upsample_bilinear2d_aa _upsample_bilinear2d_aa_backward"
)
_GROUPS = (
    _MATRIX,
    _CONVOLUTION,
    _NORMALIZATION,
    _SOFTMAX,
    _ATTENTION,
    _CELLS,
    _LOSSES,
    _REDUCTIONS,
    _COPIES,
    _FILLED,
    _LOOKUPS,
)
REPLAYABLE = {f"aten::{name}" for group in (*_GROUPS, _POOLING) for name in group.split()}


# ---- kernels that an accelerator would run, where a step for it is captured on a CPU -------------
#
# Most operators are the same on every device. Attention is not: on CPUs
# `torch.nn.functional.scaled_dot_product_attention` with dropout takes the path that writes all
# scores, which costs several times the memory. CUDA chooses among these (torch 2.11 to 2.14,
# `sdp_utils.cpp`, defaults):
#
#     half precision, no mask, heads of at most 256     flash attention
#     else, up to four dims                             memory-efficient attention


@dataclass(frozen=True)
class OnAccelerator:
    """The context of a step, made by `forward_context`, as it would run on an accelerator."""

    forward_context: Callable[[], AbstractContextManager[object]]

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Enter both."""
        with self.forward_context(), self.kernels():
            yield

    def kernels(self) -> AbstractContextManager[object]:
        """Return what of it holds for the backward pass as well: which kernels run."""
        return AcceleratorAttention()


class AcceleratorAttention(TorchFunctionMode):
    """Within, attention of fake or meta tensors on a CPU calls the kernel that CUDA would."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is F.scaled_dot_product_attention:
            return _as_on_cuda(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _as_on_cuda(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    if query.dim() != 4:
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    # autocast lowers all that attention is given, as it does for the function that is replaced
    query, key, value = (_lowered(each) for each in (query, key, value))
    if enable_gqa and key.shape[1] != query.shape[1]:  # heads that share keys
        count = query.shape[1] // key.shape[1]
        key, value = (each.repeat_interleave(count, dim=1) for each in (key, value))
    aten = torch.ops.aten
    is_half = query.dtype in (torch.float16, torch.bfloat16)
    if attn_mask is None and is_half and query.shape[-1] <= _WIDEST_HEAD:
        flash = aten._scaled_dot_product_flash_attention
        found: Tensor = flash(query, key, value, dropout_p, is_causal, scale=scale)[0]
        return found
    if attn_mask is not None:
        shape = *query.shape[:3], key.shape[2]
        attn_mask = attn_mask.to(query.dtype).expand(shape)
    efficient = aten._scaled_dot_product_efficient_attention
    found = efficient(query, key, value, attn_mask, True, dropout_p, is_causal, scale=scale)[0]
    return found


def _lowered(tensor: Tensor) -> Tensor:
    # `tensor` in the dtype of autocast where that is on; float64 stays
    kind = tensor.device.type
    if not torch.is_autocast_enabled(kind) or tensor.dtype == torch.float64:
        return tensor
    return tensor.to(torch.get_autocast_dtype(kind))


# ---- FLOPs that torch.utils.flop_counter lacks ---------------------------------------------------


def _attention(query: Tensor, key: Tensor, value: Tensor, *args: object, **kwargs: object) -> int:
    shapes = query.shape, _for_each_head(key, query), _for_each_head(value, query)
    return int(sdpa_flop_count(*shapes))


def _attention_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *args: object, **kwargs: object
) -> int:
    shapes = grad.shape, query.shape, _for_each_head(key, query), _for_each_head(value, query)
    return int(sdpa_backward_flop_count(*shapes))


def _for_each_head(shared: Tensor, query: Tensor) -> tuple[int, ...]:
    # (sample, head, step, channel): in grouped-query attention several heads of queries share one
    return (*shared.shape[:-3], query.shape[-3], *shared.shape[-2:])


def _add_matrices(
    start: Tensor, left: Tensor, right: Tensor, *args: object, **kwargs: object
) -> int:
    return 2 * left.numel() * right.shape[-1]


def _product_of_groups(left: Tensor, right: Tensor, *args: object, **kwargs: object) -> int:
    # each has some of the columns
    groups = left.shape[0] if left.ndim == 3 and right.ndim == 2 else 1
    return 2 * left.numel() // groups * right.shape[-1]


def _rnn_layer(
    x: Tensor, w_input: Tensor, w_hidden: Tensor, *args: object, **kwargs: object
) -> int:
    return 2 * math.prod(x.shape[:-1]) * (w_input.numel() + w_hidden.numel())


def _rnn_layer_backward(*args: Any, **kwargs: Any) -> int:
    return 2 * _rnn_layer(*args)


def _rnn(x: Tensor, weights: Sequence[Tensor], *args: object, **kwargs: object) -> int:
    # (..., input) per step and sample; biases have one dim
    per_sample = sum(weight.numel() for weight in weights if weight.ndim > 1)
    return 2 * math.prod(x.shape[:-1]) * per_sample


def _rnn_backward(*args: Any, **kwargs: Any) -> int:
    return 2 * _rnn(*args)


_ATTENTION = """
    flash_attention efficient_attention cudnn_attention flash_attention_for_cpu
    fused_attention_overrideable
"""


def _extra_formulas() -> dict[object, Callable[..., int]]:
    # The FLOPs of operators that torch.utils.flop_counter lacks. It has some kinds of attention,
    # but does not know heads that share keys.
    formulas: dict[str, Callable[..., int]] = {}
    for kind in _ATTENTION.split():
        formulas[f"_scaled_dot_product_{kind}"] = _attention
        formulas[f"_scaled_dot_product_{kind}_backward"] = _attention_backward
    formulas |= {
        "_addmm_activation": _add_matrices,
        "_grouped_mm": _product_of_groups,
        "_cudnn_rnn": _rnn,
        "_cudnn_rnn_backward": _rnn_backward,
        "mkldnn_rnn_layer": _rnn_layer,
        "mkldnn_rnn_layer_backward": _rnn_layer_backward,
    }
    aten = torch.ops.aten
    return {
        getattr(aten, name): formula for name, formula in formulas.items() if hasattr(aten, name)
    }


# By operator, all overloads alike; a formula takes the call's arguments, and what the call returned
# as `out_val`.
FLOPS: dict[object, Callable[..., int]] = {**flop_registry, **_extra_formulas()}

"""Copies of modules that run once: on fake tensors without memory, or filled on the CPU.

    copied, mode = fake_copy(module, device="cuda")     # shapes only, nothing is allocated
    with mode:
        loss = copied.training_step(batch, 0)           # logs, prints and exchanges nothing

    copied = filled_copy(module)                        # real tensors on the CPU
    module = build_on_meta(make)                        # no memory from the beginning

A copy shares the trainer, data sets and what cannot be copied with its original. Tensors that share
storage (tied weights) share it in the copy. Logging, printing and metrics are silenced, since a
copy must not leave anything behind.
"""

from __future__ import annotations

import collections
import copy
import copyreg
import functools
import threading
import types
from abc import abstractmethod
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    in_kernel_invocation_manager,
)
from torch.distributed import ProcessGroup
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.data import DataLoader, Dataset, Sampler

from lightning_topt.graph.errors import CaptureError
from lightning_topt.graph.kernels import freeze, is_view

T = TypeVar("T", bound=nn.Module)
PACKS = torch.ops.aten._pack_padded_sequence.default
VALUE_NEEDED = (DataDependentOutputException, DynamicOutputShapeException)
SHARED_TYPES: tuple[type, ...] = (
    *(types.ModuleType, types.GeneratorType, ProcessGroup),
    *(type(threading.Lock()), type(threading.RLock())),
)
OWNERS = ("_trainer", "_fabric")  # of a LightningModule
SHARED_BASES = {"LightningDataModule", "Trainer", "Callback", "Logger"}
TENSOR_DATA = Tensor.data.__get__  # type: ignore[attr-defined]
# how to make a tensor: size, stride, dtype, device
Like = tuple[Sequence[int], Sequence[int], torch.dtype, torch.device | None]


def fake_copy(module: T, *, device: torch.device | str = "cpu") -> tuple[T, FakeTensorMode]:
    """Return a deep copy on fake tensors, and the mode under which to run it.

    Nothing is allocated. Tensors of any device, ``meta`` included, become tensors of `device`. Run
    the copy's methods under the returned mode: ``with mode: copy.configure_optimizers()``. On the
    copy `log`, `log_dict`, `print`, `optimizers`, `lr_schedulers`, `manual_backward` and the
    loggers do nothing; see `copy_module` for what it shares.

    Raises CaptureError, a ValueError, when `module` has lazy parameters that no forward has given a
    shape, or tensors that are not strided.
    """
    _start_autograd()
    mode = ShapeMode(allow_non_fake_inputs=True)
    return copy_module(module, _Fakes(mode, torch.device(device)), fake=True), mode


@functools.cache
def _start_autograd() -> None:
    # Let the engine of autograd count its devices before a mode of fake tensors is entered. Under
    # such a mode torch 2.14, built with CUDA, sees eight devices where it has none. A first
    # backward there would start a thread for each, and forks of this process could run no other.
    with torch.inference_mode(False), torch.enable_grad():
        torch.zeros((), requires_grad=True).backward()


def filled_copy(module: T) -> T:
    """Return a deep copy with memory of its own on the CPU.

    It has the values of `module`, zeros where that is on the meta device.
    """
    return copy_module(module, _Filled(torch.device("cpu")), fake=False)


def build_on_meta(make: Callable[[], T]) -> T:
    """Return the module that `make` makes, on the meta device where its constructor allows it.

    A constructor that reads the value of a tensor (`item`, `tolist`, `numpy`, a branch on it) or
    mixes devices raises there: it runs again with real tensors. Raises what it then raises.
    ``is_on_meta`` says which of the two happened; a module on meta can be captured, but runs no
    real step.
    """
    try:
        with torch.device("meta"):
            return make()
    except Exception:  # whatever a constructor makes of a tensor without values
        return make()


def is_on_meta(module: nn.Module) -> bool:
    """Return whether any parameter or buffer of `module` has no memory."""
    return any(tensor.is_meta for tensor in (*module.parameters(), *module.buffers()))


# ---- copying -------------------------------------------------------------------------------------


def copy_module(module: T, copies: TensorCopies, *, fake: bool) -> T:
    """Return a deep copy of `module` with its tensors converted by `copies`, which logs nothing.

    The trainer, data sets and any attribute that cannot be copied are shared. With `fake` metrics
    and synchronized batch normalization, which need values, do without them. Raises CaptureError
    for lazy parameters without a shape.
    """
    # what is shared is its own copy; tensors are converted before all else
    memo: dict[int, object] = {id(value): value for value in _shared(module)}
    for submodule in module.modules():
        for name, tensor in (*submodule._parameters.items(), *submodule._buffers.items()):
            if isinstance(tensor, (nn.UninitializedParameter, nn.UninitializedBuffer)):
                raise CaptureError(
                    f"{type(submodule).__name__} has a lazy parameter {name!r} without a shape; "
                    "run one batch through the module before it is planned"
                )
            if tensor is not None and id(tensor) not in memo:
                memo[id(tensor)] = copies.convert(tensor)
    with copies, _reducers():
        copied = _deepcopy(module, memo)
    # the copy is as its original, but silent and on its device
    for original, new in zip(module.modules(), copied.modules(), strict=True):
        _adapt(original, new, copies.device)
        quiet_metric(new, forgive=fake)
        if fake and type(new) is nn.SyncBatchNorm:
            new.__class__ = SyncBatchNorm  # type: ignore[assignment]
    silence(copied)
    return copied


class TensorCopies(TorchFunctionMode):
    """Make copies of tensors on `device`; as a mode it does so inside `copy.deepcopy`."""

    def __init__(self, device: torch.device | None) -> None:
        super().__init__()
        self.device = device

    @abstractmethod
    def convert(self, tensor: Tensor) -> Tensor:
        """Return the copy of `tensor`."""

    def __torch_function__(
        self, func: Any, types: object, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is Tensor.__deepcopy__ or func == TENSOR_DATA:
            return self.convert(args[0])
        return func(*args, **(kwargs or {}))


class _Fakes(TensorCopies):
    """Fake copies; each tensor and each storage is made once."""

    def __init__(self, mode: FakeTensorMode, device: torch.device) -> None:
        super().__init__(device)
        self.mode = mode
        self.bases: dict[int, Tensor] = {}

    def convert(self, tensor: Tensor) -> Tensor:
        with torch._C.DisableTorchFunction(), torch.no_grad():
            if tensor.layout is not torch.strided:
                raise CaptureError(
                    f"a tensor with layout {tensor.layout} cannot be captured; give the strategy a "
                    "plan",
                    needs_values=True,
                )
            fake = self._strided(tensor).requires_grad_(tensor.requires_grad)
            if isinstance(tensor, nn.Parameter):
                fake._is_param = True  # as `nn.Parameter` does, after a slow `detach`
        # what users note on a parameter, such as that it has a learning rate of its own.
        vars(fake).update(
            {name: value for name, value in vars(tensor).items() if name not in vars(fake)}
        )
        return fake

    def _strided(self, tensor: Tensor) -> Tensor:
        # A fake tensor of the same shape and strides, on a shared storage if shared
        storage = tensor.untyped_storage()
        if isinstance(tensor, nn.Parameter) and tensor.numel() > 1 and not any(tensor.stride()):
            # One element in the place of a parameter that another rank keeps.
            stride = contiguous_stride(tensor.shape)
            return empty_fake(self.mode, like=(tensor.shape, stride, tensor.dtype, self.device))
        # a tensor with memory of its own; views and tied ones share a base, made below
        if storage.nbytes() == tensor.nbytes and storage._cdata not in self.bases:
            fake = empty_fake(
                self.mode, like=(tensor.shape, tensor.stride(), tensor.dtype, self.device)
            )
            self.bases[storage._cdata] = fake
            return fake
        with self.mode:
            if storage._cdata not in self.bases:
                self.bases[storage._cdata] = torch.empty(
                    storage.nbytes(), dtype=torch.uint8, device=self.device
                )
            shared = self.bases[storage._cdata].untyped_storage()
            view = torch.empty(0, dtype=tensor.dtype, device=self.device)
            return view.set_(shared, tensor.storage_offset(), tensor.shape, tensor.stride())


class _Filled(TensorCopies):
    """Copies with memory of their own."""

    def convert(self, tensor: Tensor) -> Tensor:
        with torch._C.DisableTorchFunction(), torch.no_grad():
            new = torch.empty_like(tensor, device=self.device)
            new = new.zero_() if tensor.is_meta else new.copy_(tensor)
            if isinstance(tensor, nn.Parameter):
                return nn.Parameter(new, requires_grad=tensor.requires_grad)
            return new.requires_grad_(tensor.requires_grad)


def _shared(module: nn.Module) -> Iterator[object]:
    for submodule in module.modules():
        # by name (a trainer), or by class (a data set)
        for name, value in vars(submodule).items():
            if value is not None and (name in OWNERS or _is_shared(value.__class__)):
                yield value


@functools.cache
def _is_shared(cls: type) -> bool:
    if issubclass(cls, nn.Module):
        return False
    of_lightning = any(
        base.__name__ in SHARED_BASES and "lightning" in base.__module__ for base in cls.__mro__
    )
    return of_lightning or issubclass(cls, (Dataset, DataLoader, Sampler))


def _deepcopy(module: T, memo: dict[int, object]) -> T:
    # Do `copy.deepcopy`, and share every attribute that cannot be copied. The search for these
    # attributes is slow, so it runs only where the plain call fails.
    try:
        return copy.deepcopy(module, dict(memo))
    except Exception:
        # submodules stand for themselves here: each attribute is tried without what it leads to
        visited = {id(submodule): submodule for submodule in module.modules()}
        for submodule in visited.values():
            for value in vars(submodule).values():
                if not _copyable(value, {**memo, **visited}):
                    memo[id(value)] = value
        return copy.deepcopy(module, memo)


def _copyable(value: object, memo: dict[int, object]) -> bool:
    # Whether `value` itself can be copied, whatever it leads to in `memo`
    try:
        copy.deepcopy(value, memo)
    except Exception:
        return False
    return True


@contextmanager
def _reducers() -> Iterator[None]:
    # Teach `copy.deepcopy` to share what it cannot copy, and to copy generators of torch

    def share(value: object) -> str:
        return "shared"  # a string means that the object is its own copy

    def draw_alike(value: Any) -> tuple[Any, ...]:
        return functools.partial(_generator_like, value), ()

    table: dict[type, Callable[[Any], Any]] = dict.fromkeys(SHARED_TYPES, share)
    table[torch.Generator] = draw_alike
    # what a user has registered stays
    new = {cls: function for cls, function in table.items() if cls not in copyreg.dispatch_table}
    copyreg.dispatch_table.update(new)
    try:
        yield
    finally:
        for cls in new:
            del copyreg.dispatch_table[cls]


def _generator_like(generator: torch.Generator) -> torch.Generator:
    # A generator of torch with the same state. `copy.deepcopy` would set a fake state, which fails
    # without an error.
    made = torch.Generator(device=generator.device)
    made.set_state(generator.get_state())
    return made


def _adapt(original: nn.Module, new: nn.Module, device: torch.device | None) -> None:
    # Give the copy its trainer back, its device, and eager execution
    attributes = vars(new)
    for name in OWNERS:
        if name in vars(original):
            attributes[name] = vars(original)[name]
    if device is not None and isinstance(attributes.get("_device"), torch.device):
        attributes["_device"] = device
    # compiled code would run the original's tensors
    for name, value in [*attributes.items()]:
        if isinstance(value, types.FunctionType):
            method: Any = getattr(value, "_torchdynamo_orig_callable", None)
            if getattr(method, "__self__", None) is original:
                attributes[name] = types.MethodType(method.__func__, new)


class SyncBatchNorm(nn.modules.batchnorm._BatchNorm):
    """Synchronized batch normalization without other ranks.

    It normalizes over the batch of one rank, which is as much work; no statistics are exchanged.
    """

    def _check_input_dim(self, input: Tensor) -> None:
        pass


# ---- silence -------------------------------------------------------------------------------------


def silence(module: nn.Module) -> None:
    """Let everything in a copy that logs, prints or optimizes do nothing.

    These are `log`, `log_dict`, `print`, `optimizers`, `lr_schedulers`, `manual_backward` and the
    loggers of a LightningModule.
    """
    silent = _Silent()
    # on this object: its class is that of the original too
    for name in ("log", "log_dict", "print", "manual_backward"):
        if hasattr(module, name):
            vars(module)[name] = _nothing
    for name in ("optimizers", "lr_schedulers"):
        if hasattr(module, name):
            vars(module)[name] = silent
    # Loggers are properties, which only a class can replace.
    cls = type(module)
    loggers = {
        name: _in_place_of(getattr(cls, name), value)
        for name, value in (("logger", silent), ("loggers", [silent]))
        if hasattr(cls, name)
    }
    if loggers:
        module.__class__ = type(cls.__name__, (cls,), {**loggers, "__module__": cls.__module__})


def _in_place_of(own: Any, value: Any) -> Any:
    # A property that is `value`, after what `own` reads, which somebody may note
    if not isinstance(own, property) or own.fget is None:
        return value
    read = own.fget
    return property(lambda copied: (read(copied), value)[1])


class _Silent:
    """Stands for a logger, optimizer or scheduler: attributes and calls give itself."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return collections.defaultdict(float) if name in ("state", "defaults") else self

    def __call__(self, *args: object, **kwargs: object) -> Any:
        return self

    def __getitem__(self, key: object) -> Any:
        return self

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *args: object) -> None:
        return None

    @property
    def param_groups(self) -> list[dict[str, float]]:
        return [collections.defaultdict(float)]


def _nothing(*args: object, **kwargs: object) -> None:
    return None


def quiet_metric(module: nn.Module, *, forgive: bool) -> None:
    """Keep a torchmetrics metric from checking values and from waiting for other ranks.

    Other modules are left as they are. `forgive`: it gives zero from the first time on that it
    depends on values, since gradients do not depend on metrics.
    """
    if not runs_metrics(module):
        return
    for name in ("_enable_compute_groups", "validate_args", "sync_on_compute", "dist_sync_on_step"):
        if name in vars(module):
            vars(module)[name] = False
    if not forgive or not is_metric(module):
        return

    # shared by the three methods below: once one gives up, all do
    given_up: list[bool] = []

    def forgiving(method: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            try:
                return torch.zeros(()) if given_up else method(*args, **kwargs)
            except VALUE_NEEDED:
                given_up.append(True)
                return torch.zeros(())

        return run

    for name in ("update", "forward", "compute"):
        vars(module)[name] = forgiving(getattr(module, name))


def runs_metrics(module: nn.Module) -> bool:
    """Return whether `module` is a metric of torchmetrics or a collection of them."""
    return is_metric(module, ("Metric", "MetricCollection"))


def is_metric(module: nn.Module, names: tuple[str, ...] = ("Metric",)) -> bool:
    """Return whether `module` is a metric of torchmetrics, or another of its classes in `names`."""
    bases = type(module).__mro__
    return any(
        base.__name__ in names and base.__module__.startswith("torchmetrics") for base in bases
    )


# ---- fake tensors --------------------------------------------------------------------------------


class ShapeMode(FakeTensorMode):
    """A fake mode that remembers shapes, and knows those which torch 2.13 refuses without memory.

    These are products of groups in other dtypes than bfloat16, which run all the same; and the
    gradients of cuDNN's recurrent layers, for which torch would run the kernel.

    [Note: known shapes] An operator that was called with tensors of the same shapes returns
    tensors like those it returned then. They are made at once: torch's own cache takes three times
    as long to describe the arguments.
    """

    def dispatch(
        self, func: OpOverload, types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        """Return the fake result of `func`."""
        if func is torch.ops.aten._grouped_mm.default and args[0].dtype != torch.bfloat16:
            left, right = args[0], args[1]
            groups: tuple[int, ...] = ()
            # rows and columns of each group; by `offs` the summed dim is in groups
            if left.ndim == right.ndim:
                groups = (left.shape[0] if left.ndim == 3 else args[2].shape[0],)
            shape = *groups, left.shape[-2], right.shape[-1]
            stride = contiguous_stride(shape)
            return empty_fake(self, like=(shape, stride, left.dtype, left.device))
        if func is torch.ops.aten._cudnn_rnn_backward.default:
            return self._recurrent_gradients(args)
        if func is PACKS and not isinstance(args[1], FakeTensor):
            return self._packed(args[0], args[1])
        tensors: list[Tensor] = []
        if (key := self._key(func, args, kwargs or {}, tensors)) is None:
            return super().dispatch(func, types, args, kwargs)
        if key in _RESULTS:
            return self._made(_RESULTS[key], tensors)
        out = super().dispatch(func, types, args, kwargs)
        if (result := _result_like(out, func, tensors)) is not None:
            if len(_RESULTS) >= _MOST_RESULTS:
                _RESULTS.clear()
            _RESULTS[key] = result
        return out

    def _key(
        self, func: OpOverload, args: Any, kwargs: dict[str, Any], tensors: list[Tensor]
    ) -> Hashable | None:
        # All of a call that decides what its results are like; None where values do, too. Its
        # tensors are appended to `tensors`.
        if not _depends_on_shapes(func):
            return None
        given = freeze((args, *kwargs.items()), tensors)
        for tensor in tensors:
            if isinstance(tensor, FakeTensor):
                is_known = tensor.fake_mode is self and tensor.constant is None
            else:  # a real number may stand for one of Python, which has less to say of the dtype
                is_known = tensor.ndim > 0
            if not is_known or tensor.is_conj() or tensor.is_neg():
                return None
        # a view begins where its base does
        offset = tensors[0].storage_offset() if tensors and is_view(func) else 0
        places = tuple((type(tensor), tensor.device) for tensor in tensors)
        where = offset, places, kwargs.get("device"), torch.get_default_dtype()
        return (func, given, *where) if tensors else None

    def _made(self, result: _Result, tensors: Sequence[Tensor]) -> Any:
        kind, parts = result
        made: list[Tensor | int | None] = []
        with in_kernel_invocation_manager(self):
            for part in parts:
                if not isinstance(part, tuple):
                    made.append(part)
                    continue
                (size, stride, dtype, device), base, offset = part
                if base is None:
                    new = torch.empty_strided(size, stride, dtype=dtype, device="meta")
                else:
                    new = torch.as_strided(tensors[base], size, stride, offset)
                made.append(FakeTensor(self, new, device))
        return made[0] if kind is None else kind(made)

    def _recurrent_gradients(self, args: Sequence[Any]) -> tuple[Any, ...]:
        # Gradients of the input, both states and the weights. cuDNN computes the former whether or
        # not the mask asks for them.
        # by their places in the operator's schema
        x, weights, states, wanted = args[0], args[1], args[4:6], args[21]
        found = [None if tensor is None else self._dense(tensor) for tensor in (x, *states)]
        return *found, [self._dense(weight) for weight in weights] if wanted[3] else []

    def _packed(self, padded: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        # (steps, batch, ...) or (batch, steps, ...) -> (sum of lengths, ...); sequences per step
        steps = torch.arange(int(lengths.max()))
        packed = padded.new_empty(int(lengths.sum()), *padded.shape[2:])
        return packed, (lengths > steps[:, None]).sum(1)

    def _dense(self, tensor: Tensor) -> Tensor:
        like = (tensor.shape, contiguous_stride(tensor.shape), tensor.dtype, tensor.device)
        return empty_fake(self, like=like)


# of a tensor: what it is like; of a view the place of its base among the tensors of the call, and
# its offset
_Part = tuple[Like, int | None, int]
# what an operator returns: one of these (None), or a list or tuple of some
_Result = tuple[Callable[[list[Any]], Any] | None, list[_Part | int | None]]
_RESULTS: dict[Hashable, _Result] = {}  # of calls under all modes
_MOST_RESULTS = 20_000


@functools.cache
def _depends_on_shapes(func: OpOverload) -> bool:
    # Whether `func` only makes tensors, whose shapes follow from those of its arguments
    if not isinstance(func, OpOverload) or func.namespace != "aten" or func._schema.is_mutable:
        return False
    values = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
    return func not in FakeTensorMode.lift_fns and values.isdisjoint(func.tags)


def _result_like(out: Any, func: OpOverload, tensors: Sequence[Tensor]) -> _Result | None:
    # How to make `out` once more without `func`; None where that is not known
    kind = list if isinstance(out, list) else tuple if isinstance(out, tuple) else None
    parts: list[_Part | int | None] = []
    memories = {tensor.untyped_storage()._cdata: n for n, tensor in enumerate(tensors)}
    for tensor in (out,) if kind is None else out:
        if tensor is None or type(tensor) is int:
            parts.append(tensor)
            continue
        if type(tensor) is not FakeTensor or tensor.layout is not torch.strided:
            return None
        if tensor.constant is not None or tensor.is_conj() or tensor.is_neg():
            return None
        memory, offset = tensor.untyped_storage(), int(tensor.storage_offset())
        base, size, stride = memories.get(memory._cdata), tensor.shape, tensor.stride()
        if is_view(func):
            is_known = base is not None and tensors[base].dtype == tensor.dtype
        else:
            # new memory of its own, no larger than the tensor
            last = sum((n - 1) * step for n, step in zip(size, stride, strict=True))
            needed = (last + 1) * tensor.dtype.itemsize if tensor.numel() else 0
            is_known = base is None and offset == 0 and memory.nbytes() == needed
            memories[memory._cdata] = -1
        if not is_known:
            return None
        parts.append(((size, stride, tensor.dtype, tensor.device), base, offset))
    return kind, parts


def empty_fake(mode: FakeTensorMode, *, like: Like) -> Tensor:
    """Return a new fake tensor of `mode`, without dispatching through it.

    That would take ten times as long.
    """
    size, stride, dtype, device = like
    with _disable_current_modes():
        return FakeTensor(
            mode, torch.empty_strided(size, stride, dtype=dtype, device="meta"), device
        )


def fake_device(func: OpOverload, args: tuple[Any, ...]) -> torch.device | None:
    """Return the answer of `func` where it asks a fake tensor for its device; None for all else.

    Takes a tenth of the time of the call itself.
    """
    if func is not torch.ops.prim.device.default or type(args[0]) is not FakeTensor:
        return None
    return None if args[0].fake_mode.in_kernel_invocation else args[0].fake_device


def contiguous_stride(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides that torch gives a new tensor of this shape.

    No tensor is made, which a mode that is on would see.
    """
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))

"""Deep copies of modules that are made to run once: what they share with the original, what is
adapted.
"""

from __future__ import annotations

import copy
import copyreg
import functools
import threading
import types
from abc import abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.overrides import TorchFunctionMode
from torch.utils.data import DataLoader, Dataset, Sampler

from lightning_topt.graph.errors import WAY_OUT, CaptureError
from lightning_topt.graph.silence import quiet_metric, silence

T = TypeVar("T", bound=nn.Module)
ATOMS = {int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device}
REGISTRIES = ("_parameters", "_buffers", "_modules")

OWNERS = ("_trainer", "_fabric")  # of a LightningModule
SHARED_BASES = {"LightningDataModule", "Trainer", "Callback", "Logger"}
TENSOR_DATA = Tensor.data.__get__  # type: ignore[attr-defined]


class TensorCopies(TorchFunctionMode):
    """Makes copies of tensors on `device`; as a mode it does so inside `copy.deepcopy`."""

    def __init__(self, device: torch.device | None) -> None:
        super().__init__()
        self.device = device

    @abstractmethod
    def convert(self, tensor: Tensor) -> Tensor:
        """Return the copy of `tensor`."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.__deepcopy__ or func == TENSOR_DATA:
            return self.convert(args[0])
        return func(*args, **(kwargs or {}))


def filled_copy(module: T) -> T:
    """Return a deep copy with memory of its own on the CPU: the values of `module`, zeros where it
    is on the meta device.
    """
    return copy_module(module, _Filled(torch.device("cpu")), fake=False)


class _Filled(TensorCopies):
    """Tensors with memory of their own."""

    def convert(self, tensor: Tensor) -> Tensor:
        with torch._C.DisableTorchFunction(), torch.no_grad():
            new = torch.empty_like(tensor, device=self.device)
            new = new.zero_() if tensor.is_meta else new.copy_(tensor)
            if isinstance(tensor, nn.Parameter):
                return nn.Parameter(new, requires_grad=tensor.requires_grad)
            return new.requires_grad_(tensor.requires_grad)


def copy_module(module: T, copies: TensorCopies, *, fake: bool) -> T:
    """Return a deep copy of `module` with its tensors converted by `copies`, which logs and prints
    nothing.

    The trainer, data sets and any attribute that cannot be copied are shared. Iterators that cannot
    be copied are replaced: what they yield to a copy would be lost. With `fake` metrics and
    synchronized batch normalization, which need values, do without them. Raises CaptureError for
    lazy parameters without a shape.
    """
    memo: dict[int, Any] = {id(value): value for value in _shared(module)}
    for submodule in module.modules():
        for name, tensor in (*submodule._parameters.items(), *submodule._buffers.items()):
            if isinstance(tensor, (nn.UninitializedParameter, nn.UninitializedBuffer)):
                raise CaptureError(
                    f"{type(submodule).__name__} has a lazy parameter {name!r} without a shape; "
                    "run one batch through the module before it is planned"
                )
            if tensor is not None and id(tensor) not in memo:
                memo[id(tensor)] = copies.convert(tensor)
    for submodule in reversed(list(module.modules())):  # children before parents
        if (plain := _plain_copy(submodule, memo)) is not None:
            memo[id(submodule)] = plain
    with copies, _reducers():
        copied = _deepcopy(module, memo)
    for original, new in zip(module.modules(), copied.modules(), strict=True):
        _adapt(original, new, copies.device)
        quiet_metric(new, forgive=fake)
        if fake and type(new) is nn.SyncBatchNorm:
            new.__class__ = SyncBatchNorm  # type: ignore[assignment]
    silence(copied)
    return copied


class SyncBatchNorm(nn.modules.batchnorm._BatchNorm):
    """Normalizes over the batch of one rank, which computes as much; statistics are not
    exchanged.
    """

    def _check_input_dim(self, input: Tensor) -> None:
        pass


def _shared(module: nn.Module) -> Iterator[Any]:
    for submodule in module.modules():
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


def _plain_copy(module: nn.Module, memo: Mapping[int, Any]) -> nn.Module | None:
    """Return what `copy.deepcopy` would make of a module whose attributes are plain values, in a
    tenth of its time; else None.

    `memo` has the copies of its tensors and children.
    """
    cls: Any = type(module)
    own = (
        getattr(cls, "__deepcopy__", None),
        cls.__reduce_ex__,
        cls.__reduce__,
        cls.__getstate__,
        cls.__setstate__,
    )
    if own != (
        None,
        object.__reduce_ex__,
        object.__reduce__,
        nn.Module.__getstate__,
        nn.Module.__setstate__,
    ):
        return None
    attributes: dict[str, Any] = {}
    for name, value in vars(module).items():
        kind = type(value)
        if kind in ATOMS:
            attributes[name] = value
        elif kind is OrderedDict and not value:
            attributes[name] = OrderedDict()
        elif (
            name in REGISTRIES
            and kind is dict
            and all(v is None or id(v) in memo for v in value.values())
        ):
            attributes[name] = {
                key: memo[id(item)] if item is not None else None for key, item in value.items()
            }
        elif kind is set and all(type(item) is str for item in value):
            attributes[name] = set(value)
        elif kind is tuple and all(type(item) in ATOMS for item in value):
            attributes[name] = value
        else:
            return None
    copied: nn.Module = cls.__new__(cls)
    vars(copied).update(attributes)
    return copied


def _deepcopy(module: T, memo: dict[int, Any]) -> T:
    """Do `copy.deepcopy`; where it fails, again with every attribute that cannot be copied left as
    it is.
    """
    try:
        return copy.deepcopy(module, dict(memo))
    except Exception:
        visited = {id(submodule): submodule for submodule in module.modules()}
        for submodule in visited.values():
            for value in vars(submodule).values():
                if not _copyable(value, {**memo, **visited}):
                    memo[id(value)] = value
        return copy.deepcopy(module, memo)


def _copyable(value: Any, memo: dict[int, Any]) -> bool:
    """Whether `value` itself can be copied, whatever it leads to in `memo`."""
    try:
        copy.deepcopy(value, memo)
    except Exception:
        return False
    return True


class _UsedUp:
    """Stands for a generator, of which there is only one."""

    def __iter__(self) -> Any:
        return self

    def __next__(self) -> Any:
        raise CaptureError(
            "the training step takes what a generator of the module yields, and a capture would "
            "use it up. " + WAY_OUT
        )

    send = close = __next__


def _generator_like(generator: torch.Generator) -> torch.Generator:
    """A copy with the same state. `copy.deepcopy` would set a fake one, which fails without saying
    so.
    """
    made = torch.Generator(device=generator.device)
    made.set_state(generator.get_state())
    return made


@contextmanager
def _reducers() -> Iterator[None]:
    """Let `copy.deepcopy` share modules of Python, locks and process groups, and replace
    generators, wherever they are.
    """

    def share(value: Any) -> str:
        return "shared"  # a string means that the object is its own copy

    def replace(value: Any) -> tuple[Any, ...]:
        return _UsedUp, ()

    def draw_alike(value: Any) -> tuple[Any, ...]:
        return functools.partial(_generator_like, value), ()

    table: dict[type, Callable[[Any], Any]] = {
        types.ModuleType: share,
        type(threading.Lock()): share,
        type(threading.RLock()): share,
        types.GeneratorType: replace,
        ProcessGroup: share,
        torch.Generator: draw_alike,
    }
    new = {cls: function for cls, function in table.items() if cls not in copyreg.dispatch_table}
    copyreg.dispatch_table.update(new)
    try:
        yield
    finally:
        for cls in new:
            del copyreg.dispatch_table[cls]


def _adapt(original: nn.Module, new: nn.Module, device: torch.device | None) -> None:
    """Give the copy its owners back, its device and eager execution."""
    attributes = vars(new)
    for name in OWNERS:
        if name in vars(original):
            attributes[name] = vars(original)[name]
    if device is not None and isinstance(attributes.get("_device"), torch.device):
        attributes["_device"] = device
    if attributes.get("_compiled_call_impl") is not None:
        attributes["_compiled_call_impl"] = None

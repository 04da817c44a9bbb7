"""Modules and batches whose tensors have shapes but no memory: torch's fake tensors (torch._subclasses.fake_tensor)."""

from __future__ import annotations

import collections
import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from torch.overrides import TorchFunctionMode

T = TypeVar("T", bound=nn.Module)

VALUE_NEEDED = (DataDependentOutputException, DynamicOutputShapeException)
SHARED = ("_trainer", "_fabric")  # a LightningModule's owners
TENSOR_DATA = Tensor.data.__get__  # type: ignore[attr-defined]


def fake_copy(module: T, *, device: torch.device | str = "cpu") -> tuple[T, FakeTensorMode]:
    """A deep copy whose parameters, buffers and other tensors are fake, and the mode under which to run it.

    Nothing is allocated; tensors that share storage in `module` (tied weights) share it in the copy. Tensors of any
    device, ``meta`` included, become tensors of `device`. The trainer, and any attribute that cannot be copied, is
    shared with `module`. On the copy `log`, `log_dict`, `print`, `optimizers`, `lr_schedulers`, `manual_backward` and
    the loggers do nothing. Run the copy's methods under the returned mode: ``with mode: copy.configure_optimizers()``.

    Raises ValueError when `module` has lazy parameters that no forward has given a shape.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    fakes = _Fakes(mode, torch.device(device))
    memo: dict[int, Any] = {id(value): value for value in _owners(module)}
    for submodule in module.modules():
        for name, tensor in (*submodule._parameters.items(), *submodule._buffers.items()):
            if isinstance(tensor, (nn.UninitializedParameter, nn.UninitializedBuffer)):
                raise ValueError(
                    f"{type(submodule).__name__} has a lazy parameter {name!r} without a shape; run one batch through "
                    "the module before it is planned"
                )
            if tensor is not None:
                memo[id(tensor)] = fakes.convert(tensor)
    with fakes:
        copied = _deepcopy(module, memo)
    for original, new in zip(module.modules(), copied.modules(), strict=True):
        _adapt(original, new, fakes.device)
    _silence(copied)
    return copied, mode


class _Fakes(TorchFunctionMode):
    """Makes fake tensors, each tensor and each storage once; as a mode it does so inside `copy.deepcopy`."""

    def __init__(self, mode: FakeTensorMode, device: torch.device) -> None:
        super().__init__()
        self.mode, self.device = mode, device
        self.bases: dict[int, Tensor] = {}

    def convert(self, tensor: Tensor) -> Tensor:
        with torch._C.DisableTorchFunction(), self.mode, torch.no_grad():
            if tensor.layout is not torch.strided:
                raise ValueError(f"a tensor with layout {tensor.layout} cannot be captured; give the strategy a plan")
            fake = self._strided(tensor)
            if isinstance(tensor, nn.Parameter):
                return nn.Parameter(fake, requires_grad=tensor.requires_grad)
            return fake.requires_grad_(tensor.requires_grad)

    def _strided(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.nbytes() == tensor.nbytes and storage._cdata not in self.bases:
            fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=self.device)
            self.bases[storage._cdata] = fake
            return fake
        if storage._cdata not in self.bases:
            self.bases[storage._cdata] = torch.empty(storage.nbytes(), dtype=torch.uint8, device=self.device)
        shared: Any = self.bases[storage._cdata].untyped_storage()
        view = torch.empty(0, dtype=tensor.dtype, device=self.device)
        return view.set_(shared, tensor.storage_offset(), tensor.shape, tensor.stride())

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.__deepcopy__ or func == TENSOR_DATA:
            return self.convert(args[0])
        return func(*args, **(kwargs or {}))


def _owners(module: nn.Module) -> Iterator[Any]:
    for submodule in module.modules():
        for name in SHARED:
            if vars(submodule).get(name) is not None:
                yield vars(submodule)[name]


def _deepcopy(module: T, memo: dict[int, Any]) -> T:
    """`copy.deepcopy`; where it fails, again with every attribute that cannot be copied left as it is."""
    try:
        return copy.deepcopy(module, dict(memo))
    except Exception:
        for submodule in module.modules():
            for value in vars(submodule).values():
                if not _copyable(value, memo):
                    memo[id(value)] = value
        return copy.deepcopy(module, memo)


def _copyable(value: Any, memo: dict[int, Any]) -> bool:
    if isinstance(value, Mapping) and any(isinstance(item, nn.Module) for item in value.values()):
        return True  # the submodules, which are visited themselves
    try:
        copy.deepcopy(value, dict(memo))
    except Exception:
        return False
    return True


def _adapt(original: nn.Module, new: nn.Module, device: torch.device) -> None:
    """Give the copy its owners back, its device, eager execution, and metrics that neither check nor talk."""
    attributes = vars(new)
    for name in SHARED:
        if name in vars(original):
            attributes[name] = vars(original)[name]
    if isinstance(attributes.get("_device"), torch.device):
        attributes["_device"] = device
    if attributes.get("_compiled_call_impl") is not None:
        attributes["_compiled_call_impl"] = None
    if _is_metric(new):
        # Checks read values. Synchronizing waits for other ranks, which do not capture.
        for name in ("validate_args", "sync_on_compute", "dist_sync_on_step"):
            if name in attributes:
                attributes[name] = False
        _forgive(new)


def _is_metric(module: nn.Module) -> bool:
    bases = type(module).__mro__
    return any(base.__name__ == "Metric" and base.__module__.startswith("torchmetrics") for base in bases)


def _forgive(metric: nn.Module) -> None:
    """Let a metric give zero from the first time on that it depends on values; gradients do not depend on metrics."""
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
        vars(metric)[name] = forgiving(getattr(metric, name))


class _Silent:
    """Stands for a logger, an optimizer or a scheduler: every attribute and call gives itself and does nothing."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return collections.defaultdict(float) if name in ("state", "defaults") else self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self

    def __getitem__(self, key: Any) -> Any:
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


def _nothing(*args: Any, **kwargs: Any) -> None:
    return None


def _silence(module: nn.Module) -> None:
    silent = _Silent()
    for name in ("log", "log_dict", "print", "manual_backward"):
        if hasattr(module, name):
            vars(module)[name] = _nothing
    for name in ("optimizers", "lr_schedulers"):
        if hasattr(module, name):
            vars(module)[name] = silent
    # Loggers are properties, which only a class can replace.
    cls = type(module)
    loggers = {name: value for name, value in (("logger", silent), ("loggers", [silent])) if hasattr(cls, name)}
    if loggers:
        module.__class__ = type(cls.__name__, (cls,), {**loggers, "__module__": cls.__module__})

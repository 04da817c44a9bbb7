"""A copy of a module must not log, print, step optimizers, check or synchronize metrics."""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

VALUE_NEEDED = (DataDependentOutputException, DynamicOutputShapeException)


def silence(module: nn.Module) -> None:
    """Let `log`, `log_dict`, `print`, `optimizers`, `lr_schedulers`, `manual_backward` and loggers
    of a copy do nothing.
    """
    silent = _Silent()
    for name in ("log", "log_dict", "print", "manual_backward"):
        if hasattr(module, name):
            vars(module)[name] = _nothing
    for name in ("optimizers", "lr_schedulers"):
        if hasattr(module, name):
            vars(module)[name] = silent
    # Loggers are properties, which only a class can replace.
    cls = type(module)
    loggers = {
        name: value
        for name, value in (("logger", silent), ("loggers", [silent]))
        if hasattr(cls, name)
    }
    if loggers:
        module.__class__ = type(cls.__name__, (cls,), {**loggers, "__module__": cls.__module__})


def quiet_metric(module: nn.Module, *, forgive: bool) -> None:
    """Keep a torchmetrics metric from checking values and from waiting for other ranks; do nothing
    to other modules.

    `forgive`: let it give zero from the first time on that it depends on values; gradients do not
    depend on metrics.
    """
    if not is_metric(module):
        return
    for name in ("validate_args", "sync_on_compute", "dist_sync_on_step"):
        if name in vars(module):
            vars(module)[name] = False
    if forgive:
        _forgive(module)


def runs_metrics(module: nn.Module) -> bool:
    """Return whether `module` is a metric of torchmetrics or a collection of them."""
    return is_metric(module, ("Metric", "MetricCollection"))


def is_metric(module: nn.Module, names: tuple[str, ...] = ("Metric",)) -> bool:
    """Return whether `module` is a metric of torchmetrics, or another of its classes in `names`."""
    bases = type(module).__mro__
    return any(
        base.__name__ in names and base.__module__.startswith("torchmetrics") for base in bases
    )


def _forgive(metric: nn.Module) -> None:
    """Let a metric give zero from the first time on that it depends on values; gradients do not
    depend on metrics.
    """
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
    """Stands for a logger, an optimizer or a scheduler: every attribute and call gives itself and
    does nothing.
    """

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

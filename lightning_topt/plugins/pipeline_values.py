"""Outputs and logged values of microbatches become those of one step, on the last stage, and are
logged on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten
from torchmetrics import Metric

from lightning_topt.graph.structures import map_tensors
from lightning_topt.plugins.metric_states import States

_TOLD = ("log", "print")
_EXTREMES = {"max": max, "min": min}


@dataclass(frozen=True)
class LoggedMetric:
    """A `LoggedMetric` stands for the metric at `path` in a call of `log`; `value` is what its own
    last call returned.
    """

    path: str
    value: Any


@dataclass(frozen=True)
class Call:
    """A `Call` is one of ``log`` or ``print`` of the LightningModule at `path`."""

    path: str
    method: str
    arguments: tuple[Any, ...]
    keywords: dict[str, Any]

    @property
    def name(self) -> Any:
        """Return what is logged."""
        return self.arguments[0] if self.arguments else self.keywords.get("name")

    @property
    def value(self) -> Any:
        """Return the logged value."""
        return self.arguments[1] if len(self.arguments) > 1 else self.keywords.get("value")

    @property
    def reduction(self) -> str:
        """Return how values logged under this name are put together."""
        reduction = self.keywords.get("reduce_fx", "mean")
        return str(getattr(reduction, "__name__", reduction))

    @property
    def averages(self) -> bool:
        """Return whether a number is logged, of which that is the mean."""
        return self.method == "log" and self.reduction not in ("sum", *_EXTREMES)

    def with_value(self, value: Any, *, batch_size: Any) -> Call:
        """Return the same call with another value, and another number of samples where it names
        one.
        """
        keywords = (
            self.keywords if batch_size is None else {**self.keywords, "batch_size": batch_size}
        )
        if len(self.arguments) > 1:
            return replace(
                self, arguments=(self.arguments[0], value, *self.arguments[2:]), keywords=keywords
            )
        return replace(self, keywords={**keywords, "value": value})


@dataclass(frozen=True)
class Told:
    """A `Told` is what a step told: its output, its calls of ``log`` and ``print``, and what its
    metrics counted; or the `problem` that it found.
    """

    output: Any = None
    calls: tuple[Call, ...] = ()
    counted: States = field(default_factory=dict)
    problem: str = ""


@contextmanager
def telling(module: nn.Module, calls: list[Call] | None) -> Generator[None, None, None]:
    """Keep the calls of ``log`` and ``print`` of `module` in `calls`; None: drop them."""
    modules = [
        (path, each)
        for path, each in module.named_modules()
        if isinstance(each, pl.LightningModule)
    ]
    paths = {id(each): path for path, each in module.named_modules() if isinstance(each, Metric)}
    before = [
        {name: vars(each)[name] for name in _TOLD if name in vars(each)} for _, each in modules
    ]
    for path, each in modules:
        vars(each).update({name: _keeper(path, name, calls, paths) for name in _TOLD})
    try:
        yield
    finally:
        for (_, each), of_instance in zip(modules, before, strict=True):
            for name in _TOLD:
                vars(each).pop(name, None)
            vars(each).update(of_instance)


def _keeper(
    path: str, method: str, calls: list[Call] | None, paths: Mapping[int, str]
) -> Callable[..., None]:
    def now(value: Any) -> Any:
        if isinstance(value, Metric) and id(value) in paths:
            return LoggedMetric(paths[id(value)], map_tensors(value._forward_cache, _detached))
        if isinstance(value, Mapping):
            return {name: now(one) for name, one in value.items()}
        return value.detach().clone() if isinstance(value, Tensor) else value

    def keep(*args: Any, **kwargs: Any) -> None:
        if calls is not None:
            calls.append(
                Call(
                    path,
                    method,
                    tuple(map(now, args)),
                    {name: now(one) for name, one in kwargs.items()},
                )
            )

    return keep


def _detached(tensor: Tensor) -> Tensor:
    return tensor.detach()


def replay(module: nn.Module, calls: Sequence[Call]) -> None:
    """Log and print on this rank."""
    for call in calls:
        values = (
            tuple(_found(module, one) for one in call.arguments),
            _found(module, call.keywords),
        )
        getattr(module.get_submodule(call.path), call.method)(*values[0], **values[1])


def _found(module: nn.Module, value: Any) -> Any:
    if isinstance(value, LoggedMetric):
        metric: Any = module.get_submodule(value.path)
        metric._forward_cache = value.value
        return metric
    return (
        {name: _found(module, one) for name, one in value.items()}
        if isinstance(value, dict)
        else value
    )


# ---- microbatches as one -------------------------------------------------------------------------

Kinds = Mapping[
    Any, str
    # "sum" for what adds up over parts of a batch, "loss" for the loss; all else is a mean over
    # samples
]
Weights = Sequence[float]


def combined_output(
    outputs: Sequence[Any], *, sizes: Sequence[int], weights: Weights, kinds: Kinds
) -> Any:
    """Return the output of a step from those of its microbatches, which have `sizes` samples, and
    losses of these `weights`.

    Tensors and lists with an entry for each sample are joined; scalars and tensors of one shape are
    averaged over samples, or added or weighted as losses where `kinds` says so for their place
    among the leaves; of all else the last microbatch's remains.
    """
    if len(outputs) == 1:
        return outputs[0]
    outputs = [dict(output) if isinstance(output, Mapping) else output for output in outputs]
    flat = [tree_flatten(output, is_leaf=_is_plain_list) for output in outputs]
    spec = flat[-1][1]
    if any(other != spec for _, other in flat):
        return outputs[-1]
    columns = zip(*(found for found, _ in flat), strict=True)
    joined = [
        _joined(column, sizes, weights, kinds.get(place, "mean"))
        for place, column in enumerate(columns)
    ]
    return tree_unflatten(joined, spec)


def _is_plain_list(value: Any) -> bool:
    return isinstance(value, list) and not any(
        isinstance(one, Tensor | Mapping | list | tuple) for one in value
    )


def _joined(values: Sequence[Any], sizes: Sequence[int], weights: Weights, kind: str) -> Any:
    if all(isinstance(value, Tensor) for value in values):
        if all(
            value.dim() and len(value) == size for value, size in zip(values, sizes, strict=True)
        ):
            return torch.cat([*values])
    elif all(
        isinstance(value, list) and len(value) == size
        for value, size in zip(values, sizes, strict=True)
    ):
        return [entry for value in values for entry in value]
    return weighted_losses(values, weights) if kind == "loss" else _weighted(values, sizes, kind)


def weighted_losses(values: Sequence[Any], weights: Weights) -> Any:
    """Return the sum of `values` with `weights`; what has none may be NaN."""
    return sum(value * weight for value, weight in zip(values, weights, strict=True) if weight != 0)


def combined_calls(
    microbatches: Sequence[Sequence[Call]], *, sizes: Sequence[int], weights: Weights, kinds: Kinds
) -> tuple[Call, ...]:
    """Return the calls of a step from those of its microbatches, which have `sizes` samples, and
    losses of these `weights`.

    Values logged under one name become one: added where ``reduce_fx="sum"`` or `kinds` says so (by
    name), the greatest or least for ``"max"`` and ``"min"``, weighted as losses where `kinds` says
    so, else the mean over samples, or over the ``batch_size`` that the calls name. Metrics are
    logged once; texts are printed in order.
    """
    if len(microbatches) == 1:
        return tuple(microbatches[0])
    found: dict[Any, list[tuple[Call, int, float]]] = {}
    for index, (calls, size, weight) in enumerate(zip(microbatches, sizes, weights, strict=True)):
        seen: dict[Any, int] = {}
        for call in calls:
            key = (call.path, call.method, call.name)
            seen[key] = seen.get(key, 0) + 1
            found.setdefault((*key, seen[key], index if call.method == "print" else -1), []).append(
                (call, size, weight)
            )
    return tuple(_one_call(same, kinds) for same in found.values())


def _one_call(same: Sequence[tuple[Call, int, float]], kinds: Kinds) -> Call:
    first = same[0][0]
    if first.method != "log":
        return first
    named = [call.keywords.get("batch_size") for call, _, _ in same]
    sizes = [size if own is None else own for own, (_, size, _) in zip(named, same, strict=True)]
    kind = kinds.get(first.name, "mean") if first.averages else first.reduction
    values = [call.value for call, _, _ in same]
    is_loss = kind == "loss" and len(same) > 1
    value = (
        weighted_losses(values, [each for *_, each in same])
        if is_loss
        else _weighted(values, sizes, kind)
    )
    return first.with_value(value, batch_size=None if named[0] is None else sum(sizes))


def _weighted(values: Sequence[Any], sizes: Sequence[int], kind: str) -> Any:
    last = values[-1]
    if isinstance(last, LoggedMetric):
        return replace(last, value=_weighted([value.value for value in values], sizes, kind))
    if isinstance(last, Mapping):
        return {name: _weighted([value[name] for value in values], sizes, kind) for name in last}
    if isinstance(last, Tensor):
        return _weighted_tensors(values, sizes, kind)
    if isinstance(last, bool) or not isinstance(last, int | float):
        return last
    if all(value == last for value in values) and kind != "sum":
        return last
    if kind == "sum":
        return sum(values)
    if kind in _EXTREMES:
        return _EXTREMES[kind](values)
    return sum(value * size for value, size in zip(values, sizes, strict=True)) / sum(sizes)


def _weighted_tensors(values: Sequence[Any], sizes: Sequence[int], kind: str) -> Tensor:
    last: Tensor = values[-1]
    if last.dtype == torch.bool or any(value.shape != last.shape for value in values):
        return last
    stacked = torch.stack([*values])
    if kind == "sum":
        return stacked.sum(0).to(last.dtype)
    if kind in _EXTREMES:
        return stacked.amax(0) if kind == "max" else stacked.amin(0)
    if not last.is_floating_point() and bool((stacked == last).all()):
        return last
    weights = torch.tensor([*sizes], dtype=torch.float64, device=last.device) / sum(sizes)
    wide = torch.float64 if last.dtype == torch.float64 else torch.float32
    mean: Tensor = torch.tensordot(weights.to(wide), stacked.to(wide), dims=1)
    return mean.to(last.dtype) if last.is_floating_point() else mean

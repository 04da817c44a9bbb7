"""What a user's step returns, logs, prints and counts: recorded on one rank, repeated on others.

In a pipeline only the last stage's rank gets through ``training_step``. What happened there is a
`StepRecord`: it is sent to the other ranks of the pipeline, which log and count the same, so that
callbacks find it everywhere.

    calls = []
    with recorded_calls(module, calls):       # self.log and self.print are recorded, not run
        output = module.training_step(batch)
    changes = MetricChanges.begin(module)     # ... and `since`: what metrics have counted
    replay(other_module, calls); apply_metric_changes(other_module, changes)
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar, cast

import lightning.pytorch as pl
from lightning_utilities.core.rank_zero import rank_zero_only
from torch import Tensor, nn
from torchmetrics import Metric

from lightning_topt.graph.structures import map_tensors

RECORDED_METHODS = ("log", "print")
EXTREMES: Mapping[str, Callable[[Sequence[Any]], Any]] = {"max": max, "min": min}
# what a metric has beside its states
_COUNTERS = ("_update_count", "_forward_cache", "_computed")

# by the paths of metrics, and the names of their states
States = dict[str, dict[str, Any]]
M = TypeVar("M", bound=nn.Module)


@dataclass(frozen=True)
class StepRecord:
    """What a step returned, its calls of ``log`` and ``print``, and what its metrics counted."""

    output: Any = None
    calls: tuple[LoggedCall, ...] = ()
    counted: States = field(default_factory=dict)


def loss_of(output: Any) -> Tensor | None:
    """Return the loss in what `training_step` returned; None where there is none."""
    loss = output.get("loss") if isinstance(output, Mapping) else output
    return loss if isinstance(loss, Tensor) else None


def loss_in(output: Any) -> Tensor:
    """Return the loss in what `training_step` returned. Raises ValueError where there is none."""
    if (loss := loss_of(output)) is None:
        raise ValueError(
            f"training_step returned no loss but {type(output).__name__} for a batch, which "
            "ranks that run steps together cannot leave out; return a loss, or use another strategy"
        )
    return loss


@contextmanager
def as_nonzero_rank() -> Generator[None, None, None]:
    """Run as a rank other than 0: what rank 0 alone does is for its own batch."""
    only = cast(Any, rank_zero_only)
    rank = getattr(only, "rank", None)
    only.rank = rank or 1
    try:
        yield
    finally:
        only.rank = rank


# ---- log and print -------------------------------------------------------------------------------


@dataclass(frozen=True)
class LoggedCall:
    """A call of ``log`` or ``print`` of the LightningModule at `path`."""

    path: str
    method: str
    arguments: tuple[Any, ...]
    keywords: dict[str, Any]

    @property
    def name(self) -> Any:
        """The name that is logged."""
        return self.arguments[0] if self.arguments else self.keywords.get("name")

    @property
    def value(self) -> Any:
        """The value that is logged."""
        return self.arguments[1] if len(self.arguments) > 1 else self.keywords.get("value")

    @property
    def reduction(self) -> str:
        """The name of the ``reduce_fx``: how values of this name are put together."""
        reduction = self.keywords.get("reduce_fx", "mean")
        return str(getattr(reduction, "__name__", reduction))

    @property
    def averages(self) -> bool:
        """Whether a number is logged, of which that is the mean."""
        return self.method == "log" and self.reduction not in ("sum", *EXTREMES)

    def with_value(self, value: Any, *, batch_size: Any) -> LoggedCall:
        """Return this call with another value; and with this `batch_size` unless that is None."""
        keywords = (
            self.keywords if batch_size is None else {**self.keywords, "batch_size": batch_size}
        )
        if len(self.arguments) > 1:
            return replace(
                self, arguments=(self.arguments[0], value, *self.arguments[2:]), keywords=keywords
            )
        return replace(self, keywords={**keywords, "value": value})


@dataclass(frozen=True)
class LoggedMetric:
    """Stands for the metric at `path` in a call; `value` is what its last call has returned."""

    path: str
    value: Any


@contextmanager
def recorded_calls(
    module: nn.Module, calls: list[LoggedCall] | None
) -> Generator[None, None, None]:
    """Put the calls of ``log`` and ``print`` of `module` into `calls`; None: drop them."""
    modules = [*_modules_of(pl.LightningModule, module).items()]
    paths = {id(each): path for path, each in _metrics(module).items()}
    # Instances may have methods of their own, which come back at the end.
    before = [own_methods(each) for _, each in modules]
    for path, each in modules:
        vars(each).update({name: _recorder(path, name, calls, paths) for name in RECORDED_METHODS})
    try:
        yield
    finally:
        for (_, each), own in zip(modules, before, strict=True):
            restore_methods(each, own)


def own_methods(module: nn.Module) -> dict[str, Any]:
    """Return what `module` has on itself, not in its class, as ``log`` and ``print``."""
    return {name: vars(module)[name] for name in RECORDED_METHODS if name in vars(module)}


def restore_methods(module: nn.Module, own: Mapping[str, Any]) -> None:
    """Give `module` the ``log`` and ``print`` of `own_methods` again."""
    for name in RECORDED_METHODS:
        vars(module).pop(name, None)
    vars(module).update(own)


def _recorder(
    path: str, method: str, calls: list[LoggedCall] | None, paths: Mapping[int, str]
) -> Callable[..., None]:
    # What takes the place of ``log`` or ``print``; `paths`: of metrics, by their ids

    def snapshot(value: Any) -> Any:
        if isinstance(value, Metric) and id(value) in paths:
            return LoggedMetric(paths[id(value)], map_tensors(value._forward_cache, Tensor.detach))
        if isinstance(value, Mapping):
            return {name: snapshot(one) for name, one in value.items()}
        return value.detach().clone() if isinstance(value, Tensor) else value

    def record(*args: Any, **kwargs: Any) -> None:
        if calls is not None:
            keywords = {name: snapshot(one) for name, one in kwargs.items()}
            calls.append(LoggedCall(path, method, tuple(map(snapshot, args)), keywords))

    return record


def replay(module: nn.Module, calls: Sequence[LoggedCall]) -> None:
    """Run recorded calls on this rank's `module`."""

    def with_metrics(value: Any) -> Any:
        if isinstance(value, LoggedMetric):
            metric: Any = module.get_submodule(value.path)
            metric._forward_cache = value.value
            return metric
        if isinstance(value, dict):
            return {name: with_metrics(one) for name, one in value.items()}
        return value

    for call in calls:
        arguments, keywords = map(with_metrics, call.arguments), with_metrics(call.keywords)
        getattr(module.get_submodule(call.path), call.method)(*arguments, **keywords)


# ---- metrics -------------------------------------------------------------------------------------


@contextmanager
def uncounted(module: nn.Module, *, unless: list[bool]) -> Generator[None, None, None]:
    """Give the metrics of `module` their states back at the end.

    Not if the list `unless` has an entry by then: a step that got to its end counts.
    """
    metrics = [
        (metric, dict(vars(metric)), dict(metric._buffers)) for metric in _metrics(module).values()
    ]
    for metric, values, _ in metrics:
        # Some metrics add to their states in place.
        vars(metric).update(
            {name: copied_state(values[name]) for name in metric._defaults if name in values}
        )
    try:
        yield
    finally:
        if not unless:
            for metric, values, buffers in metrics:
                vars(metric).clear()
                vars(metric).update(values)
                metric._buffers.update(buffers)


def copied_state(state: Any) -> Any:
    """Return a copy of a metric's state, a tensor or a list of tensors."""
    return state.clone() if isinstance(state, Tensor) else [*state]


@dataclass
class MetricChanges:
    """Knows the states of metrics at `begin`, and gives what was counted `since`."""

    before: States = field(default_factory=dict)

    @classmethod
    def begin(cls, module: nn.Module) -> MetricChanges:
        """Return the changes from now on."""
        return cls({path: _states(metric) for path, metric in _metrics(module).items()})

    def since(self, module: nn.Module) -> States:
        """Return what changed, by path and name, as values that can be sent."""
        found: States = {}
        for path, metric in _metrics(module).items():
            before, now = self.before.get(path, {}), _states(metric)
            if now["_update_count"] != before.get("_update_count") or now[
                "_computed"
            ] is not before.get("_computed"):
                found[path] = {
                    name: _difference(before.get(name), value) for name, value in now.items()
                }
        return found


def apply_metric_changes(module: nn.Module, changes: Mapping[str, Mapping[str, Any]]) -> None:
    """Let the metrics of `module` count what another rank has counted since both were alike."""
    metrics = _metrics(module)
    for path, states in changes.items():
        for name, value in states.items():
            if isinstance(value, _Appended):
                value = [*getattr(metrics[path], name)[: value.kept], *value.entries]
            setattr(metrics[path], name, value)


@dataclass(frozen=True)
class _Appended:
    """A list of states: its first `kept` entries are as they were, then come `entries`."""

    kept: int
    entries: list[Any]


def _metrics(module: nn.Module) -> dict[str, Metric]:
    return _modules_of(Metric, module)  # type: ignore[type-abstract]


def _modules_of(kind: type[M], module: nn.Module) -> dict[str, M]:
    # The modules of `kind` by path, in the order of ``named_modules``. Steps of small models ask so
    # often that its time counts
    found, seen, left = dict[str, M](), set[int](), [("", module)]
    while left:
        path, each = left.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        if isinstance(each, kind):
            found[path] = each
        for name, child in reversed(each._modules.items()):
            if child is not None:
                left.append((f"{path}.{name}" if path else name, child))
    return found


def _states(metric: Metric) -> dict[str, Any]:
    states = {name: getattr(metric, name) for name in metric._defaults}
    states = {
        name: [*value] if isinstance(value, list) else value for name, value in states.items()
    }
    return {**states, **{name: vars(metric).get(name) for name in _COUNTERS}}


def _difference(before: Any, now: Any) -> Any:
    # `now` as it is sent: of a list that has only grown, the new entries alone
    if not isinstance(now, list):
        return now.detach() if isinstance(now, Tensor) else now
    before = before if isinstance(before, list) else []
    has_grown = len(before) <= len(now) and all(a is b for a, b in zip(before, now, strict=False))
    kept = len(before) if has_grown else 0
    return _Appended(kept, now[kept:])

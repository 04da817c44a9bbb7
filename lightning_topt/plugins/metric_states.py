"""States of metrics are taken on one rank and given to others, and put back where a pass is not to
count.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torchmetrics import Metric

_COUNTS = ("_update_count", "_forward_cache", "_computed")
States = dict[str, dict[str, Any]]  # by the paths of metrics, and the names of their states


@contextmanager
def uncounted(module: nn.Module, *, unless: list[bool]) -> Generator[None, None, None]:
    """Give the metrics of `module` their states again at the end, unless the list `unless` is not
    empty by then.
    """
    metrics = [
        (metric, dict(vars(metric)), dict(metric._buffers)) for metric in _metrics(module).values()
    ]
    for metric, values, _ in metrics:
        vars(metric).update(
            {name: _copied(values[name]) for name in metric._defaults if name in values}
        )
    try:
        yield
    finally:
        if not unless:
            for metric, values, buffers in metrics:
                vars(metric).clear()
                vars(metric).update(values)
                metric._buffers.update(buffers)


@dataclass
class MetricChanges:
    """A `MetricChanges` knows the states at `begin`, and gives what was counted since, as values
    that can be sent.
    """

    before: dict[str, dict[str, Any]] = field(default_factory=dict)

    @classmethod
    def begin(cls, module: nn.Module) -> MetricChanges:
        """Return the changes from now on."""
        return cls({path: _held(metric) for path, metric in _metrics(module).items()})

    def since(self, module: nn.Module) -> States:
        """Return what changed, by path and name."""
        found: States = {}
        for path, metric in _metrics(module).items():
            before, now = self.before.get(path, {}), _held(metric)
            if now["_update_count"] != before.get("_update_count") or now[
                "_computed"
            ] is not before.get("_computed"):
                found[path] = {
                    name: _difference(before.get(name), value) for name, value in now.items()
                }
        return found


def take_over(module: nn.Module, changes: Mapping[str, Mapping[str, Any]]) -> None:
    """Let the metrics of `module` have counted `changes`, which another rank found since both were
    alike.
    """
    metrics = _metrics(module)
    for path, states in changes.items():
        for name, value in states.items():
            if isinstance(value, _Grown):
                value = [*getattr(metrics[path], name)[: value.kept], *value.entries]
            setattr(metrics[path], name, value)


def states_in_use(module: nn.Module) -> States:
    """Return the states of the metrics that have counted anything, by path and name."""
    return {
        path: _held(metric) for path, metric in _metrics(module).items() if metric._update_count
    }


def count_from(module: nn.Module, states: States) -> None:
    """Let the metrics of `module` have `states`, those of another rank that are in use; all others
    begin anew.
    """
    for path, metric in _metrics(module).items():
        if path not in states and metric._update_count:
            metric.reset()
    take_over(module, states)


@dataclass(frozen=True)
class _Grown:
    """A list of states is its first `kept` entries as they were, then `entries`."""

    kept: int
    entries: list[Any]


def _metrics(module: nn.Module) -> dict[str, Metric]:
    return {path: each for path, each in module.named_modules() if isinstance(each, Metric)}


def _held(metric: Metric) -> dict[str, Any]:
    states = {name: getattr(metric, name) for name in metric._defaults}
    states = {
        name: [*value] if isinstance(value, list) else value for name, value in states.items()
    }
    return {**states, **{name: vars(metric).get(name) for name in _COUNTS}}


def _difference(before: Any, now: Any) -> Any:
    if not isinstance(now, list):
        return now.detach() if isinstance(now, Tensor) else now
    before = before if isinstance(before, list) else []
    kept = (
        len(before)
        if len(before) <= len(now) and all(a is b for a, b in zip(before, now, strict=False))
        else 0
    )
    return _Grown(kept, now[kept:])


def _copied(state: Any) -> Any:
    return state.clone() if isinstance(state, Tensor) else [*state]

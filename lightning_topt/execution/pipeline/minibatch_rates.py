"""Hyperparameters of optimizers by minibatch: an update happens long after the iteration in which
its minibatch came in.

Schedulers go on in each iteration. The update of a minibatch uses what parameter groups held when
it came in; before and after it they hold what they would without a pipeline.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

Group = dict[str, Any]  # all entries of a parameter group but "params"
Groups = list[Group]


class MinibatchRates:
    """The hyperparameters of `optimizers` when each minibatch in flight came in."""

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._optimizers = list(optimizers)
        self._recorded: dict[int, list[Groups]] = {}
        self._latest: list[Groups] = []
        self._changed: set[str] = set()  # entries in which optimizers keep state of their own

    def record(self, minibatch: int) -> None:
        """Remember what parameter groups hold now."""
        self._latest = [
            [
                {name: _copy(value) for name, value in group.items() if name != "params"}
                for group in each.param_groups
            ]
            for each in self._optimizers
        ]
        self._recorded[minibatch] = self._latest

    def forget(self, minibatch: int) -> None:
        """Forget a minibatch whose update is done."""
        self._recorded.pop(minibatch, None)

    def of_updates(
        self, minibatches: Sequence[int], *, optimizer: int, count: int
    ) -> list[Sequence[Mapping[str, Any]]]:
        """Return the hyperparameters of each group for updates with these minibatches and those
        that follow.

        At least `count` in all: beyond the minibatches the latest known ones are taken to stay.
        """
        found: list[Sequence[Mapping[str, Any]]] = [
            self._recorded[each][optimizer] for each in minibatches
        ]
        return [*found, *[self._latest[optimizer]] * max(count - len(found), 0)]

    @contextmanager
    def in_place(self, minibatch: int) -> Generator[None, None, None]:
        """Let parameter groups hold the hyperparameters of a minibatch; what an optimizer changes
        within stays changed.
        """
        placed: list[tuple[Any, Group, Group]] = []  # a group, what it held, what it was given
        for optimizer, groups in zip(
            self._optimizers, self._recorded.get(minibatch, []), strict=False
        ):
            for group, recorded in zip(optimizer.param_groups, groups, strict=False):
                given = {
                    name: value
                    for name, value in recorded.items()
                    if name not in self._changed and name in group
                }
                placed.append((group, {name: group[name] for name in given}, given))
                group.update(given)
        try:
            yield
        finally:
            for group, before, given in placed:
                for name, value in before.items():
                    if group[name] is given[name]:
                        group[name] = value
                    else:
                        self._changed.add(name)


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value

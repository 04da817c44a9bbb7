"""Weight stashing: passes of a minibatch compute with one version of the weights, kept until its
backward pass is done.

PipeDream's stashing, PipeDream-2BW's two versions, and the Nesterov method, which is stashing with
NAdamW.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from torch import Tensor, optim
from torch.optim import Optimizer
from typing_extensions import override

from lightning_topt.prediction.rule import Prediction, Rates, StagePrediction
from lightning_topt.prediction.storages import (
    copy_into,
    empty_copies,
    num_bytes,
    swap,
    trainable,
    unseen,
)
from lightning_topt.schedules.continuous import lag_of
from lightning_topt.schedules.horizons import Horizon


class Position(NamedTuple):
    """Updates done: when the pass begins, before the minibatch's own one, and when the pipeline was
    last drained.
    """

    now: int
    own: int
    drained: int


class StashedStage(StagePrediction):
    """Keeps old versions of the weights.

    `choose` gives the version for the passes of a minibatch, and `keep(version, now)` whether
    minibatches that have not come in yet may use `version` after `now` updates.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        choose: Callable[[Position], int],
        keep: Callable[[int, int], bool],
        copies: int,
    ) -> None:
        self._optimizer, self._choose, self._keep, self._copies = optimizer, choose, keep, copies
        self._updates = self._drained_at = 0
        self._used: dict[int, int] = {}  # version by minibatch in flight
        self._versions: dict[int, list[Tensor]] = {}
        self._spare: list[list[Tensor]] = []
        self._parameters: list[Tensor] | None = None  # since the last drained state

    @override
    def forward(
        self, minibatch: int, horizon: Horizon, rates: Rates
    ) -> AbstractContextManager[None]:
        version = self._choose(
            Position(self._updates, self._updates + horizon.missing, self._drained_at)
        )
        self._used[minibatch] = version
        return self._in_place(version)

    @override
    @contextmanager
    def backward(self, minibatch: int, horizon: Horizon, rates: Rates) -> Iterator[None]:
        with self._in_place(self._used[minibatch]):
            yield
        del self._used[minibatch]

    @override
    @contextmanager
    def update(self, minibatch: int) -> Iterator[None]:
        parameters = self._stashed()
        self._forget(self._updates + 1)
        if self._is_needed(self._updates, self._updates + 1):
            copies = self._spare.pop() if self._spare else empty_copies(parameters)
            copy_into(copies, parameters)
            self._versions[self._updates] = copies
        with unseen(trainable(self._optimizer)):
            yield
        self._updates += 1

    @override
    def drained(self) -> None:
        assert not self._used, f"minibatches {sorted(self._used)} are in flight"
        self._versions.clear()
        self._spare.clear()
        self._parameters, self._drained_at = None, self._updates

    @property
    @override
    def num_versions(self) -> int:
        return self._copies

    @property
    @override
    def held_bytes(self) -> int:
        return sum(num_bytes(copies) for copies in (*self._versions.values(), *self._spare))

    @contextmanager
    def _in_place(self, version: int) -> Iterator[None]:
        """Exchange the newest version, which stays in the copies of `version` meanwhile."""
        if version == self._updates:
            yield
            return
        copies = self._versions[version]
        swap(self._stashed(), copies)
        try:
            yield
        finally:
            swap(self._stashed(), copies)

    def _stashed(self) -> list[Tensor]:
        if self._parameters is None:
            self._parameters = trainable(self._optimizer)
        return self._parameters

    def _is_needed(self, version: int, now: int) -> bool:
        return version in self._used.values() or self._keep(version, now)

    def _forget(self, now: int) -> None:
        for version in [version for version in self._versions if not self._is_needed(version, now)]:
            self._spare.append(self._versions.pop(version))


@dataclass(frozen=True)
class WeightStashing(Prediction):
    """PipeDream's weight stashing: the backward pass computes with the weights of the forward pass,
    which were the newest.

    Narayanan et al., SOSP 2019, section 3.3, without vertical synchronization. Gradients are true
    ones, of old weights.
    """

    name: ClassVar[str] = "stash"

    @override
    def weight_copies(
        self, *, stage: int, num_stages: int, lag_per_hop: int = 1, accumulate: int = 1
    ) -> int:
        return -(-lag_of(stage, num_ranks=num_stages, lag_per_hop=lag_per_hop) // accumulate)

    @override
    def on(
        self,
        optimizer: Optimizer,
        *,
        stage: int,
        num_stages: int,
        lag_per_hop: int = 1,
        accumulate: int = 1,
    ) -> StagePrediction:
        places = {
            "stage": stage,
            "num_stages": num_stages,
            "lag_per_hop": lag_per_hop,
            "accumulate": accumulate,
        }
        copies = self.weight_copies(**places)
        return StashedStage(
            optimizer,
            choose=lambda position: position.now,
            keep=lambda version, now: False,
            copies=copies,
        )


@dataclass(frozen=True)
class Nesterov(WeightStashing):
    """The Nesterov method: weight stashing with NAdam and decoupled weight decay, whose look-ahead
    makes up for the delay.

    Ajanthan et al., ICML 2025, arXiv 2505.01099, sections 3 and 5: ``torch.optim.NAdam`` with beta
    1 = 0.99, which weighs the gradient by 1 - beta 1. Only the optimizer differs from
    `WeightStashing`; this rule makes sure of it.
    """

    name: ClassVar[str] = "nesterov"
    optimizers: ClassVar[tuple[str, ...]] = ("NAdam",)

    @override
    def on(
        self,
        optimizer: Optimizer,
        *,
        stage: int,
        num_stages: int,
        lag_per_hop: int = 1,
        accumulate: int = 1,
    ) -> StagePrediction:
        if not isinstance(optimizer, optim.NAdam):
            raise ValueError(
                f"prediction {self.name!r} is for NAdam of torch.optim, with betas=(0.99, 0.999) "
                "and "
                f"decoupled_weight_decay=True; got {type(optimizer).__name__}. With another "
                "optimizer use prediction 'stash'"
            )
        if any(
            group["weight_decay"] and not group["decoupled_weight_decay"]
            for group in optimizer.param_groups
        ):
            raise ValueError(
                f"prediction {self.name!r} is for decoupled weight decay; build NAdam with "
                "decoupled_weight_decay=True"
            )
        places = {
            "stage": stage,
            "num_stages": num_stages,
            "lag_per_hop": lag_per_hop,
            "accumulate": accumulate,
        }
        return super().on(optimizer, **places)


@dataclass(frozen=True)
class TwoVersions(Prediction):
    """PipeDream-2BW's double-buffered weights: update t + 1 is W - lr gradient(the weights one
    update older), on all stages.

    Narayanan et al., ICML 2021, arXiv 2006.09503, section 3.1. An update takes at least as many
    minibatches as are in flight behind the first stage: then two versions suffice. After a drained
    state the first update has no older weights.
    """

    name: ClassVar[str] = "two_versions"

    @override
    def weight_copies(
        self, *, stage: int, num_stages: int, lag_per_hop: int = 1, accumulate: int = 1
    ) -> int:
        return int(num_stages > 1)

    @override
    def on(
        self,
        optimizer: Optimizer,
        *,
        stage: int,
        num_stages: int,
        lag_per_hop: int = 1,
        accumulate: int = 1,
    ) -> StagePrediction:
        behind = (num_stages - 1) * lag_per_hop
        is_delayed = num_stages > 1

        def choose(position: Position) -> int:
            version = max(position.own - is_delayed, position.drained)
            if version > position.now:
                raise ValueError(
                    f"prediction {self.name!r} needs at least as many minibatches in an update as "
                    f"are in flight, {behind}; "
                    f"set accumulate_grad_batches={behind}, or use prediction 'stash'"
                )
            return version

        copies = self.weight_copies(stage=stage, num_stages=num_stages)
        return StashedStage(
            optimizer,
            choose=choose,
            keep=lambda version, now: is_delayed and version >= now - 1,
            copies=copies,
        )

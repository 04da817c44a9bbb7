"""Rules that leave the weights as they are: none, and PipeMare's learning rates."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar

from torch.optim import Optimizer
from typing_extensions import override

from lightning_topt.basics.argument_checks import check_whole
from lightning_topt.prediction.rule import Prediction, Rates, StagePrediction
from lightning_topt.prediction.storages import trainable, unseen
from lightning_topt.schedules.continuous import lag_of
from lightning_topt.schedules.horizons import Horizon


class TrueStage(StagePrediction):
    """Scales learning rates: of update k by ``1 / delay ** (1 - k / annealing_updates)``, which
    ends as 1.
    """

    def __init__(
        self, optimizer: Optimizer, *, delay: float = 1.0, annealing_updates: int = 0
    ) -> None:
        self._optimizer, self._delay, self._annealing = optimizer, delay, annealing_updates
        self._updates = 0

    @override
    def forward(
        self, minibatch: int, horizon: Horizon, rates: Rates
    ) -> AbstractContextManager[None]:
        return nullcontext()

    @override
    def backward(
        self, minibatch: int, horizon: Horizon, rates: Rates
    ) -> AbstractContextManager[None]:
        return nullcontext()

    @override
    @contextmanager
    def update(self, minibatch: int) -> Iterator[None]:
        with unseen(trainable(self._optimizer)), self._scaled_rates():
            yield
        self._updates = min(self._updates + 1, self._annealing)

    @override
    def drained(self) -> None:
        return None

    @property
    @override
    def num_versions(self) -> int:
        return 0

    @property
    @override
    def held_bytes(self) -> int:
        return 0

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"updates": self._updates} if self._annealing else {}

    @override
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._updates = min(int(state.get("updates", 0)), self._annealing)

    @contextmanager
    def _scaled_rates(self) -> Iterator[None]:
        if self._updates >= self._annealing or self._delay == 1.0:
            yield
            return
        factor = self._delay ** (self._updates / self._annealing - 1.0)
        groups = self._optimizer.param_groups
        rates = [group["lr"] for group in groups]
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = rate * factor
        try:
            yield
        finally:
            for group, rate in zip(groups, rates, strict=True):
                group["lr"] = rate


@dataclass(frozen=True)
class NoPrediction(Prediction):
    """No rule: each pass computes with the newest weights, so that forward and backward of a
    minibatch do not agree.
    """

    name: ClassVar[str] = "none"

    @override
    def weight_copies(
        self, *, stage: int, num_stages: int, lag_per_hop: int = 1, accumulate: int = 1
    ) -> int:
        return 0

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
        return TrueStage(optimizer)


@dataclass(frozen=True)
class PipeMare(Prediction):
    """PipeMare's learning rates: lr / delay^p of a stage, where p falls from 1 to 0 in
    `annealing_updates` updates.

    Yang et al., MLSys 2021, arXiv 1910.05124, section 3.2 (T1); the delay is in updates and at
    least 1. Its discrepancy correction (T2) is not part of this rule. The paper takes for
    `annealing_updates` a quarter of the updates at the first learning rate, or five times those of
    a warm-up.
    """

    name: ClassVar[str] = "pipemare"
    annealing_updates: int = 1000

    def __post_init__(self) -> None:
        check_whole(self.annealing_updates, name="annealing_updates")

    @override
    def weight_copies(
        self, *, stage: int, num_stages: int, lag_per_hop: int = 1, accumulate: int = 1
    ) -> int:
        return 0

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
        delay = lag_of(stage, num_ranks=num_stages, lag_per_hop=lag_per_hop) / accumulate
        return TrueStage(optimizer, delay=max(1.0, delay), annealing_updates=self.annealing_updates)

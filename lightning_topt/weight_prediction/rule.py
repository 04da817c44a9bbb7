"""What a weight rule is: `Prediction` chooses, `StagePrediction` puts weights in place on a stage.

    rule = make_prediction("spectrain").on(optimizer, stage=0, num_stages=4)
    with rule.forward(minibatch, staleness, rates):
        loss = forward(batch)

A pass computes with what its rule puts into a parameter's storage, or with the storage that it
points the parameter to. Afterwards the true weights are back in place, bit for bit; updates change
the true ones. Buffers are left as the forward passes leave them. The rules are in `rules`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from torch.optim import Optimizer

from lightning_topt.schedules.schedules import lag_of
from lightning_topt.schedules.staleness import Staleness

# Hyperparameters of the n-th update from now (0: the next one), by parameter group: (n, groups).
Rates = Sequence[Sequence[Mapping[str, Any]]]


class StagePrediction(ABC):
    """A rule at work on the parameters of one stage's optimizer.

    Calls follow the stage's actions. `rates` ends with the latest hyperparameters that are known;
    beyond, they are taken to stay. In a pass nothing is raised but ValueError for a schedule that
    the rule cannot serve.
    """

    @abstractmethod
    def forward(
        self, minibatch: int, staleness: Staleness, rates: Rates
    ) -> AbstractContextManager[None]:
        """Return a context in which the storages hold the weights for a minibatch's forward."""

    @abstractmethod
    def backward(
        self, minibatch: int, staleness: Staleness, rates: Rates
    ) -> AbstractContextManager[None]:
        """Return a context in which the storages hold the weights for its backward pass."""

    @abstractmethod
    def update(self, minibatch: int) -> AbstractContextManager[None]:
        """Return a context for ``optimizer.step()`` that passes in flight do not notice."""

    @abstractmethod
    def drained(self) -> None:
        """Give up all copies: nothing is in flight.

        Parameters may be added or restored now.
        """

    @property
    @abstractmethod
    def num_versions(self) -> int:
        """The most copies of the stage's weights beside the storages at once."""

    @property
    @abstractmethod
    def held_bytes(self) -> int:
        """Bytes of copies that are held now."""


class StagePlace(NamedTuple):
    """A stage of a continuous schedule; an update takes `accumulate` minibatches."""

    stage: int
    num_stages: int
    lag_per_hop: int = 1
    accumulate: int = 1

    @property
    def lag(self) -> int:
        """Minibatches by which its backward passes are behind its forward passes."""
        return lag_of(self.stage, num_ranks=self.num_stages, lag_per_hop=self.lag_per_hop)


class Traffic(NamedTuple):
    """How often the bytes of a stage's weights are read or written in memory for a rule.

    `passes`: to put weights in place for both passes of a minibatch, and to take them away.
    `update`: at an update, beside the optimizer's own step.
    """

    passes: float
    update: float


@dataclass(frozen=True)
class Prediction(ABC):
    """A weight rule, with its options as fields."""

    name: ClassVar[str]
    # those of torch.optim that it knows; none: any optimizer
    optimizers: ClassVar[tuple[str, ...]] = ()

    def on(
        self,
        optimizer: Optimizer,
        *,
        stage: int,
        num_stages: int,
        lag_per_hop: int = 1,
        accumulate: int = 1,
    ) -> StagePrediction:
        """Return the rule at work on the parameters of a stage.

        Raises ValueError for an optimizer that it does not know, naming those that it knows.
        """
        return self.at_work(optimizer, StagePlace(stage, num_stages, lag_per_hop, accumulate))

    # ---- what a rule says

    @abstractmethod
    def copies_at(self, place: StagePlace) -> int:
        """Return the most copies of a stage's weights at once, beside the storages."""

    @abstractmethod
    def at_work(self, optimizer: Optimizer, place: StagePlace) -> StagePrediction:
        """Return what `on` does."""

    @abstractmethod
    def traffic(
        self, forward: Staleness, backward: Staleness, *, optimizer: str, compiled: bool
    ) -> Traffic:
        """Return what the passes of a minibatch move in memory, in bytes of the stage's weights.

        Args:
            forward: the staleness of its forward pass.
            backward: that of its backward pass.
            optimizer: the name of its class, one that the rule knows.
            compiled: whether the stage is on a CPU, where moves are made by `move_kernels` or in
                the cache; else they are made by torch's kernels.
        """

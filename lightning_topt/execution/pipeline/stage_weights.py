"""Weights of a stage around its passes and updates: what the rules for its optimizers put there,
with rates of the future.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, Literal

from torch import Tensor
from torch.optim import Optimizer

from lightning_topt.execution.pipeline.minibatch_rates import MinibatchRates
from lightning_topt.execution.pipeline.update_pattern import UpdatePattern
from lightning_topt.execution.pipeline.weight_changes import holding, unnoticed
from lightning_topt.prediction.rule import Prediction, StagePrediction
from lightning_topt.prediction.rules import default_prediction


class StageWeights:
    """The weights of `stage`, whose updates follow `pattern`: `parameters` as `optimizers` and a
    rule for each change them.

    `prediction` is the rule; None: the default one of each optimizer. Raises ValueError for an
    optimizer that the rule does not know.
    """

    def __init__(
        self,
        optimizers: Sequence[Optimizer],
        prediction: Prediction | None,
        pattern: UpdatePattern,
        *,
        parameters: Sequence[Tensor],
    ) -> None:
        self._optimizers, self._pattern, self._parameters = (
            list(optimizers),
            pattern,
            tuple(parameters),
        )
        self._predictions = [
            prediction or default_prediction(optimizer) for optimizer in self._optimizers
        ]
        self._accumulate = 1
        self._rules = self._made()
        self.rates = MinibatchRates(self._optimizers)

    @property
    def num_versions(self) -> int:
        """The most copies of the stage's weights beside the storages at once."""
        return max((rule.num_versions for rule in self._rules), default=0)

    @property
    def held_bytes(self) -> int:
        """Bytes of copies of weights that are held now."""
        return sum(rule.held_bytes for rule in self._rules)

    def begin(self, minibatch: int, *, accumulate: int, is_drained: bool) -> None:
        """Remember the hyperparameters with which a minibatch comes in. How many accumulate changes
        while drained alone.
        """
        self.rates.record(minibatch)
        if accumulate != self._accumulate and is_drained:
            states, self._accumulate = self.state(), accumulate
            self._rules = self._made()
            self.load_state(states)

    def of_pass(
        self, kind: Literal["forward", "backward"], minibatch: int
    ) -> AbstractContextManager[None]:
        """Return a context in which parameters hold what a pass computes with."""
        staleness, pending = self._pattern.staleness(kind, minibatch), self._pattern.pending
        count = 1 + max(staleness.missing, staleness.round_trip)
        placed = []
        for number, rule in enumerate(self._rules):
            rates = self.rates.of_updates(pending, optimizer=number, count=count)
            placed.append(getattr(rule, kind)(minibatch, staleness, rates))
        return holding(placed, self._parameters)

    @contextmanager
    def of_update(self, minibatch: int) -> Generator[None, None, None]:
        """Let optimizers step within as the minibatch's update does."""
        with self.rates.in_place(minibatch), unnoticed(self._parameters), ExitStack() as stack:
            for rule in self._rules:
                stack.enter_context(rule.update(minibatch))
            yield

    def drained(self) -> None:
        """Give up all copies."""
        for rule in self._rules:
            rule.drained()

    def state(self) -> list[dict[str, Any]]:
        """Return what rules need of a drained state."""
        return [rule.state_dict() for rule in self._rules]

    def load_state(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Take over what `state` gave."""
        for rule, state in zip(self._rules, states, strict=True):
            rule.load_state_dict(state)

    def _made(self) -> list[StagePrediction]:
        sizes = {**self._pattern.sizes, "accumulate": self._accumulate}
        pairs = zip(self._predictions, self._optimizers, strict=True)
        return [prediction.on(optimizer, **sizes) for prediction, optimizer in pairs]

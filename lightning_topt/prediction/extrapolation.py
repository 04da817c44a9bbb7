"""SpecTrain, FTPipe's multi-step prediction and PipeOptim: weights of a later version, computed
from the optimizer's moments.

A copy of the true weights is held during a pass, if it predicts at all. Parameters that have not
been updated yet are not predicted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_topt.prediction.moments import (
    KNOWN,
    Hyperparameters,
    Method,
    Moments,
    method_of,
    read_moments,
)
from lightning_topt.prediction.rule import Prediction, Rates, StagePrediction
from lightning_topt.prediction.storages import copy_into, empty_copies, num_bytes, trainable, unseen
from lightning_topt.prediction.weight_moves import (
    Move,
    keep_and_move,
    repeated_update,
    updates_without_gradients,
)
from lightning_topt.schedules.continuous import lag_of
from lightning_topt.schedules.horizons import Horizon

Predict = Callable[[Moments, Method, int, Sequence[Hyperparameters]], Move]
Count = Callable[[Horizon], int]


class ExtrapolatedStage(StagePrediction):
    """Predicts in place; `forward` and `backward` say by how many updates."""

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        method: Method,
        predict: Predict,
        forward: Count,
        backward: Count,
        copies: int,
    ) -> None:
        self._optimizer, self._method, self._predict = optimizer, method, predict
        self._forward, self._backward, self._copies = forward, backward, copies
        self._moments: list[Moments] | None = None  # since the last update
        self._true: dict[Tensor, Tensor] = {}  # copies by parameter

    @override
    def forward(
        self, minibatch: int, horizon: Horizon, rates: Rates
    ) -> AbstractContextManager[None]:
        return self._predicted(self._forward(horizon), rates)

    @override
    def backward(
        self, minibatch: int, horizon: Horizon, rates: Rates
    ) -> AbstractContextManager[None]:
        return self._predicted(self._backward(horizon), rates)

    @override
    @contextmanager
    def update(self, minibatch: int) -> Iterator[None]:
        self._moments = None
        with unseen(trainable(self._optimizer)):
            yield

    @override
    def drained(self) -> None:
        self._moments = None
        self._true.clear()

    @property
    @override
    def num_versions(self) -> int:
        return self._copies

    @property
    @override
    def held_bytes(self) -> int:
        return num_bytes(self._true.values())

    @contextmanager
    def _predicted(self, count: int, rates: Rates) -> Iterator[None]:
        assert count >= 0 and rates, (count, rates)
        moved: list[Moments] = self._read() if count else []
        kept: list[tuple[Sequence[Tensor], list[Tensor]]] = []  # parameters with copies
        try:
            for moments in moved:
                copies = self._copies_of(moments.parameters)
                move = self._predict(
                    moments, self._method, count, [groups[moments.group] for groups in rates]
                )
                with torch.no_grad(), unseen(moments.parameters):
                    keep_and_move(moments, copies, move)
                kept.append((moments.parameters, copies))
            yield
        finally:
            for parameters, copies in kept:
                copy_into(parameters, copies)

    def _read(self) -> list[Moments]:
        if self._moments is None:
            self._moments = read_moments(self._optimizer, method=self._method)
        return self._moments

    def _copies_of(self, parameters: Sequence[Tensor]) -> list[Tensor]:
        new = [parameter for parameter in parameters if parameter not in self._true]
        self._true.update(zip(new, empty_copies(new), strict=True))
        return [self._true[parameter] for parameter in parameters]


@dataclass(frozen=True)
class SpecTrain(Prediction):
    """SpecTrain: all passes of a minibatch compute with the weights of the time when stage 0 is
    done with it.

    W - s lr v, s `Horizon.round_trip` (Chen et al., arXiv 1809.02839, section 3). The paper's
    momentum ``v = g v + (1 - g) gradient`` moves W by lr v; torch's buffer is v / (1 - g), and lr
    times it moves W: lr v is the last update in both, which is what is taken here (not g buffer +
    gradient, as in the authors' code). For Adam and AdamW, of which the paper does not speak, it is
    that of `PipeOptim`.
    """

    name: ClassVar[str] = "spectrain"
    optimizers: ClassVar[tuple[str, ...]] = KNOWN

    @override
    def weight_copies(
        self, *, stage: int, num_stages: int, lag_per_hop: int = 1, accumulate: int = 1
    ) -> int:
        return int(stage >= 2 or lag_of(stage, num_ranks=num_stages, lag_per_hop=lag_per_hop) > 0)

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
        return ExtrapolatedStage(
            optimizer,
            method=method_of(optimizer, rule=self.name),
            predict=repeated_update,
            forward=lambda horizon: horizon.round_trip,
            backward=lambda horizon: horizon.round_trip,
            copies=self.weight_copies(stage=stage, num_stages=num_stages, lag_per_hop=lag_per_hop),
        )


@dataclass(frozen=True)
class ForwardOnly(Prediction):
    """The rules that predict for forward passes the weights that backward passes will find,
    `Horizon.missing` updates later.
    """

    optimizers: ClassVar[tuple[str, ...]] = KNOWN
    predict: ClassVar[Predict]

    @override
    def weight_copies(
        self, *, stage: int, num_stages: int, lag_per_hop: int = 1, accumulate: int = 1
    ) -> int:
        return int(lag_of(stage, num_ranks=num_stages, lag_per_hop=lag_per_hop) > 0)

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
        return ExtrapolatedStage(
            optimizer,
            method=method_of(optimizer, rule=self.name),
            predict=type(self).predict,
            forward=lambda horizon: horizon.missing,
            backward=lambda horizon: 0,
            copies=self.weight_copies(stage=stage, num_stages=num_stages, lag_per_hop=lag_per_hop),
        )


@dataclass(frozen=True)
class PipeOptim(ForwardOnly):
    """PipeOptim: forward passes compute with the weights that the backward pass will find.

    W - s lr dW, s `Horizon.missing`, in the steady state num_stages - 1 - stage (Guan et al., arXiv
    2312.00839, section III); dW is the direction of the last update (Table I), for AdamW without
    its decay. Backward passes find true weights.
    """

    name: ClassVar[str] = "pipeoptim"
    predict: ClassVar[Predict] = staticmethod(repeated_update)


@dataclass(frozen=True)
class MultiStep(ForwardOnly):
    """FTPipe's prediction: forward passes compute with the weights after s updates without
    gradients.

    Momentum decays, learning rates are those of the future schedule, weight decay goes on (Eliad et
    al., USENIX ATC 2021; pipe/pipeline/weight_prediction of the authors' code). s is
    `Horizon.missing`; with SGD at a constant rate and no decay this is W - lr (g - g^(s+1)) / (1 -
    g) buffer. Adam moves in step j by lr_j b1^j m / (1 - b1^(t+j)) / (sqrt(v / (1 - b2^(t+j))) +
    eps). Backward passes find true weights.
    """

    name: ClassVar[str] = "multistep"
    predict: ClassVar[Predict] = staticmethod(updates_without_gradients)

"""The weight rules of continuous pipelines, by name, and the default of each optimizer.

| name | weights of a pass | copies of a stage's weights |
|---|---|---|
| none | the newest | 0 |
| stash | forward's newest, kept for backward (PipeDream) | one per update in flight |
| nesterov | as stash, with NAdam and decoupled weight decay | one per update in flight |
| two_versions | one update older than the newest, on all stages (PipeDream-2BW) | 1 |
| spectrain | predicted for when stage 0 is done with the minibatch | 1 |
| multistep | forward: predicted by updates without gradients (FTPipe) | 1 |

    rule = make_prediction("spectrain").on(optimizer, stage=0, num_stages=4)
    with rule.forward(minibatch, staleness, rates):
        loss = forward(batch)

A rule (`Prediction`) says what it needs, and its `StagePrediction` puts the weights in place. A
pass computes with what that puts into a parameter's storage, or with the storage that the parameter
is pointed to. Afterwards the true weights are back in place, bit for bit; updates change the true
ones. Buffers are left as the forward passes leave them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, optim
from torch.optim import Optimizer
from typing_extensions import override

from lightning_topt.basics.argument_checks import check_choice, check_whole
from lightning_topt.schedules.schedules import lag_of
from lightning_topt.schedules.staleness import Staleness
from lightning_topt.weight_prediction.weights import (
    COPY,
    KNOWN,
    Hyperparameters,
    Method,
    Moments,
    Move,
    are_alone,
    copy_into,
    empty_copies,
    empty_places,
    keep_and_move,
    method_of,
    move_traffic,
    num_bytes,
    pieces,
    point_to,
    read_moments,
    repeated_update,
    swap,
    trainable,
    unseen,
    updates_without_gradients,
)

# Hyperparameters of the n-th update from now (0: the next one), by parameter group: (n, groups).
Rates = Sequence[Sequence[Mapping[str, Any]]]


# ---- What a rule is.


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
        """Give up all copies: nothing is in flight. Parameters may be added or restored now."""

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
        self, forward: Staleness, backward: Staleness, *, optimizer: str, in_cache: bool
    ) -> Traffic:
        """Return what the passes of a minibatch move in memory, in bytes of the stage's weights.

        Args:
            forward: the staleness of its forward pass.
            backward: that of its backward pass.
            optimizer: the name of its class, one that the rule knows.
            in_cache: whether the stage is on a CPU, where moves are made in the cache.
        """


# ---- Rules by name, and the default of each optimizer.


class Default(NamedTuple):
    """A row of the table that says which rule is taken where none is named.

    The rule came out best, by the committed runs of benchmarks/results/prediction_accuracy.md, for
    an optimizer and up to so many `missing` updates of the first stage. `is_cut`: batches are cut
    into at least as many minibatches as are in flight, two or more.
    """

    optimizer: str
    is_cut: bool
    missing: int
    rule: str | Mapping[str, Any]


_FEEDBACK = MappingProxyType({"rule": "two_versions", "error_feedback": True})
DEFAULTS = (
    Default("SGD", False, 15, "spectrain"),
    Default("SGD", False, 31, "multistep"),
    Default("AdamW", False, 31, "spectrain"),
    Default("AdamW", True, 1, _FEEDBACK),
    Default("NAdam", False, 31, "nesterov"),
)
OTHERWISE = "stash"  # for optimizers that no row has, and that no rule knows
_LIKE = {"Adam": "AdamW"}  # optimizers that were not measured take the rows of another


def make_prediction(value: str | Mapping[str, Any] | Prediction) -> Prediction:
    """Return a rule from its name, from ``{"rule": name, option: value, ...}``, or as it is.

    Raises ValueError for names and options that are not there.
    """
    if isinstance(value, Prediction):
        return value
    options = dict(value) if isinstance(value, Mapping) else {"rule": value}
    # an option of the value is a field of the rule's dataclass
    rule = PREDICTIONS[
        check_choice(options.pop("rule", None), name="prediction", allowed=PREDICTIONS)
    ]
    known = [field.name for field in fields(rule)]
    for option in options:
        if option not in known:
            offered = f"has the options {', '.join(known)}" if known else "has no options"
            raise ValueError(f"prediction {rule.name!r} {offered}, got {option!r}")
    return rule(**options)


def prediction_to_value(prediction: Prediction) -> str | dict[str, Any]:
    """Return the value from which `make_prediction` makes `prediction`.

    It is the rule's name, with the options that are not as by default.
    """
    options = {
        field.name: value
        for field in fields(prediction)
        if (value := getattr(prediction, field.name)) != field.default
    }
    return {"rule": prediction.name, **options} if options else prediction.name


def default_prediction(
    optimizer: Optimizer | str, *, flight: int = 1, accumulate: int = 1
) -> Prediction:
    """Return the rule that `DEFAULTS` has for an optimizer, or the name of its class.

    `flight` minibatches are between the forward and the backward pass of the first stage, and an
    update takes `accumulate` of them. Weight stashing where that rule does not know this optimizer.
    """
    name = optimizer if isinstance(optimizer, str) else type(optimizer).__name__
    row = _row(name, flight, accumulate)
    rule = make_prediction(OTHERWISE if row is None else row.rule)
    try:
        if isinstance(optimizer, Optimizer):
            # A rule refuses, for two stages, an optimizer that it does not know.
            rule.on(optimizer, stage=0, num_stages=2)
    except ValueError:
        return make_prediction(OTHERWISE)
    return rule


# The optimizer's row for such a run, else the nearest; None: it has none.
def _row(name: str, flight: int, accumulate: int) -> Default | None:
    rows = [row for row in DEFAULTS if row.optimizer == _LIKE.get(name, name)]
    is_cut, missing = accumulate >= max(flight, 2), -(-flight // accumulate)
    alike = [row for row in rows if row.is_cut == is_cut] or rows
    enough = (row for row in alike if row.missing >= missing)
    return next(enough, alike[-1] if alike else None)


# ---- Weights as they are.


@dataclass(frozen=True)
class NoPrediction(Prediction):
    """No rule: each pass computes with the newest weights.

    So forward and backward of a minibatch do not agree.
    """

    name: ClassVar[str] = "none"

    @override
    def copies_at(self, place: StagePlace) -> int:
        return 0

    @override
    def traffic(
        self, forward: Staleness, backward: Staleness, *, optimizer: str, in_cache: bool
    ) -> Traffic:
        return Traffic(0.0, 0.0)

    @override
    def at_work(self, optimizer: Optimizer, place: StagePlace) -> StagePrediction:
        return _PredictedWeights(
            optimizer,
            method="SGD",  # whatever it is: no moment is read
            predict=repeated_update,
            forward=lambda staleness: 0,
            backward=lambda staleness: 0,
        )


# ---- Weight stashing: both passes of a minibatch compute with one version of the weights, which is
# kept until its backward pass is done.


@dataclass(frozen=True)
class WeightStashing(Prediction):
    """PipeDream's weight stashing: backward computes with the weights of the forward pass.

    Those were the newest then (Narayanan et al., SOSP 2019, section 3.3, without vertical
    synchronization). Gradients are true ones, of old weights.
    """

    name: ClassVar[str] = "stash"

    @override
    def copies_at(self, place: StagePlace) -> int:
        # rounded up: one version for each update that is done while a minibatch is in flight
        return -(-place.lag // place.accumulate)

    @override
    def traffic(
        self, forward: Staleness, backward: Staleness, *, optimizer: str, in_cache: bool
    ) -> Traffic:
        # a version is kept if an update comes between; passes are pointed to it
        return Traffic(0.0, COPY * (forward.missing > 0))

    @override
    def at_work(self, optimizer: Optimizer, place: StagePlace) -> StagePrediction:
        return _StashedWeights(
            optimizer,
            # A minibatch takes the newest version; those to come never want an old one.
            choose=lambda position: position.now,
            keep=lambda version, now: False,
        )


@dataclass(frozen=True)
class Nesterov(WeightStashing):
    """Weight stashing with NAdam and decoupled weight decay, whose look-ahead undoes the delay.

    The Nesterov method of Ajanthan et al., ICML 2025, arXiv 2505.01099, sections 3 and 5:
    ``torch.optim.NAdam`` with beta 1 = 0.99, which weighs the gradient by 1 - beta 1. Only the
    optimizer differs from `WeightStashing`; this rule makes sure of it.
    """

    name: ClassVar[str] = "nesterov"
    optimizers: ClassVar[tuple[str, ...]] = ("NAdam",)

    @override
    def at_work(self, optimizer: Optimizer, place: StagePlace) -> StagePrediction:
        if not isinstance(optimizer, optim.NAdam):
            raise ValueError(
                f"prediction {self.name!r} is for NAdam of torch.optim, with betas=(0.99, 0.999) "
                f"and decoupled_weight_decay=True; got {type(optimizer).__name__}. With another "
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
        return super().at_work(optimizer, place)


@dataclass(frozen=True)
class TwoVersions(Prediction):
    """PipeDream-2BW's double-buffered weights: gradients of weights one update older.

    On all stages update t + 1 is W - lr gradient(the weights one update older) (Narayanan et al.,
    ICML 2021, arXiv 2006.09503, section 3.1). An update takes at least as many minibatches as are
    in flight behind the first stage: then two versions suffice. After a drained state the first
    update has no older weights.

    With `error_feedback` the optimizer's move d, which came one update late, is made good for in
    the next one: W + 2 d - (the move before). That is the kind of correction of Zmushko et al.,
    arXiv 2606.30634; the formula is this package's. It needs one more copy, for the last move, and
    serves any optimizer.

    The first `synchronous_updates` of a fit wait for their gradients: the pipeline is drained after
    each of them. Whoever runs the minibatches does that; the weights follow.
    """

    name: ClassVar[str] = "two_versions"
    error_feedback: bool = False
    synchronous_updates: int = 0

    def __post_init__(self) -> None:
        check_whole(self.synchronous_updates, name="synchronous_updates", least=0)
        if not isinstance(self.error_feedback, bool):
            raise ValueError(f"error_feedback is True or False; got {self.error_feedback!r}")

    @override
    def copies_at(self, place: StagePlace) -> int:
        return (1 + self.error_feedback) * (place.num_stages > 1)

    @override
    def traffic(
        self, forward: Staleness, backward: Staleness, *, optimizer: str, in_cache: bool
    ) -> Traffic:
        # passes are pointed to their version, which an update keeps; the feedback takes three
        # differences or sums of two and a copy, or reads three numbers and writes two in a cache
        feedback = 5.0 if in_cache else 9.0 + COPY
        return Traffic(0.0, COPY + feedback * self.error_feedback)

    @override
    def at_work(self, optimizer: Optimizer, place: StagePlace) -> StagePrediction:
        behind = (place.num_stages - 1) * place.lag_per_hop
        is_delayed = place.num_stages > 1

        def choose(position: _UpdateCounts) -> int:
            # One update behind the own one, but nothing from before the drained state.
            version = max(position.own - is_delayed, position.drained)
            if version > position.now:
                raise ValueError(
                    f"prediction {self.name!r} needs at least as many minibatches in an update as "
                    f"are in flight, {behind}; set accumulate_grad_batches={behind}, or use "
                    "prediction 'stash'"
                )
            return version

        return _StashedWeights(
            optimizer,
            choose=choose,
            # minibatches to come may use the newest version and the one before it
            keep=lambda version, now: is_delayed and version >= now - 1,
            feeds_back=is_delayed and self.error_feedback,
        )


class _UpdateCounts(NamedTuple):
    """Updates done at three times, from the point of view of a forward pass."""

    now: int  # when the pass begins
    own: int  # before the update with the pass's minibatch
    drained: int  # when the pipeline was last drained


class _StashedWeights(StagePrediction):
    """Keeps old versions of the weights, and points the parameters to them for passes.

    Where somebody else refers to the parameters' memory (see `are_alone`), contents are exchanged.

    `choose` gives the version for the passes of a minibatch. `keep(version, now)` says whether
    minibatches that have not come in yet may use `version` after `now` updates. `feeds_back`: moves
    are corrected by the one before; it needs the newest version to be kept at each update.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        choose: Callable[[_UpdateCounts], int],
        keep: Callable[[int, int], bool],
        feeds_back: bool = False,
    ) -> None:
        self._optimizer, self._choose, self._keep = optimizer, choose, keep
        self._feeds_back = feeds_back
        self._moves: list[Tensor] = []  # of the last update that was late, with `feeds_back`
        self._updates = self._drained_at = 0
        self._used: dict[int, int] = {}  # version by minibatch in flight
        self._versions: dict[int, list[Tensor]] = {}  # copies by version
        self._spare: list[list[Tensor]] = []  # copies that may be overwritten
        # since the last drained state: the parameters, and whether contents are exchanged
        self._parameters: list[Tensor] | None = None
        self._swaps = False

    @override
    def forward(
        self, minibatch: int, staleness: Staleness, rates: Rates
    ) -> AbstractContextManager[None]:
        # nothing is in flight before the first pass: no graph refers to the parameters' memory
        if self._parameters is None:
            self._parameters = trainable(self._optimizer)
            self._swaps = not are_alone(self._parameters)
        # the version is chosen at the forward pass, and backward of this minibatch uses the same
        version = self._choose(
            _UpdateCounts(self._updates, self._updates + staleness.missing, self._drained_at)
        )
        self._used[minibatch] = version
        return self._in_place(version)

    @override
    @contextmanager
    def backward(self, minibatch: int, staleness: Staleness, rates: Rates) -> Iterator[None]:
        with self._in_place(self._used[minibatch]):
            yield
        # only now, after the pass, may its copies be overwritten
        del self._used[minibatch]

    @override
    @contextmanager
    def update(self, minibatch: int) -> Iterator[None]:
        assert self._parameters is not None, "an update follows a pass"
        parameters = self._parameters
        # Copies that nobody needs after this update become spare first, so that one can be reused.
        after = self._updates + 1
        for version in [each for each in self._versions if not self._is_needed(each, after)]:
            self._spare.append(self._versions.pop(version))
        # The weights are about to change: keep them if a pass will want them.
        if self._is_needed(self._updates, after):
            self._versions[self._updates] = self._kept(parameters)
        with unseen(trainable(self._optimizer)):
            yield
        # the first update after a drained state was not late
        if self._feeds_back and self._updates > self._drained_at:
            self._feed_back(parameters, self._versions[self._updates])
        self._updates = after

    def _kept(self, parameters: list[Tensor]) -> list[Tensor]:
        # Tensors with the weights of now, which the coming step does not change
        make = empty_copies if self._swaps else empty_places
        copies = self._spare.pop() if self._spare else make(parameters)
        copy_into(copies, parameters)
        if self._swaps:
            return copies
        # graphs in flight refer to the memory of now: it keeps this version, the step changes the
        # copies
        old = [parameter.data for parameter in parameters]
        point_to(parameters, copies)
        return old

    def _feed_back(self, parameters: list[Tensor], before: list[Tensor]) -> None:
        # Make the update's move twice, and take back the one of the update before
        is_first = not self._moves
        if is_first:
            self._moves = empty_copies(parameters)
        with torch.no_grad(), unseen(parameters):
            # by pieces whose differences stay in a processor's cache
            for now, old, last in pieces(parameters, before, self._moves):
                moves = torch._foreach_sub(now, old)
                if not is_first:
                    torch._foreach_add_(now, moves)
                    torch._foreach_sub_(now, last)
                torch._foreach_copy_(last, moves)

    @override
    def drained(self) -> None:
        # Nothing is in flight, so no old version is wanted. Parameters may change now.
        assert not self._used, f"minibatches {sorted(self._used)} are in flight"
        self._moves = []
        self._versions.clear()
        self._spare.clear()
        self._parameters, self._drained_at = None, self._updates

    @property
    @override
    def held_bytes(self) -> int:
        held = (*self._versions.values(), *self._spare, self._moves)
        return sum(num_bytes(copies) for copies in held)

    @contextmanager
    def _in_place(self, version: int) -> Iterator[None]:
        # Put `version` into the parameters for a pass
        # the newest version is in the parameters already
        if version == self._updates:
            yield
            return
        assert self._parameters is not None
        copies, newest = self._versions[version], [p.data for p in self._parameters]
        # no third copy: memory of the old version holds the newest one during the pass
        put, take = (swap, copies) if self._swaps else (point_to, newest)
        put(self._parameters, copies)
        try:
            yield
        finally:
            put(self._parameters, take)

    def _is_needed(self, version: int, now: int) -> bool:
        return version in self._used.values() or self._keep(version, now)


# ---- Prediction: weights of a later version, computed from the optimizer's moments. A copy of the
# true weights is held during a pass. Parameters without an update so far are not predicted.


@dataclass(frozen=True)
class SpecTrain(Prediction):
    """SpecTrain: all passes of a minibatch compute with the weights when stage 0 is done with it.

    W - s lr v, s `Staleness.round_trip` (Chen et al., arXiv 1809.02839, section 3). The paper's
    momentum ``v = g v + (1 - g) gradient`` moves W by lr v; torch's buffer is v / (1 - g), and lr
    times it moves W: lr v is the last update in both. That is what is taken here, not g buffer +
    gradient, as in the authors' code. For Adam and AdamW, of which the paper does not speak, it is
    the direction of the last update, for AdamW without its decay.
    """

    name: ClassVar[str] = "spectrain"
    optimizers: ClassVar[tuple[str, ...]] = KNOWN

    @override
    def copies_at(self, place: StagePlace) -> int:
        # the last of one or two stages is done when stage 0 is: it has nothing to predict
        return int(place.stage >= 2 or place.lag > 0)

    @override
    def traffic(
        self, forward: Staleness, backward: Staleness, *, optimizer: str, in_cache: bool
    ) -> Traffic:
        passes = (forward.round_trip > 0) + (backward.round_trip > 0)
        return Traffic(passes * (move_traffic(optimizer, in_cache=in_cache) + COPY), 0.0)

    @override
    def at_work(self, optimizer: Optimizer, place: StagePlace) -> StagePrediction:
        return _PredictedWeights(
            optimizer,
            method=method_of(optimizer, rule=self.name),
            predict=repeated_update,
            # both passes aim at the version after stage 0's update with this minibatch
            forward=lambda staleness: staleness.round_trip,
            backward=lambda staleness: staleness.round_trip,
        )


@dataclass(frozen=True)
class MultiStep(Prediction):
    """FTPipe's prediction: forward passes compute with the weights after s updates of gradient 0.

    s is `Staleness.missing`, so that the backward pass finds these weights, if gradients are 0.
    Momentum decays, learning rates are those of the future schedule, weight decay goes on (Eliad et
    al., USENIX ATC 2021; pipe/pipeline/weight_prediction of the authors' code). With SGD at a
    constant rate and no decay this is W - lr (g - g^(s+1)) / (1 - g) buffer. Adam moves in step j
    by lr_j b1^j m / (1 - b1^(t+j)) / (sqrt(v / (1 - b2^(t+j))) + eps).
    """

    name: ClassVar[str] = "multistep"
    optimizers: ClassVar[tuple[str, ...]] = KNOWN

    @override
    def copies_at(self, place: StagePlace) -> int:
        return int(place.lag > 0)

    @override
    def traffic(
        self, forward: Staleness, backward: Staleness, *, optimizer: str, in_cache: bool
    ) -> Traffic:
        if not forward.missing:
            return Traffic(0.0, 0.0)
        moved = move_traffic(optimizer, in_cache=in_cache, steps=forward.missing)
        return Traffic(moved + COPY, 0.0)

    @override
    def at_work(self, optimizer: Optimizer, place: StagePlace) -> StagePrediction:
        return _PredictedWeights(
            optimizer,
            method=method_of(optimizer, rule=self.name),
            predict=updates_without_gradients,
            # forward looks ahead to what backward will find, and backward needs no prediction
            forward=lambda staleness: staleness.missing,
            backward=lambda staleness: 0,
        )


# From moments, the updates ahead and their hyperparameters: how the weights move.
Predict = Callable[[Moments, Method, int, Sequence[Hyperparameters]], Move]


class _PredictedWeights(StagePrediction):
    """Predicts in place; `forward` and `backward` say by how many updates."""

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        method: Method,
        predict: Predict,
        forward: Callable[[Staleness], int],
        backward: Callable[[Staleness], int],
    ) -> None:
        self._optimizer, self._method, self._predict = optimizer, method, predict
        self._forward, self._backward = forward, backward
        self._moments: list[Moments] | None = None  # since the last update
        self._steps: dict[Tensor, int] = {}  # of Adam, by parameter; counted as updates are made
        self._true: dict[Tensor, Tensor] = {}  # copies by parameter

    @override
    def forward(
        self, minibatch: int, staleness: Staleness, rates: Rates
    ) -> AbstractContextManager[None]:
        return self._predicted(self._forward(staleness), rates)

    @override
    def backward(
        self, minibatch: int, staleness: Staleness, rates: Rates
    ) -> AbstractContextManager[None]:
        return self._predicted(self._backward(staleness), rates)

    @override
    @contextmanager
    def update(self, minibatch: int) -> Iterator[None]:
        # the moments change with the update, so the next pass reads them again
        self._moments = None
        stepped = [p for p in self._steps if p.grad is not None]
        with unseen(trainable(self._optimizer)):
            yield
        self._steps.update({p: self._steps[p] + 1 for p in stepped})

    @override
    def drained(self) -> None:
        self._moments = None
        self._steps.clear()
        self._true.clear()

    @property
    @override
    def held_bytes(self) -> int:
        return num_bytes(self._true.values())

    @contextmanager
    def _predicted(self, count: int, rates: Rates) -> Iterator[None]:
        assert count >= 0 and rates, (count, rates)
        # read once per update: all passes until the next one share them
        if count and self._moments is None:
            self._moments = read_moments(
                self._optimizer, method=self._method, steps_made=self._steps
            )
        kept: list[tuple[Sequence[Tensor], list[Tensor]]] = []  # parameters with copies
        try:
            for moments in (self._moments or []) if count else []:
                # copies are made at the first prediction, and reused until the pipeline drains
                new = [parameter for parameter in moments.parameters if parameter not in self._true]
                self._true.update(zip(new, empty_copies(new), strict=True))
                copies = [self._true[parameter] for parameter in moments.parameters]
                # `rates` has the groups of every update ahead; of each the one of these moments
                move = self._predict(
                    moments, self._method, count, [groups[moments.group] for groups in rates]
                )
                with torch.no_grad(), unseen(moments.parameters):
                    keep_and_move(moments, copies, move)
                kept.append((moments.parameters, copies))
            yield
        finally:
            for parameters, copies in kept:
                # the true weights come back bit for bit, also after an error in the pass
                copy_into(parameters, copies)


_RULES: tuple[type[Prediction], ...] = (
    *(SpecTrain, MultiStep, WeightStashing),
    *(TwoVersions, Nesterov, NoPrediction),
)
PREDICTIONS: Mapping[str, type[Prediction]] = MappingProxyType({rule.name: rule for rule in _RULES})

"""Weights of a stage of an asynchronous pipeline, around its passes and updates.

    with weights.of_pass("forward", minibatch):       # what the prediction rule computes with
        ...
    with weights.of_update(minibatch):                # the true weights, the minibatch's rates
        optimizer.step()

A pass computes with the weights that a rule for each optimizer puts into the parameters: those of
an earlier version, or predicted ones. For that the rule gets the staleness of the pass, which
follows from the updates to come (`UpdatePattern`), and with which hyperparameters these will be
done (`MinibatchRates`).

[Note: writes] Autograd saves tensors that refer to the parameters' storage, and refuses a backward
pass after the storage was written to. Here that is meant: a pass computes with what the storage
holds when it runs. So writes keep the version counters, which views of a parameter share with it
(`unseen`). Rules that keep whole versions point parameters to the storage of one for its passes.

[Note: rates of a minibatch] An update happens long after the iteration in which its minibatch came
in, and schedulers go on in each iteration. The update uses what parameter groups held when the
minibatch came in; before and after it they hold what they would without a pipeline.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import lru_cache
from typing import Any, Literal

from torch import Tensor
from torch.optim import Optimizer

from lightning_topt.schedules.schedules import Completes, continuous_schedule
from lightning_topt.schedules.staleness import StageStaleness, Staleness, staleness
from lightning_topt.weight_prediction.rules import Prediction, StagePrediction, default_prediction
from lightning_topt.weight_prediction.weights import unseen

_KEPT = 16  # times the stages and the lag per hop: more than staleness looks back
_SETTLED = 4  # round trips after which a schedule of unit passes repeats itself, generously
Group = dict[str, Any]  # all entries of a parameter group but "params"
Groups = list[Group]


class StageWeights:
    """The weights of one stage.

    Args:
        optimizers: they change the parameters.
        prediction: the rule for the weights of passes; None: each optimizer's default.
        pattern: the updates of the stage.
        parameters: of the stage.

    Raises:
        ValueError: for an optimizer that the rule does not know.
    """

    def __init__(
        self,
        optimizers: Sequence[Optimizer],
        prediction: Prediction | None,
        pattern: UpdatePattern,
        *,
        parameters: Sequence[Tensor],
    ) -> None:
        self._optimizers, self._pattern = list(optimizers), pattern
        self._parameters = tuple(parameters)
        self._prediction, self._accumulate = prediction, 1
        self._rules = self._make_rules()
        self.rates = MinibatchRates(self._optimizers)

    @property
    def held_bytes(self) -> int:
        """Bytes of copies of weights that are held now."""
        return sum(rule.held_bytes for rule in self._rules)

    def begin(self, minibatch: int, *, accumulate: int, is_drained: bool) -> None:
        """Record the hyperparameters with which a minibatch comes in.

        `accumulate`, minibatches for each update, changes only while the run is drained.
        """
        self.rates.record(minibatch)
        # Rules depend on it: make them anew.
        if accumulate != self._accumulate and is_drained:
            self._accumulate = accumulate
            self._rules = self._make_rules()

    def of_pass(
        self, kind: Literal["forward", "backward"], minibatch: int
    ) -> AbstractContextManager[None]:
        """Return a context in which parameters hold what a pass computes with."""
        staleness, pending = self._pattern.staleness(kind, minibatch), self._pattern.pending
        # Rates of as many updates as a rule may predict over.
        count = 1 + max(staleness.missing, staleness.round_trip)
        placed = []
        for number, rule in enumerate(self._rules):
            rates = self.rates.of_updates(pending, optimizer=number, count=count)
            placed.append(getattr(rule, kind)(minibatch, staleness, rates))
        return holding(placed, self._parameters)

    @contextmanager
    def of_update(self, minibatch: int) -> Generator[None]:
        """Let optimizers step within: true weights, and the minibatch's hyperparameters."""
        with self.rates.in_place(minibatch), unseen(self._parameters), ExitStack() as stack:
            for rule in self._rules:
                stack.enter_context(rule.update(minibatch))
            yield

    def drained(self) -> None:
        """Free all copies."""
        for rule in self._rules:
            rule.drained()

    def _make_rules(self) -> list[StagePrediction]:
        # the default depends on how many minibatches are in flight, and in an update
        sizes = {**self._pattern.sizes, "accumulate": self._accumulate}
        flight = (sizes["num_stages"] - 1) * sizes["lag_per_hop"]
        found = []
        for optimizer in self._optimizers:
            rule = self._prediction or default_prediction(
                optimizer, flight=flight, accumulate=self._accumulate
            )
            found.append(rule.on(optimizer, **sizes))
        return found


# ---- updates to come -----------------------------------------------------------------------------


class UpdatePattern:
    """The minibatches that complete an update of a stage, as far as a run knows them.

    The staleness of its passes follows from these. It counts from the last drained state.
    """

    def __init__(self, *, num_stages: int, stage: int, lag_per_hop: int) -> None:
        self.sizes = {"stage": stage, "num_stages": num_stages, "lag_per_hop": lag_per_hop}
        self._reach = _KEPT * num_stages * lag_per_hop
        self._known: dict[int, bool] = {}
        self._pending: deque[int] = deque()
        self._start = self._latest = 0
        self._accumulate = 1
        self._end: int | None = None
        self._last_complete, self._last_completes = -1, True
        self.version = 0  # updates of this stage since it was drained

    def begin(self, minibatch: int, *, completes: bool, accumulate: int) -> None:
        """Add a minibatch that comes in."""
        self._known[minibatch], self._latest, self._accumulate = completes, minibatch, accumulate
        self._known.pop(minibatch - self._reach, None)
        if completes:
            self._pending.append(minibatch)
            self._last_complete = minibatch

    def expect(self, minibatches: int | None, *, last_completes: bool = True) -> None:
        """Expect so many minibatches in all before the next drain; None: that is not known."""
        self._end, self._last_completes = minibatches, last_completes

    def restart(self, minibatches: int) -> None:
        """Start afresh: the run is drained."""
        self._start, self._end, self.version = minibatches, None, 0

    def updated(self, minibatch: int) -> None:
        """Note that the update with this minibatch is done."""
        assert self._pending and self._pending[0] == minibatch, (minibatch, self._pending)
        self._pending.popleft()
        self.version += 1

    @property
    def pending(self) -> tuple[int, ...]:
        """Minibatches in flight that complete updates still to be done, the next one first."""
        return tuple(self._pending)

    def completes(self, minibatch: int) -> bool:
        """Return whether a minibatch completes an update, or is expected to."""
        # Minibatches that came in are known; later ones follow the pattern.
        if minibatch <= self._latest:
            return self._known[minibatch]
        is_last = self._last_completes and minibatch + 1 == self._end
        return is_last or (minibatch - self._last_complete) % self._accumulate == 0

    def staleness(self, kind: Literal["forward", "backward"], minibatch: int) -> Staleness:
        """Return the staleness of the pass that comes now."""
        found = running_staleness(
            minibatch - self._start,
            kind=kind,
            completes=lambda index: self.completes(index + self._start),
            num_minibatches=None if self._end is None else self._end - self._start,
            **self.sizes,
        )
        # Versions are counted by this stage, not from the pattern.
        return found._replace(version=self.version)


def running_staleness(
    minibatch: int,
    *,
    stage: int,
    kind: Literal["forward", "backward"],
    num_stages: int,
    completes: Completes,
    num_minibatches: int | None = None,
    lag_per_hop: int = 1,
) -> Staleness:
    """Return the staleness of a pass in a run of which only the near future is known.

    The same as that of `staleness` for the whole schedule, but for `version`, which is of no use.

    Args:
        minibatch: its index since the last drained state.
        stage: index of the stage.
        kind: the pass.
        num_stages: stages of the pipeline.
        completes: says of minibatches around this one whether they complete an update.
        num_minibatches: how many there are from the last drained state to the next, if known.
        lag_per_hop: as in `continuous_schedule`.
    """
    # A window of minibatches around this one, with the drained states that lie within reach.
    reach = _SETTLED * num_stages * lag_per_hop
    total = minibatch + reach if num_minibatches is None else num_minibatches
    start = max(0, min(minibatch - reach, total - 2 * reach))
    stop = (
        min(total, max(minibatch + reach, 2 * reach))
        if num_minibatches is not None
        else start + 2 * reach
    )
    pattern = tuple(completes(index) for index in range(start, stop))
    stages = _of_pattern(pattern, num_stages=num_stages, lag_per_hop=lag_per_hop)
    of_stage = stages[stage].forward if kind == "forward" else stages[stage].backward
    return of_stage[minibatch - start]


@lru_cache(maxsize=512)
def _of_pattern(
    pattern: tuple[bool, ...], *, num_stages: int, lag_per_hop: int
) -> tuple[StageStaleness, ...]:
    if not any(pattern):
        none = (Staleness(0, 0, 0),) * len(pattern)
        return (StageStaleness(none, none),) * num_stages
    schedule = continuous_schedule(
        num_ranks=num_stages,
        num_minibatches=len(pattern),
        lag_per_hop=lag_per_hop,
        completes=pattern.__getitem__,
    )
    return staleness.__wrapped__(schedule)


# ---- hyperparameters -----------------------------------------------------------------------------


class MinibatchRates:
    """The hyperparameters of `optimizers` when each minibatch in flight came in.

    See [Note: rates of a minibatch].
    """

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._optimizers = list(optimizers)
        self._recorded: dict[int, list[Groups]] = {}
        self._latest: list[Groups] = []
        self._changed: set[str] = set()  # entries in which optimizers keep state of their own

    def record(self, minibatch: int) -> None:
        """Record what parameter groups hold now."""
        # Tensors, such as a capturable learning rate, are changed in place: keep copies.
        self._latest = [
            [
                {
                    name: value.clone() if isinstance(value, Tensor) else value
                    for name, value in group.items()
                    if name != "params"
                }
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
        """Return the hyperparameters of each group for updates with these minibatches.

        More follow up to `count` in all: the latest known ones are taken to stay.
        """
        found: list[Sequence[Mapping[str, Any]]] = [
            self._recorded[each][optimizer] for each in minibatches
        ]
        return [*found, *[self._latest[optimizer]] * max(count - len(found), 0)]

    @contextmanager
    def in_place(self, minibatch: int) -> Generator[None]:
        """Let parameter groups hold the hyperparameters of a minibatch within.

        What an optimizer changes within stays changed.
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
                    else:  # the optimizer's own state, here and from now on
                        self._changed.add(name)


# ---- writes that autograd does not see -----------------------------------------------------------


@contextmanager
def holding(
    weights: Iterable[AbstractContextManager[None]], parameters: Iterable[Tensor]
) -> Generator[None]:
    """Run passes within contexts that change `parameters`, hidden from autograd."""
    changed = tuple(parameters)
    # Only entering and leaving write; passes within must see version counters as ever.
    stack = ExitStack()
    with unseen(changed):
        for each in weights:
            stack.enter_context(each)
    try:
        yield
    finally:
        with unseen(changed):
            stack.close()

"""The step of one optimizer over a fit: plain and timed at first, then shared where that is faster.

    measured   `WARMUP_STEPS`, then `PLAIN_STEPS` that are timed
    declined   where gathering the parameters takes longer than what sharing can save
    on trial   `TRIAL_STEPS` of a `ParallelStep` must be faster than the plain ones were
    settled    whatever was faster, until parameters are added to groups or leave them

Sharing can pay where t_op (1 - 1/P) > t_all-gather (PTO, arXiv 2010.10458), which the gather of a
sample tells; whether it does the trial tells. All seconds are the slowest rank's, so that all ranks
decide alike.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import nan
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from lightning_topt.communication.collectives import mark, seconds_between, values_of_group
from lightning_topt.optim.full_state import parameters_of
from lightning_topt.optim.parallel_step import ParallelStep, PieceGather, install_parallel_step
from lightning_topt.optim.pieces import Piece
from lightning_topt.optim.update_rule import UpdateRule, pieces_of

if TYPE_CHECKING:
    from lightning_topt.communication.node.rows import NodeRows

Closure = Callable[[], Any]
WARMUP_STEPS, PLAIN_STEPS = 1, 3
TRIAL_STEPS = 4  # the first of which warms up
_SAMPLE_BYTES = 64 << 20  # of parameters that are gathered for a measurement
_GATHERS = 4  # that are timed, the first of which is not counted
_NOTHING = "not shared: no parameter has equal gradients on all ranks"


@dataclass(frozen=True)
class Sharing:
    """What all optimizers of a fit have in common.

    Attributes:
        group: the ranks, and the timeout of every wait.
        reduced: the parameters whose gradients are equal on all ranks; only these are shared.
        always: share from the first step on, without measuring.
        node: returns the ranks through the memory of their one machine, when that is first needed.
        may_pay: whether so many seconds saved in each step may earn what measuring costs.
    """

    group: dist.ProcessGroup
    reduced: frozenset[Tensor]
    always: bool = False
    node: Callable[[], NodeRows | None] = lambda: None
    may_pay: Callable[[float], bool] = lambda _: True


@dataclass(frozen=True)
class Decision:
    """Whether the update of an optimizer is `shared`, and the seconds of its steps (nan: untimed).

    `reason` says so in a sentence.
    """

    shared: bool
    plain_seconds: float
    shared_seconds: float
    reason: str


class AdaptiveStep:
    """Replaces ``optimizer.step`` during a fit, from `start` to `finish`.

    `decision` is there once decided, and `say` is called with its reason. Where parameters are
    added to groups or leave them, a shared step shares those of then, and another one is measured
    again.
    """

    # Learning-rate schedulers leave this mark on a step that they have wrapped.
    _wrapped_by_lr_sched = True

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        rule: UpdateRule,
        sharing: Sharing,
        say: Callable[[str], None] = print,
    ) -> None:
        self.optimizer, self.rule, self.sharing, self.say = optimizer, rule, sharing, say
        self.decision: Decision | None = None
        self.parallel: ParallelStep | None = None
        self._own_step: Any = None  # what the instance has as `step`, of a scheduler for instance
        self._step: Callable[..., Any] = optimizer.step
        self._known: tuple[int, ...] = ()
        # Parameters per group where nothing is shared: small models' steps take less time than
        # looking at every parameter.
        self._declined: list[int] | None = None
        self._steps_done = 0
        self._plain_seconds: list[float] = []
        self._trial_seconds: list[float] = []

    @property
    def is_settled(self) -> bool:
        """Whether it is decided if the update is shared, and no trial is under way."""
        return self.decision is not None

    def start(self) -> None:
        """Take the place of ``optimizer.step``."""
        self._own_step = self.optimizer.__dict__.get("step")
        self._step = self.optimizer.step
        self.optimizer.step = self  # type: ignore[method-assign]

    def finish(self) -> None:
        """Give every rank the full state, and the optimizer its own step again.

        Collective call where the update is shared.
        """
        self._unshare()
        self._leave()

    def _leave(self) -> None:
        if self._own_step is None:
            self.optimizer.__dict__.pop("step", None)
        else:
            self.optimizer.step = self._own_step  # type: ignore[method-assign]

    def __call__(self, closure: Closure | None = None, **kwargs: Any) -> Any:
        """Take one step; `closure` runs where it does in the plain step, after hooks before it.

        Raises PeerLostError when a rank is gone or late beyond the timeout of the group.
        """
        self.optimizer._opt_called = True  # type: ignore[attr-defined]  # schedulers warn without
        # the short way of a step that is not shared
        counts = [len(group["params"]) for group in self.optimizer.param_groups]
        if counts == self._declined:
            return (
                self._step(**kwargs) if closure is None else self._step(closure=closure, **kwargs)
            )
        if self._notice_parameters():
            if self.parallel is not None:
                self._share()
            else:
                self._measure_again()
                if self.sharing.always:  # nothing is measured
                    self._share()
                    what = "shared from the first step on, as told" if self.parallel else _NOTHING
                    is_shared = self.parallel is not None
                    self._decide(Decision(is_shared, nan, nan, f"the update is {what}"))
        if self.decision is not None:
            output = self._take(closure, kwargs)
        else:
            output = self._timed_step(closure, kwargs)
        self._declined = counts if self.decision is not None and self.parallel is None else None
        return output

    def _notice_parameters(self) -> bool:
        # whether the groups have other parameters than when this was last called
        before, self._known = self._known, tuple(map(id, parameters_of(self.optimizer)))
        return self._known != before

    def _take(self, closure: Closure | None, kwargs: dict[str, Any]) -> Any:
        step = self._step if self.parallel is None else self.parallel
        return step(**kwargs) if closure is None else step(closure=closure, **kwargs)

    # ---- the first steps

    def _measure_again(self) -> None:
        self.decision, self._steps_done = None, 0
        self._plain_seconds, self._trial_seconds = [], []

    def _timed_step(self, closure: Closure | None, kwargs: dict[str, Any]) -> Any:
        on_trial = self.parallel is not None
        # together: that one rank is late in the step is not what sharing costs
        output, seconds = time_step(
            self.optimizer,
            lambda asked: self._take(asked, kwargs),
            closure,
            group=self.sharing.group if on_trial else None,
        )
        if self._notice_parameters():  # the closure has changed the groups
            self._unshare()
            self._measure_again()
            return output
        self._steps_done += 1
        if on_trial:
            self._trial_seconds.append(seconds)
            if len(self._trial_seconds) == TRIAL_STEPS:
                self._judge()
        elif self._steps_done > WARMUP_STEPS:
            self._plain_seconds.append(seconds)
            if len(self._plain_seconds) == PLAIN_STEPS:
                self._try_where_it_may_pay()
        return output

    def _try_where_it_may_pay(self) -> None:
        # the slowest rank's seconds, which are all that ranks know of one another
        (plain,) = self._slowest(statistics.median(self._plain_seconds))
        # Sharing saves no more than the parts of other ranks.
        saved = plain * (1 - 1 / dist.get_world_size(self.sharing.group))
        if not self.sharing.may_pay(saved):
            reason = f"an update of {1e3 * plain:.2f} ms is too short to earn its measuring"
            self._decide(Decision(False, plain, nan, reason))
            return
        pieces = self._pieces()
        gather = (
            measure_gather(
                parameters_of(self.optimizer), pieces, self.sharing.group, node=self.sharing.node()
            )
            if pieces
            else nan
        )
        if can_pay(saved, gather):
            self._share()
            return
        reason = (
            f"the update is not shared: it takes {1e3 * plain:.2f} ms, and gathering the "
            f"parameters {1e3 * gather:.2f}"
            if pieces
            else f"the update is {_NOTHING}"
        )
        self._decide(Decision(False, plain, nan, reason))

    def _judge(self) -> None:
        plain, shared = self._slowest(
            statistics.median(self._plain_seconds), statistics.median(self._trial_seconds[1:])
        )
        faster = is_faster(plain, shared)
        times = f"it takes {1e3 * shared:.2f} ms, on each rank alone {1e3 * plain:.2f}"
        reason = f"the update is {'shared' if faster else 'not shared after a trial'}: {times}"
        if not faster:
            self._unshare()
        self._decide(Decision(faster, plain, shared, reason))

    def _decide(self, decision: Decision) -> None:
        self.decision = decision
        self.say(decision.reason)

    def _slowest(self, *seconds: float) -> list[float]:
        of_ranks = values_of_group(seconds, self.sharing.group)
        return [max(each) for each in zip(*of_ranks, strict=True)]

    # ---- what is shared

    def _pieces(self) -> list[Piece]:
        # of the parameters that may be shared, the same on all ranks
        def may_be_shared(parameter: Tensor) -> bool:
            has_sparse = parameter.grad is not None and parameter.grad.is_sparse
            return parameter in self.sharing.reduced and parameter.numel() > 0 and not has_sparse

        shared = {p for p in parameters_of(self.optimizer) if may_be_shared(p)}
        ranks = dist.get_world_size(self.sharing.group)
        return pieces_of(self.optimizer, shared, ranks=ranks, rule=self.rule)

    def _share(self) -> None:
        # Share the parameters of now from this step on. Collective call.
        pieces = self._pieces()
        if self.parallel is not None:
            self.parallel.update_pieces(pieces)
        elif pieces:
            self._leave()
            self.parallel = install_parallel_step(
                self.optimizer, pieces=pieces, group=self.sharing.group, node=self.sharing.node()
            )
            self.optimizer.step = self  # type: ignore[method-assign]

    def _unshare(self) -> None:
        # Give every rank the full state again. Collective call where the update is shared.
        if self.parallel is not None:
            # `remove` finds itself as the step, as it was installed
            self._leave()
            self.optimizer.step = self.parallel  # type: ignore[method-assign]
            self.parallel.remove()
            self.parallel = None
            self.optimizer.step = self  # type: ignore[method-assign]


def can_pay(saved_seconds: float, gather_seconds: float) -> bool:
    """Return whether sharing is worth a trial: what it saves at most is more than its gather."""
    return saved_seconds > gather_seconds


def is_faster(plain_seconds: float, shared_seconds: float) -> bool:
    """Return whether shared steps are faster, by the slowest rank's seconds."""
    return shared_seconds < plain_seconds


# ---- Measure


def time_step(
    optimizer: Optimizer,
    step: Callable[[Closure | None], Any],
    closure: Closure | None = None,
    *,
    group: dist.ProcessGroup | None = None,
) -> tuple[Any, float]:
    """Return what one call of `step` returns, and its seconds without those of `closure`.

    On CUDA these are the device's own: the host launches the update while the backward pass runs.
    The ranks of `group` begin the update together.
    """
    parameters = parameters_of(optimizer)
    device = parameters[0].device if parameters else torch.device("cpu")
    closures: list[tuple[Any, Any]] = []

    def begin_together() -> Any:
        if group is not None:
            dist.all_reduce(torch.zeros(1, device=device), group=group)
        return mark(device)

    def timed_closure() -> Any:
        assert closure is not None
        start = mark(device)
        loss = closure()
        closures.append((start, begin_together()))
        return loss

    start = begin_together()
    output = step(None if closure is None else timed_closure)
    seconds = seconds_between(start, mark(device))
    return output, seconds - sum(seconds_between(*marks) for marks in closures)


def measure_gather(
    parameters: Sequence[Tensor],
    pieces: Sequence[Piece],
    group: dist.ProcessGroup,
    *,
    node: NodeRows | None,
) -> float:
    """Return the seconds of a gather of `pieces`, on the slowest rank. Collective call.

    Of every n-th parameter where they are large, times n. They are equal on all ranks (as under
    DDP), and stay what they are.
    """
    indices = sorted({piece.index for piece in pieces})
    total = sum(parameters[index].nbytes for index in indices)
    sample = set(indices[:: max(1, -(-total // _SAMPLE_BYTES))])
    gather = PieceGather(
        parameters, [piece for piece in pieces if piece.index in sample], group=group, node=node
    )
    device, marks = parameters[0].device, []
    together = torch.zeros(1, device=device)
    for _ in range(_GATHERS):
        dist.all_reduce(together, group=group)  # no rank waits for another in what is timed
        start = mark(device)
        gather.gather()
        marks.append((start, mark(device)))
    seconds = statistics.median(seconds_between(*each) for each in marks[1:])
    slowest = max(values_of_group(seconds, group))
    return slowest * total / sum(parameters[index].nbytes for index in sample)

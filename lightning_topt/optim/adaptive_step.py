"""The step of one optimizer over a fit: plain and measured at first, then shared where that pays.

    measured   the first steps are plain and timed (`step_costs.UpdateCosts`)
    decided    groups whose update is worth it are shared (`choose_pieces`)
    on trial   `TRIAL_STEPS` of a `ParallelStep` must be faster than the plain ones were; where they
               are not, or nothing is worth sharing, a LARS is tried with its norms shared
    settled    whatever was faster, until parameters are added to groups or leave them

Sharing the update of a parameter group pays by the condition of PTO (arXiv 2010.10458): t_op (1 -
1/P) > t_all-gather. Here the busiest rank's real part of t_op stands in place of 1/P. All numbers
are the slowest rank's, so that all ranks decide alike.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import nan
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from lightning_topt.optim.full_state import parameters_of
from lightning_topt.optim.gather import PieceGather, sent_dtype
from lightning_topt.optim.lars import LARS, share_trust_ratios, unshare_trust_ratios
from lightning_topt.optim.parallel_step import ParallelStep, install_parallel_step
from lightning_topt.optim.pieces import Piece, Share, assign_pieces
from lightning_topt.optim.step_costs import (
    Closure,
    UpdateCosts,
    slowest_of_ranks,
    synchronize,
    time_step,
)
from lightning_topt.optim.update_rule import UpdateRule

if TYPE_CHECKING:
    from lightning_topt.communication.node.rows import NodeRows

TRIAL_STEPS = 4  # of what was decided, the first of which warms up
_SMALL_ELEMENTS = 256
_LARGE_ELEMENTS = 1 << 20  # per rank, float32: well above what is packed
_SAMPLE_BYTES = 64 << 20  # of the real parameters
# of the large gather, after one that is not counted; the small one is repeated more often
_REPEATS = 5
_SMALL_REPEATS = 15


@dataclass(frozen=True)
class Sharing:
    """What all optimizers of a fit have in common.

    Attributes:
        group: the ranks, and the timeout of every wait.
        reduced: the parameters whose gradients are equal on all ranks; only these are shared.
        always: share every group, from the first step, without measuring.
        gather_dtype: as for `install_parallel_step`.
        node: returns the ranks through the memory of their one machine, when that is first needed.
        may_pay: whether so many seconds saved in each step may earn what measuring costs.
    """

    group: dist.ProcessGroup
    reduced: frozenset[Tensor]
    always: bool = False
    gather_dtype: torch.dtype | None = None
    node: Callable[[], NodeRows | None] = lambda: None
    may_pay: Callable[[float], bool] = lambda _: True


class AdaptiveStep:
    """Replaces ``optimizer.step`` during a fit, from `start` to `finish`.

    `decisions` has one entry per group once decided; `shares_ratios` says whether the norms of a
    LARS are shared. When parameters are added to groups or leave them, the next step decides again
    from what is known: seconds of parameters that were never measured are estimated from the
    others'. `say` is called with a line for each decision.
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
        self.optimizer, self.sharing, self.say = optimizer, sharing, say
        self.decisions: list[Decision] = []
        self.parallel: ParallelStep | None = None
        self._own_step: Any = None  # what the instance has as `step`, of a scheduler for instance
        self._step: Callable[..., Any] = optimizer.step
        self._known: tuple[int, ...] = ()
        # Parameters per group where nothing is shared: small models' steps take less time than
        # looking at every parameter.
        self._declined: list[int] | None = None
        self._decided = self._installed = False
        self._costs = UpdateCosts(optimizer, rule=rule)
        self._gather: GatherCost | None = None
        self.shares_ratios = False
        self._trial_seconds: list[float] | None = None  # while sharing is on trial
        self._refused = False  # sharing of parameters, after a trial

    @property
    def is_settled(self) -> bool:
        """Whether it is decided what is shared, and no trial is under way."""
        return self._decided and self._trial_seconds is None

    def start(self) -> None:
        """Take the place of ``optimizer.step``."""
        self._own_step = self.optimizer.__dict__.get("step")
        self._step, self._installed = self.optimizer.step, True
        self.optimizer.step = self  # type: ignore[method-assign]

    def _leave(self) -> None:
        if self._own_step is None:
            self.optimizer.__dict__.pop("step", None)
        else:
            self.optimizer.step = self._own_step  # type: ignore[method-assign]

    def finish(self) -> None:
        """Give every rank the full state, and the optimizer its own step again.

        Collective call where a group is shared.
        """
        self._unshare_ratios()
        self._unshare()
        self._leave()

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
        output = self._general_step(closure, kwargs)
        shares = self.parallel is not None or self.shares_ratios or self._trial_seconds is not None
        self._declined = counts if self._decided and not shares else None
        return output

    def _general_step(self, closure: Closure | None, kwargs: dict[str, Any]) -> Any:
        changed = self._notice_parameters()
        if self.sharing.always:  # nothing is measured
            if changed:
                self._share(self._pieces_without_measuring())
            return self._take(closure, kwargs)
        if self._decided:  # on trial, or settled
            if changed:
                self._unshare_ratios()
                self._trial_seconds = None
            if self._trial_seconds is not None:
                return self._step_on_trial(self._trial_seconds, closure, kwargs)
            output = self._take(closure, kwargs)
            if changed and not self._refused:  # there are gradients of the new parameters now
                self._share(self._worthwhile_pieces())
            return output
        # the first steps
        if changed:
            self._costs.restart()
        output = self._costs.take_step(lambda asked: self._take(asked, kwargs), closure)
        if self._costs.done:
            if self._notice_parameters():  # the closure has changed the groups: measure again
                self._costs.restart()
                return output
            self._costs.agree(self.sharing.group)
            self._decided = True
            # Sharing saves no more than the parts of other ranks.
            ranks, seconds = dist.get_world_size(self.sharing.group), sum(self._costs.seconds())
            if not self.sharing.may_pay(seconds * (1 - 1 / ranks)):
                self.say(f"an update of {1e3 * seconds:.2f} ms is too short to earn its measuring")
                return output
            self._share(self._worthwhile_pieces())
            if self.parallel is None:
                self._try_ratios()
            else:
                self._trial_seconds = []
        return output

    def _notice_parameters(self) -> bool:
        """Return whether the groups have other parameters than when this was last called."""
        before, self._known = self._known, tuple(map(id, parameters_of(self.optimizer)))
        return self._known != before

    def _take(self, closure: Closure | None, kwargs: dict[str, Any]) -> Any:
        step = self._step if self.parallel is None else self.parallel
        return step(**kwargs) if closure is None else step(closure=closure, **kwargs)

    # ---- the first steps

    def _try_ratios(self) -> None:
        if isinstance(self.optimizer, LARS) and self.sharing.reduced.issuperset(
            parameters_of(self.optimizer)
        ):
            share_trust_ratios(self.optimizer, group=self.sharing.group)
            self.shares_ratios, self._trial_seconds = True, []

    def _step_on_trial(
        self, trial_seconds: list[float], closure: Closure | None, kwargs: dict[str, Any]
    ) -> Any:
        """Take a step of what was decided; after the last of them, keep it or not."""
        # together: that one rank is late in the step is not what sharing costs
        output, seconds = time_step(
            self.optimizer,
            lambda asked: self._take(asked, kwargs),
            closure,
            group=self.sharing.group,
        )
        trial_seconds.append(seconds)
        if len(trial_seconds) == TRIAL_STEPS:
            mine = [self._costs.step_seconds(), statistics.median(trial_seconds[1:])]
            device = parameters_of(self.optimizer)[0].device
            plain, shared = slowest_of_ranks(mine, device=device, group=self.sharing.group)
            self._trial_seconds = None
            self._judge(plain, shared)
        return output

    def _judge(self, plain_seconds: float, shared_seconds: float) -> None:
        faster = is_faster(plain_seconds, shared_seconds)
        times = (
            f"a step takes {1e3 * shared_seconds:.2f} ms with them shared, "
            f"{1e3 * plain_seconds:.2f} without"
        )
        if self.parallel is None:  # trust ratios were on trial
            if not faster:
                self._unshare_ratios()
            self.say(f"trust ratios: {'shared' if faster else 'not shared'}; {times}")
        elif not faster:
            groups = [decision.group for decision in self.decisions if decision.shared]
            self.say(f"groups {groups}: not shared after all; {times}")
            reason = f"not shared after a trial: {times}"
            self.decisions = [
                replace(d, pays=False, shared=False, reason=reason) for d in self.decisions
            ]
            self._unshare()
            self._refused = True
            self._try_ratios()

    def _unshare(self) -> None:
        """Give every rank the full state again.

        Collective call where a group is shared.
        """
        if self.parallel is not None:
            # `remove` finds itself as the step, as it was installed
            self._leave()
            self.optimizer.step = self.parallel  # type: ignore[method-assign]
            self.parallel.remove()
            self.parallel = None
            self.optimizer.step = self  # type: ignore[method-assign]

    def _unshare_ratios(self) -> None:
        if self.shares_ratios:
            unshare_trust_ratios(self.optimizer)
        self.shares_ratios = False

    # ---- what is shared

    def _share(self, pieces: Sequence[Piece]) -> None:
        """Make `pieces` those of the parallel step from this step on.

        Collective call.
        """
        for decision in self.decisions:
            self.say(decision.reason)
        if self.parallel is not None:
            self.parallel.update_pieces(pieces)
        elif pieces:
            self._leave()
            self.parallel = install_parallel_step(
                self.optimizer,
                pieces=pieces,
                group=self.sharing.group,
                gather_dtype=self.sharing.gather_dtype,
                node=self.sharing.node(),
            )
            self.optimizer.step = self  # type: ignore[method-assign]

    def _worthwhile_pieces(self) -> list[Piece]:
        """Return the pieces of groups for which sharing takes less time, as measured."""
        parameters = parameters_of(self.optimizer)
        world_size = dist.get_world_size(self.sharing.group)
        shares = self._shares(self._costs.seconds())
        if self._gather is None:
            self._gather = measure_gather(
                self.sharing.group,
                device=parameters[0].device,
                parameters=parameters,
                pieces=assign_pieces(shares, world_size=world_size),
                node=self.sharing.node(),
            )
        sent_bytes = {share.index: 0 for share in shares}  # none without a gradient
        for index in sent_bytes:
            parameter = parameters[index]
            if parameter.grad is not None:
                dtype = sent_dtype(parameter, self.sharing.gather_dtype)
                sent_bytes[index] = parameter.numel() * dtype.itemsize
        pieces, self.decisions = choose_pieces(
            shares, sent_bytes=sent_bytes, world_size=world_size, gather=self._gather
        )
        return pieces

    def _pieces_without_measuring(self) -> list[Piece]:
        """Return the pieces of all groups, in proportion to the expected work."""
        shares = self._shares(self._costs.expected_work())
        self.decisions = [
            Decision(
                group,
                pays=False,
                update_seconds=nan,
                shared_seconds=nan,
                gather_seconds=nan,
                reason=f"group {group}: shared from the first step on, as told",
                shared=True,
            )
            for group in sorted({share.group for share in shares})
        ]
        return assign_pieces(shares, world_size=dist.get_world_size(self.sharing.group))

    def _shares(self, seconds: Sequence[float]) -> list[Share]:
        """Return the shares of parameters that may be shared, the same on all ranks."""
        parameters = parameters_of(self.optimizer)
        shares = self._costs.shares(seconds, is_whole=self.parallel is None)

        def may_be_shared(parameter: Tensor) -> bool:
            has_sparse = parameter.grad is not None and parameter.grad.is_sparse
            return parameter in self.sharing.reduced and parameter.numel() > 0 and not has_sparse

        return [share for share in shares if may_be_shared(parameters[share.index])]


def is_faster(plain_seconds: float, shared_seconds: float) -> bool:
    """Return whether shared steps are faster, by the slowest rank's seconds."""
    return shared_seconds < plain_seconds


# ---- Decide: what sharing saves against what gathering the parameters costs


@dataclass(frozen=True)
class GroupCost:
    """One parameter group: bytes to gather, and seconds of its update.

    `update_seconds` on every rank, `shared_seconds` on the busiest rank when shared.
    """

    group: int
    sent_bytes: int
    update_seconds: float
    shared_seconds: float


@dataclass(frozen=True)
class Decision:
    """Whether sharing the update of a parameter group `pays`, and whether it is `shared`.

    `reason` says so in a sentence.
    """

    group: int
    pays: bool
    update_seconds: float
    shared_seconds: float
    gather_seconds: float
    reason: str
    shared: bool


def choose_pieces(
    shares: Sequence[Share],
    *,
    sent_bytes: Mapping[int, int],
    world_size: int,
    gather: GatherCost,
    always: bool = False,
) -> tuple[list[Piece], list[Decision]]:
    """Return the pieces of the parameters whose groups are worth sharing, and all decisions.

    What one group gains depends on which others fill up the ranks with it: the group that loses
    most is left out until all that remain gain. Arguments that are equal on all ranks
    (`slowest_of_ranks`) give equal pieces.
    """
    remaining = list(shares)
    declined: list[Decision] = []
    while remaining:
        pieces = assign_pieces(remaining, world_size=world_size)
        costs = group_costs(remaining, pieces, sent_bytes=sent_bytes, world_size=world_size)
        decisions = decide(costs, world_size=world_size, gather=gather, always=always)
        losing = [decision for decision in decisions if not decision.shared]
        if not losing:
            return pieces, sorted(decisions + declined, key=lambda decision: decision.group)
        worst = min(
            losing, key=lambda d: (d.update_seconds - d.shared_seconds - d.gather_seconds, d.group)
        )
        declined.append(worst)
        remaining = [share for share in remaining if share.group != worst.group]
    return [], sorted(declined, key=lambda decision: decision.group)


def group_costs(
    shares: Sequence[Share],
    pieces: Sequence[Piece],
    *,
    sent_bytes: Mapping[int, int],
    world_size: int,
) -> list[GroupCost]:
    """Return the costs of every group of `shares` when they are split into `pieces`.

    `sent_bytes` is by parameter index. Groups make up for each other's imbalance, so the busiest
    rank's time is attributed in proportion to their updates.
    """
    by_index = {share.index: share for share in shares}
    busy = [0.0] * world_size  # seconds of each rank
    for piece in pieces:
        share = by_index[piece.index]
        busy[piece.owner] += share.cost_seconds * (piece.stop - piece.start) / share.rows
    total = sum(share.cost_seconds for share in shares)
    costs = []
    for group in sorted({share.group for share in shares}):
        of_group = [share for share in shares if share.group == group]
        update = sum(share.cost_seconds for share in of_group)
        sent = sum(sent_bytes[share.index] for share in of_group)
        costs.append(GroupCost(group, sent, update, update * max(busy) / total if total else 0.0))
    return costs


def decide(
    costs: Sequence[GroupCost], *, world_size: int, gather: GatherCost, always: bool = False
) -> list[Decision]:
    """Decide for each group whether sharing its update is faster.

    It is where the seconds saved on the busiest rank are more than those to gather. The latency,
    which all groups pay together, is attributed by bytes. With `always` all are shared, whatever it
    costs; with one rank none is.
    """
    total = sum(cost.sent_bytes for cost in costs)
    decisions = []
    for cost in costs:
        latency = gather.latency_seconds * (cost.sent_bytes / total if total else 1 / len(costs))
        gather_seconds = latency + cost.sent_bytes * gather.seconds_per_byte
        pays = world_size > 1 and cost.update_seconds - cost.shared_seconds > gather_seconds
        shared = world_size > 1 and (pays or always)
        reason = _reason(cost, gather_seconds, world_size=world_size, pays=pays, shared=shared)
        times = cost.update_seconds, cost.shared_seconds, gather_seconds
        decisions.append(Decision(cost.group, pays, *times, reason, shared))
    return decisions


def _reason(
    cost: GroupCost, gather_seconds: float, *, world_size: int, pays: bool, shared: bool
) -> str:
    if world_size == 1:
        return f"group {cost.group}: not shared, there is only one rank"
    verdict = (
        "shared" if pays else "shared as told although it does not pay" if shared else "not shared"
    )

    def ms(seconds: float) -> str:
        return f"{seconds * 1e3:.2f} ms"

    gain = cost.update_seconds - cost.shared_seconds - gather_seconds
    effect = "saves" if pays else "costs" if shared else "would cost"
    return (
        f"group {cost.group}: {verdict}; its update takes {ms(cost.update_seconds)} on every rank, "
        f"{ms(cost.shared_seconds)} on the busiest of {world_size} when shared, and gathering "
        f"{cost.sent_bytes / 1e6:.1f} MB takes {ms(gather_seconds)}: {effect} {ms(abs(gain))} per "
        "step"
    )


# ---- Measure a gather


@dataclass(frozen=True)
class GatherCost:
    """Seconds until all ranks have n bytes: `latency_seconds` + n * `seconds_per_byte`."""

    latency_seconds: float
    seconds_per_byte: float


def measure_gather(
    group: dist.ProcessGroup | None = None,
    *,
    device: torch.device,
    parameters: Sequence[Tensor] = (),
    pieces: Sequence[Piece] = (),
    node: NodeRows | None = None,
) -> GatherCost:
    """Time gathers between the ranks of `group`: a tiny one and a large one.

    Collective call. The large one is of test tensors; or, better, of up to 64 MiB of the real
    `parameters`, as `pieces` will send them. These must be equal on all ranks (as under DDP), and
    stay what they are. The slowest rank counts. `node` is as for `PieceGather`.
    """
    world_size = dist.get_world_size(group)
    piece_per_rank = [Piece(0, rank, rank + 1, rank) for rank in range(world_size)]

    def rows(elements: int) -> list[Tensor]:  # (world_size, elements)
        return [torch.zeros((world_size, elements), device=device)]

    # a tiny gather for the latency, a large one for the bandwidth
    small = rows(_SMALL_ELEMENTS), piece_per_rank
    sample = _sample(parameters, pieces) or (rows(_LARGE_ELEMENTS), piece_per_rank)
    latency = _time_gather(*small, group=group, device=device, repeats=_SMALL_REPEATS, node=node)
    elapsed = _time_gather(*sample, group=group, device=device, repeats=_REPEATS, node=node)
    latency, elapsed = slowest_of_ranks([latency, elapsed], device=device, group=group)
    sent_bytes = sum(sample[0][index].nbytes for index in {piece.index for piece in sample[1]})
    return GatherCost(latency, max(elapsed - latency, 0.0) / max(1, sent_bytes))


def _sample(
    parameters: Sequence[Tensor], pieces: Sequence[Piece]
) -> tuple[list[Tensor], list[Piece]] | None:
    """Return every n-th parameter that has pieces, at least one.

    So many that the bytes stay within `_SAMPLE_BYTES`.
    """
    indices = sorted({piece.index for piece in pieces})
    if not indices:
        return None
    total = sum(parameters[index].nbytes for index in indices)
    chosen = set(indices[:: max(1, -(-total // _SAMPLE_BYTES))])
    return list(parameters), [piece for piece in pieces if piece.index in chosen]


def _time_gather(
    parameters: Sequence[Tensor],
    pieces: Sequence[Piece],
    *,
    group: dist.ProcessGroup | None,
    device: torch.device,
    repeats: int,
    node: NodeRows | None,
) -> float:
    gather = PieceGather(parameters, pieces, group=group, node=node)
    together = torch.zeros(1, device=device)
    seconds = []
    for repeat in range(repeats + 1):
        dist.all_reduce(together, group=group)  # no rank waits for another inside the measured part
        synchronize(device)
        start = perf_counter()
        gather.gather()
        synchronize(device)
        seconds += [perf_counter() - start] if repeat else []
    return statistics.median(seconds)

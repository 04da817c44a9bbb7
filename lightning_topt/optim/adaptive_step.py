"""The step of one optimizer over a fit: plain and measured at first, then shared between ranks
where that pays.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import nan
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from lightning_topt.communication.node.rows import NodeRows
from lightning_topt.optim.assignment import Share, assign_pieces
from lightning_topt.optim.decision import Decision, GatherCost, choose_pieces, measure_gather
from lightning_topt.optim.full_state import parameters_of
from lightning_topt.optim.gather import sent_dtype
from lightning_topt.optim.lars import LARS
from lightning_topt.optim.parallel_step import ParallelStep, install_parallel_step
from lightning_topt.optim.pieces import Piece
from lightning_topt.optim.step_costs import slowest_of_ranks, time_step
from lightning_topt.optim.trust_ratios import share_trust_ratios, unshare_trust_ratios
from lightning_topt.optim.update_costs import UpdateCosts
from lightning_topt.optim.update_rule import UpdateRule

TRIAL_STEPS = 4  # of what was decided, the first of which warms up


@dataclass(frozen=True)
class Sharing:
    """`Sharing` is what all optimizers of a fit have in common.

    `group`: the ranks, and the timeout of every wait. `reduced`: the parameters whose gradients are
    equal on all of them; only these are shared. `always`: every group, from the first step, without
    measuring. `node`: the ranks through the memory of their one machine.
    """

    group: dist.ProcessGroup
    reduced: frozenset[Tensor]
    always: bool = False
    gather_dtype: torch.dtype | None = None
    node: NodeRows | None = None


class AdaptiveStep:
    """Replaces ``optimizer.step`` during a fit, from `start` to `finish`; `decisions` has one entry
    per group once decided.

    The first steps are plain and measured (`UpdateCosts`). Then groups whose update is worth it are
    shared: a `ParallelStep` does them, for good if `TRIAL_STEPS` of it are faster than the plain
    ones were. Where none is, a LARS is tried in the same way with its norms shared (`trust_ratios`:
    no parameter travels; `shares_ratios`). When parameters are added to groups or leave them, the
    next step decides again from what is known: seconds of parameters that were never measured are
    estimated from the others'.
    """

    # What learning-rate schedulers leave on a step that they have wrapped, to see that it is
    # called.
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
        """Collective call where a group is shared: the whole state on every rank, and the
        optimizer's own step again.
        """
        self._unshare_ratios()
        self._unshare()
        self._leave()

    def __call__(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        """One step. `closure` runs the forward and backward pass (and clipping) on whole gradients
        first.

        Raises PeerLostError when a rank is gone or late beyond the timeout of the group.
        """
        self.optimizer._opt_called = True  # type: ignore[attr-defined]  # as a scheduler's wrapper would
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
            kwargs["closure"] = lambda: loss  # one step may be several calls
        output = self._update(kwargs)
        return output if closure is None else loss

    def _update(self, kwargs: dict[str, Any]) -> Any:
        counts = [len(group["params"]) for group in self.optimizer.param_groups]
        if counts == self._declined:
            return self._step(**kwargs)
        output = self._general_update(kwargs)
        shares = self.parallel is not None or self.shares_ratios or self._trial_seconds is not None
        self._declined = counts if self._decided and not shares else None
        return output

    def _general_update(self, kwargs: dict[str, Any]) -> Any:
        known = tuple(map(id, parameters_of(self.optimizer)))
        changed, self._known = known != self._known, known
        if self.sharing.always:
            if changed:
                self._share(self._pieces_without_measuring())
        elif self._decided:
            if changed:
                self._unshare_ratios()
                self._trial_seconds = None
                if not self._refused:
                    self._share(self._worthwhile_pieces())
            if self._trial_seconds is not None:
                return self._step_on_trial(self._trial_seconds, kwargs)
        else:
            if changed:
                self._costs.restart()
            return self._measured(kwargs)
        return (self._step if self.parallel is None else self.parallel)(**kwargs)

    # ---- the first steps -------------------------------------------------------------------------

    def _measured(self, kwargs: dict[str, Any]) -> Any:
        """A plain step, in pieces where it is timed by kind; after the last of them, decide."""
        outputs: list[Any] = []
        if self._costs.take_step(lambda: outputs.append(self._step(**kwargs))):
            self._decide()
        return outputs[-1]

    def _decide(self) -> None:
        self._costs.agree(self.sharing.group)
        self._decided = True
        self._share(self._worthwhile_pieces())
        if self.parallel is None:
            self._try_ratios()
        else:
            self._trial_seconds = []

    def _try_ratios(self) -> None:
        if isinstance(self.optimizer, LARS) and self.sharing.reduced.issuperset(
            parameters_of(self.optimizer)
        ):
            share_trust_ratios(self.optimizer, group=self.sharing.group)
            self.shares_ratios, self._trial_seconds = True, []

    def _step_on_trial(self, trial_seconds: list[float], kwargs: dict[str, Any]) -> Any:
        """A step of what was decided; after the last of them, go on so or without."""
        outputs: list[Any] = []
        step = self._step if self.parallel is None else self.parallel
        # that one rank is late in the step is not what sharing costs
        dist.barrier(group=self.sharing.group)
        trial_seconds.append(time_step(self.optimizer, lambda: outputs.append(step(**kwargs))))
        if len(trial_seconds) == TRIAL_STEPS:
            mine = [self._costs.step_seconds(), statistics.median(trial_seconds[1:])]
            device = parameters_of(self.optimizer)[0].device
            plain, shared = slowest_of_ranks(mine, device=device, group=self.sharing.group)
            self._trial_seconds = None
            self._judge(plain, shared)
        return outputs[0]

    def _judge(self, plain_seconds: float, shared_seconds: float) -> None:
        faster = is_faster(plain_seconds, shared_seconds)
        times = (
            f"a step takes {1e3 * shared_seconds:.2f} ms with them shared, "
            f"{1e3 * plain_seconds:.2f} without"
        )
        if self.parallel is None:
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
        """Collective call where a group is shared: the whole state on every rank."""
        if self.parallel is not None:
            self._leave()
            self.optimizer.step = self.parallel  # type: ignore[method-assign]
            self.parallel.remove()
            self.parallel = None
            self.optimizer.step = self  # type: ignore[method-assign]

    def _unshare_ratios(self) -> None:
        if self.shares_ratios:
            unshare_trust_ratios(self.optimizer)
        self.shares_ratios = False

    # ---- what is shared --------------------------------------------------------------------------

    def _share(self, pieces: Sequence[Piece]) -> None:
        """Collective call: from this step on, `pieces` are those of the parallel step."""
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
                node=self.sharing.node,
            )
            self.optimizer.step = self  # type: ignore[method-assign]

    def _worthwhile_pieces(self) -> list[Piece]:
        """Return the pieces of groups for which sharing takes less time, by the seconds
        measured.
        """
        parameters, world_size = (
            parameters_of(self.optimizer),
            dist.get_world_size(self.sharing.group),
        )
        shares = self._shares(self._costs.seconds())
        if self._gather is None:
            self._gather = measure_gather(
                self.sharing.group,
                device=parameters[0].device,
                parameters=parameters,
                pieces=assign_pieces(shares, world_size=world_size),
                node=self.sharing.node,
            )
        sent_bytes = {
            share.index: _sent_bytes(parameters[share.index], self.sharing.gather_dtype)
            for share in shares
        }
        pieces, self.decisions = choose_pieces(
            shares, sent_bytes=sent_bytes, world_size=world_size, gather=self._gather
        )
        return pieces

    def _pieces_without_measuring(self) -> list[Piece]:
        """Return the pieces of all groups, in proportion to the work that is expected."""
        shares = self._shares(self._costs.expected_work())
        self.decisions = [
            Decision(
                group,
                False,
                nan,
                nan,
                nan,
                f"group {group}: shared from the first step on, as told",
                True,
            )
            for group in sorted({share.group for share in shares})
        ]
        return assign_pieces(shares, world_size=dist.get_world_size(self.sharing.group))

    def _shares(self, seconds: Sequence[float]) -> list[Share]:
        """Those of parameters that may be shared, the same on all ranks."""
        parameters = parameters_of(self.optimizer)
        shares = self._costs.shares(seconds, is_whole=self.parallel is None)
        return [
            s
            for s in shares
            if parameters[s.index] in self.sharing.reduced and parameters[s.index].numel()
        ]


def is_faster(plain_seconds: float, shared_seconds: float) -> bool:
    """Return whether steps are faster when shared: the slowest rank's seconds, the same on all."""
    return shared_seconds < plain_seconds


def _sent_bytes(parameter: Tensor, dtype: torch.dtype | None) -> int:
    """Return the bytes that travel of it in a step: none without a gradient."""
    return (
        0 if parameter.grad is None else parameter.numel() * sent_dtype(parameter, dtype).itemsize
    )

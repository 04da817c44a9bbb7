"""The fit that asks for nothing: as under ddp, with updates shared where a clock says that it pays.

The user's parameters, batches and calls are those of ddp. What may change is who computes the
update: each rank its share, with the state of that share alone (ZeRO level 1). `optim.AdaptiveStep`
measures plain steps, and shares those whose exchange takes less time than what is saved.

    updates = SharedUpdates(strategy, controller)
    updates.begin(trainer)      # training starts, states are loaded
    updates.begin_batch(batch)  # before each batch: is it decided, and where does the time go?
    updates.end(failed=False)   # every rank has the full state again

Optimizers with a rule in `optim.update_rule` are shared. For others the user declares the rule:
`ParallelOptimizerStep(rule=...)`.
"""

from __future__ import annotations

import dataclasses
import itertools
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from time import perf_counter, thread_time
from typing import TYPE_CHECKING, Any, NamedTuple

import lightning.pytorch as pl
import psutil
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy, Strategy
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lightning_topt.communication.collectives import values_if_different
from lightning_topt.communication.exchange_method import equal_parameters
from lightning_topt.communication.rank_watch import within_limit
from lightning_topt.costs.measuring import device_memory_bytes
from lightning_topt.graph.mesh_axes import data_mesh
from lightning_topt.optim.adaptive_step import AdaptiveStep, Sharing
from lightning_topt.optim.update_rule import update_rule, why_not_shared
from lightning_topt.plan.parallel_plan import preset_plan
from lightning_topt.plan.plan_values import PRESETS
from lightning_topt.plugins.plan_request import steps_of_fit

if TYPE_CHECKING:
    from lightning_topt.communication.node.rows import NodeRows
    from lightning_topt.plugins.plan_run import PlanRun

_WAIT_SECONDS = 300.0  # on another rank
_WORTH_SECONDS = 1.0  # that a fit has to save: what it takes to measure whether sharing pays
HINT_BATCHES = 20
LEAST_SHARE, FULL_SHARE = 0.1, 0.9  # of a step; of a device's memory


class SharedUpdates:
    """Lets the ranks of `strategy` share the updates of a fit; `controller` learns the plan.

    Attributes:
        steps: of the optimizers that may be shared.
        clock: of the steps after the decision, until there is a `hint`.
        hint: what takes a tenth of a step or more, and what treats it; None: nothing does, or not
            enough steps were timed.
    """

    def __init__(
        self,
        strategy: DDPStrategy,
        controller: PlanRun,
        *,
        waited: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self._strategy, self._controller, self._waited = strategy, controller, waited
        self.clock: PhaseClock | None = None
        self.hint: Hint | None = None
        self.steps: list[AdaptiveStep] = []
        self._node: NodeRows | None = None
        self._reasons: list[str] = []
        self._is_decided = False
        self._began = perf_counter()

    def begin(self, trainer: pl.Trainer) -> None:
        """Begin to measure. A collective call, once states are loaded."""
        optimizers = [getattr(each, "_optimizer", each) for each in self._strategy.optimizers]
        if reason := self._why_not(trainer):
            self._decide(reason)
            return
        reduced = reduced_parameters(self._strategy)
        group = dist.group.WORLD
        assert group is not None
        steps = steps_of_fit(trainer) - trainer.global_step
        sharing = Sharing(
            group,
            reduced,
            node=partial(self._node_rows, trainer),
            may_pay=lambda saved: saved * steps > _WORTH_SECONDS,
        )
        for optimizer in optimizers:
            if reason := why_not_shared(optimizer):
                self._reasons.append(f"{type(optimizer).__name__}: {reason}")
                continue
            step = AdaptiveStep(
                optimizer, rule=update_rule(optimizer), sharing=sharing, say=self._reasons.append
            )
            self.steps.append(step)
            step.start()
        if not self.steps:
            self._decide("; ".join(self._reasons))

    def _node_rows(self, trainer: pl.Trainer) -> NodeRows | None:
        # imported when updates are about to be shared: it compiles kernels
        from lightning_topt.communication.node.rows import node_rows  # noqa: PLC0415

        if self._node is None:
            assert dist.group.WORLD is not None
            self._node = node_rows(
                dist.group.WORLD,
                device=self._strategy.root_device,
                num_nodes=trainer.num_nodes,
                timeout_seconds=within_limit(_WAIT_SECONDS),
            )
        return self._node

    def _why_not(self, trainer: pl.Trainer) -> str | None:
        # Why no update is shared, as a clause. A collective call of several ranks.
        strategy: Any = self._strategy
        if trainer.world_size == 1:
            return "there is one rank, which does the whole update"
        if not strategy.optimizers:
            return "there is no optimizer"
        if getattr(strategy, "_model_averager", None) is not None:
            return "under post-local SGD gradients differ between ranks"
        for name, part in trainer.lightning_module.named_modules():
            if isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.sparse:
                return f"{name!r} has sparse gradients"
        if strategy.is_elastic:
            return "a rank that is lost would take its part of the optimizer's state along"
        names: dict[Tensor, str] = {
            parameter: name for name, parameter in trainer.lightning_module.named_parameters()
        }
        optimizers = [getattr(each, "_optimizer", each) for each in strategy.optimizers]
        return difference_of_optimizers(optimizers, names=names, group=dist.group.WORLD)

    def begin_batch(self, batch: Any) -> None:
        """Learn what was decided by now; then time the steps that come."""
        if not self._is_decided and all(step.is_settled for step in self.steps):
            self._decide("; ".join(dict.fromkeys(self._reasons)))
        if self.clock is not None:
            self.clock.begin_batch()
            if self.clock.is_over:
                self.hint, self.clock = self.clock.hint(), None
                strategy: Any = self._strategy
                if not strategy.request.allowed.compile:
                    # what compiles is imported once the fit runs, not at its start
                    from lightning_topt.plugins.compiled_steps import known_trials  # noqa: PLC0415

                    known = known_trials(strategy.lightning_module.trainer, batch)
                    self.hint = better_hint(self.hint, known.share)
                if self.hint is not None:
                    rank_zero_info(f"topt: {self.hint.text}")

    def _decide(self, reason: str) -> None:
        self._is_decided = True
        is_shared = any(step.parallel is not None for step in self.steps)
        plan = preset_plan(
            PRESETS["zero1" if is_shared else "ddp"], mesh=data_mesh(self._strategy.world_size)
        )
        plan = dataclasses.replace(plan, reason=f"{reason}.")
        clocked = any(step.is_settled for step in self.steps)
        planned_by = "clock" if clocked else f"ddp: {reason}"
        self._controller.know(plan, planned_by, perf_counter() - self._began)
        if self._strategy.world_size > 1:
            how = "share already" if is_shared else f"do not share: {reason}"
            self.clock = PhaseClock(
                self._strategy.root_device,
                self._waited,
                how_updated=f"which ranks {how}",
                ranks=self._strategy.world_size // self._strategy.num_nodes,
            )
        if is_shared:
            rank_zero_info(f"topt: ranks share the update of optimizers: {reason}")

    def end(self, *, failed: bool) -> None:
        """Give every rank the full state again; after a failure each keeps its part.

        A collective call, unless the run has `failed`.
        """
        if not self._is_decided and not failed:
            self._decide("the fit was over before it was decided whether ranks share the update")
        steps, self.steps = self.steps, []
        if not failed:
            for step in steps:
                step.finish()
        if self._node is not None:
            self._node.close()
            self._node = None


# ---- where the time goes -------------------------------------------------------------------------


class Hint(NamedTuple):
    """The largest share of a step that something here treats.

    Attributes:
        cause: ``"data"``, ``"exchange"``, ``"update"``, ``"computation"`` or ``"memory"``.
        share: of a step's seconds, or of the device's memory; of computation what can be saved.
        text: the sentence, with what would treat it.
    """

    cause: str
    share: float
    text: str


def better_hint(hint: Hint | None, compiled_share: float | None) -> Hint | None:
    """Return `hint`, or one for compiled blocks where these saved more in an earlier fit."""
    from lightning_topt.techniques.compilation import LEAST_GAIN  # noqa: PLC0415

    saved = 0.0 if compiled_share is None else 1 - compiled_share
    if saved < LEAST_GAIN - 1 or (hint is not None and hint.share >= saved):
        return hint
    text = (
        f"allow='compile' takes {compiled_share:.2f} of the time of a step, as the clock of an "
        "earlier fit said"
    )
    return Hint("computation", saved, text)


class PhaseClock:
    """Times the phases of `HINT_BATCHES` batches of a fit under ddp, on one rank.

    Args:
        device: of this rank. An accelerator is not waited for: of its steps only the wait for data
            and the memory count.
        waited: returns the seconds that loaders have kept the fit waiting so far.
        how_updated: says whether ranks share the update, as a clause.
        ranks: of this machine.
    """

    def __init__(
        self, device: torch.device, waited: Callable[[], float], *, how_updated: str, ranks: int
    ) -> None:
        self._device, self._waited, self._how_updated = device, waited, how_updated
        self._ranks = ranks
        self._exchange_seconds = self._update_seconds = 0.0
        # of each batch: when it began, what loaders had waited, exchanges and updates had taken
        self._marks: list[tuple[float, float, float, float]] = []

    @property
    def is_over(self) -> bool:
        """Whether all batches were timed."""
        return len(self._marks) > HINT_BATCHES

    def begin_batch(self) -> None:
        """A batch begins, for which loaders were waited for."""
        mark = (perf_counter(), self._waited(), self._exchange_seconds, self._update_seconds)
        self._marks.append(mark)

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Time a backward pass; where its thread does not compute, it waits for other ranks."""
        start, on_core = perf_counter(), thread_time()
        yield
        waited = perf_counter() - start - (thread_time() - on_core)
        self._exchange_seconds += max(waited, 0.0)

    @contextmanager
    def update(self, closure: Callable[[], Any]) -> Iterator[Callable[[], Any]]:
        """Time a step of an optimizer, without the seconds in the closure that is yielded."""
        in_closure = 0.0

        def timed() -> Any:
            nonlocal in_closure
            start = perf_counter()
            try:
                return closure()
            finally:
                in_closure += perf_counter() - start

        start = perf_counter()
        yield timed
        self._update_seconds += perf_counter() - start - in_closure

    def hint(self) -> Hint | None:
        """Return what is nearly full, or takes the largest share of a step: a tenth or more."""
        if (memory := _used_memory_share(self._device, self._ranks)) > FULL_SHARE:
            text = (
                f"{memory:.0%} of the device's memory is in use: a memory_limit, such as "
                "AutoParallelStrategy(memory_limit=...), searches a plan that needs less"
            )
            return Hint("memory", memory, text)
        # (seconds, of these for data, exchanges and updates) of each batch
        batches = [
            tuple(end - begin for end, begin in zip(after, before, strict=True))
            for before, after in itertools.pairwise(self._marks)
        ]
        # without those that took three times as long as most: others ran between them
        most = 3 * statistics.median(seconds for seconds, *_ in batches)
        total, *phases = map(sum, zip(*(b for b in batches if b[0] <= most), strict=True))
        causes = {
            "data": "waits for data: more workers in the DataLoader (examples/recipes measures how "
            "many), or CachedDataModule would treat that",
            "exchange": "waits for gradients of other ranks: strategy='topt_full' searches plans "
            "that send less, and 'topt_compressed' sends compressed gradients",
            "update": f"is the update of optimizers, {self._how_updated}",
        }
        shares = dict(zip(causes, (seconds / total for seconds in phases), strict=True))
        if self._device.type != "cpu":
            shares = {"data": shares["data"]}
        cause = max(shares, key=shares.__getitem__)
        if shares[cause] < LEAST_SHARE:
            return None
        return Hint(cause, shares[cause], f"{shares[cause]:.0%} of a step {causes[cause]}")


def _used_memory_share(device: torch.device, ranks: int) -> float:
    # The most of this rank's memory that was in use so far
    if device.type == "cuda":
        used = torch.cuda.max_memory_reserved(device)
    else:
        used = psutil.Process().memory_info().rss
    return used / device_memory_bytes(device, ranks=ranks)


# ---- what a shared update needs ------------------------------------------------------------------


def reduced_parameters(strategy: Strategy) -> frozenset[Tensor]:
    """Return the parameters that DDP keeps equal.

    They needed a gradient when the module was wrapped: call it soon after that.
    """
    model = strategy.model
    assert isinstance(model, DistributedDataParallel)
    return frozenset(equal_parameters(model.module, model.parameters_to_ignore).values())


def difference_of_optimizers(
    optimizers: Sequence[Optimizer], *, names: Mapping[Tensor, str], group: Any
) -> str | None:
    """Return the first difference of a rank's optimizers from rank 0's, as a clause, or None.

    The same on all ranks. A collective call on `group`. Compared are classes, groups with their
    numbers and switches, and parameters (`names`, shapes, dtypes, and whether they are trained), in
    their order.
    """
    # As texts, so that all ranks find the same first difference.
    everyone = values_if_different(_describe(optimizers, names), group)
    for rank, theirs in enumerate(everyone):
        for own, first in itertools.zip_longest(theirs, everyone[0], fillvalue="nothing"):
            if own != first:
                return (
                    "ranks can share the step of equal optimizers only: rank 0 has "
                    f"{first}, and rank {rank} has {own}; make configure_optimizers do the same on "
                    "all ranks"
                )
    return None


def _describe(optimizers: Sequence[Optimizer], names: Mapping[Tensor, str]) -> list[str]:
    # Everything that must be equal, in order
    entries: list[str] = []
    for number, optimizer in enumerate(optimizers):
        entries.append(f"optimizer {number} {type(optimizer).__qualname__}")
        for index, group in enumerate(optimizer.param_groups):
            place = f"optimizer {number}, group {index}"
            entries += [
                f"{place}, {key} {value!r}"
                for key, value in sorted(group.items())
                if _is_plain(value)
            ]
            for position, parameter in enumerate(group["params"]):
                name = names.get(parameter, "(not of the module)")
                frozen = "" if parameter.requires_grad else ", frozen"
                entries.append(
                    f"{place}, parameter {position} {name} {tuple(parameter.shape)} "
                    f"{parameter.dtype}{frozen}"
                )
    return entries


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(_is_plain(part) for part in value)
    return value is None or isinstance(value, bool | int | float | str)

"""A request is what the user asked of the planner, and what that means for the start of a fit."""

from __future__ import annotations

from dataclasses import dataclass, field

import lightning.pytorch as pl
import torch

from lightning_topt.costs.cluster import Cluster
from lightning_topt.costs.timers import device_memory_bytes
from lightning_topt.plan.parallel_plan import ParallelPlan
from lightning_topt.plugins.allowed_exchanges import AllowedExchanges
from lightning_topt.plugins.allowed_staleness import AllowedStaleness
from lightning_topt.plugins.given_plans import GivenPlan, MeshPlan, PipelinePlan, UniformPlan


@dataclass(frozen=True)
class PlanRequest:
    """A `PlanRequest` is what the user asked of the planner; see `AutoParallelStrategy`.
    `own_hook`: the user exchanges gradients. `gradients_are_views`: whether they are to be views of
    DDP's buckets; None: where a memory limit is set, as the search finds it best.

    Raises PlanError for a plan whose gradient exchange, or stale weights, are not allowed,
    ValueError where the former would replace the user's, or there is nothing to allow.
    """

    memory_limit: float | None = None
    objective: str = "time"
    objective_given: bool = False
    plan: GivenPlan | None = None
    cluster: Cluster | None = None
    memory_margin: float = 0.05
    only_replicated: bool = False
    allowed: AllowedExchanges = field(default_factory=AllowedExchanges)
    own_hook: bool = False
    stale: AllowedStaleness = field(default_factory=AllowedStaleness)
    gradients_are_views: bool | None = None

    def __post_init__(self) -> None:
        exchange = self.plan.gradient_exchange if isinstance(self.plan, ParallelPlan) else None
        self.stale.check(self.plan)
        if isinstance(self.plan, ParallelPlan):
            self.allowed.check(self.plan)
        if isinstance(self.plan, MeshPlan | PipelinePlan) and self.allowed.candidates:
            raise ValueError(
                "on a given mesh and in a pipeline gradients are exchanged as they are: leave out "
                "allow_compression, or plan"
            )
        if self.own_hook and (exchange is not None or self.allowed.candidates):
            raise ValueError(
                "a plan's gradient exchange would replace your communication hook: leave out "
                "ddp_comm_hook and mixed_precision, or allow_compression and the plan's "
                "gradient_exchange"
            )

    @property
    def insists(self) -> bool:
        """Whether the user asked for something that plain DDP does not give."""
        return self.plan is not None or self.memory_limit is not None or self.objective_given

    @property
    def saves_memory(self) -> bool:
        """Whether plans are compared by what they leave free, not by time alone."""
        return self.memory_limit is not None or self.objective == "memory"

    def observes(self, module: pl.LightningModule) -> bool:
        """Return whether the plan is made of the first real steps, which run under DDP."""
        return self.plan is None and module.automatic_optimization and not self.stale.allowed

    def needs_graph(self, device: torch.device) -> bool:
        """Return whether the first step is recorded in any case, since times alone cannot tell that
        DDP is the best plan.
        """
        return (
            self.plan is not None
            or self.saves_memory
            or self.cluster is not None
            or device.type != "cpu"
        )

    def refines(self, module: pl.LightningModule, device: torch.device) -> bool:
        """Return whether a uniform plan begins with the whole module as its one block, until a
        first step has shown the others.

        Not where such a step, with all parameters and gradients whole, may be more than `device`
        has.
        """
        return (
            self.is_by_block
            and module.automatic_optimization
            and self.may_begin_whole(module, device)
        )

    def may_begin_whole(self, module: pl.LightningModule, device: torch.device) -> bool:
        """Return whether a step with whole parameters, gradients and two moments should fit on
        `device`.
        """
        return 4 * _parameter_bytes(module) <= device_memory_bytes(device)

    @property
    def gradient_views(self) -> tuple[bool, ...]:
        """Which a search may choose: whether gradients are views of DDP's buckets."""
        if self.gradients_are_views is not None:
            return (self.gradients_are_views,)
        return (False, True) if self.saves_memory else (False,)

    @property
    def is_by_block(self) -> bool:
        """Whether a uniform plan depends on which blocks there are."""
        return isinstance(self.plan, UniformPlan) and (
            self.plan.shards_gradients or self.plan.recompute
        )

    def needs_batch(self, module: pl.LightningModule) -> bool:
        """Return whether the plan depends on how `module` takes a training step."""
        return module.automatic_optimization and (
            self.plan is None or self.is_by_block or isinstance(self.plan, MeshPlan | PipelinePlan)
        )

    def may_shard_for_memory(self, module: pl.LightningModule, device: torch.device) -> bool:
        """Return whether plain DDP, which starts with whole gradients, may be more than is allowed
        or more than `device` has.
        """
        if not module.automatic_optimization or self.only_replicated:
            return False
        given = self.plan
        if given is not None:
            return (
                not given.keeps_gradients_whole
                if isinstance(given, ParallelPlan)
                else given.shards_gradients
            )
        limit = self.memory_limit
        if limit is None:  # parameters, gradients, two moments
            return 4 * _parameter_bytes(module) > device_memory_bytes(device)
        # These with DDP's buckets, and as much as three times that for activations, of which
        # nothing is known yet.
        return 20 * _parameter_bytes(module) > limit

    def must_shard_first(self, module: pl.LightningModule, device: torch.device) -> bool:
        """Return whether even the whole parameters may be too much for `device` (the host of CPU
        ranks has them already).
        """
        limit = device_memory_bytes(device) if self.memory_limit is None else self.memory_limit
        return device.type != "cpu" and 2 * _parameter_bytes(module) > limit


def _parameter_bytes(module: pl.LightningModule) -> int:
    return sum(parameter.nbytes for parameter in module.parameters())

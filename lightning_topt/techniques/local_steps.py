"""Local steps: data ranks train alone, and meet in an outer step once in many (DiLoCo, SparseLoCo).

No gradient is averaged, so there is no DDP: a rank's step costs what one rank alone takes, and its
share of an outer step. What that exchanges is the method's (`communication.local_sgd`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from typing_extensions import override

from lightning_topt.communication.exchange_method import GradientMethod
from lightning_topt.communication.local_exchange import LocalExchange
from lightning_topt.costs.lifetimes import UPDATE, Lifetime
from lightning_topt.costs.training_step import TrainingStep
from lightning_topt.graph.mesh_axes import Mesh
from lightning_topt.graph.op_config import OpConfig
from lightning_topt.techniques.ddp_wrapper import names_to_ignore
from lightning_topt.techniques.technique import Applied, ParallelModel, Technique


class LocalTraining(Technique):
    """The technique of plans that have `local_steps`.

    What is kept between outer steps outlives `undo`, for checkpoints, until it is closed.
    """

    @property
    @override
    def name(self) -> str:
        return "local steps"

    @override
    def claims(self, config: OpConfig, mesh: Mesh) -> frozenset[str]:
        return frozenset()

    @override
    def check(
        self, mesh: Mesh, configs: Mapping[str, OpConfig], exchange: GradientMethod | None
    ) -> None:
        """Nothing: a plan checks its `local_steps` itself."""

    # ---- what it costs ---------------------------------------------------------------------------

    @override
    def takes_part(self, step: TrainingStep, config: OpConfig) -> bool:
        return step.local_steps is not None

    @override
    def plan_lifetimes(self, step: TrainingStep, blocks: Collection[str]) -> Iterator[Lifetime]:
        # what all agreed on last, momentum and residual; messages while ranks meet
        yield step.phases.always("outer state", step.outer_work.kept_bytes)
        yield Lifetime("outer step", step.outer_work.buffer_bytes, UPDATE, UPDATE)

    @override
    def plan_seconds(self, step: TrainingStep, blocks: Collection[str]) -> float:
        return step.outer_seconds

    # ---- how it is applied -----------------------------------------------------------------------

    @override
    def apply(self, model: ParallelModel) -> Applied | None:
        if model.local_steps is None:
            return None
        ignored = names_to_ignore(model.module)
        exchange = LocalExchange(model.local_steps, model.module, ignored=ignored)
        return Applied(undo=exchange.leave, attach=exchange.follow, exchange=exchange)

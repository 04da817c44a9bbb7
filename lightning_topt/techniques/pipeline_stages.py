"""Pipeline stages: ranks along the axis "pipeline" run parts of the model one after the other, on
many microbatches at once.

What a stage is and when it runs is the plan's and its schedule's; the engine runs it
(`execution.pipeline`), and its costs are those of the search over stages (`plan.stage_tables`), not
of single blocks. Here is what goes together with it: whole gradients (ZeRO levels 0 and 1),
averaged once all microbatches have passed a stage.
"""

from __future__ import annotations

from collections.abc import Mapping

from typing_extensions import override

from lightning_topt.communication.exchange_method import GradientMethod
from lightning_topt.graph.mesh_axes import Mesh
from lightning_topt.graph.op_config import OpConfig
from lightning_topt.techniques.technique import Applied, ParallelModel, Technique


class PipelineStages(Technique):
    """The technique of plans with a pipeline axis. It places nothing itself: blocks are in stages,
    not in configurations.
    """

    @property
    @override
    def name(self) -> str:
        return "pipeline stages"

    @override
    def claims(self, config: OpConfig, mesh: Mesh) -> frozenset[str]:
        return frozenset()

    @override
    def check(
        self, mesh: Mesh, configs: Mapping[str, OpConfig], exchange: GradientMethod | None
    ) -> None:
        if not mesh.pipeline_axes:
            return
        for block, config in configs.items():
            if config.storage.level > 1:
                raise ValueError(
                    f"block {block!r} has ZeRO level {config.storage.level}, which does not go "
                    "together with stages: its parameters or gradients would be exchanged for "
                    "every microbatch. Choose level 0 or 1 (ddp, zero1)"
                )

    # ---- how it is applied -----------------------------------------------------------------------

    @override
    def apply(self, model: ParallelModel) -> Applied | None:
        return None

"""The techniques, in the order in which they are applied to a model (and undone from the last to
the first).
"""

from __future__ import annotations

from collections.abc import Mapping

from lightning_topt.communication.exchange_method import GradientMethod
from lightning_topt.graph.mesh_axes import DATA_AXES, PIPELINE_AXES, TENSOR_AXES, Mesh
from lightning_topt.graph.op_config import OpConfig
from lightning_topt.schedules.schedules import CONTINUOUS_SCHEDULES
from lightning_topt.techniques.data_parallel import DataParallel
from lightning_topt.techniques.full_sharding import FullSharding
from lightning_topt.techniques.gradient_compression import GradientCompression
from lightning_topt.techniques.hybrid_sharding import HybridSharding
from lightning_topt.techniques.optimizer_sharding import OptimizerSharding
from lightning_topt.techniques.pipeline_stages import PipelineStages
from lightning_topt.techniques.recomputation import Recomputation
from lightning_topt.techniques.technique import Technique
from lightning_topt.techniques.tensor_parallelism import TensorParallelism

PIPELINE = PipelineStages()
TECHNIQUES: tuple[Technique, ...] = (
    TensorParallelism(),  # all others see the pieces
    PIPELINE,
    Recomputation(),
    DataParallel(),
    OptimizerSharding(),
    GradientCompression(),
    FullSharding(),  # once DDP is there: the outermost wrapper must gather first
    HybridSharding(),
)


def technique_of(config: OpConfig, mesh: Mesh) -> Technique:
    """Return the technique that stores what `config` places on `mesh`. Raises ValueError where none
    does.
    """
    for technique in TECHNIQUES:
        if "storage" in technique.claims(config, mesh):
            return technique
    axes = " x ".join(f"{axis.name} {axis.size}" for axis in mesh.axes)
    raise ValueError(
        f"no technique of this release keeps {config.storage} on the mesh {axes}; ZeRO levels 0 to "
        "3 over all data axes, and levels 2 and 3 over the last one (hybrid), can be run"
    )


def check_runs(
    mesh: Mesh,
    configs: Mapping[str, OpConfig],
    exchange: GradientMethod | None = None,
    *,
    schedule: str | None = None,
) -> None:
    """Raise ValueError for what a plan of these blocks, in stages under a `schedule` if any, may
    say and no technique runs.
    """
    known = {*mesh.data_axes, *mesh.tensor_axes, *mesh.pipeline_axes}
    if unknown := [axis.name for index, axis in enumerate(mesh.axes) if index not in known]:
        raise ValueError(
            f"the mesh has an axis {unknown[0]!r}, and nothing runs along it; axes are named "
            f"{', '.join(DATA_AXES)}, {', '.join(TENSOR_AXES)}, {', '.join(PIPELINE_AXES)}"
        )
    # says more of what it cannot do than that no technique does
    PIPELINE.check(mesh, configs, exchange)
    if mesh.pipeline_axes and exchange is not None and schedule not in CONTINUOUS_SCHEDULES:
        raise ValueError(
            "gradient_exchange: this release averages gradients of stages as they are, but for the "
            f"schedules {', '.join(CONTINUOUS_SCHEDULES)}; leave it out, or make a plan without a "
            "pipeline axis"
        )
    if mesh.pipeline_axes and exchange is not None and mesh.tensor_axes:
        raise ValueError(
            "gradient_exchange: stages whose parameters are in slices exchange gradients as they "
            "are; leave it out"
        )
    for block, config in configs.items():
        try:
            technique_of(config, mesh)
        except ValueError as error:
            raise ValueError(f"block {block!r}: {error}") from error
        claimed = frozenset().union(*(technique.claims(config, mesh) for technique in TECHNIQUES))
        if left := sorted(_entries(config) - claimed):
            raise ValueError(
                f"block {block!r}: no technique of this release takes care of its {', '.join(left)}"
            )
    for technique in TECHNIQUES:
        technique.check(mesh, configs, exchange)


def _entries(config: OpConfig) -> frozenset[str]:
    """Return what `config` asks for."""
    names = ("recompute", "inputs", "outputs", "parameters", "sums", "gathers")
    return frozenset({"storage", *(name for name in names if getattr(config, name))})

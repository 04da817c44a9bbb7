"""All techniques, in the order in which they are asked and applied: what the planner and the engine share."""

from __future__ import annotations

from lightning_topt.graph.mesh_axes import Mesh
from lightning_topt.graph.op_config import OpConfig
from lightning_topt.techniques.data_parallel import DataParallel
from lightning_topt.techniques.full_sharding import FullSharding
from lightning_topt.techniques.hybrid_sharding import HybridSharding
from lightning_topt.techniques.optimizer_sharding import OptimizerSharding
from lightning_topt.techniques.recomputation import Recomputation
from lightning_topt.techniques.technique import Technique

TECHNIQUES: tuple[Technique, ...] = (
    DataParallel(),
    OptimizerSharding(),
    FullSharding(),
    HybridSharding(),
    Recomputation(),
)


def techniques_of(config: OpConfig, mesh: Mesh) -> tuple[Technique, ...]:
    """Return the techniques that place a block under `config` on `mesh`."""
    return tuple(technique for technique in TECHNIQUES if technique.places(config, mesh))

"""PyTorch Lightning plugins that make distributed training fast.

    LightningModule + batch -> graph -> costs -> techniques -> frontier -> plan -> execution ->
    plugins -> cli

A stage may import what earlier stages produce, never what later ones do. Beside them stand
`communication` (the exchange of gradients), `optim` (the shared optimizer step), `data` (caches of
samples), `schedules` (of pipelines) and `weight_prediction` (in continuous ones); `basics` is
below all.

Importing this package registers the strategy names ``"topt"``, ``"topt_full"``,
``"topt_compressed"`` and ``"topt_pipeline"`` with Lightning, the first three also with the endings
that its ``"ddp"`` has. The classes are imported when they are first used.
"""

from typing import TYPE_CHECKING

from lightning_topt.basics import lazy_names
from lightning_topt.plugins.register import register_strategies as register_strategies
from topt_console import __version__ as __version__

# Public names, and the module that each is imported from at its first use.
_HOMES = {
    "BoundedLoss": "communication.methods.bounded_loss",
    "Dense": "communication.methods.dense",
    "BF16": "communication.methods.dense",
    "FP16": "communication.methods.dense",
    "LocalSteps": "communication.methods.local_steps",
    "SparseLoCo": "communication.methods.local_steps",
    "TopK": "communication.methods.top_k",
    "newest_checkpoint": "execution.checkpoint_files",
    "read_sharded_checkpoint": "execution.sharded_checkpoint",
    "ParallelPlan": "plan.parallel_plan",
    "AutoParallelStrategy": "plugins.auto_parallel",
    "CachedDataModule": "plugins.cached_data",
    "CompressedDDPStrategy": "plugins.compressed_ddp",
    "CoordinatedDataModule": "plugins.coordinated_data",
    "LocalStepsStrategy": "plugins.local_steps_strategy",
    "compressed_strategy": "plugins.local_steps_strategy",
    "ParallelOptimizerStep": "plugins.parallel_optimizer",
    "PipelineStrategy": "plugins.pipeline_strategy",
    "StallMonitor": "plugins.monitors",
}
__all__ = [*_HOMES, "register_strategies"]

if TYPE_CHECKING:  # the same for type checkers and editors, which do not run `__getattr__`
    from lightning_topt.communication.methods.bounded_loss import BoundedLoss as BoundedLoss
    from lightning_topt.communication.methods.dense import BF16 as BF16
    from lightning_topt.communication.methods.dense import FP16 as FP16
    from lightning_topt.communication.methods.dense import Dense as Dense
    from lightning_topt.communication.methods.local_steps import LocalSteps as LocalSteps
    from lightning_topt.communication.methods.local_steps import SparseLoCo as SparseLoCo
    from lightning_topt.communication.methods.top_k import TopK as TopK
    from lightning_topt.execution.checkpoint_files import newest_checkpoint as newest_checkpoint
    from lightning_topt.execution.sharded_checkpoint import (
        read_sharded_checkpoint as read_sharded_checkpoint,
    )
    from lightning_topt.plan.parallel_plan import ParallelPlan as ParallelPlan
    from lightning_topt.plugins.auto_parallel import AutoParallelStrategy as AutoParallelStrategy
    from lightning_topt.plugins.cached_data import CachedDataModule as CachedDataModule
    from lightning_topt.plugins.compressed_ddp import CompressedDDPStrategy as CompressedDDPStrategy
    from lightning_topt.plugins.coordinated_data import (
        CoordinatedDataModule as CoordinatedDataModule,
    )
    from lightning_topt.plugins.local_steps_strategy import LocalStepsStrategy as LocalStepsStrategy
    from lightning_topt.plugins.local_steps_strategy import (
        compressed_strategy as compressed_strategy,
    )
    from lightning_topt.plugins.monitors import StallMonitor as StallMonitor
    from lightning_topt.plugins.parallel_optimizer import (
        ParallelOptimizerStep as ParallelOptimizerStep,
    )
    from lightning_topt.plugins.pipeline_strategy import PipelineStrategy as PipelineStrategy


__getattr__, __dir__ = lazy_names(__name__, _HOMES)
register_strategies()

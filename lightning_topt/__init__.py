"""PyTorch Lightning plugins that make distributed training fast.

    LightningModule + batch -> graph -> costs -> frontier -> plan -> execution -> plugins (what a Trainer takes) -> cli

A stage may import what earlier stages produce, never what later ones do; `communication` (the exchange of gradients),
`optim` (the shared optimizer step) and `data` (caches of samples) stand beside them. Importing this package registers the
strategy names ``"topt"`` and ``"topt_compressed"`` with Lightning, each also with ``"_fork"`` and ``"_spawn"``.
"""

from lightning_topt.plan.parallel_plan import ParallelPlan
from lightning_topt.plugins.auto_parallel import AutoParallelStrategy
from lightning_topt.plugins.cached_data import CachedDataModule
from lightning_topt.plugins.compressed_ddp import CompressedDDPStrategy
from lightning_topt.plugins.coordinated_data import CoordinatedDataModule
from lightning_topt.plugins.local_steps import LocalStepsStrategy
from lightning_topt.plugins.parallel_optimizer import ParallelOptimizerStep
from lightning_topt.plugins.register import register_strategies
from lightning_topt.plugins.stall_monitor import StallMonitor
from lightning_topt.plugins.tuned_data import TunedDataModule

__all__ = [
    "AutoParallelStrategy",
    "CachedDataModule",
    "CompressedDDPStrategy",
    "CoordinatedDataModule",
    "LocalStepsStrategy",
    "ParallelOptimizerStep",
    "ParallelPlan",
    "StallMonitor",
    "TunedDataModule",
    "register_strategies",
]
__version__ = "0.1.0"

register_strategies()

"""PyTorch Lightning plugins that make distributed training fast.

    LightningModule + batch -> graph -> costs -> techniques -> frontier -> plan -> execution ->
    plugins -> cli

A stage may import what earlier stages produce, never what later ones do; `communication` (the
exchange of gradients), `optim` (the shared optimizer step), `data` (caches of samples), `schedules`
(of pipelines) and `prediction` (of weights in continuous ones) stand beside them, `basics` below
all. Importing this package registers the strategy names ``"topt"``, ``"topt_compressed"`` and
``"topt_pipeline"`` with Lightning, with the endings that its ``"ddp"`` has (``"_spawn"``,
``"_find_unused_parameters_true"``); the classes themselves are imported when they are first used.
"""

import importlib
from typing import TYPE_CHECKING, Any

from lightning_topt.plugins.register import register_strategies
from topt_console import __version__ as __version__

if TYPE_CHECKING:
    from lightning_topt.communication.methods.bounded_loss import BoundedLoss
    from lightning_topt.communication.methods.demo import DeMo
    from lightning_topt.communication.methods.dense import Dense
    from lightning_topt.communication.methods.half import BF16, FP16
    from lightning_topt.communication.methods.local_steps import LocalSteps
    from lightning_topt.communication.methods.power_sgd import PowerSGD
    from lightning_topt.communication.methods.quantized_steps import QuantizedSteps
    from lightning_topt.communication.methods.sign import Sign
    from lightning_topt.communication.methods.sparse_loco import SparseLoCo
    from lightning_topt.communication.methods.top_k import TopK
    from lightning_topt.execution.sharded_checkpoint import read_sharded_checkpoint
    from lightning_topt.plan.parallel_plan import ParallelPlan
    from lightning_topt.plugins.auto_parallel import AutoParallelStrategy
    from lightning_topt.plugins.cached_data import CachedDataModule
    from lightning_topt.plugins.compressed_ddp import CompressedDDPStrategy
    from lightning_topt.plugins.coordinated_data import CoordinatedDataModule
    from lightning_topt.plugins.local_steps_strategy import LocalStepsStrategy
    from lightning_topt.plugins.parallel_optimizer import ParallelOptimizerStep
    from lightning_topt.plugins.pipeline_strategy import PipelineStrategy
    from lightning_topt.plugins.stall_monitor import StallMonitor
    from lightning_topt.plugins.tuned_data import TunedDataModule

__all__ = [
    "BF16",
    "FP16",
    "AutoParallelStrategy",
    "BoundedLoss",
    "CachedDataModule",
    "CompressedDDPStrategy",
    "CoordinatedDataModule",
    "DeMo",
    "Dense",
    "LocalSteps",
    "LocalStepsStrategy",
    "ParallelOptimizerStep",
    "ParallelPlan",
    "PipelineStrategy",
    "PowerSGD",
    "QuantizedSteps",
    "Sign",
    "SparseLoCo",
    "StallMonitor",
    "TopK",
    "TunedDataModule",
    "read_sharded_checkpoint",
    "register_strategies",
]
_HOMES = {
    "AutoParallelStrategy": "plugins.auto_parallel",
    "BF16": "communication.methods.half",
    "BoundedLoss": "communication.methods.bounded_loss",
    "CachedDataModule": "plugins.cached_data",
    "CompressedDDPStrategy": "plugins.compressed_ddp",
    "CoordinatedDataModule": "plugins.coordinated_data",
    "DeMo": "communication.methods.demo",
    "Dense": "communication.methods.dense",
    "FP16": "communication.methods.half",
    "LocalSteps": "communication.methods.local_steps",
    "LocalStepsStrategy": "plugins.local_steps_strategy",
    "ParallelOptimizerStep": "plugins.parallel_optimizer",
    "ParallelPlan": "plan.parallel_plan",
    "PipelineStrategy": "plugins.pipeline_strategy",
    "PowerSGD": "communication.methods.power_sgd",
    "QuantizedSteps": "communication.methods.quantized_steps",
    "Sign": "communication.methods.sign",
    "SparseLoCo": "communication.methods.sparse_loco",
    "StallMonitor": "plugins.stall_monitor",
    "TopK": "communication.methods.top_k",
    "TunedDataModule": "plugins.tuned_data",
    "read_sharded_checkpoint": "execution.sharded_checkpoint",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value  # the next access does not come here
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


register_strategies()

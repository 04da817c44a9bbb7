"""Registration of the strategy names with Lightning.

Users of the other package, `pytorch_lightning`, get one clear sentence.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from functools import partial
from typing import Any, NoReturn

from lightning.pytorch.strategies import StrategyRegistry

START_METHODS = {"": "popen", "_spawn": "spawn", "_fork": "fork", "_notebook": "fork"}
_UNUSED = {
    "": {},
    "_find_unused_parameters_false": {},  # what DistributedDataParallel does anyway
    "_find_unused_parameters_true": {"find_unused_parameters": True},
}


def register_strategies() -> None:
    """Register our names with `lightning`, and a refusal with `pytorch_lightning` if that is there.

    Each name has the endings that Lightning's ``ddp`` has: ways to start ranks, and, for strategies
    on DistributedDataParallel, whether parameters may be unused.
    """
    _register(
        "topt",
        "auto_parallel.AutoParallelStrategy",
        "DDP whose ranks share updates where that pays, or the plan that is asked for",
        _UNUSED,
    )
    _register(
        "topt_full",
        "auto_parallel.AutoParallelStrategy",
        "Searches all parallel plans that keep the loss curve, and runs the best",
        {"": {"plan": "search"}},
    )
    _register(
        "topt_compressed",
        "compressed_ddp.CompressedDDPStrategy",
        "Data parallelism with compressed gradients",
        _UNUSED,
    )
    _register(
        "topt_pipeline",
        "pipeline_strategy.PipelineStrategy",
        "Pipelines: the stages of a module on ranks one after the other",
        {"": {}},
    )
    # The registry of `pytorch_lightning` is another one.
    other: Any = sys.modules.get("pytorch_lightning.strategies")
    if other is not None:
        for name in StrategyRegistry.available_strategies():
            if name.startswith("topt"):
                other.StrategyRegistry.register(
                    name, _refuse, override=True, description="needs `import lightning`"
                )


def _register(
    name: str, target: str, description: str, endings: Mapping[str, Mapping[str, Any]]
) -> None:
    # Register the class `target` under `name`, with the options of each ending
    for start, start_method in START_METHODS.items():
        for ending, options in endings.items():
            StrategyRegistry.register(
                f"{name}{start}{ending}",
                partial(_make, target),
                override=True,
                description=f"{description}; ranks start by `{start_method}`",
                start_method=start_method,
                **options,
            )


def _make(target: str, **options: Any) -> Any:
    # The module of a strategy is imported only when the strategy is used.
    module, _, name = target.partition(".")
    return getattr(importlib.import_module(f"lightning_topt.plugins.{module}"), name)(**options)


def _refuse(**_: Any) -> NoReturn:
    raise ImportError(
        "lightning_topt supports `import lightning`; this Trainer comes from `pytorch_lightning`. "
        "Replace `import pytorch_lightning as pl` by `import lightning.pytorch as pl` everywhere."
    )

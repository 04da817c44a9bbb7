"""Registration of the strategy names with Lightning.

Users of the other package, `pytorch_lightning`, get one clear sentence.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import Any, NoReturn

from lightning.pytorch.strategies import StrategyRegistry

START_METHODS = {"": "popen", "_spawn": "spawn", "_fork": "fork", "_notebook": "fork"}


def register_strategies() -> None:
    """Register our names with `lightning`.

    With `pytorch_lightning`, where that is loaded, a clear refusal is registered.
    """
    register_names(
        "topt",
        _make_topt,
        registry=StrategyRegistry,
        description="DDP whose ranks share updates where that pays, or the plan that is asked for",
    )
    register_names(
        "topt_full",
        _make_topt,
        registry=StrategyRegistry,
        description="Searches all parallel plans that keep the loss curve, and runs the best",
        unused=False,
        plan="search",
    )
    compressed = "Data parallelism with compressed gradients"
    register_names(
        "topt_compressed", _make_compressed, registry=StrategyRegistry, description=compressed
    )
    pipelines = "Pipelines: the stages of a module on ranks one after the other"
    register_names(
        "topt_pipeline",
        _make_pipeline,
        registry=StrategyRegistry,
        description=pipelines,
        unused=False,
    )
    # Its registry is another one.
    other: Any = sys.modules.get("pytorch_lightning.strategies")
    if other is not None:
        for name in StrategyRegistry.available_strategies():
            if name.startswith("topt"):
                other.StrategyRegistry.register(
                    name, _refuse, override=True, description="needs `import lightning`"
                )


def register_names(
    name: str,
    strategy: Callable[..., Any],
    *,
    registry: Any,
    description: str,
    unused: bool = True,
    **given: Any,
) -> None:
    """Register `name` with the endings that Lightning's ``ddp`` has.

    ``_fork``, ``_spawn`` and ``_notebook`` are other ways to start ranks; each also with
    ``_find_unused_parameters_true`` and ``_false``, the latter being what DistributedDataParallel
    does anyway; not where `unused` says that it takes none. `given` are more options of it.
    """
    for start, start_method in START_METHODS.items():
        endings = (
            ("", "_find_unused_parameters_false", "_find_unused_parameters_true")
            if unused
            else ("",)
        )
        for ending in endings:
            options: dict[str, Any] = dict(given)
            if is_unused := ending.endswith("true"):
                options["find_unused_parameters"] = True
            registry.register(
                f"{name}{start}{ending}",
                strategy,
                override=True,
                description=f"{description}; ranks start by `{start_method}`"
                + ("; parameters may be unused in a step" if is_unused else ""),
                start_method=start_method,
                **options,
            )


def _make_topt(**options: Any) -> Any:
    # Factory of a strategy that is imported only when it is used
    return importlib.import_module("lightning_topt.plugins.auto_parallel").AutoParallelStrategy(
        **options
    )


def _make_compressed(**options: Any) -> Any:
    return importlib.import_module("lightning_topt.plugins.compressed_ddp").CompressedDDPStrategy(
        **options
    )


def _make_pipeline(**options: Any) -> Any:
    return importlib.import_module("lightning_topt.plugins.pipeline_strategy").PipelineStrategy(
        **options
    )


def _refuse(**_: Any) -> NoReturn:
    raise ImportError(
        "lightning_topt supports `import lightning`; this Trainer comes from `pytorch_lightning`. "
        "Replace `import pytorch_lightning as pl` by `import lightning.pytorch as pl` everywhere."
    )

"""Registration of the strategy names with Lightning, and one clear sentence for users of the other package."""

from __future__ import annotations

import sys
from typing import Any, NoReturn

from lightning.pytorch.strategies import StrategyRegistry

from lightning_topt.plugins.auto_parallel import AutoParallelStrategy
from lightning_topt.plugins.compressed_ddp import CompressedDDPStrategy

STRATEGIES = (AutoParallelStrategy, CompressedDDPStrategy)


def register_strategies() -> None:
    """Register our names with `lightning`, and with `pytorch_lightning`, where that is loaded, a clear refusal."""
    for strategy in STRATEGIES:
        strategy.register_strategies(StrategyRegistry)
    other: Any = sys.modules.get("pytorch_lightning.strategies")
    if other is not None:
        for name in StrategyRegistry.available_strategies():
            if name.startswith("topt"):
                other.StrategyRegistry.register(name, _refuse, override=True, description="needs `import lightning`")


def _refuse(**_: Any) -> NoReturn:
    raise ImportError(
        "lightning_topt supports `import lightning`; this Trainer comes from `pytorch_lightning`. "
        "Replace `import pytorch_lightning as pl` by `import lightning.pytorch as pl` everywhere."
    )

"""Log metrics say where the samples of an epoch came from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import lightning.pytorch as pl
from typing_extensions import override

from lightning_topt.data.cache.sample_cache import CacheStatistics
from lightning_topt.plugins.cached_data import CachedDataModule
from lightning_topt.plugins.wrapped_data import WrappedDataModule

COUNTS = ("memory_hits", "disk_hits", "peer_hits", "misses", "damaged")


class CacheMonitor(pl.Callback):
    """Logs at the end of each training epoch what the caches of the Trainer's `CachedDataModule`
    did since the last one.

    ``cache/memory_hits``, ``cache/disk_hits``, ``cache/peer_hits``, ``cache/misses`` and
    ``cache/damaged``: samples, of all data sets (validation included), all loader workers and all
    ranks together. What workers read ahead counts too. The counters are not reset:
    ``CachedDataModule.statistics`` has the sums of the whole run.

    Raises TypeError for a Trainer with another DataModule.
    """

    def __init__(self) -> None:
        self._last: Mapping[str, int] = {}

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._last = totals(_cached(trainer).statistics())

    @override
    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        counts = totals(_cached(trainer).statistics())
        for name, count in counts.items():
            value = float(count - self._last.get(name, 0))
            pl_module.log(
                f"cache/{name}",
                value,
                on_epoch=True,
                sync_dist=trainer.world_size > 1,
                reduce_fx="sum",
            )
        self._last = counts


def _cached(trainer: pl.Trainer) -> CachedDataModule:
    """The Trainer's CachedDataModule, which may be inside others of ours."""
    datamodule: Any = getattr(trainer, "datamodule", None)
    inner = datamodule
    while isinstance(inner, WrappedDataModule) and not isinstance(inner, CachedDataModule):
        inner = inner.datamodule
    if not isinstance(inner, CachedDataModule):
        raise TypeError(
            f"{type(datamodule).__name__} has no caches of ours: leave CacheMonitor out"
        )
    return inner


def totals(statistics: Mapping[str, CacheStatistics]) -> dict[str, int]:
    """Return the counts of all caches together."""
    return {name: sum(getattr(one, name) for one in statistics.values()) for name in COUNTS}

"""The cache of a stall measurement: that of `CachedDataModule`, in memory, gone afterwards."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from types import TracebackType
from typing import Any

import lightning.pytorch as pl
from torch.utils.data import DataLoader
from typing_extensions import override

from lightning_topt.data.stalls.loop import loader_over
from lightning_topt.plugins.cached_data import CachedDataModule


class _Given(pl.LightningDataModule):
    """The loader that it was given last."""

    loader: DataLoader[Any]

    @override
    def train_dataloader(self) -> DataLoader[Any]:
        return self.loader


class _Module(CachedDataModule):
    """All loaders are over the same data sets, and what these note of their readings changes
    nothing.
    """

    @override
    def _name_of(self, dataset: Any, place: str) -> str:
        return f"{id(dataset):x}"


class MeasuredCache:
    """A `CacheUnderTest` (see `data.stalls.measurement`) of `memory_bytes` (a number or text), as
    long as the context lasts.

    A data set that marks its deterministic part is changed by it for good: measure the source
    first.
    """

    def __init__(self, memory_bytes: int | str) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="topt-stalls-")
        self._given = _Given()
        self._module = _Module(self._given, directory=self._folder.name, memory_bytes=memory_bytes)

    def __enter__(self) -> MeasuredCache:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._module.close()
        self._folder.cleanup()

    def loader_over(
        self, loader: DataLoader[Any], items: Sequence[int], *, num_workers: int
    ) -> DataLoader[Any]:
        """Return the loader over `items`, its samples from the cache where they are there, and
        stored where not.
        """
        self._given.loader = loader_over(loader, items, num_workers=num_workers)
        cached: DataLoader[Any] = self._module.train_dataloader()
        return cached

    def entry_bytes(self) -> float:
        """Return the mean size of what is stored. Raises ValueError where nothing could be
        stored.
        """
        known = self._module.statistics().values()
        items = sum(statistics.memory_items for statistics in known)
        if not items:
            raise ValueError(
                "no sample could be stored in memory: see the warnings above, or raise memory_bytes"
            )
        return sum(statistics.memory_bytes for statistics in known) / items

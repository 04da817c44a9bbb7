"""`CachedDataModule` is any LightningDataModule with its samples kept in memory and on disk."""

from __future__ import annotations

import os
from copy import copy
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities import rank_zero_warn
from torch.utils.data import ConcatDataset, DataLoader, IterableDataset, Subset, default_collate
from typing_extensions import override

from lightning_topt.basics.argument_checks import check_folder, check_size, check_version
from lightning_topt.data.cache.cached_batches import BatchDataset, collate
from lightning_topt.data.cache.cached_dataset import CachedDataset
from lightning_topt.data.cache.dataset_names import DatasetNames
from lightning_topt.data.cache.determinism import marked_method
from lightning_topt.data.cache.sample_cache import CacheStatistics, SampleCache
from lightning_topt.data.resumable_loader import Lookahead, make_resumable
from lightning_topt.plugins.cache_defaults import default_directory, default_memory_bytes
from lightning_topt.plugins.cache_partition import (
    CachePartition,
    PartitionedCache,
    gathered,
    open_partitioned,
)
from lightning_topt.plugins.wrapped_data import WrappedDataModule

TRAIN = "train"


class CachedDataModule(WrappedDataModule):
    """A `CachedDataModule` is `datamodule` with a cache before each of its map-style data sets;
    everything else about it stays as it is.

    The first epoch reads the source and fills the cache; later ones, and later runs, read memory,
    then disk, then the source. Nothing is ever evicted, so what finds no room is read from the
    source in every epoch. Samples are kept after the part of the data set that is marked with
    `lightning_topt.data.deterministic`, without a mark as ``__getitem__`` gives them; a part that
    turns out to be random is refused. All processes and jobs of a node that use the same directory
    share one cache. Checkpoints of the middle of an epoch hold where its training loaders are: they
    go on at the next batch, in the same order.

    Sizes are numbers or text (``"8GiB"``). Without any, each data set may take a quarter of the
    memory that is free on the machine, and not promised to another one of them, when its loader is
    first asked for; nothing is written to disk (where there is no such memory, other than on Linux,
    as many bytes of disk are used). All ranks of a machine share that.

    Args:
        datamodule: with map-style data sets.
        directory: for the disk's part, on a local disk. A folder per data set, named by its
            fingerprint. None: in the user's cache directory (``$XDG_CACHE_HOME`` or ``~/.cache``),
            ``lightning_topt/samples/HOST``.
        memory_bytes: of shared memory per data set and node; it is freed with the last process that
            uses it.
        disk_bytes: of disk per data set and node.
        data_version: names the state of the data. None: sizes and times of the files that the data
            set's state names do.
        partition: each node of the run stores a part of the samples, and the others ask it before
            the source, so that room for one copy on all nodes together is enough. True:
            `CachePartition`'s defaults. Does nothing on one node.

    Raises ValueError for data sets that cannot be cached (iterable ones) or have no fingerprint,
    for no room at all, and at once for arguments that are none; TypeError for a `datamodule` that
    is none of `lightning`; `NotDeterministicError` while training when a sample drawn twice
    differs.
    """

    def __init__(
        self,
        datamodule: pl.LightningDataModule,
        *,
        directory: str | Path | None = None,
        memory_bytes: int | str | None = None,
        disk_bytes: int | str | None = None,
        data_version: str | None = None,
        partition: CachePartition | bool = False,
    ) -> None:
        data_version = check_version(data_version, name="data_version")
        self.directory = (
            default_directory() if directory is None else check_folder(directory, name="directory")
        )
        self.has_default_room = memory_bytes is None and disk_bytes is None
        self.memory_bytes = check_size(
            0 if memory_bytes is None else memory_bytes, name="memory_bytes", least=0
        )
        self.disk_bytes = check_size(
            0 if disk_bytes is None else disk_bytes, name="disk_bytes", least=0
        )
        if not self.has_default_room and self.memory_bytes + self.disk_bytes == 0:
            raise ValueError(
                "a cache needs room: give memory_bytes or disk_bytes, per data set and node, or "
                "neither for defaults"
            )
        if not isinstance(partition, CachePartition | bool | None):
            raise ValueError(f"partition is True, False or a CachePartition, not {partition!r}")
        self.data_version = data_version
        self._names = DatasetNames(data_version=data_version, warn=rank_zero_warn)
        self._caches: dict[str, SampleCache] = {}  # by fingerprint: equal data sets share one
        self.partition = CachePartition() if partition is True else partition or None
        self._joined: list[PartitionedCache] = []
        super().__init__(datamodule)

    @override
    def train_dataloader(self) -> Any:
        return self._changed(self.datamodule.train_dataloader(), path=TRAIN)

    @override
    def val_dataloader(self) -> Any:
        return self._changed(self.datamodule.val_dataloader(), path="validation")

    @override
    def test_dataloader(self) -> Any:
        return self._changed(self.datamodule.test_dataloader(), path="test")

    @override
    def predict_dataloader(self) -> Any:
        return self._changed(self.datamodule.predict_dataloader(), path="prediction")

    def statistics(self, *, reset: bool = False) -> dict[str, CacheStatistics]:
        """Return what the caches did and hold, by fingerprint."""
        return {name: cache.statistics(reset=reset) for name, cache in self._caches.items()}

    def close(self) -> None:
        """Let go of the memory and files. The disk's part stays for the next run."""
        for joined in self._joined:
            joined.close()
        self._joined.clear()
        for cache in self._caches.values():
            cache.close()
        self._caches.clear()

    @override
    def _changed_loader(self, loader: DataLoader[Any], path: str) -> DataLoader[Any]:
        if isinstance(loader.dataset, IterableDataset):
            raise ValueError(
                f"{type(loader.dataset).__name__} is an IterableDataset: its samples have no "
                "numbers to be found again by. Give it __getitem__ and __len__, or leave its "
                "DataModule without a cache"
            )
        stacks = (
            type(loader) is DataLoader
            and loader.collate_fn is default_collate
            and loader.batch_sampler is not None
        )
        replace_dataset(
            loader, self._cached_dataset(loader.dataset, place=path, ready_batches=stacks)
        )
        if stacks:
            replace_argument(loader, "collate_fn", collate)
        if path.startswith(TRAIN):
            make_resumable(
                loader, is_epoch_over=self._is_epoch_over, lookahead=self._lookahead(loader.dataset)
            )
        return loader

    def _lookahead(self, dataset: Any) -> Lookahead | None:
        if not self._joined or self.partition is None:
            return None
        return Lookahead(dataset, batches=self.partition.prefetch_batches)

    def _is_epoch_over(self) -> bool:
        """Whether the Trainer has had the last batch that it wants of this epoch."""
        return (
            self.trainer is not None
            and self.trainer.fit_loop.epoch_loop.batch_progress.is_last_batch
        )

    def _cached_dataset(self, dataset: Any, *, place: str, ready_batches: bool) -> Any:
        """Subsets and concatenations are looked through, so that they share the samples of what
        they are made of.
        """
        if type(dataset) is Subset:
            changed = copy(dataset)
            changed.dataset = self._cached_dataset(
                dataset.dataset, place=place, ready_batches=ready_batches
            )
            return changed
        if type(dataset) is ConcatDataset:
            whole = copy(dataset)
            whole.datasets = [
                self._cached_dataset(part, place=f"{place}/part {number}", ready_batches=False)
                for number, part in enumerate(dataset.datasets)
            ]
            return whole
        if isinstance(dataset, CachedDataset | BatchDataset):
            return dataset
        inner = getattr(dataset, "dataset", None)
        if marked_method(dataset) is None and holds_mark(inner):
            self._cached_dataset(
                inner, place=place, ready_batches=False
            )  # before the marked method; what wraps it stays live
            return dataset
        name = self._name_of(dataset, place)
        if name not in self._caches:
            self._caches[name] = self._new_cache(name, num_items=len(dataset))
        cached = CachedDataset(dataset, self._caches[name])
        return BatchDataset(cached) if ready_batches else cached

    def _name_of(self, dataset: Any, place: str) -> str:
        return self._names.name_of(dataset, place=place, agree=gathered if self._joined else None)

    def _new_cache(self, name: str, *, num_items: int) -> SampleCache:
        is_alone = self.partition is None or (
            self.trainer is not None and self.trainer.num_nodes == 1
        )

        memory_bytes, disk_bytes = self._room()

        def make() -> SampleCache:
            return SampleCache(
                self.directory,
                fingerprint=name,
                num_items=num_items,
                memory_bytes=memory_bytes,
                disk_bytes=disk_bytes,
                write_behind=is_alone,
            )

        if self.partition is None or is_alone:
            return make()
        if self.trainer is None:
            raise ValueError(
                "a partitioned cache learns from the Trainer which nodes there are: pass this "
                "DataModule to fit, or leave the partition out to read its loaders alone"
            )
        number = len(self._caches)
        joined = open_partitioned(
            make, self.partition, trainer=self.trainer, fingerprint=name, number=number
        )
        self._joined.append(joined)
        return joined.cache

    def _room(self) -> tuple[int, int]:
        """Bytes of memory and of disk for the next cache."""
        if not self.has_default_room:
            return self.memory_bytes, self.disk_bytes
        stores = [store for cache in self._caches.values() for store in cache.tiers]
        promised = sum(max(0, store.capacity_bytes - store.used_bytes) for store in stores)
        nbytes = default_memory_bytes(promised_bytes=promised)
        return (nbytes, 0) if hasattr(os, "memfd_create") else (0, nbytes)


def holds_mark(dataset: Any) -> bool:
    """Return whether `dataset`, or one that it wraps as ``dataset``, has a method marked as
    deterministic.
    """
    while dataset is not None:
        if marked_method(dataset) is not None:
            return True
        dataset = getattr(dataset, "dataset", None)
    return False


def replace_dataset(loader: DataLoader[Any], dataset: Any) -> None:
    """Let `loader` read `dataset`; also when Lightning makes it anew with a distributed sampler."""
    replace_argument(loader, "dataset", dataset)
    if hasattr(loader, "__dataset"):
        object.__setattr__(loader, "__dataset", dataset)


def replace_argument(loader: DataLoader[Any], name: str, value: Any) -> None:
    """Set an attribute of `loader` and the argument that Lightning has recorded of its
    constructor.
    """
    object.__setattr__(loader, name, value)  # DataLoader itself refuses to change its data set
    if not hasattr(loader, "__pl_saved_args"):
        return
    names, arguments = (
        getattr(loader, "__pl_saved_arg_names"),
        list(getattr(loader, "__pl_saved_args")),
    )
    if name in names[: len(arguments)]:
        arguments[names.index(name)] = value
        object.__setattr__(loader, "__pl_saved_args", tuple(arguments))
    else:
        keywords = {**getattr(loader, "__pl_saved_kwargs"), name: value}
        object.__setattr__(loader, "__pl_saved_kwargs", keywords)

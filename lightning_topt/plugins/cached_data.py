"""`CachedDataModule`: any LightningDataModule with its samples kept in memory and on disk."""

from __future__ import annotations

import types
from collections.abc import Mapping
from copy import copy
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities import CombinedLoader
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.utils.data import ConcatDataset, DataLoader, IterableDataset, Subset, default_collate
from typing_extensions import override

from lightning_topt.data.cached_batches import BatchDataset, collate
from lightning_topt.data.cached_dataset import CachedDataset
from lightning_topt.data.fingerprint import fingerprint
from lightning_topt.data.sample_cache import CacheStatistics, SampleCache

LOADERS = ("train_dataloader", "val_dataloader", "test_dataloader", "predict_dataloader")
TRANSFERS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")


class CachedDataModule(pl.LightningDataModule):
    """`datamodule` with a cache before each of its map-style data sets; everything else about it stays as it is.

    The first epoch reads the source and fills the cache; later ones, and later runs, read memory, then disk, then the source.
    Nothing is ever evicted, so what finds no room is read from the source in every epoch. Samples are kept after the part of
    the data set that is marked with `lightning_topt.data.deterministic`, without a mark as ``__getitem__`` gives them; a part
    that turns out to be random is refused. All processes and jobs of a node that use the same directory share one cache.

    Args:
        datamodule: with map-style data sets.
        directory: for the disk's part, on a local disk. A folder per data set, named by its fingerprint.
        memory_bytes: of shared memory per data set and node; it is freed with the last process that uses it.
        disk_bytes: of disk per data set and node.
        data_version: names the state of the data. None: sizes and times of the files that the data set's state names do.

    Raises ValueError for data sets that cannot be cached (iterable ones) or have no fingerprint, and for no room at all;
    `NotDeterministicError` while training when a sample drawn twice differs.
    """

    def __init__(
        self,
        datamodule: pl.LightningDataModule,
        *,
        directory: str | Path,
        memory_bytes: int = 0,
        disk_bytes: int = 0,
        data_version: str | None = None,
    ) -> None:
        super().__init__()
        if min(memory_bytes, disk_bytes) < 0 or memory_bytes + disk_bytes == 0:
            raise ValueError("a cache needs room: give memory_bytes or disk_bytes, per data set and node")
        self.datamodule, self.directory = datamodule, Path(directory)
        self.memory_bytes, self.disk_bytes, self.data_version = memory_bytes, disk_bytes, data_version
        self.prepare_data_per_node = datamodule.prepare_data_per_node
        self.allow_zero_length_dataloader_with_multiple_devices = (
            datamodule.allow_zero_length_dataloader_with_multiple_devices
        )
        self._caches: dict[int, tuple[Any, CachedDataset]] = {}
        if datamodule._log_hyperparams:
            self.save_hyperparameters(dict(datamodule.hparams_initial))
        for name in (*LOADERS, *TRANSFERS):  # Lightning asks whether a module has its own
            if not is_overridden(name, datamodule, pl.LightningDataModule):
                setattr(self, name, types.MethodType(getattr(pl.LightningDataModule, name), self))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "datamodule" not in vars(self):
            raise AttributeError(name)
        return getattr(self.datamodule, name)

    @property
    def trainer(self) -> pl.Trainer | None:
        """The Trainer, also of the wrapped module."""
        return vars(self).get("_trainer")

    @trainer.setter
    def trainer(self, trainer: pl.Trainer | None) -> None:
        vars(self)["_trainer"] = trainer
        if "datamodule" in vars(self):
            self.datamodule.trainer = trainer

    @override
    def prepare_data(self) -> None:
        self.datamodule.prepare_data()

    @override
    def setup(self, stage: str) -> None:
        self.datamodule.setup(stage)

    @override
    def teardown(self, stage: str) -> None:
        self.datamodule.teardown(stage)

    @override
    def on_exception(self, exception: BaseException) -> None:
        self.datamodule.on_exception(exception)

    @override
    def state_dict(self) -> dict[str, Any]:
        return self.datamodule.state_dict()

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.datamodule.load_state_dict(state_dict)

    @override
    def train_dataloader(self) -> Any:
        return self._cached(self.datamodule.train_dataloader())

    @override
    def val_dataloader(self) -> Any:
        return self._cached(self.datamodule.val_dataloader())

    @override
    def test_dataloader(self) -> Any:
        return self._cached(self.datamodule.test_dataloader())

    @override
    def predict_dataloader(self) -> Any:
        return self._cached(self.datamodule.predict_dataloader())

    @override
    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return self.datamodule.on_before_batch_transfer(batch, dataloader_idx)

    @override
    def transfer_batch_to_device(self, batch: Any, device: Any, dataloader_idx: int) -> Any:
        return self.datamodule.transfer_batch_to_device(batch, device, dataloader_idx)

    @override
    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return self.datamodule.on_after_batch_transfer(batch, dataloader_idx)

    def statistics(self, *, reset: bool = False) -> dict[str, CacheStatistics]:
        """What the caches did and hold, by fingerprint."""
        return {cached.cache.folder.name: cached.cache.statistics(reset=reset) for _, cached in self._caches.values()}

    def close(self) -> None:
        """Let go of the memory and files. The disk's part stays for the next run."""
        for _, cached in self._caches.values():
            cached.cache.close()
        self._caches.clear()

    def _cached(self, loaders: Any) -> Any:
        """The same loaders over cached data sets."""
        if isinstance(loaders, DataLoader):
            return self._cached_loader(loaders)
        if isinstance(loaders, CombinedLoader):
            return CombinedLoader(self._cached(loaders.iterables), loaders._mode)
        if isinstance(loaders, Mapping):
            return type(loaders)((name, self._cached(loader)) for name, loader in loaders.items())  # type: ignore[call-arg]
        if isinstance(loaders, list | tuple):
            return type(loaders)(self._cached(loader) for loader in loaders)
        raise ValueError(
            f"{type(self.datamodule).__name__} gives a {type(loaders).__name__} as loader; a cache goes before the map-style "
            "data set of a torch.utils.data.DataLoader"
        )

    def _cached_loader(self, loader: DataLoader[Any]) -> DataLoader[Any]:
        if isinstance(loader.dataset, IterableDataset):
            raise ValueError(
                f"{type(loader.dataset).__name__} is an IterableDataset: its samples have no numbers to be found again by. "
                "Give it __getitem__ and __len__, or leave its DataModule without a cache"
            )
        stacks = type(loader) is DataLoader and loader.collate_fn is default_collate and loader.batch_size is not None
        replace_dataset(loader, self._cached_dataset(loader.dataset, ready_batches=stacks))
        if stacks:
            replace_argument(loader, "collate_fn", collate)
        return loader

    def _cached_dataset(self, dataset: Any, *, ready_batches: bool) -> Any:
        """Subsets and concatenations are looked through, so that they share the samples of what they are made of."""
        if type(dataset) is Subset:
            changed = copy(dataset)
            changed.dataset = self._cached_dataset(dataset.dataset, ready_batches=ready_batches)
            return changed
        if type(dataset) is ConcatDataset:
            whole = copy(dataset)
            whole.datasets = [self._cached_dataset(part, ready_batches=False) for part in dataset.datasets]
            return whole
        if isinstance(dataset, CachedDataset | BatchDataset):
            return dataset
        if id(dataset) not in self._caches:
            cache = SampleCache(
                self.directory,
                fingerprint=fingerprint(dataset, data_version=self.data_version),
                num_items=len(dataset),
                memory_bytes=self.memory_bytes,
                disk_bytes=self.disk_bytes,
            )
            self._caches[id(dataset)] = dataset, CachedDataset(dataset, cache)
        cached = self._caches[id(dataset)][1]
        return BatchDataset(cached) if ready_batches else cached


def replace_dataset(loader: DataLoader[Any], dataset: Any) -> None:
    """Let `loader` read `dataset`; also when Lightning makes it anew with a distributed sampler."""
    replace_argument(loader, "dataset", dataset)
    if hasattr(loader, "__dataset"):
        object.__setattr__(loader, "__dataset", dataset)


def replace_argument(loader: DataLoader[Any], name: str, value: Any) -> None:
    """Set an attribute of `loader` and the argument that Lightning has recorded of its constructor."""
    object.__setattr__(loader, name, value)  # DataLoader itself refuses to change its data set
    if not hasattr(loader, "__pl_saved_args"):
        return
    names, arguments = getattr(loader, "__pl_saved_arg_names"), list(getattr(loader, "__pl_saved_args"))
    if name in names[: len(arguments)]:
        arguments[names.index(name)] = value
        object.__setattr__(loader, "__pl_saved_args", tuple(arguments))
    else:
        keywords = {**getattr(loader, "__pl_saved_kwargs"), name: value}
        object.__setattr__(loader, "__pl_saved_kwargs", keywords)

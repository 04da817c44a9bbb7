"""A DataModule whose training batches are prepared together by the jobs of one machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
)
from typing_extensions import override

from lightning_topt.basics.argument_checks import (
    check_folder,
    check_real,
    check_size,
    check_version,
    check_whole,
)
from lightning_topt.data.cache.cached_batches import BatchDataset
from lightning_topt.data.cache.cached_dataset import CachedDataset
from lightning_topt.data.cache.fingerprint import fingerprint
from lightning_topt.data.coordinated.loader import CoordinatedLoader, CoordinationStatistics
from lightning_topt.data.coordinated.preparation import SeededBatches
from lightning_topt.plugins.wrapped_data import WrappedDataModule


class CoordinatedDataModule(WrappedDataModule):
    """A DataModule whose training batches are prepared once for several jobs.

    These are all jobs on this machine that name the same `directory`. Made for searches whose
    trials run side by side (Hydra multirun) on the same data: each trial's worker processes prepare
    a part of the batches, and every trial gets every batch once per epoch, in the same order and
    with the same augmentation: `seed` and the epoch decide both, in all trials, whatever the
    trials' own seeds are. Trials may start late, differ in speed, pause and die. Validation, test
    and prediction loaders stay as they are.

    Batches are prepared in ``num_workers`` processes of each job (at least one, also where the
    loader has 0), so the training process does not wait for its own preparation. The loader's
    ``prefetch_factor`` and ``timeout`` have no meaning here.

    Args:
        datamodule: whose train_dataloader gives a DataLoader, or a collection of them, with
            map-style data sets. Put a CachedDataModule inside, not around:
            ``CoordinatedDataModule(CachedDataModule(...), ...)``.
        directory: where jobs meet; a name only, nothing is written there.
        memory_bytes: of prepared batches that wait for slower jobs, per loader and machine; the
            least that any job says. A number or text (``"1GiB"``).
        seed: of the order and the augmentation of the training batches; the same in all jobs.
        data_version: names the state of the data; as of CachedDataModule.
        timeout_seconds: after this a batch that a stopped job promised is prepared by another.

    Raises ValueError for iterable data sets, loaders without batches, and samplers that cannot be
    divided among ranks; while training `CoordinationRefused` (a ValueError) when jobs with other
    batches use the same directory.
    """

    def __init__(
        self,
        datamodule: pl.LightningDataModule,
        *,
        directory: str | Path,
        memory_bytes: int | str,
        seed: int = 0,
        data_version: str | None = None,
        timeout_seconds: float = 30.0,
    ) -> None:
        self.directory = check_folder(directory, name="directory")
        self.memory_bytes = check_size(memory_bytes, name="memory_bytes")
        self.seed = check_whole(seed, name="seed", least=None)
        self.data_version = check_version(data_version, name="data_version")
        self.timeout_seconds = check_real(timeout_seconds, name="timeout_seconds", positive=True)
        self._loaders: list[CoordinatedLoader] = []
        super().__init__(datamodule)

    @override
    def train_dataloader(self) -> Any:
        self.close()  # those of before, where the Trainer reloads them
        self._loaders = []
        return self._changed(self.datamodule.train_dataloader())

    @override
    def teardown(self, stage: str) -> None:
        self.close()
        super().teardown(stage)

    @override
    def on_exception(self, exception: BaseException) -> None:
        self.close()
        super().on_exception(exception)

    def statistics(self) -> list[CoordinationStatistics]:
        """Return where the training batches came from, by loader."""
        return [loader.statistics() for loader in self._loaders]

    def close(self) -> None:
        """Leave the other jobs and end the worker processes."""
        for loader in self._loaders:
            loader.close()

    @override
    def _changed_loader(self, loader: DataLoader[Any], path: str) -> CoordinatedLoader:
        if isinstance(loader.dataset, IterableDataset):
            raise ValueError(
                f"{type(loader.dataset).__name__} is an IterableDataset: jobs cannot agree on "
                "batches without numbers. Give it __getitem__ and __len__"
            )
        if loader.batch_sampler is None:
            raise ValueError(
                "a loader with batch_size=None gives single samples; jobs share batches: give it a "
                "batch_size"
            )
        # Jobs share batches of the same rank.
        rank, ranks = (
            (self.trainer.global_rank, self.trainer.world_size) if self.trainer else (0, 1)
        )
        context = loader.multiprocessing_context
        coordinated = CoordinatedLoader(
            loader.dataset,
            batches=SeededBatches(self._batch_sampler(loader, rank, ranks), seed=self.seed),
            collate_fn=loader.collate_fn,
            directory=self.directory,
            fingerprint=fingerprint(
                [_content(loader.dataset), loader.collate_fn], data_version=self.data_version
            ),
            seed=self.seed,
            memory_bytes=self.memory_bytes,
            timeout_seconds=self.timeout_seconds,
            num_workers=max(1, loader.num_workers),
            group=f"{path} {rank}/{ranks}",
            multiprocessing_context=context
            if context is None or isinstance(context, str)
            else context.get_start_method(),
            worker_init_fn=loader.worker_init_fn,
            pin_memory=loader.pin_memory,
        )
        self._loaders.append(coordinated)
        return coordinated

    def _batch_sampler(self, loader: DataLoader[Any], rank: int, ranks: int) -> Any:
        """Return the loader's own sampler, or one that gives this rank its part.

        Lightning makes the latter for a DataLoader only.
        """
        sampler = loader.batch_sampler
        inner = getattr(sampler, "sampler", None)
        divides = (
            self.trainer is not None and self.trainer._accelerator_connector.use_distributed_sampler
        )
        if ranks == 1 or isinstance(inner, DistributedSampler) or not divides:
            return sampler
        if type(sampler) is not BatchSampler or type(inner) not in (
            RandomSampler,
            SequentialSampler,
        ):
            raise ValueError(
                f"{ranks} ranks share the data, and a {type(inner or sampler).__name__} cannot be "
                "divided among them: give the loader a DistributedSampler, or the Trainer "
                "use_distributed_sampler=False"
            )
        part: DistributedSampler[Any] = DistributedSampler(
            loader.dataset,
            num_replicas=ranks,
            rank=rank,
            shuffle=isinstance(inner, RandomSampler),
            seed=self.seed,
            drop_last=sampler.drop_last,
        )
        return BatchSampler(part, sampler.batch_size, sampler.drop_last)


def _content(dataset: Any) -> Any:
    # What a fingerprint is taken of: a cache stands for what it caches
    if isinstance(dataset, BatchDataset):
        return _content(dataset.dataset)
    if isinstance(dataset, CachedDataset):
        return dataset.cache.folder.name
    if type(dataset) is Subset:
        return [_content(dataset.dataset), list(dataset.indices)]
    if type(dataset) is ConcatDataset:
        return [_content(part) for part in dataset.datasets]
    return dataset

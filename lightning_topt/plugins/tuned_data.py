"""A DataModule whose workers, prefetching and pinning are chosen by measurement."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities import CombinedLoader, rank_zero_info
from torch.utils.data import DataLoader, IterableDataset
from typing_extensions import override

from lightning_topt.basics.argument_checks import check_real, check_size
from lightning_topt.data.loader_tuning import (
    AUTO,
    Auto,
    LoaderChoice,
    cores_per_rank,
    memory_for_waiting,
    tune_loader,
)
from lightning_topt.data.resumable_loader import ResumableLoader
from lightning_topt.plugins.cached_data import TRAIN, replace_argument
from lightning_topt.plugins.wrapped_data import WrappedDataModule

# without workers
_WORKERS_ONLY = {"persistent_workers": False, "timeout": 0, "multiprocessing_context": None}


class TunedDataModule(WrappedDataModule):
    """A DataModule whose loader settings are chosen by measurement.

    They are `num_workers`, `prefetch_factor` and `pin_memory` of the training loaders of
    `datamodule`. For each of the three "auto" is chosen, a value is taken, None leaves what the
    loader has. The first time that the training loaders are asked for, they are tried on this
    machine with different numbers of workers for some seconds; the choice is printed, kept in
    `choices` and used for all later epochs and fits. With several ranks, rank 0 tries and all do
    the same. Several training loaders share the cores. Everything else of a loader stays, but what
    torch allows with workers only (persistent workers, timeout, start method) goes where none are
    chosen. Other loaders than training's stay as they are.

    Samples without randomness and their order, and so the losses, do not depend on the choice. With
    or without us, torch draws random augmentation otherwise with another number of workers. Where
    no workers take the place of some, or the reverse, the order of later epochs may differ too:
    that of a loader with a generator of its own or, on a single rank, with persistent workers. Give
    numbers to repeat such a run exactly.

    The trials read samples, in other processes than this one, and throw them away: what
    ``__getitem__`` does besides (counts, logs, files) happens for these too. With a cache,
    ``TunedDataModule(CachedDataModule(...))`` tries what the cache holds at that time and fills it,
    ``CachedDataModule(TunedDataModule(...))`` tries the source.

    Args:
        datamodule: whose train_dataloader gives plain DataLoaders of map-style data sets.
        num_workers: "auto": the least number nearly as fast as the best, up to the cores that this
            rank may use; 0 where handing batches over costs more than preparing them.
        prefetch_factor: "auto": so many that the others go on while a batch takes long, within
            `memory_bytes`. Has no meaning where no workers are chosen.
        pin_memory: "auto": where the Trainer's device is a GPU of CUDA; without a Trainer, what the
            loader has.
        seconds: of the trials of each loader; a trial that has begun is not cut short, however slow
            its first batches are.
        memory_bytes: of prepared batches that wait, on this rank; a number or text (``"1GiB"``).
            None: this rank's share of a tenth of the free memory, and of half of the free shared
            memory.

    Raises ValueError for values that are none, and for loaders that cannot be changed: of iterable
    data sets, and subclasses of DataLoader.
    """

    def __init__(
        self,
        datamodule: pl.LightningDataModule,
        *,
        num_workers: int | Auto | None = AUTO,
        prefetch_factor: int | Auto | None = AUTO,
        pin_memory: bool | Auto | None = AUTO,
        seconds: float = 5.0,
        memory_bytes: int | str | None = None,
    ) -> None:
        # Values are checked before the wrapped module is touched.
        _check_count("num_workers", num_workers, least=0)
        _check_count("prefetch_factor", prefetch_factor, least=1)
        if not (pin_memory is None or isinstance(pin_memory, bool) or pin_memory == AUTO):
            raise ValueError(
                'pin_memory is True, False, "auto" or None (as the loader has it), not '
                f"{pin_memory!r}"
            )
        if num_workers == 0 and isinstance(prefetch_factor, int):
            raise ValueError(
                "prefetch_factor is of workers: give num_workers, or leave prefetch_factor out"
            )
        seconds = check_real(seconds, name="seconds", positive=True)
        memory = None if memory_bytes is None else check_size(memory_bytes, name="memory_bytes")
        # by loader: "train", or "train/0", "train/name" of a collection
        self.choices: dict[str, LoaderChoice] = {}
        self._num_workers, self._prefetch_factor, self._pin_memory = (
            num_workers,
            prefetch_factor,
            pin_memory,
        )
        self._seconds, self._memory_bytes, self._num_loaders = seconds, memory, 1
        super().__init__(datamodule)

    @override
    def train_dataloader(self) -> Any:
        loaders = self.datamodule.train_dataloader()
        together = loaders if isinstance(loaders, CombinedLoader) else CombinedLoader(loaders)
        self._num_loaders = max(1, len(together.flattened))
        return self._changed(loaders, path=TRAIN)

    @override
    def _changed_loader(self, loader: DataLoader[Any], path: str) -> DataLoader[Any]:
        _check_loader(loader)
        if path not in self.choices:
            self.choices[path] = replace(
                self._agreed(lambda: self._tune(loader)), pin_memory=self._pins()
            )
            rank_zero_info(f"topt: loader {path}: {self.choices[path].reason}")
        apply_choice(loader, self.choices[path])
        return loader

    def _tune(self, loader: DataLoader[Any]) -> LoaderChoice:
        # Ranks of the machine, and several loaders, share its cores and memory.
        trainer = self.trainer
        ranks = 1 if trainer is None else max(1, trainer.world_size // trainer.num_nodes)
        sharers = ranks * self._num_loaders
        num_workers = loader.num_workers if self._num_workers is None else self._num_workers
        prefetch_factor = self._prefetch_factor
        if prefetch_factor is None and num_workers != 0:
            prefetch_factor = loader.prefetch_factor
        memory = (
            memory_for_waiting(sharers)
            if self._memory_bytes is None
            else self._memory_bytes / self._num_loaders
        )
        return tune_loader(
            loader,
            num_workers=num_workers,
            prefetch_factor=prefetch_factor,
            cores=cores_per_rank(sharers),
            memory_bytes=memory,
            seconds=self._seconds,
        )

    def _agreed(self, tune: Callable[[], LoaderChoice]) -> LoaderChoice:
        """Return what rank 0 chooses, on all ranks: workers are seeded by their number.

        An error of rank 0 is one of all.
        """
        trainer = self.trainer
        if trainer is None or trainer.world_size == 1:
            return tune()
        # Rank 0 measures while the others wait.
        choice: LoaderChoice | None = None
        error: Exception | None = None
        if trainer.is_global_zero:
            try:
                choice = tune()
            except Exception as raised:
                # or the others would wait for the choice until their group's timeout
                error = raised
        choice, message = trainer.strategy.broadcast((choice, repr(error)))
        if error is not None:
            raise error
        if choice is None:
            raise RuntimeError(f"rank 0 could not try its loader: {message}")
        return choice

    def _pins(self) -> bool | None:
        if self._pin_memory != AUTO:
            return self._pin_memory
        return None if self.trainer is None else self.trainer.strategy.root_device.type == "cuda"


def apply_choice(loader: DataLoader[Any], choice: LoaderChoice) -> None:
    """Change `loader` as chosen.

    Also for when Lightning makes it anew with a distributed sampler.
    """
    arguments: dict[str, Any] = {
        "num_workers": choice.num_workers,
        "prefetch_factor": choice.prefetch_factor,
    }
    if choice.num_workers == 0:
        arguments |= _WORKERS_ONLY
    elif choice.prefetch_factor is None:
        arguments["prefetch_factor"] = 2  # torch's default, which it sets when a loader is made
    if choice.pin_memory is not None:
        arguments["pin_memory"] = choice.pin_memory
    for name, value in arguments.items():
        replace_argument(loader, name, value)
    # Lightning repeats what the user set on the loader after it was made.
    repeated = [
        entry for entry in getattr(loader, "__pl_attrs_record", ()) if entry[0][0] not in arguments
    ]
    if hasattr(loader, "__pl_attrs_record"):
        object.__setattr__(loader, "__pl_attrs_record", repeated)


def _check_loader(loader: DataLoader[Any]) -> None:
    instead = (
        "set its num_workers, prefetch_factor and pin_memory yourself, and leave TunedDataModule "
        "out"
    )
    if isinstance(loader.dataset, IterableDataset):
        raise ValueError(
            f"{type(loader.dataset).__name__} is an IterableDataset: the number of workers may "
            f"change what it gives. Give it __getitem__ and __len__, or {instead}"
        )
    if type(loader) not in (DataLoader, ResumableLoader):
        raise ValueError(
            f"{type(loader).__name__} is a subclass of DataLoader, which may do anything with its "
            f"arguments: {instead}"
        )


def _check_count(name: str, value: int | str | None, *, least: int) -> None:
    if value is None or value == AUTO:
        return
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(
            f'{name} is at least {least}, "auto" or None (as the loader has it), not {value!r}'
        )

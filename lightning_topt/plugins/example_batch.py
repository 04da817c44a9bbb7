"""Example batches for planning, without starting workers or advancing the run's data order."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor
from torch.utils._pytree import tree_map, tree_unflatten
from torch.utils.data import DataLoader, IterableDataset, default_collate


def example_batches(trainer: pl.Trainer) -> tuple[Any, Any | None]:
    """Return a training batch as `training_step` will get it, and one of twice as many samples
    (None where there is no such).

    Calls `trainer.fit_loop.setup_data()`, as `trainer.estimated_stepping_batches` does. Raises
    ValueError when the training data are empty.
    """
    trainer.fit_loop.setup_data()
    combined = trainer.fit_loop._combined_loader
    if combined is None:
        raise ValueError(
            "planning needs a training batch, but there are no training data "
            "(limit_train_batches=0?)"
        )
    return batches_of(combined, trainer)


def batches_of(loaders: CombinedLoader, trainer: pl.Trainer) -> tuple[Any, Any | None]:
    """Return the same for given training loaders; `trainer` has the module and the data module
    whose transfer hooks run.
    """
    with isolate_rng():
        singles = [_samples(loader, 1) for loader in loaders.flattened]
        doubles = [_samples(loader, 2) for loader in loaders.flattened]
    single = tree_unflatten(singles, loaders._spec)
    double = (
        None if any(batch is None for batch in doubles) else tree_unflatten(doubles, loaders._spec)
    )
    return _transferred(trainer, single), None if double is None else _transferred(trainer, double)


def _samples(loader: Any, times: int) -> Any | None:
    """A batch of `loader` with `times` as many samples; None where its size cannot be chosen."""
    dataset, batch_size = getattr(loader, "dataset", None), _batch_size(loader)
    if isinstance(loader, DataLoader) and batch_size and not isinstance(dataset, IterableDataset):
        dataset = loader.dataset
        size = len(dataset)  # type: ignore[arg-type]
        if size == 0:
            raise ValueError("planning needs a training batch, but the training data set is empty")
        if times > 1 and size < 2 * batch_size:
            return None
        samples = [dataset[index % size] for index in range(times * min(batch_size, size))]
        return loader.collate_fn(samples)
    return _first(loader) if times == 1 else None


def _batch_size(loader: Any) -> int | None:
    size = getattr(getattr(loader, "batch_sampler", None), "batch_size", None)
    return size if isinstance(size, int) else None


def _first(loader: Iterable[Any]) -> Any:
    if isinstance(loader, DataLoader) and loader.num_workers:
        loader = DataLoader(
            loader.dataset,
            batch_size=loader.batch_size,
            collate_fn=loader.collate_fn or default_collate,
        )
    for batch in loader:
        return batch
    raise ValueError("planning needs a training batch, but the training data are empty")


def _transferred(trainer: pl.Trainer, batch: Any) -> Any:
    """Return `batch` after the module's transfer hooks, on the CPU; the loader's own tensors stay
    as they are.
    """
    batch = tree_map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, batch)
    batch = trainer.lightning_module._on_before_batch_transfer(batch)
    return trainer.strategy.batch_to_device(batch, device=torch.device("cpu"))

"""An epoch's hits and misses are logged."""

from __future__ import annotations

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringDataModule, BoringModel
from torch.utils.data import DataLoader, TensorDataset

from lightning_topt.plugins.cached_data import CachedDataModule, CacheMonitor
from tests.plugins.trainer_ranks import on_ranks

ITEMS = 16


class Model(BoringModel):
    def __init__(self):
        super().__init__()
        self.logged = []

    def training_step(self, batch, batch_idx):
        return super().training_step(batch[0], batch_idx)

    def validation_step(self, batch, batch_idx):
        return super().validation_step(batch[0], batch_idx)


class Record(pl.Callback):
    def on_train_epoch_end(self, trainer, pl_module):
        pl_module.logged.append(
            {k: v.item() for k, v in trainer.callback_metrics.items() if k.startswith("cache/")}
        )


def fit(data, **options):
    model = Model()
    trainer = pl.Trainer(
        callbacks=[CacheMonitor(), Record()],
        max_epochs=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **({"accelerator": "cpu", "devices": 1} | options),
    )
    trainer.fit(model, datamodule=data)
    return model.logged


def cached(tmp_path):
    data = TensorDataset(torch.rand(ITEMS, 32, generator=torch.Generator().manual_seed(0)))
    module = pl.LightningDataModule()
    module.train_dataloader = lambda: DataLoader(data, 4)
    return CachedDataModule(module, directory=tmp_path, memory_bytes=1 << 20)


def test_epochs_are_counted_one_by_one(tmp_path):
    first, second = fit(cached(tmp_path))
    assert (first["cache/misses"], first["cache/memory_hits"]) == (ITEMS, 0)
    assert (second["cache/misses"], second["cache/memory_hits"]) == (0, ITEMS)


def _fit_two_ranks(rank, tmp_path):
    return fit(cached(tmp_path), devices=2, strategy="ddp")


def test_ranks_are_added_up(tmp_path):
    for first, second in on_ranks(_fit_two_ranks, tmp_path):
        assert first["cache/misses"] == ITEMS and second["cache/misses"] == 0
        assert second["cache/memory_hits"] == ITEMS


def test_without_a_cache_it_is_an_error():
    with pytest.raises(TypeError, match="leave CacheMonitor out"):
        fit(BoringDataModule())

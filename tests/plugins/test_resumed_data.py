"""A fit that is resumed in the middle of an epoch sees the rest of it, once and in its order."""

from __future__ import annotations

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel
from torch.utils.data import DataLoader, Dataset

from lightning_topt.plugins.cached_data import CachedDataModule
from tests.plugins.trainer_ranks import on_ranks

ITEMS, BATCH, STOP = 24, 4, 9  # 6 batches of an epoch; saved after 3 of the second


class Numbers(Dataset):
    def __len__(self):
        return ITEMS

    def __getitem__(self, index):
        return torch.full((32,), float(index)) / ITEMS


class Module(pl.LightningDataModule):
    def __init__(self, *, several=False, **options):
        super().__init__()
        self.several, self.options = several, options

    def train_dataloader(self):
        loader = DataLoader(Numbers(), BATCH, **({"shuffle": True} | self.options))
        return [loader, DataLoader(Numbers(), BATCH, shuffle=True)] if self.several else loader


class Model(BoringModel):
    def __init__(self):
        super().__init__()
        self.seen = []

    def training_step(self, batch, batch_idx):
        parts = batch if isinstance(batch, list) else [batch]
        self.seen.append((self.current_epoch, [(part[:, 0] * ITEMS).round().int().tolist() for part in parts]))
        return super().training_step(torch.cat(parts), batch_idx)


def fit(tmp_path, *, resume=None, seed=1, save=STOP, epochs=3, data=None, **options):
    pl.seed_everything(seed, verbose=False)
    model = Model()
    trainer = pl.Trainer(
        callbacks=[ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=save, save_top_k=-1)],
        max_epochs=epochs,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **({"accelerator": "cpu", "devices": 1} | options),
    )
    module = CachedDataModule(Module(**(data or {})), directory=tmp_path / "cache", memory_bytes=1 << 20)
    trainer.fit(model, datamodule=module, ckpt_path=resume and tmp_path / resume, weights_only=True)
    module.close()
    return model.seen


@pytest.mark.parametrize(
    "data", [{}, {"num_workers": 2, "persistent_workers": True}, {"several": True}], ids=["alone", "workers", "several"]
)
@pytest.mark.filterwarnings("error:.*not resumable.*")
def test_the_rest_of_the_epoch_is_that_of_the_run_that_went_on(tmp_path, data):
    whole = fit(tmp_path, data=data)
    rest = fit(tmp_path, resume=f"step={STOP}.ckpt", seed=2, data=data)
    assert [epoch for epoch, _ in whole] == 6 * [0] + 6 * [1] + 6 * [2]
    assert rest[:3] == whole[STOP:12]  # the rest of the second epoch
    assert [epoch for epoch, _ in rest] == 3 * [1] + 6 * [2]
    last = [index for _, parts in rest[3:] for index in parts[0]]
    assert sorted(last) == list(range(ITEMS))


@pytest.mark.parametrize("options", [{"epochs": 3}, {"epochs": -1, "max_steps": 12, "limit_train_batches": 4}])
def test_a_fit_that_was_saved_at_the_end_of_an_epoch_begins_the_next(tmp_path, options):
    save = options.get("limit_train_batches", 6)
    whole = fit(tmp_path, save=save, **options)
    rest = fit(tmp_path, resume=f"step={save}.ckpt", save=save, **options)
    assert [epoch for epoch, _ in rest] == [epoch for epoch, _ in whole][save:]
    first = [index for _, parts in rest[:save] for index in parts[0]]
    assert len(set(first)) == save * BATCH


def _fit_two_ranks(rank, tmp_path, resume):
    return fit(tmp_path, resume=resume, save=4, devices=2, strategy="ddp")


def test_two_ranks_go_on_with_their_own_parts(tmp_path):
    whole = on_ranks(_fit_two_ranks, tmp_path, None)
    rest = on_ranks(_fit_two_ranks, tmp_path, "step=4.ckpt")
    for before, after in zip(whole, rest, strict=True):
        assert after == before[4:]  # a DistributedSampler's order depends on seed and epoch alone

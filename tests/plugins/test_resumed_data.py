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
    def __init__(self, *, several=False, loader=DataLoader, **options):
        super().__init__()
        self.several, self.loader, self.options = several, loader, options

    def train_dataloader(self):
        loader = self.loader(Numbers(), BATCH, **({"shuffle": True} | self.options))
        return [loader, DataLoader(Numbers(), BATCH, shuffle=True)] if self.several else loader


class Stateful(DataLoader):
    """A user's own: in an order of its own, and resumable by itself."""

    def __init__(self, dataset, batch_size, *, shuffle):
        super().__init__(dataset, batch_size)
        self.epoch, self.batches = -1, 0

    def __iter__(self):
        self.epoch, start = self.epoch + (self.batches == 0), self.batches
        order = torch.randperm(ITEMS, generator=torch.Generator().manual_seed(self.epoch)).split(
            BATCH
        )
        for batch in order[start:]:
            self.batches = (self.batches + 1) % len(order)
            yield torch.stack([self.dataset[index] for index in batch.tolist()])

    def state_dict(self):
        return {"epoch": self.epoch, "batches": self.batches}

    def load_state_dict(self, state):
        self.epoch, self.batches = state["epoch"], state["batches"]


class Model(BoringModel):
    def __init__(self):
        super().__init__()
        self.seen = []

    def training_step(self, batch, batch_idx):
        parts = batch if isinstance(batch, list) else [batch]
        self.seen.append(
            (self.current_epoch, [(part[:, 0] * ITEMS).round().int().tolist() for part in parts])
        )
        return super().training_step(torch.cat(parts), batch_idx)


def fit(tmp_path, *, resume=None, seed=1, save=STOP, epochs=3, data=None, **options):
    pl.seed_everything(seed, verbose=False)
    model = Model()
    trainer = pl.Trainer(
        callbacks=[
            ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=save, save_top_k=-1)
        ],
        max_epochs=epochs,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **({"accelerator": "cpu", "devices": 1} | options),
    )
    module = CachedDataModule(
        Module(**(data or {})), directory=tmp_path / "cache", memory_bytes=1 << 20
    )
    trainer.fit(model, datamodule=module, ckpt_path=resume and tmp_path / resume, weights_only=True)
    module.close()
    return model.seen


DATA = {
    "alone": {},
    "in order": {"shuffle": False},
    "workers": {"num_workers": 2, "persistent_workers": True},
    "several": {"several": True},
    "their own": {"loader": Stateful},
}


@pytest.mark.parametrize("data", DATA.values(), ids=DATA)
@pytest.mark.filterwarnings("error:.*not resumable.*")
def test_the_rest_of_the_epoch_is_that_of_the_run_that_went_on(tmp_path, data):
    whole = fit(tmp_path, data=data)
    rest = fit(tmp_path, resume=f"step={STOP}.ckpt", save=3, seed=2, data=data)
    assert [epoch for epoch, _ in whole] == 6 * [0] + 6 * [1] + 6 * [2]
    assert rest[:3] == whole[STOP:12]  # the rest of the second epoch
    assert [epoch for epoch, _ in rest] == 3 * [1] + 6 * [2]
    last = [index for _, parts in rest[3:] for index in parts[0]]
    assert sorted(last) == list(range(ITEMS))
    again = fit(tmp_path, resume="step=15.ckpt", save=100, seed=3, data=data)
    assert again[:3] == rest[6:]


@pytest.mark.parametrize(
    "options", [{"epochs": 3}, {"epochs": -1, "max_steps": 12, "limit_train_batches": 4}]
)
def test_a_fit_that_was_saved_at_the_end_of_an_epoch_begins_the_next(tmp_path, options):
    save = options.get("limit_train_batches", 6)
    whole = fit(tmp_path, save=save, **options)
    rest = fit(tmp_path, resume=f"step={save}.ckpt", save=save, **options)
    assert [epoch for epoch, _ in rest] == [epoch for epoch, _ in whole][save:]
    first = [index for _, parts in rest[:save] for index in parts[0]]
    assert len(set(first)) == save * BATCH


RANKS = {"shuffled": {}, "in order": {"shuffle": False}, "several": {"several": True}}


def _fit_two_ranks(rank, tmp_path):
    """What is seen by a whole fit, by one that is resumed in its second epoch, and by one resumed
    from that.
    """
    seen = {}
    for name, data in RANKS.items():
        resumed = [None, "step=4.ckpt", "step=8.ckpt"]
        options = {"save": 4, "devices": 2, "strategy": "ddp", "data": data, "epochs": 4}
        seen[name] = [fit(tmp_path / name, resume=resume, **options) for resume in resumed]
    return seen


def test_two_ranks_go_on_with_their_own_parts(tmp_path):
    parts = on_ranks(_fit_two_ranks, tmp_path)
    for name in RANKS:
        for seen in parts:
            whole, rest, again = seen[name]
            assert len(whole) == 4 * 3
            # the order depends on seed and epoch alone
            assert rest == whole[4:] and again == whole[8:]
        both = [index for seen in parts for _, batch in seen[name][0][:3] for index in batch[0]]
        assert sorted(both) == list(range(ITEMS))

"""A cached DataModule trains as the plain one, whatever its loaders are."""

from __future__ import annotations

import random
import socket

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    Subset,
    random_split,
)

from lightning_topt.data.cache.cached_dataset import NotDeterministicError, deterministic
from lightning_topt.plugins import cached_data
from lightning_topt.plugins.cached_data import CachedDataModule
from tests.plugins.trainer_ranks import on_ranks

ITEMS = 24


class Numbers(Dataset):
    def __init__(self, *, augmented=False, start=0):
        self.augmented, self.start = augmented, start

    def __len__(self):
        return ITEMS

    @deterministic
    def load(self, index):
        return torch.full((32,), float(self.start + index)) / ITEMS

    def __getitem__(self, index):
        return self.load(index) + (torch.rand(32) if self.augmented else 0)


class Module(pl.LightningDataModule):
    def __init__(self, make=None, *, dataset=None, num_workers=0):
        super().__init__()
        self.save_hyperparameters({"num_workers": num_workers})
        self.make, self.dataset, self.num_workers = make, dataset or Plain(), num_workers
        self.happened = []

    def prepare_data(self):
        self.happened.append("prepare")

    def setup(self, stage):
        self.happened.append(stage)

    def train_dataloader(self):
        if self.make:
            return self.make(self.dataset)
        return DataLoader(self.dataset, batch_size=4, shuffle=True, num_workers=self.num_workers)

    def state_dict(self):
        return {"seen": 3}

    def load_state_dict(self, state_dict):
        self.happened.append(state_dict["seen"])

    def on_after_batch_transfer(self, batch, dataloader_idx):
        self.happened.append("transfer")
        return batch


class Plain(Dataset):
    def __init__(self, *, start=0, noise=0.0):
        self.start, self.noise, self.calls = start, noise, 0

    def __len__(self):
        return ITEMS

    def __getitem__(self, index):
        self.calls += 1
        return torch.full((32,), float(self.start + index)) / ITEMS + self.noise * random.random()


class Model(BoringModel):
    def __init__(self):
        super().__init__()
        self.losses = []

    def training_step(self, batch, batch_idx):
        if isinstance(batch, dict | list):
            batch = torch.cat(
                [part for part in (batch.values() if isinstance(batch, dict) else batch)]
            )
        result = super().training_step(batch, batch_idx)
        self.losses.append(result["loss"].item())
        return result


def fit(datamodule, *, epochs=3, **options):
    pl.seed_everything(1, verbose=False)
    model = Model()
    trainer = pl.Trainer(
        accelerator="cpu",
        max_epochs=epochs,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **({"devices": 1} | options),
    )
    trainer.fit(model, datamodule=datamodule)
    return model.losses, trainer


def cached(module, tmp_path, **options):
    return CachedDataModule(
        module, directory=tmp_path, **({"memory_bytes": 1 << 20, "disk_bytes": 1 << 20} | options)
    )


LOADERS = {
    "shuffled": None,
    "workers": lambda data: DataLoader(
        data, 4, shuffle=True, num_workers=2, persistent_workers=True
    ),
    "own collate": lambda data: DataLoader(data, 4, shuffle=True, collate_fn=torch.stack),
    "batch sampler": lambda data: DataLoader(
        data,
        batch_sampler=torch.utils.data.BatchSampler(torch.utils.data.RandomSampler(data), 3, False),
    ),
    "subset": lambda data: DataLoader(Subset(data, range(3, 20)), 4, shuffle=True),
    "concatenation": lambda data: DataLoader(
        ConcatDataset([data, Numbers(start=50)]), 4, shuffle=True
    ),
    "list": lambda data: [DataLoader(data, 4, shuffle=True), DataLoader(Plain(start=7), 4)],
    "dict": lambda data: {
        "a": DataLoader(data, 4),
        "b": DataLoader(Plain(start=7), 4, shuffle=True),
    },
    "combined": lambda data: CombinedLoader(
        [DataLoader(data, 4), DataLoader(Plain(start=9), 4)], "min_size"
    ),
    "no batches": lambda data: DataLoader(data, batch_size=None, shuffle=True),
}


def plain_losses(make, augmented):
    return fit(Module(make, dataset=Numbers(augmented=True) if augmented else None))[0]


@pytest.mark.parametrize(
    ("kind", "augmented"),
    [*((kind, False) for kind in LOADERS), ("workers", True), ("concatenation", True)],
)
def test_the_losses_are_those_without_a_cache(tmp_path, kind, augmented):
    make, dataset = LOADERS[kind], Numbers(augmented=True) if augmented else None
    expected = plain_losses(make, augmented)
    for _ in range(2):  # cold, then warm
        module = cached(Module(make, dataset=dataset), tmp_path)
        losses, _ = fit(module)
        assert losses == expected
        assert sum(s.memory_hits + s.disk_hits for s in module.statistics().values()) > 0
        module.close()


def test_every_sample_is_read_once(tmp_path):
    data = Plain()
    module = cached(Module(dataset=data), tmp_path)
    fit(module)
    (statistics,) = module.statistics(reset=True).values()
    assert (statistics.misses, statistics.memory_hits) == (
        ITEMS,
        2 * ITEMS,
    ) and data.calls == ITEMS + 16
    again = cached(Module(dataset=Plain()), tmp_path)
    fit(again)
    assert next(iter(again.statistics().values())).misses == 0


def test_splits_of_one_data_set_share_its_samples(tmp_path):
    data = Plain()
    parts = random_split(data, [12, 12], generator=torch.Generator().manual_seed(0))
    module = cached(Module(lambda _: [DataLoader(part, 4) for part in parts]), tmp_path)
    fit(module)
    assert len(module.statistics()) == 1 and data.calls == ITEMS + 16


def test_hooks_state_and_hyperparameters_are_the_modules(tmp_path):
    inner = Module()
    module = cached(inner, tmp_path)
    module.load_state_dict(module.state_dict())
    _, trainer = fit(module, epochs=1)
    assert inner.happened[:3] == [3, "prepare", "fit"] and "transfer" in inner.happened
    assert inner.trainer is trainer and module.trainer is trainer
    assert module.hparams == {"num_workers": 0} and module.num_workers == 0
    assert not hasattr(module, "nonsense")


def _fit_two_ranks(rank, tmp_path, with_cache):
    inner = Module(dataset=Plain())
    module = cached(inner, tmp_path) if with_cache else inner
    losses, trainer = fit(module, devices=2, strategy="ddp")
    sampler = type(trainer.train_dataloader.sampler).__name__
    return (
        losses,
        sampler,
        sum(s.misses for s in module.statistics().values()) if with_cache else None,
    )


def test_two_ranks_share_the_cache_and_the_sampler_is_distributed(tmp_path):
    results = on_ranks(_fit_two_ranks, tmp_path, True)
    wanted = on_ranks(_fit_two_ranks, tmp_path, False)
    for (losses, sampler, _), (plain, _, _) in zip(results, wanted, strict=True):
        assert losses == plain and sampler == "DistributedSampler"
    assert sum(misses for _, _, misses in results) == ITEMS


class Endless(IterableDataset):
    def __iter__(self):
        yield torch.ones(32)


@pytest.mark.parametrize(
    ("make", "message"),
    [(lambda _: DataLoader(Endless()), "IterableDataset"), (lambda _: range(3), "range as loader")],
)
def test_what_cannot_be_cached_is_an_error(tmp_path, make, message):
    with pytest.raises(ValueError, match=message):
        fit(cached(Module(make), tmp_path))


def test_a_random_data_set_is_refused(tmp_path):
    with pytest.raises(NotDeterministicError):
        fit(cached(Module(dataset=Plain(noise=1.0)), tmp_path))


def test_without_numbers_it_has_a_quarter_of_the_free_memory_and_a_folder_of_the_user(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(cached_data, "available_bytes", lambda: 1 << 30)
    module = CachedDataModule(Validated(dataset=Numbers()))
    module.train_dataloader(), module.val_dataloader()
    first, second = module._caches.values()
    assert (first.memory_bytes, second.memory_bytes) == (1 << 28, 3 << 26) and first.disk is None
    module.close()
    (host,) = (tmp_path / "lightning_topt" / "samples").iterdir()
    assert host.name == socket.gethostname()
    assert fit(CachedDataModule(Module()))[0] == fit(Module())[0]


class Validated(Module):
    def val_dataloader(self):
        return DataLoader(Numbers(start=1), batch_size=4)

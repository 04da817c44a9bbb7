"""What is changed on a cached DataModule or its data sets while it is in use."""

from __future__ import annotations

import lightning.pytorch as pl
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from lightning_topt.plugins.cached_data import CachedDataModule
from lightning_topt.plugins.coordinated_data import CoordinatedDataModule
from tests.plugins.trainer_ranks import make_trainer

ITEMS = 16


class Pictures(Dataset):
    def __init__(self):
        self.size = 4

    def __len__(self):
        return ITEMS

    def __getitem__(self, index):
        return torch.full((self.size,), float(index))


class Growing(pl.LightningDataModule):
    """Larger pictures in every epoch."""

    def __init__(self):
        super().__init__()
        self.dataset = Pictures()

    def train_dataloader(self):
        self.dataset.size *= 2
        return DataLoader(self.dataset, batch_size=4)


class Sees(pl.LightningModule):
    """Remembers the shapes of its batches."""

    def __init__(self, batch_size=0):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1))
        self.shapes = []

    def training_step(self, batch, batch_idx):
        self.shapes.append(tuple(batch.shape))
        return self.weight * batch.mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_a_data_set_that_changes_gives_what_it_is_now(tmp_path):
    model = Sees()
    module = CachedDataModule(Growing(), directory=tmp_path, memory_bytes=1 << 20)
    trainer = make_trainer(max_epochs=3, reload_dataloaders_every_n_epochs=1)
    trainer.fit(model, datamodule=module)
    assert model.shapes == [(4, size) for size in (8, 16, 32) for _ in range(4)]
    assert [s.misses for s in module.statistics().values()] == [ITEMS] * 3


class Sized(pl.LightningDataModule):
    def __init__(self, batch_size=1, *, saves=False):
        super().__init__()
        if saves:
            self.save_hyperparameters()
        else:
            self.batch_size = batch_size
        self.saves = saves
        self.dataset = Pictures()

    def train_dataloader(self):
        return DataLoader(
            self.dataset, batch_size=self.hparams.batch_size if self.saves else self.batch_size
        )


WRAPPERS = {
    "cached": lambda module, folder: CachedDataModule(
        module, directory=folder, memory_bytes=1 << 20
    ),
    "coordinated": lambda module, folder: CoordinatedDataModule(
        module, directory=folder, memory_bytes=1 << 20
    ),
}


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("saves", [False, True])
def test_what_is_set_reaches_the_module_inside(tmp_path, wrapper, saves):
    inner = Sized(saves=saves)
    module = WRAPPERS[wrapper](inner, tmp_path)
    holder = module.hparams if saves else module
    holder.batch_size = 8
    assert (inner.hparams if saves else inner).batch_size == 8 and next(
        iter(module.train_dataloader())
    ).shape[0] == 8
    module.own, module.memory_bytes = 1, 7
    assert not hasattr(inner, "own") and not hasattr(inner, "memory_bytes") and module.own == 1
    assert (
        dict(inner.hparams_initial)
        == dict(module.hparams_initial)
        == ({"batch_size": 1, "saves": True} if saves else {})
    )
    if wrapper == "coordinated":
        module.close()

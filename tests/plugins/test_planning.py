"""What planning starts from: batches as `training_step` gets them."""

from __future__ import annotations

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch.utils.data import DataLoader, TensorDataset

from lightning_topt.plugins.planning import first_batch
from tests.models import MLP


class Halved(pl.LightningDataModule):
    """Samples of two, halved by the data module's own hook."""

    def train_dataloader(self) -> dict[str, DataLoader]:
        def loader(n: int) -> DataLoader:
            return DataLoader(TensorDataset(torch.full((n, 3), 2.0)), batch_size=4)

        return {"long": loader(20), "short": loader(6)}

    def on_after_batch_transfer(self, batch, dataloader_idx):
        return {name: [tensor / 2 for tensor in tensors] for name, tensors in batch.items()}


def test_batches_pass_the_hooks_of_the_data_module_and_keep_the_form_of_the_loaders():
    module, data = MLP(), Halved()
    trainer = pl.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    trainer._data_connector.attach_data(module, datamodule=data)
    trainer.strategy.connect(module)
    state = torch.get_rng_state()
    batch = first_batch(CombinedLoader(data.train_dataloader()), trainer)
    assert torch.equal(torch.get_rng_state(), state)
    assert batch.keys() == {"long", "short"}
    assert all(torch.equal(tensors[0], torch.ones(4, 3)) for tensors in batch.values())

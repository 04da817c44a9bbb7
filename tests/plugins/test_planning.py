"""What planning starts from: batches as `training_step` gets them."""

from __future__ import annotations

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_topt.plugins.planning import batches_of


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.linear(x)


class PartlyRandom(pl.LightningModule):
    """Two kinds of blocks: recomputation suits one kind only when its buffers stay as they are."""

    def __init__(self) -> None:
        super().__init__()
        self.plain = nn.ModuleList([Residual() for _ in range(3)])
        self.normed = nn.ModuleList(
            [nn.Sequential(Residual(), nn.BatchNorm1d(8)) for _ in range(3)]
        )

    def training_step(self, batch: tuple[torch.Tensor], batch_idx: int) -> torch.Tensor:
        x = batch[0]
        for block in (*self.plain, *self.normed):
            x = block(x)
        return x.square().mean()


class Halved(pl.LightningDataModule):
    """Samples of two, halved by the data module's own hook."""

    def train_dataloader(self) -> dict[str, DataLoader]:
        def loader(n: int) -> DataLoader:
            return DataLoader(TensorDataset(torch.full((n, 3), 2.0)), batch_size=4)

        return {"long": loader(20), "short": loader(6)}

    def on_after_batch_transfer(self, batch, dataloader_idx):
        return {name: [tensor / 2 for tensor in tensors] for name, tensors in batch.items()}


def test_batches_pass_the_hooks_of_the_data_module_and_keep_the_form_of_the_loaders():
    module, data = PartlyRandom(), Halved()
    trainer = pl.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    trainer._data_connector.attach_data(module, datamodule=data)
    trainer.strategy.connect(module)
    state = torch.get_rng_state()
    batch, double = batches_of(CombinedLoader(data.train_dataloader()), trainer)
    assert torch.equal(torch.get_rng_state(), state)
    assert {name: tensors[0].shape for name, tensors in batch.items()} == {
        "long": (4, 3),
        "short": (4, 3),
    }
    assert all((tensors[0] == 1).all() for tensors in batch.values())
    assert double is None  # the short loader has no batch of eight samples

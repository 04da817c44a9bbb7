"""A small convolutional net on scikit-learn's handwritten digits (1,797 images of 8 x 8)."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

from lightning_topt.basics.argument_checks import check_whole

try:
    from sklearn.datasets import load_digits
except ModuleNotFoundError:
    load_digits = None

Batch = tuple[Tensor, Tensor]


class DigitsCNN(pl.LightningModule):
    """Three convolutions and a linear layer. Logs `train_loss` (nats) and `val_accuracy`."""

    def __init__(self, channels: int = 32, *, learning_rate: float = 2e-3) -> None:
        super().__init__()
        check_whole(channels, name="channels")
        self.save_hyperparameters()
        self.features = nn.Sequential(
            nn.Sequential(nn.Conv2d(1, channels, 3, padding=1), nn.ReLU()),
            nn.Sequential(nn.Conv2d(channels, channels, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
            nn.Sequential(
                nn.Conv2d(channels, 2 * channels, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)
            ),
        )
        self.classifier = nn.Linear(2 * channels * 4, 10)
        self.val_accuracy = MulticlassAccuracy(num_classes=10, average="micro")

    def forward(self, images: Tensor) -> Tensor:  # (B, 1, 8, 8) -> (B, 10)
        """Return the logits of the ten digits."""
        logits: Tensor = self.classifier(self.features(images).flatten(1))
        return logits

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Return the mean cross entropy in nats."""
        images, digits = batch
        loss = F.cross_entropy(self(images), digits)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Add the batch to the accuracy."""
        images, digits = batch
        self.val_accuracy.update(self(images), digits)
        self.log("val_accuracy", self.val_accuracy, prog_bar=True)

    def configure_optimizers(self) -> Any:
        """Return AdamW at a constant rate."""
        return torch.optim.AdamW(self.parameters(), lr=self.hparams["learning_rate"])


class DigitsDataModule(pl.LightningDataModule):
    """The digits in a fixed random order, the last `val_fraction` of them for validation.

    Raises:
        ModuleNotFoundError: in `setup`, when scikit-learn is missing; it says what to install.
    """

    def __init__(self, batch_size: int = 32, *, val_fraction: float = 0.2) -> None:
        super().__init__()
        self.batch_size = check_whole(batch_size, name="batch_size")
        self.val_fraction = val_fraction

    def setup(self, stage: str | None = None) -> None:
        """Load the images from scikit-learn's package (no download)."""
        if load_digits is None:
            raise ModuleNotFoundError(
                'the digits come with scikit-learn: pip install -e ".[examples]"'
            )
        images, digits = load_digits(return_X_y=True)
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
        all_images = torch.tensor(images, dtype=torch.float32).reshape(-1, 1, 8, 8)[order] / 16
        all_digits = torch.tensor(digits, dtype=torch.int64)[order]
        cut = round(len(order) * (1 - self.val_fraction))
        self.train_data = TensorDataset(all_images[:cut], all_digits[:cut])
        self.val_data = TensorDataset(all_images[cut:], all_digits[cut:])

    def train_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        """Return the training batches, shuffled; the last partial batch is dropped."""
        return DataLoader(self.train_data, batch_size=self.batch_size, shuffle=True, drop_last=True)

    def val_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        """Return the validation batches, in order."""
        return DataLoader(self.val_data, batch_size=self.batch_size)

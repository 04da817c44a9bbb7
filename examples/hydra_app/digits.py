"""The model and the data of the app: a perceptron, and scikit-learn's digits."""

import itertools
from typing import Any

import lightning as L
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

Batch = tuple[Tensor, Tensor]


class DigitsClassifier(L.LightningModule):
    def __init__(self, hidden: int, num_layers: int, learning_rate: float) -> None:
        super().__init__()
        self.save_hyperparameters()
        widths = [64, *[hidden] * num_layers]
        layers = [
            nn.Sequential(nn.Linear(before, after), nn.ReLU())
            for before, after in itertools.pairwise(widths)
        ]
        self.layers = nn.Sequential(*layers)
        self.head = nn.Linear(hidden, 10)
        self.accuracy = MulticlassAccuracy(num_classes=10, average="micro")

    def forward(self, images: Tensor) -> Tensor:  # (B, 64) -> (B, 10)
        return self.head(self.layers(images))

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        images, labels = batch
        loss = nn.functional.cross_entropy(self(images), labels)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        images, labels = batch
        self.accuracy.update(self(images), labels)
        self.log("val_accuracy", self.accuracy, prog_bar=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=self.hparams["learning_rate"])


class Digits(L.LightningDataModule):
    def __init__(self, batch_size: int, val_fraction: float) -> None:
        super().__init__()
        self.batch_size, self.val_fraction = batch_size, val_fraction

    def setup(self, stage: str) -> None:
        pixels, labels = load_digits(return_X_y=True)
        data = TensorDataset(torch.tensor(pixels, dtype=torch.float32) / 16, torch.tensor(labels))
        parts = [1 - self.val_fraction, self.val_fraction]
        generator = torch.Generator().manual_seed(0)
        self.train_data, self.val_data = torch.utils.data.random_split(data, parts, generator)

    def train_dataloader(self) -> Any:
        return DataLoader(self.train_data, self.batch_size, shuffle=True, drop_last=True)

    def val_dataloader(self) -> Any:
        return DataLoader(self.val_data, self.batch_size)

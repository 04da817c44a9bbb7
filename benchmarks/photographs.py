"""A residual net on crops of scikit-learn's two photographs: from which part of which picture does
a crop come?

Each picture is cut into 3 x 4 regions: 24 classes. Training crops lie anywhere in the upper two
thirds of a region, validation crops in its lower third, so that no pixel is in both.
"""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from sklearn.datasets import load_sample_images
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

ROWS, COLUMNS, CROP = 3, 4, 32
Batch = tuple[Tensor, Tensor]


class Residual(nn.Module):
    """Two convolutions beside a shortcut (He et al., arXiv 1512.03385, figure 2)."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.branch = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(),
            nn.Conv2d(outputs, outputs, 3, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        self.shortcut = nn.Sequential(
            nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
        )

    # (B, inputs, H, W) -> (B, outputs, H / stride, W / stride)
    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.branch(x) + self.shortcut(x))


class CropNet(pl.LightningModule):
    """4.8 M parameters; SGD with momentum and a cosine decay over `steps`. Logs `val_accuracy`."""

    def __init__(self, *, steps: int, learning_rate: float = 0.05, momentum: float = 0.9) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.features = nn.Sequential(
            nn.Conv2d(3, 64, 3, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(64),
            nn.ReLU(),
            Residual(64, 128, 2),
            Residual(128, 256, 2),
            Residual(256, 512, 2),
        )
        self.classifier = nn.Linear(512, 2 * ROWS * COLUMNS)
        self.val_accuracy = MulticlassAccuracy(num_classes=2 * ROWS * COLUMNS, average="micro")

    def forward(self, crops: Tensor) -> Tensor:  # (B, 3, CROP, CROP) -> (B, 24)
        logits: Tensor = self.classifier(self.features(crops).mean((2, 3)))
        return logits

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return F.cross_entropy(self(batch[0]), batch[1])

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self.val_accuracy.update(self(batch[0]), batch[1])
        self.log("val_accuracy", self.val_accuracy)

    def configure_optimizers(self) -> Any:
        rate, momentum = self.hparams["learning_rate"], self.hparams["momentum"]
        optimizer = torch.optim.SGD(
            self.parameters(), lr=rate, momentum=momentum, weight_decay=1e-4
        )
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, self.hparams["steps"])
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }


class CropsDataModule(pl.LightningDataModule):
    """Random crops, the same in every run."""

    def __init__(
        self, batch_size: int = 16, *, training_crops: int = 6144, validation_crops: int = 1200
    ) -> None:
        super().__init__()
        self.batch_size, self.sizes = batch_size, (training_crops, validation_crops)

    def setup(self, stage: str | None = None) -> None:
        pictures = [
            torch.tensor(p).permute(2, 0, 1).float() / 127.5 - 1
            for p in load_sample_images().images
        ]
        generator = torch.Generator().manual_seed(0)
        self.train_data, self.val_data = (
            TensorDataset(*_crops(pictures, size, validation=validation, generator=generator))
            for size, validation in zip(self.sizes, (False, True), strict=True)
        )

    def train_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        return DataLoader(self.train_data, batch_size=self.batch_size, shuffle=True, drop_last=True)

    def val_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        return DataLoader(self.val_data, batch_size=100)


def _crops(
    pictures: list[Tensor], count: int, *, validation: bool, generator: torch.Generator
) -> Batch:
    crops, classes = [], []
    for index in range(count):
        region = index % (len(pictures) * ROWS * COLUMNS)
        picture = pictures[region // (ROWS * COLUMNS)]
        height, width = picture.shape[1] // ROWS, picture.shape[2] // COLUMNS
        top, left = region % (ROWS * COLUMNS) // COLUMNS * height, region % COLUMNS * width
        cut = height * 2 // 3
        low, high = (cut, height - CROP) if validation else (0, cut - CROP)
        y = top + int(torch.randint(low, high + 1, (), generator=generator))
        x = left + int(torch.randint(0, width - CROP + 1, (), generator=generator))
        crops.append(picture[:, y : y + CROP, x : x + CROP])
        classes.append(region)
    return torch.stack(crops), torch.tensor(classes)

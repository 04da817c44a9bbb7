"""Classify images with a residual network, on two CPU processes.

    python examples/image_classification.py
    python examples/image_classification.py --accelerator cuda --devices 4

The network has the parts of timm's models: `forward_features`, `forward_head`, `num_features`. A
model of timm takes its place with one line: `timm.create_model("resnet18", num_classes=10)`.
Distributed training is one word, `strategy="topt"`. The images are scikit-learn's digits.
"""

import argparse
from typing import Any

import lightning as L
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

import lightning_topt  # noqa: F401  (registers the strategy names)

Batch = tuple[Tensor, Tensor]


class ResidualBlock(nn.Module):
    """Two convolutions with batch norms, added to their input (He et al., 2016)."""

    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels_in, channels, 3, stride, padding=1, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(),
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
        )
        self.shortcut = (
            nn.Identity()
            if stride == 1 and channels_in == channels
            else nn.Conv2d(channels_in, channels, 1, stride, bias=False)
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.body(x) + self.shortcut(x))


class ResNet(nn.Module):
    """A residual network; every stage but the first halves height and width."""

    def __init__(
        self, channels: tuple[int, ...] = (32, 64, 128), *, in_chans: int = 1, num_classes: int = 10
    ) -> None:
        super().__init__()
        self.stem = nn.Conv2d(in_chans, channels[0], 3, padding=1)
        widths = (channels[0], *channels)
        self.stages = nn.ModuleList(
            ResidualBlock(widths[i], width, stride=1 if i == 0 else 2)
            for i, width in enumerate(channels)
        )
        self.num_features = channels[-1]
        self.fc = nn.Linear(self.num_features, num_classes)

    def forward_features(self, images: Tensor) -> Tensor:  # (B, C, H, W) -> (B, F, h, w)
        x = self.stem(images)
        for stage in self.stages:
            x = stage(x)
        return x

    def forward_head(self, x: Tensor) -> Tensor:  # (B, F, h, w) -> (B, classes)
        return self.fc(x.mean(dim=(2, 3)))

    def forward(self, images: Tensor) -> Tensor:
        return self.forward_head(self.forward_features(images))


class ImageClassifier(L.LightningModule):
    def __init__(self, model: nn.Module, *, learning_rate: float = 2e-3) -> None:
        super().__init__()
        self.model, self.learning_rate = model, learning_rate
        self.accuracy = MulticlassAccuracy(num_classes=10, average="micro")

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        images, labels = batch
        loss = nn.functional.cross_entropy(self.model(images), labels, label_smoothing=0.1)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        images, labels = batch
        self.accuracy.update(self.model(images), labels)
        self.log("val_accuracy", self.accuracy, prog_bar=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.learning_rate)
        steps = int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class Digits(L.LightningDataModule):
    """1,797 images of 8 x 8 pixels; a fifth of them is for validation."""

    def __init__(self, batch_size: int = 32) -> None:
        super().__init__()
        self.batch_size = batch_size

    def setup(self, stage: str) -> None:
        pixels, labels = load_digits(return_X_y=True)
        images = torch.tensor(pixels, dtype=torch.float32).view(-1, 1, 8, 8) / 16
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
        data = TensorDataset(images[order], torch.tensor(labels)[order])
        sizes = [len(data) - len(data) // 5, len(data) // 5]
        self.train_data, self.val_data = torch.utils.data.random_split(data, sizes)

    def train_dataloader(self) -> Any:
        return DataLoader(self.train_data, self.batch_size, shuffle=True, drop_last=True)

    def val_dataloader(self) -> Any:
        return DataLoader(self.val_data, self.batch_size)


def main() -> None:
    parser = argparse.ArgumentParser(description="Classify images with a residual network.")
    parser.add_argument("--accelerator", default="cpu")
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=5)
    options = parser.parse_args()

    L.seed_everything(0)
    trainer = L.Trainer(
        strategy="topt",
        accelerator=options.accelerator,
        devices=options.devices,
        max_epochs=options.epochs,
        logger=False,
        enable_checkpointing=False,
    )
    trainer.fit(ImageClassifier(ResNet()), datamodule=Digits())
    if trainer.is_global_zero:
        # DDP goes on where nothing can be gained, as with a model as small as this one.
        print(f"plan: {trainer.strategy.parallel_plan.summary()}")
        print(f"accuracy: {float(trainer.callback_metrics['val_accuracy']):.3f}")


if __name__ == "__main__":
    main()

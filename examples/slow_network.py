"""Train over a slow network: send less of each gradient, or exchange less often.

    python examples/slow_network.py
    python examples/slow_network.py --exchange local_steps
    python examples/slow_network.py --exchange dense

    topk          the largest 1 % of the gradient in each step; the rest is added to the next one
    local_steps   nothing for 20 steps, then a tenth of how far each rank went
    dense         all of the gradient, as `ddp` does: compare the accuracy with this

Both lose something, so they are a choice of yours. Top-k at 1 % suits SGD with momentum, and not
AdamW on transformers.
"""

import argparse
from typing import Any

import lightning as L
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

from lightning_topt import CompressedDDPStrategy, Dense, LocalStepsStrategy, SparseLoCo, TopK

EXCHANGES = {
    "topk": lambda: CompressedDDPStrategy(TopK(density=0.01)),
    "local_steps": lambda: LocalStepsStrategy(SparseLoCo(every=20, density=0.1)),
    "dense": lambda: CompressedDDPStrategy(Dense()),
}
Batch = tuple[Tensor, Tensor]


class Classifier(L.LightningModule):
    def __init__(self, channels: int = 32) -> None:
        super().__init__()
        self.model = nn.Sequential(
            nn.Conv2d(1, channels, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(channels, 2 * channels, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(2 * channels * 4 * 4, 10),
        )
        self.accuracy = MulticlassAccuracy(num_classes=10, average="micro")

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        images, labels = batch
        return nn.functional.cross_entropy(self.model(images), labels)

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        images, labels = batch
        self.accuracy.update(self.model(images), labels)
        self.log("val_accuracy", self.accuracy)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.02, momentum=0.9)


class Digits(L.LightningDataModule):
    def setup(self, stage: str) -> None:
        pixels, labels = load_digits(return_X_y=True)
        images = torch.tensor(pixels, dtype=torch.float32).view(-1, 1, 8, 8) / 16
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
        data = TensorDataset(images[order], torch.tensor(labels)[order])
        sizes = [len(data) - len(data) // 5, len(data) // 5]
        self.train_data, self.val_data = torch.utils.data.random_split(data, sizes)

    def train_dataloader(self) -> Any:
        return DataLoader(self.train_data, 32, shuffle=True, drop_last=True)

    def val_dataloader(self) -> Any:
        return DataLoader(self.val_data, 32)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train over a slow network.")
    parser.add_argument("--exchange", choices=sorted(EXCHANGES), default="topk")
    parser.add_argument("--accelerator", default="cpu")
    parser.add_argument("--devices", type=int, default=2, help="on each node")
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--epochs", type=int, default=5)
    options = parser.parse_args()

    L.seed_everything(0)
    trainer = L.Trainer(
        strategy=EXCHANGES[options.exchange](),
        accelerator=options.accelerator,
        devices=options.devices,
        num_nodes=options.nodes,
        max_epochs=options.epochs,
        log_every_n_steps=20,
        logger=False,
        enable_checkpointing=False,
    )
    trainer.fit(Classifier(), datamodule=Digits())
    if trainer.is_global_zero:
        seen = trainer.callback_metrics
        sent, dense = (
            float(seen[f"topt/exchange_{name}bytes_per_step"]) for name in ("", "dense_")
        )
        print(f"sent per step: {sent / 1e3:.1f} kB; ddp sends {dense / 1e3:.1f} kB")
        print(f"accuracy: {float(seen['val_accuracy']):.3f}")


if __name__ == "__main__":
    main()

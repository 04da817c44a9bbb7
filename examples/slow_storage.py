"""Keep samples of slow storage in memory and on disk: the second epoch does not read it again.

    python examples/slow_storage.py

The storage is imitated: each picture takes some milliseconds to arrive. A wait for data that the
cache removes is printed for the first epoch and for later ones. On a machine with several ranks
all of them share one cache. A second run with the same `--directory` starts with the disk's part.
"""

import argparse
import time
from typing import Any

import lightning as L
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from lightning_topt import CachedDataModule, StallMonitor
from lightning_topt.data import deterministic


class RemotePictures(Dataset[tuple[Tensor, int]]):
    """Pictures behind a slow network file system, moved by up to a pixel at random."""

    def __init__(self, count: int, *, seconds: float) -> None:
        digits = load_digits()
        self.images = torch.tensor(digits.images[:count], dtype=torch.float32)
        self.labels = digits.target[:count].tolist()
        self.seconds = seconds

    def __len__(self) -> int:
        return len(self.labels)

    @deterministic  # this part is kept; what is random below stays random
    def read(self, index: int) -> Tensor:
        time.sleep(self.seconds)
        return self.images[index] / 16

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        shift = torch.randint(-1, 2, (2,)).tolist()
        return torch.roll(self.read(index), shift, dims=(0, 1)), self.labels[index]


class Pictures(L.LightningDataModule):
    def __init__(self, count: int, *, seconds: float) -> None:
        super().__init__()
        self.count, self.seconds = count, seconds

    def train_dataloader(self) -> Any:
        return DataLoader(RemotePictures(self.count, seconds=self.seconds), 32, shuffle=True)


class Classifier(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(
            nn.Flatten(), nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(),
            nn.Linear(256, 10),
        )  # fmt: skip

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        images, labels = batch
        return nn.functional.cross_entropy(self.model(images), labels)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class EpochWaits(L.Callback):
    """Notes how long each epoch waited for data; `monitor` counts it."""

    def __init__(self, monitor: StallMonitor) -> None:
        self.monitor, self.waits, self.before = monitor, [], 0.0

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        waited = self.monitor.total.wait_seconds
        self.waits.append(waited - self.before)
        self.before = waited


def main() -> None:
    parser = argparse.ArgumentParser(description="Keep samples of slow storage in a cache.")
    parser.add_argument("--accelerator", default="cpu")
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--pictures", type=int, default=640)
    parser.add_argument("--milliseconds", type=float, default=5.0, help="that a picture takes")
    parser.add_argument("--directory", default="outputs/cache", help="on a local disk")
    options = parser.parse_args()

    L.seed_everything(0)
    data = CachedDataModule(
        Pictures(options.pictures, seconds=options.milliseconds / 1e3),
        directory=options.directory,
        memory_bytes="64MiB",
        disk_bytes="64MiB",
    )
    monitor = StallMonitor(every_n_steps=1)
    waits = EpochWaits(monitor)
    trainer = L.Trainer(
        strategy="auto" if options.devices == 1 else "topt",
        accelerator=options.accelerator,
        devices=options.devices,
        max_epochs=options.epochs,
        callbacks=[monitor, waits],
        logger=False,
        enable_checkpointing=False,
    )
    trainer.fit(Classifier(), datamodule=data)
    if trainer.is_global_zero:
        for epoch, seconds in enumerate(waits.waits):
            print(f"epoch {epoch}: waited {seconds:.2f} s for data")
        for cache in data.statistics().values():
            print(
                f"{cache.misses} samples from the source, {cache.memory_hits} from memory, "
                f"{cache.disk_hits} from disk"
            )
    data.close()


if __name__ == "__main__":
    main()

"""The patterns of Lightning's own examples, and of lightning-hydra-template."""

from __future__ import annotations

from functools import partial
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from hydra.utils import instantiate
from torch import Tensor, nn
from torch.utils.data import DataLoader, random_split
from torchmetrics import MaxMetric, MeanMetric
from torchmetrics.classification import MulticlassAccuracy

from tests.foreign.shelf import Samples, image_and_label, loader, program, tokens


class AutoEncoder(L.LightningModule):
    def __init__(self, hidden: int = 16) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.encoder = nn.Sequential(nn.Linear(192, hidden), nn.ReLU(), nn.Linear(hidden, 3))
        self.decoder = nn.Sequential(nn.Linear(3, hidden), nn.ReLU(), nn.Linear(hidden, 192))
        self.example_input_array = torch.zeros(2, 3, 8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder(self.encoder(x.view(x.size(0), -1)))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self._loss(batch, "train")

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self._loss(batch, "val")

    def _loss(self, batch: Any, stage: str) -> Tensor:
        x, _ = batch
        loss = F.mse_loss(self(x), x.view(x.size(0), -1))
        self.log(f"{stage}_loss", loss, on_step=True)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=1e-3)


@program(enable_model_summary=True)
def autoencoder() -> Any:
    return AutoEncoder(), loader(image_and_label)


class ImageClassifier(L.LightningModule):
    def __init__(self, backbone: nn.Module | None = None, learning_rate: float = 1e-3) -> None:
        super().__init__()
        self.save_hyperparameters(ignore=["backbone"])
        self.backbone = backbone or nn.Sequential(
            nn.Conv2d(3, 8, 3),
            nn.ReLU(),
            nn.BatchNorm2d(8),
            nn.Dropout2d(0.25),
            nn.Flatten(),
            nn.Linear(288, 5),
        )
        self.val_acc = MulticlassAccuracy(5)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        loss = F.cross_entropy(self.backbone(x), y)
        self.log("train_loss", loss, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.val_acc(self.backbone(x), y)
        self.log("valid_acc", self.val_acc, on_step=True, on_epoch=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adadelta(self.parameters(), lr=self.hparams.learning_rate)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.7)]


class Images(L.LightningDataModule):
    def setup(self, stage: str) -> None:
        everything = Samples(72, image_and_label)
        self.train, self.val = random_split(
            everything, [64, 8], generator=torch.Generator().manual_seed(1)
        )

    def train_dataloader(self) -> Any:
        return DataLoader(self.train, batch_size=4, shuffle=True)

    def val_dataloader(self) -> Any:
        return DataLoader(self.val, batch_size=4)


@program(limit_val_batches=1, num_sanity_val_steps=1)
def image_classifier() -> Any:
    return ImageClassifier(), Images()


class LanguageModel(L.LightningModule):
    """nn.Transformer with a buffer of positions, SGD and clipping, as in Lightning's demos."""

    def __init__(self, vocab: int = 32, width: int = 16) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.register_buffer("positions", torch.sin(torch.arange(8 * width).view(8, width) / 7.0))
        layer = nn.TransformerEncoderLayer(width, 2, 32, dropout=0.2, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.decoder = nn.Linear(width, vocab)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        inputs, targets = batch[:, :-1], batch[:, 1:]
        mask = nn.Transformer.generate_square_subsequent_mask(inputs.shape[1])
        hidden = self.encoder(
            self.embed(inputs) * 4 + self.positions[: inputs.shape[1]], mask=mask, is_causal=True
        )
        loss = F.nll_loss(F.log_softmax(self.decoder(hidden), -1).flatten(0, 1), targets.flatten())
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@program(gradient_clip_val=0.25)
def transformer_language_model() -> Any:
    return LanguageModel(), loader(lambda source, index: tokens(source))


# ---- lightning-hydra-template --------------------------------------------------------------------


class SimpleDenseNet(nn.Module):
    def __init__(self, input_size: int = 192, width: int = 16, output_size: int = 5) -> None:
        super().__init__()
        self.model = nn.Sequential(
            nn.Linear(input_size, width),
            nn.BatchNorm1d(width),
            nn.ReLU(),
            nn.Linear(width, output_size),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x.view(x.size(0), -1))


class TemplateModule(L.LightningModule):
    def __init__(
        self, net: nn.Module, optimizer: partial[Any], scheduler: partial[Any] | None, compile: bool
    ) -> None:
        super().__init__()
        self.save_hyperparameters(logger=False)
        self.net, self.criterion = net, nn.CrossEntropyLoss()
        self.train_acc, self.val_acc = MulticlassAccuracy(5), MulticlassAccuracy(5)
        self.train_loss, self.val_loss, self.val_acc_best = MeanMetric(), MeanMetric(), MaxMetric()

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def on_train_start(self) -> None:
        self.val_loss.reset()
        self.val_acc.reset()
        self.val_acc_best.reset()

    def model_step(self, batch: Any) -> tuple[Tensor, Tensor, Tensor]:
        x, y = batch
        logits = self.forward(x)
        return self.criterion(logits, y), torch.argmax(logits, dim=1), y

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss, predictions, targets = self.model_step(batch)
        self.train_loss(loss)
        self.train_acc(predictions, targets)
        self.log("train/loss", self.train_loss, on_step=False, on_epoch=True, prog_bar=True)
        self.log("train/acc", self.train_acc, on_step=False, on_epoch=True, prog_bar=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        loss, predictions, targets = self.model_step(batch)
        self.val_loss(loss)
        self.val_acc(predictions, targets)
        self.log("val/loss", self.val_loss, on_step=False, on_epoch=True)

    def on_validation_epoch_end(self) -> None:
        self.val_acc_best(self.val_acc.compute())
        self.log("val/acc_best", self.val_acc_best.compute(), sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = self.hparams.optimizer(params=self.trainer.model.parameters())
        scheduler = self.hparams.scheduler(optimizer=optimizer)
        settings = {
            "scheduler": scheduler,
            "monitor": "val/loss",
            "interval": "epoch",
            "frequency": 1,
        }
        return {"optimizer": optimizer, "lr_scheduler": settings}


TEMPLATE = {
    "_target_": "tests.foreign.classics.TemplateModule",
    "net": {"_target_": "tests.foreign.classics.SimpleDenseNet"},
    "optimizer": {
        "_target_": "torch.optim.Adam",
        "_partial_": True,
        "lr": 1e-3,
        "weight_decay": 0.0,
    },
    "scheduler": {
        "_target_": "torch.optim.lr_scheduler.ReduceLROnPlateau",
        "_partial_": True,
        "patience": 10,
    },
    "compile": False,
}


@program(limit_val_batches=1, num_sanity_val_steps=1)
def hydra_template() -> Any:
    return instantiate(TEMPLATE), Images()

"""Twelve model families that no other benchmark uses, each with its batch and its optimizer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn

from benchmarks.strangers_sequences import (
    Llama,
    Mixture,
    Recognizer,
    Recommender,
    Translator,
    WaveEncoder,
)
from benchmarks.strangers_vision import ConvNext, ConvVae, MobileNet, ResNet, UNet, Vit, images


class Stranger(L.LightningModule):
    """A network that returns its loss, with the optimizer that `optimizer` makes."""

    def __init__(self, net: nn.Module, optimizer: Callable[[Any], torch.optim.Optimizer]) -> None:
        super().__init__()
        self.net, self.make_optimizer = net, optimizer

    def forward(self, batch: Sequence[Tensor]) -> Tensor:
        loss: Tensor = self.net(batch)
        return loss

    def training_step(self, batch: Sequence[Tensor], batch_index: int) -> Tensor:
        return self(batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.make_optimizer(self.parameters())


@dataclass(frozen=True)
class Family:
    """How to make a family's module and a batch of `batch_size` samples."""

    net: Callable[[], nn.Module]
    batch: Callable[[int], Sequence[Tensor]]
    batch_size: int
    optimizer: Callable[[Any], torch.optim.Optimizer]

    def module(self) -> Stranger:
        """The module, with equal parameters in every process."""
        torch.manual_seed(0)
        return Stranger(self.net(), self.optimizer)

    def example(self, seed: int) -> Sequence[Tensor]:
        """One batch."""
        torch.manual_seed(seed)
        return self.batch(self.batch_size)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-4)


def fused_adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-4, fused=True)


def adam_foreach(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=1e-4, foreach=True)


def momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-3, momentum=0.9, weight_decay=1e-4)


def tokens(*shapes: tuple[int, int]) -> Callable[[int], Sequence[Tensor]]:
    """Batches of random tokens, one tensor per (length, vocabulary)."""
    return lambda n: tuple(
        torch.randint(0, vocabulary, (n, length)) for length, vocabulary in shapes
    )


def clicks(n: int) -> Sequence[Tensor]:
    return torch.rand(n, 13), torch.randint(0, 20000, (n, 12)), torch.randint(0, 2, (n,)).float()


FAMILIES: dict[str, Family] = {
    "resnet": Family(ResNet, lambda n: images(n, 64, classes=100), 24, momentum),
    "convnext": Family(ConvNext, lambda n: images(n, 64, classes=100), 16, adamw),
    "vit": Family(Vit, lambda n: images(n, 64, classes=100), 16, fused_adamw),
    "mobilenet": Family(MobileNet, lambda n: images(n, 96, classes=100), 8, momentum),
    "unet": Family(UNet, lambda n: images(n, 64, dense=True, classes=10), 4, adam_foreach),
    "vae": Family(ConvVae, lambda n: images(n, 64), 24, fused_adamw),
    "recognizer": Family(
        Recognizer, lambda n: (torch.rand(n, 80, 200), torch.randint(0, 48, (n, 100))), 8, adamw
    ),
    "wave": Family(
        WaveEncoder, lambda n: (torch.randn(n, 16000), torch.randint(0, 320, (n, 200))), 6, adamw
    ),
    "translator": Family(Translator, tokens((48, 6000), (64, 6000)), 12, adam_foreach),
    "llama": Family(Llama, tokens((129, 4096)), 8, fused_adamw),
    "mixture": Family(Mixture, tokens((64, 4096), (64, 4096)), 8, adamw),
    "recommender": Family(Recommender, clicks, 1024, fused_adamw),
}

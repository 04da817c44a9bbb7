"""Two models of 25 M parameters with little to compute, so that the exchange of gradients decides
the step.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_topt.cli.tasks.byte_lm import ByteGPT, StdlibBytesDataModule

SEQ_LEN, SEQUENCES, IMAGES = 32, 1, 1


class GPT(nn.Module):
    """Eight blocks of width 512 over bytes; `forward` gives the loss of a batch (B, 33)."""

    def __init__(self) -> None:
        super().__init__()
        self.gpt = ByteGPT(8, 512, 8, SEQ_LEN)

    def forward(self, batch: Tensor) -> Tensor:
        tokens = batch.long()
        return F.cross_entropy(self.gpt(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


class ConvNet(nn.Module):
    """Convolutions of 512 channels on 4 x 4 maps, as in the last stages of a residual net; loss of
    images (B, 3, 32, 32).
    """

    def __init__(self) -> None:
        super().__init__()
        sizes = [(3, 128), (128, 256), (256, 512)]
        self.stem = nn.Sequential(*(self._convolution(a, b, 2) for a, b in sizes))
        self.body = nn.ModuleList(self._convolution(512, 512, 1) for _ in range(8))
        self.head = nn.Sequential(
            self._convolution(512, 1024, 2),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(1024, 10),
        )

    @staticmethod
    def _convolution(inputs: int, outputs: int, stride: int) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, padding=1), nn.GroupNorm(8, outputs), nn.ReLU()
        )

    def forward(self, images: Tensor) -> Tensor:
        x = self.stem(images)
        for block in self.body:
            x = x + block(x)
        labels = (images.mean((1, 2, 3)) * 1e3).long() % 10
        return F.cross_entropy(self.head(x), labels)


def make(name: str) -> nn.Module:
    """The model "gpt" or "cnn", the same on every rank."""
    torch.manual_seed(0)
    return GPT() if name == "gpt" else ConvNet()


def batches(name: str, rank: int) -> list[Tensor]:
    """Sixteen batches of this rank."""
    generator = torch.Generator().manual_seed(rank)
    if name == "gpt":
        return [
            torch.randint(0, 256, (SEQUENCES, SEQ_LEN + 1), generator=generator) for _ in range(16)
        ]
    return [torch.randn(IMAGES, 3, 32, 32, generator=generator) for _ in range(16)]


def text_batches(rank: int, world_size: int, *, sequences: int, steps: int) -> list[Tensor]:
    """Batches of the standard library's source for this rank, the same global batch whatever the
    method.
    """
    data = StdlibBytesDataModule(SEQ_LEN, sequences, max_bytes=4_000_000)
    data.setup()
    order = torch.randperm(len(data.train_data), generator=torch.Generator().manual_seed(1))
    per_step = sequences * world_size
    chosen = [
        order[s * per_step + rank * sequences : s * per_step + (rank + 1) * sequences]
        for s in range(steps)
    ]
    return [torch.stack([data.train_data[int(i)] for i in indices]) for indices in chosen]


def held_out_batches(*, sequences: int, batches: int) -> list[Tensor]:
    """Validation batches of the standard library's source, spread over it; the same on all
    ranks.
    """
    data = StdlibBytesDataModule(SEQ_LEN, sequences, max_bytes=4_000_000)
    data.setup()
    step = max(1, len(data.val_data) // (sequences * batches))
    windows = [data.val_data[index * step] for index in range(sequences * batches)]
    return list(torch.stack(windows).split(sequences))

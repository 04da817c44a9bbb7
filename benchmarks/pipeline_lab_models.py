"""Models with large weights and small activations, for pipelines on slow links (BaPipe, arXiv
2012.12544, section 5).

A model returns its mean loss of a part of a batch; `BLOCKS` are its parts in order, between which
stages may be cut.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Part = tuple[Tensor, Tensor]
VOCABULARY, WORDS = 2048, 8  # of a sentence


class Convolution(nn.Sequential):
    """A convolution; `halves` the image after it."""

    def __init__(self, inputs: int, outputs: int, halves: bool) -> None:
        super().__init__(
            nn.Conv2d(inputs, outputs, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2) if halves else nn.Identity(),
        )


class VGG(nn.Module):
    """Convolutions on images of 32 x 32, then wide linear layers with most of the weights."""

    def __init__(self) -> None:
        super().__init__()
        widths = (3, 32, 32, 64, 64, 128)
        self.features = nn.ModuleList(
            Convolution(a, b, halves=i in (1, 3, 4))
            for i, (a, b) in enumerate(itertools.pairwise(widths))
        )
        self.classifier = nn.ModuleList(
            nn.Sequential(nn.Linear(2048, 2048), nn.ReLU()) for _ in range(8)
        )
        self.head = nn.Linear(2048, 100)

    def forward(self, part: Part) -> Tensor:
        """Return the loss."""
        x = part[0]
        for layer in self.features:
            x = layer(x)
        x = x.flatten(1)
        for layer in self.classifier:
            x = layer(x)
        return F.cross_entropy(self.head(x), part[1])


class Recurrent(nn.Module):
    """One LSTM layer, added to what it read."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.cells = nn.LSTM(width, width, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        """Return (B, T, width)."""
        found: Tensor = self.cells(x)[0]
        return x + found


class LSTM(nn.Module):
    """A language model of stacked LSTM layers."""

    def __init__(self, width: int = 768, layers: int = 8) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.layers = nn.ModuleList(Recurrent(width) for _ in range(layers))
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, part: Part) -> Tensor:
        """Return the loss."""
        x = self.embedding(part[0])
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), part[1].flatten())


class Reader(nn.Module):
    """One layer of a decoder: an LSTM, and attention over what the encoder made (Wu et al., arXiv
    1609.08144).
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.cells, self.mix = nn.LSTM(width, width, batch_first=True), nn.Linear(2 * width, width)

    def forward(self, x: Tensor, source: Tensor) -> Tensor:
        """Return (B, T, width)."""
        found = self.cells(x)[0]
        context = F.scaled_dot_product_attention(found, source, source)
        return x + torch.tanh(self.mix(torch.cat([found, context], -1)))


class GNMT(nn.Module):
    """Translation: an encoder and a decoder of LSTM layers; every layer of the decoder reads the
    encoder's output.
    """

    def __init__(self, width: int = 640, layers: int = 4) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(VOCABULARY, width), nn.Embedding(VOCABULARY, width)
        self.encoder = nn.ModuleList(Recurrent(width) for _ in range(layers))
        self.decoder = nn.ModuleList(Reader(width) for _ in range(layers))
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, part: Part) -> Tensor:
        """Return the loss."""
        x = self.source(part[0])
        for layer in self.encoder:
            x = layer(x)
        y = self.target(part[1][:, :-1])
        for layer in self.decoder:
            y = layer(y, x)
        return F.cross_entropy(self.head(y).flatten(0, 1), part[1][:, 1:].flatten())


def images(count: int) -> Part:
    """Images and their classes."""
    return torch.randn(count, 3, 32, 32), torch.randint(100, (count,))


def words(count: int) -> Part:
    """Sentences, and the words to be predicted."""
    return torch.randint(VOCABULARY, (count, WORDS)), torch.randint(VOCABULARY, (count, WORDS))


@dataclass(frozen=True)
class LabModel:
    """`blocks` in order; `batch` makes so many samples; `samples` are those of a step on all
    ranks.
    """

    make: Callable[[], nn.Module]
    batch: Callable[[int], Part]
    blocks: Sequence[str]
    samples: int


MODELS: dict[str, LabModel] = {
    "VGG": LabModel(
        VGG,
        images,
        [*(f"features.{i}" for i in range(5)), *(f"classifier.{i}" for i in range(8)), "head"],
        64,
    ),
    "LSTM": LabModel(LSTM, words, ["embedding", *(f"layers.{i}" for i in range(8)), "head"], 32),
    "GNMT": LabModel(
        GNMT,
        words,
        [
            "source",
            *(f"encoder.{i}" for i in range(4)),
            "target",
            *(f"decoder.{i}" for i in range(4)),
            "head",
        ],
        32,
    ),
}

"""Three small models as chains of pieces, which are dealt out to any number of simulated stages,
and their tasks.

Deep and narrow: what prediction is about is the delay of each layer, not its size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn, optim
from torch.optim import Optimizer

from lightning_topt.cli.tasks.byte_lm import Block, ByteGPT, StdlibBytesDataModule

Batch = tuple[Tensor, Tensor]
METRICS = {
    "transformer": "validation bits per byte",
    "long transformer": "validation bits per byte",
    "cnn": "test errors in %",
    "lstm": "test errors in %",
}


class Task(NamedTuple):
    """A model, how it is trained and how it is judged: the metric, and the loss on data that were
    held out; lower is better.
    """

    pieces: Callable[[], list[nn.Module]]
    batches: Callable[[int], list[Batch]]  # of a seed
    loss: Callable[[Tensor, Tensor], Tensor]
    optimizer: Callable[[Sequence[nn.Parameter], str], Optimizer]
    metric: str
    judge: Callable[[nn.Module], tuple[float, float]]


class Embedding(nn.Module):
    """The embeddings of a ByteGPT."""

    def __init__(self, gpt: ByteGPT) -> None:
        super().__init__()
        self.embedding, self.positions = gpt.embedding, gpt.positions

    def forward(self, tokens: Tensor) -> Tensor:
        return self.embedding(tokens) + self.positions(torch.arange(tokens.shape[1]))


class Attention(nn.Module):
    """The first half of a block."""

    def __init__(self, block: Block) -> None:
        super().__init__()
        self.norm, self.query_key_value, self.out = (
            block.attention_norm,
            block.query_key_value,
            block.attention_out,
        )
        self.num_heads = block.num_heads

    def forward(self, x: Tensor) -> Tensor:
        heads = (
            self.query_key_value(self.norm(x))
            .unflatten(-1, (3, self.num_heads, -1))
            .permute(2, 0, 3, 1, 4)
        )
        mixed = F.scaled_dot_product_attention(*heads, is_causal=True)
        return x + self.out(mixed.transpose(1, 2).flatten(2))


class Perceptron(nn.Module):
    """The second half of a block."""

    def __init__(self, block: Block) -> None:
        super().__init__()
        self.norm, self.inner, self.outer = block.mlp_norm, block.mlp_in, block.mlp_out

    def forward(self, x: Tensor) -> Tensor:
        return x + self.outer(F.gelu(self.inner(self.norm(x))))


class Convolution(nn.Module):
    """A residual convolution."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(4, channels)
        self.convolution = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.convolution(F.relu(self.norm(x)))


class Recurrent(nn.Module):
    """A residual LSTM layer."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.norm, self.lstm = nn.LayerNorm(hidden), nn.LSTM(hidden, hidden, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.lstm(self.norm(x))[0]


class Last(nn.Module):
    """The last position of a sequence, classified."""

    def __init__(self, hidden: int, classes: int) -> None:
        super().__init__()
        self.norm, self.head = nn.LayerNorm(hidden), nn.Linear(hidden, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(x[:, -1]))


def deal(pieces: Sequence[nn.Module], num_stages: int) -> list[nn.Sequential]:
    """The pieces on stages in order, as evenly as can be; where stages are more than pieces, some
    stay empty.
    """
    bounds = [math.ceil(stage * len(pieces) / num_stages) for stage in range(num_stages + 1)]
    return [nn.Sequential(*pieces[low:high]) for low, high in pairwise(bounds)]


# ---- a transformer on bytes of source code
LAYERS, HIDDEN, SEQ_LEN, SEQUENCES = 3, 32, 32, 8
TEXT_STEPS = {"transformer": 1000, "long transformer": 4000}


def _gpt() -> list[nn.Module]:
    gpt = ByteGPT(LAYERS, HIDDEN, 4, SEQ_LEN)
    halves = [half for block in gpt.blocks for half in (Attention(block), Perceptron(block))]
    return [Embedding(gpt), *halves, nn.Sequential(gpt.norm, gpt.head)]


class _Text:
    def __init__(self, steps: int) -> None:
        data = StdlibBytesDataModule(SEQ_LEN, SEQUENCES, max_bytes=1000 * steps)
        data.setup()
        self.steps = steps
        self.train = torch.stack([data.train_data[i] for i in range(len(data.train_data))])
        self.held = torch.stack(
            [data.val_data[i] for i in range(0, len(data.val_data), 3)][:1024]
        ).long()

    def batches(self, seed: int) -> list[Batch]:
        order = torch.randperm(len(self.train), generator=torch.Generator().manual_seed(seed))
        chosen = [
            self.train[part].long() for part in order[: self.steps * SEQUENCES].split(SEQUENCES)
        ]
        return [(tokens[:, :-1], tokens[:, 1:]) for tokens in chosen]

    def judge(self, model: nn.Module) -> tuple[float, float]:
        with torch.no_grad():
            loss = float(_next_byte(model(self.held[:, :-1]), self.held[:, 1:]))
        return loss / math.log(2), loss


def _next_byte(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def _adamw(parameters: Sequence[nn.Parameter], rule: str) -> Optimizer:
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    if rule == "nesterov":
        return optim.NAdam(groups, lr=TEXT_RATE, betas=(0.99, 0.999), decoupled_weight_decay=True)
    return optim.AdamW(groups, lr=TEXT_RATE, betas=(0.9, 0.95))


# ---- images of digits, and their rows as sequences
CHANNELS, CONVOLUTIONS, WIDTH, RECURRENT, IMAGES = 8, 6, 24, 6, 32
TEXT_RATE, IMAGE_RATE, ROW_RATE, IMAGE_EPOCHS, ROW_EPOCHS = 1e-3, 0.02, 0.03, 12, 20


class _Digits:
    def __init__(self, *, rows: bool) -> None:
        digits = load_digits()
        images = torch.tensor(digits.images, dtype=torch.float32) / 8 - 1
        labels = torch.tensor(digits.target)
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
        images = (images if rows else images[:, None])[order]
        self.images, self.labels = images[:1347], labels[order][:1347]
        self.held, self.answers = images[1347:], labels[order][1347:]
        self.epochs = ROW_EPOCHS if rows else IMAGE_EPOCHS

    def batches(self, seed: int) -> list[Batch]:
        generator, found = torch.Generator().manual_seed(seed), []
        for _ in range(self.epochs):
            order = torch.randperm(len(self.images), generator=generator)
            found += [
                (self.images[part], self.labels[part])
                for part in order[: 42 * IMAGES].split(IMAGES)
            ]
        return found

    def judge(self, model: nn.Module) -> tuple[float, float]:
        with torch.no_grad():
            outputs = model(self.held)
        errors = (outputs.argmax(-1) != self.answers).float().mean()
        return 100 * float(errors), float(F.cross_entropy(outputs, self.answers))


def _convolutional() -> list[nn.Module]:
    head = nn.Sequential(
        nn.GroupNorm(4, CHANNELS), nn.ReLU(), nn.Flatten(), nn.Linear(64 * CHANNELS, 10)
    )
    return [
        nn.Conv2d(1, CHANNELS, 3, padding=1),
        *(Convolution(CHANNELS) for _ in range(CONVOLUTIONS)),
        head,
    ]


def _recurrent() -> list[nn.Module]:
    return [nn.Linear(8, WIDTH), *(Recurrent(WIDTH) for _ in range(RECURRENT)), Last(WIDTH, 10)]


def _sgd(rate: float) -> Callable[[Sequence[nn.Parameter], str], Optimizer]:
    return lambda parameters, rule: optim.SGD(parameters, lr=rate, momentum=0.9, weight_decay=1e-4)


def make_task(name: str) -> Task:
    """The task of one of `METRICS`; all chains have 8 pieces."""
    if name in TEXT_STEPS:
        text = _Text(TEXT_STEPS[name])
        return Task(_gpt, text.batches, _next_byte, _adamw, METRICS[name], text.judge)
    digits = _Digits(rows=name == "lstm")
    pieces, rate = (_recurrent, ROW_RATE) if name == "lstm" else (_convolutional, IMAGE_RATE)
    return Task(pieces, digits.batches, F.cross_entropy, _sgd(rate), METRICS[name], digits.judge)

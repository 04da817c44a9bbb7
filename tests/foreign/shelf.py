"""Programs as strangers write them: a module and its data. See `test_once.py`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import lightning as L
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

Make = Callable[[], tuple[L.LightningModule, Any]]


@dataclass(frozen=True)
class Program:
    """`make` returns the module and what `fit` takes as data; `options` go to the Trainer."""

    name: str
    make: Make
    options: dict[str, Any] = field(default_factory=dict)
    find_unused: bool = False


PROGRAMS: dict[str, Program] = {}


def program(*, find_unused: bool = False, **options: Any) -> Callable[[Make], Make]:
    """Put the decorated function on the shelf under its name."""

    def register(make: Make) -> Make:
        name = make.__name__
        assert name not in PROGRAMS, name
        PROGRAMS[name] = Program(name, make, options, find_unused)
        return make

    return register


def generator(seed: int = 5) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


class Samples(Dataset[Any]):
    """The same `count` samples everywhere: ``sample(generator, index)`` makes one."""

    def __init__(self, count: int, sample: Callable[[torch.Generator, int], Any]) -> None:
        source = generator()
        self.samples = [sample(source, index) for index in range(count)]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        return self.samples[index]


def loader(
    sample: Callable[[torch.Generator, int], Any], *, batch_size: int = 4, **kwargs: Any
) -> DataLoader[Any]:
    return DataLoader(Samples(64, sample), batch_size=batch_size, **kwargs)


def image(source: torch.Generator, size: int = 8, channels: int = 3) -> Tensor:
    return torch.randn(channels, size, size, generator=source)


def label(source: torch.Generator, classes: int = 5) -> Tensor:
    return torch.randint(0, classes, (), generator=source)


def tokens(source: torch.Generator, length: int = 8, vocab: int = 32) -> Tensor:
    return torch.randint(2, vocab, (length,), generator=source)


def image_and_label(source: torch.Generator, index: int) -> tuple[Tensor, Tensor]:
    return image(source), label(source)


def row_and_label(source: torch.Generator, index: int) -> tuple[Tensor, Tensor]:
    return torch.randn(8, generator=source), label(source)

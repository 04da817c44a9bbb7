"""Programs that count how often their code runs: a module, its data, and what tells the counts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.foreign.shelf import PROGRAMS, Program, Samples, label, row_and_label

STEPS = 8  # of a program that says no other number
COUNT = 96  # samples: 12 batches of 4 on 2 ranks


class Built(NamedTuple):
    """What a program makes: `evidence` is asked after the fit; `options` are the Trainer's."""

    module: L.LightningModule
    data: Any
    evidence: Callable[[], Any]
    options: dict[str, Any] = {}


@dataclass(frozen=True)
class Counted:
    """A program, and in words what of it runs once; `make` makes all anew, caches too."""

    name: str
    kind: str
    make: Callable[[], Built]
    options: dict[str, Any] = field(default_factory=dict)
    find_unused: bool = False


COUNTED: dict[str, Counted] = {}


def counted(
    kind: str, *, find_unused: bool = False, **options: Any
) -> Callable[[Callable[[], Built]], Any]:
    """Put the decorated function on the shelf under its name."""

    def register(make: Callable[[], Built]) -> Callable[[], Built]:
        name = make.__name__
        assert name not in COUNTED, name
        COUNTED[name] = Counted(name, kind, make, options, find_unused)
        return make

    return register


def put_shelves() -> None:
    """Put the programs of the other shelf on this one, too; they count nothing."""
    for program in PROGRAMS.values():

        def make(program: Program = program) -> Built:
            return Built(*program.make(), evidence=lambda: None)

        make.__module__ = program.make.__module__
        kept = Counted(program.name, "", make, program.options, program.find_unused)
        assert program.name not in COUNTED, program.name
        COUNTED[program.name] = kept


def numbered(source: torch.Generator, index: int) -> tuple[Tensor, Tensor, int]:
    return torch.randn(8, generator=source), label(source), index


def rows(
    sample: Callable[[torch.Generator, int], Any] = row_and_label, **options: Any
) -> DataLoader[Any]:
    return DataLoader(Samples(COUNT, sample), **{"batch_size": 4, **options})


def mlp(inputs: int = 8, hidden: int = 32, outputs: int = 5) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(inputs, hidden),
        nn.ReLU(),
        nn.Linear(hidden, hidden),
        nn.ReLU(),
        nn.Linear(hidden, outputs),
    )


class Net(L.LightningModule):
    """Rows of 8 numbers in 5 classes; those that inherit it note in `trace` what they did."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()
        self.trace: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=1e-2)


def traced(module: Any, data: Any = None, **options: Any) -> Built:
    """A program whose evidence is the module's trace."""
    return Built(module, rows() if data is None else data, lambda: list(module.trace), options)

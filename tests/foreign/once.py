"""Programs that ask iterators and data sets with state; batches that change."""

from __future__ import annotations

import hashlib
import random
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from tests.foreign.once_shelf import COUNT, Built, Net, counted, numbered, rows, traced
from tests.foreign.shelf import Samples, generator, row_and_label

# ---- iterators and generators


class SemiSupervised(Net):
    """After a report: the second loader is an iterator that the step asks."""

    def on_train_start(self) -> None:
        order = torch.Generator().manual_seed(100 + self.global_rank)
        self.stream = iter(
            DataLoader(Samples(64, numbered), batch_size=4, shuffle=True, generator=order)
        )

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        extra, _, numbers = next(self.stream)
        self.trace.append(numbers.tolist())
        with torch.no_grad():
            target = self.net(extra).softmax(-1)
        consistency = -(target * self.net(extra + 0.1).log_softmax(-1)).sum(-1).mean()
        return super().training_step(batch, batch_idx) + consistency


@counted("iterator of a second loader, asked with next() in the step (report)")
def unlabeled_iterator() -> Built:
    return traced(SemiSupervised())


# ---- data sets and loaders with state


class Curriculum(Dataset[Any]):
    def __init__(self) -> None:
        self.plain, self.level, self.asked = Samples(COUNT, row_and_label), 0, []

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> Any:
        self.asked.append((index, self.level))
        x, y = self.plain[index]
        return x * (1 + 0.1 * self.level), y


class RaisesLevel(Net):
    def __init__(self, data: Curriculum) -> None:
        super().__init__()
        self.data = data

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.data.level += batch_idx % 3 == 0
        return super().training_step(batch, batch_idx)


@counted("data set whose level the step raises, and that notes what it is asked")
def curriculum_in_the_data_set() -> Built:
    data = Curriculum()
    return Built(
        RaisesLevel(data), DataLoader(data, batch_size=4), lambda: (data.level, data.asked)
    )


class NotesNumbers(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.trace.append(batch[2].tolist())
        return super().training_step(batch, batch_idx)


def digest(*states: Any) -> list[str]:
    """Short names of states of generators."""
    plain = (state.tolist() if isinstance(state, Tensor) else state for state in states)
    return [hashlib.sha1(repr(state).encode()).hexdigest()[:8] for state in plain]


@counted("loader that shuffles by its own generator", use_distributed_sampler=False)
def loader_with_its_own_generator() -> Built:
    module, order = NotesNumbers(), generator(17)
    data = rows(numbered, shuffle=True, generator=order)
    return Built(module, data, lambda: (module.trace, digest(order.get_state())))


class GlobalSources(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = (
            batch[0] * random.uniform(0.9, 1.1)
            + 0.1 * torch.randn_like(batch[0])
            + 0.1 * np.random.rand()
        )
        return super().training_step((F.dropout(x, 0.1), batch[1]), batch_idx)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        state = np.random.get_state()
        self.trace.append(
            digest(random.getstate(), state[1].tolist(), state[2], torch.get_rng_state())
        )


@counted("states of the global generators after each batch")
def global_sources_of_chance() -> Built:
    return traced(GlobalSources())


# ---- batches that are changed, or can be read once


class Columns:
    """After a report: a collate function that returns an iterator."""

    def __init__(self) -> None:
        self.stacked = 0

    def stack(self, column: Any) -> Tensor:
        self.stacked += 1
        return torch.stack(column)

    def __call__(self, samples: list[Any]) -> Iterator[Tensor]:
        return map(self.stack, zip(*samples, strict=True))


class UnpacksOnce(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        return super().training_step((x, y), batch_idx)


@counted("collate function that returns a map (report)")
def lazy_columns() -> Built:
    columns = Columns()
    return Built(UnpacksOnce(), rows(collate_fn=columns), lambda: columns.stacked)


class HoldsWeakly(Net):
    """Which older batches are still alive: a leak of batches is seen here."""

    def __init__(self) -> None:
        super().__init__()
        self.batches: list[weakref.ref[Tensor]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.trace.append([number for number, x in enumerate(self.batches[:-1]) if x() is not None])
        self.batches.append(weakref.ref(batch[0]))
        return super().training_step(batch, batch_idx)


@counted("weak references to batches: those before the last are gone")
def batches_held_weakly() -> Built:
    return traced(HoldsWeakly())

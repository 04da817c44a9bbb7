"""Stalls: the clock against what can be worked out, and the whole measurement on a source."""

from __future__ import annotations

import json
import os
import time
from typing import Any

import pytest
import torch
from torch.utils.data import ConcatDataset, DataLoader, Dataset, IterableDataset, Subset

from lightning_topt.data import deterministic, stalls
from lightning_topt.data.stalls import LoopTimes, Watched, measure_stalls
from tests.clock import Clock


class Source(Dataset[Any]):
    """Item i is a row of i. A connection is opened at the first sample, by one process."""

    connection: int | None = None

    def __init__(self, length: int = 200, *, wait: float = 0.0) -> None:
        self.length, self.wait = length, wait
        self.reads = torch.zeros(length, dtype=torch.int64).share_memory_()

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        self.connection = self.connection or os.getpid()
        assert self.connection == os.getpid(), "a worker got this process's connection"
        self.reads[index] += 1
        time.sleep(self.wait)
        return torch.full((6,), index), index


class Marked(Source):
    """Only a part of a sample is worth keeping."""

    def __getitem__(self, index: int) -> Any:
        return self.load(index), index

    @deterministic
    def load(self, index: int) -> Any:
        return super().__getitem__(index)[0]


def test_the_clock_of_a_loop(monkeypatch):
    clock = Clock(busy=0.25)
    monkeypatch.setattr(stalls, "time", clock)

    def batches():
        for i in range(100):
            clock.now += 50 if i < 4 else 3  # the wait
            yield i

    def train(watched: Watched) -> LoopTimes:
        for _ in watched:
            clock.now += 1  # the step
        return watched.times()

    times = train(Watched(batches(), 1e9, skip=4, most=10))
    assert times[:4] == (10, 4, 3, 1)
    # it ends with its time, but not before its least
    assert train(Watched(range(1000), 10.5, skip=2)).batches == 11
    assert train(Watched(range(1000), 1.5, skip=2, least=4)).batches == 4
    with pytest.raises(ValueError, match="3 batches"):
        train(Watched(range(3), 1.0))


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("kind", ["plain", "marked", "parts"])
def test_all_of_it(workers, kind):
    wait = 0.01  # long beside what a busy machine adds
    source = (Marked if kind == "marked" else Source)(300, wait=wait)
    data: Any = source
    if kind == "parts":
        data = ConcatDataset([Subset(source, range(200)), Subset(source, range(200, 300))])
    runs: list[int] = []

    def train(batches: Watched) -> None:
        before = int(source.reads.sum())
        for _, indices in batches:
            assert len(indices) == 4
        runs.append(int(source.reads.sum()) - before)

    loader = DataLoader(data, batch_size=4, num_workers=workers, shuffle=True)
    result = measure_stalls(loader, train=train, seconds=0.15, memory_bytes=1 << 22, cores=2)
    step, cold, cached = runs
    assert step == 0 and cold > 0 and cached == 0
    assert result.cold.batch_seconds > 4 * wait * 0.9 and result.num_items == 300
    assert result.parts["fetching"] > 0.5 * result.cold.batch_seconds
    assert "times as fast" in result.advice[0]
    record = json.loads(json.dumps(result.to_dict()))
    assert record["batch_size"] == 4 and record["runs"]["cold"]["batches"] > 0


class Endless(IterableDataset[int]):
    def __iter__(self):
        return iter(range(10))


@pytest.mark.parametrize(
    ("loader", "options", "word"),
    [
        ([1, 2], {}, "list"),
        (DataLoader(Endless()), {}, "iterable"),
        (DataLoader(Source(20), batch_size=4), {}, "at least 8"),
        (DataLoader(Source()), {"memory_bytes": "much"}, "memory_bytes"),
        (DataLoader(Source()), {"seconds": 0}, "positive"),
        (DataLoader(Source(), batch_size=8), {"memory_bytes": 64, "seconds": 0.1}, "raise it"),
    ],
)
def test_what_cannot_be_measured(loader, options, word):
    with pytest.raises(ValueError, match=word):
        measure_stalls(loader, train=list, **options)

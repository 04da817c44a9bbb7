"""The instruments of the stall measurement against what can be worked out, and the whole of it on a
small source.
"""

from __future__ import annotations

import io
import json
import os
import time
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    SequentialSampler,
    Subset,
)

from lightning_topt.data.stalls import loop as stall_loop
from lightning_topt.data.stalls.loop import (
    LoopTimes,
    Watched,
    check_loader,
    loader_over,
    samples_per_batch,
)
from lightning_topt.data.stalls.measurement import (
    MeasurementOptions,
    SampleProbe,
    contention,
    fit_link,
    measure_stalls,
    probe_samples,
    probe_source,
    read_rate,
    sample_costs,
)
from lightning_topt.data.stalls.model import what_if
from lightning_topt.data.stalls.stall_report import print_report, save_png
from lightning_topt.plugins.cached_data import MeasuredCache
from tests.clock import Clock
from tests.data.test_stall_model import COSTS


class Source(Dataset[Any]):
    """Item i is a row of i; reads are counted in shared memory."""

    def __init__(self, length: int = 200, *, wait: float = 0.0) -> None:
        self.length, self.wait = length, wait
        self.reads = torch.zeros(length, dtype=torch.int64).share_memory_()

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        self.reads[index] += 1
        time.sleep(self.wait)
        return torch.full((6,), index), index


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock(busy=0.25)
    monkeypatch.setattr(stall_loop, "time", clock)
    return clock


def test_watched_times_only_what_comes_after_the_skipped(clock):
    def batches():
        for i in range(100):
            clock.now += 50 if i < 4 else 3  # the wait
            yield i

    watched = Watched(batches(), 1e9, skip=4, most=10)
    seen = []
    for batch in watched:
        seen.append(batch)
        clock.now += 1  # the step
    times = watched.times()
    assert seen == list(range(14)) and watched.used == 14
    assert (
        times.batches == 10
        and times.batch_seconds == 4
        and times.wait_seconds == 3
        and times.core_seconds == 1
    )


def test_watched_ends_with_its_time_but_not_before_its_least(clock):
    def train(seconds: float, least: int) -> int:
        watched = Watched(range(1000), seconds, skip=2, least=least)
        for _ in watched:
            clock.now += 1
        return watched.times().batches

    assert train(10.5, 4) == 11 and train(1.5, 4) == 4


def test_core_seconds_of_workers_are_seen():
    loader = DataLoader(Spinning(400), batch_size=4, num_workers=1, prefetch_factor=2)
    watched = Watched(loader, 0.5, skip=4, most=80)
    for _ in watched:
        pass
    times = watched.times()
    assert times.worker_core_seconds > 0.5 * 4 * Spinning.seconds  # counted in steps of 10 ms
    assert times.core_seconds < times.worker_core_seconds


class Spinning(Source):
    seconds = 0.002

    def __getitem__(self, index: int) -> Any:
        end = time.thread_time() + self.seconds
        while time.thread_time() < end:
            pass
        return index


def test_loader_over_keeps_order_batches_and_collation():
    def collate(samples: list[Any]) -> list[int]:
        return [index for _, index in samples]

    loader = DataLoader(Source(), batch_size=3, shuffle=True, collate_fn=collate)
    items = [5, 3, 9, 9, 1, 0, 7]
    for workers in (0, 1):
        assert list(loader_over(loader, items, num_workers=workers)) == [[5, 3, 9], [9, 1, 0]]
    sampler = BatchSampler(SequentialSampler(range(200)), batch_size=2, drop_last=False)
    own = DataLoader(Source(), batch_sampler=sampler, collate_fn=collate)
    assert samples_per_batch(own) == 2
    assert list(loader_over(own, items, num_workers=0)) == [[5, 3], [9, 9], [1, 0]]
    whole = DataLoader(Source(), batch_size=None)
    assert samples_per_batch(whole) == 1
    assert [index for _, index in loader_over(whole, items, num_workers=0)] == items


class Endless(IterableDataset[int]):
    def __iter__(self):
        return iter(range(10))


def test_loaders_that_cannot_be_measured():
    with pytest.raises(ValueError, match="one DataLoader; got list"):
        check_loader([1, 2])
    with pytest.raises(ValueError, match="StallMonitor"):
        check_loader(DataLoader(Endless()))


def test_a_wait_is_no_work():
    probes, samples = probe_samples(Source(wait=0.01).__getitem__, range(20), seconds=10, warmup=2)
    assert len(probes) == 18 and [index for _, index in samples] == list(range(20))
    assert all(probe.seconds >= 0.01 for probe in probes)
    assert sum(probe.wait_seconds for probe in probes) > 0.5 * sum(
        probe.seconds for probe in probes
    )
    spun, _ = probe_samples(Spinning().__getitem__, range(20), seconds=10)
    assert sum(probe.core_seconds for probe in spun) >= 0.9 * len(spun) * Spinning.seconds
    assert len(probe_samples(Source(wait=0.02).__getitem__, range(200), seconds=0.1)[0]) < 10


class Fails(Source):
    def __getitem__(self, index: int) -> Any:
        if self.length == 1:
            os._exit(1)
        raise OSError("no such bucket")


def test_the_source_is_probed_in_another_process():
    source = Source(100, wait=0.002)
    probe = probe_source(DataLoader(source, batch_size=32), range(20), seconds=10)
    assert len(probe.samples) == 17 and probe.collate_seconds > 0 and source.reads.sum() == 20
    probe = probe_source(DataLoader(source, batch_size=None), range(20), seconds=0.001)
    assert probe.samples and all(sample.seconds >= 0.002 for sample in probe.samples)
    with pytest.raises(RuntimeError, match="no such bucket"):
        probe_source(DataLoader(Fails(10)), range(10), seconds=1)
    with pytest.raises(RuntimeError, match="was ended"):
        probe_source(DataLoader(Fails(1)), range(10), seconds=1)


class Connects(Source):
    """As sources do: opens its connection at the first sample; a process that finds another's is
    lost.
    """

    connection: int | None = None

    def __getitem__(self, index: int) -> Any:
        if self.connection is None:
            self.connection = os.getpid()
        assert self.connection == os.getpid(), "a worker got this process's connection"
        return super().__getitem__(index)


@pytest.mark.parametrize("workers", [0, 1])
def test_no_connection_is_inherited(tmp_path, workers):
    measure(Connects(400), tmp_path, workers=workers)


def probes_of(sizes: list[float], *, latency: float, rate: float) -> list[SampleProbe]:
    return [SampleProbe(0.003 + latency + size / rate, 0.003, size) for size in sizes]


def test_latency_and_rate_are_told_apart_by_sizes():
    sizes = [10_000.0 + 700 * i for i in range(60)]
    probes = probes_of(sizes, latency=0.002, rate=25e6)
    assert fit_link(probes) == pytest.approx((0.002, 25e6))
    disturbed = [
        probe._replace(seconds=5.0) if i % 20 == 7 else probe for i, probe in enumerate(probes)
    ]
    latency, rate = fit_link(disturbed)
    assert rate == pytest.approx(25e6, rel=0.1)
    mean = sum(probe.wait_seconds for probe in disturbed) / 60
    assert latency + sum(sizes) / 60 / rate == pytest.approx(mean), "the mean wait is kept"


def test_equal_sizes_tell_no_rate_unless_it_is_known():
    probes = probes_of([30_000.0] * 60, latency=0.002, rate=25e6)
    assert fit_link(probes) == (pytest.approx(0.002 + 30_000 / 25e6), inf)
    assert fit_link(probes, rate=25e6) == pytest.approx((0.002, 25e6))
    sizes = np.random.default_rng(0).uniform(1e4, 5e4, 100)
    others = [SampleProbe(0.003, 0.001, size) for size in sizes]  # other traffic, not ours
    waits = np.random.default_rng(1).uniform(0.001, 0.003, 100)
    others = [probe._replace(seconds=wait) for probe, wait in zip(others, waits, strict=True)]
    assert fit_link(others)[1] == inf
    nothing = [SampleProbe(0.001, 0.001, 0.0)] * 20
    assert fit_link(nothing) == (0.0, inf)


def test_a_samples_costs_are_those_of_a_worker_that_does_nothing_else():
    idle = LoopTimes(50, 0.1, 0.0, 0.05, 0.0, 0.01)  # others take a tenth of a core anyway
    cold = LoopTimes(50, 0.2, 0.2, 0.001, 0.13, 0.06)
    found = sample_costs(cold, idle, 4, 0.01)
    assert found == pytest.approx((0.07 / 4, 0.12 / 4, 0.04 / 4))
    assert sample_costs(cold._replace(other_core_seconds=0.0), idle, 4, 0.01).other_seconds == 0
    assert (
        sample_costs(cold._replace(other_core_seconds=1.0), idle, 4, 0.01).other_seconds
        == found.wait_seconds
    )
    assert sample_costs(cold._replace(worker_core_seconds=0.3), idle, 4, 0.01)[0] == 0


def test_contention_from_a_crowded_loop():
    work = (
        32 * COSTS.prepare_seconds
        + COSTS.collate_seconds
        + COSTS.worker_seconds
        + COSTS.receive_seconds
        + COSTS.step_core_seconds
    )
    taken = 1.3 * work

    def crowded(busy: float) -> LoopTimes:
        return LoopTimes(
            50, taken / busy, 0.0, COSTS.step_core_seconds, taken - COSTS.step_core_seconds
        )

    assert contention(COSTS, crowded(4.0), cores=4) == pytest.approx(1.3)
    # half as busy beyond the first core
    assert contention(COSTS, crowded(2.5), cores=4) == pytest.approx(1.6)
    assert (
        contention(COSTS, crowded(1.1), cores=4) == contention(COSTS, crowded(1.0), cores=1) == 1.0
    )


def test_a_disk_has_a_rate(tmp_path):
    assert read_rate(tmp_path / "new", entry_bytes=150_000.5) > 1e6
    assert list((tmp_path / "new").iterdir()) == []


OPTIONS = MeasurementOptions(seconds=0.15, memory_bytes=1 << 22, cores=2)


def measure(source: Source, folder: Path, *, workers: int = 0, **loader: Any) -> Any:
    seen: list[int] = []
    runs: list[int] = []

    def train(batches: Watched) -> None:
        before = int(source.reads.sum())
        for _, indices in batches:
            seen.extend(indices.tolist())
        runs.append(int(source.reads.sum()) - before)

    loader = {"batch_size": 4, "num_workers": workers, "shuffle": True, **loader}
    with MeasuredCache(OPTIONS.memory_bytes) as cache:
        result = measure_stalls(
            DataLoader(source, **loader),
            train=train,
            cache=cache,
            directory=str(folder),
            options=OPTIONS,
        )
    return result, runs, seen


def test_each_part_of_a_data_set_has_samples_of_its_own():
    parts = ConcatDataset([Source(20), Subset(Source(30), range(10))])
    with MeasuredCache(OPTIONS.memory_bytes) as cache:
        for _ in range(2):
            batches = list(
                cache.loader_over(DataLoader(parts, batch_size=5), list(range(30)), num_workers=0)
            )
            assert torch.cat([index for _, index in batches]).tolist() == [*range(20), *range(10)]


@pytest.mark.parametrize("workers", [0, 1])
def test_all_of_it(tmp_path, workers):
    wait = 0.01  # long beside what a busy machine adds
    source = Source(400, wait=wait)
    result, runs, seen = measure(source, tmp_path, workers=workers)
    synthetic, *cold, cached = runs
    assert synthetic == 0 and cached == 0 and all(reads > 0 for reads in cold) and len(cold) == 2
    assert set(seen) <= set(range(400))
    assert result.setup.num_workers == workers and result.setup.cores == 2
    assert result.costs.num_items == 400 and result.costs.batch_size == 4
    assert result.cold.batch_seconds > 4 * wait / max(1, workers) * 0.9
    assert result.costs.latency_seconds > 0.75 * wait
    assert result.stalls.total_seconds == pytest.approx(result.cold.batch_seconds)
    assert result.stalls.fetch_seconds > 0.5 * (
        result.cold.batch_seconds - result.cached.batch_seconds
    )
    record = json.loads(json.dumps(result.to_dict()))
    assert record["costs"]["batch_size"] == 4 and record["stalls"]["fraction"] > 0

    rows = what_if(result.costs, result.setup)
    console = Console(record=True, width=120, file=io.StringIO())
    print_report(result, rows, console=console)
    text = console.export_text()
    assert (
        "of training waits for data" in text and "cache in memory" in text and "accelerator" in text
    )
    save_png(tmp_path / "stalls.png", result, rows)
    assert (tmp_path / "stalls.png").read_bytes().startswith(b"\x89PNG")


def test_what_cannot_be_measured_is_said(tmp_path):
    with pytest.raises(ValueError, match="at least 8 batches; this data set has 20 samples"):
        measure(Source(20), tmp_path)
    with pytest.raises(ValueError, match="memory_bytes"):
        MeasurementOptions(memory_bytes="much")

"""Numbers of workers chosen from trials that are made up, and the instruments of the real ones."""

from __future__ import annotations

import multiprocessing
import os
import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler

from lightning_topt.data import loader_tuning
from lightning_topt.data.loader_tuning import (
    LoaderTrials,
    PreparationCost,
    TrialLoader,
    choose_prefetch_factor,
    cores_per_rank,
    find_num_workers,
    memory_for_waiting,
    nbytes,
    prepare,
    tune_loader,
)
from lightning_topt.data.stalls.loop import LoopTimes
from tests.clock import Clock


class Trials:
    """Trials whose batches take `seconds(workers)`; `disturbed` says which of them take thrice
    that.
    """

    def __init__(self, seconds, *, receive=0.001, disturbed=(), time_for=100):
        self.seconds, self.receive, self.disturbed, self.time_for = (
            seconds,
            receive,
            disturbed,
            time_for,
        )
        self.done = []

    def __call__(self, count):
        factor = 3 if len(self.done) in self.disturbed else 1
        self.done.append(count)
        return LoopTimes(10, factor * self.seconds(count), 0.0, self.receive, 0.0)

    def choose(self, prepare_seconds, most):
        def is_time_left():
            return len(self.done) < self.time_for

        return find_num_workers(prepare_seconds, most=most, trial=self, is_time_left=is_time_left)


def scaling(*, up_to):
    return lambda count: 1 / min(count, up_to)


@pytest.mark.parametrize(
    ("up_to", "most", "best", "tried"),
    [
        (100, 1, 1, [1]),
        (100, 2, 2, [1, 2]),
        (100, 6, 6, [1, 2, 4, 6, 5]),
        (1, 64, 1, [1, 2, 2]),
        (4, 64, 4, [1, 2, 4, 8, 8, 3]),
        (6, 64, 6, [1, 2, 4, 8, 16, 16, 6, 5]),
    ],
)
def test_the_least_number_that_is_nearly_the_best(up_to, most, best, tried):
    trials = Trials(scaling(up_to=up_to))
    found = trials.choose(1.0, most)
    assert found.num_workers == best and trials.done == tried
    assert found.batch_seconds == {0: 1.0} | {count: 1 / min(count, up_to) for count in tried}
    assert f"of at most {most}" in found.reason


def test_no_workers_where_handing_over_costs_more_than_preparing():
    trials = Trials(scaling(up_to=64), receive=0.001)
    assert trials.choose(0.0019, 64).num_workers == 0 and trials.done == [1]
    assert trials.choose(0.0021, 64).num_workers > 0


def test_a_disturbed_trial_is_repeated():
    trials = Trials(scaling(up_to=100), disturbed=(2,))
    assert trials.choose(1.0, 4).num_workers == 4 and trials.done == [1, 2, 4, 4, 3]


def test_without_time_the_rest_is_estimated_and_said():
    trials = Trials(scaling(up_to=100), time_for=2, receive=0.125)
    found = trials.choose(1.0, 64)
    # 1/8 s is what the training process needs to receive
    assert trials.done == [1, 2] and found.num_workers == 8
    assert "estimated" in found.reason


def test_a_slow_loader_is_not_tried_when_the_time_is_over():
    trials = Trials(scaling(up_to=100), time_for=0)
    assert trials.choose(1.0, 8).num_workers == 8 and not trials.done
    # which is quick, and would be a bad guess
    assert trials.choose(0.001, 8).num_workers == 0 and trials.done == [1]


def test_without_room_for_a_batch_there_are_no_workers():
    trials = Trials(scaling(up_to=4))
    assert trials.choose(1.0, 0).num_workers == 0 and not trials.done


def prepared(*, spread=0.0, batch_bytes=1000.0, seconds=1.0):
    return PreparationCost(4, seconds, seconds, spread, batch_bytes)


@pytest.mark.parametrize(
    ("spread", "workers", "memory", "expected"),
    [
        (0.0, 4, 1e9, 2),
        (0.6, 4, 1e9, 3),
        (50.0, 4, 1e9, 8),
        (0.6, 4, 8000, 2),
        (0.6, 4, 4000, 1),
        (0.6, 4, 10, 1),
    ],
)
def test_prefetching_covers_the_spread_within_the_memory(spread, workers, memory, expected):
    assert choose_prefetch_factor(prepared(spread=spread), workers, memory_bytes=memory) == expected


def test_cores_are_shared_by_ranks(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(9)), raising=False)
    assert [cores_per_rank(ranks) for ranks in (1, 2, 16)] == [9, 4, 1]


def test_the_memory_is_a_share_of_what_is_free(monkeypatch, tmp_path):
    monkeypatch.setattr(
        loader_tuning.psutil, "virtual_memory", lambda: SimpleNamespace(available=1000)
    )
    monkeypatch.setattr(loader_tuning.shutil, "disk_usage", lambda _: SimpleNamespace(free=60))
    monkeypatch.setattr(loader_tuning, "_SHARED_MEMORY", tmp_path / "none")
    assert memory_for_waiting(2) == 50
    monkeypatch.setattr(loader_tuning, "_SHARED_MEMORY", tmp_path)
    assert memory_for_waiting(2) == 15


class Items(Dataset):
    """Item i is a row of i; which processes have read is kept in shared memory."""

    def __init__(self, length=64, *, error=None):
        self.length, self.error, self.clock = length, error, None
        self.readers = torch.zeros(2, dtype=torch.int64).share_memory_()

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        self.readers[int(os.getpid() != MAIN)] += 1
        if self.clock is not None:
            self.clock.now += 0.01
        if self.error is not None:
            raise self.error
        return torch.full((4,), float(index)), np.zeros(2)


MAIN = os.getpid()
NUMBERS = {"cores": 8, "memory_bytes": 1e9, "seconds": 1.0}


@pytest.fixture
def made_up(monkeypatch):
    """`LoaderTrials` that prepare in 1 s, scale with workers, and draw from the random states."""
    made = []

    class MadeUp(Trials):
        def __init__(self, loader, *, seconds):
            super().__init__(scaling(up_to=100))
            made.append(self)
            self.given_seconds = seconds

        def prepare(self):
            random.random(), np.random.rand(), torch.rand(1)
            return prepared(spread=1.0)

        run = Trials.__call__

    monkeypatch.setattr(loader_tuning, "LoaderTrials", MadeUp)
    return made


def test_numbers_are_taken_without_a_trial(made_up):
    loader = DataLoader(Items(), 4)
    for workers, ahead in ((0, None), (0, "auto"), (3, 5), (3, None)):
        choice = tune_loader(loader, num_workers=workers, prefetch_factor=ahead, **NUMBERS)
        assert (choice.num_workers, choice.prefetch_factor) == (
            workers,
            None if workers == 0 else ahead,
        )
        assert "given" in choice.reason and not choice.batch_seconds
    assert not made_up
    with pytest.raises(ValueError, match="prefetch_factor"):
        tune_loader(loader, num_workers=0, prefetch_factor=3, **NUMBERS)


def test_what_is_auto_is_tried_within_cores_memory_and_seconds(made_up):
    loader = DataLoader(Items(), 4)
    choice = tune_loader(loader, num_workers="auto", prefetch_factor="auto", **NUMBERS)
    assert (choice.num_workers, choice.prefetch_factor) == (8, 4) and choice.batch_seconds[
        8
    ] == 1 / 8
    # the preparation, 1, 2, 4, 8 and one repeated
    assert made_up[0].given_seconds == pytest.approx(1 / 6)
    choice = tune_loader(
        loader, num_workers="auto", prefetch_factor=7, **NUMBERS | {"memory_bytes": 3500}
    )
    assert (choice.num_workers, choice.prefetch_factor) == (3, 7)
    choice = tune_loader(
        loader, num_workers="auto", prefetch_factor=7, **NUMBERS | {"memory_bytes": 1}
    )
    assert (choice.num_workers, choice.prefetch_factor) == (0, None)
    choice = tune_loader(loader, num_workers=5, prefetch_factor="auto", **NUMBERS)
    assert (choice.num_workers, choice.prefetch_factor) == (5, 4) and not made_up[-1].done


def test_a_daemon_has_no_workers(made_up, monkeypatch):
    monkeypatch.setattr(multiprocessing, "current_process", lambda: SimpleNamespace(daemon=True))
    choice = tune_loader(
        DataLoader(Items(), 4), num_workers="auto", prefetch_factor="auto", **NUMBERS
    )
    assert (
        (choice.num_workers, choice.prefetch_factor) == (0, None)
        and "daemon" in choice.reason
        and not made_up
    )


@pytest.mark.parametrize(("batch_size", "size"), [(64, 8), (5, 5), (1, 1)])
def test_batches_grow_to_an_eighth_of_the_time(monkeypatch, batch_size, size):
    clock, data = Clock(), Items()
    data.clock = clock
    monkeypatch.setattr(loader_tuning, "time", clock)
    result = prepare(TrialLoader.of(DataLoader(data, batch_size)), range(64), seconds=0.8)
    assert result.trial_size == size and result.spread == pytest.approx(0, abs=1e-6)
    assert result.seconds == result.core_seconds == pytest.approx(0.01 * size)
    assert result.batch_bytes == batch_size * 32
    assert clock.now == pytest.approx(0.8, abs=0.2)


def batches_of(data):
    return BatchSampler(RandomSampler(data, generator=torch.Generator().manual_seed(3)), 4, False)


LOADERS = {
    "batches": lambda data: DataLoader(data, 4),
    "own batches": lambda data: DataLoader(data, batch_sampler=[[1, 2, 3], [4, 5, 6]]),
    "sampler of batches": lambda data: DataLoader(data, batch_sampler=batches_of(data)),
    "no batches": lambda data: DataLoader(data, batch_size=None),
}


@pytest.mark.parametrize("kind", LOADERS)
def test_trials_read_in_other_processes_and_leave_the_loader_alone(kind):
    data = Items()
    loader = LOADERS[kind](data)
    before = [batch for batch in loader.batch_sampler] if kind == "own batches" else None
    trials = LoaderTrials(loader, seconds=0.05)
    assert (
        trials.loader.batch_size
        == {"batches": 4, "sampler of batches": 4, "own batches": 3, "no batches": 1}[kind]
    )
    result = trials.prepare()
    assert result.batch_bytes == trials.loader.batch_size * 32 and result.seconds > 0
    times = trials.run(1)
    assert times.batches >= 4 and times.batch_seconds > 0 and times.core_seconds > 0
    assert data.readers[0] == 0 and data.readers[1] > 0
    assert loader.num_workers == 0 and (before is None or list(loader.batch_sampler) == before)


def test_the_generators_of_an_unknown_batch_sampler_are_as_before():
    class Own:
        def __init__(self, data):
            self.sampler = RandomSampler(data, generator=torch.Generator().manual_seed(3))

        def __iter__(self):
            return (list(part) for part in zip(*[iter(self.sampler)] * 2, strict=False))

    loaders = [DataLoader(Items(), batch_sampler=Own(Items())) for _ in range(2)]
    assert TrialLoader.of(loaders[0]).batch_size == 2
    assert list(loaders[0].batch_sampler) == list(loaders[1].batch_sampler)


class OwnError(ValueError):
    pass


@pytest.mark.parametrize(
    ("error", "expected"), [(OwnError("no such file"), OwnError), (None, None)]
)
def test_what_the_data_set_raises_comes_through(error, expected):
    trials = LoaderTrials(DataLoader(Items(error=error), 4), seconds=0.01)
    if expected:
        with pytest.raises(expected, match="no such file"):
            trials.prepare()
    else:
        assert trials.prepare().trial_size >= 1


def test_a_process_that_ends_is_an_error():
    class Ending(Items):
        def __getitem__(self, index):
            os._exit(3)

    with pytest.raises(RuntimeError, match="ended"):
        LoaderTrials(DataLoader(Ending(), 4), seconds=0.01).prepare()


def test_bytes_of_a_batch():
    batch = {
        "a": torch.zeros(4),
        "b": [np.zeros(2), (torch.zeros(1, dtype=torch.int8),)],
        "c": "text",
    }
    assert 16 + 16 + 1 + 4 < nbytes(batch) < 16 + 16 + 1 + 100
    assert nbytes(lambda: None) > 0

"""Several jobs prepare their batches together: they start late, are slow, stop, fail and die."""

from __future__ import annotations

import gc
import os
import signal
import warnings
from pathlib import Path

import numpy as np
import pytest
from torch.utils.data import default_collate

from lightning_topt.data.cache import sample_codec
from lightning_topt.data.coordinated.coordinator_link import is_supported
from lightning_topt.data.coordinated.loader import CoordinationRefused
from tests.data.jobs import (
    CONTEXT,
    NUM_BATCHES,
    NUM_SAMPLES,
    Job,
    Samples,
    Shuffled,
    coordinator_at,
    digest,
    expected,
    kept,
    lines,
    loader_of,
)
from tests.processes import halt, wait_for_end, wait_until
from tests.shared_memory import shared_files

pytestmark = pytest.mark.skipif(not is_supported(), reason="needs Linux")


@pytest.fixture(autouse=True)
def nothing_is_left(tmp_path):
    """No file, socket, shared memory or process of the package after any test."""
    shared = shared_files()
    yield
    assert shared_files() <= shared
    assert not (tmp_path / "meet").exists()
    wait_until(
        lambda: (
            loader_of(Samples(), tmp_path / "meet")._address[1:]
            not in Path("/proc/net/unix").read_text()
        )
    )
    gc.collect()  # frames of expected exceptions hold batches
    assert kept(os.getpid()) == []


def has_got(log, number):
    """Whether a job has said that it got so many batches; it may be writing at the moment."""
    said = lines(log)
    return bool(said) and said[0] >= number


@pytest.fixture
def start(tmp_path):
    """Starts jobs that meet in one directory, and ends them."""
    jobs: list[Job] = []

    def start_job(dataset=None, *, job=None, **changes):
        loader = loader_of(dataset or Samples(), tmp_path / "meet", **changes)
        jobs.append(Job(loader, **(job or {})))
        return jobs[-1]

    yield start_job
    for job in jobs:
        job.end()


def test_three_jobs_prepare_each_batch_once_and_each_gets_all_of_them(tmp_path, start):
    logs = [tmp_path / f"log{number}" for number in range(3)]
    barrier, workers = CONTEXT.Barrier(3), CONTEXT.Barrier(3)
    jobs = [
        start(Samples(log, seconds=0.01, barrier=workers), job={"epochs": 2, "barrier": barrier})
        for log in logs
    ]
    results = [job.result() for job in jobs]
    for result in results:
        assert result.batches == expected(2)
        assert result.own + result.others == 2 * NUM_BATCHES and result.warned == []
    drawn = [lines(log) for log in logs]
    assert sorted(index for each in drawn for index in each) == sorted([*range(NUM_SAMPLES)] * 2)
    assert all(drawn)
    (coordinator,) = results[0].coordinators | results[1].coordinators | results[2].coordinators
    assert wait_for_end(coordinator)


def in_own_memory(samples):
    batch = default_collate(samples)
    # /dev/shm may be smaller than a batch, which goes to a file of its own anyway
    assert not batch["x"].is_shared()
    return batch


def test_a_job_alone_gets_the_same_bits(tmp_path, start):
    assert start(num_workers=2, collate_fn=in_own_memory).result().batches == expected()
    unsupported = loader_of(Samples(), tmp_path)
    unsupported._may_join = False
    with pytest.warns(UserWarning, match="without the other jobs"):
        assert [[digest(batch) for batch in unsupported]] == expected()


@pytest.mark.parametrize(("number", "timeout_seconds"), [(signal.SIGKILL, 30), (signal.SIGSTOP, 3)])
def test_what_a_killed_or_stopped_job_had_claimed_is_prepared_by_others(
    tmp_path, start, number, timeout_seconds
):
    logs = [tmp_path / f"log{number}" for number in range(3)]
    victim = start(Samples(logs[0], hang_at=0), timeout_seconds=timeout_seconds)
    wait_until(lambda: lines(logs[0]))  # it holds the first batch, and will for ten minutes
    jobs = [start(Samples(log), timeout_seconds=timeout_seconds) for log in logs[1:]]
    wait_until(lambda: lines(logs[1]) or lines(logs[2]))
    victim.signal(number)
    for result in [job.result() for job in jobs]:
        assert result.batches == expected() and result.warned == []
    assert len(lines(logs[0])) == 1


@pytest.mark.parametrize(
    "whole", [True, False], ids=["with its workers", "and its workers end by themselves"]
)
def test_a_killed_job_takes_its_workers_with_it(tmp_path, start, whole):
    log = tmp_path / "log"
    victim = start(
        Samples(log, seconds=0.05), job={"seconds": 0.2, "log": tmp_path / "got"}, num_workers=2
    )
    wait_until(lambda: lines(tmp_path / "got"))
    workers = [
        int(pid)
        for pid in Path(f"/proc/{victim.process.pid}/task/{victim.process.pid}/children")
        .read_text()
        .split()
    ]
    assert len(workers) == 2
    os.kill(victim.process.pid, signal.SIGKILL)
    if whole:
        for pid in workers:
            os.kill(pid, signal.SIGKILL)
    assert all(wait_for_end(pid) for pid in workers)


def test_jobs_that_come_late_or_are_slow_get_everything(tmp_path, start):
    first = start(job={"seconds": 0.02, "log": tmp_path / "got"})
    wait_until(lambda: has_got(tmp_path / "got", 3))
    logs = [tmp_path / "late", tmp_path / "slow"]
    others = [start(Samples(logs[0])), start(Samples(logs[1]), job={"seconds": 0.05})]
    for job in (first, *others):
        assert job.result().batches == expected()


@pytest.mark.parametrize("batches_kept", [0.5, 2, 5])
def test_a_slow_job_does_not_hold_up_the_others_nor_take_more_memory_than_agreed(
    tmp_path, start, batches_kept
):
    barrier, got, log = CONTEXT.Barrier(2), tmp_path / "got", tmp_path / "log"
    nbytes = sample_codec.size_of(sample_codec.encode(default_collate([Samples()[0]] * 2)))
    memory = int(batches_kept * nbytes)
    slow = start(job={"barrier": barrier, "log": got, "seconds": 0.01}, memory_bytes=memory)
    fast = start(Samples(log), job={"barrier": barrier, "epochs": 3}, memory_bytes=1 << 20)
    wait_until(lambda: lines(got))
    halt(slow.process.pid, signal.SIGSTOP)  # its worker goes on
    result = fast.result()
    os.kill(slow.process.pid, signal.SIGCONT)
    assert result.batches == expected(3) and slow.result().batches == expected()
    # each worker may just have handed one over
    assert (batches_kept > 1) <= result.kept_bytes <= memory + 2 * nbytes
    assert result.warned == []


def test_without_the_coordinator_jobs_go_on_alone_warn_once_and_meet_again_in_the_next_epoch(
    tmp_path, start
):
    barrier = CONTEXT.Barrier(2)
    logs, is_killed = [tmp_path / "a", tmp_path / "b"], tmp_path / "killed"
    options = {"barrier": barrier, "epochs": 3, "seconds": 0.03, "pause": (2, is_killed)}
    jobs = [start(job=options | {"log": log}) for log in logs]
    wait_until(lambda: all(has_got(log, 2) for log in logs))
    coordinator = coordinator_at(tmp_path / "meet")
    halt(coordinator, signal.SIGKILL)
    is_killed.touch()
    for result in [job.result() for job in jobs]:
        assert result.batches == expected(3)
        assert len(result.warned) == 1 and "without the other jobs" in result.warned[0]
        assert 0 < result.alone <= NUM_BATCHES and len(result.coordinators) == 2


def test_a_coordinator_that_does_not_answer_is_given_up(start, tmp_path):
    is_stopped = tmp_path / "stopped"
    job = start(job={"log": tmp_path / "got", "pause": (1, is_stopped)}, timeout_seconds=3)
    wait_until(lambda: lines(tmp_path / "got"))
    coordinator = coordinator_at(tmp_path / "meet")
    halt(coordinator, signal.SIGSTOP)
    is_stopped.touch()
    try:
        result = job.result()
    finally:
        os.kill(coordinator, signal.SIGKILL)
    assert result.batches == expected() and len(result.warned) == 1 and result.alone > 0


def test_the_coordinator_is_a_light_process(tmp_path):
    loader = loader_of(Samples(), tmp_path / "meet")
    next(iter(loader))
    pid = loader._membership.coordinator_pid
    assert "torch" not in Path(f"/proc/{pid}/maps").read_text()
    resident = int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")
    assert resident < 40 << 20
    loader.close()
    assert wait_for_end(pid)


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"fingerprint": "other"}, "the data set"),
        ({"seed": 8}, "the seed"),
        ({"batches": Shuffled(3)}, "list of batches"),
    ],
)
def test_jobs_with_other_batches_are_refused(tmp_path, change, what):
    first = loader_of(Samples(), tmp_path / "meet")
    next(iter(first))
    second = loader_of(Samples(), tmp_path / "meet", **change)
    for _ in range(2):
        with pytest.raises(CoordinationRefused, match=what):
            list(second)
    other_group = loader_of(Samples(), tmp_path / "meet", group="rank 1", **change)
    next(iter(other_group))
    for loader in (first, second, other_group):
        loader.close()


class Broken(Samples):
    def __getitem__(self, index):
        if index == 5:
            raise KeyError("sample 5 is broken")
        if index == 6 and self.log is not None:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


def test_what_the_data_set_raises_is_raised_at_its_batch(tmp_path):
    loader = loader_of(Broken(), tmp_path / "meet")
    position = next(number for number, indices in enumerate(Shuffled()(0)) if 5 in indices)
    got = []
    with pytest.raises(KeyError, match="sample 5 is broken"):
        got.extend(digest(batch) for batch in loader)
    assert got == expected()[0][:position]
    loader.close()


def test_a_killed_worker_is_an_error_and_not_a_hang(tmp_path):
    loader = loader_of(Broken(tmp_path / "log"), tmp_path / "meet", batches=lambda epoch: [[6]])
    with pytest.raises(RuntimeError, match="exit code -9"):
        list(loader)
    loader.close()


def test_an_iteration_goes_on_where_a_checkpoint_was_taken(tmp_path):
    loader = loader_of(Samples(), tmp_path / "meet")
    iterator = iter(loader)
    got = [digest(next(iterator)) for _ in range(5)]
    state = loader.state_dict()
    loader.close()
    resumed = loader_of(Samples(), tmp_path / "meet")
    resumed.load_state_dict(state)
    resumed.set_epoch(0)  # as Lightning does
    assert [
        got + [digest(batch) for batch in resumed],
        [digest(batch) for batch in resumed],
    ] == expected(2)
    assert resumed.state_dict() == {"epoch": 2, "batch": 0}
    resumed.close()


def test_an_iteration_that_was_given_up_does_not_disturb_the_next(tmp_path):
    loader = loader_of(Samples(), tmp_path / "meet")
    abandoned = iter(loader)
    next(abandoned)
    loader.set_epoch(0)
    assert [[digest(batch) for batch in loader], [digest(batch) for batch in loader]] == expected(2)
    with pytest.raises(RuntimeError, match="newer iteration"):
        next(abandoned)
    loader.close()


def test_changing_a_batch_in_place_changes_no_other_jobs(tmp_path):
    loaders = [loader_of(Samples(), tmp_path / "meet") for _ in range(2)]
    (first, second) = (iter(loader) for loader in loaders)
    loaders[1]._joined()
    next(first)["x"].zero_()
    assert digest(next(second)) == expected()[0][0]
    for loader in loaders:
        loader.close()


def as_pair(samples):
    return (samples, {"name": ["photograph"], "image": np.arange(3, dtype=np.uint8)})


def test_batches_of_any_kind_in_processes_that_are_not_forked(tmp_path):
    loader = loader_of(
        [3, 4, 5],
        tmp_path / "meet",
        batches=Thirds(),
        collate_fn=as_pair,
        multiprocessing_context="forkserver",
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # they reach the coordinator
        batches = list(loader)
    loader.close()
    assert [batch[0] for batch in batches] == [[3], [4], [5]]
    assert batches[0][1]["name"] == ["photograph"] and batches[0][1]["image"].tolist() == [0, 1, 2]


class Thirds:
    def __call__(self, epoch):
        return [[0], [1], [2]]


def test_a_batch_larger_than_the_memory_is_warned_of(tmp_path):
    loader = loader_of(Samples(), tmp_path / "meet", memory_bytes="10 B")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert [[digest(batch) for batch in loader]] == expected()
    assert ["memory_bytes=10" in str(warning.message) for warning in caught] == [True]
    loader.close()

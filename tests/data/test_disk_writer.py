"""The process that copies samples from memory to disk: what it copies, and what happens to whom
when somebody dies.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import time
import warnings
from functools import partial

import pytest
import torch

from lightning_topt.communication.rank_watch import process_start
from lightning_topt.data.cache import disk_writer, segment_store
from lightning_topt.data.cache.sample_cache import SampleCache
from lightning_topt.data.cache.sample_codec import decode, encode, size_of
from tests import processes

ITEMS = 40
wait_until = partial(processes.wait_until, seconds=120)


@pytest.fixture(autouse=True)
def usual_priority(monkeypatch):
    """Else the processes get no time while other tests keep all cores busy."""
    monkeypatch.setattr(disk_writer, "AT_LOWEST_PRIORITY", False)


def sample(item: int) -> tuple[torch.Tensor, int]:
    return torch.full((500,), item), item


SIZE = size_of(encode(sample(0)))


def make(folder, *, memory: int = ITEMS, disk: int = ITEMS, behind: bool = True) -> SampleCache:
    return SampleCache(
        folder,
        fingerprint="f",
        num_items=ITEMS,
        memory_bytes=memory * SIZE,
        disk_bytes=disk * SIZE,
        write_behind=behind,
    )


def fill(cache: SampleCache, items=range(ITEMS)) -> None:
    for item in items:
        assert cache.get(item) is None
        cache.put(item, encode(sample(item)))


def on_disk(folder) -> list[int]:
    """What another run finds, each of it right."""
    cache = make(folder, memory=0, behind=False)
    entries = {item: cache.get(item) for item in range(ITEMS)}
    cache.close()
    for item, entry in entries.items():
        if entry is not None:
            tensor, number = decode(entry)
            assert number == item and torch.equal(tensor, sample(item)[0])
    return [item for item, entry in entries.items() if entry is not None]


def test_everything_is_on_disk_after_close(tmp_path):
    cache = make(tmp_path)
    fill(cache)
    assert cache.statistics().stored == ITEMS
    cache.close()
    cache.close()
    assert on_disk(tmp_path) == list(range(ITEMS))


def test_it_runs_at_the_lowest_priority(tmp_path, monkeypatch):
    monkeypatch.setattr(disk_writer, "AT_LOWEST_PRIORITY", True)
    cache = make(tmp_path)
    wait_until(lambda: os.sched_getscheduler(cache._writer.process.pid) == os.SCHED_IDLE)
    cache._writer.process.kill()  # it may not see soon that this is the end
    with pytest.warns(UserWarning, match="had not written"):
        cache.close()


@pytest.mark.parametrize(("memory", "disk"), [(10, 25), (25, 10), (ITEMS, 10)])
def test_both_tiers_hold_what_they_hold_when_written_at_once(tmp_path, memory, disk):
    found = []
    for behind in (False, True):
        folder = tmp_path / str(behind)
        cache = make(folder, memory=memory, disk=disk, behind=behind)
        fill(cache)
        cache.close()
        found.append(on_disk(folder))
    assert found[0] == found[1] == list(range(disk))


def test_workers_only_claim_and_do_not_keep_it_alive(tmp_path, monkeypatch):
    monkeypatch.setattr(disk_writer, "CLOSE_SECONDS", 120)
    cache = make(tmp_path)
    twin = pickle.loads(pickle.dumps(cache))
    assert twin.write_behind and twin._writer is None
    if (child := os.fork()) == 0:
        fill(cache, range(10))
        time.sleep(600)
        os._exit(0)
    fill(twin, range(10, ITEMS))
    wait_until(lambda: cache.statistics().memory_items == ITEMS)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # it does not wait for `CLOSE_SECONDS`, and then say so
        cache.close()  # while the child lives
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    twin.close()
    assert on_disk(tmp_path) == list(range(ITEMS))


def test_of_two_one_copies_and_the_other_takes_over(tmp_path):
    one, two = make(tmp_path), make(tmp_path)
    fill(one, range(10))
    wait_until(lambda: two.statistics().disk_items == 10)
    one.close()
    fill(two, range(10, ITEMS))
    wait_until(lambda: two.statistics().disk_items == ITEMS)
    two.close()
    assert on_disk(tmp_path) == list(range(ITEMS))


def _fill_and_die(folder, out):
    cache = make(folder)
    fill(cache)
    out.send(cache._writer.process.pid)
    os.kill(os.getpid(), signal.SIGKILL)


def test_it_finishes_after_its_parent_was_killed_and_then_ends(tmp_path):
    fork = multiprocessing.get_context("fork")
    ours, its = fork.Pipe(duplex=False)
    job = fork.Process(target=_fill_and_die, args=(tmp_path, its))
    job.start()
    pid = ours.recv()
    job.join()
    assert job.exitcode == -signal.SIGKILL
    wait_until(lambda: not process_start(pid))
    assert on_disk(tmp_path) == list(range(ITEMS))


def test_when_it_is_killed_samples_are_missing_on_disk_and_written_by_the_next_run(tmp_path):
    cache = make(tmp_path)
    cache._writer.process.kill()
    cache._writer.process.wait()
    fill(cache)
    with pytest.warns(UserWarning, match="had not written"):
        cache.close()
    assert on_disk(tmp_path) == []
    again = make(tmp_path)
    fill(again)
    again.close()
    assert on_disk(tmp_path) == list(range(ITEMS))


def test_without_a_place_for_its_lock_it_copies_all_the_same(tmp_path):
    (tmp_path / "f" / "writer.lock").mkdir(parents=True)
    cache = make(tmp_path)
    fill(cache)
    cache.close()
    assert on_disk(tmp_path) == list(range(ITEMS))


def test_it_tries_again_when_there_is_no_other_time(tmp_path, monkeypatch):
    """A lock that was held a moment ago, by a process that was stopped, may be free when the job
    ends.
    """
    monkeypatch.setattr(segment_store, "_warned", {})
    cache = make(tmp_path, behind=False, memory=ITEMS, disk=0)
    fill(cache)
    other = make(tmp_path, behind=False, memory=0)
    disk = other.disk
    disk.claim(range(ITEMS), [SIZE] * ITEMS)
    disk.file.pause()
    assert disk_writer.copy_claimed(cache.memory, disk) == 0
    disk.file.end_pause()
    assert disk_writer.copy_claimed(cache.memory, disk) == ITEMS
    other.close()
    assert on_disk(tmp_path) == list(range(ITEMS))

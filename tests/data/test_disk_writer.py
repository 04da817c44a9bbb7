"""The process that copies samples from memory to disk: what it copies, and what happens to whom when somebody dies."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import time

import pytest
import torch

from lightning_topt.communication.node.page import process_start
from lightning_topt.data.cache import disk_writer
from lightning_topt.data.cache.sample_cache import SampleCache
from lightning_topt.data.cache.sample_codec import decode, encode, size_of
from tests.processes import wait_until

ITEMS = 40


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


def test_it_copies_while_the_job_runs(tmp_path):
    cache = make(tmp_path)
    fill(cache)
    wait_until(lambda: cache.statistics().disk_items == ITEMS)
    assert os.sched_getscheduler(cache._writer.process.pid) == os.SCHED_IDLE
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


def test_workers_only_claim_and_do_not_keep_it_alive(tmp_path):
    cache = make(tmp_path)
    twin = pickle.loads(pickle.dumps(cache))
    assert twin.write_behind and twin._writer is None
    if (child := os.fork()) == 0:
        fill(cache, range(10))
        time.sleep(60)
        os._exit(0)
    fill(twin, range(10, ITEMS))
    wait_until(lambda: cache.statistics().memory_items == ITEMS)
    start = time.monotonic()
    cache.close()  # while the child lives
    assert time.monotonic() - start < 20
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


KILLED = """
import os, sys
from pathlib import Path
from tests.data.test_disk_writer import fill, make
cache = make(Path(sys.argv[1]))
fill(cache)
print(cache._writer.process.pid, flush=True)
os.kill(os.getpid(), 9)
"""


def test_it_finishes_after_its_parent_was_killed_and_then_ends(tmp_path):
    run = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], capture_output=True, text=True, check=False)
    assert run.returncode == -signal.SIGKILL, run.stderr
    pid = int(run.stdout)
    wait_until(lambda: not process_start(pid))
    assert on_disk(tmp_path) == list(range(ITEMS))


def test_when_it_is_killed_samples_are_missing_on_disk_and_written_by_the_next_run(tmp_path, monkeypatch):
    monkeypatch.setattr(disk_writer, "SWEEP_SECONDS", 3600)
    cache = make(tmp_path)
    cache._writer.process.kill()
    fill(cache)
    with pytest.warns(UserWarning, match="had not written"):
        cache.close()
    assert on_disk(tmp_path) == []
    again = make(tmp_path)
    fill(again)
    again.close()
    assert on_disk(tmp_path) == list(range(ITEMS))


def test_it_imports_no_torch(tmp_path):
    cache = make(tmp_path)
    fill(cache)
    wait_until(lambda: cache.statistics().disk_items == ITEMS)
    with open(f"/proc/{cache._writer.process.pid}/maps") as maps:
        assert "libtorch" not in maps.read()
    cache.close()

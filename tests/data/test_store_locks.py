"""The lock of a store's writers: the dead hold none, and one that is stopped is waited for once."""

from __future__ import annotations

import math
import multiprocessing
import os
import signal
import time

import pytest

from lightning_topt.data.cache import segment_store
from lightning_topt.data.cache.sample_codec import encode
from tests.data.test_sample_cache import make, sample
from tests.data.test_segment_store import content, open_store, payload

FORK = multiprocessing.get_context("fork")


class Clock:
    """In place of the module `time`: it is later only when somebody sleeps, or the test says so."""

    def __init__(self):
        self.now = 1000.0

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


class Holder:
    """Another process that holds every lock while it is `stopped`; seconds by its own clock."""

    def __init__(self, monkeypatch):
        self.clock, self.stopped, self._flock = Clock(), True, segment_store.fcntl.flock
        monkeypatch.setattr(segment_store, "time", self.clock)
        monkeypatch.setattr(segment_store.fcntl, "flock", self._lock)

    def _lock(self, descriptor, operation):
        if self.stopped and operation & segment_store.fcntl.LOCK_EX:
            raise BlockingIOError
        self._flock(descriptor, operation)

    def seconds(self, work):
        """Of waiting in `work`, and what it returned."""
        start = self.clock.now
        result = work()
        return self.clock.now - start, result


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(segment_store, "_warned", {})
    return tmp_path


def test_damaged_entries_wait_for_it_once_too(folder, monkeypatch):
    store = open_store(folder)
    for item in range(5):
        store.write(item, [payload(item)])
        os.pwrite(store.file.descriptor, b"\0\0", store.locate(item).offset)
    holder = Holder(monkeypatch)
    with pytest.warns(UserWarning, match="could not be dropped"):
        waited = sum(holder.seconds(lambda item=item: content(store, item))[0] for item in range(5))
    assert waited <= segment_store.LOCK_SECONDS + 0.02 and store.damaged == 5
    holder.stopped = False
    holder.clock.now += segment_store.PAUSE_SECONDS
    assert (
        content(store, 0) is None
        and store.write(0, [payload(0)])
        and content(store, 0) == payload(0)
    )


def test_samples_do_not_wait_for_a_stopped_process(folder, monkeypatch):
    """Neither those that are new, nor those that come from disk and would be taken into memory."""
    first = make(folder, memory=0)
    first.put(0, encode(sample(0)))
    cache = make(folder)
    holder = Holder(monkeypatch)

    def use(item):
        if cache.get(item) is None:
            cache.put(item, encode(sample(item)))

    with pytest.warns(UserWarning, match="not stored") as caught:
        waited = [holder.seconds(lambda item=item: use(item))[0] for item in [0, *range(20), 0]]
    assert sum(waited) <= 2 * segment_store.LOCK_SECONDS + 0.1  # once per tier
    assert sum(seconds > 0 for seconds in waited) <= 2 and len(caught) == 2
    assert cache.get(0) is not None and cache.statistics().memory_items == 0
    holder.stopped = False
    holder.clock.now += segment_store.PAUSE_SECONDS
    for item in range(20):
        use(item)
    assert cache.statistics().memory_items == cache.statistics().disk_items == 20


def _hold(path, held):
    with segment_store.StoreLock(path).held():
        held.set()
        time.sleep(600)


def test_a_lock_that_is_held_for_too_long_is_an_error_and_a_dead_holder_none(folder, monkeypatch):
    held = FORK.Event()
    holder = FORK.Process(target=_hold, args=(folder / "lock", held))
    store = open_store(folder)
    holder.start()
    assert held.wait(120)
    lock = segment_store.StoreLock(folder / "lock")
    with pytest.raises(segment_store.LockTimeout, match="another process"), lock.held(seconds=0.05):
        pass
    monkeypatch.setattr(segment_store, "LOCK_SECONDS", 0.05)
    with pytest.warns(UserWarning, match="not stored"):
        assert not store.write(0, [payload(0)])
    os.kill(holder.pid, signal.SIGKILL)
    holder.join()
    store.file._paused_until = -math.inf
    assert store.write(0, [payload(0)])

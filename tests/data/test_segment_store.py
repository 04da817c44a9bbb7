"""A tier: what is read is what was written, whatever happens to its file or its writers."""

from __future__ import annotations

import errno
import multiprocessing
import os
import random
import signal
import time

import numpy as np
import pytest

from lightning_topt.data.cache import segment_store
from lightning_topt.data.cache.segment_store import PAGE, SegmentStore, StoreFile, checksum

ITEMS = 40
FORK = multiprocessing.get_context("fork")


def payload(item, size=1000):
    return np.random.default_rng(item).bytes(size)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(segment_store, "_warned", {})
    return tmp_path


def open_store(folder, *, capacity_bytes=1 << 20, num_items=ITEMS, **options):
    descriptor = os.open(folder / "samples", os.O_RDWR | os.O_CREAT, 0o600)
    file = StoreFile(descriptor, num_items=num_items, lock=folder / "lock", **options)
    return SegmentStore(file, capacity_bytes=capacity_bytes)


def content(store, item):
    entry = store.read(item)
    return None if entry is None else entry.tobytes()


def test_written_once_and_read_back_by_another(folder):
    store = open_store(folder)
    assert store.read(3) is None and 3 not in store
    assert store.write(3, [payload(3)[:10], payload(3)[10:]])
    assert store.write(3, [payload(3)])  # already there
    again = open_store(folder)
    assert content(again, 3) == payload(3) and len(again) == 1 and again.used_bytes == 1000
    with pytest.raises(IndexError):
        again.read(ITEMS)


def test_every_flipped_bit_is_found(folder):
    """Anywhere in the file: never a wrong sample; what is lost is stored again."""
    store, rng = open_store(folder), random.Random(1)
    for item in range(ITEMS):
        store.write(item, [payload(item)])
    size = store.file.space().tail
    for _ in range(100):
        position, bit = rng.randrange(size), 1 << rng.randrange(8)
        byte = os.pread(store.file.descriptor, 1, position)[0]
        os.pwrite(store.file.descriptor, bytes([byte ^ bit]), position)
        reader = open_store(folder)
        for item in range(ITEMS):
            assert content(reader, item) in (None, payload(item))
            assert reader.write(item, [payload(item)]) and content(reader, item) == payload(item)
        os.close(reader.file.descriptor)


@pytest.mark.parametrize("size", [0, 100, PAGE + 100, 3 * PAGE, 20_000])
def test_a_file_that_was_cut_off(folder, size):
    store = open_store(folder)
    for item in range(ITEMS):
        store.write(item, [payload(item)])
    os.truncate(folder / "samples", size)
    for reader in (store, open_store(folder)):
        for item in range(ITEMS):
            assert content(reader, item) in (None, payload(item))
    store = open_store(folder)
    for item in range(ITEMS):
        assert store.write(item, [payload(item)]) and content(store, item) == payload(item)


def _write_for_ever(folder, seed, begins):
    store, rng = open_store(folder), random.Random(seed)
    begins.set()
    while True:
        for item in rng.sample(range(ITEMS), ITEMS):
            store.write(item, [payload(item)])
        for item in rng.sample(range(ITEMS), ITEMS // 2):
            store.discard(item)  # its place is written again


def test_writers_killed_at_random_moments(folder):
    """The next ones find no wrong sample, wait for no lock, store everything; no place leaks."""
    rng, found = random.Random(0), 0
    for seed in range(8):
        begin = [FORK.Event() for _ in range(2)]
        writers = [
            FORK.Process(target=_write_for_ever, args=(folder, seed + 100 * i, begin[i]))
            for i in range(2)
        ]
        for writer in writers:
            writer.start()
        assert all(begins.wait(120) for begins in begin)
        time.sleep(rng.random() * 0.02)
        for writer in writers:
            os.kill(writer.pid, signal.SIGKILL)
            writer.join()
        store = open_store(folder)
        for item in range(ITEMS):
            found += item in store
            assert content(store, item) in (None, payload(item))
        assert store.used_bytes <= ITEMS * 1000
    assert found
    store = open_store(folder)
    for item in range(ITEMS):
        assert store.write(item, [payload(item)]) and content(store, item) == payload(item)


def test_a_writer_killed_between_reserving_and_publishing_leaves_its_place(folder):
    store = open_store(folder)
    assert store.claim([5], [1000]) != [None] and 5 not in store
    used = store.used_bytes
    other = open_store(folder)
    assert (
        other.write(5, [payload(5)])
        and content(store, 5) == payload(5)
        and other.used_bytes == used
    )
    assert store.claim([6], [500]) != [None]
    # of another size: another place
    assert other.write(6, [payload(6)]) and content(store, 6) == payload(6)


def _write_all(folder, seed, barrier):
    store = open_store(folder)
    barrier.wait()
    for item in random.Random(seed).sample(range(ITEMS), ITEMS):
        store.write(item, [payload(item)])
        assert content(store, item) == payload(item)


def test_several_processes_fill_one_store(folder):
    barrier = FORK.Barrier(4)
    writers = [FORK.Process(target=_write_all, args=(folder, seed, barrier)) for seed in range(4)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(120)
        assert writer.exitcode == 0
    store = open_store(folder)
    assert len(store) == ITEMS and store.used_bytes == ITEMS * 1000  # nothing twice


def test_the_tail_of_a_damaged_header_is_found_again(folder):
    store = open_store(folder)
    for item in range(5):
        store.write(item, [payload(item)])
    os.pwrite(store.file.descriptor, b"\xff", 20)
    for item in range(5, 10):
        store.write(item, [payload(item)])
    assert [content(store, item) for item in range(10)] == [payload(item) for item in range(10)]


def test_several_at_once_are_stored_as_far_as_there_is_room(folder):
    store = open_store(folder, capacity_bytes=3500)
    store.write(1, [payload(1)])
    store.claim([2], [1000])
    items = [0, 1, 2, 3, 4, 5]
    sizes = [1000, 1000, 1000, 1000, 400, 600]  # 3 has no room left, 4 has, 5 has not
    entries = [
        [payload(item, size)[:300], payload(item, size)[300:]]
        for item, size in zip(items, sizes, strict=True)
    ]
    digests = [checksum(parts, item=item) for item, parts in zip(items, entries, strict=True)]
    assert store.write_many(items, entries, digests) == [True, True, True, False, True, False]
    again = open_store(folder, capacity_bytes=3500)
    for item, size in zip(items, sizes, strict=True):
        assert content(again, item) == (None if item in (3, 5) else payload(item, size))
    assert again.used_bytes == 3400


def test_those_before_the_memory_is_full_are_stored(folder):
    left = iter([150_000, 150_000, 0])
    store = open_store(
        folder, capacity_bytes=1 << 30, available=lambda: next(left, 0), num_items=200
    )
    items = [0, 1, 2]
    entries = [[payload(item, 100_000)] for item in items]
    with pytest.warns(UserWarning, match="no memory is left"):
        done = store.write_many(
            items, entries, [checksum(parts, item=item) for item, parts in enumerate(entries)]
        )
    assert done == [True, False, False] and content(store, 0) == payload(0, 100_000)
    assert not store.write(3, [payload(3)]) and content(store, 0) == payload(0, 100_000)


def test_no_more_is_written_after_one_entry_failed(folder, monkeypatch):
    store, write, written = open_store(folder), os.pwritev, []

    def second_fails(descriptor, buffers, offset):
        written.append(offset)
        if len(written) == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(descriptor, buffers, offset)

    monkeypatch.setattr(os, "pwritev", second_fails)
    entries = [[payload(item)] for item in range(4)]
    with pytest.warns(UserWarning, match="No space left"):
        done = store.write_many(
            range(4), entries, [checksum(parts, item=item) for item, parts in enumerate(entries)]
        )
    assert done == [True, False, False, False] and len(written) == 2
    assert [content(store, item) for item in range(4)] == [payload(0), None, None, None]

"""A tier that cannot be opened, or breaks, costs the samples it would have held, no more."""

from __future__ import annotations

import errno
import multiprocessing
import os
import pickle
import shutil
import time
import warnings
from pathlib import Path

import pytest

from lightning_topt.data.cache import memory_file, segment_store
from lightning_topt.data.cache.memory_file import MemoryUnavailable
from lightning_topt.data.cache.sample_cache import RefusedCacheError
from tests.data.test_sample_cache import ITEMS, epoch, make

FORK = multiprocessing.get_context("fork")
CODES = [errno.ENOSPC, errno.EACCES]
NAMES = [errno.errorcode[code] for code in CODES]
EVERYTHING = list(range(ITEMS))


pytestmark = pytest.mark.usefixtures("shared")


def broken(monkeypatch, folder, code):
    """Nothing in `folder` can be made or written: a full disk, read-only, or another user's."""
    is_full = code in (errno.ENOSPC, errno.EDQUOT)

    def fails(function, when):
        def call(target, *arguments, **options):
            path = (
                os.readlink(f"/proc/self/fd/{target}")
                if isinstance(target, int)
                else os.fspath(target)
            )
            if path.startswith(str(folder)) and when(target, *arguments):
                raise OSError(code, os.strerror(code), path)
            return function(target, *arguments, **options)

        return call

    def is_new(path, flags=os.O_CREAT, *_):
        return (flags & os.O_CREAT and not os.path.exists(path)) or (
            flags & os.O_RDWR and not is_full
        )

    def is_longer(descriptor, words, offset, *_):
        return not is_full or offset + len(words) > os.fstat(descriptor).st_size

    monkeypatch.setattr(os, "open", fails(os.open, is_new))
    monkeypatch.setattr(Path, "mkdir", fails(Path.mkdir, lambda path, *_: not os.path.exists(path)))
    monkeypatch.setattr(os, "pwrite", fails(os.pwrite, is_longer))
    for owner, name in [
        (Path, "write_text"),
        (os, "pwritev"),
        (os, "ftruncate"),
        (os, "posix_fallocate"),
    ]:
        monkeypatch.setattr(owner, name, fails(getattr(owner, name), lambda *_: True))


@pytest.mark.parametrize("code", CODES, ids=NAMES)
def test_without_room_on_disk_the_memory_is_used(tmp_path, monkeypatch, code):
    broken(monkeypatch, tmp_path, code)
    with pytest.warns(UserWarning, match="goes on without its disk cache") as caught:
        cache = make(tmp_path / "new")
    assert len(caught) == 1 and os.strerror(code) in str(caught[0].message)
    assert epoch(cache) == EVERYTHING and epoch(cache) == []
    statistics = cache.statistics()
    assert (statistics.misses, statistics.memory_hits, statistics.stored) == (ITEMS, ITEMS, ITEMS)
    assert (statistics.memory_items, statistics.disk_items, statistics.disk_bytes) == (ITEMS, 0, 0)
    cache.close()


def _fill_another(directory, out):
    cache = make(directory, disk=0)
    out.put((epoch(cache), os.fstat(cache.memory.file.descriptor).st_ino))


def test_ranks_without_a_folder_share_one_memory(tmp_path, monkeypatch, silent):
    broken(monkeypatch, tmp_path, errno.ENOSPC)
    cache, out = make(tmp_path / "new", disk=0), FORK.Queue()
    rank = FORK.Process(target=_fill_another, args=(tmp_path / "new", out))
    rank.start()
    assert out.get(timeout=120) == (EVERYTHING, os.fstat(cache.memory.file.descriptor).st_ino)
    rank.join()
    assert epoch(cache) == [] and cache.statistics().memory_items == ITEMS


def test_what_another_user_has_put_in_its_place_is_not_written(tmp_path, monkeypatch, shared):
    broken(monkeypatch, tmp_path, errno.ENOSPC)
    cache = make(tmp_path / "new", disk=0)
    (name,) = os.listdir(shared)
    cache.close()
    target = shared / "target"
    target.write_text("mine")
    (shared / name).symlink_to(target)
    with pytest.warns(UserWarning, match="goes on without its memory cache"):
        make(tmp_path / "new", disk=0)
    assert target.read_text() == "mine"


def test_with_no_place_at_all_samples_come_from_the_source(tmp_path, monkeypatch):
    monkeypatch.setattr(memory_file, "SHARED", tmp_path / "nowhere", raising=False)
    broken(monkeypatch, tmp_path, errno.ENOSPC)
    with pytest.warns(
        UserWarning, match=r"without its memory cache .* and its disk cache"
    ) as caught:
        cache = make(tmp_path / "new")
    assert len(caught) == 1 and cache.tiers == []
    assert epoch(cache) == epoch(cache) == EVERYTHING
    assert cache.statistics().misses == 2 * ITEMS and cache.statistics().stored == 0
    cache.refuse("two draws differ")
    cache.close()


def test_what_is_left_out_is_left_out_in_workers_too(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(memory_file, "SHARED", tmp_path / "nowhere", raising=False)
        broken(patch, tmp_path, errno.ENOSPC)
        with pytest.warns(UserWarning):
            cache = make(tmp_path / "new")
    # each of them would have a memory of its own, and warn in every epoch
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert pickle.loads(pickle.dumps(cache)).tiers == []


def _work_on_a_full_disk(directory, pickled, out):
    patch = pytest.MonkeyPatch()
    broken(patch, directory, errno.ENOSPC)
    for each in pickled:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                cache = pickle.loads(each)
                found = epoch(cache), os.fstat(cache.memory.file.descriptor).st_ino
                out.put((*found, [str(one.message) for one in caught]))
            except OSError as error:
                out.put(error)


def test_workers_that_start_when_the_disk_is_full_share_the_memory(tmp_path):
    caches, out = [make(tmp_path / str(disk), disk=disk) for disk in (0, ITEMS)], FORK.Queue()
    for cache in caches:
        epoch(cache)
    pickled = [pickle.dumps(cache) for cache in caches]
    worker = FORK.Process(target=_work_on_a_full_disk, args=(tmp_path, pickled, out))
    worker.start()
    for cache in caches:
        assert out.get(timeout=120) == ([], os.fstat(cache.memory.file.descriptor).st_ino, [])
    worker.join()


def _hold(path, held):
    with segment_store.StoreLock(path).held():
        held.set()
        time.sleep(600)


@pytest.mark.parametrize("what", ["memory", "disk"])
def test_a_tier_whose_lock_is_held_is_left_out(tmp_path, monkeypatch, what):
    monkeypatch.setattr(segment_store, "LOCK_SECONDS", 0.05)
    (tmp_path / "f").mkdir()
    held = FORK.Event()
    name = {"memory": "memory.holders", "disk": "disk.lock"}[what]
    holder = FORK.Process(target=_hold, args=(tmp_path / "f" / name, held))
    holder.start()
    assert held.wait(120)
    with pytest.warns(
        UserWarning, match=f"without its {what} cache .*locked by another process"
    ) as caught:
        cache = make(tmp_path)
    assert len(caught) == 1 and len(cache.tiers) == 1
    assert epoch(cache) == EVERYTHING and epoch(cache) == []
    holder.kill()
    holder.join()


@pytest.mark.parametrize("disk", [0, ITEMS])
def test_a_folder_that_is_removed_while_it_is_used(tmp_path, disk, silent):
    cache = make(tmp_path, disk=disk)
    epoch(cache, items=range(20))
    shutil.rmtree(tmp_path / "f")
    assert epoch(cache) == EVERYTHING[20:]
    twin = pickle.loads(pickle.dumps(cache))
    assert epoch(twin) == []
    other = make(tmp_path, disk=disk)  # as if nothing had been
    assert epoch(other) == EVERYTHING
    # Who shares a store shares its lock, whatever lies at its path now.
    locks = [os.fstat(one.memory.file.lock.descriptor).st_ino for one in (cache, twin, other)]
    assert locks[0] == locks[1] != locks[2]
    shutil.rmtree(tmp_path / "f")
    cache.refuse("two draws differ")
    assert twin.memory.read(0) is None and other.memory.read(0) is not None


def test_a_disk_that_cannot_be_read_gives_misses(tmp_path, monkeypatch):
    cache = make(tmp_path, memory=0)
    epoch(cache)

    def fails(function):
        def call(descriptor, *arguments):
            if descriptor == cache.disk.file.descriptor:
                raise OSError(errno.EIO, "Input/output error")
            return function(descriptor, *arguments)

        return call

    for name in ("pread", "preadv", "pwrite", "pwritev"):
        monkeypatch.setattr(os, name, fails(getattr(os, name)))
    with pytest.warns(UserWarning, match="Input/output error") as caught:
        assert epoch(cache) == EVERYTHING
        statistics = cache.statistics()
        cache.refuse("two draws differ")
    assert (
        statistics.misses == 2 * ITEMS and statistics.disk_items == 0 and statistics.disk_bytes == 0
    )
    assert len(caught) <= 3  # reading, storing, emptying: not one per sample


def test_what_is_certain_stays_an_error(tmp_path, monkeypatch):
    cache = make(tmp_path)
    cache.refuse("two draws differ")
    broken(monkeypatch, tmp_path, errno.ENOSPC)
    with pytest.raises(RefusedCacheError, match="two draws differ"):
        make(tmp_path)
    monkeypatch.delattr(os, "memfd_create")
    with pytest.raises(MemoryUnavailable):
        make(tmp_path / "new", disk=0)

"""Batches copied from mapped memory are those that are read piece by piece, or none."""

from __future__ import annotations

import fcntl
import os

import pytest
import torch
from torch.utils.data import default_collate

from lightning_topt.data.cache import sample_cache
from lightning_topt.data.cache.cached_batches import BatchDataset, collate
from lightning_topt.data.cache.cached_dataset import CachedDataset
from lightning_topt.data.cache.sample_cache import SampleCache
from lightning_topt.data.cache.sample_codec import encode, size_of

ITEMS = 12


class Samples:
    """Pictures and labels; those from `other` on have another type of the same size, the odd ones
    of `sizes` another shape.
    """

    def __init__(self, *, other=ITEMS, sizes=False):
        self.other, self.sizes = other, sizes

    def __len__(self):
        return ITEMS

    def __getitem__(self, index):
        kind = torch.int32 if index >= self.other else torch.float32
        shape = (30, 6) if self.sizes and index % 2 else (30, 5)
        return {
            "x": torch.arange(index, index + shape[0] * shape[1], dtype=kind).view(shape),
            "y": index,
        }


@pytest.fixture
def cache(tmp_path):
    cache = SampleCache(
        tmp_path, fingerprint="f", num_items=ITEMS, memory_bytes=1 << 16, disk_bytes=0
    )
    yield cache
    cache.close()


def filled(cache, samples, items=range(ITEMS)):
    for item in items:
        cache.put(item, encode(samples[item]))
    return BatchDataset(CachedDataset(samples, cache))


def equal(one, other):
    return all(torch.equal(one[name], other[name]) for name in ("x", "y"))


def equal_samples(one, other):
    return torch.equal(one["x"], other["x"]) and one["y"] == other["y"]


def expected(samples, items):
    return default_collate([samples[item] for item in items])


@pytest.fixture
def no_reading(monkeypatch):
    def read_into(self, item, buffers):
        raise AssertionError("a system call for an entry that is mapped")

    monkeypatch.setattr(SampleCache, "read_into", read_into)


def test_batches_are_copied_from_the_map(cache, no_reading):
    samples = Samples()
    data = filled(cache, samples)
    cache.verify_new()  # as after each batch that is read
    for items in ([3, 1, 2], [0], [5, 5, 5], list(range(ITEMS))):
        assert equal(data.__getitems__(items).batch, expected(samples, items))
    assert cache.statistics().memory_hits == 3 + 1 + 3 + ITEMS and cache.statistics().misses == 0


def test_what_the_map_lacks_comes_as_ever(cache):
    samples = Samples()
    data = filled(cache, samples, range(0, ITEMS, 2))
    items = [2, 3, 4, 7]
    assert equal(data.__getitems__(items).batch, expected(samples, items))
    assert (cache.statistics().memory_hits, cache.statistics().misses) == (2, 2)
    assert equal(data.__getitems__(items).batch, expected(samples, items))
    assert (cache.statistics().memory_hits, cache.statistics().misses) == (6, 2)


@pytest.mark.parametrize("options", [{"other": 6}, {"sizes": True}])
def test_other_layouts_in_one_batch(cache, options):
    samples = Samples(**options)
    data = filled(cache, samples)
    for _ in range(2):
        found = data.__getitems__([1, 2, 7, 8])
        assert all(
            equal_samples(sample, samples[item])
            for sample, item in zip(found, [1, 2, 7, 8], strict=True)
        )
        alike = [8, 10] if options == {"sizes": True} else [7, 8]
        assert equal(data.__getitems__(alike).batch, expected(samples, alike))


@pytest.mark.parametrize("where", ["entry", "record"])
def test_flipped_bits_are_found(cache, where):
    samples = Samples()
    data = filled(cache, samples)
    place = cache.memory.locate(4).offset + 150 if where == "entry" else 4096 + 32 * 4 + 3
    byte = os.pread(cache.memory.file.descriptor, 1, place)
    os.pwrite(cache.memory.file.descriptor, bytes([byte[0] ^ 16]), place)
    assert equal(data.__getitems__([3, 4, 5]).batch, expected(samples, [3, 4, 5]))
    assert cache.statistics().damaged >= 1 and cache.statistics().misses == 1
    assert equal(data.__getitems__([3, 4, 5]).batch, expected(samples, [3, 4, 5]))
    assert cache.statistics().misses == 1


def test_what_is_dropped_later_is_not_read_any_more(cache):
    samples = Samples()
    data = filled(cache, samples)
    data.__getitems__([1, 2])
    cache.memory.clear()
    assert equal(default_collate(data.__getitems__([1, 2])), expected(samples, [1, 2]))
    assert cache.statistics().misses == 2


def test_entries_beyond_the_map_come_as_ever(tmp_path):
    """Another job may have been given more memory for the same samples."""
    samples = Samples()
    size = size_of(encode(samples[0]))
    options = {"fingerprint": "f", "num_items": ITEMS, "disk_bytes": 0}
    small = SampleCache(tmp_path, memory_bytes=4 * size, **options)
    large = SampleCache(tmp_path, memory_bytes=ITEMS * size, **options)
    filled(large, samples)
    data = BatchDataset(CachedDataset(samples, small))
    items = list(range(ITEMS))
    assert equal(data.__getitems__(items).batch, expected(samples, items))
    assert small.statistics().memory_hits == ITEMS and small.statistics().misses == 0
    small.close(), large.close()


def test_the_file_cannot_become_shorter(cache):
    descriptor = cache.memory.file.descriptor
    assert fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK
    with pytest.raises(PermissionError):
        os.ftruncate(descriptor, 0)


@pytest.mark.parametrize("where", [1 << 40, (1 << 64) - 8])
def test_a_record_that_points_outside_of_the_file(cache, where):
    """After its entry was verified: the batch is read one by one, the entry from the source."""
    samples = Samples()
    batches = filled(cache, samples)
    items = list(range(ITEMS))
    assert equal(batches.__getitems__(items).batch, expected(samples, items))
    cache.mapped._records[3, 0] = where
    cache.statistics(reset=True)
    assert equal(batches.__getitems__(items).batch, expected(samples, items))
    assert cache.statistics().memory_hits == ITEMS - 1 and cache.statistics().misses == 1


def test_samples_of_equal_size_with_more_layouts_than_there_are_numbers(cache, monkeypatch):
    """Shapes (30, 5) and (5, 30) have as many bytes; neither may be taken for the other."""
    monkeypatch.setattr(sample_cache, "_MOST_HEADERS", 1)

    class Turned(Samples):
        def __getitem__(self, index):
            x = super().__getitem__(index)["x"]
            return {"x": [x, x.view(6, 25), x.view(5, 30)][index % 3].contiguous(), "y": index}

    samples = Turned()
    batches = filled(cache, samples)
    for _ in range(2):
        for start in range(3):
            items = list(range(start, ITEMS, 3))
            assert equal(collate(batches.__getitems__(items)), expected(samples, items))
            mixed = [*range(start, ITEMS), *range(start)]
            assert all(
                map(equal_samples, batches.__getitems__(mixed), [samples[item] for item in mixed])
            )
        cache.mapped.verify_new(range(ITEMS))

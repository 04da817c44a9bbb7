"""Cached samples and batches are those of the data set; what is random is found out."""

from __future__ import annotations

import os
import random

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset, default_collate

from lightning_topt.data.cache.cached_batches import BatchDataset, ReadyBatch, collate
from lightning_topt.data.cache.cached_dataset import (
    CachedDataset,
    NotDeterministicError,
    deterministic,
    marked_method,
)
from lightning_topt.data.cache.sample_cache import RefusedCacheError, SampleCache

ITEMS = 40


def picture(i):
    return Image.fromarray(np.full((4, 5, 3), i, np.uint8))


KINDS = {
    "tensor": lambda i: torch.full((2, 3), float(i)),
    "empty": lambda i: torch.empty(0, 2),
    "pair": lambda i: (torch.full((3,), i, dtype=torch.uint8), i),
    "dict": lambda i: {
        "a": np.full((2,), i, np.float32),
        "b": [float(i), bool(i % 2)],
        "c": np.array(i),
    },
    "strings": lambda i: {"name": f"{i:03d}", "x": torch.tensor(i)},
    "scalars": lambda i: (np.float32(i), np.int64(i), np.bool_(i % 2)),
    "numbers": lambda i: {"ids": list(range(i, i + 20)), "weights": (float(i),) * 9},
    "nested": lambda i: ((torch.ones(2) * i, (i,)), [torch.zeros(1)]),
}


class Data(Dataset):
    def __init__(self, make, *, length=ITEMS):
        self.make, self.length, self.calls = make, length, 0
        self.extra = "kept"

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        self.calls += 1
        return self.make(index)


def cached(dataset, tmp_path, **options):
    options = {"memory_bytes": 1 << 22, "disk_bytes": 0} | options
    return CachedDataset(
        dataset, SampleCache(tmp_path, fingerprint="f", num_items=len(dataset), **options)
    )


def same(a, b):
    assert type(a) is type(b), (type(a), type(b))
    if isinstance(a, torch.Tensor):
        assert a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
    elif isinstance(a, dict):
        assert a.keys() == b.keys()
        for key in a:
            same(a[key], b[key])
    elif isinstance(a, list | tuple):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            same(x, y)
    elif isinstance(a, Image.Image):
        assert a.tobytes() == b.tobytes()
    else:
        np.testing.assert_equal(a, b)


@pytest.mark.parametrize("kind", [*KINDS, "image", "variable"])
def test_samples_are_the_data_sets_own(tmp_path, kind):
    make = {"image": picture, "variable": lambda i: torch.arange(i)}.get(kind) or KINDS[kind]
    data = Data(make)
    dataset = cached(data, tmp_path)
    for _ in range(2):
        for index in [*range(ITEMS), -1, -ITEMS]:
            same(dataset[index], make(index % ITEMS) if index < 0 else make(index))
    assert data.calls == ITEMS + 16  # the first 16 are drawn twice
    assert dataset.extra == "kept" and len(dataset) == ITEMS
    with pytest.raises(IndexError):
        dataset[ITEMS]


def test_samples_before_one_that_fails_are_kept(tmp_path):
    def make(index):
        if index == 5 and not healed:
            raise OSError("the source is away")
        return torch.tensor(index)

    healed = []
    data = Data(make)
    dataset = cached(data, tmp_path)
    with pytest.raises(OSError, match="the source is away"):
        dataset.__getitems__(range(10))
    healed.append(True)
    data.calls = 0
    same(dataset.__getitems__(range(10)), [torch.tensor(i) for i in range(10)])
    assert dataset.cache.statistics().memory_hits == 5


def test_an_item_twice_in_a_batch_is_stored_once(tmp_path):
    dataset = cached(Data(KINDS["pair"]), tmp_path)
    for _ in range(2):
        same(dataset.__getitems__([3, 4, 3, 3]), [KINDS["pair"](i) for i in (3, 4, 3, 3)])
    statistics = dataset.cache.statistics()
    assert (statistics.misses, statistics.memory_items, statistics.stored) == (4, 2, 2)
    assert statistics.memory_hits == 4


@pytest.mark.parametrize("memory_bytes", [1 << 22, 3000, 0])
@pytest.mark.parametrize("kind", KINDS)
def test_batches_are_what_default_collate_gives(tmp_path, kind, memory_bytes):
    make = KINDS[kind]
    dataset = BatchDataset(
        cached(Data(make), tmp_path, memory_bytes=memory_bytes, disk_bytes=1 << 22)
    )
    for seed in range(3):
        order = random.Random(seed).sample(range(ITEMS), ITEMS)
        for first in range(0, ITEMS, 7):
            indices = order[first : first + 7]
            same(
                collate(dataset.__getitems__(indices)), default_collate([make(i) for i in indices])
            )
    ready = isinstance(dataset.__getitems__([1, 2, 3]), ReadyBatch)
    if memory_bytes == 1 << 22:
        assert ready == (kind != "strings")


@pytest.mark.parametrize("num_workers", [0, 2])
def test_in_a_loader_with_workers(tmp_path, num_workers):
    make = KINDS["pair"]
    dataset = BatchDataset(cached(Data(make), tmp_path))
    loader = DataLoader(
        dataset, 8, collate_fn=collate, num_workers=num_workers, persistent_workers=num_workers > 0
    )
    for _ in range(3):
        same(
            list(loader),
            [default_collate([make(i) for i in range(s, s + 8)]) for s in range(0, ITEMS, 8)],
        )
    statistics = dataset.dataset.cache.statistics()
    assert (statistics.misses, statistics.memory_hits) == (ITEMS, 2 * ITEMS)


@pytest.mark.parametrize("at", [0, 5, 12, 20, 60])
def test_a_damaged_header_is_found_out_and_the_sample_read_again(tmp_path, at):
    data = Data(KINDS["pair"])
    dataset = BatchDataset(cached(data, tmp_path))
    wanted = collate(dataset.__getitems__([3, 4, 5]))
    where = dataset.cache.memory.locate(3)
    flipped = os.pread(where.descriptor, 1, where.offset + at)[0] ^ 1
    os.pwrite(where.descriptor, bytes([flipped]), where.offset + at)
    data.calls = 0
    # Who stored an entry has verified it; another job finds it damaged.
    other = BatchDataset(cached(data, tmp_path))
    same(collate(other.__getitems__([3, 4, 5])), wanted)
    statistics = other.cache.statistics()
    assert statistics.damaged == 1 and statistics.misses == 1 and data.calls == 2  # drawn twice


def test_changing_a_sample_does_not_change_the_cache(tmp_path):
    dataset = cached(Data(KINDS["tensor"]), tmp_path)
    for _ in range(3):
        dataset[3].add_(1)
    same(dataset[3], KINDS["tensor"](3))


class Augmented(Dataset):
    def __init__(self):
        self.loads = 0

    def __len__(self):
        return ITEMS

    @deterministic
    def load(self, index):
        self.loads += 1
        return torch.full((8,), float(index))

    def __getitem__(self, index):
        return self.load(index) + torch.rand(8)


def test_only_the_marked_part_is_cached_and_the_rest_stays_random(tmp_path):
    plain, data = Augmented(), Augmented()
    dataset = cached(data, tmp_path)
    assert marked_method(data) == "load"
    for _ in range(3):
        torch.manual_seed(1)
        wanted = [plain[i] for i in range(ITEMS)]
        torch.manual_seed(1)
        same([dataset[i] for i in range(ITEMS)], wanted)
    assert data.loads == ITEMS + 16
    assert not torch.equal(dataset[0], dataset[0])


class Random(Data):
    def __init__(self, source, probability=1.0):
        def make(i):
            draw = {"torch": torch.rand(()).item, "numpy": np.random.rand, "python": random.random}[
                source
            ]
            return torch.tensor(draw() if draw() <= probability else 2.0)

        super().__init__(make)


@pytest.mark.parametrize("source", ["torch", "numpy", "python"])
def test_a_random_sample_is_refused_and_the_cache_given_up(tmp_path, source):
    dataset = cached(Random(source), tmp_path)
    with pytest.raises(NotDeterministicError, match="mark only the part"):
        dataset[0]
    with pytest.raises(RefusedCacheError, match="different samples"):
        cached(Random(source), tmp_path)

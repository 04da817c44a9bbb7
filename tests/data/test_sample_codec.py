"""Samples come back as they were, and nothing but plain data goes in."""

from __future__ import annotations

import dataclasses
import random
import tracemalloc
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from lightning_topt.data.cache import sample_layout
from lightning_topt.data.cache.sample_codec import (
    _record_types,
    decode,
    encode,
    header_of,
    layout,
    register_sample_type,
    size_of,
)
from lightning_topt.data.cache.sample_layout import ALIGNMENT, UnsupportedSample, layout_of


class Pair(NamedTuple):
    image: Any
    label: int


@dataclasses.dataclass
class Record:
    name: str
    values: torch.Tensor


def entry_of(sample):
    return bytearray(b"".join(bytes(part) for part in encode(sample)))


def kept(sample):
    return decode(entry_of(sample))


def same(a, b):
    assert type(a) is type(b)
    if isinstance(a, torch.Tensor):
        assert a.dtype == b.dtype and a.shape == b.shape
        assert torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))
    elif isinstance(a, np.ndarray | np.generic):
        assert a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    elif isinstance(a, dict):
        assert list(a) == list(b)
        for key in a:
            same(a[key], b[key])
    elif isinstance(a, list | tuple):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            same(x, y)
    elif dataclasses.is_dataclass(a):
        same(vars(a), vars(b))
    else:
        assert a == b or (a != a and b != b)


TENSORS = [
    torch.randn(3, 4),
    torch.randn(5, 6).t(),
    torch.empty(0, 3),
    torch.tensor(7),
    torch.randn(3).bfloat16(),
    torch.tensor([True, False]),
    torch.randn(2, dtype=torch.complex64).conj(),
    torch.arange(5, dtype=torch.uint8)[::2],
]
VALUES = [
    *TENSORS,
    np.arange(6.0).reshape(2, 3).T,
    np.float32(1.5),
    np.zeros((0, 2)),
    np.array("2026-01-02", dtype="datetime64[D]"),
    np.array(["ab", "c"]),
    "words \ud800 é",
    "",
    b"\0bytes",
    5,
    -(2**63),
    2**70,
    1.5,
    float("nan"),
    1 + 2j,
    True,
    None,
    [],
    (),
    {},
    {"x": [1, (2.0, None)], 3: {"y": torch.ones(2)}},
    Pair(torch.ones(2), 3),
    Record("n", torch.arange(3)),
]


@pytest.mark.parametrize("value", VALUES, ids=lambda value: f"{type(value).__name__}")
def test_round_trip(value):
    entry = entry_of(value)
    assert (
        len(entry) == size_of(encode(value)) == layout(entry).nbytes and len(entry) % ALIGNMENT == 0
    )
    if isinstance(value, torch.Tensor) and value.is_conj():
        value = value.resolve_conj()
    same(value, decode(entry))


def test_random_nestings_come_back():
    rng = random.Random(0)

    def make(depth):
        kind = rng.randrange(4 if depth < 4 else 1)
        if kind == 0:
            return rng.choice(VALUES)
        items = [make(depth + 1) for _ in range(rng.randrange(4))]
        return (
            items
            if kind == 1
            else tuple(items)
            if kind == 2
            else {str(i): x for i, x in enumerate(items)}
        )

    for _ in range(100):
        sample = make(0)
        if not (isinstance(sample, torch.Tensor) and sample.is_conj()):
            result = decode(entry_of(sample))
            assert entry_of(result) == entry_of(sample)


def test_tensors_are_views_of_the_entry():
    entry = entry_of((torch.zeros(4), 1))
    tensor, _ = decode(entry)
    tensor += 1
    assert torch.equal(decode(entry)[0], torch.ones(4))


def test_samples_that_differ_in_values_have_one_layout():
    first, second = (
        layout(entry_of((torch.full((3,), x), int(x), float(x), True))) for x in (1.0, 2.0)
    )
    assert first is second  # by its header's bytes
    assert layout(entry_of((torch.ones(4), 1, 1.0, True))) is not first


def test_a_record_that_is_not_registered_is_refused():
    entry = entry_of(Pair(1, 2))
    name = f"{Pair.__module__}.Pair"
    _record_types.pop(name)
    with pytest.raises(UnsupportedSample, match="register_sample_type"):
        decode(entry)
    register_sample_type(Pair)
    assert decode(entry) == Pair(1, 2)


def test_bytes_that_are_no_entry_raise_value_error():
    entry = entry_of([torch.arange(10), "text", {"a": 1}])
    rng = random.Random(0)
    for size in range(0, len(entry), 3):
        with pytest.raises(ValueError):
            decode(entry[:size])
    # a cache never decodes such bytes (checksums); all the same they only give errors or data
    for _ in range(300):
        broken = bytearray(entry)
        broken[rng.randrange(4 + len(layout(entry).header))] ^= 1 << rng.randrange(8)
        try:
            decode(broken)
        except (
            ValueError,
            UnsupportedSample,
            TypeError,
            KeyError,
            IndexError,
            RuntimeError,
            OverflowError,
            MemoryError,
        ):
            continue


def test_layouts_take_a_bounded_number_of_bytes():
    """Of texts of many lengths, which are not numbers: each has a layout of its own."""
    headers = [header_of(entry_of(["a"] * 200 + ["b" * i])) for i in range(1500)]
    layout_of(headers[0])
    tracemalloc.start()
    try:
        for header in headers:
            layout_of(header)
        grown = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert (
        grown < 16 << 20
        and sum(map(len, sample_layout._layouts)) <= sample_layout.KEPT_HEADER_BYTES
    )
    assert layout_of(headers[-1]) is layout_of(headers[-1])
    # kept by nobody
    assert len(layout_of(header_of(entry_of([{"key": i} for i in range(40_000)]))).leaves) == 40_000


def test_entries_of_another_version_are_not_read():
    old = b'["tensor","torch.uint8",[3]]'
    old = len(old).to_bytes(4, "little") + old
    for header in (old, old.replace(b"tensor", b"record")):
        with pytest.raises(UnsupportedSample, match="version"):
            decode(bytearray(header + bytes(16)))

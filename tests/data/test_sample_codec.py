"""Samples come back as they were, in value and type; nothing but plain data goes in."""

from __future__ import annotations

import collections
import dataclasses
import enum
import io
import random
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import default_collate

from lightning_topt.data.cache.cached_batches import BatchDataset, collate
from lightning_topt.data.cache.cached_dataset import CachedDataset
from lightning_topt.data.cache.sample_cache import SampleCache
from lightning_topt.data.cache.sample_codec import (
    ALIGNMENT,
    TORCH_DTYPES,
    UnsupportedSample,
    decode,
    encode,
    layout,
    size_of,
)


class Pair(NamedTuple):
    image: Any
    label: Any


def entry_of(sample):
    return bytearray(b"".join(bytes(part) for part in encode(sample)))


def kept(sample):
    return decode(entry_of(sample))


def same(a, b):
    assert type(a) is type(b)
    if isinstance(a, torch.Tensor):
        assert a.dtype == b.dtype and a.shape == b.shape and b.is_contiguous()
        raw = [x.resolve_conj().contiguous().reshape(-1).view(torch.uint8) for x in (a, b)]
        assert torch.equal(*raw)
    elif isinstance(a, np.ndarray | np.generic):
        assert a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    elif isinstance(a, dict):
        assert list(a) == list(b)
        same(list(a.values()), list(b.values()))
    elif isinstance(a, list | tuple):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            same(x, y)
    else:
        assert str(a) == str(b) and (a == b or a != a)


VALUES = {
    "tensors": [torch.randn(3, 4), torch.randn(5, 6).t(), torch.empty(0, 3), torch.tensor(7)],
    "odd tensors": [
        torch.randn(2, dtype=torch.complex64).conj(),
        torch.arange(5, dtype=torch.uint8)[::2],
        torch.rand(2, 3, 4, 5).to(memory_format=torch.channels_last),
    ],
    "arrays": [np.arange(6.0).reshape(2, 3).T, np.zeros((2, 0)), np.arange(8)[::-2], np.array(3)],
    "scalars": [np.float32(1.5), np.int8(-1), np.bool_(True), np.complex64(1j), np.void(b"abc")],
    "numpy texts": [np.str_(""), np.str_("a\0"), np.bytes_(b"a\0"), np.array(["ab", "", "c\0"])],
    "times": [np.datetime64("NaT"), np.timedelta64(3, "D"), np.array(["2026-01-02"], "M8[D]")],
    "big endian": [np.arange(3, dtype=">i4"), np.array("é", ">U3")],
    "texts": ["words \ud800 é", "\ud83d\ude00", "", b"\0bytes"],
    "numbers": [5, -(2**63), 1.5, -0.0, float("nan"), True, None],
    "containers": [[], (), {}, (1,), {"x": [1, (2.0, None)], -3: {"y": torch.ones(2)}, "é": 1}],
}


@pytest.mark.parametrize("name", VALUES)
def test_round_trip(name):
    for value in [*VALUES[name], VALUES[name]]:
        entry = entry_of(value)
        assert len(entry) == size_of(encode(value)) == layout(entry).nbytes
        assert len(entry) % ALIGNMENT == 0
        same(value, decode(entry))


@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_tensors_of_every_dtype():
    for name, dtype in TORCH_DTYPES.items():
        if not name.startswith(("torch.q", "torch.quint")):  # of quantized tensors
            value = torch.zeros(2, 3, dtype=dtype)
            found = kept([value, value[:0], value[0, 0]])
            assert [(x.dtype, x.shape) for x in found] == [
                (dtype, (2, 3)),
                (dtype, (0, 3)),
                (dtype, ()),
            ]


@pytest.mark.parametrize("kind", [list, tuple])
def test_sequences_of_numbers(kind):
    rng = random.Random(0)
    for length in (0, 1, 7, 8, 9, 512):
        ints = kind(rng.randrange(-(2**63), 2**63) for _ in range(length))
        floats = kind(rng.choice([rng.gauss(0, 1), -0.0, float("inf")]) for _ in range(length))
        bools = kind(rng.random() < 0.5 for _ in range(length))
        for value in (ints, floats, bools, ints + floats, ints + bools):
            same({"x": value}, kept({"x": value}))
    known = layout(entry_of({"x": list(range(512)), "y": (0.5,) * 100, "z": [True] * 8}))
    assert len(known.leaves) == 1 + 1 + 8


def test_a_memory_map_comes_back_as_an_array(tmp_path):
    np.save(tmp_path / "x.npy", np.arange(4.0))
    found = kept(np.load(tmp_path / "x.npy", mmap_mode="r")[1:])
    assert type(found) is np.ndarray and found.tolist() == [1, 2, 3] and found.flags.writeable


# ---- what is refused -----------------------------------------------------------------------------


class Colour(enum.IntEnum):
    RED = 1


def itself():
    value = []
    value.append(value)
    return value


def noted(value):
    value.note = 5
    return value


REFUSED = {
    "ordered": collections.OrderedDict(a=1),
    "size": torch.Size([2]),
    "enum": Colour.RED,
    "masked": np.ma.array([1, 2], mask=[True, False]),
    "fields": np.zeros(2, [("a", "i4")]),
    "objects": np.array([1, None]),
    "parameter": torch.nn.Parameter(torch.ones(2)),
    "gradient": torch.ones(2, requires_grad=True),
    "sparse": torch.eye(2).to_sparse(),
    "meta": torch.empty(2, device="meta"),
    "tensor's attribute": noted(torch.ones(2)),
    "NamedTuple": Pair(1, 2),
    "dataclass": dataclasses.make_dataclass("Local", ["x"])(1),
    "set": {1},
    "bool key": {True: 1},
    "large": 2**63,
    "large in a list": [2**63] * 9,
    "itself": itself(),
    "object": object(),
    "exif": Image.new("RGB", (1, 1)).getexif(),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_come_back_as_something_else_is_refused(name):
    with pytest.raises(UnsupportedSample):
        encode({"x": [REFUSED[name]]})


# ---- entries -------------------------------------------------------------------------------------


def test_tensors_are_views_of_the_entry():
    entry = entry_of((torch.zeros(4), 1))
    tensor, _ = decode(entry)
    tensor += 1
    assert torch.equal(decode(entry)[0], torch.ones(4))


def test_bytes_that_are_no_entry_raise_an_error():
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
        except (ValueError, TypeError, LookupError, RuntimeError, ArithmeticError, MemoryError):
            continue


def test_batches_of_sequences(tmp_path):
    samples = [({"ids": list(range(i, i + 20)), "weights": (float(i),) * 9}, i) for i in range(12)]
    cache = SampleCache(tmp_path, fingerprint="f", num_items=12, memory_bytes=1 << 20, disk_bytes=0)
    dataset = BatchDataset(CachedDataset(samples, cache))
    for _ in range(2):
        found = collate(dataset.__getitems__([3, 1, 4]))
        same(default_collate([samples[i] for i in (3, 1, 4)]), found)
    assert cache.statistics().memory_hits == 3
    cache.close()


# ---- images --------------------------------------------------------------------------------------


def saved(image, **options):
    file = io.BytesIO()
    image.save(file, **options)
    return Image.open(io.BytesIO(file.getvalue()))


def pictures():
    rng = np.random.default_rng(0)
    rgb, rgba = (Image.fromarray(rng.integers(0, 255, (7, 5, n), dtype=np.uint8)) for n in (3, 4))
    modes = ["1", "L", "LA", "P", "PA", "RGB", "RGBX", "RGBA", "CMYK", "YCbCr", "HSV", "I", "F"]
    found = {mode: rgb.convert(mode) for mode in modes}
    found |= {mode: Image.new(mode, (3, 2), 259) for mode in ("I;16", "I;16B")}
    found |= {f"empty {mode}": Image.new(mode, (0, 3)) for mode in ("RGB", "P", "1")}
    found["4 colours"] = rgb.quantize(4)
    found["RGBA palette"] = rgba.quantize(5)
    found["no palette"] = Image.new("P", (2, 3))
    found["transparent index"] = saved(rgb.quantize(4), format="PNG", transparency=2)
    found["transparencies"] = saved(rgb.quantize(4), format="PNG", transparency=b"\x10\x20")
    found["gif"] = saved(rgb.quantize(4), format="GIF", transparency=1)
    exif = Image.Exif()
    exif[0x0112] = 6
    found["jpeg"] = saved(rgb, format="JPEG", exif=exif, dpi=(72, 72), icc_profile=b"profile")
    return found


@pytest.mark.parametrize("name", pictures())
def test_pictures(name):
    image = pictures()[name]
    found = kept([image])[0]
    image.load()
    assert type(found) is Image.Image
    assert (found.mode, found.size, found.info) == (image.mode, image.size, image.info)
    assert found.tobytes() == image.tobytes() and dict(found.getexif()) == dict(image.getexif())
    if image.mode in ("P", "PA"):
        assert found.getpalette(None) == image.getpalette(None)
        assert found.palette.mode == image.palette.mode
        assert found.convert("RGBA").tobytes() == image.convert("RGBA").tobytes()
    assert entry_of([found]) == entry_of([image])


def test_of_info_what_is_plain_data_is_kept():
    image = Image.new("RGB", (1, 1))
    image.info |= {"a": (1, b"x"), "b": object(), 3: "three", "c": {"d": {1, 2}}}
    assert kept(image).info == {"a": (1, b"x"), 3: "three"}

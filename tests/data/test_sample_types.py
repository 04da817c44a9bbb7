"""Every kind of value comes back equal in type and value, or is refused with a sentence that says
what to do.
"""

from __future__ import annotations

import collections
import dataclasses
import enum
import random

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import default_collate

from lightning_topt.data.cache.cached_batches import BatchDataset, collate
from lightning_topt.data.cache.cached_dataset import CachedDataset
from lightning_topt.data.cache.sample_cache import SampleCache
from lightning_topt.data.cache.sample_codec import encode, layout
from lightning_topt.data.cache.sample_layout import TORCH_DTYPES, UnsupportedSample
from tests.data.test_sample_codec import entry_of, kept


def dataclass_of(base):
    """An instance of a dataclass that derives from a built-in class."""
    return dataclasses.make_dataclass(f"Of{base.__name__}", [("x", int, 0)], bases=(base,))()


@dataclasses.dataclass
class Body:
    x: int = 0


class Member(Body, enum.Enum):
    FIRST = 1


class Colour(enum.IntEnum):
    RED = 1


class Wrapped(torch.Tensor):
    pass


labelled = torch.ones(2)
labelled.label = 5
REFUSED = {
    "dataclass_of_dict": (dataclass_of(dict), "subclass of dict"),
    "dataclass_of_error": (dataclass_of(Exception), "OfException"),
    "dataclass_enum": (Member.FIRST, "Member"),
    "masked": (np.ma.array([1, 2], mask=[True, False]), r"np\.asarray"),
    "structured": (np.zeros(2, [("a", "i4")]), "plain dtypes"),
    "objects": (np.array([1, None]), "plain dtypes"),
    "parameter": (torch.nn.Parameter(torch.ones(2)), r"as_subclass\(torch\.Tensor\)"),
    "tensor_subclass": (torch.ones(2).as_subclass(Wrapped), r"as_subclass\(torch\.Tensor\)"),
    "gradient": (torch.ones(2, requires_grad=True), "need no gradient"),
    "sparse": (torch.eye(2).to_sparse(), "dense"),
    "meta": (torch.empty(2, device="meta"), "on the CPU"),
    "tensor_attribute": (labelled, "label"),
    "size": (torch.Size([2]), "subclass of tuple"),
    "ordered": (collections.OrderedDict(a=1), "subclass of dict"),
    "enum": (Colour.RED, "subclass of int"),
    "set": ({1}, "set"),
    "bool_key": ({True: 1}, "keys"),
    "object": (object(), "object"),
    "exif": (Image.new("RGB", (1, 1)).getexif(), "Exif"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_come_back_as_something_else_is_refused(name):
    value, message = REFUSED[name]
    with pytest.raises(UnsupportedSample, match=message):
        encode({"x": [value]})


@pytest.mark.filterwarnings("ignore")  # that these are prototypes
def test_tensors_that_are_not_dense_are_refused():
    parts = [torch.ones(2), torch.ones(3)]
    quantized = torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)
    for value in (
        torch.nested.nested_tensor(parts),
        torch.eye(2).to_sparse_csr(),
        torch.eye(2).to_mkldnn(),
        quantized,
    ):
        with pytest.raises(UnsupportedSample, match="dense"):
            encode([value])
    with pytest.raises(UnsupportedSample, match=r"as_subclass\(torch\.Tensor\)"):
        encode([torch.nested.nested_tensor(parts, layout=torch.jagged)])


def test_a_sample_that_holds_itself_is_refused():
    value = []
    value.append(value)
    with pytest.raises(UnsupportedSample, match="itself"):
        encode(value)


ARRAYS = {
    "scalars": [np.float32(1), np.int8(-1), np.bool_(True), np.complex64(1j), np.float64(2)],
    "texts": [
        np.str_(""),
        np.str_("a\0"),
        np.str_("é"),
        np.bytes_(b""),
        np.bytes_(b"a\0"),
        np.void(b"abc"),
    ],
    "times": [np.datetime64("NaT"), np.datetime64("2026-01-02", "25s"), np.timedelta64(3, "D")],
    "time_arrays": [np.array(["2026-01-02", "NaT"], "M8[D]"), np.arange(3).astype("m8[25s]")],
    "big_endian": [np.arange(3, dtype=">i4"), np.zeros((2, 0), ">f8"), np.array("é", ">U3")],
    "no_dimensions": [np.array(3), np.array("a"), np.array(True)],
    "empty": [np.zeros((2, 0)), np.zeros(0, "U3"), np.zeros((0, 3), np.float16)],
    "strided": [
        np.asfortranarray(np.eye(3)),
        np.arange(8)[::-2],
        np.broadcast_to(np.float32(1), (2, 2)),
    ],
    "texts_in_arrays": [np.array(["ab", "", "c\0"]), np.array([b"ab", b""]), np.zeros(2, "V3")],
}


@pytest.mark.parametrize("name", ARRAYS)
def test_arrays_and_scalars(name):
    for value, found in zip(ARRAYS[name], kept(ARRAYS[name]), strict=True):
        assert (
            type(found) is type(value) and found.dtype == value.dtype and found.shape == value.shape
        )
        assert found.tobytes() == value.tobytes()
        if isinstance(value, str | bytes):
            assert len(found) == len(value) and found == value


def test_a_memory_map_comes_back_as_an_array(tmp_path):
    np.save(tmp_path / "x.npy", np.arange(4.0))
    value = np.load(tmp_path / "x.npy", mmap_mode="r")[1:]
    found = kept(value)
    assert type(found) is np.ndarray and found.tolist() == [1, 2, 3] and found.flags.writeable


@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_tensors_of_every_dtype_and_strides():
    for name, dtype in TORCH_DTYPES.items():
        if name.startswith(("torch.q", "torch.quint")):
            continue  # of quantized tensors
        value = torch.zeros(2, 3, dtype=dtype)
        found = kept([value, value[:0], value[0, 0]])
        assert [x.dtype for x in found] == [dtype] * 3
        assert [x.shape for x in found] == [(2, 3), (0, 3), ()]
    pixels = torch.rand(2, 3, 4, 5)
    for value in (
        pixels.to(memory_format=torch.channels_last),
        pixels.permute(3, 1, 0, 2),
        pixels[:, ::2],
    ):
        found = kept(value)
        assert torch.equal(found, value) and found.is_contiguous()


PLAIN = [
    True,
    1,
    1.0,
    1 + 0j,
    None,
    b"",
    "",
    "\ud83d\ude00",
    -0.0,
    2**63,
    -(2**63) - 1,
    10**5000,
    (),
    (1,),
    [],
    {},
]


def test_plain_values_keep_their_types():
    for value, found in zip(PLAIN, kept(PLAIN), strict=True):
        assert type(found) is type(value) and found == value
    assert str(kept(-0.0)) == "-0.0"
    keys = {"\ud83d\ude00": 1, "é": 2, "😀": 3, 'a\n"\\': 4, -5: 5, 2**70: 6}
    assert kept(keys) == keys


LENGTHS = [0, 1, 7, 8, 9, 512]


@pytest.mark.parametrize("kind", [list, tuple])
def test_sequences_of_numbers(kind):
    rng = random.Random(0)
    for length in LENGTHS:
        ints = kind(rng.randrange(-(2**63), 2**63) for _ in range(length))
        floats = kind(
            rng.choice([rng.gauss(0, 1), -0.0, float("inf"), 5e-324]) for _ in range(length)
        )
        bools = kind(rng.random() < 0.5 for _ in range(length))
        for value in (
            ints,
            floats,
            bools,
            ints + floats,
            ints + bools,
            (*ints, 2**63),
            ints + kind([2**63]),
        ):
            found = kept({"x": value})["x"]
            assert type(found) is type(value) and found == value and str(found) == str(value)
            assert list(map(type, found)) == list(map(type, value))


def test_a_sequence_of_numbers_is_one_leaf():
    known = layout(
        entry_of({"x": list(range(512)), "y": (0.5,) * 100, "z": [True] * 8, "s": [1] * 7})
    )
    assert len(known.leaves) == 1 + 1 + 8 + 7
    first, second = (layout(entry_of([i] * 512)) for i in (1, 2))
    assert first is second


def test_batches_of_sequences_of_numbers(tmp_path):
    samples = [
        {"ids": list(range(i, i + 20)), "weights": (float(i),) * 9, "label": i} for i in range(12)
    ]
    cache = SampleCache(tmp_path, fingerprint="f", num_items=12, memory_bytes=1 << 20, disk_bytes=0)
    dataset = BatchDataset(CachedDataset(samples, cache))
    for _ in range(2):
        found, wanted = (
            collate(dataset.__getitems__([3, 1, 4])),
            default_collate([samples[i] for i in (3, 1, 4)]),
        )
        assert found.keys() == wanted.keys() and torch.equal(found["label"], wanted["label"])
        for name in ("ids", "weights"):
            assert type(found[name]) is type(wanted[name]) is list
            for x, y in zip(found[name], wanted[name], strict=True):
                assert x.dtype == y.dtype and torch.equal(x, y) and x.is_contiguous()
    assert cache.statistics().memory_hits == 3
    cache.close()

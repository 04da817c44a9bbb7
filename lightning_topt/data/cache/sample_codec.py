"""Samples as flat bytes and back, without pickle: entries of a cache file or a peer are only data.

An *entry* is a header and then the leaves' bytes, each padded to `ALIGNMENT` so that tensors can be
views of it:

    uint32 header size | header: JSON, padded with spaces | leaf 0 | leaf 1 | ...

A header is the JSON of ``[FORMAT, spec]``. A *spec* describes one value, ``[kind, ...]``. Numbers
are leaves, so that samples which differ only in values have the same header:

    ["int"], ["float"], ["bool"]                                8, 8 and 1 bytes
    ["tensor", dtype, shape], ["array" or "scalar", dtype, shape]
    ["str", nbytes], ["bytes", nbytes], ["str_", nbytes], ["bytes_", nbytes]   (str_: NumPy's)
    ["numbers", "list" or "tuple", "int" or "float", length]    one leaf for all of them
    ["image", mode, size, nbytes, spec]                         the pixels; palette and info
    ["list" or "tuple", specs], ["dict", [[key, spec], ...]]
    ["none"]                                                    which has no leaf

What is described comes back equal, of the same type, and shares no memory with other values; all
else is refused.
"""

from __future__ import annotations

import functools
import importlib
import json
import math
import struct
import sys
from collections.abc import Callable, Sequence, Sized
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

FORMAT = 4  # entries of another format cannot be read
ALIGNMENT = 16  # bytes: the largest element of a dtype
PREFIX = struct.Struct("<I")  # of an entry: the size of its header
FIXED = {"int": struct.Struct("<q"), "float": struct.Struct("<d"), "bool": struct.Struct("<?")}
TORCH_DTYPES = {
    str(value): value for value in vars(torch).values() if isinstance(value, torch.dtype)
}
MAX_HEADER_BYTES = 1 << 24
# Of headers whose layouts are kept: a layout takes about 35 times the memory of its header.
KEPT_HEADER_BYTES, KEPT_HEADERS = 1 << 12, 512
FEWEST_NUMBERS = 8  # of a list that becomes one leaf
_PADDING = bytes(ALIGNMENT)
_INT64 = range(-(2**63), 2**63)
Parts = list[Any]  # buffers: bytes, memoryview or an array (n,) of uint8
Spec = list[Any]  # of one value: [kind, ...]
Take = Callable[[], memoryview]  # returns the next leaf


class UnsupportedSample(TypeError):
    """A sample cannot be stored as plain data, or an entry cannot be read here."""


def encode(sample: object) -> Parts:
    """Return the entry of `sample`, as buffers to be written one after the other.

    Buffers of tensors and arrays are not copied. A sample is one of these:

    - a tensor, a NumPy array or scalar, or a PIL image;
    - str, bytes, int (of 64 bits), float, bool or None;
    - a list, tuple or dict (keys str or int) of samples.

    Types are exact, for what is decoded has the same ones, but for two: `np.memmap` comes back as
    an array, and every class of PIL as its plain image. Tensors and arrays come back contiguous. Of
    an image's `info` only plain data is kept.

    Raises:
        UnsupportedSample: it holds anything else.
    """
    leaves: Parts = []
    try:
        # with surrogatepass, and without JSON's escapes, halves of a pair stay halves
        spec = [FORMAT, describe(sample, leaves)]
        header = _to_json(spec).encode("utf-8", "surrogatepass")
    except RecursionError:
        raise UnsupportedSample(
            "a sample is nested too deeply for a cache, or holds itself: return it flat"
        ) from None
    # The header's end and every leaf are aligned.
    padded = -(-(PREFIX.size + len(header)) // ALIGNMENT) * ALIGNMENT - PREFIX.size
    parts: Parts = [PREFIX.pack(padded) + header.ljust(padded)]
    for leaf in leaves:
        parts.append(leaf)
        if rest := -len(leaf) % ALIGNMENT:
            parts.append(_PADDING[:rest])
    return parts


_to_json = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False).encode


def decode(entry: Any) -> Any:
    """Return the sample of `entry`, a writable buffer; tensors and arrays are views of it.

    Raises:
        UnsupportedSample: it is of another version, or an image where there is no pillow.
        ValueError: these bytes are no entry.
    """
    view = memoryview(entry).cast("B")
    known = layout(view)
    if known.nbytes != len(view):
        raise ValueError(f"a sample of {known.nbytes} bytes was expected; got {len(view)}")
    leaves = iter(known.leaves)
    return build(known.spec, lambda: view[(leaf := next(leaves)).start : leaf.start + leaf.nbytes])


def size_of(parts: Sequence[Sized]) -> int:
    """Return the bytes of an entry."""
    return sum(len(part) for part in parts)


def in_one_piece(parts: Parts) -> Any:
    """Return an entry in one piece, writable."""
    return parts[0] if len(parts) == 1 else bytearray(b"".join(map(memoryview, parts)))


# ---- the layout of an entry ----------------------------------------------------------------------


class Leaf(NamedTuple):
    """One leaf: its place in the entry (bytes), and its spec."""

    start: int
    nbytes: int
    spec: Spec


@dataclass(frozen=True)
class EntryLayout:
    """What a header says.

    Entries with equal `header` bytes have their leaves at equal places.
    """

    header: bytes
    spec: Spec
    leaves: tuple[Leaf, ...]
    nbytes: int  # of the whole entry


def header_of(entry: Any) -> bytes:
    """Return the header's bytes of an entry (any buffer).

    Raises:
        ValueError: there is none.
    """
    view = memoryview(entry).cast("B")
    if len(view) >= PREFIX.size:
        (size,) = PREFIX.unpack_from(view)
        if size <= MAX_HEADER_BYTES and PREFIX.size + size <= len(view):
            return bytes(view[PREFIX.size : PREFIX.size + size])
    raise ValueError("these bytes are no sample: their header is cut off")


def layout(entry: object) -> EntryLayout:
    """Return the layout of `entry` (any buffer)."""
    return layout_of(header_of(entry))


def layout_of(header: bytes) -> EntryLayout:
    """Return the layout of entries with this header.

    Raises:
        ValueError: these bytes are no header.
        UnsupportedSample: it is of another version.
    """
    return _kept_layout(header) if len(header) <= KEPT_HEADER_BYTES else _read_layout(header)


def _read_layout(header: bytes) -> EntryLayout:
    read = json.loads(header)
    if not isinstance(read, list) or len(read) != 2 or read[0] != FORMAT:
        raise UnsupportedSample(
            "a cached sample is of another version of lightning_topt: use another directory"
        )
    leaves: list[Leaf] = []
    end = _place(read[1], leaves, PREFIX.size + len(header))
    return EntryLayout(header, read[1], tuple(leaves), end)


_kept_layout = functools.lru_cache(maxsize=KEPT_HEADERS)(_read_layout)


def leaves_of(parts: Parts, known: EntryLayout) -> list[Any]:
    """Return the leaves of an entry with this layout: in one piece, or as `encode` gives it."""
    if len(parts) == 1:
        view = memoryview(parts[0]).cast("B")
        return [view[leaf.start : leaf.start + leaf.nbytes] for leaf in known.leaves]
    leaves, rest = [], iter(parts[1:])
    for leaf in known.leaves:
        leaves.append(next(rest))
        if leaf.nbytes % ALIGNMENT:
            next(rest)  # padding
    return leaves


def _place(spec: Spec, leaves: list[Leaf], start: int) -> int:
    # Append the leaves of `spec`, the first at `start`; returns where the next one begins
    kind, nbytes = spec[0], None
    inner: Sequence[Spec] = ()
    if kind in FIXED:
        nbytes = FIXED[kind].size
    elif kind == "tensor":
        nbytes = math.prod(spec[2]) * TORCH_DTYPES[spec[1]].itemsize
    elif kind in ("array", "scalar"):
        nbytes = math.prod(spec[2]) * np.dtype(spec[1]).itemsize
    elif kind in ("str", "bytes", "str_", "bytes_"):
        nbytes = int(spec[1])
    elif kind == "numbers":
        nbytes = int(spec[3]) * FIXED[spec[2]].size
    elif kind == "image":
        nbytes, inner = int(spec[3]), [spec[4]]
    elif kind in ("list", "tuple"):
        inner = spec[1]
    elif kind == "dict":
        inner = [item for _, item in spec[1]]
    if nbytes is not None:
        leaves.append(Leaf(start, nbytes, spec))
        start += -(-nbytes // ALIGNMENT) * ALIGNMENT
    for child in inner:
        start = _place(child, leaves, start)
    return start


# ---- values to specs and leaves ------------------------------------------------------------------


def describe(value: Any, leaves: Parts) -> Spec:
    """Return the spec of `value`, and append its leaves.

    Raises:
        UnsupportedSample: it cannot be stored.
    """
    kind: type = type(value)
    # by exact type first
    if known := _DESCRIBE.get(kind):
        return known(value, leaves)
    if isinstance(value, np.generic) and kind is value.dtype.type:
        return _describe_array(value, leaves)
    pil = sys.modules.get("PIL.Image")  # a class derived from theirs may hold more
    if pil is not None and isinstance(value, pil.Image) and kind.__module__.startswith("PIL."):
        return _describe_image(value, leaves)
    raise UnsupportedSample(
        f"a sample holds a {kind.__module__}.{kind.__qualname__}, which a cache cannot store as "
        "plain data: return tensors, arrays, PIL images, numbers, texts, bytes, and lists, tuples "
        "or dicts of them, none of derived classes"
    )


def _describe_tensor(value: Tensor, leaves: Parts) -> Spec:
    # layouts and devices that plain bytes do not stand for
    if (
        value.layout != torch.strided
        or value.device.type != "cpu"
        or value.is_quantized
        or value.is_nested
        or value.requires_grad
        or value.__dict__
    ):
        raise UnsupportedSample(
            "tensors of a sample are dense, on the CPU, need no gradient and have no attributes of "
            f"their own; got {value.layout} on {value.device}, requires_grad={value.requires_grad}"
        )
    # bytes as they are in memory: without lazy conjugation or negation, and without gaps
    plain = (
        (value.resolve_conj().resolve_neg() if value.is_conj() or value.is_neg() else value)
        .contiguous()
        .view(-1)
    )
    leaves.append(plain.view(torch.uint8).numpy() if plain.numel() else b"")
    return ["tensor", str(value.dtype), list(value.shape)]


def _describe_array(value: Any, leaves: Parts) -> Spec:
    dtype = value.dtype
    # Dtypes of some libraries are not the one that their string names.
    is_whole = dtype.names is None and dtype.itemsize and np.dtype(dtype.str) == dtype
    # Long doubles have padding with random bytes.
    if dtype.hasobject or not is_whole or dtype.char in "gG":
        raise UnsupportedSample(
            "arrays of a sample have plain dtypes, of no fields, objects or long doubles; got "
            f"{dtype}: return such arrays"
        )
    plain = np.ascontiguousarray(value)
    leaves.append(plain.reshape(-1).view(np.uint8) if plain.size else b"")
    return ["array" if isinstance(value, np.ndarray) else "scalar", dtype.str, list(value.shape)]


def _describe_sequence(value: Any, leaves: Parts) -> Spec:
    # many numbers of one type are packed as one leaf
    name = type(value).__name__
    if (
        len(value) >= FEWEST_NUMBERS
        and type(value[0]) in (int, float)
        and len(set(map(type, value))) == 1
    ):
        kind = type(value[0]).__name__
        try:
            leaves.append(struct.pack(f"<{len(value)}{'q' if kind == 'int' else 'd'}", *value))
        except struct.error:
            raise UnsupportedSample("integers of a sample have 64 bits: return text") from None
        return ["numbers", name, kind, len(value)]
    return [name, [describe(item, leaves) for item in value]]


def _describe_dict(value: dict[Any, Any], leaves: Parts) -> Spec:
    pairs = []
    # keys in their order, which comes back
    for key, item in value.items():
        if type(key) not in (str, int):
            raise UnsupportedSample(f"keys of a sample's dict are str or int; got {key!r}")
        pairs.append([key, describe(item, leaves)])
    return ["dict", pairs]


def _describe_image(value: Any, leaves: Parts) -> Spec:
    """Describe an image: its pixels, its palette and the plain data of `info`.

    That is resolution, transparency, Exif and colour profile.
    """
    leaves.append(value.tobytes())  # which reads the file, if it has not been read yet
    size = len(leaves[-1])
    palette = None  # its mode, and the colours in it
    if value.mode in ("P", "PA"):
        palette = value.im.getpalettemode(), bytes(value.getpalette(None))
    info = {key: item for key, item in value.info.items() if _is_plain({key: item})}
    return ["image", value.mode, list(value.size), size, describe([palette, info], leaves)]


def _is_plain(value: object) -> bool:
    try:
        describe(value, [])
    except UnsupportedSample:
        return False
    return True


def _describe_number(value: Any, leaves: Parts) -> Spec:
    kind = type(value).__name__
    if kind == "int" and value not in _INT64:
        raise UnsupportedSample("integers of a sample have 64 bits: return text")
    leaves.append(FIXED[kind].pack(value))
    return [kind]


def _describe_text(value: str | bytes, leaves: Parts) -> Spec:
    leaves.append(
        value.encode("utf-8", "surrogatepass") if isinstance(value, str) else bytes(value)
    )
    return [type(value).__name__, len(leaves[-1])]


_DESCRIBE: dict[type, Callable[[Any, Parts], Spec]] = {
    Tensor: _describe_tensor,
    np.ndarray: _describe_array,
    np.memmap: _describe_array,  # comes back as an array, which needs no file
    **dict.fromkeys((int, float, bool), _describe_number),
    **dict.fromkeys((list, tuple), _describe_sequence),
    dict: _describe_dict,
    # NumPy's not as arrays, which lose empty texts and NULs at the end
    **dict.fromkeys((str, bytes, np.str_, np.bytes_), _describe_text),
    type(None): lambda value, leaves: ["none"],
}


# ---- specs and leaves to values ------------------------------------------------------------------


def build(spec: Spec, take: Take) -> Any:
    """Return the value that `spec` describes; tensors and arrays are views of the leaves.

    Raises:
        ValueError: the kind is unknown.
        UnsupportedSample: an image, where there is no pillow.
    """
    make = _BUILD.get(spec[0])
    if make is None:
        raise ValueError(
            f"a sample's header names the kind {spec[0]!r}, which this version does not know"
        )
    return make(spec, take)


def _build_tensor(spec: Spec, take: Take) -> Tensor:
    # an empty leaf has no memory that a tensor could be a view of
    data = take()
    if not len(data):
        return torch.empty(spec[2], dtype=TORCH_DTYPES[spec[1]], device="cpu")
    return torch.frombuffer(data, dtype=TORCH_DTYPES[spec[1]]).view(spec[2])


def _build_array(spec: Spec, take: Take) -> object:
    # a scalar is the only element of an array without dimensions
    array = np.frombuffer(take(), dtype=spec[1]).reshape(spec[2])
    return array if spec[0] == "array" else array[()]


def _build_numbers(spec: Spec, take: Take) -> object:
    _, name, kind, _ = spec
    # of little-endian numbers, whatever machine has written them
    numbers = np.frombuffer(take(), dtype="<i8" if kind == "int" else "<f8").tolist()
    return numbers if name == "list" else tuple(numbers)


def _build_text(spec: Spec, take: Take) -> object:
    data, kind = take(), spec[0]
    if kind in ("bytes", "bytes_"):
        return bytes(data) if kind == "bytes" else np.bytes_(bytes(data))
    text = str(data, "utf-8", "surrogatepass")
    return text if kind == "str" else np.str_(text)


def _build_image(spec: Spec, take: Take) -> object:
    pixels = bytes(take())
    palette, info = build(spec[4], take)
    try:
        pil = importlib.import_module("PIL.Image")
    except ImportError:
        raise UnsupportedSample("a cached sample is a PIL image: install pillow") from None
    image = pil.frombytes(spec[1], tuple(spec[2]), pixels)
    if palette is not None:
        image.putpalette(palette[1], palette[0])
        image.load()  # before there is an info, whose transparency it may put into the palette
    image.info.update(info)
    return image


_BUILD: dict[str, Callable[[Spec, Take], object]] = {
    "tensor": _build_tensor,
    **dict.fromkeys(("array", "scalar"), _build_array),
    **dict.fromkeys(FIXED, lambda spec, take: FIXED[spec[0]].unpack(take())[0]),
    "numbers": _build_numbers,
    **dict.fromkeys(("str", "bytes", "str_", "bytes_"), _build_text),
    "image": _build_image,
    "list": lambda spec, take: [build(item, take) for item in spec[1]],
    "tuple": lambda spec, take: tuple([build(item, take) for item in spec[1]]),
    "dict": lambda spec, take: {key: build(item, take) for key, item in spec[1]},
    "none": lambda spec, take: None,
}

"""The header of an entry: how a sample is nested, and the dtype, shape and place of every leaf.

This is a wire format; `sample_codec` makes and reads entries. A header is the JSON of ``[FORMAT,
spec]``. A *spec* describes one value, ``[kind, ...]``:

    ["int"], ["float"], ["bool"], ["complex"]                   8, 8, 1 and 16 bytes
    ["tensor", dtype, shape], ["array" or "scalar", dtype, shape]
    ["str", nbytes], ["bytes", nbytes], ["str_", nbytes], ["bytes_", nbytes]   (str_: NumPy's)
    ["numbers", "list" or "tuple", "int" or "float", length]    one leaf for all of them
    ["image", mode, size, nbytes, spec]                         the pixels; palette and info
    ["list" or "tuple", specs], ["dict", [[key, spec], ...]]
    ["named", type, specs, fields], ["record", type, [[attribute, spec], ...], fields]
    ["none"], ["digits", text]                                  which have no leaf
"""

from __future__ import annotations

import dataclasses
import json
import math
import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

FORMAT = 2  # entries of another format cannot be read
ALIGNMENT = 16  # bytes: the largest element of a dtype
PREFIX = struct.Struct("<I")  # of an entry: the size of its header
FIXED = {
    "int": struct.Struct("<q"),
    "float": struct.Struct("<d"),
    "bool": struct.Struct("<?"),
    "complex": struct.Struct("<dd"),
}
TORCH_DTYPES = {
    str(value): value for value in vars(torch).values() if isinstance(value, torch.dtype)
}
# Of headers whose layouts are kept. A layout takes about 35 times the memory of its header.
KEPT_HEADER_BYTES = 1 << 18
Spec = list[Any]  # of one value: [kind, ...]


class UnsupportedSample(TypeError):
    """A sample cannot be stored as plain data, or an entry cannot be read here."""


class Leaf(NamedTuple):
    """One leaf: its place in the entry (bytes), and its spec."""

    start: int
    nbytes: int
    spec: Spec


@dataclasses.dataclass(frozen=True)
class EntryLayout:
    """What a header says.

    Entries with equal `header` bytes have their leaves at equal places.
    """

    header: bytes
    spec: Spec
    leaves: tuple[Leaf, ...]
    nbytes: int  # of the whole entry


def layout_of(header: bytes) -> EntryLayout:
    """Return the layout of entries with this header.

    Raises:
        ValueError: these bytes are no header.
        UnsupportedSample: it is of another version.
    """
    return _layouts[header]


class _Layouts(dict[bytes, EntryLayout]):
    """Layouts by header; all are dropped when these take too many bytes."""

    room = KEPT_HEADER_BYTES

    # A hit is a lookup in a dict, the fastest there is.
    def __missing__(self, header: bytes) -> EntryLayout:
        read = json.loads(header)
        if not isinstance(read, list) or len(read) != 2 or read[0] != FORMAT:
            raise UnsupportedSample(
                "a cached sample is of another version of lightning_topt: use another directory"
            )
        leaves: list[Leaf] = []
        end = _place(read[1], leaves, PREFIX.size + len(header))
        known = EntryLayout(header, read[1], tuple(leaves), end)
        if len(header) > KEPT_HEADER_BYTES:
            return known
        if len(header) > self.room:
            self.clear()
            self.room = KEPT_HEADER_BYTES
        self.room -= len(header)
        self[header] = known
        return known


_layouts = _Layouts()


def _place(spec: Spec, leaves: list[Leaf], start: int) -> int:
    """Append the leaves of `spec`, the first at `start`.

    Returns where the next one begins.
    """
    nbytes = leaf_bytes(spec)
    if nbytes is not None:
        leaves.append(Leaf(start, nbytes, spec))
        start += -(-nbytes // ALIGNMENT) * ALIGNMENT
    for child in children(spec):
        start = _place(child, leaves, start)
    return start


def children(spec: Spec) -> Sequence[Spec]:
    """Return the specs inside a container's or an image's."""
    kind = spec[0]
    if kind in ("list", "tuple"):
        return spec[1]  # type: ignore[no-any-return]
    if kind == "dict":
        return [item for _, item in spec[1]]
    if kind == "named":
        return spec[2]  # type: ignore[no-any-return]
    if kind == "record":
        return [item for _, item in spec[2]]
    return [spec[4]] if kind == "image" else []


def leaf_bytes(spec: Spec) -> int | None:
    """Return the bytes of the leaf that `spec` describes, None where it has none."""
    kind = spec[0]
    if kind in FIXED:
        return FIXED[kind].size
    if kind == "tensor":
        return math.prod(spec[2]) * TORCH_DTYPES[spec[1]].itemsize
    if kind in ("array", "scalar"):
        return math.prod(spec[2]) * np.dtype(spec[1]).itemsize
    if kind in ("str", "bytes", "str_", "bytes_"):
        return int(spec[1])
    if kind == "numbers":
        return int(spec[3]) * FIXED[spec[2]].size
    return int(spec[3]) if kind == "image" else None


_to_json = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False).encode


def header_text(spec: Spec) -> bytes:
    """Return the header of an entry whose sample has this spec, without padding."""
    # Without surrogatepass, and with JSON's escapes, two halves of a pair would come back as one
    # character.
    return _to_json([FORMAT, spec]).encode("utf-8", "surrogatepass")

"""The header of an entry says how a sample is nested, and of every leaf its dtype, shape and place.

A header is the JSON of ``[FORMAT, spec]``. A *spec* describes one value, ``[kind, ...]``:

    ["int"], ["float"], ["bool"], ["complex"]                   8, 8, 1 and 16 bytes
    ["tensor", dtype, shape], ["array" or "scalar", dtype, shape]
    ["str", nbytes], ["bytes", nbytes]
    ["str_", nbytes], ["bytes_", nbytes]                        NumPy's
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

FORMAT = 2  # another number: entries of the one are none for the other
ALIGNMENT = 16  # bytes: the largest element of a dtype
PREFIX = struct.Struct("<I")  # of an entry: bytes of its header
FIXED = {
    "int": struct.Struct("<q"),
    "float": struct.Struct("<d"),
    "bool": struct.Struct("<?"),
    "complex": struct.Struct("<dd"),
}
TORCH_DTYPES = {
    str(value): value for value in vars(torch).values() if isinstance(value, torch.dtype)
}
# A layout takes about 35 times the memory of its header, which is short unless samples hold many
# values.
KEPT_HEADER_BYTES = 1 << 18
Spec = list[Any]  # of one value: [kind, ...]
_to_json = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False).encode


class UnsupportedSample(TypeError):
    """A sample has a value that cannot be stored as plain data, or an entry one that is not known
    here.
    """


class Leaf(NamedTuple):
    """A `Leaf` says where one leaf lies in its entry (bytes), and what it is: its `Spec`."""

    start: int
    nbytes: int
    spec: Spec


@dataclasses.dataclass(frozen=True)
class Layout:
    """A `Layout` is what a header says. Entries with equal `header` bytes have their leaves at
    equal places.
    """

    header: bytes
    spec: Spec
    leaves: tuple[Leaf, ...]
    nbytes: int  # of the whole entry


class _Layouts(dict[bytes, Layout]):
    """Layouts by their headers, all of them forgotten where these take too many bytes."""

    room = KEPT_HEADER_BYTES

    # A read that finds something is a dict's own, the fastest there is.
    def __missing__(self, header: bytes) -> Layout:
        known = _read(header)
        if len(header) > KEPT_HEADER_BYTES:
            return known
        if len(header) > self.room:
            self.clear()
            self.room = KEPT_HEADER_BYTES
        self.room -= len(header)
        self[header] = known
        return known


_layouts = _Layouts()


def header_text(spec: Spec) -> bytes:
    """Return the header of an entry whose sample has this spec, without padding."""
    # Without surrogatepass, and with JSON's escapes, two halves of a pair would come back as one
    # character.
    return _to_json([FORMAT, spec]).encode("utf-8", "surrogatepass")


def layout_of(header: bytes) -> Layout:
    """Return where everything is in an entry with this header.

    Raises ValueError for bytes that are no header, UnsupportedSample for the header of another
    version.
    """
    return _layouts[header]


def _read(header: bytes) -> Layout:
    found = json.loads(header)
    if not isinstance(found, list) or len(found) != 2 or found[0] != FORMAT:
        raise UnsupportedSample(
            "a cached sample is of another version of lightning_topt: use another directory"
        )
    leaves: list[Leaf] = []
    end = _place(found[1], leaves, PREFIX.size + len(header))
    return Layout(header, found[1], tuple(leaves), end)


def _place(spec: Spec, leaves: list[Leaf], start: int) -> int:
    """Append the leaves of `spec`, the first at `start`; where the next one begins."""
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
    """Return the bytes of the leaf that `spec` describes, None where it describes none."""
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

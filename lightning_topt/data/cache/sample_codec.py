"""Samples as flat bytes and back, without pickle: what is read from a cache file or a peer can only
ever become data.

An *entry* is a header and then the leaves' bytes, each padded to `ALIGNMENT` so that tensors can be
views of it:

    uint32 header size | header: JSON, padded with spaces | leaf 0 | leaf 1 | ...

The header describes the nesting and every leaf's dtype and shape (`sample_layout`); numbers are
leaves, so that samples which differ only in values have the same header. How each kind of value is
taken apart is in `sample_values`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lightning_topt.data.cache.sample_layout import (
    ALIGNMENT,
    FORMAT,
    PREFIX,
    TORCH_DTYPES,
    Layout,
    Leaf,
    Spec,
    UnsupportedSample,
    children,
    header_text,
    layout_of,
)
from lightning_topt.data.cache.sample_records import named_type, register_sample_type, type_name
from lightning_topt.data.cache.sample_values import Parts, build, describe, inside

__all__ = [
    "ALIGNMENT",
    "FORMAT",
    "MAX_HEADER_BYTES",
    "TORCH_DTYPES",
    "Layout",
    "Leaf",
    "Parts",
    "Spec",
    "UnsupportedSample",
    "changed_by_storing",
    "children",
    "decode",
    "encode",
    "header_of",
    "joined",
    "layout",
    "layout_of",
    "leaves_of",
    "named_type",
    "register_sample_type",
    "size_of",
]

MAX_HEADER_BYTES = 1 << 24
_PADDING = bytes(ALIGNMENT)


def encode(sample: Any) -> Parts:
    """Return the entry of `sample`, as buffers to be written one after the other; those of tensors
    and arrays are not copied.

    A sample is a tensor, NumPy array or scalar, PIL image, str, bytes, int, float, complex, bool or
    None, or a list, tuple, dict (keys str or int), NamedTuple or dataclass of samples. Types are
    exact, for what is decoded has the same ones, but for two: `np.memmap` comes back as an array,
    and every class of PIL as its plain image. Tensors and arrays come back contiguous, of an
    image's `info` what is plain data. Raises UnsupportedSample for anything else.
    """
    leaves: Parts = []
    try:
        header = header_text(describe(sample, leaves))
    except RecursionError:
        raise UnsupportedSample(
            "a sample is nested too deeply for a cache, or holds itself: return it flat"
        ) from None
    padded = -(-(PREFIX.size + len(header)) // ALIGNMENT) * ALIGNMENT - PREFIX.size
    parts: Parts = [PREFIX.pack(padded) + header.ljust(padded)]
    for leaf in leaves:
        parts.append(leaf)
        if rest := -len(leaf) % ALIGNMENT:
            parts.append(_PADDING[:rest])
    return parts


def joined(parts: Parts) -> Any:
    """Return an entry in one piece, writable."""
    return parts[0] if len(parts) == 1 else bytearray(b"".join(map(memoryview, parts)))


def leaves_of(parts: Parts, known: Layout) -> list[Any]:
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


def size_of(parts: Sequence[Any]) -> int:
    """Return the bytes of an entry."""
    return sum(len(part) for part in parts)


def header_of(entry: Any) -> bytes:
    """Return the header's bytes of an entry (any buffer). Raises ValueError where there is none."""
    view = memoryview(entry).cast("B")
    if len(view) >= PREFIX.size:
        (size,) = PREFIX.unpack_from(view)
        if size <= MAX_HEADER_BYTES and PREFIX.size + size <= len(view):
            return bytes(view[PREFIX.size : PREFIX.size + size])
    raise ValueError("these bytes are no sample: their header is cut off")


def layout(entry: Any) -> Layout:
    """Return where everything is in `entry` (any buffer)."""
    return layout_of(header_of(entry))


def decode(entry: Any) -> Any:
    """Return the sample of `entry`, a writable buffer; tensors and arrays are views of it.

    Raises UnsupportedSample for a NamedTuple or dataclass that is not registered or has other
    fields here, and for an entry of another version; ValueError for bytes that are no entry.
    """
    view = memoryview(entry).cast("B")
    known = layout(view)
    if known.nbytes != len(view):
        raise ValueError(f"a sample of {known.nbytes} bytes was expected; got {len(view)}")
    leaves = iter(known.leaves)
    return build(known.spec, lambda: view[(leaf := next(leaves)).start : leaf.start + leaf.nbytes])


def changed_by_storing(sample: Any) -> str | None:
    """Return the innermost type in `sample` that is not encoded alike once it has been decoded;
    None where everything is.
    """
    entry = b"".join(map(bytes, encode(sample)))
    if b"".join(map(bytes, encode(decode(bytearray(entry))))) == entry:
        return None
    found = (changed_by_storing(item) for item in inside(sample))
    return next(filter(None, found), type_name(type(sample)))

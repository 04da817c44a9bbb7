"""Samples as flat bytes and back, without pickle: what is read from a cache file or a peer can only ever become data.

An *entry* is a header and then the leaves' bytes, each padded to `ALIGNMENT` so that tensors can be views of it:

    uint32 header size | header: JSON, padded with spaces | leaf 0 | leaf 1 | ...

The header describes the nesting and every leaf's dtype and shape; numbers are leaves, so that samples which differ only in
values have the same header.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import json
import struct
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

ALIGNMENT = 16  # bytes: the largest element of a dtype
MAX_HEADER_BYTES = 1 << 24
_SIZE = struct.Struct("<I")
_INT64 = range(-(2**63), 2**63)
_PADDING = bytes(ALIGNMENT)
_to_json = json.JSONEncoder(separators=(",", ":")).encode
_FIXED = {
    "int": struct.Struct("<q"),
    "float": struct.Struct("<d"),
    "bool": struct.Struct("<?"),
    "complex": struct.Struct("<dd"),
}
TORCH_DTYPES = {str(value): value for value in vars(torch).values() if isinstance(value, torch.dtype)}
_record_types: dict[str, type] = {}
Parts = list[Any]  # buffers: bytes, memoryview or an array (n,) of uint8
Spec = list[Any]  # of one value, as in the header: [kind, ...]


class UnsupportedSample(TypeError):
    """A sample has a value that cannot be stored as plain data, or an entry one that is not known here."""


class Leaf(NamedTuple):
    """Where one leaf lies in its entry (bytes), and what it is: its `Spec`."""

    start: int
    nbytes: int
    spec: Spec


@dataclasses.dataclass(frozen=True)
class Layout:
    """What a header says. Entries with equal `header` bytes have their leaves at equal places."""

    header: bytes
    spec: Spec
    leaves: tuple[Leaf, ...]
    nbytes: int  # of the whole entry


def register_sample_type(record: type) -> None:
    """Let a NamedTuple or dataclass be decoded here. Encoding one registers it; a process that only decodes may need this."""
    _record_types[_type_name(record)] = record


def named_type(name: str) -> type | None:
    """The registered NamedTuple or dataclass of that name (module and qualified name)."""
    return _record_types.get(name)


def encode(sample: Any) -> Parts:
    """The entry of `sample`, as buffers to be written one after the other; those of tensors and arrays are not copied.

    A sample is a tensor, NumPy array or scalar, PIL image, str, bytes, int, float, complex, bool or None, or a list, tuple,
    dict (keys str or int), NamedTuple or dataclass of samples. Raises UnsupportedSample for anything else.
    """
    leaves: Parts = []
    header = _to_json(_describe(sample, leaves)).encode()
    padded = -(-(_SIZE.size + len(header)) // ALIGNMENT) * ALIGNMENT - _SIZE.size
    parts: Parts = [_SIZE.pack(padded) + header.ljust(padded)]
    for leaf in leaves:
        parts.append(leaf)
        if rest := -len(leaf) % ALIGNMENT:
            parts.append(_PADDING[:rest])
    return parts


def joined(parts: Parts) -> Any:
    """An entry in one piece, writable."""
    return parts[0] if len(parts) == 1 else bytearray(b"".join(map(memoryview, parts)))


def leaves_of(parts: Parts, known: Layout) -> list[Any]:
    """The leaves of an entry with this layout: in one piece, or as `encode` gives it."""
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
    """Bytes of an entry."""
    return sum(len(part) for part in parts)


def header_of(entry: Any) -> bytes:
    """The header's bytes of an entry (any buffer). Raises ValueError where there is none."""
    view = memoryview(entry).cast("B")
    if len(view) >= _SIZE.size:
        (size,) = _SIZE.unpack_from(view)
        if size <= MAX_HEADER_BYTES and _SIZE.size + size <= len(view):
            return bytes(view[_SIZE.size : _SIZE.size + size])
    raise ValueError("these bytes are no sample: their header is cut off")


@lru_cache(maxsize=1024)
def layout_of(header: bytes) -> Layout:
    """Where everything is in an entry with this header. Raises ValueError for bytes that are no header."""
    spec = json.loads(header)
    leaves: list[Leaf] = []
    end = _place(spec, leaves, _SIZE.size + len(header))
    return Layout(header, spec, tuple(leaves), end)


def layout(entry: Any) -> Layout:
    """Where everything is in `entry` (any buffer)."""
    return layout_of(header_of(entry))


def decode(entry: Any) -> Any:
    """The sample of `entry`, a writable buffer; tensors and arrays are views of it.

    Raises UnsupportedSample for a NamedTuple or dataclass that is not registered, ValueError for bytes that are no entry.
    """
    view = memoryview(entry).cast("B")
    known = layout(view)
    if known.nbytes != len(view):
        raise ValueError(f"a sample of {known.nbytes} bytes was expected; got {len(view)}")
    leaves = iter(known.leaves)
    return _build(known.spec, lambda: view[(leaf := next(leaves)).start : leaf.start + leaf.nbytes])


def _type_name(record: type) -> str:
    return f"{record.__module__}.{record.__qualname__}"


def _describe(value: Any, leaves: Parts) -> Spec:
    kind = type(value)
    if describe := _DESCRIBE.get(kind):
        return describe(value, leaves)
    if isinstance(value, np.ndarray | np.generic):
        return _describe_array(value, leaves)
    if kind in (list, tuple):
        return [kind.__name__, [_describe(item, leaves) for item in value]]
    if kind is dict:
        return ["dict", [[_key(key), _describe(item, leaves)] for key, item in value.items()]]
    if isinstance(value, tuple) and hasattr(kind, "_fields"):
        register_sample_type(kind)
        return ["named", _type_name(kind), [_describe(item, leaves) for item in value]]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        register_sample_type(kind)
        fields = [[f.name, _describe(getattr(value, f.name), leaves)] for f in dataclasses.fields(value) if f.init]
        return ["record", _type_name(kind), fields]
    if kind.__module__.startswith("PIL.") and hasattr(value, "tobytes"):
        return _describe_image(value, leaves)
    raise UnsupportedSample(
        f"a sample holds a {_type_name(kind)}, which a cache cannot store as plain data: return tensors, NumPy arrays, PIL "
        "images, numbers, strings, bytes, and lists, tuples, dicts, NamedTuples or dataclasses of them"
    )


def _key(key: Any) -> str | int:
    if type(key) not in (str, int):
        raise UnsupportedSample(f"keys of a sample's dict are str or int; got {key!r}")
    return key  # type: ignore[no-any-return]


def _describe_tensor(value: Tensor, leaves: Parts) -> Spec:
    if value.layout != torch.strided or value.device.type != "cpu" or value.is_quantized or value.requires_grad:
        raise UnsupportedSample(
            "tensors of a sample are dense, on the CPU and need no gradient; "
            f"got {value.layout} on {value.device}, requires_grad={value.requires_grad}"
        )
    plain = (value.resolve_conj().resolve_neg() if value.is_conj() or value.is_neg() else value).contiguous().view(-1)
    leaves.append(plain.view(torch.uint8).numpy() if plain.numel() else b"")
    return ["tensor", str(value.dtype), list(value.shape)]


def _describe_array(value: Any, leaves: Parts) -> Spec:
    if value.dtype.hasobject or value.dtype.names:
        raise UnsupportedSample(f"arrays of a sample have plain dtypes; got {value.dtype}")
    plain = np.ascontiguousarray(value)
    leaves.append(plain.reshape(-1).view(np.uint8) if plain.size else b"")
    return ["array" if isinstance(value, np.ndarray) else "scalar", value.dtype.str, list(value.shape)]


def _describe_image(value: Any, leaves: Parts) -> Spec:
    """Pixels, palette, and of `info` what is plain data (resolution, transparency, colour profile)."""
    leaves.append(value.tobytes())
    palette = value.getpalette("RGBA") if value.mode in ("P", "PA") else None
    info = {}
    for key, item in value.info.items():
        try:
            _describe(item, [])
        except UnsupportedSample:
            continue
        info[str(key)] = item
    extra = [bytes(palette) if palette else None, info]
    return ["image", value.mode, list(value.size), len(leaves[-1]), _describe(extra, leaves)]


def _describe_int(value: int, leaves: Parts) -> Spec:
    if value not in _INT64:
        return ["digits", str(value)]
    leaves.append(_FIXED["int"].pack(value))
    return ["int"]


def _describe_fixed(value: Any, leaves: Parts) -> Spec:
    kind = type(value).__name__
    leaves.append(_FIXED[kind].pack(*((value.real, value.imag) if kind == "complex" else (value,))))
    return [kind]


def _describe_bytes(value: bytes, leaves: Parts) -> Spec:
    leaves.append(value)
    return ["bytes", len(value)]


def _describe_str(value: str, leaves: Parts) -> Spec:
    leaves.append(value.encode("utf-8", "surrogatepass"))
    return ["str", len(leaves[-1])]


_DESCRIBE: dict[type, Callable[[Any, Parts], Spec]] = {
    Tensor: _describe_tensor,
    int: _describe_int,
    float: _describe_fixed,
    bool: _describe_fixed,
    complex: _describe_fixed,
    bytes: _describe_bytes,
    str: _describe_str,
    type(None): lambda value, leaves: ["none"],
}


def children(spec: Spec) -> Sequence[Spec]:
    """The specs inside a container's or an image's."""
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
    """Bytes of the leaf that `spec` describes, None where it describes none."""
    kind = spec[0]
    if kind in _FIXED:
        return _FIXED[kind].size
    if kind == "tensor":
        return int(np.prod(spec[2], dtype=np.int64)) * TORCH_DTYPES[spec[1]].itemsize
    if kind in ("array", "scalar"):
        return int(np.prod(spec[2], dtype=np.int64)) * np.dtype(spec[1]).itemsize
    if kind in ("bytes", "str"):
        return int(spec[1])
    return int(spec[3]) if kind == "image" else None


def _place(spec: Spec, leaves: list[Leaf], start: int) -> int:
    """Append the leaves of `spec`, the first at `start`; where the next one begins."""
    nbytes = leaf_bytes(spec)
    if nbytes is not None:
        leaves.append(Leaf(start, nbytes, spec))
        start += -(-nbytes // ALIGNMENT) * ALIGNMENT
    for child in children(spec):
        start = _place(child, leaves, start)
    return start


def _build(spec: Spec, take: Callable[[], memoryview]) -> Any:
    kind = spec[0]
    if leaf_bytes(spec) is not None:
        return _build_leaf(kind, spec, take)
    if kind in ("list", "tuple"):
        items = [_build(item, take) for item in spec[1]]
        return items if kind == "list" else tuple(items)
    if kind == "dict":
        return {key: _build(item, take) for key, item in spec[1]}
    if kind in ("named", "record"):
        record = _record_types.get(spec[1])
        if record is None:
            raise UnsupportedSample(f"{spec[1]} is not known here: call register_sample_type on it")
        if kind == "named":
            return record(*(_build(item, take) for item in spec[2]))
        return record(**{name: _build(item, take) for name, item in spec[2]})
    if kind == "digits":
        return int(spec[1])
    if kind == "none":
        return None
    raise ValueError(f"a sample's header names the kind {kind!r}, which this version does not know")


def _build_leaf(kind: str, spec: Spec, take: Callable[[], memoryview]) -> Any:
    data = take()
    if kind == "tensor":
        if not len(data):
            return torch.empty(spec[2], dtype=TORCH_DTYPES[spec[1]], device="cpu")
        return torch.frombuffer(data, dtype=TORCH_DTYPES[spec[1]]).view(spec[2])
    if kind in ("array", "scalar"):
        array = np.frombuffer(data, dtype=spec[1]).reshape(spec[2])
        return array if kind == "array" else array[()]
    if kind in _FIXED:
        values = _FIXED[kind].unpack(data)
        return complex(*values) if kind == "complex" else values[0]
    if kind == "image":
        return _build_image(spec, bytes(data), take)
    return str(data, "utf-8", "surrogatepass") if kind == "str" else bytes(data)


def _build_image(spec: Spec, pixels: bytes, take: Callable[[], memoryview]) -> Any:
    palette, info = _build(spec[4], take)
    image = _pil_image().frombytes(spec[1], tuple(spec[2]), pixels)
    if palette is not None:
        image.putpalette(palette, "RGBA")
    image.info.update(info)
    return image


@lru_cache(maxsize=1)
def _pil_image() -> Any:
    if importlib.util.find_spec("PIL") is None:
        raise UnsupportedSample("a cached sample is a PIL image: install pillow")
    return importlib.import_module("PIL.Image")

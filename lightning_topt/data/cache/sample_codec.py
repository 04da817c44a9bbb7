"""Samples as flat bytes and back, without pickle: entries of a cache file or a peer are only data.

An *entry* is a header and then the leaves' bytes, each padded to `ALIGNMENT` so that tensors can be
views of it:

    uint32 header size | header: JSON, padded with spaces | leaf 0 | leaf 1 | ...

The header describes the nesting and every leaf's dtype and shape (`sample_layout`). Numbers are
leaves, so that samples which differ only in values have the same header. For each kind of value one
function describes it (`_DESCRIBE`: value to spec and leaves), and one builds it (`_BUILD`).

What is described comes back equal, of the same type, and shares no memory with other values; a
value for which that does not hold is refused. NamedTuples and dataclasses are taken apart and put
together as they are: their own code has run once and does not run again.
"""

from __future__ import annotations

import enum
import importlib
import importlib.util
import struct
import sys
import types
from collections.abc import Callable, Iterable, Sequence, Sized
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_topt.data.cache.sample_layout import (
    ALIGNMENT,
    FIXED,
    PREFIX,
    TORCH_DTYPES,
    EntryLayout,
    Spec,
    UnsupportedSample,
    header_text,
    layout_of,
)

MAX_HEADER_BYTES = 1 << 24
_PADDING = bytes(ALIGNMENT)
FEWEST_NUMBERS = 8  # of a list that becomes one leaf
_INT64 = range(-(2**63), 2**63)
_PLAIN = {  # what to return instead of a subclass
    Tensor: "value.as_subclass(torch.Tensor)",
    np.ndarray: "np.asarray(value), and beside it what it does not hold",
    np.generic: "value.item()",
    dict: "dict(value)",
    list: "list(value)",
    tuple: "tuple(value)",
    str: "str(value)",
    bytes: "bytes(value)",
    int: "int(value)",
    float: "float(value)",
    complex: "complex(value)",
}
Parts = list[Any]  # buffers: bytes, memoryview or an array (n,) of uint8
Take = Callable[[], memoryview]  # returns the next leaf


def encode(sample: object) -> Parts:
    """Return the entry of `sample`, as buffers to be written one after the other.

    Buffers of tensors and arrays are not copied. A sample is one of these:

    - a tensor, a NumPy array or scalar, or a PIL image;
    - str, bytes, int, float, complex, bool or None;
    - a list, tuple, dict (keys str or int), NamedTuple or dataclass of samples.

    Types are exact, for what is decoded has the same ones, but for two: `np.memmap` comes back as
    an array, and every class of PIL as its plain image. Tensors and arrays come back contiguous. Of
    an image's `info` only plain data is kept.

    Raises:
        UnsupportedSample: it holds anything else.
    """
    leaves: Parts = []
    try:
        header = header_text(describe(sample, leaves))
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


def decode(entry: Any) -> Any:
    """Return the sample of `entry`, a writable buffer; tensors and arrays are views of it.

    Raises:
        UnsupportedSample: it has a NamedTuple or dataclass that is not registered or has other
            fields here, or it is of another version.
        ValueError: these bytes are no entry.
    """
    view = memoryview(entry).cast("B")
    # layouts are cached by header: samples of one data set share a few
    known = layout(view)
    if known.nbytes != len(view):
        raise ValueError(f"a sample of {known.nbytes} bytes was expected; got {len(view)}")
    leaves = iter(known.leaves)
    return build(known.spec, lambda: view[(leaf := next(leaves)).start : leaf.start + leaf.nbytes])


def changed_by_storing(sample: object) -> str | None:
    """Return the innermost type in `sample` that is encoded differently after decoding.

    None where there is none.
    """
    # Compared as entries; if they differ, look for the reason inside.
    entry = b"".join(map(bytes, encode(sample)))
    if b"".join(map(bytes, encode(decode(bytearray(entry))))) == entry:
        return None
    found = (changed_by_storing(item) for item in inside(sample))
    return next(filter(None, found), type_name(type(sample)))


def size_of(parts: Sequence[Sized]) -> int:
    """Return the bytes of an entry."""
    return sum(len(part) for part in parts)


def in_one_piece(parts: Parts) -> Any:
    """Return an entry in one piece, writable."""
    return parts[0] if len(parts) == 1 else bytearray(b"".join(map(memoryview, parts)))


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


# Values to specs and leaves.


def describe(value: object, leaves: Parts) -> Spec:
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
    if is_named(kind):
        return _describe_named(value, leaves)
    if is_record(kind):
        register_sample_type(kind)
        pairs = [[name, describe(item, leaves)] for name, item in attributes_of(value).items()]
        return ["record", type_name(kind), pairs, fields_of(kind)]
    if is_image(value):
        return _describe_image(value, leaves)
    raise UnsupportedSample(f"a sample holds a {type_name(kind)}, which {_refusal(value)}")


def _refusal(value: object) -> str:
    # the built-in type that it is derived from says what to return instead
    for base, plain in _PLAIN.items():
        if isinstance(value, base):
            return f"a cache cannot store, for it is a subclass of {base.__name__}: return {plain}"
    return (
        "a cache cannot store as plain data: return tensors, NumPy arrays, PIL images, numbers, "
        "strings, bytes, and lists, tuples, dicts, NamedTuples or dataclasses of them"
    )


def inside(value: Any) -> Iterable[object]:
    """Return the values inside a container that can be described."""
    kind: type = type(value)
    if kind in (list, tuple) or is_named(kind):
        return value  # type: ignore[no-any-return]
    if kind is dict:
        return value.values()  # type: ignore[no-any-return]
    return attributes_of(value).values() if is_record(kind) else ()


def _describe_tensor(value: Tensor, leaves: Parts) -> Spec:
    # layouts and devices that plain bytes do not stand for
    if (
        value.layout != torch.strided
        or value.device.type != "cpu"
        or value.is_quantized
        or value.is_nested
        or value.requires_grad
    ):
        raise UnsupportedSample(
            f"tensors of a sample are dense, on the CPU and need no gradient; got {value.layout} "
            f"on {value.device}, requires_grad={value.requires_grad}"
        )
    if value.__dict__:
        raise UnsupportedSample(
            f"a tensor of a sample has attributes of its own, {', '.join(value.__dict__)}: return "
            "them beside the tensor"
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
        except struct.error:  # an int of more than 64 bits
            return [name, [describe(item, leaves) for item in value]]
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


def _describe_named(value: Any, leaves: Parts) -> Spec:
    kind, extra = type(value), list(getattr(value, "__dict__", ()))
    fields = fields_of(kind)
    if extra or len(value) != len(fields):
        raise UnsupportedSample(
            f"a {type_name(kind)} of a sample holds more or less than its fields {fields}, and "
            f"{extra}: give them fields"
        )
    register_sample_type(kind)
    return ["named", type_name(kind), [describe(item, leaves) for item in value], fields]


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
    return [
        "image",
        value.mode,
        list(value.size),
        size,
        describe([palette, info], leaves),
    ]


def _is_plain(value: object) -> bool:
    try:
        describe(value, [])
    except UnsupportedSample:
        return False
    return True


def _describe_int(value: int, leaves: Parts) -> Spec:
    if value not in _INT64:
        return ["digits", hex(value)]  # of decimal digits Python converts 4,300 only
    leaves.append(FIXED["int"].pack(value))
    return ["int"]


def _describe_fixed(value: Any, leaves: Parts) -> Spec:
    kind = type(value).__name__
    leaves.append(FIXED[kind].pack(*((value.real, value.imag) if kind == "complex" else (value,))))
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
    int: _describe_int,
    float: _describe_fixed,
    bool: _describe_fixed,
    complex: _describe_fixed,
    list: _describe_sequence,
    tuple: _describe_sequence,
    dict: _describe_dict,
    str: _describe_text,
    bytes: _describe_text,
    np.str_: _describe_text,  # not as arrays, which lose empty texts and NULs at the end
    np.bytes_: _describe_text,
    type(None): lambda value, leaves: ["none"],
}


# Specs and leaves to values.


def build(spec: Spec, take: Take) -> Any:
    """Return the value that `spec` describes; tensors and arrays are views of the leaves.

    Raises:
        ValueError: the kind is unknown.
        UnsupportedSample: a type is unknown.
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


def _build_fixed(spec: Spec, take: Take) -> object:
    return FIXED[spec[0]].unpack(take())[0]


def _build_complex(spec: Spec, take: Take) -> complex:
    return complex(*FIXED["complex"].unpack(take()))


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
    image = _pil_image().frombytes(spec[1], tuple(spec[2]), pixels)
    if palette is not None:
        image.putpalette(palette[1], palette[0])
        image.load()  # before there is an info, whose transparency it may put into the palette
    image.info.update(info)
    return image


def _build_named(spec: Spec, take: Take) -> object:
    # Without the class's own __new__, which may change its arguments.
    return tuple.__new__(_known_type(spec), [build(item, take) for item in spec[2]])


def _build_record(spec: Spec, take: Take) -> object:
    return record_of(_known_type(spec), [(name, build(item, take)) for name, item in spec[2]])


def _known_type(spec: Spec) -> type:
    kind = named_type(spec[1])
    if kind is None:
        raise UnsupportedSample(f"{spec[1]} is not known here: call register_sample_type on it")
    # an earlier run may have stored a class that has other fields now
    if fields_of(kind) != spec[3]:
        raise UnsupportedSample(
            f"{spec[1]} has the fields {fields_of(kind)} here; in the cache it has {spec[3]}"
        )
    return kind


_BUILD: dict[str, Callable[[Spec, Take], object]] = {
    "tensor": _build_tensor,
    "array": _build_array,
    "scalar": _build_array,
    "int": _build_fixed,
    "float": _build_fixed,
    "bool": _build_fixed,
    "complex": _build_complex,
    "numbers": _build_numbers,
    **dict.fromkeys(("str", "bytes", "str_", "bytes_"), _build_text),
    "image": _build_image,
    "list": lambda spec, take: [build(item, take) for item in spec[1]],
    "tuple": lambda spec, take: tuple([build(item, take) for item in spec[1]]),
    "dict": lambda spec, take: {key: build(item, take) for key, item in spec[1]},
    "named": _build_named,
    "record": _build_record,
    "none": lambda spec, take: None,
    "digits": lambda spec, take: int(spec[1], 16),
}


# NamedTuples, dataclasses and PIL images.
_record_types: dict[str, type] = {}


def type_name(kind: type) -> str:
    """Return the module and qualified name."""
    return f"{kind.__module__}.{kind.__qualname__}"


def register_sample_type(record: type) -> None:
    """Register a NamedTuple or dataclass for decoding.

    Encoding one registers it; only a process that decodes without having encoded one needs this.

    Raises:
        ValueError: it is neither, or its instances hold more than attributes (a dataclass that is a
            dict).
    """
    if not (is_named(record) or is_record(record)):
        raise ValueError(
            "a sample's own type is a NamedTuple or dataclass with no other built-in base; got "
            f"{record!r}"
        )
    _record_types[type_name(record)] = record


def named_type(name: str) -> type | None:
    """Return the registered NamedTuple or dataclass of that name (module and qualified name)."""
    return _record_types.get(name)


@lru_cache(maxsize=1024)
def is_named(kind: type) -> bool:
    """Return whether it is a NamedTuple."""
    return issubclass(kind, tuple) and hasattr(kind, "_fields")


@lru_cache(maxsize=1024)
def is_record(kind: type) -> bool:
    """Return whether it is a dataclass whose instances hold nothing but attributes."""
    if not hasattr(kind, "__dataclass_fields__") or issubclass(kind, enum.Enum):
        return False
    try:
        # Python refuses this where another built-in class keeps something of its own.
        object.__new__(kind)
    except TypeError:
        return False
    return True


def fields_of(kind: type) -> list[str]:
    """Return the names of the fields; another class of the same name may have others."""
    return list(
        kind._fields if is_named(kind) else kind.__dataclass_fields__  # type: ignore[attr-defined]
    )


def attributes_of(value: object) -> dict[str, Any]:
    """Return the attributes of an instance, in slots or not, fields or not."""
    kind: type = type(value)
    # in the dictionary, then in slots
    found = dict(getattr(value, "__dict__", ()))
    for name, slot in _slots(kind).items():
        try:
            found[name] = slot.__get__(value)
        except AttributeError:
            continue  # it was deleted or never set
    return found


def record_of(kind: type, attributes: Iterable[tuple[str, object]]) -> Any:
    """Return an instance with these attributes."""
    value: Any = object.__new__(kind)
    slots = _slots(kind)
    for name, item in attributes:
        # Not setattr: a frozen dataclass refuses it, and others may do more than set.
        if name in slots:
            slots[name].__set__(value, item)
        else:
            value.__dict__[name] = item
    return value


@lru_cache(maxsize=1024)
def _slots(kind: type) -> dict[str, types.MemberDescriptorType]:
    members = [item for base in reversed(kind.__mro__) for item in vars(base).items()]
    return {
        name: member for name, member in members if isinstance(member, types.MemberDescriptorType)
    }


def is_image(value: object) -> bool:
    """Return whether it is an image of one of PIL's own classes.

    A class derived from theirs may hold more. PIL is not imported for this.
    """
    module = sys.modules.get("PIL.Image")
    return (
        module is not None
        and isinstance(value, module.Image)
        and type(value).__module__.startswith("PIL.")
    )


@lru_cache(maxsize=1)
def _pil_image() -> Any:
    if importlib.util.find_spec("PIL") is None:
        raise UnsupportedSample("a cached sample is a PIL image: install pillow")
    return importlib.import_module("PIL.Image")

"""Values as specs and leaves, and back: each kind of value has one function that describes it and
one that builds it.

What is described comes back equal, of the same type, and shares no memory with other values; what
would not is refused.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_topt.data.cache.sample_images import image_of, is_image, palette_of, pixels_of
from lightning_topt.data.cache.sample_layout import FIXED, TORCH_DTYPES, Spec, UnsupportedSample
from lightning_topt.data.cache.sample_records import (
    attributes_of,
    fields_of,
    is_named,
    is_record,
    named_type,
    record_of,
    register_sample_type,
    type_name,
)

Parts = list[Any]  # buffers: bytes, memoryview or an array (n,) of uint8
Take = Callable[[], memoryview]  # the next leaf
FEWEST_NUMBERS = 8  # that are one leaf
_INT64 = range(-(2**63), 2**63)
_PLAIN = {
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


def describe(value: Any, leaves: Parts) -> Spec:
    """Return the spec of `value`, whose leaves are appended. Raises UnsupportedSample."""
    kind: type = type(value)
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


def _refusal(value: Any) -> str:
    for base, plain in _PLAIN.items():
        if isinstance(value, base):
            return f"a cache cannot store, for it is a subclass of {base.__name__}: return {plain}"
    return (
        "a cache cannot store as plain data: return tensors, NumPy arrays, PIL images, numbers, "
        "strings, bytes, and lists, "
        "tuples, dicts, NamedTuples or dataclasses of them"
    )


def inside(value: Any) -> Iterable[Any]:
    """Return the values inside a container that can be described."""
    kind: type = type(value)
    if kind in (list, tuple) or is_named(kind):
        return value  # type: ignore[no-any-return]
    if kind is dict:
        return value.values()  # type: ignore[no-any-return]
    return attributes_of(value).values() if is_record(kind) else ()


def _describe_sequence(value: Any, leaves: Parts) -> Spec:
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


def _describe_tensor(value: Tensor, leaves: Parts) -> Spec:
    if (
        value.layout != torch.strided
        or value.device.type != "cpu"
        or value.is_quantized
        or value.is_nested
        or value.requires_grad
    ):
        raise UnsupportedSample(
            "tensors of a sample are dense, on the CPU and need no gradient; "
            f"got {value.layout} on {value.device}, requires_grad={value.requires_grad}"
        )
    if value.__dict__:
        raise UnsupportedSample(
            f"a tensor of a sample has attributes of its own, {', '.join(value.__dict__)}: return "
            "them beside the tensor"
        )
    plain = (
        (value.resolve_conj().resolve_neg() if value.is_conj() or value.is_neg() else value)
        .contiguous()
        .view(-1)
    )
    leaves.append(plain.view(torch.uint8).numpy() if plain.numel() else b"")
    return ["tensor", str(value.dtype), list(value.shape)]


def _describe_array(value: Any, leaves: Parts) -> Spec:
    dtype = value.dtype
    # which some libraries' are not
    is_whole = dtype.names is None and dtype.itemsize and np.dtype(dtype.str) == dtype
    # long doubles, padded with bytes that are by chance
    if dtype.hasobject or not is_whole or dtype.char in "gG":
        raise UnsupportedSample(
            "arrays of a sample have plain dtypes, of no fields, objects or long doubles; got "
            f"{dtype}: return such arrays"
        )
    plain = np.ascontiguousarray(value)
    leaves.append(plain.reshape(-1).view(np.uint8) if plain.size else b"")
    return ["array" if isinstance(value, np.ndarray) else "scalar", dtype.str, list(value.shape)]


def _describe_image(value: Any, leaves: Parts) -> Spec:
    """Pixels, palette, and of `info` what is plain data (resolution, transparency, Exif, colour
    profile).
    """
    leaves.append(pixels_of(value))
    size = len(leaves[-1])
    info = {key: item for key, item in value.info.items() if _is_plain({key: item})}
    return [
        "image",
        value.mode,
        list(value.size),
        size,
        describe([palette_of(value), info], leaves),
    ]


def _is_plain(value: Any) -> bool:
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
    np.memmap: _describe_array,  # an array whose file need not be there any more
    int: _describe_int,
    float: _describe_fixed,
    bool: _describe_fixed,
    complex: _describe_fixed,
    list: _describe_sequence,
    tuple: _describe_sequence,
    dict: _describe_dict,
    str: _describe_text,
    bytes: _describe_text,
    np.str_: _describe_text,  # not as arrays, which know neither empty texts nor a NUL at the end
    np.bytes_: _describe_text,
    type(None): lambda value, leaves: ["none"],
}


def build(spec: Spec, take: Take) -> Any:
    """Return the value that `spec` describes, tensors and arrays as views of the leaves. Raises
    ValueError, UnsupportedSample.
    """
    make = _BUILD.get(spec[0])
    if make is None:
        raise ValueError(
            f"a sample's header names the kind {spec[0]!r}, which this version does not know"
        )
    return make(spec, take)


def _build_tensor(spec: Spec, take: Take) -> Tensor:
    data = take()
    if not len(data):
        return torch.empty(spec[2], dtype=TORCH_DTYPES[spec[1]], device="cpu")
    return torch.frombuffer(data, dtype=TORCH_DTYPES[spec[1]]).view(spec[2])


def _build_array(spec: Spec, take: Take) -> Any:
    array = np.frombuffer(take(), dtype=spec[1]).reshape(spec[2])
    return array if spec[0] == "array" else array[()]


def _build_fixed(spec: Spec, take: Take) -> Any:
    return FIXED[spec[0]].unpack(take())[0]


def _build_complex(spec: Spec, take: Take) -> complex:
    return complex(*FIXED["complex"].unpack(take()))


def _build_numbers(spec: Spec, take: Take) -> Any:
    _, name, kind, _ = spec
    numbers = np.frombuffer(take(), dtype="<i8" if kind == "int" else "<f8").tolist()
    return numbers if name == "list" else tuple(numbers)


def _build_text(spec: Spec, take: Take) -> Any:
    data, kind = take(), spec[0]
    if kind in ("bytes", "bytes_"):
        return bytes(data) if kind == "bytes" else np.bytes_(bytes(data))
    text = str(data, "utf-8", "surrogatepass")
    return text if kind == "str" else np.str_(text)


def _build_image(spec: Spec, take: Take) -> Any:
    pixels = bytes(take())
    palette, info = build(spec[4], take)
    return image_of(spec[1], tuple(spec[2]), pixels, palette, info)


def _known_type(spec: Spec) -> type:
    kind = named_type(spec[1])
    if kind is None:
        raise UnsupportedSample(f"{spec[1]} is not known here: call register_sample_type on it")
    if fields_of(kind) != spec[3]:
        raise UnsupportedSample(
            f"{spec[1]} has the fields {fields_of(kind)} here; in the cache it has {spec[3]}"
        )
    return kind


def _build_named(spec: Spec, take: Take) -> Any:
    # Not by the class, whose own __new__ may change what it is given.
    return tuple.__new__(_known_type(spec), [build(item, take) for item in spec[2]])


def _build_record(spec: Spec, take: Take) -> Any:
    return record_of(_known_type(spec), [(name, build(item, take)) for name, item in spec[2]])


_BUILD: dict[str, Callable[[Spec, Take], Any]] = {
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

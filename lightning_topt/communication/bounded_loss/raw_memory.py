"""What compiled code needs of the machine: memory at addresses, records, and the C library.

All of it runs without the GIL. An address is an int64. Only 64-bit little-endian Linux is
supported, since the layouts of the kernel's structures are written out here.

A record is a class of annotations that both sides read by name, without a copy:

    class Flow:
        state: int                          # 8 bytes each: int64, or float64 for `float`
        received: int

    FLOW = layout_of(Flow)                  # the NumPy dtype
    flow_at = record_at(FLOW)
    flow_at(address).received += 1          # compiled
    flows = np.zeros(4, FLOW)
    flows[2].received += 1                  # Python, where it is rarely done: 2 us
    flows["received"][2] += 1               # Python, where it is often done

`flow_at` is a cast and costs nothing. A record is passed as one pointer, an array as seven values.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba import types
from numba.core.types import ExternalFunction
from numba.np.numpy_support import carray, from_dtype

from lightning_topt.basics.jit import compiled, typed_intrinsic

Array = npt.NDArray[Any]
Layout = np.dtype[np.void]

SUPPORTED = sys.platform == "linux" and sys.byteorder == "little" and sys.maxsize > 2**32
CLOCK_REALTIME, CLOCK_MONOTONIC = 0, 1
NANOSECONDS = 1_000_000_000  # in a second

# Compile what only compiled code calls. Without the entry points from Python and C, which would be
# most of the machine code.
inner = partial(compiled, no_cpython_wrapper=True, no_cfunc_wrapper=True, error_model="numpy")


# ---- records


def layout_of(fields: type) -> Layout:
    """Return the layout of a class of annotations: 8 bytes for each field, in order."""
    names = fields.__annotations__
    hidden = [name for name in names if hasattr(np.record, name)]
    assert not hidden, f"NumPy's records have attributes {hidden} of their own"
    kinds = [(name, np.float64 if kind == "float" else np.int64) for name, kind in names.items()]
    return np.dtype((np.record, np.dtype(kinds, align=True)))


def new_record(layout: Layout) -> Any:
    """Return one record, all zeros."""
    return np.zeros(1, layout)[0]


def record_at(layout: Layout) -> Callable[[int], Any]:
    """Return the compiled function that reads an address as a record of this layout."""
    kind = from_dtype(layout)

    @typed_intrinsic
    def at(typing: Any, address: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return builder.inttoptr(arguments[0], context.get_value_type(kind))

        return kind(types.int64), generate

    return at


# ---- the C library

_long, _int = types.int64, types.int32
copy_memory = ExternalFunction("memcpy", _long(_long, _long, _long))
fill_memory = ExternalFunction("memset", _long(_long, _int, _long))
_errno_location = ExternalFunction("__errno_location", _long())
_clock_gettime = ExternalFunction("clock_gettime", _int(_int, _long))
send_message = ExternalFunction("sendmsg", _long(_int, _long, _int))
send_messages = ExternalFunction("sendmmsg", _int(_int, _long, types.uint32, _int))
receive_messages = ExternalFunction("recvmmsg", _int(_int, _long, types.uint32, _int, _long))
wait_for_files = ExternalFunction("ppoll", _int(_long, types.uint64, _long, _long))
control_process = ExternalFunction("prctl", _int(_int, _long, _long, _long, _long))


@inner
def error_number() -> int:
    """Return errno of the last call, in the thread that made it."""
    return load32(_errno_location())


@inner
def nanoseconds(clock: int, timespec: int) -> int:
    """Return the time of `clock`; `timespec` is the address of 16 bytes to work with."""
    _clock_gettime(np.int32(clock), timespec)
    return load64(timespec) * NANOSECONDS + load64(timespec + 8)


# ---- loads, stores and arrays at addresses


def _loader(bits: int) -> Callable[..., Any]:
    def load(typing: Any, address: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            pointer = builder.inttoptr(arguments[0], ir.IntType(bits).as_pointer())
            value = builder.load(pointer)
            value.align = 1
            return value if bits == 64 else builder.zext(value, ir.IntType(64))

        return _long(_long), generate

    return load


@typed_intrinsic
def load64(typing: Any, address: Any) -> Any:
    """Return the int64 at `address`, which need not be a multiple of 8."""
    return _loader(64)(typing, address)


@typed_intrinsic
def load32(typing: Any, address: Any) -> Any:
    """Return the unsigned 32 bits at `address` as int64."""
    return _loader(32)(typing, address)


@typed_intrinsic
def load16(typing: Any, address: Any) -> Any:
    """Return the unsigned 16 bits at `address` as int64."""
    return _loader(16)(typing, address)


@typed_intrinsic
def load8(typing: Any, address: Any) -> Any:
    """Return the byte at `address` as int64."""
    return _loader(8)(typing, address)


@typed_intrinsic
def store64(typing: Any, address: Any, value: Any) -> Any:
    """Store the int64 `value` at `address`, which need not be a multiple of 8."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer = builder.inttoptr(arguments[0], ir.IntType(64).as_pointer())
        builder.store(arguments[1], pointer).align = 1
        return context.get_dummy_value()

    return types.void(_long, _long), generate


@typed_intrinsic
def store8(typing: Any, address: Any, value: Any) -> Any:
    """Store a truth value as a byte."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        byte = builder.zext(builder.trunc(arguments[1], ir.IntType(1)), ir.IntType(8))
        builder.store(byte, builder.inttoptr(arguments[0], ir.IntType(8).as_pointer()))
        return context.get_dummy_value()

    return types.void(_long, types.boolean), generate


@typed_intrinsic
def _pointer(typing: Any, address: Any, kind: Any) -> Any:
    # `address` as a pointer to elements of the type `kind`
    element = kind.dtype

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

    return types.CPointer(element)(types.int64, kind), generate


@inner
def integers(address: int, size: int) -> Array:
    """Return the `size` int64 at `address` as an array, which does not keep them alive."""
    return carray(_pointer(address, np.int64), size)


@inner
def bit_words(address: int, size: int) -> Array:
    """Return the `size` uint64 at `address` as an array, which does not keep them alive."""
    return carray(_pointer(address, np.uint64), size)


@inner
def floats(address: int, size: int) -> Array:
    """Return the `size` float32 at `address` as an array, which does not keep them alive."""
    return carray(_pointer(address, np.float32), size)


@inner
def doubles(address: int, size: int) -> Array:
    """Return the `size` float64 at `address` as an array, which does not keep them alive."""
    return carray(_pointer(address, np.float64), size)


@inner
def address_of(array: Array) -> int:
    """Return where an array's elements are."""
    return int(array.ctypes.data)


# ---- kernels kept on disk


def forget_outdated_kernels(folder: Path) -> None:
    """Remove the kernels that Numba keeps beside the files of `folder` if any file has changed.

    Numba compiles a function anew when its own file changes, not when one that it calls does. Here
    functions of one file are compiled into those of others, with their constants. A stamp in
    `__pycache__` says which files the kernels were made of. Without a right to write, nothing is
    done.
    """
    files = sorted(folder.glob("*.py"))
    now = " ".join(f"{path.name}:{path.stat().st_mtime_ns}:{path.stat().st_size}" for path in files)
    stamp = folder / "__pycache__" / "kernels_of"
    with contextlib.suppress(OSError):
        if stamp.exists() and stamp.read_text() == now:
            return
        for pattern in ("*.nbi", "*.nbc"):
            for kept in stamp.parent.glob(pattern):
                kept.unlink(missing_ok=True)
        stamp.parent.mkdir(exist_ok=True)
        written = stamp.with_name(f"{stamp.name}.{os.getpid()}")  # ranks start together
        written.write_text(now)
        written.replace(stamp)


forget_outdated_kernels(Path(__file__).parent)

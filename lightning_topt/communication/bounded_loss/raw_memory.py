"""Loads and stores at plain addresses, and the C library's calls, for compiled code. None of it
holds the GIL.

Addresses are int64. Little-endian machines with 64 bit only, as the layouts of the kernel's
structures here are theirs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba import types
from numba.core.types import ExternalFunction
from numba.extending import intrinsic
from numba.np.numpy_support import carray

from lightning_topt.basics.jit import compiled
from lightning_topt.communication.bounded_loss.kernel_cache import forget_outdated_kernels

Array = npt.NDArray[Any]

forget_outdated_kernels(Path(__file__).parent)

SUPPORTED = sys.platform == "linux" and sys.byteorder == "little" and sys.maxsize > 2**32
CLOCK_REALTIME, CLOCK_MONOTONIC = 0, 1
NANOSECONDS = 1_000_000_000

# For what only compiled code calls: the way in from Python, which unpacks all tables, would be most
# of what is compiled.
inner = partial(compiled, no_cpython_wrapper=True, no_cfunc_wrapper=True, error_model="numpy")

_long, _int = types.int64, types.int32
copy_memory = ExternalFunction("memcpy", _long(_long, _long, _long))
move_memory = ExternalFunction("memmove", _long(_long, _long, _long))
fill_memory = ExternalFunction("memset", _long(_long, _int, _long))
_errno_location = ExternalFunction("__errno_location", _long())
_clock_gettime = ExternalFunction("clock_gettime", _int(_int, _long))
send_message = ExternalFunction("sendmsg", _long(_int, _long, _int))
send_messages = ExternalFunction("sendmmsg", _int(_int, _long, types.uint32, _int))
receive_messages = ExternalFunction("recvmmsg", _int(_int, _long, types.uint32, _int, _long))
send_bytes = ExternalFunction("send", _long(_int, _long, _long, _int))
receive_bytes = ExternalFunction("recv", _long(_int, _long, _long, _int))
wait_for_files = ExternalFunction("ppoll", _int(_long, types.uint64, _long, _long))
control_process = ExternalFunction("prctl", _int(_int, _long, _long, _long, _long))


def _typed_intrinsic(function: Callable[..., Any]) -> Callable[..., Any]:
    return cast(Callable[..., Any], intrinsic(function))


def _loader(bits: int) -> Callable[..., Any]:
    def load(typing: Any, address: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            pointer = builder.inttoptr(arguments[0], ir.IntType(bits).as_pointer())
            value = builder.load(pointer)
            value.align = 1
            return value if bits == 64 else builder.zext(value, ir.IntType(64))

        return _long(_long), generate

    return load


@_typed_intrinsic
def load64(typing: Any, address: Any) -> Any:
    """Return the int64 at `address`, which need not be a multiple of 8."""
    return _loader(64)(typing, address)


@_typed_intrinsic
def load32(typing: Any, address: Any) -> Any:
    """Return the unsigned 32 bits at `address` as int64."""
    return _loader(32)(typing, address)


@_typed_intrinsic
def load16(typing: Any, address: Any) -> Any:
    """Return the unsigned 16 bits at `address` as int64."""
    return _loader(16)(typing, address)


@_typed_intrinsic
def load8(typing: Any, address: Any) -> Any:
    """Return the byte at `address` as int64."""
    return _loader(8)(typing, address)


@_typed_intrinsic
def store64(typing: Any, address: Any, value: Any) -> Any:
    """Store the int64 `value` at `address`, which need not be a multiple of 8."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer = builder.inttoptr(arguments[0], ir.IntType(64).as_pointer())
        builder.store(arguments[1], pointer).align = 1
        return context.get_dummy_value()

    return types.void(_long, _long), generate


@_typed_intrinsic
def store8(typing: Any, address: Any, value: Any) -> Any:
    """Store a truth value as a byte."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        byte = builder.zext(builder.trunc(arguments[1], ir.IntType(1)), ir.IntType(8))
        builder.store(byte, builder.inttoptr(arguments[0], ir.IntType(8).as_pointer()))
        return context.get_dummy_value()

    return types.void(_long, types.boolean), generate


@_typed_intrinsic
def _float_pointer(typing: Any, address: Any) -> Any:
    """Return `address` as a pointer to float32."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], ir.FloatType().as_pointer())

    return types.CPointer(types.float32)(_long), generate


@inner
def float_array(address: int, size: int) -> Array:
    """Return the `size` float32 at `address` as an array, which does not keep them alive."""
    return carray(_float_pointer(address), size)


@inner
def error_number() -> int:
    """Return errno of the last call, in the thread that made it."""
    return load32(_errno_location())


@inner
def nanoseconds(clock: int, timespec: int) -> int:
    """Return the time of `clock`; `timespec` is the address of 16 bytes to work with."""
    _clock_gettime(np.int32(clock), timespec)
    return load64(timespec) * NANOSECONDS + load64(timespec + 8)


@inner
def address_of(array: Array) -> int:
    """Return where an array's elements are."""
    return int(array.ctypes.data)

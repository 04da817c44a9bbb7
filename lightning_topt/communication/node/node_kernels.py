"""Compiled parts of the exchange inside a node: reading other processes' memory, adding, waiting.

None of them holds the GIL. Numba compiles them; the C library's functions are called by name, so
that compiled code can be cached. A file of its own because Numba caches by file. Addresses are
int64.
"""

from __future__ import annotations

import platform
from typing import Any

import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba import types
from numba.core.types import ExternalFunction

from lightning_topt.basics.jit import compiled, typed_intrinsic

Array = npt.NDArray[Any]

FUTEX_CALL = {"x86_64": 202, "aarch64": 98}.get(platform.machine(), -1)
FUTEX_WAIT, FUTEX_WAKE = 0, 1
EVERY_WAITER = 2**31 - 1
MOST_AT_ONCE = 1 << 30  # bytes; Linux stops below 2 GiB
YIELDS = 60  # some 30 us on an idle core; where ranks share cores, each one lets another rank run

_long, _int = types.int64, types.int32
_read_process = ExternalFunction("process_vm_readv", _long(_int, _long, _long, _long, _long, _long))
_errno_location = ExternalFunction("__errno_location", _long())
_yield = ExternalFunction("sched_yield", _int())
_syscall = ExternalFunction("syscall", _long(_long, _long, _long, _long, _long, _long, _long))


@typed_intrinsic
def load_acquire(typing: Any, address: Any) -> Any:
    """Return the int64 at `address`.

    Reads that follow see what was written before it was stored.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.load_atomic(
            builder.inttoptr(arguments[0], ir.IntType(64).as_pointer()), "acquire", 8
        )

    return _long(_long), generate


@typed_intrinsic
def store_release(typing: Any, address: Any, value: Any) -> Any:
    """Store the int64 `value` at `address`, after everything written before."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer = builder.inttoptr(arguments[0], ir.IntType(64).as_pointer())
        builder.store_atomic(arguments[1], pointer, "release", 8)
        return context.get_dummy_value()

    return types.void(_long, _long), generate


@typed_intrinsic
def load_int32(typing: Any, address: Any) -> Any:
    """Return the int32 at `address`."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.load(builder.inttoptr(arguments[0], ir.IntType(32).as_pointer()))

    return _int(_long), generate


@typed_intrinsic
def widen(typing: Any, value: Any) -> Any:
    """Return an element as float32.

    bfloat16 comes as uint16 and float16 as int16: Numba has neither.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        if value == types.uint16:
            bits = builder.shl(
                builder.zext(arguments[0], ir.IntType(32)), ir.Constant(ir.IntType(32), 16)
            )
            return builder.bitcast(bits, ir.FloatType())
        if value == types.int16:
            return builder.fpext(builder.bitcast(arguments[0], ir.HalfType()), ir.FloatType())
        return arguments[0]

    return types.float32(value), generate


@compiled
def fetch(process: int, target: int, source: int, size: int, vector: int) -> int:
    """Copy `size` bytes of `process` at `source` to `target`.

    `vector` is the address of four int64 to work with. Returns 0 or an error number.
    """
    while size > 0:
        part = min(size, MOST_AT_ONCE)
        store_release(vector, target)
        store_release(vector + 8, part)
        store_release(vector + 16, source)
        store_release(vector + 24, part)
        done = _read_process(np.int32(process), vector, 1, vector + 16, 1, 0)
        if done <= 0:
            return np.int64(load_int32(_errno_location()))  # type: ignore[return-value]
        target, source, size = target + done, source + done, size - done
    return 0


@compiled
def gather_ranks(
    processes: Array, sources: Array, targets: Array, sizes: Array, rank: int, vector: int
) -> tuple[int, int]:
    """Copy every other rank's ``sizes[peer]`` bytes at ``sources[peer]`` to ``targets[peer]`` here.

    Returns (rank, error number) of a failed read, (0, 0) where all went well.
    """
    ranks = processes.shape[0]
    for step in range(1, ranks):
        peer = (rank + step) % ranks  # every rank starts with another one
        error = fetch(processes[peer], targets[peer], sources[peer], sizes[peer], vector)
        if error:
            return peer, error
    return 0, 0


@compiled
def sum_ranks(
    total: Array,
    own: Array,
    processes: Array,
    sources: Array,
    rank: int,
    received: Array,
    vector: int,
) -> tuple[int, int]:
    """Compute ``total = own + others'`` in rank order, in blocks that stay in the cache.

    `total` (n,) float32, not the memory of `own` (n,). `processes` and `sources` (ranks,) say where
    the others' n elements are; `received` (ranks, block) is memory to work with. Returns (rank,
    error number) of a failed read, or (0, 0).
    """
    ranks, block = received.shape
    for start in range(0, own.shape[0], block):
        size = min(block, own.shape[0] - start)
        for peer in range(ranks):
            if peer != rank:
                target: Any = np.int64(received[peer].ctypes.data)
                source = sources[peer] + start * own.itemsize
                error = fetch(processes[peer], target, source, size * own.itemsize, vector)
                if error:
                    return peer, error
        part = total[start : start + size]
        first = own[start : start + size] if rank == 0 else received[0, :size]
        second = own[start : start + size] if rank == 1 else received[1, :size]
        for i in range(size):
            part[i] = widen(first[i]) + widen(second[i])
        for peer in range(2, ranks):
            term = own[start : start + size] if peer == rank else received[peer, :size]
            for i in range(size):
                part[i] += widen(term[i])
    return 0, 0


@compiled
def gather_tables(
    processes: Array,
    sources: Array,
    table: Array,
    targets: Array,
    sizes: Array,
    starts: Array,
    rank: int,
    vector: int,
) -> tuple[int, int]:
    """Copy what lies at the addresses in every other rank's table, which is at ``sources[peer]``.

    Entries ``starts[peer]`` up to ``starts[peer + 1]`` of `targets` (addresses here) and `sizes`
    (bytes) are its own; `table` is memory for a table. Returns (rank, error number) of a failed
    read, or (0, 0).
    """
    ranks = processes.shape[0]
    for step in range(1, ranks):
        peer = (rank + step) % ranks  # every rank starts with another one
        first, count = starts[peer], starts[peer + 1] - starts[peer]
        # its table first, then what the table points at
        error = fetch(
            processes[peer],
            np.int64(table.ctypes.data),  # type: ignore[arg-type]
            sources[peer],
            8 * count,
            vector,
        )
        if error:
            return peer, error
        for index in range(count):
            error = fetch(
                processes[peer], targets[first + index], table[index], sizes[first + index], vector
            )
            if error:
                return peer, error
    return 0, 0


@compiled
def announce(word: int, value: int) -> None:
    """Set the shared int64 at `word` after everything written before, and wake its waiters."""
    store_release(word, value)
    _syscall(FUTEX_CALL, word, FUTEX_WAKE, EVERY_WAITER, 0, 0, 0)


@compiled
def wait_for(word: int, value: int, nanoseconds: int, timespec: int) -> bool:
    """Return whether the shared int64 at `word` reached `value`.

    Sleeps at most `nanoseconds` (below 1 s), or until woken.
    """
    for _ in range(YIELDS):
        if load_acquire(word) >= value:
            return True
        _yield()
    seen = load_acquire(word)
    if seen < value:
        store_release(timespec, 0)
        store_release(timespec + 8, nanoseconds)
        # The kernel compares the low half (little-endian) with what was seen: no wake-up can be
        # missed.
        _syscall(FUTEX_CALL, word, FUTEX_WAIT, seen & 0xFFFFFFFF, timespec, 0, 0)
    return load_acquire(word) >= value


@compiled
def load_word(word: int) -> int:
    """Return the shared int64 at `word`.

    Reads that follow see what was written before it was set.
    """
    value: int = load_acquire(word)
    return value

"""The ranks of one node share a page of counters in memory that has no name, and know who of them
is still there.

The page is a memfd, which the others open through /proc: no file exists at any time, so nothing is
left behind whichever process dies, and the size of /dev/shm (64 MB in most containers) does not
matter.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch.distributed as dist

from lightning_topt.communication.node.node_kernels import (
    FUTEX_CALL,
    Array,
    announce,
    fetch,
    load_word,
    wait_for,
)
from lightning_topt.communication.processes import BOOT, process_start

T = TypeVar("T")

TOKEN_BYTES = 64  # at the start of the page: a random name, to know it again
NAP_NANOSECONDS = 20_000_000  # between two looks at whether the others still live
# PR_SET_PTRACER, PR_SET_PTRACER_ANY of linux/prctl.h
ALLOW_TRACING = (0x59616D61, ctypes.c_ulong(-1))
# what a rank writes when it leaves: of its own will, or 2 + the rank that it missed
LEFT, BLAMES = 1, 2
TRACE_SCOPE = Path("/proc/sys/kernel/yama/ptrace_scope")


class NodeMemoryUnavailable(RuntimeError):
    """The ranks cannot share memory; the message says which and why. Raised on all of them
    alike.
    """


class LocalPeerLost(RuntimeError):
    """A rank of this node died, left the exchange or did not come in time; `local_rank` says
    which.
    """

    def __init__(self, local_rank: int, what: str) -> None:
        super().__init__(f"local rank {local_rank} {what}")
        self.local_rank = local_rank


@dataclass(frozen=True)
class Introduction:
    """An `Introduction` is what a rank tells the others: its boot id and process, where its probe
    is, the page's descriptor and token (rank 0).
    """

    boot: str
    process: int
    started: str
    probe: int
    probe_value: int
    descriptor: int
    token: bytes
    problem: str


def reserve(size: int) -> int:
    """Return the descriptor of `size` bytes of nameless memory, taken now rather than when first
    touched. Raises OSError.
    """
    descriptor = os.memfd_create("lightning_topt")
    try:
        os.posix_fallocate(descriptor, 0, size)
    except OSError as error:
        os.close(descriptor)
        raise OSError(
            error.errno, f"cannot reserve {size} bytes of shared memory: {error.strerror}"
        ) from error
    return descriptor


def map_shared(descriptor: int, *, size: int) -> Array:
    """Return `size` bytes of the file as uint8, mapped as long as the array lives."""
    return np.frombuffer(mmap.mmap(descriptor, size), dtype=np.uint8)


def map_of(process: int, descriptor: int, *, size: int) -> Array:
    """Return the memory that `process` has open as `descriptor`."""
    opened = os.open(f"/proc/{process}/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)
    try:
        if os.fstat(opened).st_size != size:
            raise OSError(f"process {process} is not what it seems: another process namespace?")
        return map_shared(opened, size=size)
    finally:
        os.close(opened)


class NodePage:
    """The shared page of a node's ranks: `words` int64 for each of them, written by that rank only
    and zero at first.

    Making one is a collective call on `group`, whose ranks must be the node's. `unreadable` is
    empty where ranks may read each other's memory, else it says why not. Raises
    NodeMemoryUnavailable, on all ranks, where they cannot share a page.
    """

    def __init__(self, group: dist.ProcessGroup, *, words: int, timeout_seconds: float) -> None:
        self.rank, self.size, self.timeout_seconds = (
            dist.get_rank(group),
            dist.get_world_size(group),
            timeout_seconds,
        )
        self.left_word = words
        self.row_bytes = 64 * (words // 8 + 1)  # whole cache lines
        # for system calls: four words of a read, two of a sleep
        self.vector = np.zeros(6, dtype=np.int64)
        self.probe = np.frombuffer(secrets.token_bytes(16), dtype=np.int64).copy()
        introduction = self._introduce()
        self.ranks = _everyone(introduction, group)
        problem = self._open()
        outcomes = _everyone((problem, problem or self._read_probes()), group)
        if introduction.descriptor >= 0:
            os.close(introduction.descriptor)
        for rank, (problem, _) in enumerate(outcomes):
            if problem:
                raise NodeMemoryUnavailable(
                    f"local rank {rank} shares no memory with the others: {problem}"
                )
        self.unreadable = next(
            (f"local rank {rank}: {why}" for rank, (_, why) in enumerate(outcomes) if why), ""
        )

    def _introduce(self) -> Introduction:
        descriptor, token, problem, boot = -1, secrets.token_bytes(TOKEN_BYTES), "", ""
        try:
            boot = BOOT.read_text().strip()
            if TRACE_SCOPE.exists() and TRACE_SCOPE.read_text().strip() == "1":
                # as MPI does: ranks are not each other's parents
                ctypes.CDLL(None).prctl(*ALLOW_TRACING, 0, 0, 0)
            if FUTEX_CALL < 0:
                problem = "the processor is neither x86_64 nor aarch64"
            elif self.rank == 0:
                descriptor = reserve(self._page_bytes())
                map_shared(descriptor, size=self._page_bytes())[:TOKEN_BYTES] = np.frombuffer(
                    token, dtype=np.uint8
                )
        except (OSError, AttributeError) as error:  # AttributeError: no memfd on this system
            problem = f"{type(error).__name__}: {error}"
        process, probe = os.getpid(), (int(self.probe.ctypes.data), int(self.probe[0]))
        return Introduction(
            boot, process, process_start(process), *probe, descriptor, token, problem
        )

    def _page_bytes(self) -> int:
        return TOKEN_BYTES + self.size * self.row_bytes

    def _open(self) -> str:
        """Map the page; what hinders it."""
        first, own = self.ranks[0], self.ranks[self.rank]
        if own.problem or first.problem:
            return own.problem or f"local rank 0: {first.problem}"
        if own.boot != first.boot:
            return "it is not on the machine of local rank 0"
        try:
            memory = map_of(first.process, first.descriptor, size=self._page_bytes())
        except OSError as error:
            return str(error)
        if memory[:TOKEN_BYTES].tobytes() != first.token:
            return "it sees another page: another process namespace?"
        self.words = memory[TOKEN_BYTES:].view(np.int64).reshape(self.size, -1)
        self.start = int(memory.ctypes.data) + TOKEN_BYTES
        return ""

    def _read_probes(self) -> str:
        """Read a word of every rank's memory; what hinders it."""
        found = np.zeros(1, dtype=np.int64)
        for rank, other in enumerate(self.ranks):
            error = fetch(
                other.process, int(found.ctypes.data), other.probe, 8, self.vector_address
            )
            if error:
                return f"reading the memory of local rank {rank}: {os.strerror(error)}"
            if found[0] != other.probe_value:
                return f"the memory of local rank {rank} reads wrong: another process namespace?"
        return ""

    @property
    def vector_address(self) -> int:
        """Address of the work memory for `fetch`."""
        return int(self.vector.ctypes.data)

    def _address(self, rank: int, word: int) -> int:
        return self.start + rank * self.row_bytes + 8 * word

    def get(self, rank: int, word: int) -> int:
        """Return a word of `rank`."""
        return load_word(self._address(rank, word))

    def read(self, rank: int, word: int, count: int) -> list[int]:
        """Return several words of `rank`, written before a word that `wait` saw set."""
        values: list[int] = self.words[rank, word : word + count].tolist()
        return values

    def write(self, word: int, values: Sequence[int]) -> None:
        """Write several of this rank's words at once, to be announced by `set`."""
        self.words[self.rank, word : word + len(values)] = values

    def set(self, word: int, value: int) -> None:
        """Set one of this rank's words, after all that was written before, and wake who waits for
        it.
        """
        announce(self._address(self.rank, word), value)

    def wait(self, rank: int, word: int, value: int) -> None:
        """Block until `rank` has set `word` to at least `value`. Raises LocalPeerLost."""
        deadline = time.monotonic() + self.timeout_seconds
        address, timespec = self._address(rank, word), self.vector_address + 32
        while not wait_for(address, value, NAP_NANOSECONDS, timespec):
            self.check(rank, word, value)
            if time.monotonic() > deadline:
                raise LocalPeerLost(
                    rank, f"is alive but did not come within {self.timeout_seconds:g} s"
                )

    def check(self, rank: int, word: int, value: int) -> None:
        """Raise LocalPeerLost where some rank is gone and `rank` has not set `word` to at least
        `value`.
        """
        lost = self._lost()
        # A rank may leave once all have finished: what is waited for may have come between two
        # looks.
        if lost and self.get(rank, word) < value:
            raise lost

    def _lost(self) -> LocalPeerLost | None:
        for rank, other in enumerate(self.ranks):
            if process_start(other.process) != other.started and not self.get(rank, self.left_word):
                return LocalPeerLost(rank, f"(process {other.process}) has ended")
        left = [self.get(rank, self.left_word) for rank in range(self.size)]
        # Those who left because of another rank are not to blame.
        for rank in sorted(range(self.size), key=lambda rank: left[rank] == LEFT):
            if left[rank] > LEFT:
                return LocalPeerLost(left[rank] - BLAMES, f"was given up by local rank {rank}")
            if left[rank]:
                return LocalPeerLost(
                    rank, f"(process {self.ranks[rank].process}) has left the exchange"
                )
        return None

    def leave(self, *, because_of: int | None = None) -> None:
        """Tell the others not to wait any more, and for which rank this one waited in vain."""
        if not self.get(self.rank, self.left_word):
            self.set(self.left_word, LEFT if because_of is None else BLAMES + because_of)


def _everyone(value: T, group: dist.ProcessGroup) -> list[T]:
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values

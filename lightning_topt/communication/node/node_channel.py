"""Operations among the ranks of one node, through shared memory.

Ranks share a page of counters (`NodePage`): each rank writes its own row, the others read it and
sleep until a word is set. A `NodeChannel` numbers the operations of one kind alike on all ranks and
takes each through the same steps, without waiting unless asked to:

    publish    write address and size of what is sent on the page, set PUBLISHED
    read       once every rank has published: read what this rank needs of the others
    finish     set FINISHED; done once every rank has finished, so nobody reads any more

The page is a memfd, which the others open through /proc. No file exists at any time, so nothing is
left behind whichever process dies, and the size of /dev/shm (64 MB in most containers) does not
matter.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import secrets
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch.distributed as dist
from torch import Tensor

from lightning_topt.communication.collectives import PendingResult, values_of_group
from lightning_topt.communication.node.node_kernels import (
    FUTEX_CALL,
    Array,
    announce,
    fetch,
    load_word,
    wait_for,
)
from lightning_topt.communication.rank_watch import BOOT, process_start

Reader = Callable[[Array, Array], tuple[int, int]]  # (processes, addresses) -> (rank, error number)

# Words of a channel on the page: two counters, each in a cache line of its own, then records of
# what is in flight.
PUBLISHED, FINISHED, RECORDS = 0, 8, 16
RECORD_WORDS, MOST_IN_FLIGHT = 2, 16  # a record: address and size
CHANNEL_WORDS = RECORDS + RECORD_WORDS * MOST_IN_FLIGHT

# read at a time from each rank: large enough for the system call, small enough for the cache
BLOCK_BYTES = 1 << 17
TOKEN_BYTES = 64  # a random name at the start of the page, to recognise it
NAP_NANOSECONDS = 20_000_000  # between two checks that the others still live
# PR_SET_PTRACER, PR_SET_PTRACER_ANY of linux/prctl.h
ALLOW_TRACING = (0x59616D61, ctypes.c_ulong(-1))
# what a rank writes when it leaves: of its own will, or 2 + the rank that it missed
LEFT, BLAMES = 1, 2
TRACE_SCOPE = Path("/proc/sys/kernel/yama/ptrace_scope")


class NodeMemoryUnavailable(RuntimeError):
    """The ranks cannot share memory; the message says which and why. Raised on all of them."""


class LocalPeerLost(RuntimeError):
    """A rank of this node died, left the exchange or did not come in time; see `local_rank`."""

    def __init__(self, local_rank: int, what: str) -> None:
        super().__init__(f"local rank {local_rank} {what}")
        self.local_rank = local_rank


class Operation(PendingResult[Tensor]):
    """One call: `sent` is published for the others; `read` then gets what they sent.

    Args:
        channel: the channel of this kind of call.
        sent: what the other ranks read of this one; held until the operation is done.
        expected: bytes that each rank publishes.
        read: called once all have published, with the processes and addresses to read from.
        outcome: makes the result.
    """

    def __init__(
        self,
        channel: NodeChannel,
        *,
        sent: Tensor,
        expected: Sequence[int],
        read: Reader,
        outcome: Callable[[], Tensor],
    ) -> None:
        self.channel, self.sent, self.expected = channel, sent, expected
        self.read, self.outcome = read, outcome
        self.has_read = self.done = False
        self.number = channel.submit(self)

    def is_completed(self) -> bool:
        """Return whether it is done; first do what can be done without waiting."""
        return self.channel.complete(self, block=False)

    def wait(self) -> None:
        """Block until every rank has read what it needs of the others.

        Raises:
            LocalPeerLost: a rank is gone or does not come.
            OSError: memory cannot be read or reserved.
            RuntimeError: ranks exchange different buckets.
        """
        self.channel.complete(self, block=True)
        if not self.done:
            assert self.channel.error is not None
            raise self.channel.error

    def result(self) -> Tensor:
        """Return what the call promised."""
        assert self.done, "wait first"
        return self.outcome()


class NodeChannel:
    """Operations of one kind: numbered alike on all ranks, completed in order.

    The others read what is sent where it is.
    """

    def __init__(self, page: NodePage, *, base: int) -> None:
        self.page, self.base = page, base
        self.pending: deque[Operation] = deque()
        self.submitted = self.published = self.completed = 0
        self.error: Exception | None = None
        self.last_check = 0.0

    def submit(self, operation: Operation) -> int:
        """Publish `operation`, now or when earlier ones are done; return its number."""
        self.pending.append(operation)
        self.submitted += 1
        self._guard(self._publish)
        return self.submitted

    def complete(self, operation: Operation, *, block: bool) -> bool:
        """Bring operations on until `operation` is done or (not `block`) would wait.

        Returns True also after an error.
        """
        while not operation.done and self.error is None:
            if not self._guard(lambda: self._advance(block)):
                return self.error is not None
        return True

    def _guard(self, act: Callable[[], bool]) -> bool:
        # Do `act`; keep its error, and let no other rank wait for this one
        if self.error is not None:
            return False
        try:
            return act()
        except (LocalPeerLost, OSError, RuntimeError) as error:
            self.error = error
            self.page.leave(
                because_of=error.local_rank if isinstance(error, LocalPeerLost) else None
            )
            return False

    def _record(self, number: int) -> int:
        return self.base + RECORDS + RECORD_WORDS * (number % MOST_IN_FLIGHT)

    def _publish(self) -> bool:
        # Publish what was submitted, as far as there are free records
        while self.published < self.submitted and self.published - self.completed < MOST_IN_FLIGHT:
            sent, number = self.pending[self.published - self.completed].sent, self.published + 1
            self.page.write(self._record(number), [sent.data_ptr(), sent.nbytes])
            self.published = number
            self.page.set(self.base + PUBLISHED, number)
        return True

    def _advance(self, block: bool) -> bool:
        # Bring the first pending operation one step on; False where it would wait
        # once all have published: read; once all have read: done
        operation = self.pending[0]
        number = self.completed + 1
        if not operation.has_read:
            if not self._reached(PUBLISHED, number, block):
                return False
            self._read(operation, number)
            operation.has_read = True
            self.page.set(self.base + FINISHED, number)
        if not self._reached(FINISHED, number, block):
            return False
        self.pending.popleft()
        self.completed = number
        operation.done = True
        return self._publish()

    def _reached(self, counter: int, number: int, block: bool) -> bool:
        # Whether all ranks have set `counter` to `number`; wait for it with `block`
        # Without `block`, lost ranks are looked for now and then only: it takes system calls.
        for rank in range(self.page.size):
            if block:
                self.page.wait(rank, self.base + counter, number)
            elif self.page.get(rank, self.base + counter) < number:
                now = time.monotonic()
                if now - self.last_check > NAP_NANOSECONDS * 1e-9:
                    self.last_check = now
                    self.page.check(rank, self.base + counter, number)
                return False
        return True

    def _read(self, operation: Operation, number: int) -> None:
        # Read what the others published for operation `number`
        # (ranks,): addresses, and whose
        sources = np.zeros(self.page.size, dtype=np.int64)
        processes = np.array([other.process for other in self.page.ranks], dtype=np.int64)
        for rank, expected in enumerate(operation.expected):
            sources[rank], size = self.page.read(rank, self._record(number), RECORD_WORDS)
            if size != expected:
                raise RuntimeError(
                    f"local rank {rank} sends {size} bytes where local rank {self.page.rank} "
                    f"expects {expected}: all ranks of a node must exchange the same buckets in "
                    "the same order"
                )
        failed, error = operation.read(processes, sources)
        if error:
            self.page.check(failed, self.base + FINISHED, number)
            raise OSError(error, f"reading the memory of local rank {failed}: {os.strerror(error)}")


class NodePage:
    """The shared page: `words` int64 for each rank, written by that rank only, zero at first.

    Making one is a collective call on `group`, whose ranks must be the node's.

    Raises:
        NodeMemoryUnavailable: on all ranks, where they cannot share a page, or may not read each
            other's memory.
    """

    def __init__(self, group: dist.ProcessGroup, *, words: int, timeout_seconds: float) -> None:
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.timeout_seconds = timeout_seconds
        self.left_word = words
        self.row_bytes = 64 * (words // 8 + 1)  # whole cache lines
        # for system calls: four words of a read, two of a sleep
        self.vector = np.zeros(6, dtype=np.int64)
        self.probe = np.frombuffer(secrets.token_bytes(16), dtype=np.int64).copy()
        # Everyone says where it is, maps rank 0's page, and tries to read the others' memory.
        introduction = self._introduce()
        self.ranks = values_of_group(introduction, group)
        problems = values_of_group(self._open() or self._read_probes(), group)
        if introduction.descriptor >= 0:
            os.close(introduction.descriptor)
        for rank, problem in enumerate(problems):
            if problem:
                raise NodeMemoryUnavailable(
                    f"local rank {rank} shares no memory with the others: {problem}"
                )

    def _introduce(self) -> Introduction:
        # What the others must know of this rank; rank 0 reserves the page
        descriptor, token, problem, boot = -1, secrets.token_bytes(TOKEN_BYTES), "", ""
        try:
            boot = BOOT.read_text().strip()
            if TRACE_SCOPE.exists() and TRACE_SCOPE.read_text().strip() == "1":
                # as MPI does: no rank is another's parent process
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
        # Map the page; return what hinders it
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
        # Read a word of every rank's memory; return what hinders it
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
        """Return `count` words of `rank`, written before a word that `wait` saw set."""
        values: list[int] = self.words[rank, word : word + count].tolist()
        return values

    def write(self, word: int, values: Sequence[int]) -> None:
        """Write several of this rank's words, to be announced by `set`."""
        self.words[self.rank, word : word + len(values)] = values

    def set(self, word: int, value: int) -> None:
        """Set one of this rank's words after all written before, and wake the waiting."""
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
        """Raise LocalPeerLost where a rank is gone and `rank` has not set `word` to `value`."""
        lost = self._lost()
        # A rank may leave once all have finished: the word may have been set meanwhile.
        if lost and self.get(rank, word) < value:
            raise lost

    def _lost(self) -> LocalPeerLost | None:
        # The rank that is gone, as an error; None while all are there
        for rank, other in enumerate(self.ranks):
            if process_start(other.process) != other.started and not self.get(rank, self.left_word):
                return LocalPeerLost(rank, f"(process {other.process}) has ended")
        left = [self.get(rank, self.left_word) for rank in range(self.size)]
        # Ranks that left because of another one are not to blame.
        for rank in sorted(range(self.size), key=lambda rank: left[rank] == LEFT):
            if left[rank] > LEFT:
                return LocalPeerLost(left[rank] - BLAMES, f"was given up by local rank {rank}")
            if left[rank]:
                return LocalPeerLost(
                    rank, f"(process {self.ranks[rank].process}) has left the exchange"
                )
        return None

    def leave(self, *, because_of: int | None = None) -> None:
        """Leave: nobody waits for this rank any more; record which rank it missed."""
        if not self.get(self.rank, self.left_word):
            self.set(self.left_word, LEFT if because_of is None else BLAMES + because_of)


@dataclass(frozen=True)
class Introduction:
    """Who a rank is, for the others: its machine and process, its probe, and the page.

    `probe` is the address of a word with `probe_value`; `descriptor` and `token` are rank 0's;
    `problem` says why it cannot share a page.
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
    """Return the descriptor of `size` bytes of nameless memory.

    They are reserved now rather than when first touched. Raises OSError.
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

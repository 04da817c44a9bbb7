"""Operations of one kind among a node's ranks: numbered, published on the shared page, completed in
order without waiting.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from lightning_topt.communication.node.node_exchange import PendingResult
from lightning_topt.communication.node.node_kernels import Array, fetch
from lightning_topt.communication.node.page import (
    NAP_NANOSECONDS,
    LocalPeerLost,
    NodePage,
    map_of,
    map_shared,
    reserve,
)

SEGMENT_ROUNDING = 1 << 20  # bytes

# Words of a channel on the page: two counters, each in a cache line of its own, then the records of
# what is published.
PUBLISHED, FINISHED, RECORDS = 0, 8, 16
ADDRESS, SIZE, DESCRIPTOR, CAPACITY = range(4)
RECORD_WORDS, MOST_IN_FLIGHT = 4, 16
SEGMENTS = 2  # in flight where ranks copy into segments: one is written while another is read
CHANNEL_WORDS = RECORDS + RECORD_WORDS * MOST_IN_FLIGHT

Reader = Callable[[Array, Array], tuple[int, int]]


@dataclass
class Segment:
    """Shared memory of this rank that grows; `descriptor` is open for the others to map it."""

    memory: Array = field(default_factory=lambda: np.empty(0, dtype=np.uint8))
    descriptor: int = -1

    def hold(self, size: int) -> None:
        """Make room for `size` bytes; what was in it is gone. Raises OSError."""
        if self.descriptor >= 0 and size <= self.memory.size:
            return
        capacity = SEGMENT_ROUNDING * max(1, -(-size // SEGMENT_ROUNDING))
        self.close()
        self.descriptor = reserve(capacity)
        self.memory = map_shared(self.descriptor, size=capacity)

    def close(self) -> None:
        """Give the memory back once nobody maps it."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
        self.memory, self.descriptor = np.empty(0, dtype=np.uint8), -1


class Operation(PendingResult[Tensor]):
    """One call: `sent` is published for the others; `read`, once all have published, gets what they
    sent.

    `expected` bytes come from every rank. Holds on to the tensors until it is done.
    """

    def __init__(
        self,
        channel: Channel,
        *,
        sent: Tensor,
        expected: Sequence[int],
        read: Reader,
        outcome: Callable[[], Tensor],
    ) -> None:
        self.channel, self.sent, self.expected, self.read, self.outcome = (
            channel,
            sent,
            expected,
            read,
            outcome,
        )
        self.has_read = self.done = False
        self.number = channel.submit(self)

    def is_completed(self) -> bool:
        """Return whether it is done; does what can be done without waiting."""
        return self.channel.complete(self, block=False)

    def wait(self) -> None:
        """Block until every rank has read what it needs of the others. Raises LocalPeerLost,
        OSError, RuntimeError.
        """
        self.channel.complete(self, block=True)
        if not self.done:
            assert self.channel.error is not None
            raise self.channel.error

    def result(self) -> Tensor:
        """Return what the method promised."""
        assert self.done, "wait first"
        return self.outcome()


class Channel:
    """Operations of one method: numbered alike on all ranks, completed in order."""

    def __init__(self, page: NodePage, *, base: int, direct: bool) -> None:
        self.page, self.base = page, base
        self.segments = [] if direct else [Segment() for _ in range(SEGMENTS)]
        self.in_flight = MOST_IN_FLIGHT if direct else SEGMENTS
        self.mapped: dict[tuple[int, int], tuple[int, Array]] = {}
        self.pending: deque[Operation] = deque()
        self.submitted = self.published = self.completed = 0
        self.error: Exception | None = None
        self.last_look = 0.0

    def submit(self, operation: Operation) -> int:
        """Publish `operation`, now or when earlier ones are done; its number."""
        self.pending.append(operation)
        self.submitted += 1
        self._guard(self._publish)
        return self.submitted

    def complete(self, operation: Operation, *, block: bool) -> bool:
        """Bring operations on until `operation` is done or (not `block`) would wait. True also
        after an error.
        """
        while not operation.done and self.error is None:
            if not self._guard(lambda: self._advance(block)):
                return self.error is not None
        return True

    def close(self) -> None:
        """Give memory back."""
        for segment in self.segments:
            segment.close()
        self.mapped.clear()

    def _guard(self, act: Callable[[], bool]) -> bool:
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
        return self.base + RECORDS + RECORD_WORDS * (number % self.in_flight)

    def _publish(self) -> bool:
        while self.published < self.submitted and self.published - self.completed < self.in_flight:
            sent = self.pending[self.published - self.completed].sent
            size, number = sent.numel() * sent.element_size(), self.published + 1
            address, descriptor, capacity = sent.data_ptr(), -1, 0
            if self.segments:
                segment = self.segments[number % self.in_flight]
                segment.hold(size)
                fetch(0, int(segment.memory.ctypes.data), address, size, self.page.vector_address)
                address, descriptor, capacity = 0, segment.descriptor, segment.memory.size
            self.page.write(self._record(number), [address, size, descriptor, capacity])
            self.published = number
            self.page.set(self.base + PUBLISHED, number)
        return True

    def _advance(self, block: bool) -> bool:
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
        for rank in range(self.page.size):
            if block:
                self.page.wait(rank, self.base + counter, number)
            elif self.page.get(rank, self.base + counter) < number:
                now = time.monotonic()
                if now - self.last_look > NAP_NANOSECONDS * 1e-9:
                    self.last_look = now
                    self.page.check(rank, self.base + counter, number)
                return False
        return True

    def _read(self, operation: Operation, number: int) -> None:
        sources = np.zeros(self.page.size, dtype=np.int64)
        processes = np.zeros(self.page.size, dtype=np.int64)
        for rank, expected in enumerate(operation.expected):
            address, size, descriptor, capacity = self.page.read(
                rank, self._record(number), RECORD_WORDS
            )
            if size != expected:
                raise RuntimeError(
                    f"local rank {rank} sends {size} bytes where local rank {self.page.rank} "
                    f"expects {expected}: all ranks "
                    "of a node must exchange the same buckets in the same order"
                )
            if rank == self.page.rank:
                continue
            if descriptor < 0:
                sources[rank], processes[rank] = address, self.page.ranks[rank].process
            else:
                sources[rank] = self._map(rank, number % self.in_flight, descriptor, capacity)
        failed, error = operation.read(processes, sources)
        if error:
            self.page.check(failed, self.base + FINISHED, number)
            raise OSError(error, f"reading the memory of local rank {failed}: {os.strerror(error)}")

    def _map(self, rank: int, slot: int, descriptor: int, capacity: int) -> int:
        """Address of another rank's segment, which is a new one where its descriptor or size is."""
        known, memory = self.mapped.get((rank, slot), (-1, np.empty(0, dtype=np.uint8)))
        if known != descriptor or memory.size != capacity:
            try:
                memory = map_of(self.page.ranks[rank].process, descriptor, size=capacity)
            except OSError:
                self.page.check(rank, self.base + FINISHED, self.completed + 1)
                raise
            self.mapped[rank, slot] = (descriptor, memory)
        return int(memory.ctypes.data)

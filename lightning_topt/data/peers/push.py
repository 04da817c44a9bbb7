"""Gives entries to their owners in the background, so that reading the source does not wait for the
network.
"""

from __future__ import annotations

import threading
import warnings
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from lightning_topt.data.peers.peer_channel import PeerError
from lightning_topt.data.peers.peer_link import OwnerLink, offer

MESSAGE_BYTES = 1 << 24  # of entries in one message, unless one alone is larger


@dataclass
class PushCounts:
    """`PushCounts` are those of one process, in entries: `stored` by their owners; `refused` by
    them, which have them or have no room for them; `dropped` here, because the queue was full or
    the owner did not answer.
    """

    stored: int = 0
    refused: int = 0
    dropped: int = 0


class Pusher:
    """A queue of at most `queue_bytes` of entries and the thread that empties it; `link_of` gives
    an owner's link.
    """

    def __init__(
        self, link_of: Callable[[int], OwnerLink], *, queue_bytes: int, counts: PushCounts
    ) -> None:
        self.link_of, self.queue_bytes, self.counts = link_of, queue_bytes, counts
        self._queues: dict[int, deque[tuple[int, bytes]]] = {}
        self._queued_bytes = 0  # with what is being sent
        self._condition = threading.Condition()
        self._is_closing = self._has_warned = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def put(self, owner: int, item: int, entry: bytes) -> None:
        """Queue an entry; where there is no room it is dropped, with a warning the first time."""
        warn = False
        with self._condition:
            if self.link_of(owner).is_down or self._is_closing:
                self.counts.dropped += 1
            elif self._queued_bytes + len(entry) > self.queue_bytes and self._queued_bytes:
                self.counts.dropped += 1
                warn, self._has_warned = not self._has_warned, True
            else:
                self._queues.setdefault(owner, deque()).append((item, entry))
                self._queued_bytes += len(entry)
                self._condition.notify_all()
        if warn:
            warnings.warn(
                "samples are read faster than they can be given to the nodes that store them: some "
                "are not stored and will be "
                "read from the source again",
                stacklevel=3,
            )

    def _run(self) -> None:
        try:
            self._send_all()
        finally:
            # also after an error, for example a warning that was made one: nothing waits for ever
            # in the queue
            with self._condition:
                self._is_closing = True
                self._drop_queued()

    def _send_all(self) -> None:
        while True:
            with self._condition:
                self._condition.wait_for(lambda: self._queues or self._is_closing)
                if not self._queues:
                    return
                owner, entries = self._next()
            try:
                self._send(owner, entries)
            finally:
                with self._condition:
                    self._queued_bytes -= sum(len(entry) for _, entry in entries)
                    self._condition.notify_all()

    def _next(self) -> tuple[int, list[tuple[int, bytes]]]:
        """Entries for the owner that waits longest."""
        owner = next(iter(self._queues))
        queue, limits = self._queues.pop(owner), self.link_of(owner).limits
        entries, nbytes = [queue.popleft()], 0
        nbytes = len(entries[0][1])
        while queue and len(entries) < limits.offers and nbytes + len(queue[0][1]) <= MESSAGE_BYTES:
            entries.append(queue.popleft())
            nbytes += len(entries[-1][1])
        if queue:
            self._queues[owner] = queue  # behind the others
        return owner, entries

    def _send(self, owner: int, entries: list[tuple[int, bytes]]) -> None:
        link, stored = self.link_of(owner), None
        acquired = link.acquire()
        if acquired is not None:
            channel, deadline = acquired
            try:
                stored = offer(channel, entries, deadline=deadline)
                link.release(channel)
            except PeerError as error:
                link.failed(channel, error)
        with self._condition:
            if stored is None:
                self.counts.dropped += len(entries)
            else:
                self.counts.stored += sum(stored)
                self.counts.refused += len(stored) - sum(stored)

    def flush(self, *, timeout_seconds: float) -> None:
        """Wait until nothing is queued or being sent, but not longer than that."""
        with self._condition:
            self._condition.wait_for(
                lambda: not self._queued_bytes and not self._queues, timeout=timeout_seconds
            )

    def close(self, *, timeout_seconds: float) -> None:
        """Send what is queued; what is left after `timeout_seconds` is dropped."""
        with self._condition:
            self._is_closing = True
            self._condition.notify_all()
            self._condition.wait_for(
                lambda: not self._queued_bytes and not self._queues, timeout=timeout_seconds
            )
            self._drop_queued()
        self._thread.join(timeout=0.1)

    def _drop_queued(self) -> None:
        for queue in self._queues.values():
            self.counts.dropped += len(queue)
            self._queued_bytes -= sum(len(entry) for _, entry in queue)
        self._queues.clear()
        self._condition.notify_all()

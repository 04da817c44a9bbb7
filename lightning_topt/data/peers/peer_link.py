"""One node as another sees it: its connections, whether it answers, and what was asked of it."""

from __future__ import annotations

import contextlib
import threading
import time
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from lightning_topt.data.cache.segment_store import checksum
from lightning_topt.data.peers.peer_channel import Channel, PeerError, ProtocolError, connect
from lightning_topt.data.peers.protocol import (
    ABSENT,
    DEFERRED,
    ENTRY,
    GET,
    OFFER,
    PRESENT,
    REQUEST,
    SLOWEST_BYTES_PER_SECOND,
    PeerLimits,
    introduce,
)

LEAST_SECONDS = 1.0  # for the bytes of an answer that has begun
# kept per process and owner: the training's, the prefetching thread's, the pushing thread's
IDLE_CONNECTIONS = 4
Entry = npt.NDArray[np.uint8]


class Later:
    """Stands for an entry that the owner wants to be asked for again."""


class Damaged:
    """Stands for an entry whose bytes are not those that its checksum is of."""


class OwnerLink:
    """Connections to one node at `address`, made when they are needed. Threads may share it.

    A node that does not answer within `timeout_seconds` is down: nobody waits for it any more,
    until a thread in the background, which tries every `retry_seconds`, has had an answer.
    """

    def __init__(
        self,
        address: tuple[str, int],
        *,
        name: str,
        key: bytes,
        timeout_seconds: float,
        retry_seconds: float,
        limits: PeerLimits,
    ) -> None:
        self.address, self.name, self.key = address, name, key
        self.timeout_seconds, self.retry_seconds, self.limits = (
            timeout_seconds,
            retry_seconds,
            limits,
        )
        self._idle: list[Channel] = []
        self._lock = threading.Lock()
        self._retry_at: float | None = None  # None: it is not down
        self._is_probing = self._is_closed = False
        self.failures = 0

    @property
    def is_down(self) -> bool:
        """Whether it did not answer the last time."""
        return self._retry_at is not None

    def acquire(self) -> tuple[Channel, float] | None:
        """Return a connection for one exchange and when its answer must have begun; None where the
        node is down.

        It is to be given to `release`, or with an error to `failed`.
        """
        with self._lock:
            if self._retry_at is not None:
                self._probe_if_due()
                return None
            while self._idle:
                channel = self._idle.pop()
                if not channel.is_stale():  # it was idle for long, or the node was started again
                    return channel, time.monotonic() + self.timeout_seconds
                channel.close()
        try:
            return self._open(), time.monotonic() + self.timeout_seconds
        except PeerError as error:
            self.failed(None, error)
            return None

    def _open(self) -> Channel:
        deadline = time.monotonic() + self.timeout_seconds
        channel = connect(self.address, deadline=deadline)
        try:
            introduce(channel, self.key, deadline=deadline)
        except BaseException:
            channel.close()
            raise
        return channel

    def release(self, channel: Channel) -> None:
        """After an exchange that came to its end."""
        with self._lock:
            if len(self._idle) < IDLE_CONNECTIONS and not self._is_closed:
                self._idle.append(channel)
                return
        channel.close()

    def failed(self, channel: Channel | None, error: PeerError) -> None:
        """After an exchange that did not: the node is down for now. Warns the first time."""
        with self._lock:
            self.failures += 1
            first = self.failures == 1
            if not self.is_down:
                self._retry_at = time.monotonic() + self.retry_seconds
            idle, self._idle = self._idle, []
        for old in [*idle, *([channel] if channel is not None else [])]:
            old.close()
        if first:
            warnings.warn(
                f"{self.name} of the partitioned cache ({self.address[0]}:{self.address[1]}): "
                f"{error}. Its samples are read "
                "from the source until it answers",
                stacklevel=2,
            )

    def _probe_if_due(self) -> None:
        assert self._retry_at is not None
        if self._is_probing or self._is_closed or time.monotonic() < self._retry_at:
            return
        try:
            threading.Thread(target=self._probe, daemon=True).start()
        except RuntimeError:  # no more threads, or the process is ending
            self._retry_at = time.monotonic() + self.retry_seconds
        else:
            self._is_probing = True

    def _probe(self) -> None:
        channel = None
        try:
            with contextlib.suppress(PeerError):
                channel = self._open()
        finally:
            with self._lock:
                self._is_probing = False
                self._retry_at = (
                    None if channel is not None else time.monotonic() + self.retry_seconds
                )
        if channel is not None:
            self.release(channel)

    def close(self) -> None:
        """Hang up everything that is not in use."""
        with self._lock:
            self._is_closed = True
            idle, self._idle = self._idle, []
        for channel in idle:
            channel.close()


def ask(channel: Channel, items: Sequence[int], *, deadline: float) -> None:
    """Send the question for `items`."""
    channel.send(
        [REQUEST.pack(GET, len(items)), np.asarray(items, "<u8").tobytes()], deadline=deadline
    )


def receive_answer(
    channel: Channel, items: Sequence[int], *, deadline: float, limits: PeerLimits
) -> list[Entry | type[Later] | type[Damaged] | None]:
    """Return the answer to `ask`: entries, each one checked; None: the owner has none.

    Raises PeerTimeout where nothing came by `deadline`, or less than a megabyte per second
    afterwards.
    """
    states = list(ENTRY.iter_unpack(channel.receive(ENTRY.size * len(items), deadline=deadline)))
    total = 0
    for i, (state, nbytes, _) in enumerate(states):
        if state not in (ABSENT, PRESENT, DEFERRED) or (state == DEFERRED and not i):
            raise ProtocolError("an answer that makes no sense")
        total += nbytes if state == PRESENT else 0
        if nbytes > limits.entry_bytes or total > max(limits.reply_bytes, limits.entry_bytes):
            raise ProtocolError("an answer larger than the limits allow")
    buffers = [
        np.empty(nbytes, np.uint8) if state == PRESENT else None for state, nbytes, _ in states
    ]
    # While another owner was waited for, this one could not send what no buffer of the connection
    # had room for.
    deadline = max(deadline, time.monotonic() + LEAST_SECONDS) + total / SLOWEST_BYTES_PER_SECOND
    channel.receive_into([buffer for buffer in buffers if buffer is not None], deadline=deadline)
    answer: list[Entry | type[Later] | type[Damaged] | None] = []
    for item, (state, _, digest), buffer in zip(items, states, buffers, strict=True):
        if buffer is None:
            answer.append(Later if state == DEFERRED else None)
        else:
            answer.append(buffer if checksum([buffer], item=item) == digest else Damaged)
    return answer


def offer(channel: Channel, entries: Sequence[tuple[int, bytes]], *, deadline: float) -> list[bool]:
    """Give (item, entry) pairs to their owner, which takes what it wants; whether it stored
    them.
    """
    offers = b"".join(
        ENTRY.pack(item, len(entry), checksum([entry], item=item)) for item, entry in entries
    )
    channel.send([REQUEST.pack(OFFER, len(entries)), offers], deadline=deadline)
    wanted = channel.receive(len(entries), deadline=deadline)
    payload: list[Any] = [entry for (_, entry), want in zip(entries, wanted, strict=True) if want]
    deadline += sum(map(len, payload)) / SLOWEST_BYTES_PER_SECOND
    channel.send(payload, deadline=deadline)
    return [bool(stored) for stored in channel.receive(len(entries), deadline=deadline)]

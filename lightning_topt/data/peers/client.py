"""The other nodes' part of a partitioned cache: entries are fetched from them and given to them.

`owners` maps every item to the node that stores it, so nobody has to be asked. `Peers` is what a
`SampleCache` holds:

    fetch   all owners are asked before the first answer is read; a miss is read from the source
    push    entries read from the source are given to their owners

An `OwnerLink` holds the connections to one owner. An owner that does not answer in time is down:
nobody waits for it any more, and a thread tries it again in the background. The cache only ever
loses hits by that.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import warnings
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from lightning_topt.data.cache.segment_store import checksum
from lightning_topt.data.peers.protocol import (
    ABSENT,
    ENTRY,
    GET,
    MOST_ENTRY_BYTES,
    OFFER,
    PRESENT,
    REQUEST,
    SLOWEST_BYTES_PER_SECOND,
    Channel,
    PeerError,
    ProtocolError,
    authenticate,
    connect,
    run_key,
)

NOWHERE = ("", 0)  # address of a node that stores nothing: none of its tiers could be opened
LEAST_SECONDS = 1.0  # for the bytes of an answer that has started
IDLE_CONNECTIONS = 4  # kept per process and owner, for threads that share them
_MASK = (1 << 64) - 1
Entry = npt.NDArray[np.uint8]


class Peers:
    """The other nodes, as a `SampleCache` needs them.

    It is picklable; every process makes its own connections.

    Args:
        addresses: of all nodes' `PeerServer` (host, port), by node; this node's own is not used. A
            node at `NOWHERE` is not asked.
        node: the number of this node.
        num_items: of the data set; the same on all nodes.
        seed: of the partition, see `owners`; the same on all nodes.
        secret: as the servers have it.
        fingerprint: as the servers have it.
        timeout_seconds: for an answer to begin; then the node counts as down.
        retry_seconds: until a node that is down is tried again.

    Raises:
        ValueError: the secret is too short.
    """

    def __init__(
        self,
        addresses: Sequence[tuple[str, int]],
        *,
        node: int,
        num_items: int,
        seed: int,
        secret: bytes,
        fingerprint: str,
        timeout_seconds: float = 5.0,
        retry_seconds: float = 10.0,
    ) -> None:
        self.addresses, self.node = list(addresses), node
        self.timeout_seconds, self.retry_seconds = timeout_seconds, retry_seconds
        self._key = run_key(secret, fingerprint=fingerprint, num_items=num_items)
        self._owners = owners(num_items, num_nodes=len(addresses), seed=seed)
        self._begin()

    def _begin(self) -> None:
        # Start without connections or threads, in a new process
        self._links: dict[int, OwnerLink] = {}
        _instances.add(self)

    def __getstate__(self) -> dict[str, object]:
        return {name: value for name, value in vars(self).items() if name != "_links"}

    def __setstate__(self, state: dict[str, object]) -> None:
        vars(self).update(state)
        self._begin()

    def is_own(self, item: int) -> bool:
        """Return whether this node stores `item`."""
        return bool(self._owners[item] == self.node)

    def fetch(self, items: Sequence[int]) -> list[Entry | None]:
        """Fetch verified, writable entries (nbytes,) of other nodes' items.

        None stands for an entry that the owner does not have, or that did not come in time. There
        is one exchange with each owner; all are asked before the first answer is read.
        """
        entries: list[Entry | None] = [None] * len(items)
        # positions in `items`, by owner
        positions: dict[int, list[int]] = {}
        for position, item in enumerate(items):
            owner = int(self._owners[item])
            if owner != self.node and self.addresses[owner] != NOWHERE:
                positions.setdefault(owner, []).append(position)
        asked = [
            (owner, at, self._ask(owner, [items[i] for i in at])) for owner, at in positions.items()
        ]
        for owner, at, exchange in asked:
            if exchange is None:  # the owner is down: these are misses
                continue
            channel, deadline = exchange
            link = self._link(owner)
            try:
                answer = receive_answer(channel, [items[i] for i in at], deadline=deadline)
            except PeerError as error:
                link.failed(channel, error)
                continue
            link.release(channel)
            for i, entry in zip(at, answer, strict=True):
                entries[i] = entry
        return entries

    def _ask(self, owner: int, items: Sequence[int]) -> tuple[Channel, float] | None:
        """Send the request to one owner.

        Returns the connection of the answer and its deadline, None where the owner is down. Every
        owner has its own deadline: the slowness of another one does not count.
        """
        link = self._link(owner)
        exchange = link.acquire()
        if exchange is not None:
            try:
                ask(exchange[0], items, deadline=exchange[1])
            except PeerError as error:
                link.failed(exchange[0], error)
                return None
        return exchange

    def push(self, entries: Mapping[int, Sequence[Any]]) -> None:
        """Give entries (each as buffers) to their owners.

        What an owner does not take, or cannot, is read from the source again later.
        """
        by_owner: dict[int, list[tuple[int, Sequence[Any]]]] = {}
        for item, parts in entries.items():
            owner = int(self._owners[item])
            assert owner != self.node, "a node's own items are not pushed"
            fits = sum(map(len, parts)) <= MOST_ENTRY_BYTES
            if fits and self.addresses[owner] != NOWHERE:
                by_owner.setdefault(owner, []).append((item, parts))
        for owner, offers in by_owner.items():
            link = self._link(owner)
            exchange = link.acquire()
            if exchange is None:  # it is down
                continue
            channel, deadline = exchange
            try:
                offer(channel, offers, deadline=deadline)
                link.release(channel)
            except PeerError as error:
                link.failed(channel, error)

    def _link(self, owner: int) -> OwnerLink:
        link = self._links.get(owner)
        if link is None:
            made = OwnerLink(
                self.addresses[owner],
                name=f"node {owner}",
                key=self._key,
                timeout_seconds=self.timeout_seconds,
                retry_seconds=self.retry_seconds,
            )
            # another thread may have made one meanwhile: the first is kept
            link = self._links.setdefault(owner, made)
        return link

    def close(self) -> None:
        """Hang up. Used again, it connects again."""
        links, self._links = self._links, {}
        for link in links.values():
            link.close()


_instances: weakref.WeakSet[Peers] = weakref.WeakSet()


def _begin_anew() -> None:
    # After a fork: the parent's connections and threads are the parent's.
    for peers in list(_instances):
        peers._begin()


os.register_at_fork(after_in_child=_begin_anew)


def owners(num_items: int, *, num_nodes: int, seed: int) -> npt.NDArray[np.int32]:
    """Return the node (0 .. `num_nodes` - 1) that owns each item, (num_items,).

    The numbers of items per node differ by one at most. The result depends on the arguments only,
    not on NumPy's version: items are sorted by a hash of seed and item (SplitMix64; Steele, Lea and
    Flood, OOPSLA 2014), and nodes take them round robin. The partition is random because neighbours
    in the source (of one class, of one size) would otherwise make one node's part heavier.
    """
    # Mixed as well, for the hashes of neighbouring seeds would be shifts of each other.
    far_apart = _mixed(np.array([(seed & _MASK) ^ 0xD1B54A32D192ED03], np.uint64))
    keys = _mixed(np.arange(num_items, dtype=np.uint64) + np.uint64(int(far_apart[0])))
    # the r-th item in the order of keys goes to node r modulo their number
    result = np.empty(num_items, np.int32)
    result[np.argsort(keys, kind="stable")] = np.arange(num_items, dtype=np.int64) % num_nodes
    return result


def _mixed(keys: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    # SplitMix64's output function, modulo 2^64; (n,) -> (n,)
    with np.errstate(over="ignore"):
        keys = keys * np.uint64(0x9E3779B97F4A7C15)
        keys = (keys ^ keys >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
        keys = (keys ^ keys >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    mixed: npt.NDArray[np.uint64] = keys ^ keys >> np.uint64(31)
    return mixed


class OwnerLink:
    """Connections to one node at `address`, made when they are needed. Threads may share it.

    A node that does not answer within `timeout_seconds` is down: nobody waits for it any more. A
    background thread tries it every `retry_seconds`, and its first answer ends that.
    """

    def __init__(
        self,
        address: tuple[str, int],
        *,
        name: str,
        key: bytes,
        timeout_seconds: float,
        retry_seconds: float,
    ) -> None:
        self.address, self.name, self.key = address, name, key
        self.timeout_seconds, self.retry_seconds = timeout_seconds, retry_seconds
        self._idle: list[Channel] = []
        self._lock = threading.Lock()
        self._retry_at: float | None = None  # None: not down
        self._is_probing = self._is_closed = False
        self._has_warned = False

    def acquire(self) -> tuple[Channel, float] | None:
        """Return a connection for one exchange and the deadline for the start of its answer.

        None where the node is down. Give the connection to `release` afterwards, or with an error
        to `failed`.
        """
        with self._lock:
            # Down: at most a probe is started.
            if self._retry_at is not None:
                self._probe_if_due()
                return None
            # An idle connection, unless the node has closed it or was restarted.
            while self._idle:
                channel = self._idle.pop()
                if not channel.is_stale():
                    return channel, time.monotonic() + self.timeout_seconds
                channel.close()
        # A new one.
        try:
            return self._open(), time.monotonic() + self.timeout_seconds
        except PeerError as error:
            self.failed(None, error)
            return None

    def _open(self) -> Channel:
        deadline = time.monotonic() + self.timeout_seconds
        channel = connect(self.address, deadline=deadline)
        try:
            authenticate(channel, self.key, deadline=deadline)
        except BaseException:
            channel.close()
            raise
        return channel

    def release(self, channel: Channel) -> None:
        """Return the connection after an exchange that was completed."""
        with self._lock:
            if len(self._idle) < IDLE_CONNECTIONS and not self._is_closed:
                self._idle.append(channel)
                return
        channel.close()

    def failed(self, channel: Channel | None, error: PeerError) -> None:
        """Mark the node as down after a failed exchange. Warns the first time."""
        with self._lock:
            # down from its first failure on, and idle connections are no better than this one
            first, self._has_warned = not self._has_warned, True
            if self._retry_at is None:
                self._retry_at = time.monotonic() + self.retry_seconds
            idle, self._idle = self._idle, []
        for old in [*idle, *([channel] if channel is not None else [])]:
            old.close()
        if first:
            warnings.warn(
                f"{self.name} of the partitioned cache ({self.address[0]}:{self.address[1]}): "
                f"{error}. Its samples are read from the source until it answers",
                stacklevel=2,
            )

    def _probe_if_due(self) -> None:
        assert self._retry_at is not None
        # one probe at a time, and none before its time
        if self._is_probing or self._is_closed or time.monotonic() < self._retry_at:
            return
        try:
            threading.Thread(target=self._probe, daemon=True).start()
        except RuntimeError:  # no more threads, or the process is exiting
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
                # up again, or the next attempt
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
    """Send a GET request for `items`."""
    channel.send(
        [REQUEST.pack(GET, len(items)), np.asarray(items, "<u8").tobytes()], deadline=deadline
    )


def receive_answer(
    channel: Channel, items: Sequence[int], *, deadline: float
) -> list[Entry | None]:
    """Receive the answer to `ask`; None stands for an entry that is absent or damaged.

    Raises:
        PeerTimeout: nothing came by `deadline`, or less than a megabyte per second afterwards.
    """
    # The states: one (state, bytes, checksum) per item.
    states = list(ENTRY.iter_unpack(channel.receive(ENTRY.size * len(items), deadline=deadline)))
    if any(state not in (ABSENT, PRESENT) or size > MOST_ENTRY_BYTES for state, size, _ in states):
        raise ProtocolError("an answer that makes no sense")
    # The bytes of all that are present. While this node waited for another owner, this one could
    # only fill the connection's buffers, so it gets a second at least.
    buffers = {
        i: np.empty(nbytes, np.uint8)
        for i, (state, nbytes, _) in enumerate(states)
        if state == PRESENT
    }
    total = sum(buffer.nbytes for buffer in buffers.values())
    deadline = max(deadline, time.monotonic() + LEAST_SECONDS) + total / SLOWEST_BYTES_PER_SECOND
    channel.receive_into(list(buffers.values()), deadline=deadline)
    answer: list[Entry | None] = [None] * len(items)
    for i, buffer in buffers.items():
        if checksum([buffer], item=items[i]) == states[i][2]:
            answer[i] = buffer
    return answer


def offer(
    channel: Channel, entries: Sequence[tuple[int, Sequence[Any]]], *, deadline: float
) -> int:
    """Offer (item, buffers) pairs to their owner; returns how many of them it stored."""
    offers = b"".join(
        ENTRY.pack(item, sum(map(len, parts)), checksum(parts, item=item))
        for item, parts in entries
    )
    channel.send([REQUEST.pack(OFFER, len(entries)), offers], deadline=deadline)
    # The owner says which of them it wants, and gets only these.
    wanted = channel.receive(len(entries), deadline=deadline)
    payload = [
        buffer for (_, parts), want in zip(entries, wanted, strict=True) if want for buffer in parts
    ]
    deadline += sum(map(len, payload)) / SLOWEST_BYTES_PER_SECOND
    channel.send(payload, deadline=deadline)
    return sum(map(bool, channel.receive(len(entries), deadline=deadline)))

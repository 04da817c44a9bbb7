"""The other nodes' part of a partitioned cache: entries from their memory, before the source is
asked.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.util import Finalize
from typing import Any

import numpy as np

from lightning_topt.basics.argument_checks import check_size
from lightning_topt.data.peers.partition import owners
from lightning_topt.data.peers.peer_channel import Channel, PeerError
from lightning_topt.data.peers.peer_link import (
    Damaged,
    Entry,
    Later,
    OwnerLink,
    ask,
    receive_answer,
)
from lightning_topt.data.peers.protocol import PeerLimits, run_key
from lightning_topt.data.peers.push import PushCounts, Pusher

# the address of a node that keeps nothing, since none of its tiers could be opened
NOWHERE = ("", 0)
EXIT_SECONDS = 3.0  # for pushes when a process ends; torch's DataLoader ends workers after 5


@dataclass
class PeerCounts:
    """`PeerCounts` are those of one process since it began. Entries: `fetched`, `absent` (the owner
    had none), `damaged` (refused here), `unanswered` (the owner is or was found down);
    `fetched_bytes`.
    """

    fetched: int = 0
    fetched_bytes: int = 0
    absent: int = 0
    damaged: int = 0
    unanswered: int = 0
    pushes: PushCounts = field(default_factory=PushCounts)


class Peers:
    """`Peers` are what a `SampleCache` needs to know of the other nodes; picklable, and every
    process makes connections of its own.

    Args:
        addresses: of all nodes' `PeerServer` (host, port), in the order of the nodes; that of this
            node is not used. A node at `NOWHERE` is not asked.
        node: the number of this node.
        num_items, seed: the partition, see `owners`; the same on all nodes.
        secret, fingerprint: as the servers have them.
        timeout_seconds: for an answer to begin. Then a node that does not answer is left alone, at
            first for `retry_seconds`.
        queue_bytes: of entries that wait to be given to their owners, per process; a number or text
            (``"64MiB"``).

    Raises ValueError for a node that has no address, or a short secret.
    """

    def __init__(
        self,
        addresses: Sequence[tuple[str, int] | None],
        *,
        node: int,
        num_items: int,
        seed: int,
        secret: bytes,
        fingerprint: str,
        timeout_seconds: float = 5.0,
        retry_seconds: float = 10.0,
        queue_bytes: int | str = 1 << 26,
        limits: PeerLimits | None = None,
    ) -> None:
        if not 0 <= node < len(addresses) or any(
            a is None for i, a in enumerate(addresses) if i != node
        ):
            raise ValueError(
                f"node {node} needs the addresses of all other nodes; got {list(addresses)}"
            )
        if min(timeout_seconds, retry_seconds) <= 0:
            raise ValueError("timeout_seconds and retry_seconds are positive")
        self.addresses, self.node, self.num_items, self.seed = (
            list(addresses),
            node,
            num_items,
            seed,
        )
        self.timeout_seconds, self.retry_seconds = timeout_seconds, retry_seconds
        self.queue_bytes = check_size(queue_bytes, name="queue_bytes")
        self.limits = limits or PeerLimits()
        self._key = run_key(secret, fingerprint=fingerprint, num_items=num_items)
        self._owners = owners(num_items, num_nodes=len(addresses), seed=seed)
        self._begin()

    def _begin(self) -> None:
        """In a new process: no connections, no threads."""
        self.counts = PeerCounts()
        self._links: dict[int, OwnerLink] = {}
        self._pusher: Pusher | None = None
        self._lock = threading.Lock()
        _instances.add(self)

    def __getstate__(self) -> dict[str, Any]:
        left_out = ("counts", "_links", "_pusher", "_lock", "_owners")
        return {name: value for name, value in vars(self).items() if name not in left_out}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._owners = owners(self.num_items, num_nodes=len(self.addresses), seed=self.seed)
        self._begin()

    def is_own(self, item: int) -> bool:
        """Return whether this node stores `item`."""
        return bool(self._owners[item] == self.node)

    def fetch(self, items: Sequence[int]) -> list[Entry | None]:
        """Verified, writable entries (bytes,) of other nodes' items; None where the owner has none
        or does not answer in time.

        One exchange with each owner; all are asked before the first answer is read.
        """
        entries: list[Entry | None] = [None] * len(items)
        pending: dict[int, list[int]] = {}
        for position, item in enumerate(items):
            owner = int(self._owners[item])
            if owner != self.node and self.addresses[owner] != NOWHERE:
                pending.setdefault(owner, []).append(position)
        while pending:
            asked = [
                (owner, at, self._ask(owner, [items[i] for i in at]))
                for owner, at in pending.items()
            ]
            pending = {}
            for owner, positions, exchange in asked:
                later = self._collect(owner, exchange, items, positions, entries)
                if later:
                    pending[owner] = later
        return entries

    def _ask(self, owner: int, items: Sequence[int]) -> tuple[Channel, float] | None:
        """The connection on which the answer comes and when it must have begun: no other owner's
        slowness counts.
        """
        link = self._link(owner)
        exchange = link.acquire()
        if exchange is not None:
            try:
                ask(exchange[0], items[: self.limits.items], deadline=exchange[1])
            except PeerError as error:
                link.failed(exchange[0], error)
                return None
        return exchange

    def _collect(
        self,
        owner: int,
        exchange: tuple[Channel, float] | None,
        items: Sequence[int],
        positions: list[int],
        entries: list[Entry | None],
    ) -> list[int]:
        """Put an owner's answer into `entries`; the positions to be asked for again."""
        link, now, later = (
            self._link(owner),
            positions[: self.limits.items],
            positions[self.limits.items :],
        )
        answer = None
        if exchange is not None:
            channel, deadline = exchange
            try:
                answer = receive_answer(
                    channel, [items[i] for i in now], deadline=deadline, limits=self.limits
                )
                link.release(channel)
            except PeerError as error:
                link.failed(channel, error)
        if answer is None:
            self._count(unanswered=len(positions))
            return []
        found = {
            i: entry for i, entry in zip(now, answer, strict=True) if isinstance(entry, np.ndarray)
        }
        for i, entry in found.items():
            entries[i] = entry
        self._count(
            fetched=len(found),
            fetched_bytes=sum(map(len, found.values())),
            absent=sum(entry is None for entry in answer),
            damaged=sum(entry is Damaged for entry in answer),
        )
        return [i for i, entry in zip(now, answer, strict=True) if entry is Later] + later

    def _count(self, **numbers: int) -> None:
        with self._lock:  # the training's thread and the prefetching one
            for name, number in numbers.items():
                setattr(self.counts, name, getattr(self.counts, name) + number)

    def push(self, item: int, parts: Sequence[Any]) -> None:
        """Give an entry (buffers, copied) to its owner, in the background; see `PushCounts` for
        what becomes of it.
        """
        owner = int(self._owners[item])
        assert owner != self.node, "a node's own items are not pushed"
        if sum(map(len, parts)) > self.limits.entry_bytes or self.addresses[owner] == NOWHERE:
            self.counts.pushes.refused += 1
            return
        with self._lock:
            if self._pusher is None:
                self._pusher = Pusher(
                    self._link, queue_bytes=self.queue_bytes, counts=self.counts.pushes
                )
                # A DataLoader's worker ends without a word: what it has read last would be lost.
                Finalize(None, _flush, args=(weakref.ref(self), os.getpid()), exitpriority=10)
            pusher = self._pusher
        pusher.put(owner, item, b"".join(parts))

    def _link(self, owner: int) -> OwnerLink:
        link = self._links.get(owner)
        if link is None:
            address = self.addresses[owner]
            assert address is not None
            made = OwnerLink(
                address,
                name=f"node {owner}",
                key=self._key,
                timeout_seconds=self.timeout_seconds,
                retry_seconds=self.retry_seconds,
                limits=self.limits,
            )
            link = self._links.setdefault(owner, made)
        return link

    def flush(self) -> None:
        """Wait until what was pushed has arrived, was refused or dropped; at most `timeout_seconds`
        of this.
        """
        pusher = self._pusher
        if pusher is not None:
            pusher.flush(timeout_seconds=self.timeout_seconds)

    def close(self, *, timeout_seconds: float | None = None) -> None:
        """Finish what was pushed, for at most `timeout_seconds`, and hang up. Used again, it
        connects again.
        """
        with self._lock:
            pusher, self._pusher = self._pusher, None
        if pusher is not None:
            pusher.close(
                timeout_seconds=self.timeout_seconds if timeout_seconds is None else timeout_seconds
            )
        links, self._links = self._links, {}
        for link in links.values():
            link.close()


_instances: weakref.WeakSet[Peers] = weakref.WeakSet()


def _begin_anew() -> None:
    """After a fork: the parent's connections and threads are the parent's."""
    for peers in list(_instances):
        peers._begin()


os.register_at_fork(after_in_child=_begin_anew)


def _flush(reference: weakref.ref[Peers], process: int) -> None:
    peers = reference()
    if peers is not None and os.getpid() == process:
        peers.close(timeout_seconds=EXIT_SECONDS)

"""The process that serves a node's entries to other nodes, started by `server`.

It ends with its parent.

    _Admission    one thread accepts connections and runs their handshakes
    PeerService   then a thread per connection answers GET and OFFER (see `protocol`)

A slow disk or a slow reader delays only its own connection. On GET the kernel sends the stores'
files; they are not read here. Of this package only the stores are imported, and torch is not.
"""

from __future__ import annotations

import json
import os
import resource
import selectors
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from lightning_topt.data.cache.segment_store import Location, SegmentStore, checksum, open_store
from lightning_topt.data.peers.protocol import (
    ABSENT,
    DEFERRED,
    ENTRY,
    GET,
    OFFER,
    PRESENT,
    REQUEST,
    SLOWEST_BYTES_PER_SECOND,
    Channel,
    FileBroken,
    PeerError,
    PeerLimits,
    ProtocolError,
    ServerHandshake,
)

RECEIVERS = 4  # connections that may hold a received entry in memory, and as many a read one
STACK_BYTES = 1 << 19  # of a connection's thread
PARENT_SECONDS = 1.0  # how often to look for the parent, in case the end of its pipe is not seen
PATIENCE_SECONDS = 0.2  # that a newcomer has for its handshake when others wait
FULL_SECONDS = 0.005  # until the next look for a free place
_MANY = 64  # connections accepted before the handshakes go on


def main(settings: dict[str, Any]) -> None:
    """Listen, print the port to standard output, and serve until standard input ends."""
    limits = PeerLimits(**settings["limits"])
    # A descriptor per connection, and some more.
    number = limits.connections + limits.newcomers + 64
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < number:
        most = number if hard == resource.RLIM_INFINITY else min(number, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, most), hard))
    threading.stack_size(STACK_BYTES)
    host, port = settings["host"], settings["port"]
    family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
    try:
        listener = socket.create_server((host, port), family=family, backlog=1024)
    except OSError as error:
        print(json.dumps({"error": str(error)}), flush=True)
        return
    listener.setblocking(False)
    # the parent's files, inherited under the same descriptors
    stores = [open_store(known) for known in settings["stores"]]
    service = PeerService(stores, key=bytes.fromhex(settings["key"]), limits=limits)
    print(json.dumps({"port": listener.getsockname()[1]}), flush=True)
    service.serve(listener, control=sys.stdin.fileno(), parent=settings["parent"])
    os._exit(0)  # without waiting for connections: none of them must be finished


class EntryPlace(NamedTuple):
    """Where an entry that is to be sent lies."""

    item: int
    store: SegmentStore
    where: Location


class PeerService:
    """Answers requests for `stores`, the fastest first, all of the same items."""

    def __init__(self, stores: Sequence[SegmentStore], *, key: bytes, limits: PeerLimits) -> None:
        self.stores, self.key, self.limits = stores, key, limits
        self._connections = 0  # that know the secret
        self._lock = threading.Lock()
        self._receiving = threading.BoundedSemaphore(RECEIVERS)
        self._reading = threading.BoundedSemaphore(RECEIVERS)

    def serve(self, listener: socket.socket, *, control: int, parent: int) -> None:
        """Serve until `control` ends or process `parent` is gone."""
        admission = _Admission(
            listener,
            key=self.key,
            limits=self.limits,
            admit=self._admit,
            has_room=lambda: self._connections < self.limits.connections,
        )
        admission.serve(control=control, parent=parent)

    def _admit(self, channel: Channel) -> None:
        with self._lock:
            self._connections += 1
        try:
            threading.Thread(target=self._converse, args=[channel], daemon=True).start()
        except RuntimeError:  # the system has no more threads
            self._forget(channel)

    def _forget(self, channel: Channel) -> None:
        with self._lock:
            self._connections -= 1
        channel.close()

    def _converse(self, channel: Channel) -> None:
        """Answer the requests of one connection, in its thread."""
        try:
            while True:
                request = channel.receive(
                    REQUEST.size, deadline=time.monotonic() + self.limits.idle_seconds
                )
                self._answer(channel, *REQUEST.unpack(request))
        except (PeerError, OSError, MemoryError):
            pass
        finally:
            self._forget(channel)

    def _answer(self, channel: Channel, kind: int, count: int) -> None:
        deadline = time.monotonic() + self.limits.request_seconds
        if kind == GET and 0 < count <= self.limits.items:
            self._give(channel, count, deadline)
        elif kind == OFFER and 0 < count <= self.limits.offers:
            self._take(channel, count, deadline)
        else:
            raise ProtocolError("no such request")

    def _give(self, channel: Channel, count: int, deadline: float) -> None:
        """Answer GET: the states of all items, then the entries from the stores' files."""
        # States first: an answer has a limited size, and the rest is deferred.
        items = np.frombuffer(channel.receive(8 * count, deadline=deadline), "<u8").tolist()
        states: list[bytes] = []
        places: list[EntryPlace] = []
        total = 0
        for item in items:
            place = self._locate(item)
            if place is None:
                states.append(ENTRY.pack(ABSENT, 0, 0))
            elif places and total + place.where.nbytes > self.limits.reply_bytes:
                states.append(ENTRY.pack(DEFERRED, 0, 0))
            else:
                states.append(ENTRY.pack(PRESENT, place.where.nbytes, place.where.checksum))
                places.append(place)
                total += place.where.nbytes
        deadline += total / SLOWEST_BYTES_PER_SECOND
        # Full packets; the bytes go from the page cache to the socket without a copy here.
        channel.cork(True)
        channel.send([b"".join(states)], deadline=deadline)
        for item, store, where in places:
            try:
                channel.send_file(
                    where.descriptor, offset=where.offset, nbytes=where.nbytes, deadline=deadline
                )
            except FileBroken:
                # This connection is lost; the next one finds the entry dropped.
                store.discard(item)
                raise
        channel.cork(False)
        self._promote(places)

    def _locate(self, item: int) -> EntryPlace | None:
        """Find an entry that is complete in its file and not too large."""
        for store in self.stores:
            if item >= store.num_items:
                raise ProtocolError("no such item")
            where = store.locate(item)
            if where is not None and where.nbytes <= self.limits.entry_bytes:
                if where.offset + where.nbytes <= os.fstat(where.descriptor).st_size:
                    return EntryPlace(item, store, where)
                store.discard(item)
        return None

    def _promote(self, places: Sequence[EntryPlace]) -> None:
        """Copy entries from a slower store into the fastest, while that has room.

        Only a few connections do so at a time.
        """
        fastest = self.stores[0]
        slower = [place for place in places if place.store is not fastest]
        if not slower or not self._reading.acquire(blocking=False):
            return
        try:
            for item, store, where in slower:
                # nothing is evicted: a full store stays as it is
                if fastest.used_bytes + where.nbytes > fastest.capacity_bytes:
                    return
                entry = store.read(item)
                if entry is not None:
                    fastest.write(item, [entry])
        finally:
            self._reading.release()

    def _take(self, channel: Channel, count: int, deadline: float) -> None:
        """Answer OFFER: which entries are wanted, then receive and store them."""
        offers = list(ENTRY.iter_unpack(channel.receive(ENTRY.size * count, deadline=deadline)))
        wanted = [self._wants(item, nbytes) for item, nbytes, _ in offers]
        channel.send([bytes(wanted)], deadline=deadline)
        # The entries wanted, one by one; then which of them were stored.
        deadline += (
            sum(offer[1] for offer, want in zip(offers, wanted, strict=True) if want)
            / SLOWEST_BYTES_PER_SECOND
        )
        stored = bytearray(count)
        for i, (item, nbytes, digest) in enumerate(offers):
            if wanted[i]:
                stored[i] = self._receive(channel, item, nbytes, digest, deadline)
        channel.send([stored], deadline=deadline)

    def _wants(self, item: int, nbytes: int) -> bool:
        if any(item >= store.num_items for store in self.stores):
            raise ProtocolError("no such item")
        if nbytes > self.limits.entry_bytes:
            return False
        # The client has not found it here, or found it damaged: so a stored one is verified, and
        # dropped if it is damaged.
        with self._reading:  # local files only, so nobody holds it for long
            if any(item in store and store.read(item) is not None for store in self.stores):
                return False
        return any(store.used_bytes + nbytes <= store.capacity_bytes for store in self.stores)

    def _receive(
        self, channel: Channel, item: int, nbytes: int, digest: int, deadline: float
    ) -> bool:
        """Receive and store one entry.

        Only a few connections do so at a time, which bounds the memory.
        """
        # memory for the entry is taken only once it is this connection's turn
        if not self._receiving.acquire(timeout=max(0.0, deadline - time.monotonic())):
            raise ProtocolError("too many entries are on their way here")
        try:
            entry = np.empty(nbytes, np.uint8)
            channel.receive_into([entry], deadline=deadline)
            if checksum([entry], item=item) != digest:
                raise ProtocolError("an entry was damaged on its way")
            return (
                sum(store.write_many([item], [[entry]], [digest])[0] for store in self.stores) > 0
            )
        finally:
            self._receiving.release()


class Newcomer:
    """A connection from `address` that has not proved yet that it knows the secret."""

    def __init__(self, channel: Channel, *, address: str, key: bytes) -> None:
        self.channel, self.address, self.since = channel, address, time.monotonic()
        self.handshake = ServerHandshake(channel, key)

    def fileno(self) -> int:
        """Return the descriptor, for select."""
        return self.channel.fileno()


class _Admission:
    """Accepts connections, runs their handshakes, and gives the successful ones to `admit`.

    A newcomer costs an open socket and nothing else, so a flood of them keeps nobody out: each is
    accepted at once. Where there are too many, one that has had its time is closed, of the address
    that has most of them. `has_room` says whether one more connection may be admitted.
    """

    def __init__(
        self,
        listener: socket.socket,
        *,
        key: bytes,
        limits: PeerLimits,
        admit: Callable[[Channel], None],
        has_room: Callable[[], bool],
    ) -> None:
        self.listener, self.key, self.limits = listener, key, limits
        self.admit, self.has_room = admit, has_room
        self._by_address: dict[str, dict[Newcomer, None]] = {}  # the oldest first
        self._number = 0
        self._selector = selectors.DefaultSelector()
        self._is_listening = False

    def serve(self, *, control: int, parent: int) -> None:
        """Serve until `control` ends or process `parent` is gone."""
        self._selector.register(control, selectors.EVENT_READ)
        self._listen(True)
        while os.getppid() == parent:
            for key, _ in self._selector.select(
                PARENT_SECONDS if self._is_listening else FULL_SECONDS
            ):
                if key.fd == control:
                    return
                if isinstance(key.data, Newcomer):
                    self._advance(key.data)
                else:
                    self._accept()
            self._close_late()

    def _listen(self, on: bool) -> None:
        if on and not self._is_listening:
            self._selector.register(self.listener, selectors.EVENT_READ)
        elif self._is_listening and not on:
            self._selector.unregister(self.listener)
        self._is_listening = on

    def _accept(self) -> None:
        for _ in range(_MANY):
            # the backlog of the socket keeps the others until there is room
            if self._number >= self.limits.newcomers and not self._make_room():
                self._listen(False)
                return
            try:
                connection, address = self.listener.accept()
            except BlockingIOError:
                return
            except OSError:  # it hung up meanwhile, or too many files are open
                time.sleep(FULL_SECONDS)
                return
            self._greet(connection, str(address[0]))

    def _greet(self, connection: socket.socket, address: str) -> None:
        try:
            if not self.has_room():
                raise OSError("too many connections")
            newcomer = Newcomer(Channel(connection), address=address, key=self.key)
            self._selector.register(newcomer, selectors.EVENT_READ, newcomer)
        except OSError:  # also a PeerError: it hung up meanwhile
            connection.close()
            return
        self._by_address.setdefault(address, {})[newcomer] = None
        self._number += 1

    def _make_room(self) -> bool:
        """Close the oldest newcomer of the most frequent address, if it has had its time."""
        # one address cannot push out the newcomers of all others
        crowd = max(self._by_address.values(), key=len)
        oldest = next(iter(crowd))
        if time.monotonic() - oldest.since < PATIENCE_SECONDS:
            return False
        self._forget(oldest)
        oldest.channel.close()
        return True

    def _advance(self, newcomer: Newcomer) -> None:
        """Go on with a handshake that has received something."""
        try:
            knows = newcomer.handshake.receive_proof()
        except PeerError:
            self._forget(newcomer)
            newcomer.channel.close()
            return
        if knows:
            self._forget(newcomer)
            self.admit(newcomer.channel)

    def _forget(self, newcomer: Newcomer) -> None:
        self._selector.unregister(newcomer)
        there = self._by_address[newcomer.address]
        del there[newcomer]
        if not there:
            del self._by_address[newcomer.address]
        self._number -= 1

    def _close_late(self) -> None:
        """Close all newcomers that had too long for their proof; listen if there is room."""
        before = time.monotonic() - self.limits.proof_seconds
        for there in list(self._by_address.values()):
            while there and (oldest := next(iter(there))).since < before:
                self._forget(oldest)
                oldest.channel.close()
        if not self._is_listening and (self._number < self.limits.newcomers or self._make_room()):
            self._listen(True)

"""The process that serves a node's entries to other nodes, started by `server`.

It ends with its parent. A thread per connection does the handshake and answers GET and OFFER (see
`protocol`), so a slow disk or a slow reader delays only its own connection. On GET the kernel sends
the stores' files; they are not read here. Of this package only the stores are imported, and torch
is not.
"""

from __future__ import annotations

import json
import os
import resource
import select
import socket
import sys
import threading
import time
from collections.abc import Sequence
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
    PeerLimits,
    ProtocolError,
    receive_proof,
)

RECEIVERS = 4  # connections that may hold a received entry in memory, and as many a read one
STACK_BYTES = 1 << 19  # of a connection's thread
PARENT_SECONDS = 1.0  # how often to look for the parent, in case the end of its pipe is not seen
FULL_SECONDS = 0.005  # until the next try where too many files are open


def main(settings: dict[str, Any]) -> None:
    """Listen, print the port to standard output, and serve until standard input ends."""
    limits = PeerLimits(**settings["limits"])
    # A descriptor per connection, and some more.
    number = limits.connections + 64
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
        self._connections = 0
        self._lock = threading.Lock()
        self._receiving = threading.BoundedSemaphore(RECEIVERS)
        self._reading = threading.BoundedSemaphore(RECEIVERS)

    def serve(self, listener: socket.socket, *, control: int, parent: int) -> None:
        """Serve until `control` ends or process `parent` is gone."""
        poll = select.poll()
        for descriptor in (control, listener.fileno()):
            poll.register(descriptor, select.POLLIN)
        while os.getppid() == parent:
            for descriptor, _ in poll.poll(PARENT_SECONDS * 1000):
                if descriptor == control:
                    return
                try:
                    connection, _ = listener.accept()
                except BlockingIOError:  # it hung up meanwhile
                    continue
                except OSError:  # too many files are open
                    time.sleep(FULL_SECONDS)
                    continue
                self._admit(connection)

    def _admit(self, connection: socket.socket) -> None:
        # Give a connection a thread of its own, or hang up where there are too many
        with self._lock:
            is_full = self._connections >= self.limits.connections
            self._connections += not is_full
        try:
            if not is_full:
                thread = threading.Thread(target=self._converse, args=[connection], daemon=True)
                thread.start()
        except RuntimeError:  # the system has no more threads
            is_full = True
            with self._lock:
                self._connections -= 1
        if is_full:
            connection.close()

    def _converse(self, connection: socket.socket) -> None:
        # Answer the requests of one connection, once it has proved that it knows the secret
        try:
            channel = Channel(connection)
            receive_proof(channel, self.key, deadline=time.monotonic() + self.limits.proof_seconds)
            while True:
                request = channel.receive(
                    REQUEST.size, deadline=time.monotonic() + self.limits.idle_seconds
                )
                self._answer(channel, *REQUEST.unpack(request))
        except (OSError, MemoryError):  # a PeerError is an OSError
            pass
        finally:
            with self._lock:
                self._connections -= 1
            connection.close()

    def _answer(self, channel: Channel, kind: int, count: int) -> None:
        deadline = time.monotonic() + self.limits.request_seconds
        if kind == GET and 0 < count <= self.limits.items:
            self._give(channel, count, deadline)
        elif kind == OFFER and 0 < count <= self.limits.offers:
            self._take(channel, count, deadline)
        else:
            raise ProtocolError("no such request")

    def _give(self, channel: Channel, count: int, deadline: float) -> None:
        # Answer GET: the states of all items, then the entries from the stores' files
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

    def _locate(self, item: int) -> EntryPlace | None:
        # Find an entry that is complete in its file and not too large
        for store in self.stores:
            if item >= store.num_items:
                raise ProtocolError("no such item")
            where = store.locate(item)
            if where is not None and where.nbytes <= self.limits.entry_bytes:
                if where.offset + where.nbytes <= os.fstat(where.descriptor).st_size:
                    return EntryPlace(item, store, where)
                store.discard(item)
        return None

    def _take(self, channel: Channel, count: int, deadline: float) -> None:
        # Answer OFFER: which entries are wanted, then receive and store them
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

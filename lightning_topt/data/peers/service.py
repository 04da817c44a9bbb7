"""The process that gives a node's entries to other nodes: its stores' files are sent by the kernel
and never read here.

Started by `server`; it ends when its parent does. A thread per connection of those who know the
run's secret (see `entrance` for the others), so a slow disk or a slow reader delays nobody else. Of
this package only the stores are imported, and not torch.
"""

from __future__ import annotations

import json
import os
import resource
import socket
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from lightning_topt.data.cache.segment_store import Location, SegmentStore, checksum, open_store
from lightning_topt.data.peers.entrance import Entrance
from lightning_topt.data.peers.peer_channel import Channel, FileBroken, PeerError, ProtocolError
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
)

# connections that may hold a received entry in memory at a time, and as many one that was read
RECEIVERS = 4
STACK_BYTES = 1 << 19  # of a connection's thread


class Place(NamedTuple):
    """An entry that is to be sent."""

    item: int
    store: SegmentStore
    where: Location


class PeerService:
    """Answers for `stores`, the fastest first, all of the same items."""

    def __init__(self, stores: Sequence[SegmentStore], *, key: bytes, limits: PeerLimits) -> None:
        self.stores, self.key, self.limits = stores, key, limits
        self._connections = 0  # of those who know the secret
        self._lock = threading.Lock()
        self._receiving = threading.BoundedSemaphore(RECEIVERS)
        self._reading = threading.BoundedSemaphore(RECEIVERS)

    def serve(self, listener: socket.socket, *, control: int, parent: int) -> None:
        """Until `control` ends or process `parent` is gone."""
        entrance = Entrance(
            listener, key=self.key, limits=self.limits, admit=self._admit, has_room=self._has_room
        )
        entrance.serve(control=control, parent=parent)

    def _has_room(self) -> bool:
        return self._connections < self.limits.connections

    def _admit(self, channel: Channel) -> None:
        """A thread for one who knows the secret."""
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
        items = np.frombuffer(channel.receive(8 * count, deadline=deadline), "<u8").tolist()
        states: list[bytes] = []
        places: list[Place] = []
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
        channel.cork(True)
        channel.send([b"".join(states)], deadline=deadline)
        for item, store, where in places:
            try:
                channel.send_file(
                    where.descriptor, offset=where.offset, nbytes=where.nbytes, deadline=deadline
                )
            except FileBroken:
                # this conversation is over; the next one does not end at the same place
                store.discard(item)
                raise
        channel.cork(False)
        self._promote(places)

    def _locate(self, item: int) -> Place | None:
        """Return where an entry lies that is not cut off and not too large."""
        for store in self.stores:
            if item >= store.num_items:
                raise ProtocolError("no such item")
            where = store.locate(item)
            if where is not None and where.nbytes <= self.limits.entry_bytes:
                if where.offset + where.nbytes <= os.fstat(where.descriptor).st_size:
                    return Place(item, store, where)
                store.discard(item)
        return None

    def _promote(self, places: Sequence[Place]) -> None:
        """Take what came from a slower store into the fastest, while that has room and not too many
        do so.
        """
        fastest = self.stores[0]
        slower = [place for place in places if place.store is not fastest]
        if not slower or not self._reading.acquire(blocking=False):
            return
        try:
            for item, store, where in slower:
                if fastest.used_bytes + where.nbytes > fastest.capacity_bytes:
                    return
                entry = store.read(item)
                if entry is not None:
                    fastest.write(item, [entry])
        finally:
            self._reading.release()

    def _take(self, channel: Channel, count: int, deadline: float) -> None:
        offers = list(ENTRY.iter_unpack(channel.receive(ENTRY.size * count, deadline=deadline)))
        wanted = [self._wants(item, nbytes) for item, nbytes, _ in offers]
        channel.send([bytes(wanted)], deadline=deadline)
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
        # Who offers it has not found it here, or found it damaged: a stored one is looked through,
        # and dropped if it is.
        with self._reading:  # of local files only: nobody keeps it for long
            if any(item in store and store.read(item) is not None for store in self.stores):
                return False
        return any(store.used_bytes + nbytes <= store.capacity_bytes for store in self.stores)

    def _receive(
        self, channel: Channel, item: int, nbytes: int, digest: int, deadline: float
    ) -> bool:
        """Receive and store one entry; only a few connections do so at a time, which bounds the
        memory it takes.
        """
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


def _allow_open_files(number: int) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < number:
        most = number if hard == resource.RLIM_INFINITY else min(number, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, most), hard))


def main(settings: dict[str, Any]) -> None:
    """Listen, say where on standard output, and serve until standard input ends."""
    limits = PeerLimits(**settings["limits"])
    _allow_open_files(limits.connections + limits.strangers + 64)
    threading.stack_size(STACK_BYTES)
    host, port = settings["host"], settings["port"]
    family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
    try:
        listener = socket.create_server((host, port), family=family, backlog=1024)
    except OSError as error:
        print(json.dumps({"error": str(error)}), flush=True)
        return
    listener.setblocking(False)
    stores = [open_store(known) for known in settings["stores"]]
    service = PeerService(stores, key=bytes.fromhex(settings["key"]), limits=limits)
    print(json.dumps({"port": listener.getsockname()[1]}), flush=True)
    service.serve(listener, control=sys.stdin.fileno(), parent=settings["parent"])
    os._exit(0)  # without waiting for connections: nothing that they do must be finished

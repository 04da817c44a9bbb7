"""The process that serves a node's entries to other nodes.

    PeerServer    starts the process, here in the training process, and ends it
    main          what the process does: a thread for each connection
    PeerService   the handshake, and the answers to GET and OFFER (see `protocol`)

A slow disk or a slow reader delays only its own connection. On GET the kernel sends the stores'
files; they are not read here. The process imports the stores and the protocol, and not torch.
"""

from __future__ import annotations

import ipaddress
import json
import os
import resource
import select
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from lightning_topt.data.cache.memory_file import available_bytes
from lightning_topt.data.cache.segment_store import Location, SegmentStore, StoreFile, checksum
from lightning_topt.data.light_process import close_pipes, start_light
from lightning_topt.data.peers.protocol import (
    ABSENT,
    ENTRY,
    GET,
    MOST_ENTRY_BYTES,
    MOST_ITEMS,
    OFFER,
    PRESENT,
    REQUEST,
    SLOWEST_BYTES_PER_SECOND,
    Channel,
    FileBroken,
    ProtocolError,
    receive_proof,
    run_key,
)

STARTUP_SECONDS = 60.0
END_SECONDS = 5.0
MOST_CONNECTIONS = 2048
# For the proof of a client, for a request (and one more per megabyte), and between requests.
PROOF_SECONDS, REQUEST_SECONDS, IDLE_SECONDS = 5.0, 30.0, 600.0
RECEIVERS = 4  # connections that may hold a received entry in memory, and as many a read one
STACK_BYTES = 1 << 19  # of a connection's thread
PARENT_SECONDS = 1.0  # how often to look for the parent, in case the end of its pipe is not seen
FULL_SECONDS = 0.005  # until the next try where too many files are open


class PeerServer:
    """Serves `stores` (the fastest first, all of one cache) from a process of its own.

    The process ends with `close`, or when this process ends. `address` is what clients need.

    Args:
        stores: as this process has them open.
        host: address of this node's interface to the others, the only one that is listened on. See
            `protocol.own_address`.
        secret: of the run, at least 16 random bytes, the same on all nodes.
        fingerprint: of the data; clients with another one are refused.
        port: to listen on; 0: any free one.
        connections: open at a time.

    Raises:
        ValueError: the address is not of this machine, or means all of its interfaces.
        RuntimeError: the process does not start.
    """

    def __init__(
        self,
        stores: Sequence[SegmentStore],
        *,
        host: str,
        secret: bytes,
        fingerprint: str,
        port: int = 0,
        connections: int = MOST_CONNECTIONS,
    ) -> None:
        _check_host(host)
        # All that the process needs, as plain data; the stores' files are inherited.
        settings = {
            "host": host,
            "port": port,
            "key": run_key(secret, fingerprint=fingerprint, num_items=stores[0].num_items).hex(),
            "connections": connections,
            "stores": [_described(store) for store in stores],
            "parent": os.getpid(),
        }
        self.process = start_light(
            __name__,
            settings,
            pass_fds=[store.file.descriptor for store in stores],
            stdout=subprocess.PIPE,
        )
        self._finalizer = weakref.finalize(self, _end, self.process, os.getpid())
        try:
            # the port is known once the process listens
            self.address = (host, _started(self.process, settings))
        except BaseException:
            self.close()
            raise

    @property
    def is_alive(self) -> bool:
        """Whether the process runs."""
        return self.process.poll() is None

    def close(self) -> None:
        """End the process. Calling it again does nothing."""
        self._finalizer()


def _check_host(host: str) -> None:
    advice = "give the address of this node's interface to the other nodes"
    try:
        addresses = {
            entry[4][0] for entry in socket.getaddrinfo(host or "", 0, type=socket.SOCK_STREAM)
        }
    except OSError as error:
        raise ValueError(f"cannot listen on {host!r}: {error}; {advice}") from error
    if not host or any(
        ipaddress.ip_address(str(address).partition("%")[0]).is_unspecified for address in addresses
    ):
        raise ValueError(
            f"listening on {host!r} would be listening on every interface of this machine; {advice}"
        )


def _started(process: subprocess.Popen[bytes], settings: dict[str, Any]) -> int:
    # Wait until the process listens; returns the port
    assert process.stdout is not None
    # It prints one line of JSON: the port, or an error.
    poll, deadline, line = select.poll(), time.monotonic() + STARTUP_SECONDS, b""
    poll.register(process.stdout, select.POLLIN)
    while not line.endswith(b"\n"):
        if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
            raise RuntimeError(
                f"the process of the peer server said nothing for {STARTUP_SECONDS:g} s"
            )
        piece = os.read(process.stdout.fileno(), 1 << 12)
        if not piece:
            raise RuntimeError(
                "the process of the peer server ended at once; its standard error says why"
            )
        line += piece
    answer = json.loads(line)
    if "error" in answer:
        raise ValueError(
            f"cannot listen on {settings['host']}:{settings['port']}: {answer['error']}"
        )
    return int(answer["port"])


def _end(process: subprocess.Popen[bytes], owner: int) -> None:
    if os.getpid() != owner:
        return  # in a forked process
    close_pipes(process)
    try:
        process.wait(timeout=END_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


# ---- in the process that serves -----------------------------------------------------------------


def main(settings: dict[str, Any]) -> None:
    """Listen, print the port to standard output, and serve until standard input ends."""
    # A descriptor per connection, and some more.
    number = settings["connections"] + 64
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < number:
        most = number if hard == resource.RLIM_INFINITY else min(number, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, most), hard))
    threading.stack_size(STACK_BYTES)
    host, port = settings["host"], settings["port"]
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listener = socket.create_server((host, port), family=family, backlog=1024)
    except OSError as error:
        print(json.dumps({"error": str(error)}), flush=True)
        return
    listener.setblocking(False)
    # the parent's files, inherited under the same descriptors
    stores = [_open_store(known) for known in settings["stores"]]
    key = bytes.fromhex(settings["key"])
    service = PeerService(stores, key=key, most_connections=settings["connections"])
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

    def __init__(
        self, stores: Sequence[SegmentStore], *, key: bytes, most_connections: int
    ) -> None:
        self.stores, self.key, self.most_connections = stores, key, most_connections
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
            is_full = self._connections >= self.most_connections
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
            receive_proof(channel, self.key, deadline=time.monotonic() + PROOF_SECONDS)
            while True:
                request = channel.receive(REQUEST.size, deadline=time.monotonic() + IDLE_SECONDS)
                self._answer(channel, *REQUEST.unpack(request))
        except (OSError, MemoryError):  # a PeerError is an OSError
            pass
        finally:
            with self._lock:
                self._connections -= 1
            connection.close()

    def _answer(self, channel: Channel, kind: int, count: int) -> None:
        deadline = time.monotonic() + REQUEST_SECONDS
        if kind not in (GET, OFFER) or not 0 < count <= MOST_ITEMS:
            raise ProtocolError("no such request")
        if kind == GET:
            self._give(channel, count, deadline)
        else:
            self._take(channel, count, deadline)

    def _give(self, channel: Channel, count: int, deadline: float) -> None:
        # Answer GET: the states of all items, then the entries from the stores' files
        items = np.frombuffer(channel.receive(8 * count, deadline=deadline), "<u8").tolist()
        found = [self._locate(item) for item in items]
        places = [place for place in found if place is not None]
        states = [
            ENTRY.pack(ABSENT, 0, 0)
            if place is None
            else ENTRY.pack(PRESENT, place.where.nbytes, place.where.checksum)
            for place in found
        ]
        deadline += sum(place.where.nbytes for place in places) / SLOWEST_BYTES_PER_SECOND
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
            if where is not None and where.nbytes <= MOST_ENTRY_BYTES:
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
        if nbytes > MOST_ENTRY_BYTES:
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


# ---- stores that both processes open ------------------------------------------------------------


def _described(store: SegmentStore) -> dict[str, Any]:
    # A store as plain data, for a process that inherits the open file
    return {
        "descriptor": store.file.descriptor,
        "num_items": store.num_items,
        "lock": str(store.file.lock.path),
        "in_memory": store.file.available is not None,
        "capacity_bytes": store.capacity_bytes,
        "name": f"{store.name} of this node",
    }


def _open_store(known: dict[str, Any]) -> SegmentStore:
    # Open the store that `_described` describes, under the same descriptor
    file = StoreFile(
        known["descriptor"],
        num_items=known["num_items"],
        lock=Path(known["lock"]),
        available=available_bytes if known["in_memory"] else None,
    )
    return SegmentStore(file, capacity_bytes=known["capacity_bytes"], name=known["name"])

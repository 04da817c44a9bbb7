"""The coordinator: a light process that passes prepared batches from the workers to all jobs.

The first job starts it, and it ends with the last one. A batch is an open memory file that is
passed on, never read here. When the coordinator and the jobs have closed it, the kernel frees it,
however they ended. The kernel reports a dead job as the end of its connection. Everything waits in
one `select`; nothing is polled. The rules, who prepares which batch, are in `ledger`.

Messages (`type` and fields); jobs and workers have connections of their own:

    both    hello(version, role, job, fingerprint, seed, batches, memory_bytes, timeout_seconds)
            -> welcome(pid) or refused(reason); `batches` is the digest of epoch 0's
    job     start(epoch, batch, batches, digest)
            needs the epoch's batches from there on; -> refused if they differ
    job     next() -> batch(epoch, batch, by) + file
            sent when it is prepared; `by` is the job whose worker did it
    job     ping() -> pong()
    worker  ready() -> prepare(epoch, batch, digest)
            sent when there is something to do
    worker  prepared(epoch, batch) + file, failed(epoch, batch)
            and is ready again

Only the standard library is imported.
"""

from __future__ import annotations

import contextlib
import os
import resource
import selectors
import socket
import time
from typing import Any

from lightning_topt.data.coordinated.coordinator_link import (
    STARTUP_SECONDS,
    VERSION,
    Connection,
    CoordinatorLost,
    Message,
    close_quietly,
)
from lightning_topt.data.coordinated.ledger import Ledger, Position

MAX_HELD = 1024  # batches; finding the least needed of more would take too long
SPARE_FILES = 256  # open files left for connections and batches that have just come
AGREED = {  # fields of hello that must be equal, in words
    "version": "the version of lightning_topt",
    "fingerprint": "the data set or how batches are made of it",
    "seed": "the seed",
    "batches": "the list of batches",
}
DIFFERENT = (
    "the jobs that meet in this directory prepare other batches: {what} differs. "
    "Give every data set, transform, batch size and seed a directory of its own"
)


def main(settings: dict[str, Any]) -> None:
    """Serve on the inherited socket, in a forked process.

    The process that started this one need not wait for the coordinator's end.
    """
    if os.fork():
        os._exit(0)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    # Each batch that is kept is an open file.
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    coordinator = Coordinator(socket.socket(fileno=settings["listener"]))
    coordinator.run()


class Refused(ValueError):
    """A job prepares other batches than the jobs that are here."""


class Peer:
    """A job or one of its workers, as the coordinator sees it."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.role, self.job = "", ""

    @property
    def number(self) -> int:
        """The number of a worker in the ledger."""
        return id(self)


class Coordinator:
    """Serves the connections of `listener` until the last job is gone."""

    def __init__(self, listener: socket.socket) -> None:
        self.listener = listener
        self.selector = selectors.DefaultSelector()
        self.selector.register(listener, selectors.EVENT_READ)
        self.peers: dict[int, Peer] = {}  # by number
        self.jobs: dict[str, Peer] = {}
        self.ledger: Ledger | None = None  # made by the first hello
        self.agreed: Message = {}
        # by epoch: number of batches and what is in them
        self.digests: dict[int, tuple[int, str]] = {}
        # descriptor, and the job whose worker prepared it
        self.files: dict[Position, tuple[int, str]] = {}

    def run(self) -> None:
        """Serve until the last job is gone, or no job came."""
        self.listener.setblocking(False)
        if not self.selector.select(STARTUP_SECONDS):
            return
        self._accept()
        while self.peers:
            # Until a message comes, or a claim is old enough to be given to another worker.
            now = time.monotonic()
            deadline = self.ledger.next_deadline(now) if self.ledger else None
            for key, _ in self.selector.select(None if deadline is None else deadline - now):
                # a new connection, or a peer that was not removed since
                if key.data is None:
                    self._accept()
                elif key.data.number in self.peers:
                    self._read(key.data)
            # who is found to be gone frees work for others: hand out again
            while self._hand_out():
                pass
        self.listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(BlockingIOError, CoordinatorLost):
            accepted, _ = self.listener.accept()
            accepted.setblocking(False)
            peer = Peer(Connection(accepted))
            self.peers[peer.number] = peer
            self.selector.register(peer.connection, selectors.EVENT_READ, peer)

    def _read(self, peer: Peer) -> None:
        # Handle one message; a peer that breaks the rules or is gone is removed
        descriptor = None
        try:
            received = peer.connection.receive(timeout_seconds=0)
            if received is None:
                return
            message, descriptor = received
            self._handle(peer, message, descriptor)
        except Refused as refusal:
            self._refuse(peer, str(refusal))
        except (CoordinatorLost, KeyError, TypeError, ValueError):
            close_quietly(descriptor)
            self._remove(peer)

    def _handle(self, peer: Peer, message: Message, descriptor: int | None) -> None:
        kind = message["type"]
        if peer.role == "refused":
            close_quietly(descriptor)
            return  # sent before it knew that it was refused
        # a file comes with "prepared" alone; "hello" comes first, and once
        if (kind in ("prepared",)) != (descriptor is not None) or (kind == "hello") != (
            peer.role == ""
        ):
            raise ValueError("a file came with the wrong message, or a message out of order")
        if kind == "hello":
            self._greet(peer, message)
        elif peer.role == "job":
            self._handle_job(peer, kind, message)
        else:
            self._handle_worker(peer, kind, message, descriptor)

    def _greet(self, peer: Peer, message: Message) -> None:
        # All jobs agree on the data, or are refused.
        expected = self.agreed or {"version": VERSION}
        for name in expected:
            if message[name] != expected[name]:
                raise Refused(DIFFERENT.format(what=AGREED[name]))
        role, job = message["role"], str(message["job"])
        if role not in ("job", "worker") or (role == "job") == (job in self.jobs):
            raise ValueError("a job joins once, and before its workers")
        # the first to join decides what all agree on
        if self.ledger is None:
            self.agreed = {name: message[name] for name in AGREED}
            most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
            max_held = max(1, min(MAX_HELD, most - SPARE_FILES))
            self.ledger = Ledger(
                timeout_seconds=float(message["timeout_seconds"]), max_held=max_held
            )
        if role == "job":
            self.ledger.add_job(job, memory_bytes=int(message["memory_bytes"]))
            self.jobs[job] = peer
        peer.role, peer.job = role, job
        peer.connection.send({"type": "welcome", "pid": os.getpid()})

    def _handle_job(self, peer: Peer, kind: str, message: Message) -> None:
        assert self.ledger is not None
        if kind == "start":
            epoch, batch = _position(message)
            batches = (int(message["batches"]), str(message["digest"]))
            # the first job that starts an epoch decides what is in it
            if self.digests.setdefault(epoch, batches) != batches:
                raise Refused(DIFFERENT.format(what=f"the list of batches of epoch {epoch}"))
            self.ledger.start(peer.job, (epoch, batch), end=batches[0])
        elif kind == "next":
            self.ledger.request(peer.job)
        elif kind == "ping":
            peer.connection.send({"type": "pong"})
        else:
            raise ValueError(f"unknown message {kind!r}")

    def _handle_worker(
        self, peer: Peer, kind: str, message: Message, descriptor: int | None
    ) -> None:
        assert self.ledger is not None
        if kind == "prepared":
            assert descriptor is not None
            position = _position(message)
            # kept only where it is still wanted
            nbytes = os.fstat(descriptor).st_size
            if self.ledger.prepared(peer.number, position, nbytes=nbytes):
                self.files[position] = descriptor, peer.job
            else:
                os.close(descriptor)
        elif kind == "failed":
            self.ledger.failed(peer.number, _position(message))
        elif kind != "ready":
            raise ValueError(f"unknown message {kind!r}")
        self.ledger.add_idle(peer.number, peer.job)

    def _hand_out(self) -> bool:
        """Send out what is ready: batches to waiting jobs, and new work to idle workers.

        Batches that are not needed are dropped in between. Returns True where a peer was found to
        be gone: then its claims are to be assigned again.
        """
        if self.ledger is None:
            return False
        peers = len(self.peers)
        # Batches to the jobs that wait for them.
        for name, position in self.ledger.deliveries():
            descriptor, by = self.files[position]
            self._send(self.jobs[name], "batch", position, descriptor=descriptor, by=by)
        # What is not needed any more, or has no room: closing the file frees the memory.
        for position in self.ledger.drop_excess():
            os.close(self.files.pop(position)[0])
        # Work for idle workers.
        for worker, position in list(self.ledger.assignments(time.monotonic())):
            if worker in self.peers:
                self._send(
                    self.peers[worker], "prepare", position, digest=self.digests[position[0]][1]
                )
        return len(self.peers) < peers

    def _send(
        self,
        peer: Peer,
        kind: str,
        position: Position,
        *,
        descriptor: int | None = None,
        **fields: str,
    ) -> None:
        try:
            message = {"type": kind, "epoch": position[0], "batch": position[1], **fields}
            peer.connection.send(message, descriptor=descriptor)
        except CoordinatorLost:
            self._remove(peer)

    def _refuse(self, peer: Peer, reason: str) -> None:
        """Refuse a job, and wait until it hangs up.

        Hanging up first, with messages unread, would discard the answer.
        """
        self._leave(peer)
        peer.role = "refused"
        try:
            peer.connection.send({"type": "refused", "reason": reason})
        except CoordinatorLost:
            self._remove(peer)

    def _remove(self, peer: Peer) -> None:
        # Forget a peer and close its connection
        if self.peers.pop(peer.number, None) is not None:
            self._leave(peer)
            self.selector.unregister(peer.connection)
            peer.connection.close()

    def _leave(self, peer: Peer) -> None:
        # Release a peer's claims and needs; a job takes its workers with it
        if self.ledger is None:
            return
        if peer.role == "worker":
            self.ledger.remove_worker(peer.number)
        if peer.role == "job":
            del self.jobs[peer.job]
            for other in [
                other
                for other in self.peers.values()
                if other.job == peer.job and other.role == "worker"
            ]:
                self._remove(other)
            self.ledger.remove_job(peer.job)


def _position(message: Message) -> Position:
    epoch, batch = int(message["epoch"]), int(message["batch"])
    if epoch < 0 or batch < 0:
        raise ValueError("epochs and batches are counted from 0")
    return epoch, batch

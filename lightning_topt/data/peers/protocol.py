"""The wire protocol between the nodes of a partitioned cache, and the connections that carry it.

All numbers are little-endian. A conversation starts with a mutual proof (HMAC-SHA256 over both
nonces) that both ends know the run's secret; nothing else is read or answered before it.

    server -> client   MAGIC, nonce (32 random bytes)
    client -> server   nonce (32 random bytes), proof
    server -> client   proof

Then the client sends requests, any number of them:

    GET    count, then the numbers of so many items
           -> per item: state, bytes, checksum; then the bytes of all that are PRESENT
    OFFER  count, then so many (item, bytes, checksum)
           -> a byte per item: wanted or not; <- the bytes of those wanted; -> a byte per item:
           stored or not

The data's fingerprint is part of the proof: nodes with other data or another transform refuse each
other. Nothing is unpickled, nothing is evaluated. What follows the proofs is neither encrypted nor
signed: whoever can read or change the packets of the cluster's network can read or damage samples.
Accidental damage is found by the checksums.

This module is also for the server's process, so it does without torch.
"""

from __future__ import annotations

import errno
import hashlib
import hmac
import os
import select
import socket
import struct
import time
from collections.abc import Sequence
from typing import Any

# Sizes and layouts of messages.
MAGIC = b"toptpeer1"
NONCE_BYTES = PROOF_BYTES = 32
LEAST_SECRET_BYTES = 16
REQUEST = struct.Struct("<II")  # GET or OFFER, number of items
ENTRY = struct.Struct("<QQQ")  # GET's answer: state, bytes, checksum. OFFER: item, bytes, checksum
GET, OFFER = 1, 2
ABSENT, PRESENT = 0, 1
SLOWEST_BYTES_PER_SECOND = 1e6  # a transfer gets one second more for so many bytes
MOST_ITEMS = 1 << 20  # of one GET or OFFER
MOST_ENTRY_BYTES = 1 << 28  # larger entries are not shared between nodes

_MOST_BUFFERS = 512  # buffers per system call; Linux takes 1024
_CORK = getattr(socket, "TCP_CORK", None)


class PeerError(ConnectionError):
    """A conversation with another node failed."""


class PeerTimeout(PeerError):
    """An operation did not end by its deadline."""


class PeerLost(PeerError):
    """The other end hung up or cannot be reached."""


class PeerRefused(PeerError):
    """The other end has another secret or other data."""


class ProtocolError(PeerError):
    """A message arrived that the protocol does not allow there."""


class FileBroken(PeerError):
    """A file that was to be sent cannot be read."""


def run_key(secret: bytes, *, fingerprint: str, num_items: int) -> bytes:
    """Derive the key of the proofs, 32 bytes, from the run's secret and the data.

    Raises:
        ValueError: the secret is too short.
    """
    if len(secret) < LEAST_SECRET_BYTES:
        raise ValueError(
            f"the run's secret has at least {LEAST_SECRET_BYTES} bytes, for example "
            "secrets.token_bytes(32) made by one rank and given to all"
        )
    return hmac.digest(
        secret, MAGIC + hashlib.sha256(f"{num_items} {fingerprint}".encode()).digest(), "sha256"
    )


def authenticate(channel: Channel, key: bytes, *, deadline: float) -> None:
    """Do the client's side of the handshake.

    Raises:
        PeerRefused: one end found that the other does not know the key.
    """
    # the server speaks first
    hello = bytes(channel.receive(len(MAGIC) + NONCE_BYTES, deadline=deadline))
    if hello[: len(MAGIC)] != MAGIC:
        raise ProtocolError("something else listens there, or another version")
    # Prove first, then verify the server's proof.
    client_nonce, server_nonce = os.urandom(NONCE_BYTES), hello[len(MAGIC) :]
    channel.send(
        [client_nonce, _proof(key, b"client", server_nonce, client_nonce)], deadline=deadline
    )
    try:
        proof = bytes(channel.receive(PROOF_BYTES, deadline=deadline))
    # a server that is not convinced hangs up
    except PeerLost as error:
        raise PeerRefused("it has another secret or other data") from error
    # in a time that does not depend on where the two differ
    if not hmac.compare_digest(proof, _proof(key, b"server", server_nonce, client_nonce)):
        raise PeerRefused("it does not know the run's secret")


def receive_proof(channel: Channel, key: bytes, *, deadline: float) -> None:
    """Do the server's side of the handshake.

    Raises:
        PeerRefused: the client does not know the key.
    """
    nonce = os.urandom(NONCE_BYTES)
    channel.send([MAGIC + nonce], deadline=deadline)
    answer = bytes(channel.receive(NONCE_BYTES + PROOF_BYTES, deadline=deadline))
    # Verify the client's proof, then prove the same to it.
    client_nonce, proof = answer[:NONCE_BYTES], answer[NONCE_BYTES:]
    if not hmac.compare_digest(proof, _proof(key, b"client", nonce, client_nonce)):
        raise PeerRefused("a stranger")
    channel.send([_proof(key, b"server", nonce, client_nonce)], deadline=deadline)


def _proof(key: bytes, role: bytes, server_nonce: bytes, client_nonce: bytes) -> bytes:
    # Prove that one knows the key; each role has its own proof, so none can be replayed
    return hmac.digest(key, MAGIC + role + server_nonce + client_nonce, "sha256")


def connect(address: tuple[str, int], *, deadline: float) -> Channel:
    """Connect to a listening node.

    Raises:
        PeerLost: it cannot be reached.
    """
    connection = None
    try:
        connection = socket.create_connection(
            address, timeout=max(0.001, deadline - time.monotonic())
        )
        return Channel(connection)
    except OSError as error:
        if connection is not None:
            connection.close()
        raise PeerLost(f"{address[0]}:{address[1]} cannot be reached: {error}") from error


def own_address(*, towards: str) -> str:
    """Return the address of this machine's interface that leads to `towards`; nothing is sent.

    Args:
        towards: host name or address of another node.

    Raises:
        ValueError: no interface leads there.
    """
    try:
        # a connected datagram socket knows the interface, and has sent nothing
        family, kind, protocol, _, target = socket.getaddrinfo(towards, 9, type=socket.SOCK_DGRAM)[
            0
        ]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(target)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise ValueError(
            f"no interface leads to {towards}: {error}; name another node's address"
        ) from error


class Channel:
    """A TCP connection whose every operation ends by a deadline; owns `connection`.

    All that waits raises PeerTimeout at `deadline` (of `time.monotonic`), and PeerLost when the
    other end hangs up.
    """

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # requests are small
        self._socket = connection
        self._readable, self._writable = select.poll(), select.poll()
        self._readable.register(connection, select.POLLIN)
        self._writable.register(connection, select.POLLOUT)

    def close(self) -> None:
        """Hang up. Calling it again does nothing."""
        self._socket.close()

    def is_stale(self) -> bool:
        """Return whether an idle connection has something to read: its end, or unexpected data."""
        return bool(self._readable.poll(0))

    def cork(self, on: bool) -> None:
        """Collect what is sent into full packets until corking is switched off again."""
        if _CORK is not None:
            try:
                self._socket.setsockopt(socket.IPPROTO_TCP, _CORK, int(on))
            except OSError as error:
                raise PeerLost(f"the connection is broken: {error}") from error

    def send(self, buffers: Sequence[Any], *, deadline: float) -> None:
        """Send all bytes of the buffers."""
        views, first = [memoryview(buffer).cast("B") for buffer in buffers if len(buffer)], 0
        while first < len(views):
            # try first, and wait only where the socket takes no more
            try:
                count = self._socket.sendmsg(views[first : first + _MOST_BUFFERS])
            except BlockingIOError:
                self._wait(self._writable, deadline)
                continue
            except OSError as error:
                raise PeerLost(f"the connection is broken: {error}") from error
            first = _advance(views, first, count)

    def send_file(self, descriptor: int, *, offset: int, nbytes: int, deadline: float) -> None:
        """Send a part of a file with sendfile, without reading it here.

        Raises:
            FileBroken: the file is shorter, or cannot be read.
        """
        while nbytes:
            try:
                count = os.sendfile(self._socket.fileno(), descriptor, offset, nbytes)
            except BlockingIOError:
                self._wait(self._writable, deadline)
                continue
            except OSError as error:
                # EIO is the file's error; the others are the connection's
                if error.errno == errno.EIO:
                    raise FileBroken(str(error)) from error
                raise PeerLost(f"the connection is broken: {error}") from error
            if not count:
                raise FileBroken("the file is shorter than its index says")
            offset, nbytes = offset + count, nbytes - count

    def receive(self, nbytes: int, *, deadline: float) -> bytearray:
        """Receive exactly `nbytes` bytes."""
        data = bytearray(nbytes)
        self.receive_into([data], deadline=deadline)
        return data

    def receive_into(self, buffers: Sequence[Any], *, deadline: float) -> None:
        """Fill all writable buffers, one after the other."""
        views, first = [memoryview(buffer).cast("B") for buffer in buffers if len(buffer)], 0
        while first < len(views):
            try:
                # as many buffers at once as a call takes
                count = self._socket.recvmsg_into(views[first : first + _MOST_BUFFERS])[0]
            except BlockingIOError:
                self._wait(self._readable, deadline)
                continue
            except OSError as error:
                raise PeerLost(f"the connection is broken: {error}") from error
            if not count:
                raise PeerLost("the other end hung up")
            first = _advance(views, first, count)

    def _wait(self, poll: select.poll, deadline: float) -> None:
        left = deadline - time.monotonic()
        if left <= 0 or not poll.poll(left * 1000):
            raise PeerTimeout("no answer in time")


def _advance(views: list[memoryview], first: int, count: int) -> int:
    """Skip `count` bytes from buffer `first` on; returns the first buffer that is not done.

    A buffer that is half done is cut.
    """
    while first < len(views) and count >= len(views[first]):
        count -= len(views[first])
        first += 1
    if count:
        views[first] = views[first][count:]
    return first

"""A TCP connection whose every operation ends by a deadline: what both ends of the partitioned
cache talk through.
"""

from __future__ import annotations

import errno
import os
import select
import socket
import time
from collections.abc import Sequence
from typing import Any

_MANY = 512  # buffers of one system call; Linux takes 1024
_CORK = getattr(socket, "TCP_CORK", None)


class PeerError(ConnectionError):
    """A conversation with another node failed."""


class PeerTimeout(PeerError):
    """It took longer than it may."""


class PeerLost(PeerError):
    """The other end hung up or cannot be reached."""


class ProtocolError(PeerError):
    """The message that came is not one that may come."""


class FileBroken(PeerError):
    """A file that was to be sent cannot be read."""


class Channel:
    """Owns `connection`. What waits raises PeerTimeout at `deadline` (`time.monotonic`) and
    PeerLost at the other's end.
    """

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = connection
        self._readable, self._writable = select.poll(), select.poll()
        self._readable.register(connection, select.POLLIN)
        self._writable.register(connection, select.POLLOUT)

    def close(self) -> None:
        """Hang up. Twice is once."""
        self._socket.close()

    def fileno(self) -> int:
        """For select."""
        return self._socket.fileno()

    def is_stale(self) -> bool:
        """Return whether a connection on which nothing is expected has something to read: its end,
        or what should not be there.
        """
        return bool(self._readable.poll(0))

    def cork(self, on: bool) -> None:
        """Collect what is sent into full packets until it is off again."""
        if _CORK is not None:
            try:
                self._socket.setsockopt(socket.IPPROTO_TCP, _CORK, int(on))
            except OSError as error:
                raise PeerLost(f"the connection is broken: {error}") from error

    def send(self, buffers: Sequence[Any], *, deadline: float) -> None:
        """Send all of the buffers' bytes."""
        views, first = [memoryview(buffer).cast("B") for buffer in buffers if len(buffer)], 0
        while first < len(views):
            try:
                count = self._socket.sendmsg(views[first : first + _MANY])
            except BlockingIOError:
                self._wait(self._writable, deadline)
                continue
            except OSError as error:
                raise PeerLost(f"the connection is broken: {error}") from error
            first = _advance(views, first, count)

    def send_file(self, descriptor: int, *, offset: int, nbytes: int, deadline: float) -> None:
        """Send a part of a file without reading it here. Raises FileBroken where it ends before or
        cannot be read.
        """
        while nbytes:
            try:
                count = os.sendfile(self._socket.fileno(), descriptor, offset, nbytes)
            except BlockingIOError:
                self._wait(self._writable, deadline)
                continue
            except OSError as error:
                if error.errno == errno.EIO:
                    raise FileBroken(str(error)) from error
                raise PeerLost(f"the connection is broken: {error}") from error
            if not count:
                raise FileBroken("the file is shorter than its index says")
            offset, nbytes = offset + count, nbytes - count

    def receive(self, nbytes: int, *, deadline: float) -> bytearray:
        """Exactly so many bytes."""
        data = bytearray(nbytes)
        self.receive_into([data], deadline=deadline)
        return data

    def receive_some(self, most: int) -> bytes:
        """Return what is there, up to so many bytes, without waiting."""
        try:
            data = self._socket.recv(most)
        except BlockingIOError:
            return b""
        except OSError as error:
            raise PeerLost(f"the connection is broken: {error}") from error
        if not data:
            raise PeerLost("the other end hung up")
        return data

    def receive_into(self, buffers: Sequence[Any], *, deadline: float) -> None:
        """Fill all writable buffers, one after the other."""
        views, first = [memoryview(buffer).cast("B") for buffer in buffers if len(buffer)], 0
        while first < len(views):
            try:
                count = self._socket.recvmsg_into(views[first : first + _MANY])[0]
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
    """The first buffer that is not done after `count` more bytes; one that is half done is cut."""
    while first < len(views) and count >= len(views[first]):
        count -= len(views[first])
        first += 1
    if count:
        views[first] = views[first][count:]
    return first


def connect(address: tuple[str, int], *, deadline: float) -> Channel:
    """Return a channel to a listening socket. Raises PeerLost."""
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
    """Return the address of this machine's interface from which `towards` (a host name or address)
    is reached; nothing is sent.

    Raises ValueError where there is no way to it.
    """
    try:
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

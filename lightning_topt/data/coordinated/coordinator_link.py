"""Messages between jobs, their workers and the coordinator: JSON over a Unix socket.

A prepared batch travels with its message as an open file. The socket's name is in Linux' abstract
namespace: it disappears with its process, and nothing is left in the file system. The kernel says
whose process is at the other end; only those of the same user are accepted.

The coordinator's process uses this too, so it needs the standard library only.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import select
import socket
import struct
import subprocess
import sys
import time
import weakref
from collections.abc import Sequence
from typing import Any

from lightning_topt.data.light_process import close_pipes, start_light

VERSION = 1
MAX_MESSAGE_BYTES = 1 << 16
RETRY_SECONDS = 0.02
STARTUP_SECONDS = 30.0  # a coordinator without jobs ends after so long
COORDINATOR = "lightning_topt.data.coordinated.coordinator"
_CREDENTIALS = struct.Struct("iII")  # pid, uid, gid of struct ucred
Message = dict[str, Any]


class CoordinatorLost(ConnectionError):
    """The other end is gone, does not answer, or belongs to another user."""


def is_supported() -> bool:
    """Return whether the system has abstract sockets and sealed memory files (Linux)."""
    return sys.platform == "linux" and hasattr(os, "memfd_create")


def address_of(directory: str | os.PathLike[str], *, group: str = "") -> str:
    """Return the socket's name for jobs of this user that share a directory and group."""
    meeting = f"{os.getuid()}\0{os.path.realpath(directory)}\0{group}"
    return "\0lightning-topt-" + hashlib.sha256(meeting.encode()).hexdigest()[:32]


def join(
    address: str, hello: Message, *, timeout_seconds: float, may_start: bool
) -> tuple[Connection, Message]:
    """Connect to the coordinator and return the connection and its answer to `hello`.

    With `may_start` it is started where there is none.

    Raises:
        CoordinatorLost: no coordinator answers in time.
    """
    deadline = time.monotonic() + timeout_seconds
    while True:
        connection = None
        try:
            connection = _connect(address, deadline - time.monotonic())
            connection.send({"type": "hello", "version": VERSION, **hello})
            answer = connection.receive(timeout_seconds=deadline - time.monotonic())
            if answer is None:
                raise CoordinatorLost(
                    f"the coordinator did not answer within {timeout_seconds:g} seconds"
                )
            return connection, answer[0]
        except (CoordinatorLost, OSError) as error:
            if connection is not None:
                connection.close()
            if time.monotonic() > deadline or not may_start:
                raise CoordinatorLost(str(error)) from error
            # nobody listens: start one, unless another job is faster
            if connection is None:
                _start(address, deadline - time.monotonic())
        time.sleep(RETRY_SECONDS)  # it may have ended just now, with its last job


def _connect(address: str, timeout_seconds: float) -> Connection:
    peer = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        # This also limits sending to a coordinator that does not read.
        peer.settimeout(max(0.01, timeout_seconds))
        peer.connect(address)
        return Connection(peer)
    except OSError:
        peer.close()
        raise


def _start(address: str, timeout_seconds: float) -> None:
    """Start a coordinator, unless another job has just done so.

    A name can be bound only once, so there are never two.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        try:
            listener.bind(address)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return
            raise
        listener.listen(128)
        descriptor, none = listener.fileno(), subprocess.DEVNULL
        try:
            # No output: it would keep open the pipe of whoever reads the first job's.
            process = start_light(
                COORDINATOR,
                {"listener": descriptor},
                pass_fds=[descriptor],
                stdout=none,
                stderr=none,
            )
            # The process forks the coordinator and exits.
            try:
                status = process.wait(timeout=max(1.0, timeout_seconds))
            finally:
                process.kill()
                process.wait()
                close_pipes(process)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise CoordinatorLost(f"the coordinator could not be started: {error}") from error
    if status:
        raise CoordinatorLost(
            f"the coordinator could not be started: it ended with status {status}"
        )


class Connection:
    """One end of a connection; messages arrive whole or not at all.

    Raises:
        CoordinatorLost: the process at the other end belongs to another user.
    """

    def __init__(self, peer: socket.socket) -> None:
        self.socket = peer
        _open.add(self)
        # the kernel says whose process is at the other end
        credentials = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        if _CREDENTIALS.unpack(credentials)[1] != os.getuid():
            peer.close()
            raise CoordinatorLost("another user's process listens where this user's jobs meet")

    def fileno(self) -> int:
        """Return the descriptor, for select."""
        return self.socket.fileno()

    def close(self) -> None:
        """Hang up."""
        self.socket.close()

    def send(self, message: Message, *, descriptor: int | None = None) -> None:
        """Send one message, with an open file; the caller closes its own copy."""
        data = json.dumps(message, separators=(",", ":")).encode()
        try:
            socket.send_fds(self.socket, [data], [] if descriptor is None else [descriptor])
        except OSError as error:  # also a full buffer: the other end does not read
            raise CoordinatorLost(f"the connection is broken: {error}") from error

    def receive(self, *, timeout_seconds: float) -> tuple[Message, int | None] | None:
        """Receive one message and the open file that came with it; None when nothing came in time.

        Raises:
            CoordinatorLost: the connection has ended, or what came is no message.
        """
        if not select_readable(self, timeout_seconds):
            return None
        try:
            data, descriptors, _, _ = socket.recv_fds(
                self.socket, MAX_MESSAGE_BYTES, 1, socket.MSG_CMSG_CLOEXEC
            )
        except OSError as error:
            raise CoordinatorLost(f"the connection is broken: {error}") from error
        if not data:
            raise CoordinatorLost("the connection was closed")
        try:
            message = json.loads(data)
            if not isinstance(message, dict):
                raise ValueError("a message is an object")
        except ValueError as error:
            for descriptor in descriptors:
                os.close(descriptor)
            raise CoordinatorLost(f"what came is no message: {error}") from error
        return message, descriptors[0] if descriptors else None


_open: weakref.WeakSet[Connection] = weakref.WeakSet()  # of this process


def _close_inherited() -> None:
    for connection in list(_open):
        connection.socket.close()
    _open.clear()


# A process that a job forks (a DataLoader's worker) would keep its connection open, and nobody
# would see the job die.
os.register_at_fork(after_in_child=_close_inherited)


def select_readable(connection: Connection, timeout_seconds: float) -> bool:
    """Wait until something can be read; poll, because select knows only 1,024 files."""
    poll = select.poll()
    poll.register(connection.fileno(), select.POLLIN)
    return bool(poll.poll(max(0.0, timeout_seconds) * 1000))


def memory_file(parts: Sequence[Any]) -> int:
    """Return a descriptor of an anonymous, sealed file with these buffers."""
    descriptor = os.memfd_create("lightning-topt-batch", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        with open(descriptor, "wb", buffering=0, closefd=False) as file:
            for part in parts:
                view = memoryview(part).cast("B")
                # one write may take only a part
                while len(view):
                    view = view[file.write(view) :]
        fcntl.fcntl(
            descriptor,
            fcntl.F_ADD_SEALS,
            fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE,
        )
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def close_quietly(descriptor: int | None) -> None:
    """Close the descriptor, if there is one."""
    if descriptor is not None:
        with contextlib.suppress(OSError):
            os.close(descriptor)

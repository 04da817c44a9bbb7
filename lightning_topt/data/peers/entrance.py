"""The way into a node's service: one thread listens to all who have not proved yet that they know
the run's secret.

Each of them costs an open socket and nothing else, so a flood of them keeps nobody out: whoever
comes is let in at once, and where there are too many, one of those who have had their time leaves,
of the address from which most came.
"""

from __future__ import annotations

import os
import selectors
import socket
import time
from collections.abc import Callable

from lightning_topt.data.peers.peer_channel import Channel, PeerError
from lightning_topt.data.peers.protocol import PeerLimits, Welcome

PARENT_SECONDS = 1.0  # how often to look for the parent, should the end of its pipe not be seen
# with a stranger when others wait: of many that come at once each needs a moment
PATIENCE_SECONDS = 0.2
FULL_SECONDS = 0.005  # until it is looked again whether somebody has left
_MANY = 64  # are accepted before those who are there are heard


class Stranger:
    """Somebody at `address` who came at `since` (`time.monotonic`)."""

    def __init__(self, channel: Channel, *, address: str, key: bytes) -> None:
        self.channel, self.address, self.since = channel, address, time.monotonic()
        self.welcome = Welcome(channel, key)

    def fileno(self) -> int:
        """For select."""
        return self.channel.fileno()


class Entrance:
    """Lets strangers of `listener` in and gives the channels of those who know `key` to `admit`,
    while `has_room` says so.
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
        self.listener, self.key, self.limits, self.admit, self.has_room = (
            listener,
            key,
            limits,
            admit,
            has_room,
        )
        self._by_address: dict[str, dict[Stranger, None]] = {}  # the oldest first
        self._number = 0
        self._selector = selectors.DefaultSelector()
        self._is_listening = False

    def serve(self, *, control: int, parent: int) -> None:
        """Until `control` ends or process `parent` is gone."""
        self._selector.register(control, selectors.EVENT_READ)
        self._listen(True)
        while os.getppid() == parent:
            for key, _ in self._selector.select(
                PARENT_SECONDS if self._is_listening else FULL_SECONDS
            ):
                if key.fd == control:
                    return
                if isinstance(key.data, Stranger):
                    self._hear(key.data)
                else:
                    self._accept()
            self._send_away()

    def _listen(self, on: bool) -> None:
        if on and not self._is_listening:
            self._selector.register(self.listener, selectors.EVENT_READ)
        elif self._is_listening and not on:
            self._selector.unregister(self.listener)
        self._is_listening = on

    def _accept(self) -> None:
        for _ in range(_MANY):
            if self._number >= self.limits.strangers and not self._make_room():
                self._listen(False)
                return
            try:
                connection, address = self.listener.accept()
            except BlockingIOError:
                return
            except OSError:  # it hung up meanwhile, or there are too many open files
                time.sleep(FULL_SECONDS)
                return
            self._let_in(connection, str(address[0]))

    def _let_in(self, connection: socket.socket, address: str) -> None:
        try:
            if not self.has_room():
                raise OSError("too many connections")
            stranger = Stranger(Channel(connection), address=address, key=self.key)
            self._selector.register(stranger, selectors.EVENT_READ, stranger)
        except OSError:  # also a PeerError: it hung up meanwhile
            connection.close()
            return
        self._by_address.setdefault(address, {})[stranger] = None
        self._number += 1

    def _make_room(self) -> bool:
        """Send one away who has had its time."""
        crowd = max(self._by_address.values(), key=len)
        oldest = next(iter(crowd))
        if time.monotonic() - oldest.since < PATIENCE_SECONDS:
            return False
        self._forget(oldest)
        oldest.channel.close()
        return True

    def _hear(self, stranger: Stranger) -> None:
        try:
            knows = stranger.welcome.go_on()
        except PeerError:
            self._forget(stranger)
            stranger.channel.close()
            return
        if knows:
            self._forget(stranger)
            self.admit(stranger.channel)

    def _forget(self, stranger: Stranger) -> None:
        self._selector.unregister(stranger)
        there = self._by_address[stranger.address]
        del there[stranger]
        if not there:
            del self._by_address[stranger.address]
        self._number -= 1

    def _send_away(self) -> None:
        """All who have not proved anything for too long."""
        before = time.monotonic() - self.limits.proof_seconds
        for there in list(self._by_address.values()):
            while there and (oldest := next(iter(there))).since < before:
                self._forget(oldest)
                oldest.channel.close()
        if not self._is_listening and (self._number < self.limits.strangers or self._make_room()):
            self._listen(True)

"""A network between ranks of one process that loses, doubles, cuts, and reorders datagrams."""

from __future__ import annotations

import random
import selectors
import socket
import threading
from collections.abc import Sequence
from dataclasses import dataclass

Address = tuple[str, int, int]


@dataclass(frozen=True)
class Faults:
    """Shares of datagrams that are lost, doubled, sent also in a cut form, and held back."""

    lost: float = 0.0
    doubled: float = 0.0
    cut: float = 0.0
    late: float = 0.0
    seed: int = 1


class DatagramProxy(threading.Thread):
    """Rank i reaches rank j at a port of its own, from which what it gets of j comes, too."""

    def __init__(self, addresses: Sequence[Address], faults: Faults) -> None:
        super().__init__(daemon=True)
        self.real, self.faults, self.random = addresses, faults, random.Random(faults.seed)
        ranks = range(len(addresses))
        self.ports = {(i, j): self._port() for i in ranks for j in ranks if i != j}
        self.held: list[tuple[tuple[int, int], bytes]] = []
        self.passed = 0
        self.ended = threading.Event()
        self.start()

    @staticmethod
    def _port() -> socket.socket:
        port = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        port.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 << 20)
        port.bind(("127.0.0.1", 0))
        port.setblocking(False)
        return port

    def addresses(self, rank: int) -> list[Address]:
        """The addresses that a rank is given."""
        return [
            own if peer == rank else (own[0], self.ports[rank, peer].getsockname()[1], own[2])
            for peer, own in enumerate(self.real)
        ]

    def run(self) -> None:
        with selectors.DefaultSelector() as selector:
            for pair, port in self.ports.items():
                selector.register(port, selectors.EVENT_READ, pair)
            while not self.ended.is_set():
                ready = selector.select(0.002)
                for key, _ in ready:
                    self._drain(key.data, key.fileobj)
                if not ready:
                    self._release(len(self.held))

    def _drain(self, pair: tuple[int, int], port: socket.socket) -> None:
        while True:
            try:
                data = port.recv(65536)
            except BlockingIOError:
                return
            self._pass(pair, data)

    def _pass(self, pair: tuple[int, int], data: bytes) -> None:
        faults, chance = self.faults, self.random.random
        self.passed += 1
        if chance() < faults.cut:
            self._send(pair, data[: self.random.randrange(len(data))])
        if chance() < faults.lost:
            return
        if chance() < faults.late:
            self.held.append((pair, data))
            return
        self._send(pair, data)
        if chance() < faults.doubled:
            self._send(pair, data)
        if len(self.held) > 20:
            self._release(self.random.randrange(len(self.held)))

    def _release(self, count: int) -> None:
        self.random.shuffle(self.held)
        for _ in range(count):
            self._send(*self.held.pop())

    def _send(self, pair: tuple[int, int], data: bytes) -> None:
        sender, receiver = pair
        try:
            self.ports[receiver, sender].sendto(data, self.real[receiver][:2])
        except OSError:
            return  # a closed or full socket loses it

    def close(self) -> None:
        self.ended.set()
        self.join()
        for port in self.ports.values():
            port.close()

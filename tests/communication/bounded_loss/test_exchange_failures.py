"""Ranks that end, freeze, leave or never start; wrong datagrams; what must not grow."""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import random
import signal
import socket
import struct
import termios
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from lightning_topt.communication.bounded_loss.delivery import PeerSilentError
from lightning_topt.communication.bounded_loss.exchange import BoundedLossExchange, open_endpoint
from lightning_topt.communication.bounded_loss.messages import KINDS
from tests.communication.bounded_loss.datagram_proxy import Faults
from tests.communication.bounded_loss.ranks_here import SECONDS, exchanges, step, whole_numbers

KEY = 77


def _steps_for_ever(rank, endpoint, addresses, started):
    exchange = BoundedLossExchange(rank, addresses, KEY, endpoint=endpoint, timeout_seconds=60)
    values = np.ones(50_000, np.float32)
    while True:
        exchange.start(0, values, out=np.empty_like(values)).wait(60)
        started.set()


@pytest.mark.parametrize(
    ("ending", "said", "limit"),
    [(signal.SIGKILL, "process ended", 20.0), (signal.SIGSTOP, "did not answer", 1.0)],
)
def test_a_rank_that_ends_or_freezes_is_named(ending, said, limit):
    context = multiprocessing.get_context("fork")
    endpoints = [open_endpoint("127.0.0.1") for _ in range(2)]
    addresses = [endpoint.address for endpoint in endpoints]
    started = context.Event()
    other = context.Process(
        target=_steps_for_ever, args=(1, endpoints[1], addresses, started), daemon=True
    )
    other.start()
    endpoints[1].close()
    exchange = BoundedLossExchange(0, addresses, KEY, endpoint=endpoints[0], timeout_seconds=limit)
    values = np.ones(50_000, np.float32)
    try:
        exchange.start(0, values, out=np.empty_like(values)).wait(SECONDS)
        assert started.wait(SECONDS)
        os.kill(other.pid, ending)
        begun = time.monotonic()
        with pytest.raises(PeerSilentError, match=f"rank 1 .*{said}") as found:
            for _ in range(100):
                exchange.start(0, values, out=np.empty_like(values)).wait(SECONDS)
        assert found.value.ranks == (1,) and time.monotonic() - begun < 10
        with pytest.raises(PeerSilentError):
            exchange.start(0, values, out=np.empty_like(values))
    finally:
        other.kill()
        other.join()
        exchange.close()


def test_who_never_starts_is_named():
    values = np.ones(1000, np.float32)
    with exchanges(3, timeout_seconds=0.8) as ranks:
        handles = [ranks[rank].start(5, values, out=np.empty_like(values)) for rank in (0, 2)]
        for handle in handles:
            with pytest.raises(PeerSilentError, match="rank 1") as found:
                handle.wait(SECONDS)
            assert found.value.ranks == (1,)


def test_who_left_is_named():
    values = np.ones(1000, np.float32)
    with exchanges(2) as ranks:
        step(ranks, [values, values])
        ranks[1].close()
        with pytest.raises(PeerSilentError, match="rank 1 left"):
            ranks[0].start(0, values, out=np.empty_like(values)).wait(SECONDS)


def test_other_sizes_are_told():
    with exchanges(2, timeout_seconds=2.0) as ranks:
        handles = [
            exchange.start(
                4, np.ones(1000 + rank, np.float32), out=np.empty(1000 + rank, np.float32)
            )
            for rank, exchange in enumerate(ranks)
        ]
        said = []
        for handle in handles:
            with pytest.raises(PeerSilentError) as found:
                handle.wait(SECONDS)
            said.append(str(found.value))
        assert any("bucket 4 has another size" in text for text in said)


def _header(key, *, kind=1, rank=1, step=1, tensor=0, segment=0, size=40, sequence=0):
    return struct.pack(
        "<BBHIqIIHHIq", kind, 0, rank, step, key, tensor, segment, size, 0, sequence, 0
    )


def _wrong_datagrams(key, source):
    """10,000 that none should act upon: noise, wrong keys, known keys with wrong contents."""
    chance = random.Random(3)
    for number in range(10_000):
        body = chance.randbytes(chance.randrange(0, 1500))
        kind = number % 5
        if kind == 0:
            yield body
        elif kind == 1:
            yield _header(key ^ (1 << chance.randrange(63)), size=len(body)) + body
        elif kind == 2:
            yield _header(key, size=len(body) + chance.choice([-1, 1, 7])) + body
        elif kind == 3:
            wrong = {
                "rank": chance.choice([0, 5, 65535]),
                "kind": chance.choice([0, KINDS, 200, 255]),
            }
            name = chance.choice(list(wrong))
            yield _header(key, size=len(body), **{name: wrong[name]}) + body
        else:
            wrong = {"tensor": 1 << 20, "segment": 1 << 30, "step": 1 << 20}
            name = chance.choice(list(wrong))
            yield (
                _header(
                    key, size=len(body), sequence=chance.randrange(1 << 32), **{name: wrong[name]}
                )
                + body
            )


def test_wrong_datagrams_change_nothing():
    """Sent from another port, which suffices to drop them, and from the peer's own socket."""
    values = [whole_numbers(20_000, seed=rank) for rank in range(2)]
    with exchanges(2) as ranks:
        step(ranks, values)
        t = ranks[0]._thread.t
        key, target = int(t.config.key), (("127.0.0.1"), _port_of(ranks[0]))
        peers_own = socket.socket(fileno=os.dup(int(ranks[1]._thread.t.config.udp_socket)))
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as foreign:
            for number, data in enumerate(_wrong_datagrams(key, foreign)):
                (foreign if number % 2 else peers_own).sendto(data, target)
                if number % 100 == 0:
                    _wait_until_read(ranks[0])
                if number % 500 == 0:
                    sums, _ = step(ranks, values)
                    np.testing.assert_array_equal(sums[0], values[0] + values[1])
            # A forged one without a mistake, but from a wrong port.
            foreign.sendto(_header(key, size=1432) + bytes(1432), target)
            _wait_until_read(ranks[0])
        peers_own.close()
        sums, outcomes = step(ranks, values)
        np.testing.assert_array_equal(sums[0], values[0] + values[1])
        assert sum(outcome.lost_share for outcome in outcomes) == 0
        # Not `late`: on a busy machine the peer repeats its own datagrams, and these count as late.
        assert ranks[0].statistics().rejected > 8000


def _own_socket(exchange):
    return socket.socket(fileno=os.dup(int(exchange._thread.t.config.udp_socket)))


def _port_of(exchange):
    with _own_socket(exchange) as own:
        return own.getsockname()[1]


def _wait_until_read(exchange):
    """Wait until nothing lies in the socket, where the kernel would drop what is too much."""
    end = time.monotonic() + SECONDS
    with _own_socket(exchange) as own:
        while struct.unpack("i", fcntl.ioctl(own, termios.FIONREAD, bytes(4)))[0]:
            assert time.monotonic() < end
            time.sleep(0.001)


def test_nothing_grows():
    """Memory, threads and descriptors over steps; and all of them go with the exchange."""

    def used():
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return threading.active_count(), len(os.listdir("/proc/self/fd")), pages * 4096

    values = [whole_numbers(20_000, seed=rank) for rank in range(2)]
    outs = [np.empty_like(each) for each in values]
    before = used()
    with exchanges(2, faults=Faults(lost=0.01)) as ranks:
        seen = []
        for number in range(300):
            handles = [
                exchange.start(0, own, out=out)
                for exchange, own, out in zip(ranks, values, outs, strict=True)
            ]
            for handle in handles:
                handle.wait(SECONDS)
            if number in (100, 299):
                seen.append(used())
        assert seen[0][:2] == seen[1][:2]
        assert seen[1][2] - seen[0][2] < 4 << 20
    assert used()[:2] == before[:2]

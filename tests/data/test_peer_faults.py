"""Nodes that die, hang, lie or are strangers: no second wait, and no wrong sample."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time
import warnings

import numpy as np
import pytest

from lightning_topt.data.peers import client as peer_client
from lightning_topt.data.peers.protocol import (
    ENTRY,
    GET,
    MAGIC,
    MOST_ITEMS,
    OFFER,
    REQUEST,
    PeerLost,
    authenticate,
    connect,
    run_key,
)
from tests.data.test_peers import HERE, ITEMS, SECRET, client, fill, nodes, owned, payload, plain
from tests.processes import halt, wait_until

KEY = run_key(SECRET, fingerprint="f", num_items=ITEMS)
THEIRS = owned(1, num_nodes=2)
__all__ = ["nodes"]  # the fixture


def soon():
    return time.monotonic() + 10


@pytest.fixture
def pair(nodes):
    made = nodes(2, connections=8)
    for item in THEIRS:
        made[1].memory.write(item, [payload(item)])
    return made


def is_well(peers):
    """Whether node 1 gives everything."""
    return plain(peers.fetch(THEIRS)) == [payload(item) for item in THEIRS]


@contextlib.contextmanager
def listening(serve):
    """A false node: `serve(connection)` for the first one that comes; its address."""
    with socket.create_server((HERE, 0)) as listener:

        def accept():
            with contextlib.suppress(OSError), listener.accept()[0] as connection:
                serve(connection)

        thread = threading.Thread(target=accept, daemon=True)
        thread.start()
        yield listener.getsockname()
        listener.shutdown(socket.SHUT_RDWR)
        thread.join(5)


def friend(address):
    channel = connect(address, deadline=soon())
    authenticate(channel, KEY, deadline=soon())
    return channel


def hung_up(channel):
    with pytest.raises(PeerLost):
        channel.receive(1 << 16, deadline=soon())
    channel.close()


@pytest.mark.parametrize(
    "wrong", [{"secret": bytes(32)}, {"fingerprint": "g"}, {"num_items": ITEMS + 1}]
)
def test_a_client_with_another_secret_or_other_data_gets_nothing(pair, wrong):
    peers = client(pair, **wrong)
    others = [item for item in range(ITEMS) if not peers.is_own(item)]
    with pytest.warns(UserWarning, match="another secret or other data"):
        assert peers.fetch(others) == [None] * len(others)
    peers.push({others[0]: [b"wrong"]})
    assert is_well(client(pair))


def test_a_server_that_does_not_know_the_secret_is_not_asked(pair):
    heard = []

    def reflect(connection):
        connection.sendall(MAGIC + os.urandom(32))
        words = connection.recv(64, socket.MSG_WAITALL)
        connection.sendall(words[32:])  # the client's own proof
        heard.append(connection.recv(1 << 16))

    with (
        listening(reflect) as address,
        pytest.warns(UserWarning, match="does not know the run's secret"),
    ):
        assert client([pair[0], address]).fetch(THEIRS[:3]) == [None] * 3
        wait_until(lambda: heard)
    assert heard == [b""]


def test_a_killed_owner_is_left_alone_and_asked_again_when_it_is_back(pair, monkeypatch):
    peers, port = client(pair, retry_seconds=3600), pair[1].server.address[1]
    assert plain(peers.fetch(THEIRS[:2])) == [payload(item) for item in THEIRS[:2]]
    halt(pair[1].server.process.pid, signal.SIGKILL)
    pair[1].server.process.wait(10)
    with pytest.warns(UserWarning, match="node 1"):
        assert peers.fetch(THEIRS) == [None] * len(THEIRS)
    with monkeypatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("error")
        patch.setattr(peer_client, "connect", lambda *_, **__: pytest.fail("it was asked again"))
        assert peers.fetch(THEIRS) == [None] * len(THEIRS)
        peers.push({THEIRS[0]: [payload(THEIRS[0])]})
    pair[1].serve(port=port)
    link = peers._link(1)
    link._retry_at, link.retry_seconds = time.monotonic(), 0.05
    wait_until(lambda: is_well(peers))
    assert link._retry_at is None


def test_a_stopped_owner_takes_no_other_with_it_and_is_not_waited_for_again(nodes, monkeypatch):
    """The other one's answer is larger than the buffers, and waits while the first is silent."""
    trio = nodes(3, memory=1 << 26)
    first, other = owned(1, num_nodes=3), owned(2, num_nodes=3)[:3]
    large = np.random.default_rng(0).bytes(4 << 20)
    assert all(trio[2].memory.write(item, [large]) for item in other)
    fill(trio[1], first)
    peers = client(trio, timeout_seconds=2, retry_seconds=3600)
    assert plain(peers.fetch(first)) == [payload(item) if item % 3 < 2 else None for item in first]
    halt(trio[1].server.process.pid, signal.SIGSTOP)
    try:
        with pytest.warns(UserWarning, match=r"node 1 .* no answer in time"):
            entries = peers.fetch([*first, *other])
        assert plain(entries) == [None] * len(first) + [large] * 3
        monkeypatch.setattr(
            peer_client, "connect", lambda *_, **__: pytest.fail("it was asked again")
        )
        assert peers.fetch(first) == [None] * len(first)
    finally:
        os.kill(trio[1].server.process.pid, signal.SIGCONT)


def test_what_cannot_be_given_away_is_dropped(pair):
    silent = socket.create_server((HERE, 0))
    peers = client([pair[0], silent.getsockname()], timeout_seconds=0.5)
    with silent, pytest.warns(UserWarning, match="no answer in time"):
        peers.push({item: [bytes(1000)] for item in THEIRS})
    before = time.monotonic()
    peers.push({THEIRS[0]: [bytes(1000)]})
    assert time.monotonic() - before < 0.4  # nobody waits again


def test_damage_in_the_owners_store_is_never_given_and_repaired_by_the_next_reader(pair):
    peers, rng, store = client(pair), np.random.default_rng(1), pair[1].memory
    hurt = THEIRS[::2]
    for item in hurt:
        where = store.locate(item)
        position = where.offset + int(rng.integers(where.nbytes))
        byte = os.pread(where.descriptor, 1, position)[0]
        os.pwrite(where.descriptor, bytes([byte ^ 1 << int(rng.integers(8))]), position)
    expected = [None if item in hurt else payload(item) for item in THEIRS]
    assert plain(peers.fetch(THEIRS)) == expected
    for item in hurt:
        peers.push({item: [payload(item)]})
    assert plain(peers.fetch(THEIRS)) == [payload(item) for item in THEIRS]


def test_a_file_that_was_cut_off(pair):
    peers, store = client(pair), pair[1].memory
    ends = {item: store.locate(item).offset + store.locate(item).nbytes for item in THEIRS}
    cut = sorted(ends.values())[len(THEIRS) // 2]
    os.ftruncate(store.file.descriptor, cut)
    assert plain(peers.fetch(THEIRS)) == [
        payload(item) if ends[item] <= cut else None for item in THEIRS
    ]


def one(*numbers):
    return np.array(numbers, "<u8").tobytes()


MALFORMED = {
    "too many items": REQUEST.pack(GET, MOST_ITEMS + 1) + one(0),
    "no items": REQUEST.pack(GET, 0),
    "too many offers": REQUEST.pack(OFFER, MOST_ITEMS + 1) + bytes(ENTRY.size),
    "another kind": REQUEST.pack(3, 1) + one(0),
    "an item that is none": REQUEST.pack(GET, 2) + one(THEIRS[0], ITEMS),
    "a very large item": REQUEST.pack(GET, 1) + one(2**64 - 1),
    "an offer that is none": REQUEST.pack(OFFER, 1) + ENTRY.pack(2**63, 5, 5),
}


@pytest.mark.parametrize("request_bytes", MALFORMED.values(), ids=MALFORMED)
def test_malformed_requests_end_their_conversation_only(pair, request_bytes):
    peers, enemy = client(pair), friend(pair[1].server.address)
    peers.fetch(THEIRS[:1])
    enemy.send([request_bytes], deadline=soon())
    hung_up(enemy)
    assert is_well(peers) and pair[1].server.is_alive

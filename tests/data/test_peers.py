"""Nodes that give each other entries over real sockets: what is stored arrives, and stays."""

from __future__ import annotations

import os
import threading

import numpy as np
import pytest

from lightning_topt.data.cache.segment_store import SegmentStore, StoreFile
from lightning_topt.data.peers.client import Peers, owners
from lightning_topt.data.peers.server import MOST_CONNECTIONS, PeerServer
from tests.processes import wait_until

ITEMS, SEED, SECRET = 90, 3, bytes(range(32))
HERE = "127.0.0.1"


def payload(item):
    return np.random.default_rng(item).bytes(200 + 37 * item)


class Node:
    """Stores in memory and on disk and the process that serves them."""

    def __init__(
        self, folder, *, memory=1 << 22, disk=1 << 22, num_items=ITEMS, connections=MOST_CONNECTIONS
    ):
        folder.mkdir(exist_ok=True)
        self.files = [
            os.memfd_create("test"),
            os.open(folder / "samples", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600),
        ]
        self.memory, self.disk = (
            SegmentStore(
                StoreFile(file, num_items=num_items, lock=folder / f"{name}.lock"),
                capacity_bytes=capacity,
            )
            for name, file, capacity in zip(
                ("memory", "disk"), self.files, (memory, disk), strict=True
            )
        )
        self.connections = connections
        self.serve()

    def serve(self, *, port=0):
        stores = [self.memory, self.disk]
        self.server = PeerServer(
            stores,
            host=HERE,
            secret=SECRET,
            fingerprint="f",
            port=port,
            connections=self.connections,
        )

    def has(self, item):
        """The names of the stores that hold the item, as it should be."""
        found = {"memory": self.memory.read(item), "disk": self.disk.read(item)}
        assert all(entry is None or entry.tobytes() == payload(item) for entry in found.values())
        return {name for name, entry in found.items() if entry is not None}

    def close(self):
        self.server.close()
        for file in self.files:
            os.close(file)
        self.files = []


def client(nodes, *, node=0, **options):
    addresses = [each if isinstance(each, tuple) else each.server.address for each in nodes]
    known = {
        "num_items": ITEMS,
        "seed": SEED,
        "secret": SECRET,
        "fingerprint": "f",
        "timeout_seconds": 10,
    }
    return Peers(addresses, node=node, **{**known, **options})


def owned(node, *, num_nodes, num_items=ITEMS):
    return np.flatnonzero(owners(num_items, num_nodes=num_nodes, seed=SEED) == node).tolist()


def plain(entries):
    return [None if entry is None else entry.tobytes() for entry in entries]


@pytest.fixture
def nodes(tmp_path):
    """Makes nodes, and closes them."""
    made = []

    def make(number, **options):
        made.extend(Node(tmp_path / str(len(made) + i), **options) for i in range(number))
        return made[-number:]

    yield make
    for node in made:
        node.close()


def fill(node, items):
    """A third in memory, a third on disk, a third nowhere."""
    for item in items:
        store = [node.memory, node.disk, None][item % 3]
        assert store is None or store.write(item, [payload(item)])


def test_one_fetch_brings_what_all_owners_hold_in_the_order_of_the_question(nodes):
    trio = nodes(3)
    for node, each in enumerate(trio):
        fill(each, owned(node, num_nodes=3))
    peers = client(trio)
    own = set(owned(0, num_nodes=3))
    assert all(peers.is_own(item) == (item in own) for item in range(ITEMS))
    twice = next(item for item in range(ITEMS) if item not in own and item % 3 == 0)
    order = [*np.random.default_rng(0).permutation(ITEMS).tolist(), twice, twice]
    expected = [None if item in own or item % 3 == 2 else payload(item) for item in order]
    for _ in range(2):
        entries = peers.fetch(order)
        assert plain(entries) == expected
    entries[-1][:] = 0  # writable, and nobody else's
    assert plain(entries[:-1]) == expected[:-1]
    assert peers.fetch([]) == []
    fill(trio[0], own)
    assert plain(client(trio, node=2).fetch(sorted(own))) == [
        payload(i) if i % 3 < 2 else None for i in sorted(own)
    ]


def test_pushed_entries_are_with_their_owner(nodes):
    trio = nodes(3)
    peers = client(trio)
    others = [item for item in range(ITEMS) if not peers.is_own(item)]
    for item in others:
        peers.push({item: [payload(item)[:50], np.frombuffer(payload(item)[50:], np.uint8)]})
    for node in (1, 2):
        assert all(trio[node].has(item) == {"memory", "disk"} for item in owned(node, num_nodes=3))
        assert len(trio[node].memory) == len(owned(node, num_nodes=3))
    peers.close()
    assert plain(peers.fetch(others)) == [payload(item) for item in others]  # it connects again


def test_a_full_owner_refuses(nodes):
    pair = nodes(2, memory=0, disk=2000)
    items = [item for item in owned(1, num_nodes=2) if item > 40]
    peers = client(pair)
    for item in items:
        peers.push({item: [payload(item)]})
    assert sum(bool(pair[1].has(item)) for item in items) == 1


def test_threads_share_it(nodes):
    trio = nodes(3)
    peers = client(trio)
    others = [item for item in range(ITEMS) if not peers.is_own(item)]
    wrong = []

    def work(seed):
        for item in np.random.default_rng(seed).permutation(others).tolist():
            peers.push({item: [payload(item)]})
            wrong.extend(
                entry for entry in plain(peers.fetch([item])) if entry not in (None, payload(item))
            )

    threads = [threading.Thread(target=work, args=[seed]) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    peers.close()
    assert not wrong and plain(peers.fetch(others)) == [payload(item) for item in others]


def test_nothing_stays_open(nodes):
    pair = nodes(2)

    def use():
        peers = client(pair)
        peers.fetch(range(ITEMS))
        peers.push({owned(1, num_nodes=2)[0]: [b"abc"]})
        peers.close()

    use()
    before = len(os.listdir("/proc/self/fd")), threading.active_count()
    for _ in range(10):
        use()
    wait_until(lambda: (len(os.listdir("/proc/self/fd")), threading.active_count()) == before)

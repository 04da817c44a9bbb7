"""Who owns what: balanced, the same everywhere, as in plain integers; two caches that share."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from lightning_topt.data.cache.sample_cache import SampleCache
from lightning_topt.data.cache.sample_codec import decode, encode, size_of
from lightning_topt.data.peers.client import owners
from lightning_topt.data.peers.server import PeerServer
from tests.data.test_peers import HERE, ITEMS, SECRET, client, owned

SIZES = [(0, 3), (1, 4), (7, 1), (10, 64), (999, 2), (1000, 7), (4096, 64)]


def slow_mixed(number):
    state = number * 0x9E3779B97F4A7C15 % 2**64
    state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    state = (state ^ (state >> 27)) * 0x94D049BB133111EB % 2**64
    return state ^ (state >> 31)


def slow_owners(num_items, num_nodes, seed):
    start = slow_mixed(seed % 2**64 ^ 0xD1B54A32D192ED03)
    keys = {item: slow_mixed((start + item) % 2**64) for item in range(num_items)}
    result = [0] * num_items
    for place, item in enumerate(sorted(keys, key=lambda item: (keys[item], item))):
        result[item] = place % num_nodes
    return result


@pytest.mark.parametrize("seed", [0, 1, -1, 2**63, 2**64 + 3])
@pytest.mark.parametrize(("num_items", "num_nodes"), SIZES)
def test_the_slow_twin_says_the_same(num_items, num_nodes, seed):
    assert owners(num_items, num_nodes=num_nodes, seed=seed).tolist() == slow_owners(
        num_items, num_nodes, seed
    )


def test_numbers_that_never_change():
    """Nodes with other versions of anything must agree: these were computed once."""
    three = owners(20, num_nodes=3, seed=0)
    assert "".join(map(str, three)) == "12000012001221112102"
    four = owners(20, num_nodes=4, seed=12345)
    assert "".join(map(str, four)) == "01101230220032213133"
    assert three.dtype == np.int32


def sample(item):
    return torch.full((25 + item,), float(item)), item


def epoch(cache):
    """Batches of all items through a cache, as a loader would; how many came from the source."""
    read = 0
    for batch in torch.randperm(ITEMS).split(7):
        items = batch.tolist()
        for item, entry in zip(items, cache.get_many(items), strict=True):
            if entry is None:
                read += 1
                cache.put(item, encode(sample(item)))
            else:
                tensor, label = decode(entry)
                assert label == item and torch.equal(tensor, sample(item)[0])
    return read


@pytest.mark.parametrize("tiers", [(1 << 20, 0), (0, 1 << 20), (1 << 20, 1 << 20)])
def test_two_caches_hold_each_item_once_and_read_the_source_once(tmp_path, tiers):
    memory, disk = tiers
    caches = [
        SampleCache(
            tmp_path / str(i),
            fingerprint="f",
            num_items=ITEMS,
            memory_bytes=memory,
            disk_bytes=disk,
        )
        for i in range(2)
    ]
    servers = [
        PeerServer(cache.tiers, host=HERE, secret=SECRET, fingerprint="f") for cache in caches
    ]
    for i, cache in enumerate(caches):
        cache.peers = client([server.address for server in servers], node=i)
    own = [len(owned(i, num_nodes=2)) for i in range(2)]
    assert epoch(caches[0]) == ITEMS
    for i in (1, 0, 1):
        caches[i].statistics(reset=True)
        assert epoch(caches[i]) == 0
        counts = caches[i].statistics()
        assert (counts.misses, counts.damaged, counts.peer_hits) == (0, 0, ITEMS - own[i])
        assert counts.memory_hits + counts.disk_hits == own[i] and (counts.disk_hits == 0) == (
            memory > 0
        )
    for i, cache in enumerate(caches):
        sizes = [size_of(encode(sample(item))) for item in owned(i, num_nodes=2)]
        counts = cache.statistics()
        assert (counts.memory_items, counts.memory_bytes) == (
            (own[i], sum(sizes)) if memory else (0, 0)
        )
        assert (counts.disk_items, counts.disk_bytes) == ((own[i], sum(sizes)) if disk else (0, 0))
        cache.close()
    for server in servers:
        server.close()
        assert not server.is_alive

"""The nodes of a run share one cache: each stores its part and gives it to the others."""

from __future__ import annotations

import functools
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import psutil
import torch.distributed as dist

from lightning_topt.basics.argument_checks import check_real, check_size, check_text, check_whole
from lightning_topt.data.cache.sample_cache import SampleCache
from lightning_topt.data.peers.client import NOWHERE, Peers
from lightning_topt.data.peers.prefetch import PrefetchingPeers
from lightning_topt.data.peers.protocol import own_address
from lightning_topt.data.peers.server import PeerServer

SECRET_BYTES = 32
IPV4, IPV6 = 2, 10  # address families, as psutil numbers them on Linux


@dataclass(frozen=True)
class CachePartition:
    """Options of a cache that is partitioned over the nodes of a run; they are the same on all
    nodes.

    - ``interface``: name or address of the network interface to the other nodes, the only one that
      is listened on; a name is usually the same on all nodes. None: the one that leads to the run's
      main node (``MASTER_ADDR``).
    - ``port``: of the first data set; further ones take the numbers that follow. 0: any free ones.
    - ``seed``: of who stores what.
    - ``timeout_seconds``: for another node's answer to begin. A node that does not answer is left
      out, and its samples are read from the source, until it has answered a question that is asked
      every ``retry_seconds`` in the background.
    - ``queue_bytes``: per process, of samples that were read and wait to be given to the node that
      stores them; what finds no place is dropped, and read from the source again.
    - ``prefetch_batches``, ``prefetch_bytes``: how far a training loader without workers fetches
      ahead from other nodes; the order of an epoch is known. 0 batches: not at all. Loaders with
      workers fetch ahead by their ``prefetch_factor``.

    Sizes are numbers or text (``"64MiB"``). Raises ValueError for values that mean nothing.
    """

    interface: str | None = None
    port: int = 0
    seed: int = 0
    timeout_seconds: float = 5.0
    retry_seconds: float = 10.0
    queue_bytes: int | str = 1 << 26
    prefetch_batches: int = 4
    prefetch_bytes: int | str = 1 << 28

    def __post_init__(self) -> None:
        if self.interface is not None:
            check_text(self.interface, name="interface")
        check_whole(self.port, name="port", least=0, most=(1 << 16) - 1)
        check_whole(self.seed, name="seed", least=None)
        check_whole(self.prefetch_batches, name="prefetch_batches", least=0)
        for name in ("timeout_seconds", "retry_seconds"):
            check_real(getattr(self, name), name=name, positive=True)
        for name in ("queue_bytes", "prefetch_bytes"):
            object.__setattr__(self, name, check_size(getattr(self, name), name=name))


class PartitionedCache:
    """A node's cache joined with those of the other nodes, until `close`; `server` is on one
    process per node.
    """

    def __init__(
        self, cache: SampleCache, *, server: PeerServer | None, addresses: list[tuple[str, int]]
    ) -> None:
        self.cache, self.server, self.addresses = cache, server, addresses

    def close(self) -> None:
        """Finish what is on its way to other nodes and stop serving. The cache stays open."""
        peers, self.cache.peers = self.cache.peers, None
        if peers is not None:
            peers.close()
        if self.server is not None:
            self.server.close()


def open_partitioned(
    make: Callable[[], SampleCache],
    partition: CachePartition,
    *,
    trainer: pl.Trainer,
    fingerprint: str,
    number: int,
) -> PartitionedCache:
    """Open this node's cache with `make` and join it with those of the other nodes; it is the run's
    `number`-th one.

    Every rank calls this for the same caches in the same order. Raises ValueError on all ranks
    where one cannot: for ranks that cannot talk yet, data that differ, interfaces that are not
    there, ports in use.
    """
    if not dist.is_initialized():
        raise ValueError(
            f"a cache partitioned over {trainer.num_nodes} nodes needs torch.distributed, which "
            f"{type(trainer.strategy).__name__} has not initialized when the loaders are made: use "
            "a DDP or topt strategy, or leave the partition out"
        )
    cache, offer = _opened(make, partition, trainer)
    try:
        offers = gathered({**offer, "fingerprint": fingerprint})
        _check(offers, num_nodes=trainer.num_nodes)
        assert cache is not None
        secret = gathered(secrets.token_bytes(SECRET_BYTES) if dist.get_rank() == 0 else b"")[0]
        server, said = None, {"node": trainer.node_rank}
        if trainer.local_rank == 0:
            find_host = functools.partial(_reachable, partition, offers, node=trainer.node_rank)
            port = partition.port + number if partition.port else 0
            server, answer = _serving(
                cache, find_host, port, secret=secret, fingerprint=fingerprint
            )
            said |= answer
        addresses = _addresses(gathered(said), trainer.num_nodes, server)
    except BaseException:
        if cache is not None:
            cache.close()
        raise
    peers = _peers(
        partition,
        addresses,
        trainer.node_rank,
        cache.num_items,
        secret=secret,
        fingerprint=fingerprint,
    )
    ahead = partition.prefetch_batches
    cache.peers = (
        PrefetchingPeers(peers, ahead_bytes=int(partition.prefetch_bytes)) if ahead else peers
    )
    return PartitionedCache(cache, server=server, addresses=addresses)


def _opened(
    make: Callable[[], SampleCache], partition: CachePartition, trainer: pl.Trainer
) -> tuple[SampleCache | None, dict[str, Any]]:
    """The cache and what this rank tells the others; an error is told too, lest they wait."""
    environment: Any = trainer.strategy.cluster_environment  # type: ignore[attr-defined]
    offer = {
        "node": trainer.node_rank,
        "address": _address(partition, towards=environment.main_address),
    }
    try:
        return make(), offer
    except (ValueError, OSError) as error:
        return None, {**offer, "error": f"{type(error).__name__}: {error}"}


def _serving(
    cache: SampleCache, find_host: Callable[[], str], port: int, *, secret: bytes, fingerprint: str
) -> tuple[PeerServer | None, dict[str, Any]]:
    if not cache.tiers:  # none could be opened, of which it has warned
        return None, {"address": NOWHERE}
    try:
        server = PeerServer(
            cache.tiers, host=find_host(), secret=secret, fingerprint=fingerprint, port=port
        )
    except (ValueError, RuntimeError, OSError) as error:
        return None, {"error": str(error)}
    return server, {"address": server.address}


def _peers(
    partition: CachePartition,
    addresses: list[tuple[str, int]],
    node: int,
    num_items: int,
    *,
    secret: bytes,
    fingerprint: str,
) -> Peers:
    return Peers(
        addresses,
        node=node,
        num_items=num_items,
        seed=partition.seed,
        secret=secret,
        fingerprint=fingerprint,
        timeout_seconds=partition.timeout_seconds,
        retry_seconds=partition.retry_seconds,
        queue_bytes=partition.queue_bytes,
    )


def gathered(value: Any) -> list[Any]:
    """Return what every rank gives, by rank. Their own words; nothing that comes from elsewhere is
    unpickled.
    """
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def _address(partition: CachePartition, *, towards: str) -> str:
    """Return the address of this node's interface, or an empty string with which `_check` finds the
    node that has none.
    """
    if partition.interface is not None:
        known = psutil.net_if_addrs()
        if partition.interface in known:
            found = {
                entry.family: entry.address.partition("%")[0]
                for entry in known[partition.interface]
            }
            return str(found.get(IPV4) or found.get(IPV6) or "")
        here = {entry.address for entries in known.values() for entry in entries}
        return partition.interface if partition.interface in here else ""
    try:
        return own_address(towards=towards)
    except ValueError:
        return ""


def _check(offers: list[dict[str, Any]], *, num_nodes: int) -> None:
    nodes = {offer["node"] for offer in offers}
    if nodes != set(range(num_nodes)):
        raise ValueError(
            f"the Trainer has {num_nodes} nodes, but the ranks say that they run on {sorted(nodes)}"
        )
    for offer in offers:
        if "error" in offer:
            raise ValueError(f"node {offer['node']} cannot open its cache: {offer['error']}")
        if not offer["address"]:
            raise ValueError(
                f"node {offer['node']} has no network interface to the other nodes as it is "
                "wanted: give CachePartition the interface's name, or its address"
            )
        if offer["fingerprint"] != offers[0]["fingerprint"]:
            raise ValueError(
                f"nodes {offers[0]['node']} and {offer['node']} have other data or transforms, or "
                "the same under other paths: a partitioned cache needs equal data sets (see "
                "data_version)"
            )


def _reachable(partition: CachePartition, offers: list[dict[str, Any]], *, node: int) -> str:
    """The address that others reach this node at: towards its own name, the main node may have
    found its loopback.
    """
    own = next(str(offer["address"]) for offer in offers if offer["node"] == node)
    if partition.interface is None and node == 0:
        return own_address(
            towards=next(str(offer["address"]) for offer in offers if offer["node"] != 0)
        )
    return own


def _addresses(
    said: list[dict[str, Any]], num_nodes: int, server: PeerServer | None
) -> list[tuple[str, int]]:
    """By node. Raises ValueError on all ranks if one could not serve."""
    errors = [f"node {words['node']} {words['error']}" for words in said if "error" in words]
    if errors:
        if server is not None:
            server.close()
        raise ValueError("the nodes cannot share their caches. " + "; ".join(errors))
    found = {words["node"]: words["address"] for words in said if "address" in words}
    return [found[node] for node in range(num_nodes)]

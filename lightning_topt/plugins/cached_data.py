"""A LightningDataModule with its samples kept in memory, on disk and on other nodes.

    CachedDataModule   wraps a DataModule: a cache before each of its map-style data sets
    CachePartition     options of a cache whose parts are on all nodes of the run

The caches themselves, their files and the protocol between nodes are in `lightning_topt.data`. What
a loader asks for goes to `BatchDataset.__getitems__`, where torch would only stack the samples:

    a hit, whole batch     `_read_at_once`: `MappedEntries.find_all` says where entries lie, `take`
                           copies them into rows; `collate` hands the batch on as it is
    a hit, some of it      `SampleCache.read_into`, row by row
    a miss, read           `CachedDataset._read` calls the source; some are drawn twice (`_check`)
    a miss, kept           `encode` makes the entry, `SampleCache.put_many` writes it where there is
                           room (`SegmentStore.write_many`); `verify_new` readies it for `find_all`
"""

from __future__ import annotations

import os
import secrets
import socket
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import psutil
import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset
from typing_extensions import override

from lightning_topt.basics.argument_checks import (
    check_folder,
    check_real,
    check_size,
    check_text,
    check_version,
    check_whole,
)
from lightning_topt.communication.collectives import values_of_group
from lightning_topt.data.cache.cached_batches import collate, is_stacking, with_caches
from lightning_topt.data.cache.fingerprint import fingerprint
from lightning_topt.data.cache.memory_file import available_bytes
from lightning_topt.data.cache.sample_cache import CacheStatistics, SampleCache
from lightning_topt.data.peers.client import NOWHERE, Peers
from lightning_topt.data.peers.protocol import own_address
from lightning_topt.data.peers.server import PeerServer
from lightning_topt.plugins.wrapped_data import LOADERS, WrappedDataModule

MEMORY_SHARE = 4  # a fourth of what is free
SECRET_BYTES = 32
IPV4, IPV6 = 2, 10  # address families, as psutil numbers them on Linux


class CachedDataModule(WrappedDataModule):
    """A DataModule with a cache before each of its map-style data sets.

    Everything else about `datamodule` stays as it is. The first epoch reads the source and fills
    the cache; later ones, and later runs, read memory, then disk, then the source. Nothing is ever
    evicted, so what finds no room is read from the source in every epoch. Samples are kept after
    the part of the data set that is marked with `lightning_topt.data.deterministic`, without a mark
    as ``__getitem__`` gives them; a part that turns out to be random is refused. All processes and
    jobs of a node that use the same directory share one cache.

    Sizes are numbers or text (``"8GiB"``). Without any, each data set may take a quarter of the
    memory that is free on the machine when its loader is first asked for. What is promised to
    another one of them is not free; nothing is written to disk (where there is no such memory,
    other than on Linux, as many bytes of disk are used). All ranks of a machine share that.

    Args:
        datamodule: with map-style data sets.
        directory: for the disk's part, on a local disk. A folder per data set, named by its
            fingerprint. None: in the user's cache directory (``$XDG_CACHE_HOME`` or ``~/.cache``),
            ``lightning_topt/samples/HOST``.
        memory_bytes: of shared memory per data set and node; it is freed with the last process that
            uses it.
        disk_bytes: of disk per data set and node.
        data_version: names the state of the data. None: sizes and times of the files that the data
            set's state names do.
        partition: each node of the run stores a part of the samples, and the others ask it before
            the source, so that room for one copy on all nodes together is enough. True:
            `CachePartition`'s defaults. Does nothing on one node.

    Raises ValueError for data sets that cannot be cached (iterable ones) or have no fingerprint,
    for no room at all, and at once for arguments that are none; TypeError for a `datamodule` that
    is none of `lightning`; `NotDeterministicError` while training when a sample drawn twice
    differs.
    """

    _changes = LOADERS

    def __init__(
        self,
        datamodule: pl.LightningDataModule,
        *,
        directory: str | Path | None = None,
        memory_bytes: int | str | None = None,
        disk_bytes: int | str | None = None,
        data_version: str | None = None,
        partition: CachePartition | bool = False,
    ) -> None:
        # Arguments first: what is set after the base class goes to the wrapped module.
        data_version = check_version(data_version, name="data_version")
        self.directory = (
            default_directory() if directory is None else check_folder(directory, name="directory")
        )
        self.has_default_room = memory_bytes is None and disk_bytes is None
        self.memory_bytes = check_size(
            0 if memory_bytes is None else memory_bytes, name="memory_bytes", least=0
        )
        self.disk_bytes = check_size(
            0 if disk_bytes is None else disk_bytes, name="disk_bytes", least=0
        )
        if not self.has_default_room and self.memory_bytes + self.disk_bytes == 0:
            raise ValueError(
                "a cache needs room: give memory_bytes or disk_bytes, per data set and node, or "
                "neither for defaults"
            )
        if not isinstance(partition, CachePartition | bool | None):
            raise ValueError(f"partition is True, False or a CachePartition, not {partition!r}")
        self.data_version = data_version
        # opened with the loaders, by fingerprint: equal data sets share one
        self._caches: dict[str, SampleCache] = {}
        self.partition = CachePartition() if partition is True else partition or None
        self._servers: list[PeerServer] = []  # to other nodes
        super().__init__(datamodule)

    def statistics(self, *, reset: bool = False) -> dict[str, CacheStatistics]:
        """Return what the caches did and hold, by fingerprint."""
        return {name: cache.statistics(reset=reset) for name, cache in self._caches.items()}

    def close(self) -> None:
        """Let go of the memory and files. The disk's part stays for the next run."""
        for server in self._servers:
            server.close()
        self._servers.clear()
        for cache in self._caches.values():
            cache.close()
        self._caches.clear()

    @override
    def _changed_loader(self, loader: DataLoader[Any], path: str) -> DataLoader[Any]:
        if isinstance(loader.dataset, IterableDataset):
            raise ValueError(
                f"{type(loader.dataset).__name__} is an IterableDataset: its samples have no "
                "numbers to be found again by. Give it __getitem__ and __len__, or leave its "
                "DataModule without a cache"
            )
        stacks = is_stacking(loader)
        replace_dataset(loader, with_caches(loader.dataset, self._cache_of, ready_batches=stacks))
        if stacks:
            replace_argument(loader, "collate_fn", collate)
        return loader

    def _cache_of(self, dataset: Any) -> SampleCache:
        name = fingerprint(dataset, data_version=self.data_version)
        if name not in self._caches:
            self._caches[name] = self._new_cache(name, num_items=len(dataset))
        return self._caches[name]

    def _new_cache(self, name: str, *, num_items: int) -> SampleCache:
        memory_bytes, disk_bytes = self._room()

        def make() -> SampleCache:
            return SampleCache(
                self.directory,
                fingerprint=name,
                num_items=num_items,
                memory_bytes=memory_bytes,
                disk_bytes=disk_bytes,
            )

        if self.partition is None or (self.trainer is not None and self.trainer.num_nodes == 1):
            return make()
        if self.trainer is None:
            raise ValueError(
                "a partitioned cache learns from the Trainer which nodes there are: pass this "
                "DataModule to fit, or leave the partition out to read its loaders alone"
            )
        # ordering: all ranks open the same caches one after the other
        cache, server = open_partitioned(
            make, self.partition, trainer=self.trainer, fingerprint=name, number=len(self._caches)
        )
        self._servers += [server] if server is not None else []
        return cache

    def _room(self) -> tuple[int, int]:
        # The bytes of memory and of disk for the next cache
        if not self.has_default_room:
            return self.memory_bytes, self.disk_bytes
        # What other caches may still take is not free.
        stores = [store for cache in self._caches.values() for store in cache.tiers]
        promised = sum(max(0, store.capacity_bytes - store.used_bytes) for store in stores)
        nbytes = default_memory_bytes(promised_bytes=promised)
        return (nbytes, 0) if hasattr(os, "memfd_create") else (0, nbytes)


def replace_dataset(loader: DataLoader[Any], dataset: Any) -> None:
    """Let `loader` read `dataset`; also when Lightning makes it anew with a distributed sampler."""
    replace_argument(loader, "dataset", dataset)
    if hasattr(loader, "__dataset"):
        object.__setattr__(loader, "__dataset", dataset)


def replace_argument(loader: DataLoader[Any], name: str, value: Any) -> None:
    """Set an attribute of `loader`, and the argument that Lightning has recorded of it."""
    object.__setattr__(loader, name, value)  # DataLoader itself refuses to change its data set
    if not hasattr(loader, "__pl_saved_args"):
        return
    # Lightning makes loaders anew from what it has recorded of them.
    names, arguments = (
        getattr(loader, "__pl_saved_arg_names"),
        list(getattr(loader, "__pl_saved_args")),
    )
    if name in names[: len(arguments)]:
        arguments[names.index(name)] = value
        object.__setattr__(loader, "__pl_saved_args", tuple(arguments))
    else:
        keywords = {**getattr(loader, "__pl_saved_kwargs"), name: value}
        object.__setattr__(loader, "__pl_saved_kwargs", keywords)


# ---- where a cache lies, and how large it is -----------------------------------------------------


def default_directory() -> Path:
    """Return ``lightning_topt/samples/HOST`` in the user's cache directory.

    That is ``$XDG_CACHE_HOME``, or ``~/.cache``, or a folder in /tmp for users without a home. With
    the host's name: homes of several machines may be one folder, which their locks and memories are
    not.
    """
    # A relative path is ignored, as the XDG standard says.
    configured = Path(os.environ.get("XDG_CACHE_HOME", ""))
    try:
        caches = configured if configured.is_absolute() else Path.home() / ".cache"
    except RuntimeError:
        caches = Path(tempfile.gettempdir()) / f"cache-{os.getuid()}"
    return caches / "lightning_topt" / "samples" / (socket.gethostname() or "localhost")


def default_memory_bytes(*, promised_bytes: int) -> int:
    """Return a fourth of the machine's free memory, less what is promised already.

    The memory of the control group counts, where that is less.
    """
    return max(1, (available_bytes() - promised_bytes) // MEMORY_SHARE)


# ---- nodes that share a cache --------------------------------------------------------------------


@dataclass(frozen=True)
class CachePartition:
    """Options of a cache that is partitioned over the nodes of a run.

    They are the same on all nodes.

    - ``interface``: name or address of the network interface to the other nodes, the only one that
      is listened on; a name is usually the same on all nodes. None: the one that leads to the run's
      main node (``MASTER_ADDR``).
    - ``port``: of the first data set; further ones take the numbers that follow. 0: any free ones.
    - ``seed``: of who stores what.
    - ``timeout_seconds``: for another node's answer to begin. A node that does not answer is left
      out, and its samples are read from the source, until it has answered a question that is asked
      every ``retry_seconds`` in the background.

    Raises ValueError for values that mean nothing.
    """

    interface: str | None = None
    port: int = 0
    seed: int = 0
    timeout_seconds: float = 5.0
    retry_seconds: float = 10.0

    def __post_init__(self) -> None:
        if self.interface is not None:
            check_text(self.interface, name="interface")
        check_whole(self.port, name="port", least=0, most=(1 << 16) - 1)
        check_whole(self.seed, name="seed", least=None)
        for name in ("timeout_seconds", "retry_seconds"):
            check_real(getattr(self, name), name=name, positive=True)


def open_partitioned(
    make: Callable[[], SampleCache],
    partition: CachePartition,
    *,
    trainer: pl.Trainer,
    fingerprint: str,
    number: int,
) -> tuple[SampleCache, PeerServer | None]:
    """Open this node's cache with `make` and join it with those of the other nodes.

    It is the run's `number`-th one. Every rank calls this for the same caches in the same order.
    One process per node gets the server. Raises ValueError on all ranks where one cannot: for ranks
    that cannot talk yet, data that differ, interfaces that are not there, ports in use.
    """
    if not dist.is_initialized():
        raise ValueError(
            f"a cache partitioned over {trainer.num_nodes} nodes needs torch.distributed, which "
            f"{type(trainer.strategy).__name__} has not initialized when the loaders are made: use "
            "a DDP or topt strategy, or leave the partition out"
        )
    cache, server, node = None, None, trainer.node_rank
    environment: Any = trainer.strategy.cluster_environment  # type: ignore[attr-defined]
    offer: dict[str, Any] = {
        "node": node,
        "address": _interface_address(partition, towards=environment.main_address),
        "fingerprint": fingerprint,
        "secret": secrets.token_bytes(SECRET_BYTES),
    }
    try:
        # phase 1: whether each cache is open, and where its node can be reached
        try:
            cache = make()
        except (ValueError, OSError) as error:  # the others must not wait for this rank
            offer["error"] = f"{type(error).__name__}: {error}"
        offers = values_of_group(offer)
        _check_offers(offers, num_nodes=trainer.num_nodes)
        assert cache is not None
        secret = offers[0]["secret"]  # of the run, by which nodes know each other
        # phase 2: one process per node serves its cache to the others
        answer: dict[str, Any] = {"node": node}
        if trainer.local_rank == 0 and not cache.tiers:  # none was opened, as it has warned
            answer["address"] = NOWHERE
        elif trainer.local_rank == 0:
            try:
                server = PeerServer(
                    cache.tiers,
                    host=_reachable(partition, offers, node=node),
                    secret=secret,
                    fingerprint=fingerprint,
                    port=partition.port + number if partition.port else 0,
                )
                answer["address"] = server.address
            except (ValueError, RuntimeError, OSError) as error:
                answer["error"] = str(error)
        # phase 3: all nodes serve, or none does
        answers = values_of_group(answer)
        errors = [f"node {each['node']} {each['error']}" for each in answers if "error" in each]
        if errors:
            raise ValueError("the nodes cannot share their caches. " + "; ".join(errors))
    except BaseException:
        if server is not None:
            server.close()
        if cache is not None:
            cache.close()
        raise
    addresses = {each["node"]: each["address"] for each in answers if "address" in each}
    cache.peers = Peers(
        [addresses[node] for node in range(trainer.num_nodes)],
        node=node,
        num_items=cache.num_items,
        seed=partition.seed,
        secret=secret,
        fingerprint=fingerprint,
        timeout_seconds=partition.timeout_seconds,
        retry_seconds=partition.retry_seconds,
    )
    return cache, server


def _interface_address(partition: CachePartition, *, towards: str) -> str:
    # The address of this node's interface to the others; empty where there is none, which
    # `_check_offers` reports on all ranks
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


def _check_offers(offers: list[dict[str, Any]], *, num_nodes: int) -> None:
    # The same error on all ranks, as all have the same offers.
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
    # The address at which others reach this node. Towards its own name, the main node may have
    # found its loopback.
    own = next(str(offer["address"]) for offer in offers if offer["node"] == node)
    if partition.interface is None and node == 0:
        return own_address(
            towards=next(str(offer["address"]) for offer in offers if offer["node"] != 0)
        )
    return own

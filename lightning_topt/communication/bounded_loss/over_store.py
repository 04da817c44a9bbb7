"""An exchange between ranks that share a torch.distributed store; the only file here with torch.

Addresses, the size of datagrams and the session's key go over the store.
"""

from __future__ import annotations

import json
import os
import secrets
from datetime import timedelta
from typing import Any

from torch.distributed.distributed_c10d import Store

from lightning_topt.communication.bounded_loss.datagram import DEFAULT_DATAGRAM_BYTES
from lightning_topt.communication.bounded_loss.endpoint import open_endpoint, own_host
from lightning_topt.communication.bounded_loss.exchange import BoundedLossExchange, WireOptions


def connect_over_store(
    store: Store,
    *,
    rank: int,
    world_size: int,
    host: str | None = None,
    timeout_seconds: float = 60.0,
    rate: float | None = None,
    mark: bool = True,
    bits: int = 32,
) -> BoundedLossExchange:
    """Connect to the other ranks; all of them call this.

    Args:
        store: shared by the ranks. Its keys are unused, as those of a new PrefixStore are.
        rank: this rank.
        world_size: how many there are.
        host: IPv4 address that sockets bind to. None: that of the interface that
            GLOO_SOCKET_IFNAME names, else the one that MASTER_ADDR is reached from, else loopback.
        timeout_seconds: for ranks to come, and later to answer.
        rate: bytes per second at most that leave this rank.
        mark: set DSCP and ECN.
        bits: of a value on its way, 32 or 16.

    Raises:
        ConnectionFailedError: a rank could not be reached.
    """
    if world_size == 1:
        return BoundedLossExchange(rank, [("127.0.0.1", 0, 0)], 0, endpoint=None)
    endpoint = open_endpoint(host or own_host(os.environ))
    limit = timedelta(seconds=timeout_seconds)
    try:
        if rank == 0:
            store.set("key", str(secrets.randbits(64) - (1 << 63)))
        addresses = _gathered(
            store, "address", list(endpoint.address), rank=rank, world_size=world_size, limit=limit
        )
        others = [tuple(each) for peer, each in enumerate(addresses) if peer != rank]
        sizes = _gathered(
            store,
            "datagram",
            endpoint.largest_datagram(others),
            rank=rank,
            world_size=world_size,
            limit=limit,
        )
        store.wait(["key"], limit)
        options = WireOptions(
            datagram_bytes=min(DEFAULT_DATAGRAM_BYTES, *sizes), rate=rate, mark=mark, bits=bits
        )
        return BoundedLossExchange(
            rank,
            [tuple(each) for each in addresses],
            int(store.get("key")),
            endpoint=endpoint,
            timeout_seconds=timeout_seconds,
            options=options,
        )
    except BaseException:
        endpoint.close()
        raise


def _gathered(
    store: Store, name: str, own: object, *, rank: int, world_size: int, limit: timedelta
) -> list[Any]:
    """Return every rank's `own`, in rank order."""
    store.set(f"{name}/{rank}", json.dumps(own))
    keys = [f"{name}/{peer}" for peer in range(world_size)]
    store.wait(keys, limit)
    return [json.loads(store.get(key)) for key in keys]

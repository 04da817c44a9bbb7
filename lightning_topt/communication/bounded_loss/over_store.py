"""An exchange between the ranks of a torch.distributed store: addresses and the session's key go
over it.
"""

from __future__ import annotations

import json
import os
import secrets
from datetime import timedelta
from typing import Any

from torch.distributed.distributed_c10d import Store

from lightning_topt.communication.bounded_loss.datagram import DEFAULT_DATAGRAM_BYTES
from lightning_topt.communication.bounded_loss.endpoint import open_endpoint
from lightning_topt.communication.bounded_loss.exchange import BoundedLossExchange, WireOptions
from lightning_topt.communication.bounded_loss.interfaces import own_host


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
    """Collective call: an exchange between `world_size` ranks that share `store`, whose keys are
    unused (a PrefixStore's).

    Sockets bind to `host`; None: to the address of the interface that GLOO_SOCKET_IFNAME names,
    else to the one that MASTER_ADDR is reached from, else to the loopback. `rate`: bytes per second
    at most; `bits` of a value on its way: 32 or 16. Raises ConnectionFailedError.
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
    """Every rank's `own`, in rank order."""
    store.set(f"{name}/{rank}", json.dumps(own))
    keys = [f"{name}/{peer}" for peer in range(world_size)]
    store.wait(keys, limit)
    return [json.loads(store.get(key)) for key in keys]

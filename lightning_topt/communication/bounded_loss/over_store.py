"""An exchange between ranks that share a torch.distributed store; the only file here with torch.

Addresses and the size of datagrams go over the store. So does what ranks agree on the session's key
with, which says nothing of the key: torch's store answers everybody, on all interfaces, without a
password. Who writes to it can still disturb the job, as any job of torch.distributed.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
from datetime import timedelta
from typing import Any

from torch.distributed.distributed_c10d import Store

from lightning_topt.communication.bounded_loss.datagram import DEFAULT_DATAGRAM_BYTES
from lightning_topt.communication.bounded_loss.endpoint import open_endpoint, own_host
from lightning_topt.communication.bounded_loss.exchange import BoundedLossExchange, WireOptions

# A prime of 2048 bits, of which 2 is a generator (RFC 3526, group 14).
_PRIME = int(
    "ffffffffffffffffc90fdaa22168c234c4c6628b80dc1cd1"
    "29024e088a67cc74020bbea63b139b22514a08798e3404dd"
    "ef9519b3cd3a431b302b0a6df25f14374fe1356d6d51c245"
    "e485b576625e7ec6f44c42e9a637ed6b0bff5cb6f406b7ed"
    "ee386bfb5a899fa5ae9f24117c4b1fe649286651ece45b3d"
    "c2007cb8a163bf0598da48361c55d39a69163fa8fd24cf5f"
    "83655d23dca3ad961c62f356208552bb9ed529077096966d"
    "670c354e4abc9804f1746c08ca18217c32905e462e36ce3b"
    "e39e772c180e86039b2783a2ec07a28fb5c55df06f4c52c9"
    "de2bcbf6955817183995497cea956ae515d2261898fa0510"
    "15728e5a8aacaa68ffffffffffffffff",
    16,
)


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
        DistStoreError: a rank did not come in time.
    """
    if world_size == 1:
        return BoundedLossExchange(rank, [("127.0.0.1", 0, 0)], 0, endpoint=None)
    endpoint = open_endpoint(host or own_host(os.environ))
    limit = timedelta(seconds=timeout_seconds)
    try:
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
        options = WireOptions(
            datagram_bytes=min(DEFAULT_DATAGRAM_BYTES, *sizes), rate=rate, mark=mark, bits=bits
        )
        return BoundedLossExchange(
            rank,
            [tuple(each) for each in addresses],
            _agreed_key(store, rank=rank, world_size=world_size, limit=limit),
            endpoint=endpoint,
            timeout_seconds=timeout_seconds,
            options=options,
        )
    except BaseException:
        endpoint.close()
        raise


def _agreed_key(store: Store, *, rank: int, world_size: int, limit: timedelta) -> int:
    """Return 64 random bits, the same on all ranks, that do not show in the store.

    Rank 0 draws them, and hides them from all but one rank at a time by a number that only both
    know (Diffie-Hellman).
    """
    secret = secrets.randbits(256)
    public = _gathered(
        store, "public", pow(2, secret, _PRIME), rank=rank, world_size=world_size, limit=limit
    )

    def hidden(bits: int, other: int) -> int:
        shared = pow(public[other], secret, _PRIME).to_bytes(256, "big")
        return bits ^ int.from_bytes(hashlib.blake2b(shared, digest_size=8).digest(), "big")

    if rank == 0:
        bits = secrets.randbits(64)
        for other in range(1, world_size):
            store.set(f"hidden/{other}", str(hidden(bits, other)))
    else:
        store.wait([f"hidden/{rank}"], limit)
        bits = hidden(int(store.get(f"hidden/{rank}")), 0)
    return bits - (1 << 63)


def _gathered(
    store: Store, name: str, own: object, *, rank: int, world_size: int, limit: timedelta
) -> list[Any]:
    # Every rank's `own`, in rank order
    store.set(f"{name}/{rank}", json.dumps(own))
    keys = [f"{name}/{peer}" for peer in range(world_size)]
    store.wait(keys, limit)
    return [json.loads(store.get(key)) for key in keys]

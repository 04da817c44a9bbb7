"""Restarts by torchrun: a part of its store for each attempt.

With ``--max-restarts`` torchrun (torch 2.13, rendezvous c10d) gives every attempt the store of the
one before, and gloo then connects to the addresses of ranks that are dead: the second attempt never
begins. How often a node was restarted is counted by each node for itself, so the ranks agree on a
name for the attempt instead.
"""

from __future__ import annotations

import json
import os
import secrets
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

PAUSE_SECONDS = 0.02
NAME = "lightning_topt/attempt"


def shares_store_between_attempts() -> bool:
    """Return whether torchrun started this rank, may start it again, and then gives it the same
    store.
    """
    shared = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return shared and int(os.environ.get("TORCHELASTIC_MAX_RESTARTS") or 0) > 0


def init_attempt(
    backend: str,
    *,
    rank: int,
    world_size: int,
    timeout: timedelta,
    device_id: torch.device | None = None,
) -> None:
    """Make the default process group by torchrun's environment, in a part of its store that no
    other attempt uses.

    Raises TimeoutError where not all ranks come.
    """
    store, _, _ = next(rendezvous("env://", rank, world_size, timeout=timeout))
    own = attempt_store(store, rank=rank, world_size=world_size, timeout=timeout)
    options: dict[str, Any] = {
        "rank": rank,
        "world_size": world_size,
        "timeout": timeout,
        "device_id": device_id,
    }
    dist.init_process_group(backend, store=own, **options)


def attempt_store(store: Store, *, rank: int, world_size: int, timeout: timedelta) -> PrefixStore:
    """Return the part of `store` of the ranks that call this now, whatever ranks of earlier
    attempts left in `store`.

    Every rank leaves a token. Rank 0 proposes a name for the tokens that it sees, anew when one is
    replaced, until every rank has found its own token in the proposal. Raises TimeoutError.
    """
    token, deadline = secrets.token_hex(8), time.monotonic() + timeout.total_seconds()
    store.set(f"{NAME}/token/{rank}", token)
    tokens: list[str] = []
    while True:
        if rank == 0 and (seen := _tokens(store, world_size)) != tokens and all(seen):
            tokens = seen
            store.set(f"{NAME}/proposal", json.dumps([secrets.token_hex(8), tokens]))
        name, proposed = _proposal(store)
        if len(proposed) == world_size and proposed[rank] == token:
            store.set(f"{NAME}/{name}/joined/{rank}", token)
            missing = [
                other
                for other in range(world_size)
                if not store.check([f"{NAME}/{name}/joined/{other}"])
            ]
            if not missing and (rank == 0 or store.check([f"{NAME}/{name}/begun"])):
                store.set(f"{NAME}/{name}/begun", "1")
                return PrefixStore(f"{NAME}/{name}", store)
        if time.monotonic() > deadline:
            raise TimeoutError(
                f"rank {rank} waited {timeout.total_seconds():g} s for all {world_size} ranks of "
                "this attempt"
            )
        time.sleep(PAUSE_SECONDS)


def _tokens(store: Store, world_size: int) -> list[str]:
    keys = [f"{NAME}/token/{rank}" for rank in range(world_size)]
    return [store.get(key).decode() if store.check([key]) else "" for key in keys]


def _proposal(store: Store) -> tuple[str, list[str]]:
    if not store.check([f"{NAME}/proposal"]):
        return "", []
    name, tokens = json.loads(store.get(f"{NAME}/proposal"))
    return name, tokens

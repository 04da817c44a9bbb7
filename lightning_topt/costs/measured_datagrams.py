"""Loss, round trip and rate of datagrams between ranks, measured by the exchange that uses them."""

from __future__ import annotations

import itertools
import time
from contextlib import suppress

import numpy as np
from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

from lightning_topt.communication.bounded_loss import BoundedLossExchange, ConnectionFailedError
from lightning_topt.communication.bounded_loss.over_store import connect_over_store
from lightning_topt.costs.groups import Group, ranks_of_groups
from lightning_topt.costs.node_types import DatagramPath
from lightning_topt.costs.ranks import average, own_rank, world_size

SMALL_BYTES, LARGE_BYTES = 4 << 10, 4 << 20
TOLERANCE = 0.01
CONNECT_SECONDS = 20.0  # a firewall that drops datagrams in silence is found out after that
_SMALL_REPEATS, _LEAST_REPEATS, _MOST_REPEATS = 8, 3, 50
_made = itertools.count()  # made in the same order on all ranks


def measure_datagrams(group: Group, *, budget_seconds: float) -> DatagramPath | None:
    """Return what one rank gets in groups like `group`, all at the same time; None where datagrams
    do not get through.

    The same on all ranks, each of which calls it. The loss is that of the measurement's own
    traffic, at the rate it found.
    """
    store = _get_default_store()
    number = next(_made)
    members = next(ranks for ranks in ranks_of_groups(group, world_size()) if own_rank() in ranks)
    exchange = None
    # the others are told below
    with suppress(ConnectionFailedError, OSError, RuntimeError, ValueError):
        exchange = connect_over_store(
            PrefixStore(f"lightning_topt/datagrams/{number}/{members[0]}", store),
            rank=members.index(own_rank()),
            world_size=group.size,
            timeout_seconds=CONNECT_SECONDS,
        )
    try:
        if average([float(exchange is not None)])[0] < 1 or exchange is None:
            return None
        return _measured(exchange, budget_seconds=budget_seconds)
    finally:
        if exchange is not None:
            exchange.close()


def _measured(exchange: BoundedLossExchange, *, budget_seconds: float) -> DatagramPath:
    small = [_seconds(exchange, 0, SMALL_BYTES) for _ in range(_SMALL_REPEATS)]
    first = average([_seconds(exchange, 1, LARGE_BYTES)])[0]  # finds the rate
    exchange.statistics()
    repeats = int(np.clip(budget_seconds / max(first, 1e-6), _LEAST_REPEATS, _MOST_REPEATS))
    large = [_seconds(exchange, 1, LARGE_BYTES) for _ in range(repeats)]
    found = exchange.statistics()
    assert found is not None
    shortest = float(np.median(small))
    sent = 2 * LARGE_BYTES * (exchange.world_size - 1) / exchange.world_size
    moving = max(float(np.median(large)) - shortest, 0.1 * min(large))
    round_trip, loss, bandwidth = average(
        [found.round_trip_seconds, found.path_loss, sent / moving]
    )
    return DatagramPath(max(round_trip, 0.0), min(max(loss, 0.0), 0.9), bandwidth)


def _seconds(exchange: BoundedLossExchange, bucket: int, nbytes: int) -> float:
    values = np.ones(nbytes // 4, np.float32)
    start = time.perf_counter()
    exchange.start(bucket, values, out=np.empty_like(values), tolerance=TOLERANCE).wait(
        CONNECT_SECONDS
    )
    return time.perf_counter() - start

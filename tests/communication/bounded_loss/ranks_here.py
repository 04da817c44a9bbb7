"""Ranks of an exchange in this process: each has its thread and sockets, by the loopback."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from lightning_topt.communication.bounded_loss.delivery import Outcome
from lightning_topt.communication.bounded_loss.exchange import (
    BoundedLossExchange,
    WireOptions,
    open_endpoint,
)
from tests.communication.bounded_loss.datagram_proxy import DatagramProxy, Faults

SECONDS = 30.0


@contextlib.contextmanager
def exchanges(
    world_size: int,
    *,
    faults: Faults | None = None,
    options: WireOptions | None = None,
    timeout_seconds: float = SECONDS,
) -> Iterator[list[BoundedLossExchange]]:
    """Connected exchanges by rank; datagrams go through a proxy where there are `faults`."""
    endpoints = [open_endpoint("127.0.0.1") for _ in range(world_size)]
    addresses = [endpoint.address for endpoint in endpoints]
    key = secrets.randbits(64) - (1 << 63)
    proxy = None if faults is None else DatagramProxy(addresses, faults)

    def make(rank: int) -> BoundedLossExchange:
        return BoundedLossExchange(
            rank,
            addresses if proxy is None else proxy.addresses(rank),
            key,
            endpoint=endpoints[rank],
            timeout_seconds=timeout_seconds,
            options=options,
        )

    with ThreadPoolExecutor(world_size) as pool:
        made = list(pool.map(make, range(world_size)))
        try:
            yield made
        finally:
            list(pool.map(BoundedLossExchange.close, made))
            if proxy is not None:
                proxy.close()


def step(
    ranks: Sequence[BoundedLossExchange],
    contributions: Sequence[np.ndarray],
    *,
    bucket: int = 0,
    **options: object,
) -> tuple[list[np.ndarray], list[Outcome]]:
    """One bucket on all ranks: the sums by rank, and what became of each contribution."""
    sums = [np.full_like(values, np.nan) for values in contributions]
    handles = [
        exchange.start(bucket, values, out=out, **options)  # type: ignore[arg-type]
        for exchange, values, out in zip(ranks, contributions, sums, strict=True)
    ]
    return sums, [handle.wait(SECONDS) for handle in handles]


def whole_numbers(numel: int, *, seed: int) -> np.ndarray:
    """Whole numbers as float32, none of them 0: sums are exact, and what is missing shows."""
    random = np.random.default_rng(seed)
    return (random.integers(1, 1000, numel) * random.choice([-1, 1], numel)).astype(np.float32)


def delivered(values: np.ndarray, outcome: Outcome) -> np.ndarray:
    """The part of a contribution that went into the sum."""
    taken = values.copy()
    for start, stop in outcome.ranges:
        taken[start:stop] = 0
    return taken

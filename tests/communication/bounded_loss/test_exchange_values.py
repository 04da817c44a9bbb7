"""Sums, what is missing of them, and what their senders know about it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from lightning_topt.communication.bounded_loss.exchange import BoundedLossExchange, WireOptions
from tests.communication.bounded_loss.datagram_proxy import Faults
from tests.communication.bounded_loss.ranks_here import (
    SECONDS,
    delivered,
    exchanges,
    step,
    whole_numbers,
)
from tests.launch import run_ranks

SIZES = [1, 357, 359, 100_003]
SMALL_PARTS = WireOptions(part_bytes=1 << 16)
BAD_NETWORK = Faults(lost=0.02, doubled=0.02, cut=0.02, late=0.05)


@pytest.mark.parametrize("world_size", [2, 3])
def test_without_loss_it_is_the_sum(world_size):
    with exchanges(world_size, options=SMALL_PARTS) as ranks:
        for bucket, numel in enumerate(SIZES):
            contributions = [whole_numbers(numel, seed=rank) for rank in range(world_size)]
            sums, outcomes = step(ranks, contributions, bucket=bucket, scale=0.5)
            for found, outcome in zip(sums, outcomes, strict=True):
                np.testing.assert_array_equal(found, sum(contributions) * 0.5)
                assert outcome.lost_share == 0 and len(outcome.ranges) == 0


def test_order_of_additions_is_that_of_ranks():
    contributions = [
        np.random.default_rng(rank).normal(size=50_000).astype(np.float32) for rank in range(3)
    ]
    with exchanges(3) as ranks:
        sums, _ = step(ranks, contributions)
    expected = (contributions[0] + contributions[1]) + contributions[2]
    for found in sums:
        np.testing.assert_array_equal(found, expected)


def test_delivered_and_residual_are_the_contribution():
    """Under loss, doubling, cutting and reordering, element for element; several steps."""
    lost = 0.0
    with exchanges(3, faults=BAD_NETWORK, options=SMALL_PARTS) as ranks:
        for number in range(4):
            for bucket, numel in enumerate([100_003, 40_000]):
                contributions = [whole_numbers(numel, seed=10 * number + rank) for rank in range(3)]
                kept = [values.copy() for values in contributions]
                sums, outcomes = step(ranks, contributions, bucket=bucket, tolerance=0.2)
                expected = sum(
                    delivered(values, outcome)
                    for values, outcome in zip(kept, outcomes, strict=True)
                )
                for found in sums:
                    np.testing.assert_array_equal(found, expected)
                for values, before, outcome in zip(contributions, kept, outcomes, strict=True):
                    np.testing.assert_array_equal(values, before)
                    residual = np.zeros(numel, np.float32)
                    outcome.add_to(residual)
                    np.testing.assert_array_equal(delivered(values, outcome) + residual, before)
                    outcome.keep_only(values)
                    np.testing.assert_array_equal(values, residual)
                    assert outcome.lost_share <= 0.2
                    lost += outcome.lost_share
        statistics = [exchange.statistics() for exchange in ranks]
    assert lost > 0  # else nothing was tested
    assert all(
        each.path_loss > 0 and each.datagrams_resent > 0 and each.rejected > 0
        for each in statistics
    )


@pytest.mark.parametrize("exact", [False, True])
def test_nothing_is_lost_where_nothing_may(exact):
    """Without tolerance, and in ranges that are exact."""
    contributions = [whole_numbers(80_000, seed=rank) for rank in range(2)]
    ranges = ((0, 10_000), (30_000, 30_001), (79_000, 80_000))
    with exchanges(2, faults=Faults(lost=0.05)) as ranks:
        for _ in range(3):
            sums, outcomes = step(
                ranks, contributions, tolerance=0.2 if exact else 0.0, exact=ranges if exact else ()
            )
            for low, high in ranges if exact else ((0, 80_000),):
                np.testing.assert_array_equal(sums[0][low:high], sum(contributions)[low:high])
            if not exact:
                assert not any(outcome.lost_share for outcome in outcomes)


def in_halves(values: np.ndarray) -> np.ndarray:
    """As torch rounds to bfloat16."""
    return torch.from_numpy(values).bfloat16().float().numpy()


@pytest.mark.parametrize(("world_size", "numel"), [(2, 70_001), (3, 50_000)])
def test_16_bits_on_the_way(world_size, numel):
    """Contributions and means are rounded as by torch, sums are float32; losses are known."""
    exact = ((7, 300), (10_000, 20_001))
    with exchanges(world_size, faults=Faults(lost=0.05), options=WireOptions(bits=16)) as ranks:
        for number in range(3):
            contributions = [
                np.random.default_rng([number, rank]).standard_normal(numel).astype(np.float32)
                for rank in range(world_size)
            ]
            sums, outcomes = step(
                ranks, contributions, tolerance=0.2, exact=exact, scale=1 / world_size
            )
            total = np.zeros(numel, np.float32)
            for values, outcome in zip(contributions, outcomes, strict=True):
                total += in_halves(delivered(values, outcome))
                missing = [values[start:stop] for start, stop in outcome.ranges]
                np.testing.assert_array_equal(
                    outcome.values, np.concatenate([*missing, np.empty(0, np.float32)])
                )
                assert not any(
                    start < high and low < stop
                    for start, stop in outcome.ranges
                    for low, high in exact
                )
            for found in sums:
                np.testing.assert_array_equal(found, in_halves(total * np.float32(1 / world_size)))
    assert ranks[0].bytes_sent < 3 * 3 * numel * 2 * 2


def test_four_ranks_share_their_links():
    """Lost messages hold nothing up."""
    contributions = [whole_numbers(2_000_000, seed=rank) for rank in range(4)]
    for lost in (0.0, 0.03):
        with exchanges(4, faults=Faults(lost=lost)) as ranks:
            sums, _ = step(ranks, contributions, tolerance=0.0)
        for found in sums:
            np.testing.assert_array_equal(found, sum(contributions))


def test_buckets_in_flight_together_and_in_another_order():
    contributions = [
        [whole_numbers(30_000 + bucket, seed=7 * bucket + rank) for bucket in range(4)]
        for rank in range(2)
    ]
    sums = [[np.empty_like(values) for values in own] for own in contributions]
    with exchanges(2) as ranks:
        handles = []
        for rank, order in enumerate(([0, 1, 2, 3], [3, 1, 0, 2])):
            for bucket in order:
                handles.append(
                    ranks[rank].start(
                        bucket, contributions[rank][bucket], out=sums[rank][bucket], priority=bucket
                    )
                )
        for handle in handles:
            handle.wait(SECONDS)
    for rank in range(2):
        for bucket in range(4):
            np.testing.assert_array_equal(
                sums[rank][bucket], contributions[0][bucket] + contributions[1][bucket]
            )


@pytest.mark.parametrize(
    "options", [WireOptions(offload=False), WireOptions(9000), WireOptions(datagram_bytes=228)]
)
def test_ways_of_sending(options):
    contributions = [whole_numbers(200_000, seed=rank) for rank in range(2)]
    with exchanges(2, options=options) as ranks:
        sums, _ = step(ranks, contributions)
        np.testing.assert_array_equal(sums[1], sum(contributions))


def test_a_single_rank():
    exchange = BoundedLossExchange(0, [("127.0.0.1", 0, 0)], 0, endpoint=None)
    values = np.arange(5, dtype=np.float32)
    out = np.empty_like(values)
    handle = exchange.start(0, values, out=out, scale=2.0)
    assert handle.is_completed() and handle.wait().lost_share == 0
    np.testing.assert_array_equal(out, [0, 2, 4, 6, 8])
    exchange.close()


def test_mistakes_are_told():
    values, out = np.ones(10, np.float32), np.empty(10, np.float32)
    with exchanges(2) as ranks:
        for wrong, said in [
            ({"values": values.astype(np.float64)}, "float32"),
            ({"out": np.ones(9, np.float32)}, "takes 10 elements"),
            ({"out": values}, "not `values`"),
            ({"tolerance": 1.0}, "tolerance"),
        ]:
            arguments = {"bucket": 0, "values": values, "out": out, **wrong}
            with pytest.raises(ValueError, match=said):
                ranks[0].start(arguments.pop("bucket"), arguments.pop("values"), **arguments)
        step(ranks, [values, values], bucket=1)
        with pytest.raises(ValueError, match="10 elements"):
            ranks[0].start(1, np.ones(11, np.float32), out=np.empty(11, np.float32))
    with pytest.raises(ValueError, match="closed"):
        ranks[0].start(1, values, out=out)


def _over_store(rank: int, world_size: int) -> list[float]:
    import torch
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

    from lightning_topt.communication.bounded_loss.exchange import connect_over_store

    store = PrefixStore("bounded", _get_default_store())
    exchange = connect_over_store(store, rank=rank, world_size=world_size, timeout_seconds=20)
    torch.manual_seed(rank)
    gradient = torch.randn(30_000)
    expected = gradient.clone()
    dist.all_reduce(expected)
    total = torch.empty_like(gradient)
    exchange.start(0, gradient.numpy(), out=total.numpy(), tolerance=0.0).wait(20)
    difference = float((total - expected).abs().max())
    exchange.close()
    return [difference, float(total.double().sum())]


def test_connected_over_a_store_of_the_process_group():
    results = run_ranks(_over_store, 2, 2)
    assert results[0][0] <= 1e-6 and results[0][1] == results[1][1]

"""When sharing pays: the comparison by hand, the search over groups against enumeration, and a
measured gather.
"""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from lightning_topt.optim.adaptive_step import (
    GatherCost,
    GroupCost,
    choose_pieces,
    decide,
    measure_gather,
)
from lightning_topt.optim.pieces import Piece, Share, assign_pieces
from tests.launch import run_ranks

FREE, SLOW = GatherCost(0.0, 0.0), GatherCost(1.0, 1e-3)


def rows(index, cost, *, group=0, nbytes=1000):
    return Share(index, 1000, nbytes, cost, True, group)


def test_the_comparison():
    cost = GroupCost(0, sent_bytes=1000, update_seconds=4.0, shared_seconds=2.5)
    for per_byte, pays in [(1.4e-3, True), (1.6e-3, False)]:
        (result,) = decide([cost], world_size=2, gather=GatherCost(0.0, per_byte))
        assert result.pays == result.shared == pays
        assert result.gather_seconds == pytest.approx(1000 * per_byte)
    (result,) = decide([cost], world_size=2, gather=GatherCost(0.2, 1.4e-3))
    assert not result.pays and result.gather_seconds == pytest.approx(1.6)


def test_equal_is_not_enough():
    (result,) = decide([GroupCost(0, 0, 0.0, 0.0)], world_size=2, gather=FREE)
    assert not result.pays
    (result,) = decide([GroupCost(0, 10, 2.0, 1.0)], world_size=2, gather=GatherCost(0.0, 0.1))
    assert not result.pays


def test_groups_pay_the_latency_together():
    costs = [GroupCost(0, 300, 1.0, 0.5), GroupCost(1, 100, 1.0, 0.5)]
    first, second = decide(costs, world_size=2, gather=GatherCost(0.4, 0.0))
    assert (first.gather_seconds, second.gather_seconds) == pytest.approx((0.3, 0.1))
    first, second = decide(
        [GroupCost(g, 0, 1.0, 0.5) for g in (0, 1)], world_size=2, gather=GatherCost(0.4, 0.0)
    )
    assert first.gather_seconds == second.gather_seconds == pytest.approx(0.2)


def test_one_rank():
    (alone,) = decide([GroupCost(0, 1, 1.0, 0.1)], world_size=1, gather=FREE, always=True)
    assert not alone.shared and "only one rank" in alone.reason


def step_seconds(groups, shares, sent, world_size, gather):
    """The slow twin's view of a step: what is shared on the busiest rank, what is not, and the
    gather.
    """
    shared = [s for s in shares if s.group in groups]
    rest = sum(s.cost_seconds for s in shares if s.group not in groups)
    if not shared:
        return rest
    busy, by_index = [0.0] * world_size, {s.index: s for s in shared}
    for piece in assign_pieces(shared, world_size=world_size):
        share = by_index[piece.index]
        busy[piece.owner] += share.cost_seconds * (piece.stop - piece.start) / share.rows
    sent_bytes = sum(sent[s.index] for s in shared)
    return rest + max(busy) + gather.latency_seconds + sent_bytes * gather.seconds_per_byte


@pytest.mark.parametrize("world_size", [2, 3])
def test_chosen_groups_against_enumeration(world_size):
    rng = random.Random(world_size)
    right, gains = 0, []
    for _ in range(40):
        shares = [Share(i, 100, 100, rng.random(), rng.random() < 0.7, i // 2) for i in range(8)]
        sent = {i: rng.randrange(1, 100) for i in range(8)}
        gather = GatherCost(rng.random() * 0.1, rng.random() * 0.02)
        pieces, decisions = choose_pieces(
            shares, sent_bytes=sent, world_size=world_size, gather=gather
        )
        chosen = {d.group for d in decisions if d.shared}
        assert [d.group for d in decisions] == [0, 1, 2, 3]
        assert {shares[piece.index].group for piece in pieces} == chosen
        seconds = {
            groups: step_seconds(groups, shares, sent, world_size, gather)
            for size in range(5)
            for groups in itertools.combinations(range(4), size)
        }
        ours, best, plain = seconds[tuple(sorted(chosen))], min(seconds.values()), seconds[()]
        assert ours <= plain + 1e-9  # never worse than not sharing, by its own numbers
        right += ours <= best + 1e-9
        gains.append((plain - ours) / (plain - best) if plain > best else 1.0)
    assert right >= 30 and sum(gains) / len(gains) > 0.95


def test_what_is_declined_does_not_spoil_the_rest():
    shares = [rows(0, 1.0), rows(1, 1e-3, group=1)]
    pieces, decisions = choose_pieces(
        shares, sent_bytes={0: 100, 1: 100_000}, world_size=2, gather=GatherCost(0.0, 1e-3)
    )
    assert [d.shared for d in decisions] == [True, False]
    assert {piece.index for piece in pieces} == {0}
    pieces, decisions = choose_pieces(
        shares, sent_bytes={0: 1, 1: 1}, world_size=2, gather=GatherCost(9.0, 0.0)
    )
    assert pieces == [] and not any(d.shared for d in decisions)
    pieces, decisions = choose_pieces(
        shares, sent_bytes={0: 1, 1: 1}, world_size=2, gather=SLOW, always=True
    )
    assert {piece.index for piece in pieces} == {0, 1} and not any(d.pays for d in decisions)


def test_one_matrix_that_stays_whole_never_pays():
    """t_op (1 - 1/P) would promise half; the busiest rank still does all of it."""
    pieces, (result,) = choose_pieces(
        [Share(0, 10, 100, 5.0, False)],
        sent_bytes={0: 100},
        world_size=2,
        gather=GatherCost(1e-6, 1e-12),
    )
    assert (
        not result.pays and result.shared_seconds == result.update_seconds == 5.0 and pieces == []
    )


def _measured(rank, world_size):
    torch.manual_seed(0)
    parameters = [torch.randn(300, 200), torch.randn(7), torch.randn(50, 100).t(), torch.randn(5)]
    before = [p.clone() for p in parameters]
    pieces = [Piece(0, 0, 150, 0), Piece(0, 150, 300, 1), Piece(1, 0, 7, 1), Piece(2, 0, 100, 0)]
    cpu = torch.device("cpu")
    costs = [
        measure_gather(device=cpu),
        measure_gather(device=cpu, parameters=parameters, pieces=pieces),
    ]
    assert all(torch.equal(p, q) for p, q in zip(parameters, before, strict=True))
    return costs


def test_a_measured_gather_is_the_same_on_all_ranks():
    first, second = run_ranks(_measured, 2, 2)
    assert first == second
    for cost in first:
        assert 0 < cost.latency_seconds < 1 and 0 <= cost.seconds_per_byte < 1e-5

"""When sharing pays: the comparison by hand, the search over groups against enumeration, and a
measured gather.
"""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from lightning_topt.optim import adaptive_step
from lightning_topt.optim.adaptive_step import (
    GatherCost,
    GroupCost,
    choose_pieces,
    decide,
    group_costs,
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


def test_told_to():
    cost = GroupCost(3, 2_000_000, 0.1, 0.05)
    (told,) = decide([cost], world_size=2, gather=GatherCost(0.01, 1e-7), always=True)
    assert told.shared and not told.pays
    assert told.reason == (
        "group 3: shared as told although it does not pay; its update takes 100.00 ms on every "
        "rank, 50.00 ms on the busiest of 2 when shared, and gathering 2.0 MB takes 210.00 ms: "
        "costs 160.00 ms per step"
    )
    (plain,) = decide([cost], world_size=2, gather=GatherCost(0.01, 1e-7))
    assert plain.reason.startswith("group 3: not shared;") and plain.reason.endswith(
        "would cost 160.00 ms per step"
    )
    (paying,) = decide([cost], world_size=2, gather=FREE, always=True)
    assert paying.reason.startswith("group 3: shared;") and paying.reason.endswith(
        "saves 50.00 ms per step"
    )


def test_one_rank():
    (alone,) = decide([GroupCost(0, 1, 1.0, 0.1)], world_size=1, gather=FREE, always=True)
    assert not alone.shared and "only one rank" in alone.reason


def test_costs_of_groups():
    shares = [rows(0, 3.0), rows(1, 1.0, group=1), rows(2, 0.0, group=2)]
    pieces = [
        Piece(0, 0, 500, 0),
        Piece(0, 500, 1000, 1),
        Piece(1, 0, 1000, 1),
        Piece(2, 0, 1000, 0),
    ]
    costs = group_costs(shares, pieces, sent_bytes={0: 70, 1: 20, 2: 5}, world_size=2)
    # rank 1 is busiest: 1.5 + 1.0 of 4.0
    assert costs == [
        GroupCost(0, 70, 3.0, 1.875),
        GroupCost(1, 20, 1.0, 0.625),
        GroupCost(2, 5, 0.0, 0.0),
    ]


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


def test_the_fit(monkeypatch):
    """A gather that takes 2 s and 3 ns per byte is found out."""
    monkeypatch.setattr(adaptive_step.dist, "get_world_size", lambda group: 4)
    monkeypatch.setattr(
        adaptive_step, "slowest_of_ranks", lambda values, **_: [2 * value for value in values]
    )
    times = []

    def timed(parameters, pieces, **options):
        times.append(sum(parameters[i].nbytes for i in {piece.index for piece in pieces}))
        return 1.0 + (1.5e-9 * times[-1] if len(times) > 1 else 0.0)

    monkeypatch.setattr(adaptive_step, "_time_gather", timed)
    assert measure_gather(device=torch.device("cpu")) == GatherCost(2.0, pytest.approx(3e-9))
    assert times == [4 * 4 * 256, 16 << 20]


def test_the_sample_of_real_parameters():
    parameters = [torch.empty(8 << 20, device="meta") for _ in range(20)]  # 32 MiB each
    pieces = [Piece(i, 0, 8 << 20, i % 2) for i in range(1, 20)]
    _, sample = adaptive_step._sample(parameters, pieces)
    assert [piece.index for piece in sample] == [1, 11]
    assert adaptive_step._sample(parameters[:2], pieces[:1])[1] == pieces[:1]
    assert adaptive_step._sample(parameters, []) is None

"""Pieces of balanced cost and bytes, against the best assignment by enumeration."""

from __future__ import annotations

import itertools
import random
from collections import Counter

import pytest
import torch

from lightning_topt.optim.pieces import (
    Loads,
    Share,
    assign_pieces,
    check_pieces,
    fill_up,
)

# torch's order: embedding, 12 layers of attention and two linear maps, norms and biases between
# them
GPT_ROWS = [
    (50_304, 768),
    *[(2304, 768), (2304,), (768, 768), (3072, 768), (768, 3072), (768,), (768,)] * 12,
    (768,),
]


def loads_of(shares, pieces, world_size):
    loads = Loads(shares, world_size=world_size)
    by_index = {share.index: share for share in shares}
    for piece in pieces:
        loads.add(by_index[piece.index], owner=piece.owner, rows=piece.stop - piece.start)
    return loads


def best_level(shares, world_size):
    """The slow twin: every owner of every whole share, the rest as one mass that is poured to one
    level.
    """
    whole = [share for share in shares if not share.splittable]
    liquid = [share for share in shares if share.splittable]
    best = float("inf")
    for owners in itertools.product(range(world_size), repeat=len(whole)):
        loads = Loads(shares, world_size=world_size)
        for share, owner in zip(whole, owners, strict=True):
            loads.add(share, owner=owner, rows=share.rows)
        if liquid:
            for rank, fraction in enumerate(fill_up(liquid, loads)):
                cost, nbytes = (
                    sum(column) for column in zip(*map(loads.fractions, liquid), strict=True)
                )
                loads.cost[rank] += fraction * cost
                loads.bytes[rank] += fraction * nbytes
        best = min(best, loads.level())
    return best


def whole_shares(costs, nbytes):
    return [Share(i, 3, b, c, False) for i, (c, b) in enumerate(zip(costs, nbytes, strict=True))]


def check(shares, pieces, world_size):
    rows = {share.index: share.rows for share in shares}
    check_pieces(
        pieces,
        [torch.empty(rows.get(i, 1), 0) for i in range(max(rows) + 1)],
        world_size=world_size,
    )
    assert {piece.index for piece in pieces} == set(rows)
    assert pieces == sorted(pieces) == assign_pieces(shares, world_size=world_size)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_one_criterion_keeps_the_bound_of_list_scheduling(world_size):
    rng = random.Random(world_size)
    for _ in range(20):
        costs = [rng.choice([1, 2, 3, 5, 8, 13]) for _ in range(6)]
        shares = whole_shares(costs, costs)
        pieces = assign_pieces(shares, world_size=world_size)
        check(shares, pieces, world_size)
        bound = (4 / 3 - 1 / (3 * world_size)) * best_level(shares, world_size)
        assert loads_of(shares, pieces, world_size).level() <= bound + 1e-9


@pytest.mark.parametrize("world_size", [2, 3])
def test_two_criteria_stay_near_the_best(world_size):
    rng = random.Random(world_size)
    ratios = []
    for _ in range(25):
        shares = whole_shares(
            [rng.random() for _ in range(7)], [rng.randrange(1, 100) for _ in range(7)]
        )
        pieces = assign_pieces(shares, world_size=world_size)
        check(shares, pieces, world_size)
        ratios.append(loads_of(shares, pieces, world_size).level() / best_level(shares, world_size))
    assert max(ratios) <= 1.6 and sum(ratios) / len(ratios) <= 1.2 and min(ratios) >= 1 - 1e-9


@pytest.mark.parametrize("world_size", [2, 3, 4, 8])
def test_rows_are_even_and_cuts_few(world_size):
    shares = [
        Share(i, shape[0], 8 * torch.Size(shape).numel(), 1e-9 * torch.Size(shape).numel(), True)
        for i, shape in enumerate(GPT_ROWS)
    ]
    pieces = assign_pieces(shares, world_size=world_size)
    check(shares, pieces, world_size)
    loads = loads_of(shares, pieces, world_size)
    assert all(abs(part * world_size - 1) < 0.05 for part in (*loads.bytes, *loads.cost))
    assert len(pieces) - len(shares) <= world_size - 1
    order = [piece.owner for piece in pieces]
    assert order == sorted(order)  # runs of neighbours


def test_uneven_costs_per_byte_are_cut_apart():
    # calls make small parameters expensive per byte: their run is cut by itself, so that bytes and
    # cost both stay even
    shares = [
        Share(0, 1000, 8_000_000, 4.0, True),
        *(Share(i, 100, 800, 0.04, True) for i in range(1, 101)),
    ]
    loads = loads_of(shares, assign_pieces(shares, world_size=4), 4)
    assert all(abs(4 * part - 1) < 0.05 for part in (*loads.bytes, *loads.cost))


def test_each_group_is_spread_over_all_ranks():
    shares = [Share(i, 512, 4096, 1.0, True, group=i // 3) for i in range(6)]
    for group in (0, 1):
        pieces = [
            piece for piece in assign_pieces(shares, world_size=2) if piece.index // 3 == group
        ]
        assert Counter(p.owner for p in pieces for _ in range(p.start, p.stop)) == {0: 768, 1: 768}


@pytest.mark.parametrize("world_size", [2, 3])
def test_rows_fill_up_what_whole_parameters_leave(world_size):
    rng = random.Random(10 + world_size)
    for _ in range(15):
        whole = whole_shares(
            [rng.random() for _ in range(5)], [rng.randrange(1, 100) * 1000 for _ in range(5)]
        )
        liquid = [
            Share(5 + i, 1000, rng.randrange(50, 300) * 1000, rng.random(), True) for i in range(3)
        ]
        pieces = assign_pieces(whole + liquid, world_size=world_size)
        check(whole + liquid, pieces, world_size)
        level = loads_of(whole + liquid, pieces, world_size).level()
        assert level <= 1.35 * best_level(whole + liquid, world_size)
    shares = [Share(0, 4, 500, 5.0, False), Share(1, 1000, 500, 5.0, True)]
    assert {p.owner for p in assign_pieces(shares, world_size=2) if p.index == 1} == {1}


@pytest.mark.parametrize(("nbytes", "cost"), [(0, 1.0), (8, 0.0), (0, 0.0)])
def test_missing_bytes_or_costs(nbytes, cost):
    shares = [Share(i, 100, nbytes, cost, True) for i in range(4)]
    pieces = assign_pieces(shares, world_size=2)
    check(shares, pieces, 2)
    assert Counter(p.owner for p in pieces for _ in range(p.start, p.stop)) == {0: 200, 1: 200}


def test_fewer_rows_than_ranks_and_gaps_in_indices():
    shares = [Share(7, 2, 8, 1.0, True), Share(2, 1, 4, 1.0, True)]
    pieces = assign_pieces(shares, world_size=8)
    check(shares, pieces, 8)
    assert len({piece.owner for piece in pieces}) == 3
    assert assign_pieces([], world_size=3) == []

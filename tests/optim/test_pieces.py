"""Pieces of balanced work, against the best assignment by enumeration."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from lightning_topt.optim.pieces import Share, assign_pieces, check_pieces

# torch's order: embedding, 12 layers of attention and two linear maps, norms and biases between
# them
GPT_ROWS = [
    (50_304, 768),
    *[(2304, 768), (2304,), (768, 768), (3072, 768), (768, 3072), (768,), (768,)] * 12,
    (768,),
]


def loads_of(shares, pieces, world_size):
    """Work of each rank, once the pieces are checked."""
    by_index = {share.index: share for share in shares}
    sizes = [by_index[i].rows if i in by_index else 1 for i in range(max(by_index) + 1)]
    check_pieces(pieces, [torch.empty(rows, 0) for rows in sizes], world_size=world_size)
    assert {piece.index for piece in pieces} == set(by_index)
    assert pieces == sorted(pieces) == assign_pieces(shares, world_size=world_size)
    loads = [0.0] * world_size
    for piece in pieces:
        share = by_index[piece.index]
        loads[piece.owner] += share.work * (piece.stop - piece.start) / share.rows
    return loads


def best_level(shares, world_size):
    """The slow twin: every owner of every whole share; the rest fills up what they leave."""
    whole = [share for share in shares if not share.splittable]
    liquid = sum(share.work for share in shares if share.splittable)
    best = float("inf")
    for owners in itertools.product(range(world_size), repeat=len(whole)):
        loads = [0.0] * world_size
        for share, owner in zip(whole, owners, strict=True):
            loads[owner] += share.work
        best = min(best, max(*loads, (sum(loads) + liquid) / world_size))
    return best


@pytest.mark.parametrize("num_liquid", [0, 3])
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_the_bound_of_list_scheduling(world_size, num_liquid):
    rng = random.Random(world_size)
    for _ in range(20):
        shares = [Share(i, 3, rng.choice([1, 2, 3, 5, 8, 13]), False) for i in range(6)]
        shares += [Share(6 + i, 1000, rng.random() * 5, True) for i in range(num_liquid)]
        level = max(loads_of(shares, assign_pieces(shares, world_size=world_size), world_size))
        bound = (4 / 3 - 1 / (3 * world_size)) * best_level(shares, world_size)
        assert level <= bound * 1.02


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 8])
def test_rows_are_even_and_cuts_few(world_size):
    shares = [
        Share(i, shape[0], float(torch.Size(shape).numel()), True)
        for i, shape in enumerate(GPT_ROWS)
    ]
    pieces = assign_pieces(shares, world_size=world_size)
    loads = loads_of(shares, pieces, world_size)
    assert all(abs(load * world_size / sum(loads) - 1) < 0.05 for load in loads)
    assert len(pieces) - len(shares) <= world_size - 1
    order = [piece.owner for piece in pieces]
    assert order == sorted(order)  # runs of neighbours


def test_fewer_rows_than_ranks_and_gaps_in_indices():
    shares = [Share(7, 2, 1.0, True), Share(2, 1, 1.0, True)]
    pieces = assign_pieces(shares, world_size=8)
    loads_of(shares, pieces, 8)
    assert len({piece.owner for piece in pieces}) >= 2
    assert assign_pieces([], world_size=3) == []

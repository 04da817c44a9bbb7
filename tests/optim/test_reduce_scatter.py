"""Reduce-scattered gradients with a parallel step, against plain DDP with the whole optimizer."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_topt.communication import rank_watch as peers
from lightning_topt.optim.pieces import check_pieces
from lightning_topt.optim.reduce_scatter import (
    ReduceScatterExchange,
    cut_buckets,
    pieces_of_segment,
    segment_of,
)
from tests.launch import run_on_pool, run_ranks
from tests.optim.fused_ranks import Fused, backward, loss_of, make_optimizer, wrap

STEPS = 25


def compare(rank: int, name: str, options: dict[str, Any], node: bool) -> dict[str, Any]:
    plain = wrap(**options)
    fused = Fused(wrap(**options), node=node)
    fused.optimizers = (make_optimizer(name, fused.ddp),)
    optimizer = make_optimizer(name, plain)
    for step in range(STEPS):
        for ddp, stepped in ((plain, optimizer), (fused.ddp, fused.optimizers[0])):
            stepped.zero_grad(set_to_none=step % 2 == 0)
            backward(ddp, rank=rank, step=step)
            if ddp is fused.ddp:
                fused.before_step()
            stepped.step()
    with torch.no_grad():
        assert torch.isfinite(loss_of(fused.ddp.module, rank=rank, step=0))  # waits for all
    worst = 0.0
    for (key, expected), (_, actual) in zip(
        plain.named_parameters(), fused.ddp.named_parameters(), strict=True
    ):
        assert actual.isfinite().all(), key
        worst = max(worst, float((expected - actual).abs().max()))
    own = sum(
        t.numel()
        for state in fused.optimizers[0].state.values()
        for t in state.values()
        if t.numel() > 1
    )
    whole = sum(
        t.numel() for state in optimizer.state.values() for t in state.values() if t.numel() > 1
    )
    assert fused.begun and fused.exchange.scattered
    return {"worst": worst, "share": own / whole}


@pytest.mark.parametrize(
    ("world_size", "name", "options", "node"),
    [
        (1, "sgd", {}, False),
        (2, "sgd", {"gradient_as_bucket_view": False}, False),
        (4, "adamw", {"gradient_as_bucket_view": False}, False),
        (2, "adamw", {}, True),
        (3, "sgd", {"gradient_as_bucket_view": False}, True),
    ],
)
def test_parameters_are_those_of_plain_ddp(world_size, name, options, node):
    for result in run_on_pool(compare, world_size, name, options, node):
        # a sum of two terms has one order only
        assert result["worst"] <= (0.0 if world_size <= 2 else 2e-5)
        assert result["share"] == pytest.approx(1 / world_size, rel=0.05)


def buckets_rebuilt(rank: int) -> bool:
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(8, 30), nn.Tanh(), nn.Linear(30, 8), nn.Linear(8, 2))
    fused = Fused(DistributedDataParallel(model, bucket_cap_mb=0.0005))
    fused.optimizers = (torch.optim.SGD(model.parameters(), lr=0.1),)
    ready = []
    for _ in range(5):
        fused.ddp(torch.randn(4, 8)).square().mean().backward()
        ready.append(fused.exchange.ready)
        fused.before_step()
        fused.optimizers[0].step()
        fused.optimizers[0].zero_grad()
    rows = [torch.empty_like(model[0].weight) for _ in range(2)]
    dist.all_gather(rows, model[0].weight.detach())
    assert torch.equal(*rows)
    return ready == [False, False, True, True, True]


def test_waits_until_ddp_has_rebuilt_its_buckets():
    assert all(run_on_pool(buckets_rebuilt, 2))


def ends(rank: int) -> bool:
    fused = Fused(wrap())
    fused.optimizers = (make_optimizer("sgd", fused.ddp),)
    for step in range(4):
        backward(fused.ddp, rank=rank, step=step)
        fused.before_step()
    gradients = [p.grad for p in fused.ddp.parameters() if p.grad is not None]
    # passes on top of another: seen, not wrong
    assert any(bool(gradient.isnan().any()) for gradient in gradients)
    fused.exchange.end()
    fused.ddp.zero_grad()
    backward(fused.ddp, rank=rank, step=9)
    return all(bool(p.grad.isfinite().all()) for p in fused.ddp.parameters() if p.grad is not None)


def test_can_return_to_whole_gradients():
    assert all(run_on_pool(ends, 2))


def uncut(rank: int) -> bool:
    ddp = wrap()
    exchange = ReduceScatterExchange(ddp, uncut=[ddp.module.up.weight, ddp.module.embed.weight])
    for step in range(2):
        backward(ddp, rank=rank, step=step)
    optimizer = make_optimizer("sgd", ddp)
    pieces = exchange.pieces_of(optimizer)
    parameters = list(ddp.parameters())
    check_pieces(pieces, parameters, world_size=3)
    of = {
        index: [piece for piece in pieces if piece.index == index]
        for index in range(len(parameters))
    }
    positions = {id(parameter): index for index, parameter in enumerate(parameters)}
    for whole in (ddp.module.up.weight, ddp.module.embed.weight, ddp.module.turned):
        assert len(of[positions[id(whole)]]) == 1
    assert not of[positions[id(ddp.module.frozen.weight)]]
    return any(len(several) > 1 for several in of.values())


def test_whole_parameters_have_one_owner():
    assert all(run_on_pool(uncut, 3))


def lost(rank: int, seconds: float, node: bool) -> str:
    peers.GRACE_SECONDS = 0.5
    fused = Fused(wrap(), node=node, timeout_seconds=2)
    fused.optimizers = (make_optimizer("sgd", fused.ddp),)
    for step in range(3):
        backward(fused.ddp, rank=rank, step=step)
        fused.before_step()
    if rank == 1:
        time.sleep(seconds)
        return ""
    with pytest.raises(RuntimeError, match="rank 1 did not answer") as caught:
        backward(fused.ddp, rank=rank, step=9)
    return type(caught.value).__name__


@pytest.mark.parametrize(("seconds", "node"), [(0.0, True), (3.5, False)])
def test_a_rank_that_is_gone_or_late_is_named(seconds, node):
    assert run_ranks(lost, 2, seconds, node)[0] == "PeerLostError"


@pytest.mark.parametrize("world_size", [1, 2, 3, 7])
def test_cuts_lie_between_rows_and_are_balanced(world_size):
    generator = torch.Generator().manual_seed(world_size)
    for _ in range(20):
        shapes = torch.randint(1, 30, (9, 2), generator=generator).tolist()
        buckets, parameters = [], []
        for start in (0, 4, 6):
            offset, segments = 0, []
            for rows, columns in shapes[start : start + 4]:
                gradient = torch.empty(rows, columns)
                segments.append(segment_of(gradient, offset=offset, splittable=columns % 7 != 0))
                parameters.append((gradient, segments[-1], len(buckets)))
                offset += rows * columns
            buckets.append(segments)
        cuts = cut_buckets(buckets, world_size=world_size)
        pieces = [
            piece
            for index, (gradient, segment, bucket) in enumerate(parameters)
            for piece in pieces_of_segment(segment, cuts[bucket], rows=len(gradient), index=index)
        ]
        check_pieces(pieces, [gradient for gradient, *_ in parameters], world_size=world_size)
        numels = [0] * world_size
        for piece in pieces:
            numels[piece.owner] += (piece.stop - piece.start) * parameters[piece.index][0].shape[1]
        assert numels == [sum(cut[k + 1] - cut[k] for cut in cuts) for k in range(world_size)]
        step = max(segment.row_numel for segments in buckets for segment in segments)
        assert max(abs(numel - sum(numels) / world_size) for numel in numels) <= step + 1

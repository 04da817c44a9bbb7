"""Norms, clipping and overflows of reduce-scattered gradients, against those of whole gradients."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_topt.optim.reduce_scatter import install_overflow_agreement
from tests.launch import run_ranks
from tests.optim.fused_ranks import Fused, backward, loss_of, make_optimizer, wrap


def norms(rank: int) -> list[tuple[float, float]]:
    plain, fused = wrap(), Fused(wrap())
    fused.optimizers = fused.gradients.optimizers = (
        torch.optim.SGD([p for n, p in fused.ddp.named_parameters() if "weight" in n], lr=0.1),
        torch.optim.SGD([p for n, p in fused.ddp.named_parameters() if "weight" not in n], lr=0.1),
    )
    seen = []
    # the first ones are not scattered yet
    for step, kind in enumerate([2.0, 2.0, 2.0, 1.0, math.inf, 3.0]):
        for ddp in (plain, fused.ddp):
            ddp.zero_grad()
            backward(ddp, rank=rank, step=step)
        expected = nn.utils.clip_grad_norm_(plain.parameters(), 0.01, norm_type=kind)
        seen.append((float(expected), float(fused.gradients.clip_norm_(0.01, norm_type=kind))))
        nn.utils.clip_grad_value_(plain.parameters(), 1e-4)
        fused.gradients.clip_value_(1e-4)
        fused.before_step()
        for (key, a), (_, b) in zip(
            plain.named_parameters(), fused.ddp.named_parameters(), strict=True
        ):
            assert (a.grad is None) == (b.grad is None), key
            if b.grad is not None:
                own = fused.exchange.own_pieces(b)
                parts = (
                    [slice(None)]
                    if own is None
                    else [slice(piece.start, piece.stop) for piece in own]
                )
                for part in parts if b.dim() else [...] * len(parts):
                    torch.testing.assert_close(b.grad[part], a.grad[part], rtol=1e-5, atol=1e-9)
    assert fused.exchange.scattered
    # [Note: foreign gradients]: torch's own norm is not silently one rank's.
    assert math.isnan(
        float(
            nn.utils.get_total_norm([p.grad for p in fused.ddp.parameters() if p.grad is not None])
        )
    )
    with pytest.raises(RuntimeError, match="error_if_nonfinite"):
        for parameter in fused.ddp.parameters():
            if parameter.grad is not None:
                parameter.grad.fill_(torch.inf)
        fused.gradients.clip_norm_(1.0, error_if_nonfinite=True)
    return seen


@pytest.mark.parametrize("world_size", [2, 3])
def test_norms_and_clipping_are_torchs(world_size):
    results = run_ranks(norms, world_size)
    assert all(result == results[0] for result in results)
    for expected, actual in results[0]:
        assert actual == pytest.approx(expected, rel=1e-5)


def scaled(rank: int, name: str) -> tuple[list[float], float]:
    plain, fused = wrap(), Fused(wrap())
    optimizer = make_optimizer(name, plain)
    fused.optimizers = (make_optimizer(name, fused.ddp),)
    scalers = [torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=4) for _ in range(2)]
    install_overflow_agreement(scalers[1], fused.exchange)
    scales = []
    for step in range(12):
        for ddp, stepped, scaler in (
            (plain, optimizer, scalers[0]),
            (fused.ddp, fused.optimizers[0], scalers[1]),
        ):
            stepped.zero_grad()
            factor = math.inf if step in (1, 5, 9) and rank == step % 2 else 1.0
            (scaler.scale(loss_of(ddp, rank=rank, step=step)) * factor).backward()
            if ddp is fused.ddp:
                fused.before_step()
            if step % 2:
                scaler.unscale_(stepped)
            scaler.step(stepped)
            scaler.update()
        assert scalers[0].get_scale() == scalers[1].get_scale()
        scales.append(scalers[1].get_scale())
    pairs = zip(plain.parameters(), fused.ddp.parameters(), strict=True)
    return scales, max(float((a - b).abs().max()) for a, b in pairs)


@pytest.mark.parametrize("name", ["adamw", "sgd"])  # fused AdamW unscales inside of its kernel
def test_ranks_agree_on_overflows(name):
    for scales, worst in run_ranks(scaled, 2, name):
        assert min(scales) < 1024 and worst == 0.0


def one_overflows(rank: int) -> float:
    """Only the rank that owns the rows sees the overflow of the sum."""
    fused = Fused(DistributedDataParallel(nn.Linear(4, 4, bias=False)))
    fused.optimizers = (torch.optim.SGD(fused.ddp.parameters(), lr=1.0),)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    install_overflow_agreement(scaler, fused.exchange)
    for _ in range(4):
        fused.ddp.zero_grad()
        fused.ddp(torch.ones(1, 4)).sum().backward()
        fused.before_step()
    if rank == 1:
        (piece,) = fused.exchange.own_pieces(fused.ddp.module.weight)
        fused.ddp.module.weight.grad[piece.start] = torch.inf
    before = fused.ddp.module.weight.detach().clone()
    scaler.scale(torch.zeros(()))
    scaler.step(fused.optimizers[0])
    scaler.update()
    assert torch.equal(before, fused.ddp.module.weight)
    return scaler.get_scale()


def test_an_overflow_on_one_rank_is_one_on_all():
    assert run_ranks(one_overflows, 2) == [1.0, 1.0]

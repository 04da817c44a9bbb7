"""Parameters that arrive during the forward pass are waited for by whoever reads them."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from lightning_topt.optim.forward_gather import ForwardGather
from lightning_topt.optim.parallel_step import install_parallel_step
from tests.launch import run_ranks
from tests.optim.fused_ranks import Fused, backward, loss_of, make_optimizer, wrap


def reads_in_time(rank: int) -> bool:
    fused = Fused(wrap(), overlap="late")
    fused.optimizers = (torch.optim.SGD(fused.ddp.parameters(), lr=0.05),)
    weights = dict(fused.ddp.module.named_parameters())

    def train(steps: range) -> None:
        for step in steps:
            fused.ddp.zero_grad()
            backward(fused.ddp, rank=rank, step=step)
            fused.before_step()
            fused.optimizers[0].step()

    def differ() -> int:
        flat = torch.cat([parameter.detach().reshape(-1) for parameter in weights.values()])
        rows = [torch.empty_like(flat) for _ in range(2)]
        dist.all_gather(rows, flat)
        assert flat.isfinite().all()
        return int((rows[0] != rows[1]).sum())

    train(range(6))
    assert fused.gather is not None
    assert differ()  # still travelling: this is what the waits are for
    fused.gather.wait_all()
    assert not differ()
    train(range(6, 7))
    fused.ddp.state_dict()
    assert not differ()
    train(range(7, 8))
    seen = []
    handle = fused.ddp.module.register_forward_pre_hook(lambda *_: seen.append(differ()))
    with torch.no_grad():
        loss_of(fused.ddp, rank=rank, step=0)
    handle.remove()
    assert seen == [0]  # all at once: other branches may be taken than in training
    train(range(8, 9))
    fused.gather.remove()
    assert not differ()
    train(range(9, 10))
    return not differ()


def test_who_reads_parameters_waits_for_them():
    assert all(run_ranks(reads_in_time, 2))


def refuses(rank: int) -> bool:
    fused = Fused(wrap())
    optimizer = make_optimizer("sgd", fused.ddp)
    for step in range(2):
        backward(fused.ddp, rank=rank, step=step)
    step = install_parallel_step(optimizer, pieces=fused.exchange.pieces_of(optimizer))
    with pytest.raises(ValueError, match="not a parameter of the module"):
        ForwardGather(fused.ddp.module.up, steps=[step])
    torch.compile = lambda function, **_: function  # importing the compiler takes seconds
    fused.ddp.module.up.compile()
    with pytest.raises(ValueError, match="up is compiled"):
        ForwardGather(fused.ddp.module, steps=[step])
    return True


def test_modules_that_do_not_wait_are_refused():
    assert all(run_ranks(refuses, 2))

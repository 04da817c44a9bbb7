"""Mixtures under autocast, sparse and complex parameters, synchronized batch norm, gathers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn

from lightning_topt.graph.capture import capture, observe_step
from lightning_topt.graph.errors import may_need_values
from tests.graph.measure import flops_of
from tests.graph.test_steps_with_values import Net
from tests.launch import run_ranks

X = torch.linspace(-1, 1, 32).reshape(4, 8)


def bfloat16() -> Any:
    return torch.autocast("cpu", dtype=torch.bfloat16)


class Experts(Net):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(8, 4)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)) for _ in range(4)
        )

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        weights = F.softmax(self.gate(x), dim=-1, dtype=torch.float)
        values, chosen = weights.topk(2)
        return values.to(x.dtype), chosen

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        x = self.net(batch)
        weights, chosen = self.route(x)
        out = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            token, slot = torch.where(chosen == index)
            out.index_add_(0, token, (expert(x[token]) * weights[token, slot, None]).to(x.dtype))
        return out.square().mean()


class CapacityExperts(Experts):
    """Every expert takes two tokens, so that no shape depends on values."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        x = self.net(batch)
        weights, out = self.gate(x).softmax(-1).to(x.dtype), torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            values, token = weights[:, index].topk(2)
            out.index_add_(0, token, expert(x[token]) * values[:, None])
        return out.square().mean()


@pytest.mark.parametrize("experts", [Experts, CapacityExperts])
def test_mixtures_of_experts_under_autocast(experts: Any) -> None:
    torch.manual_seed(0)
    module = experts()
    real = observe_step(module, X, forward_context=bfloat16)
    assert [block.name for block in real.blocks if "experts" in block.name] == [
        f"experts.{i}" for i in range(4)
    ]
    assert sum(flops_of(op, "forward", 4) for op in real.ops) > 2 * 4 * (64 + 32)
    if experts is CapacityExperts:
        fake = capture(module, X, forward_context=bfloat16, batch_scaling=False)
        assert [op.name for op in fake.ops] == [
            op.name for op in real.ops
        ] and fake.blocks == real.blocks
    else:
        with pytest.raises(ValueError) as caught:
            capture(module, X, forward_context=bfloat16, batch_scaling=False)
        assert may_need_values(caught.value)


class SparseTables(Net):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.bag = nn.Embedding(20, 8, sparse=True), nn.EmbeddingBag(20, 8, sparse=True)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        index = torch.ones(len(batch), dtype=torch.long)
        return super().training_step(
            batch + self.table(index) + self.bag(index[:, None]), batch_idx
        )


class Complex(Net):
    def __init__(self) -> None:
        super().__init__()
        self.filter = nn.Parameter(torch.ones(5, dtype=torch.cfloat))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return super().training_step(
            torch.fft.irfft(torch.fft.rfft(batch) * self.filter, n=8), batch_idx
        )


@pytest.mark.parametrize("module", [SparseTables(), Complex()], ids=["sparse", "complex"])
def test_sparse_and_complex_parameters(module: Any) -> None:
    for graph in (
        capture(module, X),
        capture(module, X, batch_scaling=False),
        observe_step(module, X),
    ):
        assert graph.unused == ()
    assert {p.dtype for p in graph.parameters} <= {"float32", "complex64"}


class Synchronized(Net):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.SyncBatchNorm(8)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.norm(self.net(batch)).square().mean()


class Contrastive(Net):
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        y = self.net(batch)
        everyone = self.all_gather(y, sync_grads=True)
        assert everyone.shape == (dist.get_world_size(), *y.shape)
        return (y.unsqueeze(0) - everyone).square().mean() + self.all_gather(
            y.detach().sum()
        ).sum() * 0


def _strategy(rank: int) -> Any:
    """All that `all_gather` asks of a trainer."""

    class Trainer:
        strategy = DDPStrategy(parallel_devices=[torch.device("cpu")] * dist.get_world_size())

    return Trainer()


def _alone(rank: int) -> None:
    if rank == 0:  # nobody else takes part
        norm = next(op for op in capture(Synchronized(), X).ops if op.name == "norm")
        assert norm.kind == "SyncBatchNorm" and norm.backward
    contrastive = Contrastive()
    contrastive._trainer = _strategy(rank)
    if rank == 0:
        kinds = [op.kind for op in capture(contrastive, X).ops]
        assert any("allgather" in kind or "all_gather" in kind for kind in kinds), kinds
    dist.barrier()
    graph = observe_step(contrastive, X)
    assert any("allgather" in op.kind or "all_gather" in op.kind for op in graph.ops)
    dist.barrier()


def test_normalization_and_gathers_across_ranks() -> None:
    run_ranks(_alone, 2)

"""Chains of elementwise operators as one kernel each: which they are, and what they move."""

from __future__ import annotations

import math

import torch
from torch import nn

from lightning_topt.graph.capture import capture
from lightning_topt.graph.fused_chains import FUSED, fused
from lightning_topt.graph.op_graph import OpGraph

BATCH, HIDDEN = 4, 32
ROW = 4 * HIDDEN  # bytes of a sample


class NewGELU(nn.Module):
    """As in Hugging Face's GPT-2: seven kernels when it is eager."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = math.sqrt(2 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))
        return 0.5 * x * (1.0 + torch.tanh(inner))


class RMSNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(HIDDEN))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


class Between(nn.Module):
    """A linear layer, `inner`, and another one."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.first, self.inner = nn.Linear(HIDDEN, HIDDEN), inner
        self.last = nn.Linear(HIDDEN, HIDDEN)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.last(self.inner(self.first(batch))).sum()


class Residuals(Between):
    """Sums that feed one another around a product."""

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        x = self.first(batch)
        x = (2 * x).sin()
        y = self.last(x)
        return (x + y * 0.5).sum()


def captured(module: nn.Module) -> OpGraph:
    return capture(module, torch.zeros(BATCH, HIDDEN))


def moved(graph: OpGraph, direction: str, *, only_fused: bool = False) -> float:
    return sum(
        kernel.count * kernel.bytes.at(BATCH)
        for op in graph.ops
        for kernel in getattr(op, direction)
        if kernel.name == FUSED or not only_fused
    )


def chains(graph: OpGraph) -> int:
    return sum(kernel.name == FUSED for op in graph.ops for kernel in op.forward)


def test_a_chain_reads_its_input_and_writes_its_output():
    graph = captured(Between(NewGELU()))
    compiled = fused(graph)
    assert compiled.compiled and not graph.compiled and chains(compiled) == 1
    assert sum(k.count for op in graph.ops if op.kind == "NewGELU" for k in op.forward) == 8
    assert moved(compiled, "forward", only_fused=True) == 2 * BATCH * ROW
    # the gradient of its output, its input again, and the gradient of that
    assert moved(compiled, "backward", only_fused=True) == 3 * BATCH * ROW
    assert moved(graph, "forward") - moved(compiled, "forward") > 10 * BATCH * ROW
    # products stay, and so does all that says what lives in memory
    for kind in ("addmm", "mm"):
        names = [
            [
                k.name
                for op in each.ops
                for k in (*op.forward, *op.backward)
                if f".{kind}." in k.name
            ]
            for each in (graph, compiled)
        ]
        assert names[0] == names[1] and names[0]
    assert compiled.step is graph.step and compiled.fingerprint == graph.fingerprint


def test_rows_that_are_summed_belong_to_their_chain():
    graph = captured(Between(RMSNorm()))
    compiled = fused(graph)
    assert chains(compiled) == 1
    assert moved(compiled, "forward", only_fused=True) == 2 * BATCH * ROW + ROW
    # the gradient of the weight is a sum over the batch: a kernel of its own
    sums = [k for op in compiled.ops if op.kind == "RMSNorm" for k in op.backward]
    assert {k.name for k in sums} == {FUSED, "aten.sum.dim_IntList"}
    assert moved(compiled, "backward") < moved(graph, "backward")


def test_a_chain_never_goes_around_a_product():
    compiled = fused(captured(Residuals(nn.Identity())))
    assert chains(compiled) == 2
    # 2 x and its sine; then y times a half plus x, which two products around it do not join
    total = moved(compiled, "forward", only_fused=True)
    assert total == 2 * BATCH * ROW + 3 * BATCH * ROW

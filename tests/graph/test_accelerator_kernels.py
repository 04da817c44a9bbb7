"""Attention that is captured on a CPU for accelerators: the kernels that CUDA would run."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lightning_topt.graph.capture import capture
from lightning_topt.graph.kernels import OnAccelerator


class Attention(nn.Module):
    """Heads of 16 over 64 positions."""

    def __init__(self, *, dropout: float = 0.1, mask: bool = False, gqa: bool = False) -> None:
        super().__init__()
        self.qkv = nn.Linear(64, (4 + 2 * (2 if gqa else 4)) * 16)
        self.options = dropout, mask, gqa

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        dropout, mask, gqa = self.options
        heads = self.qkv(batch).unflatten(-1, (-1, 16)).transpose(1, 2)
        count = 2 if gqa else 4
        query, key, value = heads.split([4, count, count], dim=1)
        seen = torch.ones(64, 64, dtype=torch.bool, device=batch.device) if mask else None
        mixed = F.scaled_dot_product_attention(
            query, key, value, seen, dropout, is_causal=not mask, enable_gqa=gqa
        )
        return mixed.float().sum()


def kernels(module: nn.Module, dtype: torch.dtype, *, accelerator: bool = True) -> list[str]:
    context = OnAccelerator(nullcontext) if accelerator else nullcontext
    batch = torch.zeros(2, 64, 64, dtype=dtype)
    graph = capture(module.to(dtype), batch, forward_context=context)
    names = [k.name for op in graph.ops for k in (*op.forward, *op.backward)]
    return [name for name in names if "scaled_dot" in name or "bmm" in name]


@pytest.mark.parametrize("options", [{}, {"dropout": 0.0}, {"gqa": True}])
def test_half_precision_is_flash_attention(options):
    found = kernels(Attention(**options), torch.bfloat16)
    assert [name.split(".")[1] for name in found] == [
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_flash_attention_backward",
    ]


@pytest.mark.parametrize(
    ("options", "dtype"), [({}, torch.float32), ({"mask": True}, torch.bfloat16)]
)
def test_masks_and_float32_are_memory_efficient_attention(options, dtype):
    found = kernels(Attention(**options), dtype)
    assert [name.split(".")[1] for name in found] == [
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_efficient_attention_backward",
    ]


class Rotated(Attention):
    """Queries and keys in float32 and values in bfloat16, as with positions that are rotated."""

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        heads = self.qkv(batch).unflatten(-1, (-1, 16)).transpose(1, 2)
        query, key, value = heads.split([4, 4, 4], dim=1)
        angles = torch.ones(64, 16)
        mixed = F.scaled_dot_product_attention(query * angles, key * angles, value, is_causal=True)
        assert mixed.dtype == torch.bfloat16
        return mixed.float().sum()


def test_autocast_lowers_what_attention_is_given():
    """CUDA's autocast has it in the list of functions in lower precision; so has the CPU's."""

    def autocast():
        return torch.autocast("cpu", dtype=torch.bfloat16)

    graph = capture(Rotated(), torch.zeros(2, 64, 64), forward_context=OnAccelerator(autocast))
    names = [k.name for op in graph.ops for k in (*op.forward, *op.backward)]
    assert [name.split(".")[1] for name in names if "scaled_dot" in name] == [
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_flash_attention_backward",
    ]


def test_a_cpu_writes_scores_with_dropout():
    """What is captured without it, and would be planned for a GPU."""
    found = kernels(Attention(), torch.bfloat16, accelerator=False)
    assert any("bmm" in name for name in found)
    assert not any("flash" in name or "efficient" in name for name in found)


class Layer(Attention):
    """Attention and a residual."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = self.qkv(x).unflatten(-1, (12, 16)).transpose(1, 2).chunk(3, dim=1)
        mixed = F.scaled_dot_product_attention(query, key, value, None, 0.1, is_causal=True)
        return x + mixed.transpose(1, 2).flatten(2)


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(3))

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        for layer in self.layers:
            batch = layer(batch)
        return batch.float().sum()


def test_layers_may_recompute():
    batch = torch.zeros(2, 64, 64, dtype=torch.bfloat16)
    graph = capture(Stack().bfloat16(), batch, forward_context=OnAccelerator(nullcontext))
    assert [block.recomputable for block in graph.blocks] == [False, True, True, True]

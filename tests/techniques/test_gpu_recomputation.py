"""Recomputed blocks on CUDA draw the same random numbers again; skipped without CUDA."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from lightning_topt.techniques.recomputation import apply_recomputation

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, x: Tensor, *, mask: tuple[Tensor, ...]) -> Tensor:
        return nn.functional.dropout(self.linear(x) * mask[0], 0.5)


@pytest.mark.parametrize("named", [False, True])
def test_dropout_is_the_same_in_both_forward_passes(named: bool) -> None:
    torch.manual_seed(0)
    plain = nn.ModuleDict({"a": Block(), "b": Block()}).cuda()
    again = copy.deepcopy(plain)
    apply_recomputation(again, ["a", "b"])
    x, mask = torch.randn(32, 64, device="cuda"), (torch.ones(64, device="cuda"),)
    gradients = []
    for module in (plain, again):
        torch.cuda.manual_seed(1)
        y = x
        for name in ("a", "b"):
            y = module[name](x=y, mask=mask) if named else module[name](y, mask=mask)
        y.square().sum().backward()
        gradients.append([parameter.grad for parameter in module.parameters()])
    for expected, actual in zip(*gradients, strict=True):
        torch.testing.assert_close(actual, expected, rtol=0, atol=0)

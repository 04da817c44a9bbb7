"""Blocks that run again in backward compute what they computed, however they are called."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor, nn

from lightning_topt.techniques.recomputation import apply_recomputation


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, *, scale: Any = None) -> Tensor:
        return self.linear(x) if scale is None else self.linear(x) * scale[0]


def recomputed() -> nn.Module:
    module = nn.ModuleDict({"block": Block()})
    apply_recomputation(module, ["block"])
    return module["block"]


@pytest.mark.parametrize("named", [False, True])
def test_random_states_are_kept_for_the_devices_of_all_arguments(
    named: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A CPU has no states of devices, so this looks at the arguments whose devices torch looks up.
    seen: list[Any] = []

    def look(*args: Any) -> str:
        seen.extend(args)
        return "cpu"

    monkeypatch.setattr(torch.utils.checkpoint, "_infer_device_type", look)
    x, scale = torch.ones(2, 4), (torch.full((4,), 2.0),)
    block = recomputed()
    block(x=x, scale=scale) if named else block(x, scale=scale)
    assert [id(value) for value in seen] == [id(x), id(scale)]


@pytest.mark.parametrize("named", [False, True])
def test_an_input_that_is_changed_before_backward_is_refused(named: bool) -> None:
    x = torch.ones(2, 4)
    block = recomputed()
    loss = (block(x=x) if named else block(x)).square().sum()
    x.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()

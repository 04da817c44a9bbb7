"""Blocks that run again in backward compute what they computed, however they are called."""

from __future__ import annotations

from collections import UserDict
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lightning_topt.techniques.recomputation import apply_recomputation


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Any, *, scale: Any = None) -> Tensor:
        x = x["x"] if isinstance(x, UserDict) else x  # which torch's pytrees do not open
        return self.linear(x) if scale is None else self.linear(x) * scale[0]


def recomputed() -> nn.Module:
    module = nn.ModuleDict({"block": Block()})
    apply_recomputation(module, ["block"], device=torch.device("meta"))
    return module["block"]


@pytest.mark.parametrize("is_held", [False, True])
@pytest.mark.parametrize("named", [False, True])
def test_random_states_are_kept_for_the_devices_of_the_block_and_all_arguments(
    named: bool, is_held: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A CPU has no states of devices, so this looks at the tensors whose devices torch looks up.
    seen: list[Any] = []

    def look(*args: Any) -> str:
        seen.extend(each for each in tree_leaves(args) if isinstance(each, Tensor))
        return "cpu"

    monkeypatch.setattr(torch.utils.checkpoint, "_infer_device_type", look)
    x, scale = torch.ones(2, 4), (torch.full((4,), 2.0),)
    block, given = recomputed(), UserDict(x=x) if is_held else x
    loss = (block(x=given, scale=scale) if named else block(given, scale=scale)).sum()
    assert seen[0].device.type == "meta"
    assert [id(value) for value in seen[1:]] == [*([] if is_held else [id(x)]), id(scale[0])]
    loss.backward()


@pytest.mark.parametrize("named", [False, True])
def test_an_input_that_is_changed_before_backward_is_refused(named: bool) -> None:
    x = torch.ones(2, 4)
    block = recomputed()
    loss = (block(x=x) if named else block(x)).square().sum()
    x.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()

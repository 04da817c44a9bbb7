"""Buffers that one step changes and the next one reads: no cut may lie between the two."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_topt.graph.flow_stages import assign_calls
from lightning_topt.graph.flow_trace import trace_flow


class Block(nn.Module):
    """Reads or updates a running mean beside its layer."""

    def __init__(self, center: Tensor, *, reads: bool = False, updates: bool = False) -> None:
        super().__init__()
        self.layer, self.reads, self.updates = nn.Linear(4, 4), reads, updates
        self.register_buffer("center", center)

    def forward(self, x: Tensor) -> Tensor:
        result = self.layer(x - self.center if self.reads else x)
        if self.updates:
            self.center.mul_(0.9).add_(result.detach().mean(0), alpha=0.1)
        return result


class Centered(nn.Module):
    """Its first block reads a running mean, which `late` makes: the second block, or the end of the
    step.
    """

    def __init__(self, late: str) -> None:
        super().__init__()
        center, self.late = torch.zeros(4), late
        self.register_buffer("center", center)
        self.first = Block(center, reads=bool(late))
        self.second = Block(center, updates=late.startswith("by"))

    def forward(self, x: Tensor) -> Tensor:
        result = self.second(self.first(x))
        if not self.late.startswith("by"):
            self.center.copy_(result.detach().mean(0))
        return result.sum()


@pytest.mark.parametrize(
    ("late", "is_refused"),
    [("by block 'second'", True), ("after the last block", True), ("", False)],
)
def test_buffers_of_the_step_before(late: str, is_refused: bool) -> None:
    flow = trace_flow(
        Centered(late),
        lambda module, batch: module(batch),
        torch.randn(2, 4),
        units=["first", "second"],
    )
    assign_calls(flow, [["first", "second"]])
    if not is_refused:
        assert assign_calls(flow, [["first"], ["second"]]) == (0, 1)
        return
    with pytest.raises(ValueError, match=f"'center' in the next step as it is changed {late}"):
        assign_calls(flow, [["first"], ["second"]])


class Scaled(nn.Module):
    """Divides by an average of what it has seen, or only keeps one, or computes with a buffer that
    stays.
    """

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.register_buffer("average", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        scale = self.average.view(2, 2).clone().flatten()
        with torch.no_grad():
            if self.how == "new":
                self.average = 0.9 * self.average + x.abs().mean(0)
            elif self.how != "stays":
                self.average.copy_(0.9 * self.average + x.abs().mean(0))
        return x if self.how == "kept" else x / scale


@pytest.mark.parametrize(
    ("block", "carried"),
    [
        (Scaled("changed"), {"0.average"}),
        (Scaled("new"), {"0.average"}),
        (Scaled("kept"), set()),
        (Scaled("stays"), set()),
        (nn.BatchNorm1d(4), set()),
        (torch.nn.utils.spectral_norm(nn.Linear(4, 4)), {"0.weight_u", "0.weight_v"}),
        (
            torch.nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4)),
            {"0.parametrizations.weight.0._u", "0.parametrizations.weight.0._v"},
        ),
    ],
)
@pytest.mark.parametrize("units", [["0", "1"], ["1"]])
def test_buffers_that_a_step_changes_and_computes_with(
    block: nn.Module, carried: set[str], units: list[str]
) -> None:
    module: Any = nn.Sequential(block, nn.Linear(4, 4))
    flow = trace_flow(
        module, lambda module, batch: module(batch).sum(), torch.randn(3, 4), units=units
    )
    assert flow.carried <= carried and bool(flow.carried) == bool(carried)

"""What crosses between blocks by the captured operators, against a trace of the step's calls."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor, nn

from lightning_topt.costs.segments import chain_of, find_crossings, locate, uses_of_parameters
from lightning_topt.graph.blocks import choose_blocks
from lightning_topt.graph.capture import capture
from lightning_topt.graph.flow_trace import trace_flow
from lightning_topt.graph.step_flow import assign_calls
from tests.models import GPT
from tests.techniques.tensor_parallel.traced import Step


class Unet(nn.Module):
    """Skips over the middle; functional operators between blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.down, self.middle = nn.Linear(8, 8), nn.Linear(8, 16), nn.Linear(16, 16)
        self.up, self.last = nn.Linear(16, 8), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        first = self.first(x)
        down = self.down(first).relu()
        up = self.up(self.middle(down) + down)
        return self.last(torch.cat([up, first * 2], dim=-1))


class Masks(nn.Module):
    """An encoder's result and a mask of it are read by all layers of a decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Linear(8, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        encoded = self.encode(x)
        mask, y = encoded > 0, x
        for layer in self.layers:
            y = layer(torch.where(mask, y, encoded))
        return y + encoded.mean()


def rows() -> Tensor:
    return torch.zeros(4, 8)


CASES = {
    "gpt": (
        lambda: GPT(4),
        lambda: (torch.zeros(4, 8, dtype=torch.long),) * 2,
        [f"blocks.{n}" for n in range(4)],
    ),
    "embedding": (
        lambda: GPT(2),
        lambda: (torch.zeros(4, 8, dtype=torch.long),) * 2,
        ["tokens", "blocks.0", "blocks.1"],
    ),
    "unet": (
        lambda: Step(Unet()),
        rows,
        [f"inner.{name}" for name in ("first", "down", "middle", "up", "last")],
    ),
    "masks": (
        lambda: Step(Masks()),
        rows,
        ["inner.encode", *(f"inner.layers.{n}" for n in range(3))],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_crossings_are_those_of_a_traced_step(case: str) -> None:
    make, batch_of, names = CASES[case]
    module, batch = make(), batch_of()
    graph = capture(module, batch)
    blocks = choose_blocks(graph)
    graph = graph.with_blocks(
        [block for block in blocks if block.name == ""]
        + [type(blocks[0])(name, group=n + 1, recomputable=False) for n, name in enumerate(names)]
    )
    assert chain_of(graph) == tuple(names)
    found = find_crossings(graph, locate(graph))
    flow = trace_flow(
        module, lambda module, batch: module.training_step(batch, 0), batch, units=names
    )
    crossed = 0.0
    for n in range(1, len(names)):
        stages = assign_calls(flow, [names[:n], names[n:]])
        specs = [flow.calls[ref.call].leaves[ref.leaf] for ref in flow.crossings(stages)]
        assert found.forward[n].at(4) == sum(spec.nbytes for spec in specs)
        assert found.backward[n].at(4) == sum(spec.nbytes for spec in specs if spec.requires_grad)
        assert (
            found.forward[n].at(12) == 3 * found.forward[n].at(4) or case == "embedding"
        )  # positions are of no sample
        crossed += found.forward[n].at(4)
    assert crossed > 0


def test_a_tied_parameter_is_used_where_it_is_read_first_and_last() -> None:
    graph = capture(GPT(4, tied=True), (torch.zeros(4, 8, dtype=torch.long),) * 2)
    segments = locate(graph)
    uses = uses_of_parameters(graph, segments, find_crossings(graph, segments).places)
    assert (
        uses["tokens.weight"] == (0, 3)
        and uses["positions.weight"] == (0,)
        and uses["norm.weight"] == (3,)
    )
    assert all(uses[f"blocks.{n}.up.weight"] == (n,) for n in range(4))
    assert {place for places in itertools.chain(uses.values()) for place in places} == {0, 1, 2, 3}

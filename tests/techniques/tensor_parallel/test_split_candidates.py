"""Splits of whole models, and the steps of one rank under them."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import Tensor, nn

from lightning_topt.graph.kernels import shown_collective
from lightning_topt.graph.op_config import Shard
from lightning_topt.graph.op_graph import OpGraph
from lightning_topt.techniques.tensor_parallel.split_layouts import SplitLayout
from lightning_topt.techniques.tensor_parallel.split_model import SplitModel
from lightning_topt.techniques.tensor_parallel.split_prices import SplitPrices
from lightning_topt.techniques.tensor_parallel.split_search import search_totals
from tests.models import GPT, MLP
from tests.techniques.tensor_parallel.test_split_search import short
from tests.techniques.tensor_parallel.traced import Step, along, prices, run, trace

WIDTH, LAYERS = 256, 4


@pytest.fixture(scope="module")
def gpt() -> SplitModel:
    module, batch = (
        GPT(LAYERS, WIDTH, 8, vocab=2048, context=128),
        (torch.zeros(8, 128, dtype=torch.long),) * 2,
    )
    found, graph = trace(module, batch)
    return SplitModel(module, batch, graph, found)


def costs(model: SplitModel, ranks: int = 2) -> SplitPrices:
    return prices(model.module, ranks)


def collectives(graph: OpGraph) -> Counter[tuple[str, int]]:
    found: Counter[tuple[str, int]] = Counter()
    for op in graph.ops:
        for kernel in (*op.forward, *op.backward):
            if (shown := shown_collective(kernel)) is not None:
                found[shown[0], round(kernel.bytes.at(graph.batch_size))] += kernel.count
    return found


def test_all_that_is_there_once_is_split_together(gpt: SplitModel) -> None:
    """Logits stay split from the head, a block of its own, to the loss outside of it."""
    assert "head" in {block.name for block in gpt.graph.blocks}
    fastest = gpt.candidates(costs(gpt))[0]
    assert fastest.placements["head.weight"] == Shard(0)
    local = gpt.local_graph(fastest.layout, along(2))
    assert local is not None
    samples = 8 * 128 * 4
    assert collectives(local)["all_reduce", samples] == 3  # of the loss, one number per sample
    assert not {op for op, _ in collectives(local)} - {"all_reduce"}


def test_least_state_and_fewest_bytes_are_among_the_candidates(gpt: SplitModel) -> None:
    counts = set()
    for ranks in (2, 8):
        everything = search_totals(gpt._regions, costs(gpt, ranks))
        few = gpt.candidates(costs(gpt, ranks))
        counts.add(len(few))
        least = min(split.state_bytes for split in everything)
        assert min(split.state_bytes for split in few) <= 1.02 * least
        total = min(split.state_bytes + split.activation_bytes for split in everything)
        assert min(split.state_bytes + split.activation_bytes for split in few) <= 1.02 * total
        assert few[0].seconds == everything[0].seconds
    assert max(counts) > 1


@pytest.mark.parametrize("ranks", [2, 8])
def test_the_graph_of_a_rank_makes_the_collectives_of_its_run(gpt: SplitModel, ranks: int) -> None:
    for split in gpt.candidates(costs(gpt, ranks)):
        local = gpt.local_graph(split.layout, along(ranks))
        assert local is not None
        made = run(gpt.module, gpt.batch, split.placements, ranks)
        assert collectives(local) == Counter((call.op, call.size) for call in made)
        state = sum(4 * parameter.numel for parameter in local.parameters)
        counts = {
            name: ranks if isinstance(p, Shard) else 1 for name, p in split.placements.items()
        }
        assert state == sum(4 * p.numel // counts.get(p.name, 1) for p in gpt.graph.parameters)


def test_a_model_without_repetitions_is_one_region() -> None:
    module, batch = MLP((64, 256, 64, 32)), torch.zeros(512, 64)
    found, graph = trace(module, batch)
    fastest, *_ = SplitModel(module, batch, graph, found).candidates(prices(module, 2))
    assert short(fastest.placements)["0.weight"] == Shard(0)
    assert short(fastest.placements)["2.weight"] == Shard(1)


class Hidden(nn.Module):
    """A product that torch functions do not see."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        with torch._C.DisableTorchFunction():
            x = x * 2
        return self.second(x)


def test_code_that_cannot_run_on_slices_has_no_graph() -> None:
    module, batch = Step(Hidden()), torch.zeros(512, 64)
    found, graph = trace(module, batch)
    model = SplitModel(module, batch, graph, found)
    column = {"inner.first.weight": (Shard(0),), "inner.first.bias": (Shard(0),)}
    assert model.local_graph(SplitLayout(column, {}), along(2)) is None
    (why,) = model.refusals(2)
    assert "module 'inner" in why and "works on tensors beside torch's functions" in why
    assert model.why_whole(2) == why and model.refusals(4) == []
    other = SplitLayout({"inner.second.weight": (Shard(0),)}, {})
    assert model.local_graph(other, along(2)) is not None

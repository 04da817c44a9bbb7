"""Which parameters to split, found by a walk: as trying everything does."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from lightning_topt.costs.cluster import Cluster, Link
from lightning_topt.graph.op_config import Placement, Replicate, Shard
from lightning_topt.techniques.tensor_parallel.function_trace import FunctionTrace
from lightning_topt.techniques.tensor_parallel.op_rules import KINDS
from lightning_topt.techniques.tensor_parallel.op_rules.reductions import NORM
from lightning_topt.techniques.tensor_parallel.split_prices import BlockSplit, SplitPrices
from lightning_topt.techniques.tensor_parallel.split_search import search_splits
from tests.models import GPT, MEGATRON_BLOCK, MLP, GPTBlock
from tests.techniques.tensor_parallel.traced import (
    FAST,
    LlamaBlock,
    Step,
    price_split,
    prices,
    run,
    trace,
)

SLOW = replace(FAST, intra=Link(1e-4, 1e8))
COLUMN, ROW = Shard(0), Shard(1)
LLAMA_MLP = {"gate.weight": COLUMN, "up.weight": COLUMN, "down.weight": ROW}
LLAMA_BLOCK = {
    "q.weight": COLUMN,
    "k.weight": COLUMN,
    "v.weight": COLUMN,
    "o.weight": ROW,
    **LLAMA_MLP,
}


def short(placements: Mapping[str, Placement]) -> dict[str, Placement]:
    return {".".join(name.split(".")[-2:]): placement for name, placement in placements.items()}


def of_block(found: FunctionTrace, costs: SplitPrices) -> list[BlockSplit]:
    """Splits of the module "inner" as one of several blocks: what crosses its border is whole."""
    return search_splits(
        found.calls_of("inner", ["inner"]), costs, whole=found.whole_at("inner", ["inner"])
    )


def values(split: BlockSplit) -> tuple[float, ...]:
    return tuple(
        float(f"{value:.9g}")
        for value in (split.seconds, split.state_bytes, split.activation_bytes)
    )


def everything(
    found: FunctionTrace, costs: SplitPrices, module: nn.Module, whole: set[int]
) -> set[tuple[float, ...]]:
    """The Pareto set of all placements of all parameters but norms, a few numbers."""
    norms = {
        ref.parameter for call in found.calls if KINDS.get(call.func) is NORM for ref in call.inputs
    }
    legal: list[Sequence[tuple[str, Placement]]] = []
    for name, parameter in module.named_parameters():
        splits = [Shard(dim, parts) for dim in range(parameter.ndim) for parts in (1, 2, 3)]
        fits = [
            s
            for s in splits
            if parameter.shape[s.dim] % (s.parts * costs.group.size) == 0 and name not in norms
        ]
        legal.append([(name, Replicate()), *((name, split) for split in fits)])
    tried = (
        price_split(found.calls, costs, dict(chosen), whole=whole)
        for chosen in itertools.product(*legal)
    )
    points = sorted({values(split) for split in tried if split is not None})
    kept: list[tuple[float, ...]] = []
    for point in points:
        if not any(all(a <= b for a, b in zip(other, point, strict=True)) for other in kept):
            kept.append(point)
    return set(kept)


class Fused(nn.Module):
    """Queries, keys and values in one matrix, without a head to speak of."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(12, 36, bias=False), nn.Linear(12, 12)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        return x + self.out(torch.sigmoid(q) * k * v)


class Twice(nn.Module):
    """One matrix used in two places, and one that is transposed by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.turn = nn.Parameter(torch.zeros(12, 8)), nn.Parameter(torch.zeros(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(x @ self.table)
        return (hidden @ self.turn.t()) @ self.table.t()


class Joined(nn.Module):
    """Features of two matrices side by side, read by a third one."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.out = (
            nn.Linear(*sizes, bias=False) for sizes in ((12, 24), (12, 24), (48, 12))
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.cat([torch.relu(self.a(x)), self.b(x)], -1))


@pytest.mark.parametrize("cluster", [FAST, SLOW], ids=["fast", "slow"])
@pytest.mark.parametrize(
    ("inner", "batch"),
    [
        (nn.Sequential(nn.Linear(12, 24), nn.GELU(), nn.Linear(24, 12)), torch.zeros(4, 6, 12)),
        (Fused(), torch.zeros(4, 6, 12)),
        (Twice(), torch.zeros(5, 12)),
        (Joined(), torch.zeros(4, 6, 12)),
        (
            nn.Sequential(nn.LayerNorm(12), nn.Linear(12, 12, bias=False), nn.Softmax(-1)),
            torch.zeros(4, 12),
        ),
    ],
    ids=["mlp", "fused", "twice", "joined", "norm"],
)
def test_the_search_finds_what_trying_everything_finds(
    inner: nn.Module, batch: Tensor, cluster: Cluster
) -> None:
    module = Step(inner)
    found, _ = trace(module, batch)
    costs = prices(module, 2, cluster=cluster)
    searched = search_splits(found.calls, costs)
    assert {values(split) for split in searched} == everything(found, costs, module, set())
    for split in searched:
        again = price_split(found.calls, costs, split.placements)
        assert again is not None
        assert values(again) == values(split)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize(
    ("inner", "expected"),
    [
        (GPTBlock(256, 8, 0.0), MEGATRON_BLOCK),
        (LlamaBlock(256, hidden=768), LLAMA_BLOCK),
        (LlamaBlock(256, groups=8, hidden=768), LLAMA_BLOCK),
    ],
    ids=["gpt", "grouped", "ungrouped"],
)
def test_megatrons_pairs_come_out(
    inner: nn.Module, expected: dict[str, Placement], ranks: int
) -> None:
    module, batch = Step(inner), torch.zeros(8, 128, 256)
    found, _ = trace(module, batch)
    best = of_block(found, prices(module, ranks))[0]
    assert short(best.placements) == expected


def test_heads_that_do_not_divide_are_moved_around_attention() -> None:
    """Two groups of keys for four ranks."""
    module = Step(LlamaBlock(256, groups=2, hidden=768))
    found, _ = trace(module, torch.zeros(8, 128, 256))
    best = of_block(found, prices(module, 4))[0]
    assert {name: p for name, p in short(best.placements).items() if name in LLAMA_MLP} == LLAMA_MLP
    assert Counter(
        call.op for call in run(module, torch.zeros(8, 128, 256), best.placements, 4)
    ) != {"all_reduce": 4}


def test_slow_links_keep_all_whole_unless_memory_counts() -> None:
    module = Step(GPTBlock(64, 8, 0.0))
    found, _ = trace(module, torch.zeros(2, 4, 64))
    fastest, *_, least = of_block(found, prices(module, 2, cluster=SLOW))
    assert fastest.placements == {}
    assert short(least.placements) == MEGATRON_BLOCK


@pytest.mark.parametrize(
    ("module", "batch"),
    [
        (Step(GPTBlock(64, 8, 0.0)), torch.zeros(4, 8, 64)),
        (Step(LlamaBlock()), torch.zeros(4, 8, 64)),
        (Step(Twice()), torch.zeros(4, 12)),
        (MLP(), torch.zeros(4, 16)),
        (GPT(layers=1, width=64, heads=8), (torch.zeros(4, 8, dtype=torch.long),) * 2),
    ],
    ids=["gpt block", "llama", "twice", "mlp", "gpt"],
)
def test_collectives_are_those_of_the_run(module: nn.Module, batch: object) -> None:
    """Not only those of the best split."""
    found, _ = trace(module, batch)
    costs = prices(module, 2)
    splits = search_splits(found.calls, replace(costs, cluster=SLOW)) + search_splits(
        found.calls, costs
    )
    assert len({str(split.placements) for split in splits}) > 1
    for split in splits[:: len(splits) // 8 or 1]:
        predicted: list[tuple[str, float]] = []
        price_split(found.calls, costs, split.placements, collectives=predicted)
        calls = run(
            module, batch, split.placements, 2
        )  # an all-to-all notes what one rank gives, a price is of the whole
        made = [
            (call.op, float(call.size) * (2 if call.op == "all_to_all" else 1)) for call in calls
        ]
        assert Counter(predicted) == Counter(made), split.placements

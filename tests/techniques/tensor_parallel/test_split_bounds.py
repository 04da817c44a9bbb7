"""The bound of a split step costs at most what the captured step of a rank costs, under every
plan.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lightning_topt.costs.cluster import Cluster, Link
from lightning_topt.costs.communication import Group
from lightning_topt.costs.optimizer import read_optimizer
from lightning_topt.costs.training_step import TrainingStep
from lightning_topt.graph.mesh_axes import Axis, Mesh, data_mesh
from lightning_topt.graph.op_config import Placement, Shard
from lightning_topt.techniques.plan_costs import PlanBatch, PlanCosts
from lightning_topt.techniques.tensor_parallel.split_model import SplitModel
from lightning_topt.techniques.tensor_parallel.split_prices import SplitPrices
from lightning_topt.techniques.tensor_parallel.split_search import ModelSplit
from lightning_topt.techniques.tensor_parallel.split_steps import step_of
from tests.models import GPT, MLP, ConvNet
from tests.techniques.tensor_parallel.test_split_models import CASES
from tests.techniques.tensor_parallel.traced import DEVICE, FAST, LlamaBlock, Step, trace

# A host that issues kernels as fast as the device runs them, and dear links.
LAB = Cluster(
    "lab",
    replace(DEVICE, launch_seconds=3e-6),
    devices_per_node=64,
    num_nodes=1,
    intra=Link(1e-6, 1e10),
)
SPLITS = 2


class Loss(nn.Module):
    """A step that makes its own batch."""

    def __init__(self, inner: nn.Module, loss: Callable[[nn.Module], Tensor]) -> None:
        super().__init__()
        self.inner, self.loss = inner, loss

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.loss(self.inner)


class Sliced(nn.Module):
    """A whole tensor of which only a slice is kept, and heads whose copy is none on a rank that has
    one of them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(64), nn.Linear(64, 64)
        self.down = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        y, z = self.norm(x), self.up(x)
        heads = z.unflatten(-1, (4, 16)).transpose(1, 2).contiguous()
        return x + self.down(z * y + heads.square().transpose(1, 2).flatten(2))


def tokens(samples: int = 4, steps: int = 32) -> tuple[Tensor, Tensor]:
    return (torch.zeros(samples, steps, dtype=torch.long),) * 2


def library(name: str) -> tuple[nn.Module, Any]:
    make, loss, _ = CASES[name]
    return Loss(make(), loss), torch.zeros(2, 1)


MODELS: dict[str, Callable[[], tuple[nn.Module, Any]]] = {
    "gpt, dropout, tied": lambda: (
        GPT(3, 64, 8, vocab=64, context=32, dropout=0.1, tied=True),
        tokens(),
    ),
    "llama blocks": lambda: (
        Step(nn.Sequential(*(LlamaBlock() for _ in range(3)))),
        torch.zeros(4, 16, 64),
    ),
    "slices": lambda: (Step(nn.Sequential(*(Sliced() for _ in range(3)))), torch.zeros(4, 16, 64)),
    "mlp": lambda: (MLP((64, 256, 64, 32)), torch.zeros(512, 64)),
    "convolutions": lambda: (
        ConvNet(),
        (torch.zeros(8, 1, 8, 8), torch.zeros(8, dtype=torch.long)),
    ),
    "t5": lambda: library("t5"),  # queries, keys and values are blocks of their own, of one input
    # attention to itself and to others: one structure, called differently
    "decoder": lambda: library("decoder"),
}


def splits(model: SplitModel, prices: SplitPrices) -> list[ModelSplit]:
    found = [split for split in model.splits(prices) if split.placements]
    return found[:: max(1, len(found) // SPLITS)][:SPLITS]


def half() -> AbstractContextManager[Any]:
    """Computation in bfloat16, for which autocast and its gradients change dtypes."""
    return torch.autocast("cpu", dtype=torch.bfloat16)


def pairs(
    name: str,
    cluster: Cluster,
    ranks: int,
    given: list[dict[str, Placement]] | None = None,
    *,
    context: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> Iterator[tuple[TrainingStep, TrainingStep]]:
    """The bound and the captured step under some splits."""
    module, batch = MODELS[name]()
    found, graph = trace(module, batch, forward_context=context)
    adam = torch.optim.Adam(module.parameters())
    optimizer = read_optimizer([adam], named_parameters=module.named_parameters())
    prices, model = (
        SplitPrices(cluster, optimizer, Group(ranks)),
        SplitModel(module, batch, graph, found, forward_context=context),
    )
    whole = TrainingStep(graph, cluster, optimizer, data_mesh(2 * ranks), graph.batch_size)
    mesh = Mesh((Axis("data", 2), Axis("tensor", ranks)))
    for split in (
        splits(model, prices)
        if given is None
        else [ModelSplit(each, 0.0, 0.0, 0.0) for each in given]
    ):
        if (local := model.local_graph(split, ranks)) is not None:
            bound = model.bound_graph(split, prices)
            yield (
                step_of(whole, bound, mesh=mesh, split=split),
                step_of(whole, local, mesh=mesh, split=split),
            )


def plans(step: TrainingStep) -> PlanBatch:
    """Plans that treat all blocks alike, and others."""
    costs = PlanCosts(step)
    configs = {block.name: costs.configs(block) for block in step.graph.blocks}
    counts = np.array([len(some) for some in configs.values()])
    drawn = np.random.default_rng(0).integers(0, counts, (12, len(counts)))
    uniform = np.minimum(np.arange(counts.max())[:, None], counts - 1)
    return PlanBatch(costs, configs, np.concatenate([uniform, drawn]))


def assert_is_bound(bound: TrainingStep, local: TrainingStep) -> None:
    assert [segment.block for segment in bound.graph.timeline] == [
        segment.block for segment in local.graph.timeline
    ]
    # a slice may be made in a later block than what it is cut from
    for amount in ("kept_bytes", "output_bytes"):
        least, exact = (
            sum(getattr(s, amount).fixed for s in step.graph.timeline) for step in (bound, local)
        )
        assert least <= exact
    groups = Counter(block.group for block in bound.graph.blocks)
    for name in (block.name for block in bound.graph.blocks if groups[block.group] > 1):
        assert (
            bound.compute[name].sum(axis=1) <= local.compute[name].sum(axis=1) * (1 + 1e-9)
        ).all()
    assert [p.shape for p in bound.graph.parameters] == [p.shape for p in local.graph.parameters]
    device = replace(local.cluster.device, caching_allocator=True)
    reserves = {"cluster": replace(local.cluster, device=device)}
    for given in ({}, {"returns_memory": True}, reserves):
        bounds, costs = (plans(replace(step, **given)) for step in (bound, local))
        assert bounds.configs == costs.configs
        assert (bounds.seconds <= costs.seconds * (1 + 1e-9)).all()
        assert (bounds.peak_bytes <= costs.peak_bytes * (1 + 1e-9)).all()


@pytest.mark.parametrize(
    ("name", "context"),
    [
        *((name, nullcontext) for name in MODELS),
        # a slice may not need a change of dtype, either
        *((name, half) for name in ("gpt, dropout, tied", "slices")),
    ],
)
def test_no_plan_costs_less_than_its_bound(
    name: str, context: Callable[[], AbstractContextManager[Any]]
) -> None:
    compared = [*pairs(name, LAB, 4, context=context)]
    for bound, local in compared:
        assert_is_bound(bound, local)
    assert compared


def test_what_a_rank_need_not_hold_does_not_count() -> None:
    column: dict[str, Placement] = {}
    for index in range(3):
        column |= {f"inner.{index}.up.weight": Shard(0), f"inner.{index}.up.bias": Shard(0)}
        column[f"inner.{index}.down.weight"] = Shard(1)
    ((bound, local),) = pairs("slices", LAB, 4, [column])
    assert_is_bound(bound, local)


def test_the_bound_of_a_transformer_is_close() -> None:
    module, batch = GPT(3, 1024, 16, vocab=512, context=256), tokens(2, 256)
    found, graph = trace(module, batch)
    adam = torch.optim.Adam(module.parameters())
    optimizer = read_optimizer([adam], named_parameters=module.named_parameters())
    prices, model = SplitPrices(FAST, optimizer, Group(4)), SplitModel(module, batch, graph, found)
    fastest = model.candidates(prices)[0]
    local = model.local_graph(fastest, 4)
    assert local is not None
    mesh = Mesh((Axis("data", 2), Axis("tensor", 4)))
    whole = TrainingStep(graph, FAST, optimizer, data_mesh(8), graph.batch_size)
    bound, exact = (
        plans(step_of(whole, each, mesh=mesh, split=fastest))
        for each in (model.bound_graph(fastest, prices), local)
    )
    assert (bound.seconds >= 0.97 * exact.seconds).all()
    assert (bound.peak_bytes >= 0.95 * exact.peak_bytes).all()

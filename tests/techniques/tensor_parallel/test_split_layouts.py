"""Layouts along one, two and three axes are found, and run as one process does."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_topt.costs.communication import Group
from lightning_topt.costs.optimizer import read_optimizer
from lightning_topt.demo import ByteGPT
from lightning_topt.graph.capture import capture
from lightning_topt.graph.mesh_axes import Axis, Mesh
from lightning_topt.techniques.tensor_parallel.function_trace import FunctionTrace
from lightning_topt.techniques.tensor_parallel.split_layouts import (
    BlockRule,
    SplitLayout,
    layout_axes,
)
from lightning_topt.techniques.tensor_parallel.split_model import SplitModel
from lightning_topt.techniques.tensor_parallel.split_prices import SplitPrices
from tests.launch import run_ranks
from tests.techniques.tensor_parallel.on_ranks import check, compare
from tests.techniques.tensor_parallel.test_split_models import gpt2, ids, llama
from tests.techniques.tensor_parallel.traced import FAST

BATCH = 8


class Language(nn.Module):
    """A training step around a model of Hugging Face's."""

    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.model = make()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self.model(input_ids=batch, labels=batch).loss
        return loss


class Perceptron(nn.Module):
    """Plain layers, none of them there twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 32), nn.LayerNorm(32), nn.Linear(32, 8)
        )

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return F.mse_loss(self.layers(batch), batch[:, :8])


def byte_gpt() -> nn.Module:
    module = ByteGPT(2, 32, 4, 8, dropout=0.1)
    module.log = lambda *args, **kwargs: None  # type: ignore[method-assign,assignment]
    return module


def numbers() -> Tensor:
    return torch.randn(BATCH, 16, generator=torch.Generator().manual_seed(0))


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "byte gpt": (byte_gpt, partial(ids, BATCH, 9)),
    "llama": (partial(Language, llama), partial(ids, BATCH, 8)),
    "gpt2": (partial(Language, gpt2), partial(ids, BATCH, 8)),
    "perceptron": (Perceptron, numbers),
}
RANKS = {"tensor_sequence": 4, "context": 4, "tensor_2d": 4, "tensor_3d": 8}
# no steps to split, and models that are split along these axes as another one is
LEFT_OUT = {
    "tensor_sequence": ("llama",),
    "context": ("perceptron", "gpt2"),
    "tensor_2d": ("llama",),
    "tensor_3d": ("llama", "gpt2"),
}


def split_model(name: str) -> SplitModel:
    make, batch = MODELS[name]
    module, trace = make(), FunctionTrace()
    graph = capture(module, batch(), adapt=trace.of, batch_scaling=False)
    return SplitModel(module, batch(), graph, trace)


def layout_of_model(model: SplitModel, layout: str) -> tuple[SplitLayout, tuple[Axis, ...]]:
    along = layout_axes(layout, RANKS[layout])
    module = model.module
    optimizer = read_optimizer(
        [torch.optim.Adam(module.parameters())], named_parameters=module.named_parameters()
    )
    prices = SplitPrices(FAST, optimizer, Group(along[-2:][0].size))
    return model.layout(layout, prices, along), along


def loss_of(batch: Callable[[], Tensor], module: nn.Module) -> Tensor:
    loss: Tensor = module.training_step(batch(), 0)  # type: ignore[operator]
    return loss


def runs(rank: int, found: dict[str, tuple[SplitLayout, tuple[Axis, ...]]]) -> dict[str, Any]:
    results = {}
    for name, (layout, along) in found.items():
        make, batch = MODELS[name.partition(": ")[2]]
        rest = dist.get_world_size() // Mesh(along).size
        mesh = Mesh((Axis("data", rest), *along)) if rest > 1 else Mesh(along)
        try:
            results[name] = compare(
                rank, make, partial(loss_of, batch), layout.placements, mesh, layout.rules
            )
        except Exception as error:
            raise RuntimeError(name) from error
    return results


def test_layouts_run_as_one_process() -> None:
    models = {name: split_model(name) for name in MODELS}
    found = {
        f"{layout}: {name}": layout_of_model(model, layout)
        for layout in RANKS
        for name, model in models.items()
        if name not in LEFT_OUT[layout]
    }
    for name, (layout, along) in found.items():
        assert models[name.partition(": ")[2]].local_graph(layout, along) is not None, name
    beside_data = "tensor_2d: byte gpt"
    of_8 = {n: each for n, each in found.items() if "3d" in n or n == beside_data}
    of_4 = {n: each for n, each in found.items() if n not in of_8}
    ranks = {8: run_ranks(runs, 8, of_8), 4: run_ranks(runs, 4, of_4)}
    for name in found:
        # The table of positions is split by features, the sum of the other one by step.
        check(
            [each[name] for each in ranks[8 if name in of_8 else 4]],
            whole_calls=1 if name == "tensor_sequence: byte gpt" else 0,
        )


@pytest.mark.parametrize("layout", ["tensor_sequence", "tensor_2d"])
def test_blocks_that_were_not_traced_are_placed_as_the_first_one(layout: str) -> None:
    """The norms of all blocks are whole by step, also of those whose calls the trace has not."""

    def deep() -> nn.Module:
        return Language(partial(llama, layers=8))

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(MODELS, "deep", (deep, partial(ids, BATCH, 8)))
        model = split_model("deep")
        found, _ = layout_of_model(model, layout)
    of_block = [
        {
            n.partition(f"layers.{i}.")[2]: p
            for n, p in found.placements.items()
            if f"layers.{i}." in n
        }
        for i in range(8)
    ]
    assert of_block[0] and all(each == of_block[0] for each in of_block)


@pytest.mark.parametrize("odd", ["placements", "rules"])
def test_a_block_that_is_split_otherwise_is_captured_itself(
    odd: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def deep() -> nn.Module:
        module = ByteGPT(8, 32, 4, 8)
        module.log = lambda *args, **kwargs: None  # type: ignore[method-assign,assignment]
        return module

    monkeypatch.setitem(MODELS, "deep", (deep, partial(ids, BATCH, 9)))
    model = split_model("deep")
    found, along = layout_of_model(model, "tensor_sequence")
    placements = {
        n: p
        for n, p in found.placements.items()
        if odd == "rules" or not n.startswith("blocks.3.mlp")
    }
    rules = {
        n: BlockRule(n) if (n, odd) == ("blocks.3", "rules") else rule
        for n, rule in found.rules.items()
    }
    changed = SplitLayout(placements, rules)
    assert changed != found
    short = model.local_graph(changed, along)
    assert model._stacks
    model.__dict__["_stacks"] = ()
    model.captured.clear()
    assert model.local_graph(changed, along) == short is not None

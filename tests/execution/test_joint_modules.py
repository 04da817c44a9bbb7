"""Models of transformers whose ranks bring a batch each and run them at once in their layers,
against DDP.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_topt.execution.engine import Engine
from lightning_topt.graph.capture import capture
from lightning_topt.graph.mesh_axes import Axis, Mesh
from lightning_topt.graph.op_config import OpConfig
from lightning_topt.graph.structures import map_tensors
from lightning_topt.plan.parallel_plan import BlockPlan, ParallelPlan
from lightning_topt.techniques.tensor_parallel.function_trace import FunctionTrace
from lightning_topt.techniques.tensor_parallel.split_model import SplitModel
from tests.foreign import transformers_models
from tests.launch import run_ranks
from tests.techniques.tensor_parallel.traced import prices

MODELS = {  # modules that are joint, at least
    "llama": ["model.model.layers.0", "model.model.layers.1", "model.model.embed_tokens"],
    # its embeddings expand a constant
    "bert": ["model.bert.encoder.layer.0", "model.bert.encoder.layer.1"],
    "t5": [
        "model.encoder.block.0.layer.0.SelfAttention.q",
        "model.decoder.block.1.layer.0.SelfAttention.o",
    ],
    "vit": ["model.vit.layers.0", "model.vit.layers.1"],
    # a loss within the batch
    "clip": ["model.text_model.encoder.layers.0", "model.vision_model.encoder.layers.0"],
}
MESH = Mesh((Axis("data", 1), Axis("tensor", 2)))
CPU = torch.device("cpu")
Around = Callable[[], AbstractContextManager[Any]]


def joint_plan(module: nn.Module, batch: Any) -> ParallelPlan:
    """The plan that splits most, with all modules joint that may be."""
    trace, larger = FunctionTrace(), FunctionTrace()
    graph = capture(module, batch, batch_scaling=False, adapt=trace.of)
    samples = graph.batch_size
    twice = map_tensors(batch, lambda tensor: torch.cat([tensor, tensor]))
    capture(module, twice, batch_scaling=False, adapt=larger.of, like=graph)
    trace.first_borders, trace.first_samples = larger.borders, 2 * samples
    split, along = SplitModel(module, batch, graph, trace), prices(module, 2)
    chosen, local = split.candidates(along)[-1], None
    while local is None:
        layout = split.joint_layout(chosen, along)
        assert layout is not None, split.refusals(2)
        local = split.local_graph_of(layout, (MESH.axes[1],))
    placed = {block.name: dict[str, Any]() for block in graph.blocks}
    whole = OpConfig.zero(0, axes=2)
    for name, (placement,) in layout.placements.items():
        block = next(b for b in sorted(placed, reverse=True) if name.startswith(f"{b}.") or not b)
        placed[block][name.removeprefix(f"{block}.")] = (whole.storage.parameters[0], placement)
    blocks = [
        BlockPlan(name, replace(whole, parameters=tuple(each.items())))
        for name, each in placed.items()
    ]
    return ParallelPlan.of_blocks(blocks, mesh=MESH, joint=layout.joint)


def train(
    step: Callable[[Any], Tensor],
    module: nn.Module,
    batches: list[Any],
    around: Around,
    attach: Any = None,
) -> Any:
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3, eps=1e-4)
    if attach is not None:
        attach([optimizer])
    losses = []
    for batch in batches:
        with around():
            loss = step(batch)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, torch.rand(1)


class StepOf(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, batch: Any) -> Any:
        return self.inner.training_step(batch, 0)  # type: ignore[operator]


def both(rank: int, made: dict[str, tuple[Any, list[Any], ParallelPlan]]) -> dict[str, Any]:
    warnings.simplefilter("ignore")
    found = {}
    for name, (module, batches, plan) in made.items():
        module.log = lambda *_, **__: None
        alone, own = copy.deepcopy(module), batches[rank::2]
        torch.manual_seed(rank)
        expected = train(DistributedDataParallel(StepOf(alone)), alone, own, nullcontext)
        engine = Engine(plan, module, device=CPU)
        root = engine.apply()
        forward = module.forward

        def step(
            batch: Any, module: Any = module, root: Any = root, forward: Any = forward
        ) -> Tensor:
            def as_step(batch: Any) -> Any:  # as Lightning calls it through DDP
                module.forward = forward
                return module.training_step(batch, 0)

            module.forward = as_step
            loss: Tensor = root(batch)
            return loss

        torch.manual_seed(rank)
        got = train(step, module, own, engine.around_step, engine.attach_optimizers)
        engine.release()
        states = alone.state_dict(), module.state_dict()
        found[name] = (
            expected,
            got,
            [{key: value.clone() for key, value in state.items()} for state in states],
        )
    return found


@pytest.fixture(scope="module")
def results() -> list[dict[str, Any]]:
    made = {}
    for name, least in MODELS.items():
        torch.manual_seed(0)
        module, loader = getattr(transformers_models, name)()
        batches = list(loader)[:4]
        module.train()
        plan = joint_plan(module, batches[0])
        assert {each.module for each in plan.joint} >= {*least}
        made[name] = module, batches, ParallelPlan.from_yaml(plan.to_yaml())
    return run_ranks(both, 2, made)


@pytest.mark.parametrize("name", MODELS)
def test_models_train_as_under_ddp(results: list[dict[str, Any]], name: str) -> None:
    """Losses of each rank, random numbers afterwards, weights; dropout as the model has it."""
    for of_rank in results:
        (losses, drawn), (own_losses, own_drawn), (expected, found) = of_rank[name]
        assert own_losses == pytest.approx(losses, rel=1e-5) and torch.equal(drawn, own_drawn)
        for key, value in expected.items():
            torch.testing.assert_close(
                found[key], value, rtol=1e-5, atol=1e-5, msg=lambda m, k=key: f"{k}: {m}"
            )

"""Plans with tensor axes verified on fake groups of many ranks, against Megatron's formulas."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch.core.optimizer import _configure_optimizers

from lightning_topt.execution.held_bytes import KINDS
from lightning_topt.execution.observed_step import rehearse_rank, with_observations
from lightning_topt.execution.verify_plan import verify_plan
from lightning_topt.graph.mesh_axes import Axis, Mesh
from lightning_topt.graph.op_config import OpConfig, Replicate
from lightning_topt.plan.parallel_plan import BlockPlan, ParallelPlan
from lightning_topt.plan.plan_values import PRESETS
from tests.models import GPT, MEGATRON_BLOCK, batch_for

LAYERS, WIDTH, SAMPLES, CONTEXT = 3, 64, 4, 8
SPLIT_ELEMENTS = (
    12 * WIDTH**2 + 7 * WIDTH
)  # of a layer: four products, and the biases of the two that are split by columns
OTHER_ELEMENTS = 6 * WIDTH  # two norms and the other two biases


def gpt() -> GPT:
    return GPT(layers=LAYERS, width=WIDTH, heads=8, context=CONTEXT)


def optimizers_of(module: Any) -> list[torch.optim.Optimizer]:
    return _configure_optimizers(module.configure_optimizers())[0]


def megatron(data: int, tensor: int, preset: str) -> ParallelPlan:
    """Return a plan in which every layer is split as section 3 of arXiv 1909.08053 has it, the rest
    whole.
    """
    mesh = Mesh((Axis("data", data), Axis("tensor", tensor)))
    storage = PRESETS[preset].storage(mesh)
    split = tuple((name, (Replicate(), placement)) for name, placement in MEGATRON_BLOCK.items())
    blocks = [
        BlockPlan(f"blocks.{index}", OpConfig(storage, parameters=split)) for index in range(LAYERS)
    ]
    return ParallelPlan.of_blocks([*blocks, BlockPlan("", OpConfig(storage))], mesh=mesh)


@pytest.mark.parametrize("data", [8, 64])
@pytest.mark.parametrize("preset", ["ddp", "zero1", "zero3"])
def test_split_layers_on_many_ranks(preset: str, data: int) -> None:
    tensor, plan = 8, megatron(data, 8, preset)
    with torch.device("meta"):
        module = gpt()
    alone = verify_plan(plan, module, optimizers_of=optimizers_of)
    last = plan.mesh.size - 1
    seen = rehearse_rank(
        plan, module, batch_for(gpt(), SAMPLES), optimizers_of=optimizers_of, rank=last
    )
    found = with_observations(alone, [seen], where="of a fake group")
    assert found.would_run, found.problems
    # Every data rank holds a part of its slice of a layer under ZeRO-3, and all of it otherwise.
    of_layer = found.held["blocks.1"][:, KINDS.index("parameters")]
    slices = 4 * (SPLIT_ELEMENTS // tensor + OTHER_ELEMENTS)
    assert len(of_layer) == data * tensor
    assert of_layer.sum() == slices * tensor * (1 if preset == "zero3" else data)
    # Two all-reduces of a layer in each pass, of a whole activation: 8 (P - 1) / P Th elements sent
    # by a ring.
    sums = {
        row.during: (row.op, row.count, row.nbytes)
        for row in found.collectives
        if row.axis == "tensor"
    }
    expected = "all_reduce", 2 * LAYERS, 2 * LAYERS * SAMPLES * CONTEXT * WIDTH * 4
    assert sums == {"forward": expected, "backward": expected}
    assert {row.ranks for row in found.collectives} == {tensor, data}

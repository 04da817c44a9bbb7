"""Plans verified without ranks: what each rank would hold, against a slow twin and real ranks."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache, partial

import numpy as np
import pytest
import torch
from lightning.pytorch.core.optimizer import _configure_optimizers
from torch import nn

from lightning_topt.communication import BF16, TopK
from lightning_topt.costs.cluster import Cluster, Device, Link
from lightning_topt.costs.optimizer import read_optimizer
from lightning_topt.execution.verify_plan import KINDS, verify_plan
from lightning_topt.graph.capture import capture
from lightning_topt.graph.mesh_axes import Axis, Mesh, data_mesh, hybrid_mesh
from lightning_topt.graph.op_config import OpConfig, Replicate, Shard, Storage
from lightning_topt.plan.parallel_plan import BlockPlan, ParallelPlan, StagePlan, preset_plan
from lightning_topt.plan.plan_values import PRESETS
from tests.execution.observed_ranks import autocast, observe, priced
from tests.launch import run_on_pool
from tests.models import GPT, MEGATRON_BLOCK, ConvNet, TunedGPT, batch_for

LAYERS = 3
BLOCKS = [f"blocks.{index}" for index in range(LAYERS)]


def optimizers_of(module):
    return _configure_optimizers(module.configure_optimizers())[0]


def gpt(**given):
    return GPT(layers=LAYERS, **given)


def on_meta(make=gpt, **given):
    with torch.device("meta"):
        return make(**given)


def plan_of(preset, ranks, *, blocks=BLOCKS, recompute=()):
    mesh = hybrid_mesh(ranks // 2, 2) if "hybrid" in preset else data_mesh(ranks)
    return preset_plan(PRESETS[preset], mesh=mesh, blocks=blocks, recompute=recompute)


def mixed_plan(ranks):
    """Every level in one plan, on two axes: shards over all ranks, over two, and none."""
    mesh = hybrid_mesh(ranks // 2, 2)
    levels = [
        OpConfig.zero(3, axes=2),
        OpConfig.zero(2, axes=2, over=[1]),
        OpConfig.zero(1, axes=2),
    ]
    named = [BlockPlan(name, config) for name, config in zip(BLOCKS, levels, strict=True)]
    return ParallelPlan.of_blocks([*named, BlockPlan("", OpConfig.zero(0, axes=2))], mesh=mesh)


# ---- what is held, against a twin that cuts tensors ----------------------------------------------


def cut_bytes(module, plan, rank):
    """Bytes of parameters on one rank, by chunking each of them as torch does."""
    total = 0
    configs = {block.block: block.config for block in plan.blocks}
    for name, parameter in module.named_parameters():
        config = configs[next((block for block in BLOCKS if name.startswith(block + ".")), "")]
        axes = config.storage.sharded_axes("gradients")
        grid = np.arange(plan.mesh.size).reshape(plan.mesh.shape)
        place = np.argwhere(grid == rank)[0]
        shape = [plan.mesh.shape[a] for a in axes]
        index = int(np.ravel_multi_index([place[a] for a in axes], shape)) if axes else 0
        parts = parameter.chunk(plan.mesh.ranks_along(axes))
        total += parts[index].nbytes if index < len(parts) else 0
    return total


@pytest.mark.parametrize("ranks", [4, 512])
@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_at_any_size(preset, ranks):
    module, plan = on_meta(), plan_of(preset, ranks)
    found = verify_plan(plan, module, optimizers_of=optimizers_of)
    assert found.would_run and found.held_by_rank.shape == (ranks, len(KINDS))
    held = dict(zip(KINDS, found.held_by_rank.T, strict=True))
    whole = sum(p.nbytes for p in module.parameters())
    some = (0, 1, ranks - 1)
    assert [held["parameters"][r] for r in some] == [cut_bytes(module, plan, r) for r in some]
    assert (held["parameters"] == held["gradients"]).all()
    copies = {"zero2": 1, "zero3": 1, "hybrid_zero2": ranks // 2, "hybrid": ranks // 2}.get(
        preset, ranks
    )
    assert held["parameters"].sum() == copies * whole
    # AdamW has two moments of each parameter, and 4 bytes of a step count for each part
    parameters, is_shared = len(list(module.parameters())), preset == "zero1"
    counts = (held["optimizer_state"].sum() - 2 * (1 if is_shared else copies) * whole) / 4
    least, most = (parameters, parameters + ranks - 1) if is_shared else (parameters * ranks,) * 2
    assert least <= counts <= most
    assert sum(len(ranks) for ranks, _ in found.equal_ranks()) == ranks


# ---- the same from ranks, with what they exchange ------------------------------------------------


class Wide(GPT):
    """Large enough for several buckets and several messages."""

    def __init__(self):
        super().__init__(layers=LAYERS, width=384, heads=2, vocab=512)


def tuned(**given):
    return TunedGPT(layers=LAYERS, plain=2, **given)


MODELS = {
    "GPT": (gpt, BLOCKS),
    "ConvNet": (ConvNet, ["conv2", "hidden"]),
    "Wide": (Wide, BLOCKS),
    "adapters": (tuned, BLOCKS),
    "16 bits": (lambda: tuned(tied=True), BLOCKS),
}
DTYPES = {"16 bits": torch.bfloat16}  # of autocast


def plans_on(ranks):
    if ranks == 4:  # what two ranks cannot do, and shards of more than two
        recomputed = plan_of("zero3", ranks, recompute=BLOCKS)
        plans = [plan_of("zero1", ranks), plan_of("hybrid", ranks), recomputed]
        return [*(("GPT", plan) for plan in plans), ("16 bits", mixed_plan(ranks))]
    plans = [("GPT", plan_of("zero2", ranks))]
    plans.append(("ConvNet", plan_of("zero3", ranks, blocks=MODELS["ConvNet"][1])))
    plans += [("adapters", plan_of(name, ranks)) for name in ("ddp", "zero1", "zero3")]
    plans.append(("16 bits", plan_of("zero3", ranks)))
    plans.append(("16 bits", replace(plan_of("zero2", ranks), float32_gathers=True)))
    return [*plans, ("Wide", plan_of("zero1", ranks))]


def observe_all(rank, plans):
    seen = []
    for model, plan in plans:
        torch.manual_seed(0)
        module = MODELS[model][0]()
        batch, dtype = batch_for(module), DTYPES.get(model)
        seen.append(observe(plan, module, batch, optimizers_of, dtype=dtype))
    return seen


@cache
def captured(model):
    module, context = on_meta(MODELS[model][0]), partial(autocast, DTYPES.get(model))
    return module, capture(module, batch_for(module), forward_context=context)


@pytest.mark.parametrize("ranks", [2, 4])
def test_real_ranks_hold_what_was_said_and_call_what_was_priced(ranks):
    plans = plans_on(ranks)
    plans = [(model, plan.gathering(captured(model)[1])) for model, plan in plans]
    seen = run_on_pool(observe_all, ranks, plans)
    for index, (model, plan) in enumerate(plans):
        module, graph = captured(model)
        found = verify_plan(plan, module, optimizers_of=optimizers_of, graph=graph)
        assert found.would_run, found.problems
        profile = read_optimizer(optimizers_of(module), named_parameters=module.named_parameters())
        for rank in range(ranks):
            of_rank = {block: tuple(sizes[rank].tolist()) for block, sizes in found.held.items()}
            assert seen[rank][index].held == of_rank
            assert seen[rank][index].calls == priced(plan, graph, profile), plan.summary()


# ---- plans that would not run --------------------------------------------------------------------


class Scalar(GPT):
    """One parameter without dims, one of another dtype, one that no step uses."""

    def __init__(self):
        super().__init__(layers=LAYERS)
        self.temperature = nn.Parameter(torch.ones(()))
        self.blocks[0].narrow = nn.Parameter(torch.ones(4, dtype=torch.float16))

    def forward(self, tokens):
        return super().forward(tokens) * self.temperature


def of(config, block="blocks.0", *, mesh=None, rest=None, **given):
    """A plan of one block and the rest."""
    mesh = mesh or data_mesh(4)
    other = rest or OpConfig.zero(0, axes=len(mesh.axes))
    return ParallelPlan.of_blocks(
        [BlockPlan(block, config), BlockPlan("", other)], mesh=mesh, **given
    )


def split(name, *placements, ranks=4, block="blocks.0"):
    mesh = Mesh((Axis("data", 2), Axis("tensor", ranks)))
    config = OpConfig(Storage.zero(0, axes=2), parameters=((name, (Replicate(), *placements)),))
    return of(config, block, mesh=mesh)


def small_cluster(memory="80GB", nodes=1):
    link = Link(1e-6, 1e9)
    size = int(float(memory.removesuffix("GB")) * 1e9)
    return Cluster("small", Device("tiny", size, {"float32": 1e12}, 1e12), 4, nodes, link, link)


ZERO3 = OpConfig.zero(3)
STAGES = tuple(StagePlan((BlockPlan(name, OpConfig.zero(0)),)) for name in ("blocks.0", "blocks.1"))
TWO_STAGES = ParallelPlan(
    Mesh((Axis("pipeline", 2),)),
    (replace(STAGES[0], blocks=(*STAGES[0].blocks, BlockPlan("", OpConfig.zero(0)))), STAGES[1]),
    schedule="1f1b",
)
ANY = {"ddp": plan_of("ddp", 4), "zero2": plan_of("zero2", 4), "zero3": plan_of("zero3", 4)}
TENSOR_GROUPS = preset_plan(
    PRESETS["ddp"], mesh=Mesh((Axis("data", 2), Axis("tensor", 4))), blocks=BLOCKS
)
# model, plan, arguments, a word of the problem
BAD = [
    (gpt, replace(ANY["ddp"], fingerprint="0" * 16), {}, "another model"),
    (gpt, of(ZERO3, "layers.0"), {}, "layers.0"),
    (gpt, plan_of("zero3", 4, blocks=["blocks.0", "blocks.0.up"]), {}, "inside"),
    (gpt, of(ZERO3, "blocks"), {}, "called"),
    (lambda: gpt(tied=True), of(ZERO3, "head"), {}, "tied"),
    (gpt, TWO_STAGES, {}, "example"),
    (gpt, of(OpConfig.zero(1, axes=2, over=[0]), mesh=hybrid_mesh(2, 2)), {}, "technique"),
    (gpt, of(OpConfig.zero(0), rest=OpConfig.zero(0, recompute=True)), {}, "recomputed"),
    (gpt, replace(ANY["zero3"], gradient_exchange=BF16()), {}, "gradients"),
    (
        gpt,
        replace(ANY["ddp"], gradient_exchange=TopK(hierarchical=True)),
        {"cluster": small_cluster()},
        "nodes",
    ),
    (gpt, split("up.weight", Shard(0), ranks=5), {}, "5 ranks"),
    (gpt, split("qkv.weight", Shard(0, parts=3), ranks=5), {}, "3 parts"),
    (gpt, split("up.bias", Shard(1)), {}, "dim 1"),
    (gpt, split("gate.weight", Shard(0)), {}, "gate.weight"),
    (
        gpt,
        ANY["zero2"],
        {"optimizers_of": lambda module: [OneNorm(module.parameters(), {"lr": 0.1})]},
        "OneNorm",
    ),
    (gpt, plan_of("ddp", 64), {"cluster": small_cluster()}, "64 ranks"),
    (gpt, ANY["ddp"], {"cluster": small_cluster("0.0001GB")}, "shard more"),
    (gpt, plan_of("ddp", 64), {"global_batch_size": 100}, "64 or 128"),
    (gpt, plan_of("ddp", 64), {"global_batch_size": 128, "batch_size": 4}, "takes 2"),
    (
        gpt,
        replace(TENSOR_GROUPS, num_microbatches=4),
        {"global_batch_size": 64, "batch_size": 4},
        "takes 8",
    ),
    (Scalar, ANY["zero3"], {}, "temperature"),
    (Scalar, ANY["zero3"], {}, "float16"),
    (lambda: gpt().requires_grad_(False), ANY["ddp"], {}, "trainable"),
]


class OneNorm(torch.optim.Optimizer):
    """Divides by the norm of all gradients."""

    @torch.no_grad()
    def step(self, closure=None):
        parameters = [p for group in self.param_groups for p in group["params"]]
        norm = torch.nn.utils.get_total_norm([p.grad for p in parameters])
        for parameter in parameters:
            parameter.sub_(parameter.grad / norm, alpha=0.1)


@pytest.mark.parametrize(("make", "plan", "given", "word"), BAD, ids=[row[-1] for row in BAD])
def test_a_plan_that_would_not_run_says_why(make, plan, given, word):
    found = verify_plan(plan, on_meta(make), **{"optimizers_of": optimizers_of, **given})
    assert not found.would_run
    assert any(word in problem for problem in found.problems), found.problems
    assert all("\n" not in problem for problem in found.problems)
    json.dumps(found.to_dict())


def test_unused_parameters_are_known_from_the_step():
    module = on_meta(Scalar)
    graph = capture(module, batch_for(gpt()))
    found = verify_plan(ANY["ddp"], module, optimizers_of=optimizers_of, graph=graph)
    assert any("blocks.0.narrow" in problem for problem in found.problems)


@pytest.mark.parametrize("preset", ["ddp", "zero1", "zero3"])
def test_slices_along_tensor_axes_are_what_a_rank_holds(preset):
    """Layers that are split as section 3 of arXiv 1909.08053 has it, the rest whole."""
    data, tensor, width = 64, 8, 64
    mesh = Mesh((Axis("data", data), Axis("tensor", tensor)))
    storage = PRESETS[preset].storage(mesh)
    parts = tuple((name, (Replicate(), placement)) for name, placement in MEGATRON_BLOCK.items())
    blocks = [BlockPlan(name, OpConfig(storage, parameters=parts)) for name in BLOCKS]
    plan = ParallelPlan.of_blocks([*blocks, BlockPlan("", OpConfig(storage))], mesh=mesh)
    module = on_meta(width=width, heads=8)
    found = verify_plan(plan, module, optimizers_of=optimizers_of)
    assert found.would_run, found.problems
    # four products, and the biases of the two that are split by columns; two norms and the other
    # two biases are whole
    of_layer = found.held["blocks.1"][:, KINDS.index("parameters")]
    slices = 4 * ((12 * width**2 + 7 * width) // tensor + 6 * width)
    assert len(of_layer) == data * tensor
    # every data rank holds a part of its slice under ZeRO-3, and all of it otherwise
    assert of_layer.sum() == slices * tensor * (1 if preset == "zero3" else data)


def test_an_optimizer_that_cannot_be_tried_is_no_problem_of_a_plan_that_leaves_it_whole():
    class NeedsClosure(torch.optim.SGD):
        def step(self, closure):
            raise RuntimeError("never called here")

    given = {"optimizers_of": lambda module: [NeedsClosure(module.parameters(), lr=0.1)]}
    found = verify_plan(ANY["ddp"], on_meta(), **given)
    assert found.would_run and "closure" in found.notes[0]
    assert not verify_plan(ANY["zero3"], on_meta(), **given).would_run

"""Plans verified without ranks: what each rank would hold and exchange, against a slow twin, a fake
group and real ranks.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.core.optimizer import _configure_optimizers
from rich.console import Console
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Shard as DTensorShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from lightning_topt.communication import BF16, TopK
from lightning_topt.costs.cluster import Cluster, Device, Link
from lightning_topt.costs.communication import Group
from lightning_topt.execution.held_bytes import KINDS, held_bytes
from lightning_topt.execution.observed_step import (
    CannotRehearseError,
    Observation,
    ObservedRun,
    rehearse_rank,
    with_observations,
)
from lightning_topt.execution.planned_collectives import (
    CollectiveRow,
    axis_name,
    differences_of_rows,
)
from lightning_topt.execution.verify_plan import Verification, print_verification, verify_plan
from lightning_topt.graph.capture import capture
from lightning_topt.graph.mesh_axes import Axis, Mesh, data_mesh, hybrid_mesh
from lightning_topt.graph.op_config import OpConfig, Replicate, Shard, Storage
from lightning_topt.plan.parallel_plan import BlockPlan, ParallelPlan, StagePlan, preset_plan
from lightning_topt.plan.plan_values import PRESETS
from lightning_topt.techniques.registry import parameters_by_block
from lightning_topt.techniques.tensor_parallel.layout import TensorAxes
from lightning_topt.techniques.tensor_parallel.split_parameters import split_parameters
from lightning_topt.techniques.tensor_parallelism import split_placements
from tests.launch import run_ranks
from tests.models import GPT, ConvNet, TunedGPT, batch_for

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
    """Every level in one plan, on a mesh of two axes: shards over all ranks, over two of them, and
    none.
    """
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
        count = plan.mesh.ranks_along(axes)
        grid = np.arange(plan.mesh.size).reshape(plan.mesh.shape)
        place = np.argwhere(grid == rank)[0]
        index = (
            int(np.ravel_multi_index([place[a] for a in axes], [plan.mesh.shape[a] for a in axes]))
            if axes
            else 0
        )
        parts = parameter.chunk(count)
        total += parts[index].nbytes if index < len(parts) else 0
    return total


@pytest.mark.parametrize("ranks", [4, 512])
@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_at_any_size(preset, ranks):
    module, plan = on_meta(), plan_of(preset, ranks)
    found = verify_plan(plan, module, optimizers_of=optimizers_of)
    assert found.would_run and found.held_by_rank.shape == (ranks, len(KINDS))
    held, whole = (
        dict(zip(KINDS, found.held_by_rank.T, strict=True)),
        sum(p.nbytes for p in module.parameters()),
    )
    assert [held["parameters"][rank] for rank in (0, 1, ranks - 1)] == [
        cut_bytes(module, plan, rank) for rank in (0, 1, ranks - 1)
    ]
    assert (held["parameters"] == held["gradients"]).all()
    copies = {"zero2": 1, "zero3": 1, "hybrid_zero2": ranks // 2, "hybrid": ranks // 2}.get(
        preset, ranks
    )
    assert held["parameters"].sum() == copies * whole
    parameters = len(
        list(module.parameters())
    )  # AdamW has two moments of each, and 4 bytes of a step count for each part
    counts = (
        held["optimizer_state"].sum() - 2 * (whole if preset == "zero1" else copies * whole)
    ) / 4
    assert (
        parameters <= counts < parameters + ranks
        if preset == "zero1"
        else counts == parameters * ranks
    )
    assert {row.op for row in found.collectives} == {
        "ddp": {"all_reduce"},
        "zero1": {"all_reduce", "broadcast"},
        "zero2": {"all_gather", "reduce_scatter"},
        "zero3": {"all_gather", "reduce_scatter"},
    }.get(preset, {"all_gather", "reduce_scatter", "all_reduce"})
    assert sum(len(ranks) for ranks, _ in found.equal_ranks()) == ranks


# ---- the same from the code that runs ------------------------------------------------------------


def assert_equal(found: Verification, seen):
    assert seen.held == {
        block: tuple(sizes[seen.rank].tolist()) for block, sizes in found.held.items()
    }
    assert differences_of_rows(found.collectives, seen.collectives) == []


@pytest.mark.parametrize(
    ("plan", "rank"),
    [
        (plan_of("ddp", 512), 511),
        (plan_of("zero1", 64), 7),
        (plan_of("zero3", 64, recompute=BLOCKS[:1]), 5),
        (plan_of("hybrid", 512), 511),
        (mixed_plan(64), 2),
        (replace(plan_of("zero3", 64), gather_dtype="bfloat16"), 5),
    ],
    ids=lambda value: value.summary() if isinstance(value, ParallelPlan) else "",
)
def test_a_rank_of_a_fake_group_does_what_was_said(plan, rank):
    module = on_meta()
    found = verify_plan(plan, module, optimizers_of=optimizers_of)
    seen = rehearse_rank(plan, module, batch_for(gpt()), optimizers_of=optimizers_of, rank=rank)
    assert seen.rank == rank and not dist.is_initialized()
    assert_equal(found, seen)


def of_whole_parameters(module):
    matrices = [p for p in module.parameters() if p.dim() == 2]
    others = [p for p in module.parameters() if p.dim() != 2]
    return [torch.optim.Muon(matrices, lr=0.01), torch.optim.AdamW(others, lr=0.01)]


@pytest.mark.parametrize(
    "plan", [plan_of("zero2", 4), plan_of("hybrid", 8), mixed_plan(8)], ids=ParallelPlan.summary
)
def test_owners_of_whole_parameters_do_what_was_said(plan):
    module = on_meta()
    found = verify_plan(plan, module, optimizers_of=of_whole_parameters)
    assert found.would_run
    (row,) = [row for row in found.collectives if row.op == "all_to_all"]
    assert (row.during, row.count) == ("update", 2)  # gradients, and updates
    for rank in (0, plan.mesh.size - 1):
        seen = rehearse_rank(
            plan, module, batch_for(gpt()), optimizers_of=of_whole_parameters, rank=rank
        )
        assert_equal(found, seen)
    # each state is held once
    state = dict(zip(KINDS, found.held_by_rank.T, strict=True))["optimizer_state"]
    if plan == plan_of("zero2", 4):
        others = [p for p in module.parameters() if p.dim() != 2]
        matrices = sum(p.nbytes for p in module.parameters() if p.dim() == 2)
        assert state.sum() == matrices + sum(2 * p.nbytes + 4 * 4 for p in others)
        assert state.max() < 0.4 * state.sum()


def test_what_cannot_be_rehearsed_says_why():
    module, batch = on_meta(), batch_for(gpt())
    with pytest.raises(CannotRehearseError, match=r"reads the memory of its tensors.* GiB"):
        rehearse_rank(
            plan_of("ddp", 4), module, batch, optimizers_of=optimizers_of, memory_limit=1000
        )
    plan = replace(plan_of("ddp", 4), gradient_exchange=BF16())
    with pytest.raises(CannotRehearseError, match="reads what other ranks send"):
        rehearse_rank(plan, module, batch, optimizers_of=optimizers_of)


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
}


def plans_on(ranks):
    if ranks == 4:  # what two ranks cannot do, and shards of more than two
        recomputed = plan_of("zero3", ranks, recompute=BLOCKS)
        plans = [plan_of("zero1", ranks), plan_of("hybrid", ranks), mixed_plan(ranks), recomputed]
        return [(model, plan) for plan in plans for model in ("GPT", "adapters")]
    plans = [("GPT", plan_of(name, ranks)) for name in ("ddp", "zero2")]
    plans.append(("GPT", replace(plan_of("zero3", ranks), gather_dtype="bfloat16")))
    plans.append(("ConvNet", plan_of("zero3", ranks, blocks=MODELS["ConvNet"][1])))
    plans += [("adapters", plan_of(name, ranks)) for name in ("ddp", "zero1", "zero2", "zero3")]
    return [*plans, ("Wide", plan_of("zero1", ranks))]


def observe(rank, plans):
    seen = []
    for model, plan in plans:
        torch.manual_seed(0)
        module = MODELS[model][0]()
        seen.append(ObservedRun(plan, module, batch_for(module), optimizers_of).observe())
    return seen


@pytest.mark.parametrize("ranks", [2, 4])
def test_real_ranks_do_what_was_said(ranks):
    plans = plans_on(ranks)
    seen = run_ranks(observe, ranks, plans)
    for index, (model, plan) in enumerate(plans):
        module = on_meta(MODELS[model][0])
        graph = capture(module, batch_for(module))
        found = verify_plan(plan, module, optimizers_of=optimizers_of, graph=graph)
        assert found.would_run and found.peak_bytes > found.held_by_rank[:, :3].sum(axis=1).max()
        for rank in range(ranks):
            assert seen[rank][index].rank == rank
            assert_equal(found, seen[rank][index])
    if ranks == 2:
        (row,) = [row for row in found.collectives if row.op == "all_reduce"]
        assert row.count > 1, "one bucket would not show that they are packed alike"


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
BAD = {
    "of another model": (
        gpt,
        replace(plan_of("ddp", 4), fingerprint="0" * 16),
        {},
        "made for another model .* make a new plan",
    ),
    "a module that is not there": (
        gpt,
        of(ZERO3, "layers.0"),
        {},
        r"does not have: \['layers.0'\].* make a new plan",
    ),
    "a block in another": (
        gpt,
        plan_of("zero3", 4, blocks=["blocks.0", "blocks.0.up"]),
        {},
        "'blocks.0.up' .* lies inside",
    ),
    "a list of modules": (
        gpt,
        of(ZERO3, "blocks"),
        {},
        "'blocks' of the plan is a ModuleList, which is never called",
    ),
    "tied over blocks": (
        lambda: gpt(tied=True),
        of(ZERO3, "head"),
        {},
        "'head.weight' of block 'head' is tied .* keep the gradients of both whole",
    ),
    "two stages": (
        gpt,
        TWO_STAGES,
        {},
        "verified with an example of its steps",
    ),
    "no technique": (
        gpt,
        of(OpConfig.zero(1, axes=2, over=[0]), mesh=hybrid_mesh(2, 2)),
        {},
        "block 'blocks.0': no technique of this release keeps .* ZeRO levels 0 to 3",
    ),
    "the rest recomputed": (
        gpt,
        of(OpConfig.zero(0), rest=OpConfig.zero(0, recompute=True)),
        {},
        "cannot be recomputed",
    ),
    "an exchange of shards": (
        gpt,
        replace(plan_of("zero3", 4), gradient_exchange=BF16()),
        {},
        "needs whole gradients",
    ),
    "an exchange by nodes without nodes": (
        gpt,
        replace(plan_of("ddp", 4), gradient_exchange=TopK(hierarchical=True)),
        {"cluster": small_cluster()},
        "hierarchical needs several nodes",
    ),
    "a split that leaves a rest": (
        gpt,
        split("up.weight", Shard(0), ranks=5),
        {},
        "dim 0 of parameter 'blocks.0.up.weight' along axis 'tensor' has size 64, which does not "
        "divide into 5 ranks",
    ),
    "heads that leave a rest": (
        gpt,
        split("qkv.weight", Shard(0, parts=3), ranks=5),
        {},
        "'blocks.0.qkv.weight' along axis 'tensor' has size 48, which does not divide into 3 parts "
        "for 5 ranks",
    ),
    "a dim that is not there": (
        gpt,
        split("up.bias", Shard(1)),
        {},
        "'blocks.0.up.bias' of shape .* has no dim 1 to split",
    ),
    "a parameter that is not there": (
        gpt,
        split("gate.weight", Shard(0)),
        {},
        "'blocks.0.gate.weight', and GPT has none",
    ),
    "an optimizer that reads several parameters": (
        gpt,
        plan_of("zero2", 4),
        {"optimizers_of": lambda module: [OneNorm(module.parameters(), {"lr": 0.1})]},
        "ranks cannot share the updates of OneNorm: .* depends on which others are updated with "
        "them.* choose ZeRO level 0 for block 'blocks.0'",
    ),
    "too few devices": (
        gpt,
        plan_of("ddp", 64),
        {"cluster": small_cluster()},
        "64 ranks do not fit the cluster 'small' with 4",
    ),
    "too little memory": (
        gpt,
        plan_of("ddp", 4),
        {"cluster": small_cluster("0.0001GB")},
        "the fullest rank needs .* for parameters, gradients and optimizer state, and tiny .* "
        "shard more",
    ),
    "a batch that leaves a rest": (
        gpt,
        plan_of("ddp", 64),
        {"global_batch_size": 100},
        "100 samples cannot be divided evenly over 64 data-parallel ranks: choose 64 or 128",
    ),
    "a batch of another size": (
        gpt,
        plan_of("ddp", 64),
        {"global_batch_size": 128, "batch_size": 4},
        "takes 2 on each of 64 ranks, .* set the batch size of the data to 2",
    ),
    "batches of their own on the ranks of a tensor group": (
        gpt,
        replace(
            preset_plan(
                PRESETS["ddp"], mesh=Mesh((Axis("data", 2), Axis("tensor", 4))), blocks=BLOCKS
            ),
            num_microbatches=4,
        ),
        {"global_batch_size": 64, "batch_size": 4},
        "takes 8 on each of 8 ranks, .* set the batch size of the data to 8",
    ),
    "a number in shards": (
        Scalar,
        plan_of("zero3", 4),
        {},
        "'temperature' is a single number, which has no rows to shard",
    ),
    "two dtypes in one block": (
        Scalar,
        plan_of("zero3", 4),
        {},
        "'blocks.0' trains parameters of torch.float16 and torch.float32",
    ),
    "nothing to train": (
        lambda: gpt().requires_grad_(False),
        plan_of("ddp", 4),
        {},
        "GPT has no trainable parameters",
    ),
}


class OneNorm(torch.optim.Optimizer):
    """Divides by the norm of all gradients."""

    @torch.no_grad()
    def step(self, closure=None):
        parameters = [p for group in self.param_groups for p in group["params"]]
        norm = torch.nn.utils.get_total_norm([p.grad for p in parameters])
        for parameter in parameters:
            parameter.sub_(parameter.grad / norm, alpha=0.1)


@pytest.mark.parametrize("case", BAD)
def test_a_plan_that_would_not_run_says_why(case):
    make, plan, given, sentence = BAD[case]
    found = verify_plan(plan, on_meta(make), **{"optimizers_of": optimizers_of, **given})
    assert not found.would_run
    assert any(re.search(sentence, problem) for problem in found.problems), found.problems
    assert all("\n" not in problem for problem in found.problems)
    json.dumps(found.to_dict())


def test_activations_and_unused_parameters_are_known_from_the_step():
    module = on_meta(Scalar)
    graph = capture(module, batch_for(gpt()))
    found = verify_plan(plan_of("ddp", 4), module, optimizers_of=optimizers_of, graph=graph)
    assert any("gives 'blocks.0.narrow' no gradient" in problem for problem in found.problems)
    module, plan = on_meta(), plan_of("ddp", 4)
    graph = capture(module, batch_for(module))
    peak = verify_plan(plan, module, optimizers_of=optimizers_of, graph=graph).peak_bytes
    held = verify_plan(plan, module, optimizers_of=optimizers_of).held_by_rank.sum(axis=1).max()
    assert peak > held
    # enough for what is held, and not for a step
    cluster = small_cluster(f"{(held + peak) / 2 / 1e9}GB")
    assert verify_plan(plan, module, optimizers_of=optimizers_of, cluster=cluster).would_run
    found = verify_plan(plan, module, optimizers_of=optimizers_of, cluster=cluster, graph=graph)
    assert not found.would_run and "for a training step" in found.problems[0]


def test_more_ranks_than_rows_is_a_note():
    found = verify_plan(plan_of("zero3", 64), on_meta(), optimizers_of=optimizers_of)
    assert found.would_run and "has 16 rows for 64 ranks: 48 of them hold none" in found.notes[0]
    assert found.held_by_rank[63].tolist()[:2] < found.held_by_rank[0].tolist()[:2]
    assert (
        found.held_by_rank[63, KINDS.index("padding")]
        > 0
        == found.held_by_rank[0, KINDS.index("padding")]
    )


def test_differences_are_sentences():
    module = on_meta()
    rows = verify_plan(plan_of("zero2", 4), module).collectives
    assert differences_of_rows(rows, rows) == []
    fewer = [replace(rows[0], count=rows[0].count - 1), *rows[1:]]
    (sentence,) = differences_of_rows(rows, fewer)
    assert (
        sentence.startswith("all_gather over data (4 ranks) in forward: 4 of ")
        and "3 of" in sentence
    )
    (sentence,) = differences_of_rows(rows, rows[1:])
    assert sentence == "all_gather over data (4 ranks) in forward: 4 expected, but not called"
    (sentence,) = differences_of_rows(rows[1:], rows)
    assert sentence == "all_gather over data (4 ranks) in forward: 4 called, but not expected"


def test_groups_have_the_names_of_axes():
    mesh = Mesh((Axis("data_replicate", 2), Axis("data_shard", 1), Axis("tensor", 4)))
    assert [axis_name(mesh, group) for group in (Group(4), Group(2, 4), Group(8), Group(2))] == [
        "tensor",
        "data_replicate",
        "data_replicate x tensor",
        "other",
    ]


def test_slices_along_tensor_axes_are_what_a_rank_holds():
    plan, module, whole = split("up.weight", Shard(0)), on_meta(), on_meta()
    placements = split_placements({block.block: block.config for block in plan.blocks}, plan.mesh)
    split_parameters(module, placements, TensorAxes.of_mesh(plan.mesh, rank=0))
    assert module.blocks[0].up.weight.shape == (16, 16) and module.blocks[1].up.weight.shape == (
        64,
        16,
    )
    configs = {block.block: block.config for block in plan.blocks}
    held, before = (
        held_bytes(parameters_by_block(each, configs), configs, plan.mesh)
        for each in (module, whole)
    )
    less = (before["blocks.0"] - held["blocks.0"])[:, :2]
    assert held["blocks.0"].shape == (8, len(KINDS)) and (less == 4 * 3 * 16 * 16).all()
    assert (held[""] == before[""]).all()


def test_what_is_exchanged_along_tensor_axes_is_learnt_from_a_rank():
    plan = split("up.weight", Shard(0))
    rows = (CollectiveRow("forward", "all_reduce", "tensor", 4, 2, 64),)
    learnt = with_observations(Verification(plan, ()), [Observation(3, {}, rows)], where="here")
    assert (
        learnt.collectives == rows
        and learnt.would_run
        and learnt.notes == ("rank 3 here took a step and did what is said here",)
    )
    other = with_observations(
        learnt, [Observation(4, {}, (replace(rows[0], count=3),))], where="here"
    )
    (problem,) = other.problems
    assert problem.startswith(
        "rank 4 here calls other collectives: all_reduce over tensor (4 ranks) in forward: 2 of 64 "
        "bytes"
    )


def test_the_same_gradients_in_other_buckets_are_a_note():
    plan = plan_of("ddp", 4)
    row = CollectiveRow("backward", "all_reduce", "data", 4, 2, 64)
    said = Verification(plan, (), collectives=(row,))
    found = with_observations(said, [Observation(0, {}, (replace(row, count=3),))], where="here")
    assert (
        found.would_run
        and "rank 0 here has other buckets: all_reduce over data (4 ranks)" in found.notes[0]
    )
    found = with_observations(said, [Observation(0, {}, (replace(row, nbytes=65),))], where="here")
    assert (
        not found.would_run and "2 of 64 bytes in all expected, 2 of 65 called" in found.problems[0]
    )
    # of shards, which are not packed
    copies = CollectiveRow("backward", "all_reduce", "data_replicate", 2, 2, 64)
    said = Verification(plan_of("hybrid", 4), (), collectives=(copies,))
    assert not with_observations(
        said, [Observation(0, {}, (replace(copies, count=3),))], where="here"
    ).would_run


def test_an_optimizer_that_cannot_be_tried_is_no_problem_of_a_plan_that_leaves_it_whole():
    class NeedsClosure(torch.optim.SGD):
        def step(self, closure):
            raise RuntimeError("never called here")

    given = {"optimizers_of": lambda module: [NeedsClosure(module.parameters(), lr=0.1)]}
    found = verify_plan(plan_of("ddp", 4), on_meta(), **given)
    assert (
        found.would_run
        and not found.knows_state
        and "the step of NeedsClosure needs a closure" in found.notes[0]
    )
    sizes = {block: tuple(held[0].tolist()) for block, held in found.held.items()}
    more = {block: (*each[:2], 8, each[3]) for block, each in sizes.items()}
    assert with_observations(
        found, [Observation(0, more, found.collectives)], where="here"
    ).would_run
    assert not verify_plan(plan_of("zero3", 4), on_meta(), **given).would_run


def test_a_step_that_needs_values_is_not_rehearsed():
    class Reads(GPT):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            return loss if loss.item() > -1 else loss * 2

    plan, batch = plan_of("zero3", 4, blocks=["blocks.0"]), batch_for(gpt())
    with pytest.raises(CannotRehearseError, match="depends on values of tensors"):
        rehearse_rank(plan, on_meta(Reads), batch, optimizers_of=optimizers_of)
    assert not dist.is_initialized()


def test_many_problems_are_printed_in_part(capsys):
    found = verify_plan(split("up.weight", Shard(0), ranks=5), on_meta())
    many = replace(found, problems=found.problems * 12)
    print_verification(many, console=Console(width=200))
    output = capsys.readouterr().out
    assert output.count("problem:") == 8 and f"and {len(many.problems) - 8} more problems" in output
    assert output.strip().endswith("would not run")


def test_a_rehearsal_leaves_no_mesh_behind():
    """Meshes of equal ranks are one key of DTensor's caches, whichever rank they were made on."""
    rehearse_rank(
        plan_of("zero3", 4), on_meta(), batch_for(gpt()), optimizers_of=optimizers_of, rank=1
    )
    dist.init_process_group("fake", rank=2, world_size=4, store=FakeStore())
    try:
        mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("data",))
        shard = DTensor.from_local(torch.zeros(4, 16), mesh, (DTensorShard(0),))
        for made in (shard.detach(), shard.clone(), torch.zeros_like(shard)):
            assert [*made.device_mesh.get_coordinate()] == [2]
    finally:
        dist.destroy_process_group()

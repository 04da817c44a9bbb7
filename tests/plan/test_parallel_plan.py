"""Plans as values and as YAML; a hand-written one reads as well."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from lightning_topt.communication import BF16, Dense, GradientMethod, TopK
from lightning_topt.graph.mesh_axes import Axis, Mesh, data_mesh, hybrid_mesh
from lightning_topt.graph.op_config import OpConfig, Replicate, Shard, Storage
from lightning_topt.plan.parallel_plan import (
    BlockPlan,
    ParallelPlan,
    PlanError,
    StagePlan,
    StepEstimate,
    preset_plan,
    uniform_plan,
)
from lightning_topt.plan.plan_values import PRESETS, mesh_to_list
from lightning_topt.plugins.plan_options import UniformPlan, read_plan_option
from lightning_topt.weight_prediction import make_prediction

HAND_WRITTEN = """
version: 2
mesh: [{name: data, size: 2}]
stages:
- blocks:
  - {block: blocks.0, parameters: shard(0), gradients: shard(0), optimizer_state: shard(0),
     recompute: true}
  - {block: "", parameters: replicate, gradients: shard(0), optimizer_state: shard(0)}
"""


HAND_WRITTEN_2 = """
version: 2
mesh:
- {name: data_replicate, size: 2, scope: inter}
- {name: data_shard, size: 2}
stages:
- blocks:
  - {block: blocks.0, storage: hybrid, recompute: true}
  - block: blocks.1
    parameters: {data_replicate: replicate, data_shard: shard(0)}
    gradients: shard(0)
    optimizer_state: shard(0)
    computes: {inputs: [shard(0)], parameters: {weight: replicate}}
  - {block: "", storage: ddp}
"""


def test_a_mesh_of_two_axes() -> None:
    plan = ParallelPlan.from_yaml(HAND_WRITTEN_2)
    assert plan.mesh == hybrid_mesh(2, 2) and plan.data_parallel_size == 4
    hybrid, own, rest = (block.config for block in plan.blocks)
    assert hybrid == OpConfig.zero(3, recompute=True, axes=2, over=[1])
    assert own.storage == Storage((Replicate(), Shard(0)), (Shard(0),) * 2, (Shard(0),) * 2)
    assert own.inputs == ((Shard(0), Shard(0)),) and own.parameters == (
        ("weight", (Replicate(), Replicate())),
    )
    assert rest == OpConfig.zero(0, axes=2)
    assert ParallelPlan.from_yaml(plan.to_yaml()) == plan
    assert (
        plan.summary()
        == "1 x hybrid ZeRO-3 + recompute, 1 x ZeRO-3, 1 x DDP on data_replicate 2 x data_shard 2"
    )


def test_round_trip(tmp_path: Path) -> None:
    blocks = tuple(
        BlockPlan(f"b{stage}", OpConfig.zero(stage, recompute=stage == 3)) for stage in (2, 3)
    )
    predicted = StepEstimate(1.5, 2.0**30, 1.0, 0.5)
    plan = ParallelPlan(
        data_mesh(4),
        (StagePlan((*blocks, BlockPlan("", OpConfig.zero(2)))),),
        "GPT",
        "ab" * 8,
        3,
        "here",
        predicted,
        "because",
    )
    assert ParallelPlan.from_yaml(plan.to_yaml()) == plan
    plan.save(tmp_path / "plan.yaml")
    assert ParallelPlan.load(tmp_path / "plan.yaml").reason == "because"


def test_hand_written() -> None:
    plan = ParallelPlan.from_yaml(HAND_WRITTEN)
    assert [block.config.storage.level for block in plan.blocks] == [3, 2] and plan.blocks[
        0
    ].config.recompute
    assert not plan.keeps_gradients_whole and plan.fingerprint is None
    assert plan.summary() == "1 x ZeRO-3 + recompute, 1 x ZeRO-2"


# ---- gradient exchange

WITH_EXCHANGE = """
version: 2
mesh: [{name: data, size: 2}]
gradient_exchange: {method: topk, density: 0.02, hierarchical: false, exempt: [norm, "head.*"]}
stages:
- blocks:
  - {block: blocks.0, parameters: replicate, gradients: replicate, optimizer_state: shard(0)}
  - {block: "", parameters: replicate, gradients: replicate, optimizer_state: replicate}
"""
EXCHANGES = [
    TopK(hierarchical=True, density=0.001, bits=4, dense_steps=3),
    TopK(error_feedback=False, exempt=()),
    Dense(hierarchical=True),
    BF16(),
]


@pytest.mark.parametrize(
    "exchange", [*EXCHANGES, TopK(density=None, bits=2)], ids=lambda exchange: exchange.words
)
def test_gradient_exchange_round_trip(exchange: GradientMethod) -> None:
    plan = replace(uniform_plan(1, data_parallel_size=4, blocks=["a"]), gradient_exchange=exchange)
    text = plan.to_yaml()
    assert ParallelPlan.from_yaml(text) == plan
    assert "exempt" in text or exchange.name in ("dense", "bf16")  # only what means something
    assert not {"link", "nonfinite", "timeout_seconds", "momentum"} & set(
        plan.to_dict()["gradient_exchange"]
    )


@pytest.mark.parametrize(
    ("exchange", "stage", "says"), [(Dense(hierarchical=False), 0, "needs hierarchical")]
)
def test_an_exchange_that_does_not_suit_a_plan(
    exchange: GradientMethod, stage: int, says: str
) -> None:
    with pytest.raises(PlanError, match=says):
        replace(uniform_plan(stage, data_parallel_size=2), gradient_exchange=exchange)


def test_microbatches_are_those_of_a_tensor_group() -> None:
    mesh = Mesh((Axis("data", 2), Axis("tensor", 4)))
    plan = preset_plan(PRESETS["ddp"], mesh=mesh)
    several = replace(plan, num_microbatches=4)
    assert (
        "num_microbatches" not in plan.to_dict()
        and ParallelPlan.from_yaml(several.to_yaml()) == several
    )
    assert several.summary().endswith("4 microbatches") and "microbatch" not in plan.summary()
    for wrong in (0, 2, 8):
        with pytest.raises(PlanError, match=f"1, or the ranks along tensor axes, 4; got {wrong}"):
            replace(plan, num_microbatches=wrong)
    with pytest.raises(PlanError, match="num_microbatches"):
        ParallelPlan.from_dict({**plan.to_dict(), "num_microbatches": "4"})


def test_borders_sums_and_gathered_parameters_are_written_and_read() -> None:
    mesh = Mesh((Axis("data", 2), Axis("tensor_tokens", 2), Axis("tensor", 2)))
    border = (Replicate(), Shard(0), Shard(1))
    config = OpConfig(
        Storage.zero(1, axes=3, over=mesh.data_axes),
        inputs=(border, (Replicate(),) * 3),
        outputs=(border,),
        parameters=(("weight", (Replicate(), Shard(0, 2), Shard(0))),),
        sums=(Replicate(), Shard(0), Shard(1)),
        gathers=("tensor_tokens",),
    )
    plan = ParallelPlan.of_blocks([BlockPlan("", config)], mesh=mesh)
    assert ParallelPlan.from_yaml(plan.to_yaml()) == plan
    for written, words in (
        ({"gathers": ["time"]}, r"gathers\[0\] is an axis of the mesh .data, tensor_tokens"),
        ({"gathers": "tensor"}, "gathers must be a list"),
        ({"sums": "shard"}, "'shard' is not a placement"),
        ({"sums": {"tensor": "shard(1)"}}, "names each axis of the mesh"),
    ):
        entry = {"block": "", "storage": "ddp", "computes": written}
        with pytest.raises(PlanError, match=words):
            ParallelPlan.from_dict(
                {"version": 2, "mesh": mesh_to_list(mesh), "stages": [{"blocks": [entry]}]}
            )


# ---- stages

WITH_STAGES = """
version: 2
mesh:
- {name: pipeline, size: 2, scope: inter}
- {name: data, size: 2}
schedule: 1f1b
num_microbatches: 8
stages:
- blocks:
  - {block: embed, storage: zero1}
  - {block: blocks.0, storage: zero1, recompute: true}
  - {block: "", storage: zero1}
- blocks:
  - {block: blocks.1, storage: zero1}
  - {block: head, storage: ddp}
"""


def test_stages_by_hand() -> None:
    plan = ParallelPlan.from_yaml(WITH_STAGES)
    assert plan.schedule == "1f1b" and plan.num_microbatches == 8 and plan.stages_per_rank == 1
    assert [[block.block for block in stage.blocks] for stage in plan.stages] == [
        ["embed", "blocks.0", ""],
        ["blocks.1", "head"],
    ]
    assert [*plan.configs] == ["embed", "blocks.0", "", "blocks.1", "head"]
    assert plan.data_parallel_size == 2 and not plan.keeps_gradients_whole and plan.saves_memory
    assert ParallelPlan.from_yaml(plan.to_yaml()) == plan
    assert plan.summary() == (
        "3 x ZeRO-1, 1 x ZeRO-1 + recompute, 1 x DDP on pipeline 2 x data 2, 2 stages (1f1b), 8 "
        "microbatches"
    )


NEVER_FLUSHES = """
version: 2
mesh: [{name: pipeline, size: 2}, {name: data, size: 2}]
schedule: continuous
prediction: {rule: two_versions, synchronous_updates: 7}
stages:
- blocks: [{block: a, storage: ddp}, {block: "", storage: ddp}]
- blocks: [{block: b, storage: ddp}]
"""


def test_a_pipeline_that_never_flushes_says_its_rule_of_weights() -> None:
    plan = ParallelPlan.from_yaml(NEVER_FLUSHES)
    assert plan.prediction == make_prediction({"rule": "two_versions", "synchronous_updates": 7})
    assert ParallelPlan.from_yaml(plan.to_yaml()) == plan and hash(plan)
    assert "2 stages (continuous, two_versions)" in plan.summary()
    plain = replace(plan, prediction=None)
    assert "prediction" not in plain.to_dict() and ParallelPlan.from_dict(plain.to_dict()) == plain


def test_gradient_views_round_trip_and_need_whole_gradients() -> None:
    plan = replace(uniform_plan(1, data_parallel_size=2, blocks=["a"]), gradient_views=True)
    assert (
        ParallelPlan.from_yaml(plan.to_yaml()) == plan and "gradient_views: true" in plan.to_yaml()
    )
    assert plan.summary() == "2 x ZeRO-1, gradients as views of buckets"
    assert "gradient_views" not in uniform_plan(1, data_parallel_size=2).to_yaml()
    with pytest.raises(
        PlanError, match="gradient_views is for gradients that DistributedDataParallel averages"
    ):
        replace(uniform_plan(2, data_parallel_size=2), gradient_views=True)
    with pytest.raises(PlanError, match="gradient_views must be"):
        ParallelPlan.from_dict({**plan.to_dict(), "gradient_views": 1})


def test_gathers_in_float32_round_trip_and_need_shards() -> None:
    given = read_plan_option("hybrid+float32_gathers+recompute")
    assert isinstance(given, UniformPlan) and given.recompute and given.preset.float32_gathers
    plan = preset_plan(given.preset, mesh=hybrid_mesh(2, 2))
    assert ParallelPlan.from_yaml(plan.to_yaml()) == plan and "in float32" in plan.summary()
    for names in ((), ("table", "b.scale")):
        named = replace(plan, float32_gathers=names)
        assert ParallelPlan.from_yaml(named.to_yaml()) == named and not named.leaves_gathers
    assert "float32_gathers" not in uniform_plan(3, data_parallel_size=2).to_yaml()
    with pytest.raises(PlanError, match="float32_gathers is for parameters in shards"):
        replace(uniform_plan(1, data_parallel_size=2), float32_gathers=True)
    with pytest.raises(PlanError, match="neither a file nor one of"):
        read_plan_option("tensor+float32_gathers")


WRONG = [
    (HAND_WRITTEN, "version: 2", "version: 3", "version"),
    (HAND_WRITTEN, "mesh: [{name: data, size: 2}]", "", "missing"),
    (HAND_WRITTEN, 'block: ""', "block: other", "everything outside"),
    (HAND_WRITTEN, 'block: ""', "block: blocks.0", "twice"),
    (HAND_WRITTEN, "parameters: replicate", "parameters: sharded", "placement"),
    (HAND_WRITTEN, "shard(0), gradients: shard(0)", "shard(0), gradients: replicate", "sharded"),
    (HAND_WRITTEN_2, "name: data_shard", "name: data_replicate", "same name"),
    (HAND_WRITTEN_2, "scope: inter", "scope: rack", "scope"),
    (HAND_WRITTEN_2, "data_shard: shard(0)}", "shard: shard(0)}", "each axis"),
    (HAND_WRITTEN_2, "computes: {inputs", "computes: {input", "inputs"),
    (WITH_EXCHANGE, "method: topk", "method: top", "method"),
    (WITH_EXCHANGE, WITH_EXCHANGE.splitlines()[3], "gradient_exchange: topk", "mapping"),
    (WITH_STAGES, "schedule: 1f1b", "", "schedule"),
    (WITH_STAGES, "name: pipeline, size: 2", "name: data_replicate, size: 2", "axis"),
    (WITH_STAGES, "name: pipeline, size: 2", "name: pipeline, size: 4", "divided"),
    (WITH_STAGES, "block: head, storage: ddp", 'block: "", storage: ddp', "alike"),
    (WITH_STAGES, "block: head, storage: ddp", "block: embed, storage: zero1", "embed"),
    (NEVER_FLUSHES, "schedule: continuous", "schedule: 1f1b", "continuous"),
    (NEVER_FLUSHES, "stages:", "num_microbatches: 4\nstages:", "does not cut"),
    (NEVER_FLUSHES, "rule: two_versions", "rule: oracle", "prediction"),
    (NEVER_FLUSHES, "synchronous_updates", "steps", "options"),
    (NEVER_FLUSHES, "pipeline, size: 2", "pipeline, size: 1", "one stage"),
]


@pytest.mark.parametrize(("text", "old", "new", "says"), WRONG)
def test_wrong_plans_say_what_is_wrong(text: str, old: str, new: str, says: str) -> None:
    assert old in text
    with pytest.raises(PlanError, match=says):
        ParallelPlan.from_yaml(text.replace(old, new))

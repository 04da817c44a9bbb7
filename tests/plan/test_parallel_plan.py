"""Plans as values and as YAML; a hand-written one reads as well."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightning_topt.graph.op_config import OpConfig, Replicate, Shard
from lightning_topt.plan.parallel_plan import BlockPlan, ParallelPlan, PlanError, Prediction, uniform_plan

HAND_WRITTEN = """
version: 1
data_parallel_size: 2
blocks:
- {block: blocks.0, parameters: shard(0), gradients: shard(0), optimizer_state: shard(0), recompute: true}
- {block: "", parameters: replicate, gradients: shard(0), optimizer_state: shard(0)}
"""


def test_round_trip(tmp_path: Path) -> None:
    blocks = tuple(BlockPlan(f"b{stage}", OpConfig.zero(stage, recompute=stage == 3)) for stage in (2, 3))
    predicted = Prediction(1.5, 2.0**30, 1.0, 0.5)
    plan = ParallelPlan(4, (*blocks, BlockPlan("", OpConfig.zero(2))), "GPT", "ab" * 8, 3, "here", predicted, "because")
    assert ParallelPlan.from_yaml(plan.to_yaml()) == plan
    plan.save(tmp_path / "plan.yaml")
    assert ParallelPlan.load(tmp_path / "plan.yaml").reason == "because"


def test_hand_written() -> None:
    plan = ParallelPlan.from_yaml(HAND_WRITTEN)
    assert [block.config.zero_stage for block in plan.blocks] == [3, 2] and plan.blocks[0].config.recompute
    assert plan.is_sharded and plan.fingerprint is None
    assert plan.summary() == "1 x ZeRO-3 + recompute, 1 x ZeRO-2"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (("version: 1", "version: 2"), "version is 2"),
        (("data_parallel_size: 2", "data_parallel_size: 0"), "at least 1"),
        (("data_parallel_size: 2", "data_parallel_size: true"), "whole number"),
        (("data_parallel_size: 2", ""), "'data_parallel_size' is missing"),
        (('block: ""', "block: other"), "everything outside"),
        (('block: ""', "block: blocks.0"), "twice"),
        (('block: ""', "block: 7"), r"blocks\[1\]"),
        (("parameters: replicate", "parameters: sharded"), "'sharded' is not a placement"),
        (("parameters: replicate", "parameters: 3"), r"blocks\[1\]"),
        (
            ("gradients: shard(0), optimizer_state: shard(0)}", "gradients: replicate, optimizer_state: replicate}"),
            "mixes",
        ),
        (("parameters: shard(0), gradients: shard(0)", "parameters: shard(0), gradients: replicate"), "need sharded"),
        (("recompute: true", "recompute: 1"), "true or false"),
        (("recompute: true", "recomputed: true"), "recomputed"),
    ],
)
def test_wrong_plans_say_what_is_wrong(change: tuple[str, str], says: str) -> None:
    assert change[0] in HAND_WRITTEN
    with pytest.raises(PlanError, match=says):
        ParallelPlan.from_yaml(HAND_WRITTEN.replace(*change))


def test_zero_stages_are_placements() -> None:
    assert OpConfig.zero(2) == OpConfig(Replicate(), Shard(0), Shard(0))
    assert [OpConfig.zero(stage).zero_stage for stage in range(4)] == [0, 1, 2, 3]
    with pytest.raises(ValueError, match="0, 1, 2 or 3"):
        OpConfig.zero(4)
    with pytest.raises(ValueError, match="dim 0"):
        OpConfig(Shard(1), Shard(0), Shard(0))


def test_uniform_plan_never_recomputes_the_rest() -> None:
    plan = uniform_plan(1, data_parallel_size=2, blocks=["a", "b", ""], recompute=["a", ""])
    assert [(b.block, b.config.recompute) for b in plan.blocks] == [("a", True), ("b", False), ("", False)]

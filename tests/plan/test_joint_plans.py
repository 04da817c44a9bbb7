"""Plans whose ranks bring a batch each and run them at once in some modules: files, errors, the
search, what they cost.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from lightning_topt.costs.sizes import gradient_bytes
from lightning_topt.graph.mesh_axes import data_mesh
from lightning_topt.graph.op_config import JointModule
from lightning_topt.plan.choose import choose
from lightning_topt.plan.explanation import explain_plan, step_of
from lightning_topt.plan.parallel_plan import ParallelPlan, PlanError
from lightning_topt.plan.plan_search import SearchRequest, search_plans, step_on
from lightning_topt.plan.plan_values import read_joint
from lightning_topt.plan.tensor_meshes import least_seconds
from lightning_topt.techniques.data_parallel import unsharded_gradient_collectives
from tests.plan.test_tensor_meshes import request_of_gpt  # noqa: F401  # a fixture
from tests.plugins.test_joint_batches import joint_plan


@pytest.mark.timeout(20)  # of two lists that long, every pair would be compared
def test_a_long_list_is_read_once() -> None:
    joint = [{"module": f"blocks.{i}", "inputs": [None], "outputs": [None]} for i in range(20_000)]
    found = read_joint(joint, name="joint")
    assert [each.module for each in found] == [each["module"] for each in joint]
    with pytest.raises(ValueError, match=r"'blocks.7.a' is 'blocks.7', or inside of it"):
        read_joint([*joint, {**joint[0], "module": "blocks.7.a"}], name="joint")


def test_files_keep_what_is_joint() -> None:
    plan = ParallelPlan.from_dict(joint_plan(2))
    assert plan.joint[0] == JointModule("tokens", (0,), (0,)) and plan.brings_batches
    assert ParallelPlan.from_yaml(plan.to_yaml()) == plan
    assert "3 joint modules" in plan.summary()


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"joint": "blocks.0"}, "joint must be a list"),
        ({"joint": [{"module": "blocks.0"}]}, r"joint\[0\]: the entry .inputs. is missing"),
        ({"joint": [{"module": "", "inputs": [], "outputs": []}]}, "must be the path of a module"),
        (
            {"joint": [{"module": "a", "inputs": ["0"], "outputs": []}]},
            "must be the dim of the samples",
        ),
        (
            {"joint": [{"module": name, "inputs": [0], "outputs": [0]} for name in ("a", "a.b")]},
            "name one of them",
        ),
        ({"num_microbatches": 2}, "one tensor axis"),
        ({"mesh": [{"name": "data", "size": 2}]}, "one tensor axis"),
        ({"gradient_exchange": {"method": "fp16"}}, "does not know joint modules"),
    ],
)
def test_what_cannot_be_joint_is_an_error(changed: dict[str, Any], message: str) -> None:
    data = joint_plan(1)
    if "mesh" in changed:
        data["stages"] = [{"blocks": [{"block": "", "storage": "ddp"}]}]
    with pytest.raises(PlanError, match=message):
        ParallelPlan.from_dict({**data, **changed})


def test_blocks_beside_joint_modules_keep_their_gradients() -> None:
    with pytest.raises(PlanError, match="shards gradients beside joint modules"):
        ParallelPlan.from_dict(joint_plan(2, "zero2"))


def test_the_search_takes_the_faster_of_joint_modules_and_turns(
    request_of_gpt: SearchRequest,  # noqa: F811
) -> None:
    request = replace(request_of_gpt, own_batches=True, global_batch_size=32, layout="tensor")
    frontier = search_plans(request)
    found = {
        bool(point.plan.joint): point
        for point in reversed(sorted(frontier.uniform, key=lambda p: p.step_seconds))
    }
    assert found[True].step_seconds < found[False].step_seconds  # each way its fastest
    plan = choose(frontier.candidates).plan
    assert plan.joint and plan.num_microbatches == 1 and plan.batch_size == 4
    explained = explain_plan(request, plan)
    assert explained.total.step_seconds == pytest.approx(plan.predicted.step_seconds)
    assert {"all_gather", "reduce_scatter"} <= {
        each.op for each in explained.blocks["blocks.0"].collectives
    }
    step, tensor = step_of(request, plan), plan.mesh.ranks_along(plan.mesh.tensor_axes)
    least = least_seconds(step_on(replace(request, own_batches=False), data_mesh(8)), tensor)
    assert least < plan.predicted.step_seconds
    # Gradients of whole parameters travel among all ranks, those of slices among the ranks with the
    # same slice.
    of_block = {
        (each.group.size, each.size) for each in unsharded_gradient_collectives(step, "blocks.0")
    }
    slices = {name for name, _ in step.split["blocks.0"]}
    sizes = {
        p.name.removeprefix("blocks.0."): gradient_bytes(p) for p in step.parameters("blocks.0")
    }
    cut = sum(size for name, size in sizes.items() if name in slices)
    assert of_block == {(8, sum(sizes.values()) - cut), (8 // tensor, cut)} and 0 < cut < sum(
        sizes.values()
    )

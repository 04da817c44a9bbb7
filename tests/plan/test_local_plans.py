"""Plans whose ranks train alone: what the search finds, what they cost, how files hold them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lightning_topt.communication import LocalSteps, SparseLoCo, TopK
from lightning_topt.costs.communication import Group, estimate_collective_seconds
from lightning_topt.graph.mesh_axes import Axis, Mesh, data_mesh, hybrid_mesh
from lightning_topt.graph.op_config import OpConfig
from lightning_topt.plan.explanation import price_plan
from lightning_topt.plan.parallel_plan import (
    BlockPlan,
    ParallelPlan,
    PlanError,
    StagePlan,
    preset_plan,
    uniform_plan,
)
from lightning_topt.plan.plan_search import SearchRequest, search_plans, step_on
from lightning_topt.plan.plan_values import PRESETS
from tests.costs.graphs import cluster_of, profile_of, random_graph
from tests.plan.test_search import every_plan

DILOCO = LocalSteps(every=50, hierarchical=False)


def request_of(seed: int, *methods, count: int = 4) -> SearchRequest:
    graph = random_graph(seed, num_blocks=2)
    return SearchRequest(
        graph, cluster_of(count), profile_of(graph), (count,), 12, local_steps=methods
    )


@pytest.mark.parametrize("seed", range(4))
def test_what_is_found_is_among_all_plans(seed):
    request = request_of(seed, SparseLoCo(), DILOCO)
    found = search_plans(request)
    known = {(round(s, 9), round(b, 3)) for s, b in every_plan(request, 4)}
    points = found.candidates
    assert {(round(p.step_seconds, 9), round(p.peak_bytes, 3)) for p in points} <= known
    alone = [point.plan for point in points if point.plan.local_steps is not None]
    # with everything decided: under a plan each rank trains a replica
    methods = {plan.local_steps for plan in alone}
    assert methods == {DILOCO, SparseLoCo(hierarchical=False)}
    assert all(block.config.storage.level == 0 for plan in alone for block in plan.blocks)
    for point in points:
        priced = price_plan(request, point.plan).predicted
        assert priced.step_seconds == pytest.approx(point.step_seconds)
        assert priced.peak_bytes == pytest.approx(point.peak_bytes)
        waits = point.plan.predicted.exposed_communication_seconds
        assert priced.exposed_communication_seconds == pytest.approx(waits)


def test_a_step_has_its_share_of_an_outer_step():
    request = request_of(1, DILOCO)
    cluster, ranks = request.cluster, Group(4)
    numel = sum(p.numel for p in request.graph.parameters if p.trainable)
    plan = preset_plan(PRESETS["ddp"], mesh=data_mesh(4), blocks=[])
    plan = replace(
        plan,
        stages=search_plans(request).uniform[0].plan.stages,
        fingerprint=request.graph.fingerprint,
    )

    def seconds(every: int) -> float:
        local = replace(plan, local_steps=replace(DILOCO, every=every))
        return price_plan(request, local).predicted.step_seconds

    # the outer step by hand: passes over memory, kernels, and two all-reduces
    moved = (20 + 24) * numel + 12 * numel + 20 * numel
    sent = [4 * 4.0, 4.0 * numel, float(request.graph.buffer_bytes)]
    outer = moved / cluster.device.memory_bandwidth
    outer += (16 + 12) * cluster.device.op_overhead_seconds
    outer += sum(
        estimate_collective_seconds(cluster, op="all_reduce", size=size, group=ranks)
        for size in sent
    )
    assert seconds(1) - seconds(10) == pytest.approx(outer * 0.9)
    # what is left is what one rank takes by itself: no exchange, no copies into buckets
    step = replace(step_on(request, data_mesh(4)), local_steps=DILOCO)
    own = sum(float(each.sum()) for each in step.compute.values())
    own += sum(step.update_seconds(p) for p in request.graph.parameters)
    assert own <= seconds(10**9) < price_plan(request, plan).predicted.step_seconds


def staged() -> ParallelPlan:
    """Return a plan of two stages on two rows."""
    mesh = Mesh((Axis("data", 2), Axis("pipeline", 2)))
    config = OpConfig.zero(0, axes=2, over=mesh.data_axes)
    stages = tuple(StagePlan((BlockPlan(name, config), BlockPlan("", config))) for name in "ab")
    return ParallelPlan(mesh, stages, schedule="1f1b", num_microbatches=2)


@pytest.mark.parametrize("method", [DILOCO, SparseLoCo(every=5)])
def test_files_hold_local_steps(method, tmp_path):
    plan = replace(uniform_plan(0, data_parallel_size=2), local_steps=method)
    assert plan.local_steps == replace(method, hierarchical=False)
    assert method.words in plan.summary()
    plan.save(tmp_path / "plan.yaml")
    assert ParallelPlan.load(tmp_path / "plan.yaml") == plan
    assert "local_steps" not in uniform_plan(0, data_parallel_size=2).to_dict()


@pytest.mark.parametrize(
    ("plan", "method", "says"),
    [
        (uniform_plan(1, data_parallel_size=2), DILOCO, "ZeRO level 1.*choose level 0"),
        (uniform_plan(0, data_parallel_size=1), DILOCO, "several of them"),
        (preset_plan(PRESETS["ddp"], mesh=hybrid_mesh(2, 2)), DILOCO, "one data axis"),
        (staged(), DILOCO, "one data axis.*pipeline 2"),
        (
            replace(uniform_plan(0, data_parallel_size=2), gradient_exchange=TopK()),
            DILOCO,
            "average no gradients",
        ),
        (uniform_plan(0, data_parallel_size=2), LocalSteps(hierarchical=True), "leave out hier"),
        (uniform_plan(0, data_parallel_size=2), TopK(), "averages gradients in every step"),
    ],
)
def test_what_cannot_train_alone_is_refused(plan, method, says):
    with pytest.raises(PlanError, match=says):
        replace(plan, local_steps=method)

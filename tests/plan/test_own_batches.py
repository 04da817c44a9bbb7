"""Pipelines whose ranks bring a batch each: what they cost, and what plans say of them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from lightning_topt.costs.cluster import Cluster, Device, Link
from lightning_topt.costs.optimizer import read_optimizer
from lightning_topt.costs.sizes import parameter_bytes
from lightning_topt.graph.capture import capture
from lightning_topt.graph.mesh_axes import Axis, Mesh
from lightning_topt.graph.op_config import OpConfig
from lightning_topt.plan.parallel_plan import BlockPlan, ParallelPlan, PlanError, StagePlan
from lightning_topt.plan.plan_search import (
    SearchRequest,
    evaluation_bytes,
    least_own_batch_seconds,
    search_own_batches,
    search_plans,
    stage_blocks,
)
from tests.models import GPT

DEVICE = Device(
    "accelerator", 10**10, {"float32": 1e12}, memory_bandwidth=1e12, op_overhead_seconds=1e-6
)
SLOW = Cluster(
    "nodes", DEVICE, devices_per_node=1, num_nodes=4, intra=Link(1e-6, 1e11), inter=Link(1e-5, 1e8)
)


@pytest.fixture(scope="module")
def request_of_ranks() -> SearchRequest:
    module, batch = (
        GPT(6, 256, 8, vocab=512, context=128),
        (torch.zeros(4, 128, dtype=torch.long),) * 2,
    )
    optimizer = read_optimizer(
        [module.configure_optimizers()], named_parameters=module.named_parameters()
    )
    return SearchRequest(capture(module, batch, batch_scaling=False), SLOW, optimizer, (4,), 16)


def test_the_batch_of_each_rank_is_a_microbatch(request_of_ranks: SearchRequest) -> None:
    request = request_of_ranks
    least, data = least_own_batch_seconds(request), search_plans(request)
    assert least < min(point.step_seconds for point in data.points)
    found = search_own_batches(request, data.candidates)
    assert {point.plan.mesh.pipeline_size for point in found.points} <= {2, 4} and found.points
    for point in found.points:
        plan = point.plan
        assert (
            plan.own_batches
            and plan.num_microbatches == plan.mesh.pipeline_size
            and plan.batch_size == 4
        )
        assert plan.brings_batches and "the batch of each rank" in plan.summary()
        assert point.step_seconds >= least and point.step_seconds == plan.predicted.step_seconds
        assert ParallelPlan.from_yaml(plan.to_yaml()) == plan
        # Faster than all that is known, or smaller.
        assert not any(
            known.step_seconds <= point.step_seconds and known.peak_bytes <= point.peak_bytes
            for known in data.points
        )


def test_evaluations_need_all_parameters(request_of_ranks: SearchRequest) -> None:
    whole = sum(map(parameter_bytes, request_of_ranks.graph.parameters))
    blocks = stage_blocks(request_of_ranks)
    trains = search_own_batches(replace(request_of_ranks, evaluates=False), ())
    for point in trains.points:
        assert evaluation_bytes(blocks, point.plan) > whole
    evaluates = search_own_batches(request_of_ranks, ())
    smallest = [min(point.peak_bytes for point in each.points) for each in (trains, evaluates)]
    assert smallest[0] <= smallest[1] and smallest[1] > whole


def plan_of(**options: object) -> ParallelPlan:
    storage = OpConfig.zero(0, axes=2, over=(1,))
    stages = tuple(
        StagePlan((BlockPlan(f"blocks.{n}", storage), BlockPlan("", storage))) for n in range(2)
    )
    return ParallelPlan(Mesh((Axis("pipeline", 2), Axis("data", 2))), stages, **options)  # type: ignore[arg-type]


def test_own_batches_are_as_many_as_ranks() -> None:
    plan = plan_of(schedule="1f1b", num_microbatches=2, own_batches=True)
    assert plan.to_dict()["own_batches"] is True
    assert "own_batches" not in plan_of(schedule="1f1b", num_microbatches=2).to_dict()
    with pytest.raises(
        PlanError, match="num_microbatches is then the ranks along the axis 'pipeline', 2"
    ):
        plan_of(schedule="1f1b", num_microbatches=4, own_batches=True)
    with pytest.raises(PlanError, match="own_batches must be true or false"):
        ParallelPlan.from_dict({**plan.to_dict(), "own_batches": 1})

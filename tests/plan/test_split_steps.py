"""Meshes with a tensor axis in the search of plans."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from benchmarks.prediction.saved_frontier import frontier_of_json
from lightning_topt.costs.cluster import Cluster, Device, Link
from lightning_topt.costs.optimizer import read_optimizer
from lightning_topt.costs.training_step import SPLIT_CALL_SECONDS, TrainingStep
from lightning_topt.graph.capture import capture
from lightning_topt.graph.mesh_axes import Axis, Mesh, data_mesh
from lightning_topt.graph.op_config import OpConfig, Replicate, Shard
from lightning_topt.plan.explanation import explain_plan
from lightning_topt.plan.parallel_plan import ParallelPlan
from lightning_topt.plan.plan_search import SearchRequest, search_plans
from lightning_topt.techniques.plan_costs import PlanCosts, seconds_by_kind
from lightning_topt.techniques.tensor_parallel.function_trace import FunctionTrace
from lightning_topt.techniques.tensor_parallel.split_model import SplitModel
from lightning_topt.techniques.tensor_parallel.split_steps import (
    least_seconds,
    tensor_meshes,
    tensor_steps,
)
from tests.models import GPT
from tests.techniques.plan_memory import plan_memory

DEVICE = Device(
    "accelerator", 10**10, {"float32": 1e12}, memory_bandwidth=1e12, op_overhead_seconds=1e-6
)
NODES = Cluster(
    "nodes", DEVICE, devices_per_node=4, num_nodes=2, intra=Link(1e-6, 1e11), inter=Link(1e-5, 1e9)
)


@pytest.fixture(scope="module")
def request_of_gpt() -> SearchRequest:
    module, batch = (
        GPT(2, 256, 8, vocab=512, context=128),
        (torch.zeros(4, 128, dtype=torch.long),) * 2,
    )
    trace = FunctionTrace()
    graph = capture(module, batch, adapt=trace.of)
    optimizer = read_optimizer(
        [module.configure_optimizers()], named_parameters=module.named_parameters()
    )
    return SearchRequest(
        graph, NODES, optimizer, (8,), 16, split=SplitModel(module, batch, graph, trace)
    )


# ---- ranks with batches of their own
# ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def own_batches(request_of_gpt: SearchRequest) -> SearchRequest:
    # four samples per rank, as captured
    return replace(request_of_gpt, own_batches=True, global_batch_size=32)


def test_ranks_of_a_tensor_group_run_their_batches_as_microbatches(
    own_batches: SearchRequest,
) -> None:
    frontier = search_plans(own_batches)
    found = {
        (p.plan.mesh.shape[-1], p.plan.num_microbatches, p.plan.batch_size)
        for p in (*frontier.candidates, *frontier.uniform)
    }
    assert found == {(size, size, 4) for size in (2, 4)}
    assert {block.config.storage.level for p in frontier.candidates for block in p.plan.blocks} <= {
        0,
        1,
    }
    whole = TrainingStep(
        own_batches.graph, NODES, own_batches.optimizer, data_mesh(8, scope="inter"), 4
    )
    for point in frontier.candidates:
        assert point.step_seconds > least_seconds(whole, point.plan.mesh.shape[-1])
        assert ParallelPlan.from_yaml(point.plan.to_yaml()) == point.plan


def test_microbatches_take_their_computation_and_share_the_rest(own_batches: SearchRequest) -> None:
    assert own_batches.split is not None
    whole = TrainingStep(
        own_batches.graph, NODES, own_batches.optimizer, data_mesh(8, scope="inter"), 4
    )
    mesh = next(tensor_meshes(NODES, 8, 2))
    several = next(tensor_steps(replace(whole, num_microbatches=2), own_batches.split, mesh=mesh))
    one = replace(several, num_microbatches=1, joined_bytes=0.0)
    assert several.joined_bytes == sum(p.numel * 4 for p in whole.graph.parameters) - sum(
        p.numel * 4 for p in several.graph.parameters
    )
    blocks = [
        block.name for block in several.graph.blocks if block.name and several.split[block.name]
    ]
    assert several.split_calls >= 15 * len(blocks) > 0
    # Kernels of the accelerator run beside Python; on CPUs they do not.
    calls = several.split_calls * SPLIT_CALL_SECONDS
    kernels = sum(times.sum() for times in several.compute.values())
    assert (
        several.host_seconds == pytest.approx(2 * max(calls - kernels, 0.0))
        and one.host_seconds == 0
    )
    on_cpu = replace(several, cluster=replace(NODES, backend="gloo"))
    assert on_cpu.host_seconds == pytest.approx(2 * calls)
    first, second = PlanCosts(one), PlanCosts(several)
    for recompute in (False, True):
        plan = {
            block.name: OpConfig.zero(
                0, axes=2, recompute=recompute and bool(block.name) and block.recomputable
            )
            for block in one.graph.blocks
        }
        once, both = seconds_by_kind(first, plan), seconds_by_kind(second, plan)
        more = {kind: seconds - once[kind] for kind, seconds in both.items()}
        passes = once["forward"] + once["backward"] + once["recompute"]
        assert sum(more[kind] for kind in ("forward", "backward", "recompute")) == pytest.approx(
            passes + several.host_seconds
        )
        assert more["update"] == pytest.approx(several.accumulation_seconds) and more["reduce"] == 0
        assert (
            more["buffers"] == pytest.approx(several.sent_seconds - one.sent_seconds)
            and more["buffers"] > 0
        )
        assert second.seconds(plan) == pytest.approx(first.seconds(plan) + sum(more.values()))
        gradients = sum(p.numel * 4 for p in several.graph.parameters if p.trainable)
        # Gradients of the microbatches so far are added to those of one, which go into buckets as
        # they come.
        added = plan_memory(second, plan) - plan_memory(
            PlanCosts(replace(one, gradient_views=True)), plan
        )
        assert added[1:-1] == pytest.approx(gradients) and added[-1] == pytest.approx(
            gradients + several.joined_bytes
        )


def test_an_explanation_adds_up_to_what_the_search_said(request_of_gpt: SearchRequest) -> None:
    request = replace(request_of_gpt, global_batch_size=8)
    found = search_plans(request)
    assert {bool(point.plan.mesh.tensor_axes) for point in found.candidates} == {False, True}
    assert frontier_of_json(found.to_json()) == found
    for point in found.candidates[:: max(len(found.candidates) // 8, 1)]:
        explained = explain_plan(request, point.plan)
        assert explained.step_seconds == pytest.approx(point.step_seconds)
        assert explained.peak_bytes == pytest.approx(point.peak_bytes)
        assert sum(explained.peak_parts.values()) == pytest.approx(point.peak_bytes)


@pytest.mark.parametrize(
    ("axes", "border"),
    [
        ({"tensor_tokens": 2}, [Shard(1)]),
        ({"tensor_rows": 2, "tensor_columns": 2}, [Shard(0), Shard(2)]),
        ({"tensor_tokens": 2, "tensor_rows": 2, "tensor_columns": 2}, None),
    ],
)
def test_meshes_with_other_tensor_axes_are_searched(
    axes: dict[str, int], border: list[Shard] | None, request_of_gpt: SearchRequest
) -> None:
    rest = 8 // math.prod(axes.values())
    mesh = Mesh(
        tuple(
            Axis(name, size) for name, size in (({"data": rest} if rest > 1 else {}) | axes).items()
        )
    )
    found = search_plans(replace(request_of_gpt, device_counts=(mesh.size,), mesh=mesh))
    assert {point.plan.mesh.names for point in found.candidates} == {mesh.names}
    levels = {block.config.storage.level for point in found.uniform for block in point.plan.blocks}
    assert levels == ({0, 1, 2, 3} if rest > 1 else {0})
    for point in found.candidates:
        (entering,) = {
            block.config.inputs[0]
            for block in point.plan.blocks
            if block.block.startswith("blocks.")
        }
        assert border is None or [*entering] == [Replicate(), *border]
    explained = explain_plan(
        replace(request_of_gpt, device_counts=(mesh.size,), mesh=mesh), found.points[0].plan
    )
    assert explained.step_seconds == pytest.approx(found.points[0].step_seconds)


def test_tensor_axes_without_a_layout_are_refused(request_of_gpt: SearchRequest) -> None:
    mesh = Mesh((Axis("data", 2), Axis("tensor", 2), Axis("tensor_rows", 2)))
    with pytest.raises(
        ValueError,
        match=r"tensor axes tensor, tensor_rows; a mesh to search has one of these: tensor;",
    ):
        search_plans(replace(request_of_gpt, mesh=mesh))


def test_what_is_between_layers_may_be_split_by_step(request_of_gpt: SearchRequest) -> None:
    """The fewest bytes that are kept for backward; the plan says so, and reads as written."""
    mesh = Mesh((Axis("data", 2), Axis("tensor", 4)))
    found = search_plans(replace(request_of_gpt, mesh=mesh, shards=False))
    least = min(found.candidates, key=lambda point: point.peak_bytes).plan
    by_step = (Replicate(), Shard(1))
    configs = {block.block: block.config for block in least.blocks}
    assert configs["blocks.1"].inputs == configs["blocks.1"].outputs == (by_step,)
    assert configs[""].sums == by_step and configs[""].inputs == ()
    assert ParallelPlan.from_yaml(least.to_yaml()) == least
    named = search_plans(replace(request_of_gpt, mesh=mesh, shards=False, layout="tensor"))
    assert not any(block.config.sums for point in named.candidates for block in point.plan.blocks)

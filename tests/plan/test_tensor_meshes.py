"""Meshes with a tensor axis in the search of plans."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from lightning_topt.costs.cluster import Cluster, Device, Link
from lightning_topt.costs.compute import kernel_key
from lightning_topt.costs.optimizer import read_optimizer
from lightning_topt.costs.training_step import SPLIT_CALL_SECONDS, TrainingStep
from lightning_topt.graph.capture import capture
from lightning_topt.graph.mesh_axes import data_mesh
from lightning_topt.graph.op_config import OpConfig, Replicate, Shard
from lightning_topt.plan.choose import PlanFrontier
from lightning_topt.plan.parallel_plan import ParallelPlan
from lightning_topt.plan.plan_search import SearchRequest, search_plans
from lightning_topt.plan.tensor_meshes import (
    least_seconds,
    placed_parameters,
    saving_no_computation,
    tensor_meshes,
    tensor_sizes,
    tensor_steps,
)
from lightning_topt.techniques.explain import seconds_by_kind
from lightning_topt.techniques.plan_costs import PlanCosts
from lightning_topt.techniques.tensor_parallel.function_trace import FunctionTrace
from lightning_topt.techniques.tensor_parallel.split_candidates import SplitModel
from tests.models import GPT

DEVICE = Device("accelerator", 10**10, {"float32": 1e12}, memory_bandwidth=1e12, op_overhead_seconds=1e-6)
NODES = Cluster("nodes", DEVICE, devices_per_node=4, num_nodes=2, intra=Link(1e-6, 1e11), inter=Link(1e-5, 1e9))


@pytest.fixture(scope="module")
def request_of_gpt() -> SearchRequest:
    module, batch = GPT(3, 256, 8, vocab=512, context=128), (torch.zeros(4, 128, dtype=torch.long),) * 2
    trace = FunctionTrace()
    graph = capture(module, batch, adapt=trace.of)
    optimizer = read_optimizer([module.configure_optimizers()], named_parameters=module.named_parameters())
    return SearchRequest(graph, NODES, optimizer, (8,), 16, split=SplitModel(module, batch, graph, trace))


def test_tensor_axes_are_innermost_and_inside_nodes() -> None:
    assert tensor_sizes(NODES, 8) == [2, 4]
    assert tensor_sizes(NODES, 6) == [2]
    assert tensor_sizes(NODES, 1) == []
    found = [*tensor_meshes(NODES, 8, 2)]
    shapes = [[(axis.name, axis.size, axis.scope) for axis in mesh.axes] for mesh in found]
    assert shapes == [
        [("data", 4, "inter"), ("tensor", 2, "intra")],
        [("data_replicate", 2, "inter"), ("data_shard", 2, "intra"), ("tensor", 2, "intra")],
    ]
    assert all(mesh.size == 8 and mesh.stride(mesh.tensor_axes) == 1 for mesh in found)


def test_a_step_has_slices_of_parameters_their_state_and_the_samples_of_a_data_rank(
    request_of_gpt: SearchRequest,
) -> None:
    request = request_of_gpt
    assert request.split is not None
    whole = TrainingStep(request.graph, NODES, request.optimizer, data_mesh(8, scope="inter"), 8)
    for step in tensor_steps(whole, request.split, mesh=next(tensor_meshes(NODES, 8, 4))):
        assert step.mesh.shape == (2, 4)
        assert step.batch_size == 8
        counts = {
            f"{block}.{name}" if block else name: 4 if placements == (Shard(1),) or placements[0] != Replicate() else 1
            for block, placed in step.split.items()
            for name, placements in placed
        }
        assert counts
        for parameter in step.graph.parameters:
            cut = counts.get(parameter.name, 1)
            own, of_all = step.optimizer.updates[parameter.name], request.optimizer.updates[parameter.name]
            assert own.moved_bytes * cut == pytest.approx(of_all.moved_bytes)
            assert own.state_bytes == pytest.approx(of_all.state_bytes / cut, abs=1)


def test_a_plan_places_parameters_along_all_axes(request_of_gpt: SearchRequest) -> None:
    request = request_of_gpt
    assert request.split is not None
    whole = TrainingStep(request.graph, NODES, request.optimizer, data_mesh(8, scope="inter"), 2)
    step = next(tensor_steps(whole, request.split, mesh=next(tensor_meshes(NODES, 8, 2))))
    *_, hybrid = tensor_meshes(NODES, 8, 2)
    placed = placed_parameters(replace(step, mesh=hybrid))
    assert dict(placed["blocks.1"])["project.weight"] == (Replicate(), Replicate(), Shard(1))
    assert placed_parameters(whole) == {}


def test_a_batch_that_no_data_axis_divides_needs_a_tensor_axis(request_of_gpt: SearchRequest) -> None:
    found = search_plans(replace(request_of_gpt, device_counts=(4,), global_batch_size=2))
    assert found.points
    assert {point.plan.mesh.names[-1] for point in found.candidates} == {"tensor"}
    with pytest.raises(ValueError, match="cannot be divided evenly over 4 devices"):
        search_plans(replace(request_of_gpt, device_counts=(4,), global_batch_size=2, split=None))


def test_links_in_nodes_decide_on_tensor_axes(request_of_gpt: SearchRequest) -> None:

    def fastest(found: PlanFrontier) -> ParallelPlan:
        return min(found.candidates, key=lambda point: point.step_seconds).plan

    few, slow = replace(request_of_gpt, global_batch_size=8), Link(1e-6, 1e9)
    best, without = search_plans(few), search_plans(replace(few, split=None))
    assert "tensor" in fastest(best).mesh.names
    assert best.points[-1].step_seconds < without.points[-1].step_seconds
    many = replace(request_of_gpt, global_batch_size=256, cluster=replace(NODES, intra=slow, inter=slow))
    assert "tensor" not in fastest(search_plans(many)).mesh.names
    for point in best.points:
        assert ParallelPlan.from_yaml(point.plan.to_yaml()) == point.plan
        assert point.plan.fingerprint == request_of_gpt.graph.fingerprint
        placed = [block.config.parameters for block in point.plan.blocks if block.block.startswith("blocks.")]
        assert bool(placed[0]) == ("tensor" in point.plan.mesh.names)
        assert len({tuple(each) for each in placed}) == 1


# ---- ranks with batches of their own ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def own_batches(request_of_gpt: SearchRequest) -> SearchRequest:
    return replace(request_of_gpt, own_batches=True, global_batch_size=32)  # four samples per rank, as captured


def test_ranks_of_a_tensor_group_run_their_batches_as_microbatches(own_batches: SearchRequest) -> None:
    frontier = search_plans(own_batches)
    found = {(p.plan.mesh.shape[-1], p.plan.num_microbatches, p.plan.batch_size) for p in frontier.candidates}
    assert found <= {(2, 2, 4), (4, 4, 4)} and found
    assert {block.config.storage.level for p in frontier.candidates for block in p.plan.blocks} <= {0, 1}
    whole = TrainingStep(own_batches.graph, NODES, own_batches.optimizer, data_mesh(8, scope="inter"), 4)
    for point in frontier.candidates:
        assert point.step_seconds > least_seconds(whole, point.plan.num_microbatches)
        assert ParallelPlan.from_yaml(point.plan.to_yaml()) == point.plan


def test_microbatches_take_their_computation_and_share_the_rest(own_batches: SearchRequest) -> None:
    assert own_batches.split is not None
    whole = TrainingStep(own_batches.graph, NODES, own_batches.optimizer, data_mesh(8, scope="inter"), 4)
    mesh = next(tensor_meshes(NODES, 8, 2))
    several = next(tensor_steps(replace(whole, num_microbatches=2), own_batches.split, mesh=mesh))
    one = replace(several, num_microbatches=1, joined_bytes=0.0)
    assert several.joined_bytes == sum(p.numel * 4 for p in whole.graph.parameters) - sum(
        p.numel * 4 for p in several.graph.parameters
    )
    blocks = [block.name for block in several.graph.blocks if block.name and several.split[block.name]]
    assert several.split_calls >= 15 * len(blocks) > 0
    # Kernels of the accelerator run beside Python; on CPUs they do not.
    calls = several.split_calls * SPLIT_CALL_SECONDS
    kernels = sum(times.sum() for times in several.compute.values())
    assert several.host_seconds == pytest.approx(2 * max(calls - kernels, 0.0)) and one.host_seconds == 0
    on_cpu = replace(several, cluster=replace(NODES, backend="gloo"))
    assert on_cpu.host_seconds == pytest.approx(2 * calls)
    first, second = PlanCosts(one), PlanCosts(several)
    for recompute in (False, True):
        plan = {
            block.name: OpConfig.zero(0, axes=2, recompute=recompute and bool(block.name) and block.recomputable)
            for block in one.graph.blocks
        }
        once, both = seconds_by_kind(first, plan), seconds_by_kind(second, plan)
        more = {kind: seconds - once[kind] for kind, seconds in both.items()}
        passes = once["forward"] + once["backward"] + once["recompute"]
        assert sum(more[kind] for kind in ("forward", "backward", "recompute")) == pytest.approx(
            passes + several.host_seconds
        )
        assert more["update"] == pytest.approx(several.accumulation_seconds) and more["reduce"] == 0
        assert more["buffers"] == pytest.approx(several.sent_seconds - one.sent_seconds) and more["buffers"] > 0
        assert second.seconds(plan) == pytest.approx(first.seconds(plan) + sum(more.values()))
        gradients = sum(p.numel * 4 for p in several.graph.parameters if p.trainable)
        added = second.memory(plan) - first.memory(plan)
        assert added[:-1] == pytest.approx(gradients) and added[-1] == pytest.approx(gradients + several.joined_bytes)


def test_kernels_that_were_measured_later_save_no_computation(own_batches: SearchRequest) -> None:
    assert own_batches.split is not None
    whole = TrainingStep(own_batches.graph, NODES, own_batches.optimizer, data_mesh(8, scope="inter"), 4)
    mesh = next(tensor_meshes(NODES, 8, 2))
    step = next(tensor_steps(replace(whole, num_microbatches=2), own_batches.split, mesh=mesh))
    assert saving_no_computation(step, whole) is step
    kernels = (kernel for op in step.graph.ops for kernel in (*op.forward, *op.backward))
    quick = replace(step, kernel_seconds={kernel_key(kernel): 1e-9 for kernel in kernels})
    least = sum(times.sum() for times in whole.compute.values())
    mended = saving_no_computation(quick, whole)
    assert 2 * sum(times.sum() for times in quick.compute.values()) < least
    assert 2 * sum(times.sum() for times in mended.compute.values()) == pytest.approx(least)

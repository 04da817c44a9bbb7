"""Meshes with a tensor axis in the search of plans."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from lightning_topt.costs.cluster import Cluster, Device, Link
from lightning_topt.costs.optimizer import read_optimizer
from lightning_topt.costs.training_step import TrainingStep
from lightning_topt.graph.capture import capture
from lightning_topt.graph.mesh_axes import Axis, Mesh, data_mesh
from lightning_topt.graph.op_config import Replicate, Shard
from lightning_topt.plan.choose import PlanFrontier
from lightning_topt.plan.parallel_plan import ParallelPlan
from lightning_topt.plan.plan_search import SearchRequest, search_plans
from lightning_topt.plan.tensor_meshes import placed_tensors, tensor_meshes, tensor_sizes, tensor_steps
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
    placed = placed_tensors(replace(step, mesh=hybrid))
    assert dict(placed["blocks.1"]["parameters"])["project.weight"] == (Replicate(), Replicate(), Shard(1))
    assert placed_tensors(whole) == {}


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


def test_what_is_between_layers_may_be_split_by_step(request_of_gpt: SearchRequest) -> None:
    """The fewest bytes that are kept for backward; the plan says so, and reads as it was written."""
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

"""Pipelines whose stages run on tensor groups, in the search of plans."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import pytest
import torch

from lightning_topt.costs.cluster import Cluster, Device, Link
from lightning_topt.costs.optimizer import read_optimizer
from lightning_topt.frontier.stage_search import search_stages
from lightning_topt.graph.capture import capture
from lightning_topt.graph.kernels import shown_collective
from lightning_topt.graph.op_config import Replicate, Shard
from lightning_topt.plan.explanation import explain_stages
from lightning_topt.plan.parallel_plan import ParallelPlan
from lightning_topt.plan.pipeline_search import PipelineRequest, bounds_of
from lightning_topt.plan.plan_frontier import PlanFrontier, PlanPoint
from lightning_topt.plan.plan_search import SearchRequest, search_plans, stage_blocks
from lightning_topt.plan.stage_blocks import StageBlocks
from lightning_topt.plan.stage_simulation import cut_of_plan, peak_bytes_of, stage_bytes
from lightning_topt.plan.stage_tables import (
    PipelineShape,
    shape_of_plan,
    stage_table,
    transfer_seconds,
)
from lightning_topt.plan.staged_plans import SplitStages, splits_of_stages
from lightning_topt.techniques.registry import check_runs
from lightning_topt.techniques.tensor_parallel.function_trace import FunctionTrace
from lightning_topt.techniques.tensor_parallel.split_model import SplitModel
from lightning_topt.techniques.tensor_parallel.split_steps import placed_layout
from tests.frontier.brute_force import brute_force_stages
from tests.models import GPT
from tests.plan.pruned_pipelines import check_that_none_is_dropped

DEVICE = Device(
    "accelerator", 10**10, {"float32": 1e12}, memory_bandwidth=1e12, op_overhead_seconds=1e-6
)
NODES = Cluster(
    "nodes", DEVICE, devices_per_node=4, num_nodes=2, intra=Link(1e-6, 1e11), inter=Link(1e-5, 1e8)
)
LAYERS = 3


@pytest.fixture(scope="module")
def request_of_gpt() -> SearchRequest:
    module, batch = (
        GPT(LAYERS, 256, 8, vocab=512, context=128),
        (torch.zeros(4, 128, dtype=torch.long),) * 2,
    )
    trace = FunctionTrace()
    graph = capture(module, batch, adapt=trace.of)
    optimizer = read_optimizer(
        [module.configure_optimizers()], named_parameters=module.named_parameters()
    )
    split = SplitModel(module, batch, graph, trace)
    return SearchRequest(
        graph, NODES, optimizer, (8,), 16, split=split, pipelines=PipelineRequest()
    )


@pytest.fixture(scope="module")
def found(request_of_gpt: SearchRequest) -> PlanFrontier:
    return search_plans(request_of_gpt)


def split_chains(request: SearchRequest) -> list[tuple[SplitStages, list[PipelineShape]]]:
    assert request.split is not None and request.pipelines is not None
    given = request.pipelines, request.global_batch_size
    return [*splits_of_stages(stage_blocks(request), request.split, 8, *given)]


def staged(points: Iterable[PlanPoint]) -> list[PlanPoint]:
    return [
        point for point in points if point.plan.schedule is not None and point.plan.mesh.tensor_axes
    ]


def test_stages_run_on_tensor_groups_where_that_is_better(
    request_of_gpt: SearchRequest, found: PlanFrontier
) -> None:
    without = search_plans(replace(request_of_gpt, split=None))
    best = staged(found.points)
    assert best and not staged(without.candidates)
    assert found.points[0].peak_bytes < without.points[0].peak_bytes
    assert {point.plan.mesh.names for point in best} == {("pipeline", "data", "tensor")}
    for point in best:
        plan = point.plan
        assert ParallelPlan.from_yaml(plan.to_yaml()) == plan and plan.mesh.size == 8
        check_runs(plan.mesh, plan.configs)
        names = [block.block for stage in plan.stages for block in stage.blocks if block.block]
        assert names == [f"blocks.{n}" for n in range(LAYERS)]
        placed = dict(plan.configs["blocks.1"].parameters)
        assert placed["project.weight"] == (Replicate(), Replicate(), Shard(1))
        shape = shape_of_plan(plan)
        assert (
            shape.mesh(NODES) == plan.mesh
            and shape.samples * shape.num_microbatches == plan.batch_size
        )


def sequence_chains(request: SearchRequest) -> list[tuple[SplitStages, list[PipelineShape]]]:
    return [each for each in split_chains(request) if each[0].chosen.rules]


def test_stages_under_sequence_parallelism_hold_and_send_what_a_count_by_hand_says(
    request_of_gpt: SearchRequest,
) -> None:
    """Of each layer a rank keeps 1 / t; two sums are scattered and two inputs gathered."""
    whole, samples = stage_blocks(request_of_gpt), 2.0
    chains = sequence_chains(request_of_gpt)
    assert [chain.size for chain, _ in chains] == [2, 4]
    width, steps = 256, 128
    of_layer = int(samples) * steps * width * 4  # bytes of activations, float32
    for chain, _ in chains:
        blocks, size = chain.blocks, chain.size
        assert blocks is not None
        # layers but the first and the last, which have embedding and head
        middle = slice(1, LAYERS - 1)
        kept = blocks.passes(samples).kept[middle]
        assert kept * size == pytest.approx(whole.passes(samples).kept[middle], rel=0.01)
        # collectives of a layer: forward, and backward with the inputs gathered once more
        ops = [op for op in blocks.step.graph.ops if op.block == "blocks.1"]
        for direction, expected in (
            ("forward", {"reduce_scatter": 2, "all_gather": 2}),
            ("backward", {"reduce_scatter": 2, "all_gather": 4}),
        ):
            sent: dict[str, list[float]] = {}
            for kernel in (kernel for op in ops for kernel in getattr(op, direction)):
                if (found := shown_collective(kernel)) is not None:
                    size_of_call = kernel.bytes.at(int(samples))
                    sent.setdefault(found[0], []).extend([size_of_call] * kernel.count)
            large = {op: [n for n in sizes if n == of_layer] for op, sizes in sent.items()}
            assert {op: len(sizes) for op, sizes in large.items() if sizes} == expected
        # what crosses is unsharded: gathered before it is sent, as is its gradient
        assert (blocks.crossing_bytes(samples) == whole.crossing_bytes(samples)).all()
        shape = PipelineShape(8 // size // 1, 1, "1f1b", 1, 4, samples, tensor=size)
        gather = blocks.step.collective_seconds(
            "all_gather",
            float(blocks.gathered_bytes(samples)[2]),
            axes=blocks.step.mesh.tensor_axes,
        )
        plain = StageBlocks(whole.step)
        for link in ("intra", "inter"):
            more = transfer_seconds(blocks, shape)[link] - transfer_seconds(plain, shape)[link]
            assert more[:, 2] == pytest.approx(gather) and gather > 0


def test_plans_under_sequence_parallelism_are_found_saved_and_explained(
    request_of_gpt: SearchRequest, found: PlanFrontier
) -> None:
    points = [p for p in staged(found.points) if placed_layout(p.plan.configs, p.plan.mesh).rules]
    assert points
    for point in points:
        plan = ParallelPlan.from_yaml(point.plan.to_yaml())
        assert plan == point.plan
        check_runs(plan.mesh, plan.configs)
        rows = (Replicate(), Replicate(), Shard(1))
        assert plan.configs["blocks.1"].inputs == plan.configs["blocks.1"].outputs == (rows,)
        assert plan.configs["blocks.1"].sums == plan.configs[""].sums == rows
        # the file alone says which chain it is
        blocks, shape = stage_blocks(request_of_gpt, plan), shape_of_plan(plan)
        cut = cut_of_plan(blocks, plan)
        (peak,) = peak_bytes_of(blocks, shape, stage_bytes(blocks, shape, [cut]))
        assert peak == pytest.approx(point.peak_bytes, rel=1e-6)
        assert explain_stages(request_of_gpt, plan)


def test_tables_of_split_stages_equal_brute_force(request_of_gpt: SearchRequest) -> None:
    for chain, shapes in split_chains(request_of_gpt):
        assert chain.blocks is not None
        for shape in shapes[::7]:
            table = stage_table(chain.blocks, shape)
            found = np.array(
                [(point.step_seconds, point.peak_bytes) for point in search_stages(table).points]
            )
            # two of them may differ by a rounding alone
            every = np.array(brute_force_stages(table))
            assert np.isclose(found[:, None], every[None], rtol=1e-9).all(axis=2).any(axis=1).all()
            assert ((found[None] <= every[:, None] * (1 + 1e-9)).all(axis=2).any(axis=1)).all()


def test_bounds_before_a_capture_are_below_all_plans(request_of_gpt: SearchRequest) -> None:
    prices = np.array([0.0, 1e-12, 1e-10, 1e-8])
    for chain, shapes in split_chains(request_of_gpt):
        assert chain.blocks is not None
        bounds = bounds_of(chain.bound, shapes, prices)
        for index, shape in enumerate(shapes):
            points = search_stages(stage_table(chain.blocks, shape)).points
            costs = np.array([(point.step_seconds, point.peak_bytes) for point in points])
            least = (costs[:, :1] + prices * costs[:, 1:]).min(axis=0)
            assert (bounds.least[index] <= least * (1 + 1e-6)).all()
            assert bounds.fewest[index] <= costs[:, 1].min() + LAYERS


def test_no_split_is_dropped_that_would_have_a_plan(
    request_of_gpt: SearchRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_that_none_is_dropped(request_of_gpt, NODES, monkeypatch)

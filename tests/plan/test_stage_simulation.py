"""Steps of found plans are drawn as they were priced; moves find better cuts than formulas."""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge

from benchmarks.pipelines.simulated_memory import arrived_bytes, peak_bytes
from lightning_topt.costs.cluster import Link
from lightning_topt.execution.pipeline.split_backward import SplitBackward
from lightning_topt.frontier.stage_search import StagePoint, search_stages
from lightning_topt.plan import stage_blocks as stage_blocks_module
from lightning_topt.plan.explanation import explain_stages
from lightning_topt.plan.pipeline_search import PipelineRequest
from lightning_topt.plan.plan_frontier import PlanPoint
from lightning_topt.plan.plan_search import SearchRequest, search_plans, stage_blocks
from lightning_topt.plan.stage_blocks import StageBlocks
from lightning_topt.plan.stage_simulation import (
    cut_of_plan,
    peak_bytes_of,
    simulated_schedule,
    stage_bytes,
    stage_seconds,
    step_seconds_of,
    with_moves,
)
from lightning_topt.plan.stage_tables import PipelineShape, shape_of_plan, stage_table
from lightning_topt.schedules.timing import simulate
from tests.frontier.brute_force import stage_costs
from tests.models import GPT
from tests.plan.simulated_stages import costs_of_stages, step_of_plan
from tests.plan.test_pipelines import NODES, make_request


@pytest.fixture(scope="module")
def tied_layers() -> SearchRequest:
    return make_request(layers=8, tied=True)


@pytest.mark.parametrize(
    "schedule", ["1f1b", "gpipe", "interleaved", "zero_bubble", "interleaved_zero_bubble", "zbv"]
)
def test_a_found_plan_has_the_step_that_it_was_priced_by(
    schedule: str, tied_layers: SearchRequest
) -> None:
    request = tied_layers
    cluster = replace(NODES, inter=Link(1e-6, 1e11))
    request = replace(
        request, cluster=cluster, pipelines=PipelineRequest(schedule=schedule, microbatches=8)
    )
    blocks, points = stage_blocks(request), search_plans(request).points
    assert points
    for point in points:
        step, shape = step_of_plan(blocks, point.plan), shape_of_plan(point.plan)
        assert step.schedule.name == schedule
        once = np.zeros(shape.pipeline)
        np.add.at(
            once,
            list(shape.ranks),
            stage_seconds(blocks, shape, [cut_of_plan(blocks, point.plan)]).once[:, 0],
        )
        last = [
            max(span.end for span in step.spans if span.rank == rank)
            for rank in range(shape.pipeline)
        ]
        assert max(np.array(last) + once) == pytest.approx(point.step_seconds)
        peak = max(peak_bytes(step))  # with what is under way between ranks
        assert 0.98 * point.peak_bytes < peak < 1.05 * point.peak_bytes or is_update(
            request, point, peak
        ), shape
        assert not shape.splits_backward or peak > without_waiting(blocks, point)


def is_update(request: SearchRequest, point: PlanPoint, peak: float) -> bool:
    """Whether the peak is that of the optimizer's update, which is not part of the schedule."""
    stages = explain_stages(request, point.plan)
    return any(
        s.peak_parts["update"] > s.peak_parts["activations"] + s.peak_parts["running"]
        for s in stages
    ) and (peak <= point.peak_bytes)


def without_waiting(blocks: StageBlocks, point: PlanPoint) -> float:
    """The peak of a simulation in which gradients that wait for backward_weight take nothing."""
    shape, schedule = shape_of_plan(point.plan), simulated_schedule(shape_of_plan(point.plan))
    costs = costs_of_stages(blocks, shape, cut_of_plan(blocks, point.plan))
    assert schedule is not None and costs.activation_bytes is not None
    return max(peak_bytes(simulate(schedule, replace(costs, weight_bytes=costs.activation_bytes))))


class OwnCasts(PipelineShape):
    """The twin: each microbatch in flight keeps its own casts."""

    cast_copies = 0


def test_microbatches_in_flight_have_one_cast_of_each_weight(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Autocast rounds weights for each forward pass; graphs of synchronous pipelines share that."""
    monkeypatch.setattr(stage_blocks_module, "LEAST_SHARED_BYTES", 0)
    autocast = partial(torch.autocast, "cpu", dtype=torch.bfloat16, cache_enabled=False)
    request = make_request(layers=4, context=autocast)
    graph, blocks = request.graph, stage_blocks(request)
    # backward of a layer needs its matrix, not its bias
    kept = [graph.step.tensors[index] for index in graph.casts_of_parameters]
    linear = [m.weight for m in GPT(4, 256, 8, vocab=512, context=128).modules() if is_linear(m)]
    assert sorted(t.spec.shape for t in kept) == sorted(tuple(w.shape) for w in linear)
    casts = sum(t.bytes.fixed for t in kept)
    assert casts == 2 * sum(weight.numel() for weight in linear)

    # two stages: the first rank holds two microbatches at most, the second one
    count, sizes = len(blocks.names), (2, 1, "1f1b", 1, 8, 4.0)
    for again in (False, True):
        point = StagePoint(0.0, 0.0, (count // 2, count), (int(again),) * count)
        shared = stage_bytes(blocks, PipelineShape(*sizes), [point])
        own = stage_bytes(blocks, OwnCasts(*sizes), [point])
        of_stages = own.kept - shared.kept
        np.testing.assert_allclose(of_stages, shared.static - own.static)
        assert of_stages.sum() == pytest.approx(0 if again else casts)
        both = own.static + 2 * own.kept + own.hump, shared.static + 2 * shared.kept + shared.hump
        assert (both[0] - both[1])[0] == pytest.approx(of_stages[0])
    # what the search sums up is what the simulation counts
    table = stage_table(blocks, PipelineShape(*sizes), recomputes=(False,))
    peak = stage_costs(table, (count // 2, count), (0,) * count)[1]
    plain = StagePoint(0.0, 0.0, (count // 2, count), (0,) * count)
    simulated = peak_bytes_of(
        blocks, PipelineShape(*sizes), stage_bytes(blocks, PipelineShape(*sizes), [plain])
    )
    assert peak == pytest.approx(simulated[0], rel=0.05)


def is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear)


def test_gradients_that_wait_for_parameters_are_those_of_a_run() -> None:
    blocks, module = stage_blocks(make_request(layers=3)), GPT(3, 256, 8, vocab=512, context=128)
    x = torch.randn(4, 128, 256, requires_grad=True)
    result = module.blocks[1](x)
    split = SplitBackward([get_gradient_edge(result)], [torch.ones_like(result)], [x])
    split.inputs()
    assert blocks.passes(4.0).waiting[1] == arrived_bytes(split) > 0


# ---- better cuts of ranks with several stages

LAYERS, CHAINS = 8, 8


def random_blocks(of: StageBlocks, rng: np.random.Generator) -> StageBlocks:
    """The same chain, whose blocks take random times."""
    blocks, passes = StageBlocks(of.step), of.passes(2.0)
    forward = 0.01 * rng.lognormal(0, 0.7, LAYERS)
    blocks._passes[2.0] = replace(passes, forward=forward, backward=2 * forward, weights=forward)
    blocks.__dict__["kinds"] = tuple(range(LAYERS))
    return blocks


def every_cut(shape: PipelineShape) -> list[StagePoint]:
    cuts = itertools.combinations(range(1, LAYERS), shape.num_stages - 1)
    return [StagePoint(0.0, 0.0, (*cut, LAYERS), (0,) * LAYERS) for cut in cuts]


@pytest.mark.parametrize("name", ["interleaved", "zbv", "interleaved_zero_bubble"])
def test_moves_come_near_the_fastest_of_all_cuts(name: str, tied_layers: SearchRequest) -> None:
    request = replace(tied_layers, cluster=replace(NODES, inter=Link(1e-6, 1e11)))
    whole, rng, gaps = stage_blocks(request), np.random.default_rng(0), []
    shape = PipelineShape(2, 4, name, 2, 8, 2.0)
    for _ in range(CHAINS):
        blocks = random_blocks(whole, rng)
        points = search_stages(stage_table(blocks, shape, recomputes=(False,))).points
        simulated = [
            step_seconds_of(stage_seconds(blocks, shape, each), shape)
            for each in (points, every_cut(shape))
        ]
        assert simulated[0] is not None and simulated[1] is not None
        found = with_moves(blocks, shape, points)
        assert all(any(f.step_seconds <= s for f in found) for s in simulated[0])
        fastest = min(point.step_seconds for point in found)
        assert fastest >= simulated[1].min() * (1 - 1e-9)
        gaps.append([simulated[0].min() / simulated[1].min() - 1, fastest / simulated[1].min() - 1])
    before, after = np.array(gaps).T
    assert np.median(after) < 0.03 < before.max() and after.mean() < 0.5 * before.mean()

"""Pipelines whose rows train alone: what they cost by hand, and what the search finds of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from lightning_topt.communication import LocalSteps, QuantizedSteps, SparseLoCo, TopK
from lightning_topt.communication.exchange_method import LocalMethod
from lightning_topt.costs.communication import Group, estimate_collective_seconds
from lightning_topt.frontier.stage_search import StagePoint, search_stages
from lightning_topt.graph.op_graph import Parameter
from lightning_topt.plan.explanation import explain_stages, price_plan
from lightning_topt.plan.parallel_plan import ParallelPlan, PlanError
from lightning_topt.plan.pipeline_search import (
    PipelineRequest,
    StaleWeights,
    continuous_shapes,
    pipeline_shapes,
)
from lightning_topt.plan.plan_intervals import techniques_of
from lightning_topt.plan.plan_search import SearchRequest, search_plans, stage_blocks
from lightning_topt.plan.stage_blocks import StageBlocks
from lightning_topt.plan.stage_simulation import (
    costs_of_stages,
    stage_bytes,
    stage_seconds,
    step_seconds_of,
    with_moves,
)
from lightning_topt.plan.stage_tables import (
    ContinuousShape,
    PipelineShape,
    continuous_table,
    fixed_costs,
    shape_of_plan,
    stage_table,
)
from lightning_topt.plan.staged_plans import search_continuous, search_stages_for, staged_points
from lightning_topt.plan.step_factors import search_each_way
from lightning_topt.prediction import make_prediction
from lightning_topt.schedules.schedules import CONTINUOUS_SCHEDULES, continuous_schedule
from lightning_topt.schedules.simulate import simulate
from tests.frontier.brute_force import brute_force_stages
from tests.plan.test_continuous_plans import every_cut
from tests.plan.test_pipelines import NODES, make_request

DILOCO = LocalSteps(every=5, hierarchical=False)
METHODS: list[LocalMethod] = [
    DILOCO,
    SparseLoCo(every=3, hierarchical=False),
    QuantizedSteps(hierarchical=False),
]
STALE = StaleWeights(lambda flight: make_prediction("none"))


@pytest.fixture(scope="module")
def request_of_gpt() -> SearchRequest:
    return make_request()


@pytest.fixture(scope="module")
def tied() -> SearchRequest:
    """A model whose first and last blocks share a parameter."""
    return make_request(tied=True)


def shape_of(lag: int = 0, *, ranks: int = 2, data: int = 4, **more: Any) -> PipelineShape:
    """Return a pipeline of so many minibatches per hop, or one that flushes."""
    apart = {"rows_apart": data > 1, **more}
    if not lag:
        return PipelineShape(ranks, data, "1f1b", 1, 4, 2.0, **apart)
    schedule = next(name for name, each in CONTINUOUS_SCHEDULES.items() if each == lag)
    rule = make_prediction("none")
    return ContinuousShape.of(ranks, data, samples=2.0, schedule=schedule, prediction=rule, **apart)


def parameters_of(blocks: StageBlocks, cut: StagePoint) -> list[list[Parameter]]:
    """Return the parameters that each stage updates: the first of those that read them does."""
    places = zip((0, *cut.ends[:-1]), cut.ends, strict=True)
    return [
        [p for p in blocks.step.graph.parameters if first <= min(blocks.uses[p.name]) < end]
        for first, end in places
    ]


def outer_seconds(blocks: StageBlocks, method: LocalMethod, numel: int, group: Group) -> float:
    """An outer step by hand: passes over memory, kernels, collectives, the mean of buffers."""
    cluster, work = blocks.step.cluster, method.work(numel, group.size)
    found = work.moved / cluster.device.memory_bandwidth
    found += work.calls * cluster.device.op_overhead_seconds
    sent = [(op, size) for _, op, size in work.collectives]
    for op, size in (*sent, ("all_reduce", float(blocks.step.graph.buffer_bytes))):
        found += estimate_collective_seconds(cluster, op=op, size=size, group=group)
    return found


def plan_of(blocks: StageBlocks, shape: PipelineShape, cut: StagePoint) -> ParallelPlan:
    samples = int(shape.samples * shape.num_microbatches)
    (point,) = staged_points(blocks, shape, [cut], batch_size=samples)
    rule = shape.rule if isinstance(shape, ContinuousShape) else None
    return replace(point.plan, prediction=rule)


@pytest.mark.parametrize("method", METHODS, ids=lambda each: each.name)
@pytest.mark.parametrize(
    ("of", "lag"),
    [("request_of_gpt", 0), ("request_of_gpt", 2), ("tied", 1)],
)
def test_a_step_is_that_of_one_row_and_a_share_of_the_slowest_outer_step(
    method: LocalMethod, lag: int, of: str, request: pytest.FixtureRequest
) -> None:
    given = request.getfixturevalue(of)
    blocks = stage_blocks(given)
    shape = shape_of(lag, exchange=method)
    for cut in every_cut(blocks, 2):
        plan = plan_of(blocks, shape, cut)
        assert plan.local_steps == method and plan.gradient_exchange is None
        assert shape_of_plan(plan) == shape
        numels = [sum(p.numel for p in each) for each in parameters_of(blocks, cut)]
        # every second rank: rows are neighbours
        share = max(outer_seconds(blocks, method, numel, Group(4, 2)) for numel in numels)
        alone = plan_of(blocks, shape_of(lag, data=1), cut)
        row = price_plan(given, alone)
        seconds = row.predicted.step_seconds
        if lag:  # drained: the next minibatch goes through all stages
            share -= seconds
            for stage in row.stages:
                share += sum(stage.seconds[kind] for kind in ("forward", "backward", "receive"))
                share += 2 * shape.pass_seconds
            share += row.stages[0].seconds["once"]
        found = price_plan(given, plan)
        assert found.predicted.step_seconds == pytest.approx(seconds + share / method.every)
        # of what a stage does in a step, the share of its own outer step
        for stage, before, numel in zip(found.stages, row.stages, numels, strict=True):
            own = outer_seconds(blocks, method, numel, Group(4, 2)) / method.every
            assert stage.seconds["once"] - before.seconds["once"] == pytest.approx(own)
        # nothing computes meanwhile
        waits = found.predicted.exposed_communication_seconds
        assert waits >= share / method.every * (1 - 1e-9)


@pytest.mark.parametrize("method", METHODS, ids=lambda each: each.name)
@pytest.mark.parametrize(("of", "lag"), [("request_of_gpt", 0), ("request_of_gpt", 2), ("tied", 2)])
def test_a_stage_keeps_its_outer_state_and_has_its_buffers_while_it_meets(
    method: LocalMethod, lag: int, of: str, request: pytest.FixtureRequest
) -> None:
    given = request.getfixturevalue(of)
    blocks = stage_blocks(given)
    shape, row = shape_of(lag, exchange=method), shape_of(lag, data=1)
    for cut in every_cut(blocks, 2):
        plan = plan_of(blocks, shape, cut)
        works = [method.work(sum(p.numel for p in each), 4) for each in parameters_of(blocks, cut)]
        alone = explain_stages(given, plan_of(blocks, row, cut))
        found = explain_stages(given, plan)
        for stage, before, work in zip(found, alone, works, strict=True):
            more = {
                kind: stage.peak_parts[kind] - before.peak_parts[kind] for kind in before.peak_parts
            }
            assert more.pop("static") == pytest.approx(work.kept_bytes)
            assert more.pop("update") == pytest.approx(work.buffer_bytes)
            assert set(more.values()) == {0.0}
        # the fullest stage, by hand
        sizes = stage_bytes(blocks, row, [cut])
        in_update = [held - 1 if lag else 0 for held in row.rates.held]
        peaks = [
            sizes.static[s, 0]
            + work.kept_bytes
            + max(
                row.rates.held[s] * sizes.kept[s, 0] + sizes.hump[s, 0],
                in_update[s] * sizes.kept[s, 0] + sizes.update[s, 0] + work.buffer_bytes,
            )
            for s, work in enumerate(works)
        ]
        peak = max(peaks) + fixed_costs(blocks, row)[1]
        table = (continuous_table if lag else stage_table)(blocks, shape)
        assert table.evaluate(cut.ends, _variants(table), cut.configs)[1] == pytest.approx(
            peak, rel=1e-6
        )
        if not lag:  # a stage that never flushes updates with minibatches in flight
            predicted = price_plan(given, plan).predicted
            assert predicted.peak_bytes == pytest.approx(peak, rel=1e-6)


def _variants(table: Any) -> list[int]:
    return [stage.variants[0] for stage in table.stages]


@pytest.mark.parametrize("lag", [1, 2])
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("every", [1, 5, 50])
def test_a_drained_pipeline_takes_what_its_simulation_takes(
    request_of_gpt: SearchRequest, lag: int, ranks: int, every: int
) -> None:
    """It never takes less. In uneven stages there is idle time, in which the pipeline fills."""
    blocks = stage_blocks(request_of_gpt)
    shape = shape_of(lag, ranks=ranks, data=8 // ranks, exchange=replace(DILOCO, every=every))
    schedule = continuous_schedule(num_ranks=ranks, num_minibatches=every, lag_per_hop=lag)
    ratios = []
    for cut in every_cut(blocks, ranks):
        seconds = stage_seconds(blocks, shape, [cut])
        step = step_seconds_of(seconds, shape)
        assert step is not None
        run = simulate(schedule, costs_of_stages(blocks, shape, cut)).step_seconds
        ratios.append(float(step[0] - seconds.outer.max()) * every / run)
    assert min(ratios) == pytest.approx(1.0, rel=1e-9)
    # minibatches on their way at once, in those of a run
    assert max(ratios) <= 1 + 1e-9 + (ranks - 1) * (every > 1) / every


def test_minibatches_of_one_update_share_an_outer_step(request_of_gpt: SearchRequest) -> None:
    """Outer steps are counted in updates."""
    blocks, cut = stage_blocks(request_of_gpt), StagePoint(0.0, 0.0, (3, 6), (0, 0), (0,) * 6)
    plan = plan_of(blocks, shape_of(1, exchange=DILOCO), cut)

    def seconds(every: int, accumulate: int) -> float:
        method = replace(DILOCO, every=every)
        given = replace(plan, local_steps=method, accumulate=accumulate)
        return price_plan(request_of_gpt, given).predicted.step_seconds

    for count in (1, 4):
        saved = seconds(1, count) - seconds(10, count)
        assert saved == pytest.approx(seconds(1, 1) - seconds(10, 1), rel=1e-6)


@pytest.mark.parametrize("method", METHODS, ids=lambda each: each.name)
@pytest.mark.parametrize(("of", "lag"), [("request_of_gpt", 0), ("tied", 1)])
def test_cuts_are_those_of_brute_force(
    method: LocalMethod, lag: int, of: str, request: pytest.FixtureRequest
) -> None:
    """Of all plans of a table, also where stages share a parameter."""
    blocks, shape = stage_blocks(request.getfixturevalue(of)), shape_of(lag, exchange=method)
    table = (continuous_table if lag else stage_table)(blocks, shape)
    found = [(point.step_seconds, point.peak_bytes) for point in search_stages(table).points]
    np.testing.assert_allclose(found, brute_force_stages(table), rtol=1e-9)
    assert len(found) > 1


def test_stages_that_share_parameters_or_train_none_take_no_outer_steps() -> None:
    """As the execution refuses them."""
    given = make_request()
    blocks = stage_blocks(given)
    name = next(p.name for p in blocks.owned[1])
    blocks.uses = {**blocks.uses, name: (1, 3)}  # read by two blocks, and updated by both stages
    blocks.owned = [owned if n != 4 else [] for n, owned in enumerate(blocks.owned)]
    for lag in (0, 1):
        shape = shape_of(lag, ranks=3, data=2, exchange=DILOCO)
        table = (continuous_table if lag else stage_table)(blocks, shape)
        seconds = {
            cut.ends: table.evaluate(cut.ends, _variants(table), cut.configs)[0]
            for cut in every_cut(blocks, 3)
        }
        # block 4 by itself trains nothing; blocks 1 and 3 are together where both would update
        idle = {ends for ends in seconds if {4, 5} <= {*ends}}
        parted = {ends for ends in seconds if not lag and {2, 3} & {*ends}}
        assert {ends for ends, each in seconds.items() if np.isinf(each)} == idle | parted
        plans = search_stages(table).points
        assert plans and not {point.ends for point in plans} & (idle | parted)


def test_moves_of_boundaries_part_no_shared_parameter() -> None:
    """Where a rank has several stages. Without outer steps the best cut parts one."""
    fast = replace(NODES, inter=NODES.intra)
    blocks = stage_blocks(replace(make_request(layers=8), cluster=fast))
    name = blocks.owned[0][-1].name
    blocks.uses = {**blocks.uses, name: (0, 1)}
    plain = PipelineShape(2, 4, "interleaved", 2, 4, 2.0, rows_apart=True)
    start = StagePoint(1e9, 1e9, (2, 3, 6, 8), (0,) * 4, (0,) * 8)
    parts = []
    for shape in (plain, replace(plain, exchange=DILOCO)):
        moved = with_moves(blocks, shape, [start])
        parts.append(any(1 in point.ends for point in moved))
    assert parts == [True, False]


def test_no_stage_of_a_tied_model_is_searched_with_outer_steps_that_flush(
    tied: SearchRequest,
) -> None:
    given = replace(tied, local_steps=[DILOCO, SparseLoCo(every=3)], stale=STALE)
    schedules = {
        point.plan.schedule
        for point in search_each_way(given).candidates
        if point.plan.local_steps is not None
    }
    assert schedules & {*CONTINUOUS_SCHEDULES} and schedules <= {None, *CONTINUOUS_SCHEDULES}
    wanted = PipelineRequest(ranks=2, schedule="1f1b", microbatches=4, by_exchange=True)
    with pytest.raises(PlanError, match="shares none with another, unless the schedule never"):
        search_plans(replace(given, pipelines=wanted, stale=None))


@pytest.mark.parametrize("lag", [0, 1])
def test_the_fastest_plan_is_that_of_all_cuts_of_all_shapes(
    request_of_gpt: SearchRequest, lag: int
) -> None:
    blocks, method = stage_blocks(request_of_gpt), SparseLoCo(every=3)
    if lag:
        wanted = PipelineRequest(ranks=2, schedule="continuous")
        shapes: list[PipelineShape] = [
            *continuous_shapes(blocks, 8, 32, wanted, STALE, exchanges=[method])
        ]
        found, error = search_continuous(
            blocks, 8, wanted, STALE, (), global_batch_size=32, exchanges=[method]
        )
    else:
        wanted = PipelineRequest(ranks=2, schedule="1f1b", microbatches=4)
        shapes = [*pipeline_shapes(blocks, 8, 32, wanted, exchanges=[method])]
        found, _, error = search_stages_for(
            blocks, 8, wanted, (), global_batch_size=32, exchanges=[method]
        )
    # two ranks of a stage on a node would train one replica: rows are apart
    alone = {shape for shape in shapes if shape.local_steps is not None}
    assert {(each.rows_apart, each.exchange) for each in alone} == {
        (True, replace(method, hierarchical=False))
    }
    least = {}
    for shape in shapes:
        seconds = step_seconds_of(stage_seconds(blocks, shape, every_cut(blocks, 2)), shape)
        assert seconds is not None
        least[shape] = float(seconds.min())
    quickest = min(least, key=least.__getitem__)
    assert quickest in alone
    best = min(found, key=lambda point: point.step_seconds)
    assert error == 0 and best.plan.local_steps == replace(method, hierarchical=False)
    assert best.step_seconds == pytest.approx(least[quickest], rel=1e-6)


def test_what_is_found_costs_what_its_plan_costs(request_of_gpt: SearchRequest) -> None:
    given = replace(request_of_gpt, local_steps=METHODS, stale=STALE)
    points = [
        point
        for point in search_plans(given).candidates
        if point.plan.local_steps is not None and point.plan.schedule is not None
    ]
    assert points
    for point in points:
        priced = price_plan(given, point.plan).predicted
        assert priced.step_seconds == pytest.approx(point.step_seconds)
        assert priced.peak_bytes == pytest.approx(point.peak_bytes, rel=1e-6)
        assert {"pipeline", "local steps"} <= {*techniques_of(point.plan)}
        read = ParallelPlan.from_yaml(point.plan.to_yaml())
        assert read == point.plan and point.plan.local_steps.words in read.summary()


def test_each_way_is_searched_with_and_without_stages_and_stale_weights(
    request_of_gpt: SearchRequest,
) -> None:
    fast = replace(NODES.intra, bandwidth=1e9)
    given = replace(
        request_of_gpt,
        cluster=replace(NODES, inter=fast),
        exchanges=[TopK(density=0.01)],
        local_steps=[LocalSteps(every=5), SparseLoCo(every=3)],
        stale=STALE,
    )
    found = search_each_way(given).candidates
    names = {None: 0, "continuous": 1, "continuous_overlapped": 1}
    ways = {
        (
            plan.local_steps and plan.local_steps.name,
            plan.gradient_exchange and plan.gradient_exchange.name,
            names.get(plan.schedule, 2),
        )
        for plan in (point.plan for point in found)
    }
    for method in ("local_steps", "sparse_loco"):
        assert {(method, None, 1), (method, None, 2)} <= ways
    assert (None, "topk", 1) in ways
    assert not any(local and exchange for local, exchange, _ in ways)
    # what is searched without local steps is the same as ever
    before = search_each_way(replace(given, local_steps=()))
    plans = [point.plan for point in found]
    assert all(point.plan in plans for point in before.candidates)

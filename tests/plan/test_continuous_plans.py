"""Pipelines that never flush in the search of plans."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest

from benchmarks.pipelines.simulated_memory import peak_bytes
from lightning_topt.communication import TopK
from lightning_topt.costs.cluster import Link
from lightning_topt.costs.sizes import parameter_bytes
from lightning_topt.frontier.stage_search import StagePoint, search_stages
from lightning_topt.plan import stage_tables
from lightning_topt.plan.choose import choose
from lightning_topt.plan.explanation import explain_stages
from lightning_topt.plan.parallel_plan import ParallelPlan, PlanError
from lightning_topt.plan.pipeline_search import PipelineRequest, StaleWeights, continuous_shapes
from lightning_topt.plan.plan_search import SearchRequest, search_plans, stage_blocks
from lightning_topt.plan.stage_blocks import StageBlocks
from lightning_topt.plan.stage_simulation import stage_seconds, step_seconds_of
from lightning_topt.plan.stage_tables import ContinuousShape, continuous_table, shape_of_plan
from lightning_topt.plan.staged_plans import search_continuous
from lightning_topt.schedules.schedules import CONTINUOUS_SCHEDULES
from lightning_topt.weight_prediction import make_prediction
from tests.frontier.brute_force import brute_force_stages, stage_costs
from tests.plan.simulated_stages import step_of_plan
from tests.plan.test_pipelines import NODES, make_request

NAMES = {lag: name for name, lag in CONTINUOUS_SCHEDULES.items()}
FAST, SLOW = Link(1e-6, 1e11), Link(1e-5, 1e8)


@pytest.fixture(scope="module")
def small() -> SearchRequest:
    """Six blocks, of which no two ends are alike."""
    return make_request(layers=6)


def on(request: SearchRequest, link: Link) -> StageBlocks:
    return stage_blocks(replace(request, cluster=replace(NODES, inter=link)))


def shape_of(ranks: int, lag: int = 1, rule: str = "none") -> ContinuousShape:
    return ContinuousShape.of(
        ranks, 8 // ranks, samples=4.0, schedule=NAMES[lag], prediction=make_prediction(rule)
    )


def stale(rule: str = "none") -> StaleWeights:
    return StaleWeights(lambda flight: make_prediction(rule))


@pytest.mark.parametrize(
    ("ranks", "lag", "rule"),
    [(2, 1, "none"), (2, 2, "stash"), (4, 1, "spectrain"), (4, 2, "stash")],
)
def test_cuts_are_those_of_brute_force(
    small: SearchRequest, ranks: int, lag: int, rule: str
) -> None:
    for link in (FAST, SLOW):
        table = continuous_table(on(small, link), shape_of(ranks, lag, rule))
        found = [(point.step_seconds, point.peak_bytes) for point in search_stages(table).points]
        np.testing.assert_allclose(found, brute_force_stages(table), rtol=1e-9)
        assert len(found) > 1


def every_cut(blocks: StageBlocks, ranks: int) -> list[StagePoint]:
    count = len(blocks.names)
    return [
        StagePoint(0.0, 0.0, (*inner, count), (0,) * count)
        for inner in itertools.combinations(range(1, count), ranks - 1)
    ]


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("lag", [1, 2])
def test_the_fastest_plan_is_that_of_all_cuts_by_their_true_pace(
    small: SearchRequest, ranks: int, lag: int
) -> None:
    """Behind slow links the formula that finds cuts is an estimate, by which little is lost."""
    for link, share in ((FAST, 1.0), (SLOW, 1.1)):
        blocks, shape = on(small, link), shape_of(ranks, lag)
        paces = step_seconds_of(stage_seconds(blocks, shape, every_cut(blocks, ranks)), shape)
        assert paces is not None
        wanted = PipelineRequest(ranks=ranks, schedule=NAMES[lag])
        found, error = search_continuous(
            blocks, 8, wanted, stale(), (), global_batch_size=4 * shape.data
        )
        assert error == 0
        fastest = min(point.step_seconds for point in found)
        assert fastest == pytest.approx(paces.min(), rel=1e-6 if share == 1 else share - 1)


def test_a_stage_keeps_copies_and_its_minibatches_in_flight(small: SearchRequest) -> None:
    """Two stages, two minibatches behind: under stashing stage 0 keeps two older versions."""
    blocks, shape = on(small, FAST), shape_of(2, 2, "stash")
    cut = (3, 6), (0,) * 6
    table = continuous_table(blocks, shape)
    passes, once = blocks.passes(4.0), blocks.once(shape.rows, 0)
    copies = 2 * sum(
        parameter_bytes(p) for p in small.graph.parameters if blocks.uses[p.name][0] < 3
    )
    assert shape.copied_bytes(blocks, stage=0, first=0, end=3) == copies
    assert shape.copied_bytes(blocks, stage=1, first=3, end=6) == 0
    kept = passes.kept[:3].sum()
    first = (
        once.static[:3].sum()
        + max(3 * kept + passes.hump[:3].max(), 2 * kept + once.update[:3].sum())
        + copies
    )
    last = once.static[3:].sum() + passes.kept[3:].sum() + 4 * 128 * 256 * 4 + passes.hump[3:].max()
    last = max(last, once.static[3:].sum() + once.update[3:].sum())
    assert stage_costs(table, *cut)[1] - table.fixed_bytes == pytest.approx(
        max(first, last), rel=1e-6
    )


def test_rows_compress_their_gradients_where_that_is_allowed(small: SearchRequest) -> None:
    """Every shape, order of the axes and exchange is looked at, and the best of all is found."""
    blocks, method = on(small, SLOW), TopK(density=0.01)
    wanted = PipelineRequest(ranks=2, schedule="continuous")
    dense, *sent = continuous_shapes(blocks, 8, 32, wanted, stale(), exchanges=[method])
    assert (dense.exchange, dense.rows_apart) == (None, False)
    # nodes may sum first where a stage has several ranks on one
    assert {(each.rows_apart, each.exchange) for each in sent} == {
        (False, replace(method, hierarchical=False)),
        (False, replace(method, hierarchical=True)),
        (True, replace(method, hierarchical=False)),
    }
    paces = {
        shape: step_seconds_of(stage_seconds(blocks, shape, every_cut(blocks, 2)), shape)
        for shape in (dense, *sent)
    }
    least = {shape: found.min() for shape, found in paces.items() if found is not None}
    quickest = min(least, key=least.__getitem__)
    assert quickest.exchange is not None and least[quickest] < 0.8 * least[dense]
    found, _ = search_continuous(
        blocks, 8, wanted, stale(), (), global_batch_size=32, exchanges=[method]
    )
    best = min(found, key=lambda point: point.step_seconds)
    assert best.step_seconds == pytest.approx(least[quickest], rel=0.1)
    assert best.plan.gradient_exchange is not None
    assert shape_of_plan(best.plan).exchange == best.plan.gradient_exchange


def test_stale_weights_are_chosen_where_they_are_allowed_and_gain_more_than_the_error(
    small: SearchRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    # layers that take longer than the Python around them, as those of real models
    monkeypatch.setattr(stage_tables, "STALE_PASS_SECONDS", stage_tables.PASS_SECONDS)
    few = replace(
        small,
        cluster=replace(NODES, inter=Link(1e-6, 1e9)),
        global_batch_size=8,
        device_counts=(4,),
    )
    waits, never = search_plans(few), search_plans(replace(few, stale=stale("multistep")))
    assert all(point.plan.schedule not in CONTINUOUS_SCHEDULES for point in waits.candidates)
    chosen = choose(never.candidates)
    plan = chosen.plan
    assert plan.schedule in CONTINUOUS_SCHEDULES and plan.prediction == make_prediction("multistep")
    assert chosen.step_seconds < 0.85 * min(point.step_seconds for point in waits.points)
    assert "stages compute with weights that miss some updates, which was allowed" in plan.reason
    assert ParallelPlan.from_yaml(plan.to_yaml()) == plan
    hops = search_plans(replace(few, stale=stale("multistep")))
    # which misses fewer updates than the other one, that is hardly faster
    assert plan.schedule == "continuous"
    assert (
        min(hops.points, key=lambda point: point.step_seconds).plan.schedule
        == "continuous_overlapped"
    )
    # As fast without: the plan whose weights are those of its step.
    quick = replace(few, cluster=replace(NODES, inter=FAST), global_batch_size=512)
    assert (
        choose(search_plans(replace(quick, stale=stale("multistep"))).candidates).plan.schedule
        not in CONTINUOUS_SCHEDULES
    )


def test_what_is_asked_for_by_name_is_found_or_an_error(small: SearchRequest) -> None:
    wanted = PipelineRequest(schedule="continuous", stages=4)
    request = replace(small, pipelines=wanted, stale=stale("stash"))
    assert {p.plan.schedule for p in search_plans(request).points} == {"continuous"}
    with pytest.raises(
        PlanError, match="no pipeline of 8 ranks has 5 stages, schedule 'continuous': the model has"
    ):
        search_plans(replace(request, pipelines=replace(wanted, stages=5)))
    with pytest.raises(PlanError, match="leave out microbatches"):
        search_plans(replace(request, pipelines=replace(wanted, microbatches=4)))


def test_a_found_plan_is_drawn_and_explained_with_its_staleness(small: SearchRequest) -> None:
    wanted = PipelineRequest(schedule="continuous", ranks=4)
    request = replace(
        small, cluster=replace(NODES, inter=FAST), pipelines=wanted, stale=stale("stash")
    )
    blocks, points = stage_blocks(request), search_plans(request).points
    assert points
    for point in points:
        stages = explain_stages(request, point.plan)
        assert [stage.missing_updates for stage in stages] == [3, 2, 1, 0]
        longest = max(
            sum(stage.seconds[kind] for kind in ("forward", "backward", "once")) for stage in stages
        )
        assert longest < point.step_seconds < 1.3 * longest
        sizes = [
            parts["static"] + max(parts["activations"] + parts["running"], parts["update"])
            for parts in (stage.peak_parts for stage in stages)
        ]
        graph = request.graph
        fixed = graph.buffer_bytes + graph.input_bytes.at(point.plan.batch_size or 0)
        assert max(sizes) + fixed == pytest.approx(point.peak_bytes, rel=1e-5)
        step = step_of_plan(blocks, point.plan)
        assert step.schedule.name == "continuous"
        assert max(peak_bytes(step)) == pytest.approx(point.peak_bytes, rel=0.05)
        count = step.schedule.num_microbatches
        assert point.step_seconds * count < step.step_seconds < point.step_seconds * (count + 12)

"""The drawn step of a plan that the search found is the one that it was priced by."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from lightning_topt.costs.cluster import Link
from lightning_topt.plan.pipeline_search import PipelineRequest
from lightning_topt.plan.plan_search import search_plans, stage_blocks
from lightning_topt.plan.staged_plans import shape_of_plan, stage_seconds
from lightning_topt.plan.staged_step import costs_of_stages, cut_of_plan, step_of_plan
from tests.plan.test_pipelines import NODES, make_request


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "interleaved", "zero_bubble", "zbv"])
def test_a_found_plan_has_the_step_that_it_was_priced_by(schedule: str) -> None:
    request = make_request(layers=8, tied=True)
    cluster = replace(NODES, inter=Link(1e-6, 1e11))
    request = replace(request, cluster=cluster, pipelines=PipelineRequest(schedule=schedule, microbatches=8))
    blocks, points = stage_blocks(request), search_plans(request).points
    assert points
    for point in points:
        step, shape = step_of_plan(blocks, point.plan), shape_of_plan(point.plan)
        assert step is not None and step.schedule.name == schedule
        once = np.zeros(shape.pipeline)
        np.add.at(once, list(shape.ranks), stage_seconds(blocks, shape, [cut_of_plan(blocks, point.plan)]).once[:, 0])
        last = [max(span.end for span in step.spans if span.rank == rank) for rank in range(shape.pipeline)]
        assert max(np.array(last) + once) == pytest.approx(point.step_seconds)
        assert 0.5 * point.peak_bytes < max(step.peak_bytes) < 1.1 * point.peak_bytes, shape


def test_a_rank_of_1f1b_holds_what_the_search_counts() -> None:
    request = replace(make_request(), pipelines=PipelineRequest(stages=4, schedule="1f1b", microbatches=8))
    blocks = stage_blocks(request)
    for point in search_plans(request).points:
        step = step_of_plan(blocks, point.plan)
        assert step is not None
        assert max(step.peak_bytes) == pytest.approx(point.peak_bytes, rel=0.05)
        costs = costs_of_stages(blocks, shape_of_plan(point.plan), cut_of_plan(blocks, point.plan))
        assert costs.static_bytes is not None and sum(costs.static_bytes) > 0

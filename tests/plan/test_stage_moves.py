"""Stages of ranks that run several: cuts that the simulation finds better than the formula's."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest

from lightning_topt.costs.cluster import Link
from lightning_topt.frontier.stage_search import StagePoint, search_stages
from lightning_topt.plan.search_request import stage_blocks
from lightning_topt.plan.stage_blocks import StageBlocks
from lightning_topt.plan.stage_moves import with_moves
from lightning_topt.plan.stage_tables import PipelineShape, stage_table
from lightning_topt.plan.stage_times import stage_seconds, step_seconds_of
from tests.plan.test_pipelines import NODES, make_request

LAYERS, CHAINS = 8, 15


def random_blocks(of: StageBlocks, rng: np.random.Generator) -> StageBlocks:
    """The same chain, whose blocks take random times."""
    blocks, passes = StageBlocks(of.step), of.passes(2.0)
    forward = 0.01 * rng.lognormal(0, 0.7, LAYERS)
    blocks._passes[2.0] = replace(passes, forward=forward, backward=2 * forward, weights=forward)
    blocks.__dict__["kinds"] = tuple(range(LAYERS))
    return blocks


def every_cut(shape: PipelineShape) -> list[StagePoint]:
    cuts = itertools.combinations(range(1, LAYERS), shape.num_stages - 1)
    nothing = (0,) * shape.num_stages, (0,) * LAYERS
    return [StagePoint(0.0, 0.0, (*cut, LAYERS), *nothing) for cut in cuts]


@pytest.mark.parametrize("name", ["interleaved", "zbv", "interleaved_zero_bubble"])
def test_moves_come_near_the_fastest_of_all_cuts(name: str) -> None:
    request = replace(make_request(layers=LAYERS), cluster=replace(NODES, inter=Link(1e-6, 1e11)))
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


def test_ranks_of_one_stage_stay_as_they_are() -> None:
    blocks, shape = (
        stage_blocks(make_request(layers=LAYERS)),
        PipelineShape(2, 4, "1f1b", 1, 8, 2.0),
    )
    points = search_stages(stage_table(blocks, shape)).points
    assert with_moves(blocks, shape, points) == [*points]

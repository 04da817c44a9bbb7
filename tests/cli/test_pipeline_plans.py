"""The option ``pipeline`` of `topt plan`."""

from __future__ import annotations

from typing import Any

import pytest
from omegaconf import OmegaConf

from lightning_topt.cli.searched_meshes import read_pipelines
from lightning_topt.plan.pipeline_search import PipelineRequest


def read(pipeline: Any, mesh: Any = None) -> PipelineRequest | None:
    return read_pipelines(OmegaConf.create({"pipeline": pipeline, "mesh": mesh}))


def test_pipelines_are_searched_where_asked_for_and_keep_what_is_given() -> None:
    assert read(False) is None and read(None) is None and read(False, mesh={"data": 2}) is None
    assert read(True) == PipelineRequest() and not PipelineRequest().is_given
    given = read({"stages": 4, "schedule": "zbv", "microbatches": 8})
    assert given == PipelineRequest(stages=4, schedule="zbv", microbatches=8) and given.is_given


@pytest.mark.parametrize(
    ("pipeline", "mesh", "says"),
    [
        (True, {"data": 2}, "leave out mesh"),
        ("yes", None, "pipeline is true, false, or some of stages, schedule, microbatches"),
        ({"stage": 4}, None, "some of stages, schedule, microbatches"),
        ({}, None, "some of stages"),
        ({"schedule": "fast"}, None, "pipeline.schedule is one of gpipe, 1f1b"),
        ({"stages": 0}, None, "pipeline.stages"),
        ({"microbatches": "8"}, None, "pipeline.microbatches"),
    ],
)
def test_what_it_cannot_mean_is_refused(pipeline: Any, mesh: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        read(pipeline, mesh)

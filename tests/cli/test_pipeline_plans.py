"""Plans with stages from `topt plan`: the option, meshes with such an axis, the table of stages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from lightning_topt.cli.plan_steps import SearchedPipelines
from lightning_topt.plan.parallel_plan import ParallelPlan, PlanError
from lightning_topt.plugins.plan_options import PipelinePlan, read_mesh, read_plan_option
from lightning_topt.weight_prediction import make_prediction
from tests.cli.test_main import TINY
from tests.forked_command import finished
from tests.forked_command import forked_topt as topt

CLUSTER = ["cluster=local_cpu", "data.batch_size=4"]


def read(pipeline: Any, mesh: Any = None) -> SearchedPipelines:
    given = None if mesh is None else read_mesh(mesh)
    on = given if isinstance(given, PipelinePlan) else None
    return SearchedPipelines.read(
        OmegaConf.create({"pipeline": pipeline}), on=on, has_mesh=mesh is not None
    )


@pytest.mark.parametrize(
    ("pipeline", "mesh", "says"),
    [
        (True, {"data": 2}, "the mesh has no pipeline axis"),
        (False, {"pipeline": 2}, "leave out one of them"),
        ({"stage": 4}, None, "some of stages, schedule, microbatches"),
        ({"schedule": "fast"}, None, "pipeline.schedule is one of gpipe, 1f1b"),
        ({"stages": 0}, None, "pipeline.stages"),
    ],
)
def test_what_it_cannot_mean_is_refused(pipeline: Any, mesh: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        read(pipeline, mesh)


@pytest.mark.parametrize(
    ("plan", "says"),
    [
        ({"mesh": {"data": 2, "pipeline": 2}}, "'pipeline', which is the first"),
        (
            {"mesh": {"pipeline": 2}, "microbatches": 4},
            "schedule, num_microbatches, gradient_exchange; got microbatches",
        ),
        ({"mesh": {"pipeline": 2}, "stages": [{"blocks": []}]}, "belong to a whole plan"),
    ],
)
def test_wrong_parts_are_named(plan: dict[str, Any], says: str) -> None:
    with pytest.raises(PlanError, match=says):
        read_plan_option(plan)


def test_a_plan_with_stages_is_written_and_its_stages_shown(tmp_path: Path) -> None:
    path = tmp_path / "plan" / "plan.yaml"
    given = ["mesh={pipeline:2}", "pipeline={schedule:gpipe}", f"hydra.run.dir={path.parent}"]
    output = finished(topt("plan", *TINY, *CLUSTER, *given, folder=tmp_path))
    plan = ParallelPlan.load(path)
    assert plan.mesh.pipeline_size == 2 and plan.schedule == "gpipe" and plan.batch_size == 4
    assert plan.num_microbatches in (2, 4)
    words = " ".join(output.split())
    assert "with batches of 4 in the loader a step has 4" in words
    assert "each stage, all microbatches of a step; update: with exchanges between" in words


def test_a_plan_that_never_flushes_is_found_where_it_is_allowed_and_says_what_it_misses(
    tmp_path: Path,
) -> None:
    path = tmp_path / "plan" / "plan.yaml"
    given = ["mesh={pipeline:2}", "pipeline={schedule:continuous}", f"hydra.run.dir={path.parent}"]
    refused = topt("plan", *TINY, *CLUSTER, *given, folder=tmp_path)
    said = " ".join(refused.output.split())
    assert refused.status == 2 and "add strategy.allow=staleness" in said
    allowed = "strategy.allow={staleness: spectrain}"
    output = finished(topt("plan", *TINY, *CLUSTER, *given, allowed, folder=tmp_path))
    plan = ParallelPlan.load(path)
    assert plan.schedule == "continuous" and plan.prediction == make_prediction("spectrain")
    assert plan.num_microbatches == 1 and plan.mesh.pipeline_size == 2
    words = " ".join(output.split())
    assert "misses: updates that forward passes are too early for" in words

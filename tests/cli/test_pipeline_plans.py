"""Plans with stages from `topt plan`: the option ``pipeline``, meshes with a pipeline axis, and the
drawn step.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from omegaconf import OmegaConf

from lightning_topt.cli.example_step import ExampleStep
from lightning_topt.cli.search_space import SearchedPipelines
from lightning_topt.costs.cluster import Cluster, Device, Link
from lightning_topt.costs.optimizer import read_optimizer
from lightning_topt.graph.capture import capture
from lightning_topt.plan.parallel_plan import ParallelPlan, PlanError
from lightning_topt.plan.pipeline_search import PipelineRequest
from lightning_topt.plan.plan_search import SearchRequest
from lightning_topt.plugins.auto_parallel import AutoParallelStrategy
from lightning_topt.plugins.plan_options import PipelinePlan, read_mesh, read_plan_option
from lightning_topt.plugins.traced_planning import pipelines_on
from lightning_topt.prediction import make_prediction
from tests.cli.test_main import TINY
from tests.forked_command import finished
from tests.forked_command import forked_topt as topt
from tests.models import GPT

CPU = Cluster(
    "toy", Device("core", 2**33, {"float32": 3e9}, 8e9, 3e-6), 2, 1, Link(1e-5, 1e9), backend="gloo"
)
CLUSTER = ["cluster=local_cpu", "data.batch_size=4"]


def read(pipeline: Any, mesh: Any = None) -> SearchedPipelines:
    given = None if mesh is None else read_mesh(mesh)
    on = given if isinstance(given, PipelinePlan) else None
    return SearchedPipelines.read(
        OmegaConf.create({"pipeline": pipeline}), on=on, has_mesh=mesh is not None
    )


def test_pipelines_are_searched_unless_excluded_and_keep_what_is_given() -> None:
    assert read(None) == SearchedPipelines(PipelineRequest()) and not PipelineRequest().is_given
    assert read(True) == SearchedPipelines(PipelineRequest(), insists=True)
    assert read(False).wanted is None and read(None, {"data": 2}).wanted is None
    given = read({"stages": 4, "schedule": "zbv", "microbatches": 8})
    assert given == SearchedPipelines(PipelineRequest(4, "zbv", 8), insists=True)
    assert read(None, {"pipeline": 4, "data": 2}) == SearchedPipelines(
        PipelineRequest(ranks=4, tensor=1), insists=True
    )
    assert read({"schedule": "gpipe"}, {"pipeline": 4}).wanted == PipelineRequest(
        None, "gpipe", ranks=4, tensor=1
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


def test_a_mesh_with_a_pipeline_axis_may_keep_parts_of_the_plan() -> None:
    sizes = (("pipeline", 2), ("data", 2))
    assert read_plan_option({"mesh": dict(sizes)}) == PipelinePlan(schedule=None, sizes=sizes)
    given = {"mesh": dict(sizes), "stages": 4, "schedule": "interleaved", "num_microbatches": 8}
    assert read_plan_option(given) == PipelinePlan(4, "interleaved", 8, sizes=sizes)
    plan = PipelinePlan(schedule=None, sizes=sizes)
    wanted = pipelines_on(plan.mesh(4, num_nodes=1), plan, microbatches=None)
    assert wanted == PipelineRequest(ranks=2, tensor=1)


@pytest.mark.parametrize(
    ("plan", "says"),
    [
        ({"mesh": {"data": 2, "pipeline": 2}}, "'pipeline', which is the first"),
        (
            {"mesh": {"data": 4}, "schedule": "1f1b"},
            "one with an axis 'pipeline' takes stages, schedule, num_microbatches",
        ),
        (
            {"mesh": {"pipeline": 2}, "microbatches": 4},
            "schedule, num_microbatches, gradient_exchange; got microbatches",
        ),
        ({"mesh": {"pipeline": 2}, "stages": 3}, "so stages is a multiple of 2; got 3"),
        (
            {"mesh": {"pipeline": 2}, "stages": 4, "schedule": "1f1b"},
            "runs 1 stage on each rank, got 2",
        ),
        ({"mesh": {"pipeline": 2}, "stages": [{"blocks": []}]}, "belong to a whole plan"),
    ],
)
def test_wrong_parts_are_named(plan: dict[str, Any], says: str) -> None:
    with pytest.raises(PlanError, match=says):
        read_plan_option(plan)


def test_a_plan_with_stages_is_written_and_its_step_drawn(tmp_path: Path) -> None:
    path = tmp_path / "plan" / "plan.yaml"
    given = ["mesh={pipeline:2}", "pipeline={schedule:gpipe}", f"hydra.run.dir={path.parent}"]
    output = finished(topt("plan", *TINY, *CLUSTER, *given, folder=tmp_path))
    plan = ParallelPlan.load(path)
    assert plan.mesh.pipeline_size == 2 and plan.schedule == "gpipe" and plan.batch_size == 4
    assert plan.num_microbatches in (2, 4)
    words = " ".join(output.split())
    assert (
        "Schedule gpipe: 2 stages on 2 ranks" in words
        and "with batches of 4 in the loader a step has 4" in words
    )
    assert "each stage, all microbatches of a step; update: with exchanges between" in words
    assert "Schedule of the chosen plan" in (path.parent / "frontier.html").read_text()


def test_a_plan_that_never_flushes_is_found_where_it_is_allowed_and_drawn_with_what_it_misses(
    tmp_path: Path,
) -> None:
    path = tmp_path / "plan" / "plan.yaml"
    given = ["mesh={pipeline:2}", "pipeline={schedule:continuous}", f"hydra.run.dir={path.parent}"]
    refused = topt("plan", *TINY, *CLUSTER, *given, folder=tmp_path)
    said = " ".join(refused.output.split())
    assert refused.status == 2 and "add strategy.allow_staleness=true" in said
    output = finished(
        topt("plan", *TINY, *CLUSTER, *given, "strategy.allow_staleness=spectrain", folder=tmp_path)
    )
    plan = ParallelPlan.load(path)
    assert plan.schedule == "continuous" and plan.prediction == make_prediction("spectrain")
    assert plan.num_microbatches == 1 and plan.mesh.pipeline_size == 2
    words = " ".join(output.split())
    assert (
        "Schedule continuous: 2 stages on 2 ranks" in words
        and "misses: updates that forward passes are too early for" in words
    )


class Counting(GPT):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) * (1.0 if self.global_step else 2.0)


def test_why_fits_without_a_plan_have_no_stages_is_said() -> None:
    def notes(
        module: GPT, batch: Any, wanted: SearchedPipelines, unstaged: str | None = None
    ) -> list[str]:
        trainer = pl.Trainer(accelerator="cpu", devices=1, logger=False, enable_checkpointing=False)
        trainer.strategy.connect(module)
        graph = capture(module, batch[:2], batch_scaling=False)
        optimizer = read_optimizer(
            [module.configure_optimizers()], named_parameters=module.named_parameters()
        )
        search = SearchRequest(graph, CPU, optimizer, (2,), 8, pipelines=wanted.wanted)
        reads = frozenset(["global_step"] if isinstance(module, Counting) else [])
        example = ExampleStep(graph, 4, batch=batch, reads=reads)
        return wanted.notes(
            search, example, AutoParallelStrategy().request, trainer, unstaged=unstaged
        )

    tokens, default = (
        (torch.zeros(4, 16, dtype=torch.long),) * 2,
        SearchedPipelines(PipelineRequest()),
    )
    assert (
        notes(GPT(heads=2), tokens, default)
        == notes(GPT(heads=2).to("meta"), tokens, default)
        == []
    )
    assert notes(GPT(heads=2), tokens, default, "it is so") == [
        "Plans with stages were not searched: it is so."
    ]
    (of_batch,) = notes(GPT(heads=2), (*tokens, "a text"), default)
    assert (
        "each rank has its own batches, leaves plans with stages out: batches hold texts"
        in of_batch
    )
    (of_step,) = notes(Counting(heads=2), tokens, default)
    assert of_step.endswith(
        "training_step reads global_step, on which the modules that it calls may depend."
    )
    assert notes(Counting(heads=2), tokens, SearchedPipelines(None)) == []
    assert (
        notes(Counting(heads=2), tokens, SearchedPipelines(PipelineRequest(2), insists=True)) == []
    )

"""`topt plan` searches plans with stages beside the others, or those that are asked for; the chosen
one's step is drawn.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import lightning.pytorch as pl
import torch
from omegaconf import DictConfig, OmegaConf

from lightning_topt.basics.argument_checks import check_choice, check_whole
from lightning_topt.cli.example_step import ExampleStep
from lightning_topt.plan.parallel_plan import ParallelPlan, PlanError
from lightning_topt.plan.pipeline_search import PipelineRequest, StaleWeights
from lightning_topt.plan.plan_search import SearchRequest, stage_blocks
from lightning_topt.plan.stage_simulation import step_of_plan
from lightning_topt.plugins.given_plans import PipelinePlan
from lightning_topt.plugins.own_batches import why_no_pipeline
from lightning_topt.plugins.pipeline_look import why_left_out
from lightning_topt.plugins.plan_request import PlanRequest
from lightning_topt.plugins.planning import make_fake_optimizers
from lightning_topt.plugins.searched_plan import needs_whole_parameters
from lightning_topt.schedules.schedules import CONTINUOUS_SCHEDULES, SCHEDULES
from lightning_topt.schedules.simulate import Simulation

_GIVEN = ("stages", "schedule", "microbatches")


@dataclass(frozen=True)
class SearchedPipelines:
    """The plans with stages to look at (None: none); with `insists` an error is better than none of
    them.
    """

    wanted: PipelineRequest | None = None
    insists: bool = False

    @classmethod
    def read(
        cls, config: DictConfig, *, on: PipelinePlan | None, has_mesh: bool
    ) -> SearchedPipelines:
        """Read the option ``pipeline``; `on` is a given mesh that has a pipeline axis, `has_mesh`
        whether any was given.

        Raises ValueError where it says something else, or contradicts the mesh.
        """
        given = (
            OmegaConf.to_container(config.pipeline)
            if OmegaConf.is_config(config.pipeline)
            else config.pipeline
        )
        if on is None and has_mesh and given not in (None, False):
            raise ValueError(
                "pipeline= asks for stages, but the mesh has no pipeline axis, such as "
                "{pipeline:4,data:2}"
            )
        if given is False and on is not None:
            raise ValueError(
                "pipeline=false, but the mesh has a pipeline axis; leave out one of them"
            )
        if given is False or (has_mesh and on is None):
            return cls(None)
        known = PipelineRequest()
        if on is not None:
            sizes = dict(on.sizes or ())
            given_parts = on.stages, on.schedule, on.microbatches, sizes["pipeline"]
            known = PipelineRequest(*given_parts, tensor=sizes.get("tensor", 1))
        if given is None or given is True:
            return cls(known, insists=bool(given) or known.is_given)
        return cls(replace(known, **_read_given(given)), insists=True)

    def why_not(
        self, example: ExampleStep, request: PlanRequest, trainer: pl.Trainer
    ) -> str | None:
        """Return why this step cannot be run in stages, though that should be searched, or None.
        Raises PlanError where the user insists.
        """
        if self.wanted is None:
            return None
        reason = why_no_pipeline(trainer) or needs_whole_parameters(
            request, trainer, would_shard=lambda _: False
        )
        if reason is None and example.reads_values and not self.insists:
            reason = (
                "the step reads values of tensors, which stages can do after the last block alone "
                "(pipeline=true insists)"
            )
        if reason is not None and self.insists:
            raise PlanError(
                f"a pipeline runs the step in stages, but {reason}; leave out pipeline, or set it "
                "to false"
            )
        return reason

    def notes(
        self,
        search: SearchRequest,
        example: ExampleStep,
        request: PlanRequest,
        trainer: pl.Trainer,
        *,
        unstaged: str | None,
    ) -> list[str]:
        """Return what is worth saying about plans with stages that are left out: `unstaged` says
        why none was searched.
        """
        if unstaged is not None:
            return [f"Plans with stages were not searched: {unstaged}."]
        if search.pipelines is None or self.insists:
            return []
        module = trainer.lightning_module

        def has_values(
            name: str,
        ) -> bool:  # those of a model that is built to be planned have none, and get them in a fit
            return not module.get_parameter(name).is_meta

        why = why_left_out(request, trainer, example.batch, search, would_shard=has_values)
        if why is None:
            return []
        return [
            'strategy="topt" without a given plan, where each rank has its own batches, leaves '
            f"plans with stages out: {why}."
        ]


def stale_weights(
    pipelines: SearchedPipelines, request: PlanRequest, module: pl.LightningModule
) -> StaleWeights | None:
    """Return what may be chosen of pipelines that never flush, None for none. Raises ValueError
    where that is asked for and not allowed, or allowed and not searched.
    """
    wanted = pipelines.wanted
    if not request.stale.allowed:
        if wanted is not None and wanted.schedule in CONTINUOUS_SCHEDULES:
            raise ValueError(
                f"the schedule {wanted.schedule!r} changes the training: stages compute with "
                "weights that miss updates. To search it, add strategy.allow_staleness=true, or "
                "the rule that predicts them, such as spectrain"
            )
        return None
    if (
        wanted is None
        or wanted.schedule not in (None, *CONTINUOUS_SCHEDULES)
        or not wanted.takes(1)
    ):
        raise ValueError(
            "strategy.allow_staleness is for pipelines that never flush, which are not searched "
            "here: leave it out"
        )
    optimizers, _ = make_fake_optimizers(module, device=torch.device("cpu"))
    if len(optimizers) != 1:
        raise PlanError(
            "a pipeline that never flushes updates with one optimizer, and the module has "
            f"{len(optimizers)}"
        )
    return request.stale.weights(optimizers[0])


def _read_given(given: Any) -> dict[str, Any]:
    if not isinstance(given, Mapping) or not given or set(given) - set(_GIVEN):
        raise ValueError(f"pipeline is true, false, or some of {', '.join(_GIVEN)}; got {given!r}")
    if given.get("schedule") is not None:
        check_choice(
            given["schedule"], name="pipeline.schedule", allowed=(*SCHEDULES, *CONTINUOUS_SCHEDULES)
        )
    for key, value in given.items():
        if key != "schedule" and value is not None:
            check_whole(value, name=f"pipeline.{key}")
    return {str(key): value for key, value in given.items() if value is not None}


def drawn_step(search: SearchRequest, plan: ParallelPlan) -> Simulation | None:
    """Return the step of a plan that `search` found; None for one without stages, or of too many
    passes to draw.
    """
    return None if plan.schedule is None else step_of_plan(stage_blocks(search, plan), plan)

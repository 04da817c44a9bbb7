"""`topt plan`: find the frontier of step time and peak memory, and the plan that fits best.

Nothing is trained. The frontier and the plan go to Hydra's run folder, and are printed. Choices of
machines, numbers of devices, batches or lengths, and limits of a run, are for `what_if`.

What `run` calls, and what comes out:

    PlanSetup.of            model without memory, data, strategy and trainer    plan_steps
    SearchedMeshes.read     meshes and pipelines to search                      plan_steps
    PlanSetup.capture       `ExampleStep`: a batch and the graph of its step    plan_steps
    UnpricedSearch.of       a `SearchRequest` that lacks costs                  plan_steps
    PlanSetup.with_costs    the `SearchRequest`; measures a cluster not given   plan_steps
    search_for              `PlanFrontier`: the best plans, seconds and bytes   searched_plan
    frontier_of_steps       the same of steps, with intervals                   searched_plan
    choose_for              the `PlanPoint` that meets the request              searched_plan
    report_plan             files and tables                                    plan_steps
"""

from __future__ import annotations

import dataclasses
import gc
from pathlib import Path

import lightning.pytorch as pl
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from lightning_topt.cli import what_if
from lightning_topt.cli.example_step import has_accelerators
from lightning_topt.cli.plan_steps import PlanSetup, SearchedMeshes, UnpricedSearch, report_plan
from lightning_topt.communication.started_ranks import leave_to_rank_0
from lightning_topt.costs.accuracy import sentence_of
from lightning_topt.graph.capture import no_collection
from lightning_topt.plan.choose import OBJECTIVES, TIME_TO_LOSS, check_objective
from lightning_topt.plan.plan_frontier import interval_sentences
from lightning_topt.plan.step_factors import left_out_sentence
from lightning_topt.plugins.searched_plan import Planning, choose_for, frontier_of_steps, search_for
from topt_console.status_line import STATUS

# Of more devices an exact search seldom ends within its budget: it is given up without a bound.
_EXACT_DEVICES = 64


# No collections but between searches: there are millions of objects, and most stay to the end.
@no_collection()
def run(config: DictConfig) -> None:
    """Plan what `config` describes; files go to Hydra's run folder.

    Raises:
        ValueError: the strategy is not one that plans; and what capturing and choosing raise.
    """
    STATUS.clear()
    pl.seed_everything(config.seed, workers=True)
    # read in any case: what one scenario does not need is refused all the same where it is wrong
    what_if.WhatIfOptions.read(config)
    (what_if.run if what_if.is_asked(config) else _plan_once)(config)
    # The process ends: nothing is gained by a look at millions of objects that nobody needs.
    if HydraConfig.get().mode is not RunMode.MULTIRUN:
        gc.freeze()


def _plan_once(config: DictConfig) -> None:
    # Plan for one scenario, whose batch the data have
    # what is asked
    setup = PlanSetup.of(config)
    request, trainer = setup.request, setup.trainer
    meshes = SearchedMeshes.read(config, request, trainer)
    meshes.check_devices(request.cluster, trainer)
    objective = config.objective or request.objective
    check_objective(objective, allowed=(*OBJECTIVES, TIME_TO_LOSS))
    if request.cluster is not None:  # else ranks of torchrun or srun measure it together
        leave_to_rank_0()
        print(meshes.words(request.cluster, trainer.precision))

    # the step, its costs, and the search
    STATUS.show(f"capturing the step of {type(setup.model).__name__}")
    example = setup.capture(splits=meshes.tensor, accelerator=has_accelerators(request.cluster))
    # data.batch_size is that of each rank: of those of the trainer, where several numbers are given
    ranks = trainer.world_size if len(meshes.device_counts) > 1 else meshes.device_counts[0]
    samples = meshes.global_batch_size(example.samples, world_size=ranks)
    unpriced = UnpricedSearch.of(
        setup,
        meshes,
        example,
        request,
        global_batch_size=samples,
        capture_seconds=example.capture_seconds,
        epsilon=what_if.EPSILON if max(meshes.device_counts) > _EXACT_DEVICES else 0.0,
    )
    STATUS.clear()  # ranks that measure say so by themselves
    request = dataclasses.replace(request, objective=objective)
    search = setup.with_costs(unpriced.request, request, example.batch)
    if search is None:  # another rank of torchrun or srun goes on
        return
    found = search_for(request, search, progress=STATUS.show)
    frontier = frontier_of_steps(request, found, search, trainer, progress=STATUS.show)
    folder = Path(HydraConfig.get().runtime.output_dir)
    frontier.save(folder / "frontier.json")  # worth having even when no plan fits

    # the choice and the report
    STATUS.show("writing the report")
    notes = meshes.notes(search, frontier, unpriced.unsplit)
    if unpriced.unstaged is not None:
        notes.append(f"Plans with stages were not searched: {unpriced.unstaged}.")
    notes.append(sentence_of(search.cluster.accuracy))
    chosen = choose_for(request, frontier, search, trainer)
    planning = Planning(frontier, chosen, example.graph)
    intervals = chosen.seconds_interval, chosen.bytes_interval
    notes += interval_sentences(intervals, search.cluster)
    if frontier.left_out:
        notes.append(left_out_sentence(frontier.left_out))
    report_plan(planning, search, request, folder=folder, notes=notes)

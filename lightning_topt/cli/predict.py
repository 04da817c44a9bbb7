"""`topt predict`: what a given plan would cost, without a search; how wrong predictions were.

plan=FILE or a name     `predict_plan`: one plan of a model, and what its time is made of
runs=FOLDER             `predict_runs`: recorded runs (`run.json`), predicted and measured
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from hydra.core.hydra_config import HydraConfig
from hydra.utils import instantiate
from omegaconf import DictConfig
from rich.console import Console

from lightning_topt.basics.units import format_bytes, format_seconds
from lightning_topt.cli.example_step import (
    ExampleStep,
    ModelSetup,
    has_accelerators,
    on_ranks,
    read_given_plan,
)
from lightning_topt.costs.accuracy import Accuracy, ErrorFigure, sentence_of
from lightning_topt.costs.cluster import Cluster
from lightning_topt.costs.optimizer import OptimizerProfile, read_optimizer
from lightning_topt.costs.plain_values import number, parse_json, read_text
from lightning_topt.plan.explanation import PricedPlan, price_plan
from lightning_topt.plan.frontier_report import print_stages, table
from lightning_topt.plan.parallel_plan import ParallelPlan
from lightning_topt.plan.plan_frontier import Intervals, KnownErrors, interval_sentences
from lightning_topt.plan.plan_search import SearchRequest
from lightning_topt.plugins.plan_options import read_cluster
from lightning_topt.plugins.searched_plan import make_fake_optimizers

MOST_RUNS = 10_000  # files that are read
_CAPTION = (
    "work of the rank that works longest; exchanges run beside other work, so shares may add up to "
    "more than 100 %"
)


def run(config: DictConfig) -> None:
    """Predict what `config` describes, and print it.

    Raises:
        ValueError: files that cannot be read, options that contradict one another, and plans that
            cannot be.
    """
    if (config.runs is None) == (config.plan is None):
        raise ValueError(
            "say what is to be predicted, one of the two: plan=FILE.yaml, or runs=FOLDER with "
            "run.json files"
        )
    # options that belong to the other kind of prediction are refused, not ignored
    of_plan, of_runs = ("out", "ranks"), ("save_cluster",)
    for name in of_plan if config.plan is None else of_runs:
        if config[name] not in (None, False):
            kind = "a plan" if name in of_plan else "runs"
            raise ValueError(f"{name} belongs to the prediction of {kind}: leave it out")
    cluster, console = _read_cluster(config), Console()
    if config.plan is None:
        save = None if config.save_cluster is None else Path(config.save_cluster)
        predict_runs(Path(config.runs), cluster, save=save, console=console)
    elif cluster is not None:
        predict_plan(config, cluster, console=console)
    else:
        raise ValueError(
            "say for which machines: cluster=NAME of the group (topt predict --help lists them), "
            "or cluster_file=FILE, such as topt calibrate writes"
        )


# the cluster of ``cluster`` or ``cluster_file``, if any
def _read_cluster(config: DictConfig) -> Cluster | None:
    # a list, of which Hydra keeps the last
    if not isinstance(HydraConfig.get().runtime.choices.get("cluster"), str):
        raise ValueError(
            "a prediction is for one cluster: give one name, and predict for each of them"
        )
    if config.cluster_file is None:
        return read_cluster(instantiate(config.cluster, _convert_="all"))
    if config.cluster is not None:
        raise ValueError("cluster and cluster_file are two clusters: leave out one of them")
    return read_cluster(str(config.cluster_file))


# ---- one plan of a model


def predict_plan(config: DictConfig, cluster: Cluster, *, console: Console) -> None:
    """Price the plan that `config` names as the search would, and print it.

    Raises:
        ValueError: options contradict one another.
        PlanError: the plan is not one of the model.
    """
    pl.seed_everything(config.seed, workers=True)
    given = read_given_plan(config)
    setup = ModelSetup.of(config)
    example = setup.capture(
        # a step that can be split, where the plan splits it
        splits=isinstance(given, ParallelPlan) and bool(given.mesh.tensor_axes),
        accelerator=has_accelerators(cluster),
    )
    optimizers, named = make_fake_optimizers(setup.model, device=torch.device("cpu"))
    profile = read_optimizer(optimizers, named_parameters=named)
    plan = on_ranks(given, example.graph, cluster, ranks=config.ranks)
    # a file says how many micro-batches a step has, and perhaps their size
    if not isinstance(given, ParallelPlan):
        plan = replace(plan, accumulate=config.trainer.get("accumulate_grad_batches") or 1)
    if plan.batch_size is None:
        plan = replace(plan, batch_size=example.samples)
    request = _request_of(plan, example, cluster, profile)
    priced = price_plan(request, plan)
    costs = priced.predicted.step_seconds, priced.predicted.peak_bytes
    sure = KnownErrors.of(cluster, example.graph).intervals(priced.plan, *costs)
    _print_priced(priced, cluster, sure, console=console)
    if config.out is not None:
        out = Path(config.out)
        out.parent.mkdir(parents=True, exist_ok=True)
        priced.plan.save(out)
        console.print(f"plan with its prediction: {out}", highlight=False, soft_wrap=True)


def _request_of(
    plan: ParallelPlan, example: ExampleStep, cluster: Cluster, profile: OptimizerProfile
) -> SearchRequest:
    # What a search that finds `plan`, which has a batch, would be asked
    assert plan.batch_size is not None
    # where ranks of a group bring their own batches, every rank has one
    batches = plan.mesh.size if plan.brings_batches else plan.data_parallel_size
    return SearchRequest(
        example.graph,
        cluster,
        profile,
        device_counts=(plan.mesh.size,),
        global_batch_size=plan.batch_size * batches,
        split=example.split,
        own_batches=plan.schedule is None and plan.num_microbatches > 1,
    )


def _print_priced(
    priced: PricedPlan, cluster: Cluster, sure: Intervals, *, console: Console
) -> None:
    # Print what a plan is predicted to cost, the kinds of work, and its blocks or stages
    predicted, plan = priced.predicted, priced.plan
    several = f"{plan.accumulate} micro-" if plan.accumulate > 1 else ""
    console.print(
        f"{plan.summary()}, {several}batches of {plan.batch_size} on {cluster.name}",
        highlight=False,
    )
    room = cluster.device.memory_bytes
    beyond = f", and a device has {format_bytes(room)}" if predicted.peak_bytes > room else ""
    console.print(
        f"step time {format_seconds(predicted.step_seconds)}, peak memory "
        f"{format_bytes(predicted.peak_bytes)} of each rank{beyond}",
        highlight=False,
    )
    for sentence in (sentence_of(cluster.accuracy), *interval_sentences(sure, cluster)):
        console.print(sentence, highlight=False)
    # kinds of work, the longest first
    made = table("of a step", "seconds", "share", caption=_CAPTION)
    for kind, seconds in sorted(priced.seconds.items(), key=lambda item: -item[1]):
        if seconds > 0:
            share = 100 * seconds / max(predicted.step_seconds, 1e-30)
            made.add_row(kind, format_seconds(seconds), f"{share:.1f} %")
    console.print(made)
    if priced.stages:
        print_stages(priced.stages, console=console)


# ---- recorded runs


@dataclass(frozen=True)
class RecordedRun:
    """One run, predicted and measured: seconds of a step, and bytes at its peak.

    `measured_bytes`: the peak of the fullest rank.
    """

    machine: str
    predicted: float
    measured: float
    predicted_bytes: float
    measured_bytes: float | None


def predict_runs(
    folder: Path, cluster: Cluster | None, *, save: Path | None, console: Console
) -> None:
    """Print for each machine how far predictions of recorded runs were from what was measured.

    Args:
        folder: the runs are below it.
        cluster: where some of them ran.
        save: a file for `cluster` with the errors of the runs on it.
        console: where to print.

    Raises:
        ValueError: there are no such runs, or none on the cluster that is to be saved.
    """
    by_machine: dict[str, list[RecordedRun]] = {}
    for run in read_runs(folder):
        by_machine.setdefault(run.machine, []).append(run)
    if not by_machine:
        raise ValueError(
            f"no run.json below {folder} has both a prediction and a measurement: topt train "
            "strategy=topt_full writes such files"
        )
    for machine, runs in by_machine.items():
        seconds, size_error = _errors(runs)
        lines = [machine, f"  Step times: {seconds}."]
        lines += [] if size_error is None else [f"  Peak memory: {size_error}."]
        for line in lines:
            console.print(line, highlight=False, markup=False)
    if save is not None:
        _save_errors(cluster, [run for runs in by_machine.values() for run in runs], save)
        console.print(f"cluster: {save}", highlight=False, soft_wrap=True)


def _save_errors(cluster: Cluster | None, runs: Sequence[RecordedRun], path: Path) -> None:
    # Write `cluster` with the errors of the `runs` on it
    if cluster is None:
        raise ValueError(
            "save_cluster is for a cluster with its errors: say which, cluster=NAME or "
            "cluster_file=FILE"
        )
    there = [run for run in runs if run.machine.startswith(f"{cluster.name} on ")]
    if not there:
        raise ValueError(
            f"no run is on {cluster.name!r}: runs are on "
            f"{', '.join(sorted({run.machine for run in runs}))}"
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    accuracy = Accuracy(*_errors(there), f"{len(there)} runs that were recorded")
    replace(cluster, accuracy=accuracy).save(path)


def read_runs(folder: Path) -> Iterator[RecordedRun]:
    """Yield the runs of the ``run.json`` files below `folder` that were predicted and measured.

    Other files are passed over.
    """
    for path in sorted(folder.rglob("run.json"))[:MOST_RUNS]:
        # a file that is no record of a run is not an error: folders have others too
        with contextlib.suppress(ValueError, OSError, KeyError, TypeError):
            if (run := _read_run(parse_json(read_text(path)))) is not None:
                yield run


def _read_run(record: Mapping[str, Any]) -> RecordedRun | None:
    # only runs of a plan that was predicted, and measured
    predicted, measured, plan = record["predicted"], record["measured"], record["plan"]
    if not predicted or not measured or not plan:
        return None
    step, size = (number(predicted[name], name=name) for name in ("step_seconds", "peak_bytes"))
    seconds = number(measured["median_step_seconds"], name="median_step_seconds")
    if not seconds or not step:
        return None
    # a rank without a measurement has 0 or nothing
    name = "peak_bytes_per_rank"
    peaks = [number(value, name=name) for value in measured[name] if value]
    ranks = f"{record['world_size']} {record['device']} rank(s)"
    machine = f"{plan['cluster'] or 'machines without a name'} on {ranks}"
    return RecordedRun(machine, step, seconds, size, max(peaks, default=None))


# of step times, and of peaks where some were measured
def _errors(runs: Sequence[RecordedRun]) -> tuple[ErrorFigure, ErrorFigure | None]:
    sizes = [(run.predicted_bytes, run.measured_bytes) for run in runs if run.measured_bytes]
    return (
        ErrorFigure.of([run.predicted for run in runs], [run.measured for run in runs]),
        ErrorFigure.of(*zip(*sizes, strict=True), above=True) if sizes else None,
    )

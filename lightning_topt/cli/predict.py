"""`topt predict`: what given plans would cost, without a search.

    plan=FILE or a name     `predict_plan`: one plan of a model, and what its time is made of
    runs=FOLDER             `predict_runs`: recorded runs (`run.json`), predicted and measured

Recorded runs also tell how wrong the constants of a cluster are:

    t = a compute + b exposed communication        a, b fitted to the runs (`least_factors`)

A cluster whose computing takes a times as long and whose links b times as long predicts these runs
better. Each run is predicted from the others to say by how much.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from hydra.core.hydra_config import HydraConfig
from hydra.utils import instantiate
from omegaconf import DictConfig
from rich.console import Console
from rich.table import Table

from lightning_topt.basics.argument_checks import check_flag, check_whole
from lightning_topt.basics.units import format_bytes, format_seconds
from lightning_topt.cli.example_step import (
    PREDICTED_AS,
    ExampleStep,
    NeedsValues,
    capture_example,
    has_accelerators,
    one_device_trainer,
    plain_value,
)
from lightning_topt.costs.chain_table import Array
from lightning_topt.costs.cluster import (
    Accuracy,
    Cluster,
    CollectiveCurve,
    ErrorFigure,
    Link,
    sentence_of,
)
from lightning_topt.costs.optimizer import OptimizerProfile, read_optimizer
from lightning_topt.costs.plain_values import number, parse_json, read_text, shown
from lightning_topt.graph.module_copy import build_on_meta
from lightning_topt.plan.explanation import PricedPlan, price_offloaded, price_plan
from lightning_topt.plan.parallel_plan import ParallelPlan
from lightning_topt.plan.plan_intervals import Intervals, KnownErrors, interval_sentences
from lightning_topt.plan.plan_report import print_explanation, print_stages
from lightning_topt.plan.plan_search import SearchRequest
from lightning_topt.plugins.plan_options import (
    MeshPlan,
    PipelinePlan,
    UniformPlan,
    read_cluster,
    read_plan_option,
)
from lightning_topt.plugins.planning import make_fake_optimizers

# of files that are read, rows of the table, runs to fit two factors to
MOST_RUNS, SHOWN, ENOUGH = 10_000, 20, 3
WIDTHS = 0.3, 0.5  # how far the factors stray, as logarithms

# of `least_factors`
EXPECTED_ERROR = 0.05  # s
HUBER = 1.5  # of s: larger residuals count by their size, not its square
_STEPS = 40  # of Gauss-Newton
_DIFFERENCE = 1e-4  # of a factor's logarithm
_FAR = 4.0  # no factor is above e^4

# configurations that are priced and that nothing here runs, by their options
_PREDICTED_ONLY = {
    "tensor_overlap": "exchanges of tensor axes beside products",
    "offload": "activations in the memory of the host",
}
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
    # a plan or runs, not both
    if (config.runs is None) == (config.plan is None):
        raise ValueError(
            "say what is to be predicted, one of the two: plan=FILE.yaml, or runs=FOLDER with "
            "run.json files"
        )
    # options that belong to another kind of prediction are refused, not ignored
    cluster, console = _read_cluster(config), Console()
    if config.plan is not None:
        _refuse(config, ("save_cluster",), why="of runs")
        if config.out is not None and (config.offload or config.tensor_overlap):
            raise ValueError(
                "out is a plan that runs, and no plan runs with offload or tensor_overlap: leave "
                "out one of them"
            )
        predict_plan(config, _known(cluster), console=console)
        return
    folder = _path(config.runs, "runs")
    if not folder.is_dir():
        raise ValueError(
            f"runs is a folder with run.json files: rows of a table are predicted by `python -m "
            f"benchmarks.prediction.rows {folder}`, in a checkout of lightning_topt"
        )
    _refuse(config, ("out", "ranks", "compiled", "tensor_overlap", "offload"), why="of a plan")
    save = None if config.save_cluster is None else _path(config.save_cluster, "save_cluster")
    predict_runs(folder, cluster, save=save, console=console)


def _read_cluster(config: DictConfig) -> Cluster | None:
    """Return the cluster of ``cluster`` or ``cluster_file``, if any."""
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


def _known(cluster: Cluster | None) -> Cluster:
    if cluster is None:
        raise ValueError(
            "say for which machines: cluster=NAME of the group (topt predict --help lists them), "
            "or cluster_file=FILE, such as topt calibrate writes"
        )
    return cluster


def _refuse(config: DictConfig, names: tuple[str, ...], *, why: str) -> None:
    """Raise ValueError where options are given that belong to another kind of prediction."""
    for name in names:
        if config[name] not in (None, False):
            raise ValueError(f"{name} belongs to the prediction {why}: leave it out")


def _path(value: object, name: str) -> Path:
    if not isinstance(value, str | Path):
        raise ValueError(f"{name} is the path of a file, got {shown(value)}")
    return Path(value)


# ---- one plan of a model


def predict_plan(config: DictConfig, cluster: Cluster, *, console: Console) -> None:
    """Price the plan that `config` names as the search would, and print it.

    Raises:
        ValueError: options contradict one another.
        PlanError: the plan is not one of the model.
    """
    pl.seed_everything(config.seed, workers=True)
    given = read_plan_option(plain_value(config.plan))
    if given is None or isinstance(given, MeshPlan | PipelinePlan):
        raise ValueError(
            "the splits of a mesh and the stages of a pipeline are found by a search: give a plan "
            "file, such as topt plan writes, or a name such as plan=zero3"
        )
    # the step is captured as one that can be split where the plan splits it
    splits = isinstance(given, ParallelPlan) and bool(given.mesh.tensor_axes)
    example, profile = _captured(config, splits=splits, accelerator=has_accelerators(cluster))
    parts = config.trainer.get("accumulate_grad_batches") or 1
    plan = _complete_plan(given, config.ranks, example, cluster, accumulate=parts)
    request = _request_of(plan, example, cluster, profile)
    priced = _priced(request, plan, **{name: _flag(config, name) for name in _PREDICTED_ONLY})
    costs = priced.predicted.step_seconds, priced.predicted.peak_bytes
    sure = KnownErrors.of(cluster, example.graph).intervals(priced.plan, *costs)
    _print_priced(priced, cluster, sure, console=console)
    console.print(PREDICTED_AS[example.graph.predicted_as], highlight=False)
    if only := [what for name, what in _PREDICTED_ONLY.items() if config[name]]:
        console.print(f"Predicted only, nothing here runs it: {', '.join(only)}.", highlight=False)
    if config.out is not None:
        out = Path(config.out)
        out.parent.mkdir(parents=True, exist_ok=True)
        priced.plan.save(out)
        console.print(f"plan with its prediction: {out}", highlight=False, soft_wrap=True)


def _flag(config: DictConfig, name: str) -> bool:
    return bool(check_flag(config[name], name=name))


def _priced(
    request: SearchRequest, plan: ParallelPlan, *, tensor_overlap: bool, offload: bool
) -> PricedPlan:
    """Return the costs of a plan, also of configurations that are predicted only."""
    price = price_offloaded if offload else price_plan
    found = price(request, plan)
    if not tensor_overlap:
        return found
    overlapped = price(replace(request, tensor_overlap=True), plan)
    if overlapped.predicted.step_seconds >= found.predicted.step_seconds:
        raise ValueError(
            "tensor_overlap is of gathers and scatters beside products, of which this plan has "
            "none: give one whose tensor axis splits activations too, or leave it out"
        )
    return overlapped


def _captured(
    config: DictConfig, *, splits: bool, accelerator: bool
) -> tuple[ExampleStep, OptimizerProfile]:
    """Return the step of the configuration's model on one device, and its optimizer."""
    make_model = functools.partial(instantiate, config.model)
    datamodule: pl.LightningDataModule = instantiate(config.data)
    model: pl.LightningModule = build_on_meta(make_model)
    trainer = one_device_trainer(config)
    kind = {"accelerator": accelerator, "compiled": _flag(config, "compiled")}
    try:
        example = capture_example(model, datamodule, trainer, splits=splits, **kind)
    # a step that reads values is captured once more, with real weights
    except NeedsValues:
        model = make_model()
        example = capture_example(model, datamodule, trainer, **kind)
    optimizers, named = make_fake_optimizers(model, device=torch.device("cpu"))
    return example, read_optimizer(optimizers, named_parameters=named)


def _complete_plan(
    given: UniformPlan | ParallelPlan,
    ranks: int | None,
    example: ExampleStep,
    cluster: Cluster,
    *,
    accumulate: int,
) -> ParallelPlan:
    """Return the plan with all that its file or name leaves open: ranks, nodes and the batch.

    `accumulate` batches of a step are for a plan by name; a file says how many it has.
    """
    # a file says everything but perhaps the batch
    if isinstance(given, ParallelPlan):
        if ranks not in (None, given.mesh.size):
            raise ValueError(
                f"ranks={ranks}, but the plan is for {given.mesh.size}; leave out ranks"
            )
        return given if given.batch_size is not None else replace(given, batch_size=example.samples)
    # a plan by name is for all devices of the cluster, or for `ranks`, on as few nodes as can be
    count = cluster.num_devices if ranks is None else ranks
    check_whole(count, name="ranks")
    nodes = max(count // cluster.devices_per_node, 1)
    if count % nodes:
        raise ValueError(
            f"{count} ranks cannot be divided over {nodes} nodes: choose numbers that divide"
        )
    plan = given.of(example.graph, given.mesh(count, num_nodes=nodes))
    return replace(plan, batch_size=example.samples, accumulate=accumulate)


def _request_of(
    plan: ParallelPlan, example: ExampleStep, cluster: Cluster, profile: OptimizerProfile
) -> SearchRequest:
    """Return what a search that finds `plan`, which has a batch, would be asked."""
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
    """Print what a plan is predicted to cost, the kinds of work, and its blocks or stages."""
    predicted, plan = priced.predicted, priced.plan
    several = f"{plan.accumulate} micro-" if plan.accumulate > 1 else ""
    console.print(
        f"{plan.summary()}, {several}batches of {plan.batch_size} on {cluster.name}",
        highlight=False,
    )
    console.print(
        f"step time {format_seconds(predicted.step_seconds)}, peak memory "
        f"{format_bytes(predicted.peak_bytes)} of each rank",
        highlight=False,
    )
    for sentence in (sentence_of(cluster.accuracy), *interval_sentences(sure, cluster)):
        console.print(sentence, highlight=False)
    # kinds of work, the longest first
    table = Table("of a step", "seconds", "share", caption=_CAPTION, caption_justify="left")
    for column in table.columns[1:]:
        column.justify = "right"
    for kind, seconds in sorted(priced.seconds.items(), key=lambda item: -item[1]):
        if seconds > 0:
            share = 100 * seconds / max(predicted.step_seconds, 1e-30)
            table.add_row(kind, format_seconds(seconds), f"{share:.1f} %")
    console.print(table)
    if priced.blocks is not None:
        print_explanation(priced.blocks, console=console)
    if priced.stages:
        print_stages(priced.stages, console=console)


# ---- recorded runs


@dataclass(frozen=True)
class RecordedRun:
    """One run, predicted and measured: seconds of a step, and bytes at its peak.

    `compute` and `communication` are the seconds that the prediction is made of; `measured_bytes`
    are those of the fullest rank. One of a busy machine says nothing about constants.
    """

    path: Path
    machine: str
    compute: float
    communication: float
    predicted: float
    measured: float
    predicted_bytes: float
    measured_bytes: float | None
    machine_was_busy: bool = False


def predict_runs(
    folder: Path, cluster: Cluster | None, *, save: Path | None, console: Console
) -> None:
    """Print how far predictions of recorded runs were from what was measured.

    Args:
        folder: the runs are below it; they are shown machine by machine.
        cluster: where some of them ran.
        save: a file for `cluster` with the constants that follow from the runs on it.
        console: where to print.

    Raises:
        ValueError: there are no such runs, or none on the cluster that is to be saved.
    """
    runs = [*read_runs(folder)]
    if not runs:
        raise ValueError(
            f"no run.json below {folder} has both a prediction and a measurement: topt train "
            "strategy=topt writes such files"
        )
    # all runs, by machine
    by_machine: dict[str, list[RecordedRun]] = {}
    for run in runs:
        by_machine.setdefault(run.machine, []).append(run)
    for machine, those in by_machine.items():
        _print_runs(machine, those, folder, console)

    # constants from the runs on the given cluster
    if save is None:
        return
    if cluster is None:
        raise ValueError(
            "save_cluster is for a cluster with corrected constants: say which, cluster=NAME or "
            "cluster_file=FILE"
        )
    own = [run for run in runs if run.machine.startswith(f"{cluster.name} on ")]
    if not own:
        raise ValueError(
            f"no run below {folder} is on {cluster.name!r}: they are on "
            f"{', '.join(sorted(by_machine))}"
        )
    if not (own := _quiet(own)):
        raise ValueError(
            f"the machine was busy in all runs on {cluster.name!r}, which say nothing about its "
            "constants: run once more when it is quiet"
        )
    save.parent.mkdir(parents=True, exist_ok=True)
    corrected(cluster, own).save(save)
    console.print(f"cluster: {save}", highlight=False, soft_wrap=True)


def read_runs(folder: Path) -> Iterator[RecordedRun]:
    """Yield the runs of the ``run.json`` files below `folder` that were predicted and measured.

    Other files are passed over.
    """
    for path in sorted(folder.rglob("run.json"))[:MOST_RUNS]:
        # a file that is no record of a run is not an error: folders have others too
        try:
            run = _read_run(path, parse_json(read_text(path)))
        except (ValueError, OSError, KeyError, TypeError):
            continue
        if run is not None:
            yield run


def _read_run(path: Path, record: Mapping[str, Any]) -> RecordedRun | None:
    # only runs of a plan that was predicted, and measured
    predicted, measured, plan = record["predicted"], record["measured"], record["plan"]
    if not predicted or not measured or not plan:
        return None
    names = "compute_seconds", "exposed_communication_seconds", "step_seconds", "peak_bytes"
    compute, communication, step, size = [number(predicted[name], name=name) for name in names]
    seconds = number(measured["median_step_seconds"], name="median_step_seconds")
    # a rank without a measurement has 0 or nothing
    peaks = [
        number(value, name="peak_bytes_per_rank")
        for value in measured["peak_bytes_per_rank"]
        if value
    ]
    if not seconds or not step:
        return None
    machine = (
        f"{plan['cluster'] or 'machines without a name'} on {record['world_size']} "
        f"{record['device']} rank(s)"
    )
    busy = record.get("machine_was_busy") is True  # earlier releases do not say
    fullest = max(peaks, default=None)
    return RecordedRun(path, machine, compute, communication, step, seconds, size, fullest, busy)


def _quiet(runs: Sequence[RecordedRun]) -> list[RecordedRun]:
    """Return the runs that say something about the constants of their machine."""
    return [run for run in runs if not run.machine_was_busy]


def _print_runs(machine: str, runs: Sequence[RecordedRun], folder: Path, console: Console) -> None:
    """Print the runs on one machine, and what they say of its constants."""
    columns = "run", "predicted", "measured", "error", "peak predicted", "measured", "error"
    table = Table(*columns, title=machine)
    for column in table.columns[1:]:
        column.justify = "right"
    for run in runs[-SHOWN:]:
        size = run.measured_bytes
        table.add_row(
            str(run.path.parent.relative_to(folder)),
            format_seconds(run.predicted),
            format_seconds(run.measured),
            "machine was busy" if run.machine_was_busy else _error(run.predicted, run.measured),
            format_bytes(run.predicted_bytes),
            "-" if size is None else format_bytes(size),
            "" if size is None else _error(run.predicted_bytes, size),
        )
    if len(runs) > SHOWN:
        table.caption = f"the last {SHOWN} of {len(runs)} runs"
    console.print(table)

    # errors as predicted, and with corrected constants
    count = len(runs)
    if len(runs := _quiet(runs)) < count:
        console.print(
            f"Left out of what follows: {count - len(runs)} of {count} runs, whose machine was "
            "busy.",
            highlight=False,
        )
    if not runs:
        return
    seconds = ErrorFigure.of([run.predicted for run in runs], [run.measured for run in runs])
    console.print(f"Step times: {seconds}.", highlight=False)
    if (size_error := _bytes_error(runs)) is not None:
        console.print(f"Peak memory: {size_error}.", highlight=False)
    if (better := corrected_error(runs)) is not None:
        a, b = correction_factors(runs)
        console.print(
            f"Computing took {a:.2f} times, communication {b:.2f} times what was predicted; with "
            f"constants corrected so, each run predicted from the others: {better}.",
            highlight=False,
        )


def _error(predicted: float, measured: float) -> str:
    return f"{100 * (predicted / measured - 1):+.1f} %"


# ---- constants that follow from recorded runs


def correction_factors(runs: Sequence[RecordedRun]) -> tuple[float, float]:
    """Return by what factors computing and links take longer than predicted.

    A factor is 1 where the runs say nothing about it.
    """
    compute = np.array([run.compute for run in runs])
    exposed = np.array([run.communication for run in runs])
    measured = [run.measured for run in runs]
    found = least_factors(lambda a: a[0] * compute + a[1] * exposed, measured, widths=WIDTHS)
    return float(found[0]), float(found[1])


def corrected_error(runs: Sequence[RecordedRun]) -> ErrorFigure | None:
    """Return the errors of predictions with factors that are fitted to the other runs.

    None for too few of them.
    """
    if len(runs) <= ENOUGH:
        return None
    # leave-one-out: a run says nothing about its own prediction
    predicted = []
    for index, run in enumerate(runs):
        a, b = correction_factors([*runs[:index], *runs[index + 1 :]])
        predicted.append(a * run.compute + b * run.communication)
    return ErrorFigure.of(predicted, [run.measured for run in runs])


def corrected(cluster: Cluster, runs: Sequence[RecordedRun]) -> Cluster:
    """Return `cluster` with the constants that follow from `runs` on it, and their errors."""
    # seconds of computing take a times as long, those of links b times
    a, b = correction_factors(runs) if len(runs) >= ENOUGH else (1.0, 1.0)
    seconds = corrected_error(runs) or ErrorFigure.of(
        [r.predicted for r in runs], [r.measured for r in runs]
    )
    accuracy = Accuracy(seconds, _bytes_error(runs), f"{len(runs)} runs that were recorded")
    if cluster.nodes:
        raise ValueError(
            f"the cluster {cluster.name!r} has several kinds of nodes: constants are corrected for "
            "one kind"
        )
    device = replace(
        cluster.device,
        flops={dtype: rate / a for dtype, rate in cluster.device.flops.items()},
        memory_bandwidth=cluster.device.memory_bandwidth / a,
        op_overhead_seconds=cluster.device.op_overhead_seconds * a,
        framework_seconds=cluster.device.framework_seconds * a,
        launch_seconds=cluster.device.launch_seconds * a,
    )
    links = {
        name: None if link is None else Link(link.latency_seconds * b, link.bandwidth / b)
        for name, link in (("intra", cluster.intra), ("inter", cluster.inter))
    }
    curves = {
        key: CollectiveCurve(
            curve.sizes, tuple(b * value for value in curve.seconds), b * curve.wait_seconds
        )
        for key, curve in cluster.collectives.items()
    }
    given: dict[str, Any] = {**links, "device": device, "collectives": curves}
    return replace(cluster, **given, accuracy=accuracy)


def least_factors(
    predict: Callable[[Array], Sequence[float] | Array],
    measured: Sequence[float],
    *,
    widths: Sequence[float],
) -> Array:
    """Return the factors a (constant,) with which `predict` comes closest to `measured`.

        minimize over x = log a     sum of rho(log(predict(a) / measured) / s) + sum of (x / w)^2

    w are the `widths`, s is EXPECTED_ERROR. rho is Huber's loss, so that a few odd steps do not
    decide. Gauss-Newton with Levenberg's damping; derivatives are differences.
    """
    target, scale = np.log(np.asarray(measured, float)), np.asarray(widths, float)

    def residuals(x: Array) -> Array:
        found: Array = (np.log(np.asarray(predict(np.exp(x)), float)) - target) / EXPECTED_ERROR
        return found

    factors: Array = np.exp(_minimum(residuals, scale))
    return factors


def _minimum(residuals: Callable[[Array], Array], widths: Array) -> Array:
    """Return the logarithms of factors at the least loss, from 0 on."""
    x, damping = np.zeros(len(widths)), 1e-2
    known = residuals(x)
    loss = _loss(known, x, widths)
    for _ in range(_STEPS):
        slopes = np.stack(
            [(residuals(x + step) - known) / _DIFFERENCE for step in _DIFFERENCE * np.eye(len(x))],
            axis=1,
        )
        weights = 1 / np.maximum(np.abs(known) / HUBER, 1.0)
        curvature = (slopes.T * weights) @ slopes + np.diag(widths**-2)
        gradient = (slopes.T * weights) @ known + x / widths**2
        before = loss
        while damping < 1e6:
            step = np.linalg.solve(curvature + damping * np.diag(np.diag(curvature)), -gradient)
            there = np.clip(x + step, -_FAR, _FAR)
            found = residuals(there)
            if (new := _loss(found, there, widths)) < loss:
                x, known, loss, damping = there, found, new, damping / 5
                break
            damping *= 5
        if before - loss < 1e-4 * before:
            break
    return x


def _loss(residuals: Array, x: Array, widths: Array) -> float:
    size = np.abs(residuals)
    huber = np.where(size <= HUBER, size**2, 2 * HUBER * size - HUBER**2)
    return float(huber.sum() + ((x / widths) ** 2).sum())


def _bytes_error(runs: Sequence[RecordedRun]) -> ErrorFigure | None:
    pairs = [(run.predicted_bytes, run.measured_bytes) for run in runs if run.measured_bytes]
    return ErrorFigure.of(*zip(*pairs, strict=True), above=True) if pairs else None

"""`topt predict runs=FILE.csv`: predict the runs of a CSV file, a row each.

    predict_rows(path, cluster, calibrate_on=None, out=None, save_cluster=None, console=console)
    fit_runs(cluster, runs)             # constants, from runs with measured times

`training_runs` reads the file, `run_costs` prices each run.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from hydra_plugins.lightning_topt_searchpath import conf_dir
from lightning_topt.cli.run_costs import RunCost, RunCosts
from lightning_topt.cli.training_runs import Recomputation, TrainingRun, read_runs
from lightning_topt.costs.cluster import Accuracy, Cluster, ErrorFigure, sentence_of
from lightning_topt.costs.fitted_constants import (
    CONSTANTS,
    Constant,
    FittedConstants,
    fit_constants,
)
from lightning_topt.costs.intervals import Domain, Interval
from lightning_topt.costs.plain_values import names, shown

# clusters of the configurations, by what published tables call their GPUs
GPUS = {
    "a100_80gb": "a100_8x8",
    "a100_40gb": "a100_40gb_8x8",
    "h100_80gb": "h100_2x8",
    "h100_96gb_hbm2e_500w": "h100_96gb_2x8",
}

# parts of an iteration, and how they are printed
_PARTS = {
    "forward": "forward",
    "backward": "backward",
    "once": "exchanges and update",
    "pipeline": "waiting in the pipeline",
}


def predict_rows(
    runs: Path,
    cluster: Cluster | None,
    *,
    calibrate_on: Path | None = None,
    out: Path | None = None,
    save_cluster: Path | None = None,
    console: Console,
) -> None:
    """Predict the rows of a file, and print a summary.

    Args:
        runs: the file.
        cluster: where they run; it gets as many more nodes as the rows need. None: where their
            column `gpu` says.
        calibrate_on: a file of measured rows, to which the constants of the cluster are fitted.
        out: gets the rows with what is predicted.
        save_cluster: gets the cluster.
        console: where to print.

    Raises:
        ValueError: files that cannot be read, and rows that no run can have.
    """
    # clusters for the rows that are predicted, and for those they are fitted to
    file = read_runs(runs)
    known: Sequence[TrainingRun] = () if calibrate_on is None else measured_runs(calibrate_on)
    clusters = clusters_of([*file.runs, *known], cluster)
    file = replace(file, runs=_completed(file.runs, clusters, runs, console))
    if calibrate_on is not None:
        known = _completed(known, clusters, calibrate_on, console)
    for name, found in clusters.items():
        console.print(
            f"{found.name}: {found.num_nodes} nodes of {found.devices_per_node} devices"
            f"{f' for rows on {name}' if name else ''}.",
            highlight=False,
        )

    # their constants
    for name, found in [*clusters.items()] if calibrate_on is not None else ():
        own = [run for run in known if cluster is not None or run.gpu == name]
        if len(own) < 2:
            raise ValueError(
                f"{calibrate_on} has {len(own)} measured rows on {name!r}: constants are fitted to "
                "at least two"
            )
        fitted = fit_runs(found, own)
        _print_constants(found, fitted, console)
        domain = Domain.of([run.sizes for run in own], [run.techniques for run in own])
        source = f"the {len(own)} rows of {calibrate_on and calibrate_on.name} it was fitted to"
        accuracy = Accuracy(fitted.error, source=source, domain=domain)
        clusters[name] = replace(fitted.cluster, accuracy=accuracy)

    # the rows
    costs = {name: RunCosts(found) for name, found in clusters.items()}
    of_run = [run.gpu if cluster is None else "" for run in file.runs]
    priced = [costs[name].price(run) for name, run in zip(of_run, file.runs, strict=True)]
    _print_summary(file.runs, priced, console)
    for found in clusters.values():
        console.print(sentence_of(found.accuracy), highlight=False)
    intervals = [
        _interval(clusters[name].accuracy, run, cost)
        for name, run, cost in zip(of_run, file.runs, priced, strict=True)
    ]
    _print_intervals(file.runs, intervals, console)
    if out is not None:
        added: dict[str, Sequence[float | str]] = {
            "predicted_seconds": [each.step_seconds for each in priced],
            "predicted_peak_bytes": [each.peak_bytes for each in priced],
        }
        if known_all := [each for each in intervals if each is not None]:
            ends = [("", "") if each is None else (each.low, each.high) for each in intervals]
            added["predicted_seconds_low"], added["predicted_seconds_high"] = zip(
                *ends, strict=True
            )
            if any(each.outside for each in known_all):
                added["outside"] = [
                    "" if each is None else "; ".join(each.outside) for each in intervals
                ]
        file.save(out, added)
        console.print(f"predictions: {out}", highlight=False, soft_wrap=True)
    if save_cluster is not None:
        if len(clusters) > 1:
            raise ValueError(
                f"save_cluster is a file for one cluster, and the rows are on {len(clusters)}: "
                "give rows of one kind of GPU"
            )
        save_cluster.parent.mkdir(parents=True, exist_ok=True)
        next(iter(clusters.values())).save(save_cluster)
        console.print(f"cluster: {save_cluster}", highlight=False, soft_wrap=True)


def completed(
    runs: Sequence[TrainingRun], clusters: Mapping[str, Cluster]
) -> Sequence[TrainingRun]:
    """Return runs that all say what they recompute.

    A program that made a table has run all of it in one way. So those that do not say it recompute
    everything if one of them would not fit its device otherwise, else nothing.
    """
    unsaid = [run for run in runs if run.recompute is None]
    several = {gpu: RunCosts(cluster) for gpu, cluster in clusters.items()}

    def fits(run: TrainingRun) -> bool:
        costs = several.get(run.gpu) or several[""]
        return costs.price(run).peak_bytes <= costs.cluster.device.memory_bytes

    full = Recomputation(1.0)
    # runs that fit in neither way tell nothing
    every = any(not fits(run) and fits(replace(run, recompute=full)) for run in unsaid)
    assumed = full if every else Recomputation()
    return [replace(run, recompute=assumed) if run.recompute is None else run for run in runs]


def _completed(
    runs: Sequence[TrainingRun], clusters: Mapping[str, Cluster], path: Path, console: Console
) -> Sequence[TrainingRun]:
    found = completed(runs, clusters)
    if unsaid := sum(run.recompute is None for run in runs):
        again = next(
            run.recompute for run, before in zip(found, runs, strict=True) if not before.recompute
        )
        what = (
            "everything, as some would not fit otherwise"
            if again == Recomputation(1.0)
            else "nothing, as all of them fit"
        )
        console.print(
            f"{unsaid} rows of {path.name} do not say what they recompute: {what}.",
            highlight=False,
        )
    return found


def measured_runs(path: Path) -> list[TrainingRun]:
    """Return the runs of a file that have measured times.

    Raises:
        ValueError: there are fewer than two of them.
    """
    runs = [run for run in read_runs(path, need_times=True).runs if run.seconds is not None]
    if len(runs) < 2:
        raise ValueError(
            f"{path} has {len(runs)} rows with a measured time: constants are fitted to at least "
            "two"
        )
    return runs


def fit_runs(
    cluster: Cluster, runs: Sequence[TrainingRun], *, constants: Sequence[Constant] = CONSTANTS
) -> FittedConstants:
    """Return the cluster with its `constants` fitted to measured runs."""

    def predict(changed: Cluster) -> list[float]:
        # once per change of the constants, of which there are hundreds
        costs = RunCosts(changed)
        return [costs.step_seconds(run) for run in runs]

    measured = [run.seconds for run in runs if run.seconds is not None]
    return fit_constants(cluster, predict, measured, constants=constants)


def clusters_of(runs: Sequence[TrainingRun], cluster: Cluster | None) -> dict[str, Cluster]:
    """Return the clusters of runs, by their column `gpu`; the given one by "" if there is one.

    Raises:
        ValueError: none is given, and a run does not say its GPU, or one that is not known.
    """
    if cluster is not None:
        return {"": cluster_for(runs, cluster)}
    by_gpu: dict[str, list[TrainingRun]] = {}
    for run in runs:
        by_gpu.setdefault(run.gpu, []).append(run)
    if "" in by_gpu:
        raise ValueError(
            "say for which machines: cluster=NAME of the group (topt predict --help lists them), "
            "cluster_file=FILE, or a column gpu in each row"
        )
    return {gpu: cluster_for(several, cluster_named(gpu)) for gpu, several in by_gpu.items()}


def cluster_named(gpu: str) -> Cluster:
    """Return the cluster of the configurations with this GPU, or of this name.

    Raises:
        ValueError: there is none.
    """
    path = conf_dir() / "cluster" / f"{GPUS.get(gpu, gpu)}.yaml"
    if not path.stem.isidentifier() or not path.exists():
        raise ValueError(
            f"the GPU {shown(gpu)} is not known: write one of {names(GPUS)}, a name of the group "
            "of clusters, or give cluster_file=FILE for all rows"
        )
    return Cluster.load(path)


def cluster_for(runs: Sequence[TrainingRun], cluster: Cluster) -> Cluster:
    """Return the cluster, with as many more of its nodes as the largest of `runs` needs.

    Raises:
        ValueError: it has several kinds of nodes, or one node and no network.
    """
    # the largest run decides for all
    most = max(run.gpus for run in runs)
    if most <= cluster.num_devices:
        return cluster
    if cluster.nodes or cluster.inter is None:
        why = (
            "has several kinds of nodes"
            if cluster.nodes
            else "says nothing of a network between nodes (inter)"
        )
        raise ValueError(
            f"{most} GPUs are more than the {cluster.num_devices} of the cluster {cluster.name!r}, "
            f"which {why}: describe a larger one"
        )
    return replace(cluster, num_nodes=math.ceil(most / cluster.devices_per_node))


def _print_constants(before: Cluster, fitted: FittedConstants, console: Console) -> None:
    table = Table(
        "constant", "in the file", "fitted", "factor", title=f"Constants of {before.name}"
    )
    for column in table.columns[1:]:
        column.justify = "right"
    for constant in CONSTANTS:
        name = f"{constant.part}.{constant.entry}"
        if name in fitted.factors:
            values = constant.of(before), constant.of(fitted.cluster), fitted.factors[name]
            table.add_row(name, *(f"{value:.3g}" for value in values))
    console.print(table)


def _interval(accuracy: Accuracy | None, run: TrainingRun, cost: RunCost) -> Interval | None:
    """Return the interval of a run's seconds; None where nothing was measured on its cluster."""
    if accuracy is None:
        return None
    return accuracy.interval(cost.step_seconds, run.sizes, run.techniques)


def _print_intervals(
    runs: Sequence[TrainingRun], intervals: Sequence[Interval | None], console: Console
) -> None:
    """Print how many measured times are in their intervals, and what is outside of the domain."""
    both = [
        (run.seconds in interval)
        for run, interval in zip(runs, intervals, strict=True)
        if interval is not None and run.seconds is not None
    ]
    if both:
        console.print(
            f"{sum(both)} of {len(both)} measured times are in their intervals, which are for nine "
            "of ten.",
            highlight=False,
        )
    outside = Counter(what for each in intervals if each is not None for what in each.outside)
    if outside:
        parts = ", ".join(f"{what} ({count} rows)" for what, count in outside.most_common())
        console.print(f"Outside of what was measured, so less sure: {parts}.", highlight=False)


def _print_summary(
    runs: Sequence[TrainingRun], priced: Sequence[RunCost], console: Console
) -> None:
    """Print what the predicted time is made of, and its error where times were measured."""
    # all rows together
    seconds = {part: sum(each.seconds[part] for each in priced) for part in _PARTS}
    total = sum(seconds.values()) or 1.0
    made = ", ".join(f"{name} {100 * seconds[part] / total:.0f} %" for part, name in _PARTS.items())
    console.print(f"{len(runs)} rows; of their predicted time: {made}.", highlight=False)
    pairs = [
        (cost.step_seconds, run.seconds)
        for cost, run in zip(priced, runs, strict=True)
        if run.seconds is not None
    ]
    if pairs:
        # two figures: the mean error, and how far most of them are off
        figure = ErrorFigure.of(*zip(*pairs, strict=True))
        mean = sum(abs(a / b - 1) for a, b in pairs) / len(pairs)
        console.print(
            f"Against the times in the file: mean error {100 * mean:.1f} %; {figure}.",
            highlight=False,
        )

"""What training runs of a table would take on a cluster, row by row.

    python -m benchmarks.prediction.rows runs.csv --cluster a100_64x8 --out predictions.csv
    python -m benchmarks.prediction.rows runs.csv --calibrate-on known.csv --save-cluster mine.yaml

`training_runs` says which columns a row has, `run_prices` how it is priced: by the models that
`topt plan` compares plans with. Without a cluster the column `gpu` says where a row runs. The
cluster gets as many more nodes as the rows need.

`--calibrate-on` fits the constants of the cluster, never a row (`fitted_constants`). What its rows
say nothing about stays. `--save-cluster` writes the cluster for later plans
(`strategy.cluster=mine.yaml`), with the errors that are left as its `accuracy`. Rows of one job,
under several plans, also tell by how much two plans must differ (`difference`).

`--out` gets `predicted_seconds` and `predicted_peak_bytes`. Where the cluster says how sure its
constants are, there is an interval for nine of ten runs (`predicted_seconds_low`, ...). It is wider
for runs unlike those that were measured, and `outside` names what is unlike.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.prediction.error_figures import domain_of
from benchmarks.prediction.fitted_constants import CONSTANTS, FittedConstants
from benchmarks.prediction.run_prices import (
    RunPrice,
    RunPrices,
    cluster_named,
    clusters_of,
    completed,
    difference_of,
    fit_runs,
    measured_runs,
)
from benchmarks.prediction.training_runs import RunsAgain, TrainingRun, read_run_file
from lightning_topt.costs.accuracy import Accuracy, ErrorFigure, Interval, sentence_of
from lightning_topt.costs.cluster import Cluster

# parts of an iteration, and how they are printed
PARTS = {
    "forward": "forward",
    "backward": "backward",
    "once": "exchanges and update",
    "pipeline": "waiting in the pipeline",
}
# configurations that are priced and that nothing here runs, by their columns
PREDICTED_ONLY = {
    "tensor_overlap": "exchanges of tensor axes beside products",
    "offload": "activations in the memory of the host",
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
    file = read_run_file(runs)
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
        domain = domain_of(own)
        source = f"the {len(own)} rows of {calibrate_on and calibrate_on.name} it was fitted to"
        accuracy = Accuracy(fitted.error, source=source, domain=domain)
        clusters[name] = replace(
            fitted.cluster, accuracy=_of_pairs_and_peaks(accuracy, fitted, own)
        )

    # the rows
    costs = {name: RunPrices(found) for name, found in clusters.items()}
    of_run = [run.gpu if cluster is None else "" for run in file.runs]
    priced = [costs[name].price(run) for name, run in zip(of_run, file.runs, strict=True)]
    _print_summary(file.runs, priced, console)
    fused = sum(run.fused for run in file.runs)
    console.print(
        f"Predicted as compiled, elementwise chains as one kernel: {fused} rows; as eager: "
        f"{len(file.runs) - fused}.",
        highlight=False,
    )
    if only := [
        what
        for name, what in PREDICTED_ONLY.items()
        if any(getattr(run, name) for run in file.runs)
    ]:
        console.print(f"Predicted only, nothing here runs it: {', '.join(only)}.", highlight=False)
    for found in clusters.values():
        console.print(sentence_of(found.accuracy), highlight=False)
    sure = [
        (
            clusters[name].seconds_interval(cost.step_seconds, run.sizes, run.techniques),
            clusters[name].bytes_interval(cost.peak_bytes, run.sizes, run.techniques),
        )
        for name, run, cost in zip(of_run, file.runs, priced, strict=True)
    ]
    intervals = [seconds for seconds, _ in sure]
    _print_intervals(file.runs, intervals, console)
    if out is not None:
        added: dict[str, Sequence[float | str]] = {
            "predicted_seconds": [each.step_seconds for each in priced],
            "predicted_peak_bytes": [each.peak_bytes for each in priced],
        }
        for column, of in (("seconds", intervals), ("peak_bytes", [size for _, size in sure])):
            if any(each is not None for each in of):
                ends = [("", "") if each is None else (each.low, each.high) for each in of]
                low, high = f"predicted_{column}_low", f"predicted_{column}_high"
                added[low], added[high] = zip(*ends, strict=True)
        if any(each.outside for each in intervals if each is not None):
            added["outside"] = [
                "" if each is None else "; ".join(each.outside) for each in intervals
            ]
        file.save(out, added)
        console.print(f"predictions: {out}", highlight=False, soft_wrap=True)
    if save_cluster is not None:
        if len(clusters) > 1:
            raise ValueError(
                f"--save-cluster is a file for one cluster, and the rows are on {len(clusters)}: "
                "give rows of one kind of GPU"
            )
        save_cluster.parent.mkdir(parents=True, exist_ok=True)
        next(iter(clusters.values())).save(save_cluster)
        console.print(f"cluster: {save_cluster}", highlight=False, soft_wrap=True)


def _of_pairs_and_peaks(
    accuracy: Accuracy, fitted: FittedConstants, runs: Sequence[TrainingRun]
) -> Accuracy:
    """Return `accuracy` with what pairs of runs, and measured peaks, say beside it."""
    prices = RunPrices(fitted.cluster)
    pairs = difference_of(runs, [prices.step_seconds(run) for run in runs])
    known = [run for run in runs if run.bytes is not None]
    if not known:
        return replace(accuracy, difference=pairs)
    peaks = _measured([prices.price(run).peak_bytes for run in known], [r.bytes for r in known])
    return replace(
        accuracy,
        difference=pairs,
        bytes=ErrorFigure.of(*zip(*peaks, strict=True), above=True),
        bytes_domain=domain_of(known),
    )


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
            if again == RunsAgain(1.0)
            else "nothing, as all of them fit"
        )
        console.print(
            f"{unsaid} rows of {path.name} do not say what they recompute: {what}.", highlight=False
        )
    return found


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
    runs: Sequence[TrainingRun], priced: Sequence[RunPrice], console: Console
) -> None:
    """Print what the predicted time is made of, and errors where times or peaks were measured."""
    # all rows together
    seconds = {part: sum(each.seconds[part] for each in priced) for part in PARTS}
    total = sum(seconds.values()) or 1.0
    made = ", ".join(f"{name} {100 * seconds[part] / total:.0f} %" for part, name in PARTS.items())
    console.print(f"{len(runs)} rows; of their predicted time: {made}.", highlight=False)
    times = _measured([cost.step_seconds for cost in priced], [run.seconds for run in runs])
    if times:
        # two figures: the mean error, and how far most of them are off
        figure = ErrorFigure.of(*zip(*times, strict=True))
        mean = sum(abs(a / b - 1) for a, b in times) / len(times)
        console.print(
            f"Against the times in the file: mean error {100 * mean:.1f} %; {figure}.",
            highlight=False,
        )
    if peaks := _measured([cost.peak_bytes for cost in priced], [run.bytes for run in runs]):
        memory = ErrorFigure.of(*zip(*peaks, strict=True))
        console.print(f"Against the peaks of memory in the file: {memory}.", highlight=False)


def _measured(
    predicted: Sequence[float], measured: Sequence[float | None]
) -> list[tuple[float, float]]:
    """Return pairs of what is predicted and measured, where it was."""
    pairs = zip(predicted, measured, strict=True)
    return [(value, known) for value, known in pairs if known is not None]


def main() -> None:
    """Predict the rows of a file; wrong values end with one sentence."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", type=Path, help="CSV of training runs")
    machines = parser.add_mutually_exclusive_group()
    machines.add_argument("--cluster", help="a name of conf/cluster")
    machines.add_argument("--cluster-file", type=Path, help="a cluster file instead of a name")
    parser.add_argument("--calibrate-on", type=Path, help="CSV of runs with measured times")
    parser.add_argument("--out", type=Path, help="CSV for the rows with what is predicted")
    parser.add_argument("--save-cluster", type=Path, help="YAML for the cluster")
    given = parser.parse_args()
    try:
        if given.cluster_file is not None:
            cluster = Cluster.load(given.cluster_file)
        else:
            cluster = None if given.cluster is None else cluster_named(given.cluster)
        predict_rows(
            given.runs,
            cluster,
            calibrate_on=given.calibrate_on,
            out=given.out,
            save_cluster=given.save_cluster,
            console=Console(),
        )
    except ValueError as error:
        parser.exit(2, f"{parser.prog}: {error}\n")


if __name__ == "__main__":
    main()

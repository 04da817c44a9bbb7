"""Rows of Megatron runs are predicted on a cluster, whose constants may be fitted to other rows
first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from lightning_topt.cli.megatron.megatron_costs import MegatronCosts, RowCosts, cluster_for
from lightning_topt.cli.megatron.megatron_rows import MegatronRow, RowFile, read_rows
from lightning_topt.costs.cluster import Accuracy, Cluster, ErrorFigure, sentence_of
from lightning_topt.costs.fitted_constants import CONSTANTS, FittedConstants, fit_constants

_PARTS = ("forward", "backward", "once", "pipeline")


def predict_rows(
    runs: Path,
    cluster: Cluster,
    *,
    calibrate_on: Path | None = None,
    out: Path | None = None,
    save_cluster: Path | None = None,
    console: Console,
) -> None:
    """Predict the rows of `runs`, print a summary, and write them to `out` with two columns more.

    Raises ValueError for files that cannot be read, and rows that no run can have.
    """
    file = read_rows(runs)
    known = None if calibrate_on is None else measured_rows(calibrate_on)
    used = [*file.rows, *(known or ())]
    larger = cluster_for(used, cluster)
    if larger is not cluster:
        console.print(
            f"{cluster.name} has {cluster.num_devices} devices: predicted for {larger.num_nodes} "
            "such nodes, as the rows need.",
            highlight=False,
        )
    if known is not None and calibrate_on is not None:
        fitted = fit_rows(larger, known)
        _print_constants(larger, fitted, console)
        accuracy = Accuracy(
            fitted.error, source=f"the {len(known)} rows of {calibrate_on.name} it was fitted to"
        )
        larger = replace(fitted.cluster, accuracy=accuracy)
    costs = MegatronCosts(larger)
    priced = [costs.price(row) for row in file.rows]
    _print_summary(file.rows, priced, console)
    console.print(sentence_of(larger.accuracy), highlight=False)
    if out is not None:
        save_predictions(file, priced, larger.accuracy, out)
        console.print(f"predictions: {out}", highlight=False, soft_wrap=True)
    if save_cluster is not None:
        save_cluster.parent.mkdir(parents=True, exist_ok=True)
        larger.save(save_cluster)
        console.print(f"cluster: {save_cluster}", highlight=False, soft_wrap=True)


def measured_rows(path: Path) -> list[MegatronRow]:
    """Return the rows of a file that have measured times. Raises ValueError for a file with fewer
    than two of them.
    """
    rows = [row for row in read_rows(path, need_times=True).rows if row.seconds is not None]
    if len(rows) < 2:
        raise ValueError(
            f"{path} has {len(rows)} rows with a measured time: constants are fitted to at least "
            "two"
        )
    return rows


def fit_rows(cluster: Cluster, rows: Sequence[MegatronRow]) -> FittedConstants:
    """Return the cluster with its constants fitted to measured rows."""

    def predict(changed: Cluster) -> list[float]:
        costs = MegatronCosts(changed)
        return [costs.step_seconds(row) for row in rows]

    return fit_constants(cluster, predict, [row.seconds for row in rows if row.seconds is not None])


def save_predictions(
    file: RowFile, priced: Sequence[RowCosts], accuracy: Accuracy | None, out: Path
) -> None:
    """Write the rows with ``predicted_seconds``, ``predicted_peak_bytes`` and, where it is known,
    ``predicted_error``: the share by which nine of ten predictions are wrong at most.
    """
    added = {
        "predicted_seconds": [each.step_seconds for each in priced],
        "predicted_peak_bytes": [each.peak_bytes for each in priced],
    }
    if accuracy is not None:
        added["predicted_error"] = [accuracy.seconds.p90] * len(priced)
    file.save(out, added)


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


def _print_summary(
    rows: Sequence[MegatronRow], priced: Sequence[RowCosts], console: Console
) -> None:
    shares = [sum(each.seconds[part] for each in priced) for part in _PARTS]
    total = sum(shares) or 1.0
    names = ("forward", "backward", "exchange of gradients and update", "waiting in the pipeline")
    made = ", ".join(
        f"{name} {100 * share / total:.0f} %" for name, share in zip(names, shares, strict=True)
    )
    console.print(f"{len(rows)} rows; of their predicted time: {made}.", highlight=False)
    pairs = [
        (cost.step_seconds, row.seconds)
        for cost, row in zip(priced, rows, strict=True)
        if row.seconds is not None
    ]
    if pairs:
        figure = ErrorFigure.of(*zip(*pairs, strict=True))
        mean = sum(abs(a / b - 1) for a, b in pairs) / len(pairs)
        console.print(
            f"Against the times in the file: mean error {100 * mean:.1f} %; {figure}.",
            highlight=False,
        )

"""Runs that `run.json` files record are predictions beside what was measured; constants follow from
them.

    t = a compute + b exposed communication   a, b fitted to the runs, as `fitted_constants` does it

A cluster whose computing takes a times as long and whose links b times as long predicts these runs
better; each run is predicted from the others to say by how much.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from lightning_topt.basics.units import format_bytes, format_seconds
from lightning_topt.costs.cluster import (
    Accuracy,
    Cluster,
    CollectiveCurve,
    Device,
    ErrorFigure,
    Link,
)
from lightning_topt.costs.fitted_constants import least_factors
from lightning_topt.costs.plain_values import number, parse_json, read_text

# of files that are read, rows of the table, runs to fit two factors to
MOST_RUNS, SHOWN, ENOUGH = 10_000, 20, 3
WIDTHS = 0.3, 0.5  # how far the factors stray, as logarithms


@dataclass(frozen=True)
class RecordedRun:
    """One run: seconds of a step and bytes at the peak, predicted and measured (bytes of the
    fullest rank).
    """

    path: Path
    machine: str
    compute: float
    communication: float
    predicted: float
    measured: float
    predicted_bytes: float
    measured_bytes: float | None


def predict_runs(
    folder: Path, cluster: Cluster | None, *, save: Path | None, console: Console
) -> None:
    """Print how far predictions of the runs in `folder` were from what was measured, machine by
    machine; with `save` write `cluster` with the constants that follow from the runs on it.

    Raises ValueError for a folder without such runs, and where none is on the cluster that is to be
    saved.
    """
    runs = [*read_runs(folder)]
    if not runs:
        raise ValueError(
            f"no run.json below {folder} has both a prediction and a measurement: topt train "
            "strategy=topt writes such files"
        )
    by_machine: dict[str, list[RecordedRun]] = {}
    for run in runs:
        by_machine.setdefault(run.machine, []).append(run)
    for machine, those in by_machine.items():
        _print_runs(machine, those, folder, console)
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
    save.parent.mkdir(parents=True, exist_ok=True)
    corrected(cluster, own).save(save)
    console.print(f"cluster: {save}", highlight=False, soft_wrap=True)


def read_runs(folder: Path) -> Iterator[RecordedRun]:
    """Yield the runs of the ``run.json`` files below `folder` that were predicted and measured;
    other files are passed over.
    """
    for path in sorted(folder.rglob("run.json"))[:MOST_RUNS]:
        try:
            record = parse_json(read_text(path))
            run = _read(path, record)
        except (ValueError, OSError, KeyError, TypeError):
            continue
        if run is not None:
            yield run


def correction_factors(runs: Sequence[RecordedRun]) -> tuple[float, float]:
    """Return by what computing and links take longer than predicted; 1 for what the runs say
    nothing about.
    """
    compute = np.array([run.compute for run in runs])
    exposed = np.array([run.communication for run in runs])
    measured = [run.measured for run in runs]
    found = least_factors(lambda a: a[0] * compute + a[1] * exposed, measured, widths=WIDTHS)
    return float(found[0]), float(found[1])


def corrected_error(runs: Sequence[RecordedRun]) -> ErrorFigure | None:
    """Return the errors of predictions with factors that are fitted to the other runs; None for too
    few of them.
    """
    if len(runs) <= ENOUGH:
        return None
    predicted = []
    for index, run in enumerate(runs):
        a, b = correction_factors([*runs[:index], *runs[index + 1 :]])
        predicted.append(a * run.compute + b * run.communication)
    return ErrorFigure.of(predicted, [run.measured for run in runs])


def corrected(cluster: Cluster, runs: Sequence[RecordedRun]) -> Cluster:
    """Return `cluster` with the constants that follow from `runs` on it, and their errors."""
    a, b = correction_factors(runs) if len(runs) >= ENOUGH else (1.0, 1.0)
    seconds = corrected_error(runs) or ErrorFigure.of(
        [r.predicted for r in runs], [r.measured for r in runs]
    )
    accuracy = Accuracy(seconds, _bytes_error(runs), f"{len(runs)} runs that were recorded")
    curves = {
        key: CollectiveCurve(
            curve.sizes, tuple(b * value for value in curve.seconds), b * curve.wait_seconds
        )
        for key, curve in cluster.collectives.items()
    }
    links = {
        name: None if link is None else _slower_link(link, b)
        for name, link in (("intra", cluster.intra), ("inter", cluster.inter))
    }
    if cluster.nodes:
        raise ValueError(
            f"the cluster {cluster.name!r} has several kinds of nodes: constants are corrected for "
            "one kind"
        )
    given: dict[str, Any] = {
        **links,
        "device": _slower_device(cluster.device, a),
        "collectives": curves,
    }
    return replace(cluster, **given, accuracy=accuracy)


def _slower_device(device: Device, factor: float) -> Device:
    return replace(
        device,
        flops={dtype: rate / factor for dtype, rate in device.flops.items()},
        memory_bandwidth=device.memory_bandwidth / factor,
        op_overhead_seconds=device.op_overhead_seconds * factor,
        framework_seconds=device.framework_seconds * factor,
        launch_seconds=device.launch_seconds * factor,
    )


def _slower_link(link: Link, factor: float) -> Link:
    return Link(link.latency_seconds * factor, link.bandwidth / factor)


def _read(path: Path, record: Mapping[str, Any]) -> RecordedRun | None:
    predicted, measured, plan = record["predicted"], record["measured"], record["plan"]
    if not predicted or not measured or not plan:
        return None
    names = "compute_seconds", "exposed_communication_seconds", "step_seconds", "peak_bytes"
    values = [number(predicted[name], name=name) for name in names]
    seconds = number(measured["median_step_seconds"], name="median_step_seconds")
    peaks = [
        number(value, name="peak_bytes_per_rank")
        for value in measured["peak_bytes_per_rank"]
        if value
    ]
    if not seconds or not values[2]:
        return None
    machine = (
        f"{plan['cluster'] or 'machines without a name'} on {record['world_size']} "
        f"{record['device']} rank(s)"
    )
    compute, communication, step, size = values
    return RecordedRun(
        path, machine, compute, communication, step, seconds, size, max(peaks, default=None)
    )


def _bytes_error(runs: Sequence[RecordedRun]) -> ErrorFigure | None:
    pairs = [(run.predicted_bytes, run.measured_bytes) for run in runs if run.measured_bytes]
    return ErrorFigure.of(*zip(*pairs, strict=True)) if pairs else None


def _print_runs(machine: str, runs: Sequence[RecordedRun], folder: Path, console: Console) -> None:
    table = Table(
        "run",
        "predicted",
        "measured",
        "error",
        "peak predicted",
        "measured",
        "error",
        title=machine,
    )
    for column in table.columns[1:]:
        column.justify = "right"
    for run in runs[-SHOWN:]:
        size = run.measured_bytes
        table.add_row(
            str(run.path.parent.relative_to(folder)),
            *(
                format_seconds(run.predicted),
                format_seconds(run.measured),
                _error(run.predicted, run.measured),
            ),
            *(format_bytes(run.predicted_bytes), "-" if size is None else format_bytes(size)),
            "" if size is None else _error(run.predicted_bytes, size),
        )
    if len(runs) > SHOWN:
        table.caption = f"the last {SHOWN} of {len(runs)} runs"
    console.print(table)
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

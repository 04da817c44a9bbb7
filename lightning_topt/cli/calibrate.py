"""`topt calibrate`: measure this machine anew, keep it for later runs, and say how sure that is.

It writes a cluster file (``output``), which is used elsewhere with ``strategy.cluster=FILE``, and
``calibration.json`` (docs/reference/schemas.md). It prints two tables: how far the finished table
is from what is measured a second time, and what changed since an earlier calibration.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

import torch
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig
from rich.console import Console
from rich.table import Table

from lightning_topt.cli.local_processes import run_on_ranks
from lightning_topt.costs.calibration_check import (
    Change,
    CheckedPoint,
    changes_between,
    check_calibration,
    largest_and_median,
    summarize,
)
from lightning_topt.costs.cluster import Cluster
from lightning_topt.costs.measurements import Measurements

SCHEMA_VERSION = 1


def run(config: DictConfig) -> None:
    """Measure, write ``config.output`` and the report, and print how well the table holds.

    Raises:
        ValueError: the machine lacks what `config` asks for.
    """
    found = run_on_ranks(_measure, accelerator=config.accelerator, devices=config.devices)
    if found is None:  # another rank of torchrun or srun writes it
        return

    # files
    cluster, output = found.cluster, Path(config.output)
    output.parent.mkdir(parents=True, exist_ok=True)
    cluster.save(output)
    folder = Path(HydraConfig.get().runtime.output_dir)
    _save_report(folder / "calibration.json", found)

    # the terminal
    _print_tables(found.points, found.changes)
    nodes = f"{cluster.num_nodes} node(s) x {cluster.devices_per_node} device(s)"
    print(f"measured {cluster.name}: {nodes}, in {found.seconds:.1f} s")
    if found.kept is not None and cluster.busy_share:
        print(
            f"the machine was busy: in {100 * cluster.busy_share:.0f} % of the time a rank waited "
            f"while other programs had its core. Measure again when it is quiet. {found.kept} "
            "keeps what was measured on a quiet machine before; without that, runs use this one "
            "until they find it quiet"
        )
    elif found.kept is not None:
        print(
            f"runs of {cluster.num_devices} rank(s) with equal settings on this machine use it "
            f"from {found.kept}"
        )
    print(f"written to {output}; use it elsewhere with strategy.cluster={output}")


class Calibration(NamedTuple):
    """What the ranks have measured.

    - `kept`: the file that later runs read; None: it could not be written;
    - `points`: the table against what was measured again;
    - `changes`: since an earlier calibration; None: there was none;
    - `seconds`: that all of it took.
    """

    cluster: Cluster
    kept: Path | None
    points: list[CheckedPoint]
    changes: list[Change] | None
    seconds: float


def _measure(device: torch.device, num_nodes: int) -> Calibration:
    """Measure on every rank, and check the table that comes of it."""
    start = time.perf_counter()
    # refresh: what is kept on this machine is measured anew
    measurements = Measurements.open(
        device=device, num_nodes=num_nodes, refresh=True, progress=print
    )
    # an earlier calibration is not used, but compared with
    before, cluster = measurements.cluster_before, measurements.cluster()
    # measured a second time, at the table's points: how well it holds
    points = check_calibration(cluster, device=device)
    # the file is there only where the folder of measurements can be written
    kept = (
        measurements.path if measurements.path is not None and measurements.path.is_file() else None
    )
    changes = None if before is None else changes_between(before, cluster)
    return Calibration(cluster, kept, points, changes, time.perf_counter() - start)


# ---- reports


def _save_report(path: Path, found: Calibration) -> None:
    """Write all points and changes as JSON."""
    record = {
        "schema_version": SCHEMA_VERSION,
        "seconds": found.seconds,
        "busy_share": found.cluster.busy_share,
        "constants": [each.to_dict() for each in summarize(found.points)],
        "points": [asdict(point) for point in found.points],
        "changes": None if found.changes is None else [each.to_dict() for each in found.changes],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=2) + "\n")


def _print_tables(points: Sequence[CheckedPoint], changes: Sequence[Change] | None) -> None:
    """Print the errors of each constant, then what changed since an earlier calibration."""
    # the table against a second measurement
    console = Console()
    columns = ["constant", "points", "median error", "largest", "where"]
    table = _table("the table against what was measured again", columns)
    for each in summarize(points):
        errors = _percent(each.median), _percent(each.largest)
        table.add_row(each.constant, str(each.points), *errors, each.at)
    console.print(table)
    if changes is None:
        console.print(
            "No calibration of these ranks was kept before, so there is none to compare this one "
            "with."
        )
        return

    # against an earlier calibration; shares of time are shown as they are
    columns = ["constant", "before", "now", "largest change", "median", "where"]
    table = _table("since the calibration before", columns)
    for change in changes:
        values = f"{change.before:.4g}", f"{change.now:.4g}"
        shown = (
            f"{v:.3f}" if change.is_share else _percent(v) for v in (change.largest, change.median)
        )
        table.add_row(change.constant, *values, *shown, change.at)
    console.print(table)
    if (found := largest_and_median(changes)) is not None:
        worst, median = found
        where = f" ({worst.at})" if worst.at else ""
        console.print(
            f"Half of the constants changed by at most {_percent(median)}; the most, "
            f"{worst.constant}{where}, by {_percent(worst.largest)}.",
            highlight=False,
        )


def _table(title: str, columns: Sequence[str]) -> Table:
    table = Table(title=title)
    for name in columns:
        table.add_column(name, justify="left" if name in ("constant", "where") else "right")
    return table


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"

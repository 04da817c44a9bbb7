"""`run.json` holds what a training run planned, predicted, measured and reached. The schema is in
docs/schemas.md.
"""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from rich.console import Console
from rich.table import Table

from lightning_topt import __version__
from lightning_topt.basics.units import format_bytes, format_seconds
from lightning_topt.plugins.step_monitor import StepMeasurement

SCHEMA_VERSION = 1


def build_record(
    trainer: pl.Trainer, *, measurement: StepMeasurement | None, metrics: Mapping[str, float]
) -> dict[str, Any]:
    """Return the record of a finished fit; `plan` and `predicted` are None under strategies that do
    not plan.
    """
    plan = getattr(trainer.strategy, "parallel_plan", None)
    predicted = None if plan is None else plan.to_dict()["predicted"]
    measured = None
    if measurement is not None:
        measured = {
            "steps": measurement.steps,
            "median_step_seconds": measurement.median_step_seconds,
            "peak_bytes_per_rank": list(measurement.peak_bytes_per_rank),
        }
    return {
        "schema_version": SCHEMA_VERSION,
        "command": ["topt", *sys.argv[1:]],
        "strategy": type(trainer.strategy).__name__,
        "world_size": trainer.world_size,
        "device": trainer.strategy.root_device.type,
        "precision": trainer.precision,
        "global_step": trainer.global_step,
        "plan": None if plan is None else plan.to_dict(),
        "predicted": predicted,
        "measured": measured,
        "metrics": dict(metrics),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "lightning": version("lightning"),
            "lightning_topt": __version__,
        },
    }


def write_record(record: Mapping[str, Any], path: Path) -> None:
    """Write `record` as JSON."""
    path.write_text(json.dumps(record, indent=2) + "\n")


def print_record(record: Mapping[str, Any], folder: Path) -> None:
    """Print one table for people: predicted and measured step time and peak memory per device, then
    the metrics.
    """
    predicted, measured = record["predicted"] or {}, record["measured"] or {}
    table = Table(title=_title(record))
    for column in ("", "predicted", "measured", "error"):
        table.add_column(column, justify="left" if not column else "right")
    seconds = (predicted.get("step_seconds"), measured.get("median_step_seconds"))
    table.add_row("step time (median)", *_cells(*seconds, show=format_seconds))
    for rank, peak in enumerate(measured.get("peak_bytes_per_rank", [])):
        table.add_row(
            f"peak memory, rank {rank}",
            *_cells(predicted.get("peak_bytes"), peak, show=format_bytes),
        )
    for name, value in record["metrics"].items():
        table.add_row(name, "", f"{value:.4f}", "")
    console = Console()
    console.print(table)
    if record["plan"] and record["plan"]["reason"]:
        console.print(record["plan"]["reason"], highlight=False)
    console.print(f"run folder: {folder}", highlight=False, soft_wrap=True)


def _title(record: Mapping[str, Any]) -> str:
    return (
        f"{record['strategy']} on {record['world_size']} {record['device']} rank(s), "
        f"{record['global_step']} steps"
    )


def _cells(
    predicted: float | None, measured: float | None, *, show: Callable[[float], str]
) -> tuple[str, str, str]:
    error = "" if not predicted or not measured else f"{100 * (predicted / measured - 1):+.1f} %"
    return _shown(predicted, show), _shown(measured, show), error


def _shown(value: float | None, show: Callable[[float], str]) -> str:
    return "-" if value is None else show(value)

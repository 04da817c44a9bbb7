"""`topt train`: fit, validate the best checkpoint, and write and print `run.json`.

`run.json` holds what a run planned, predicted, measured and reached; its schema is in
docs/reference/schemas.md. `topt predict runs=FOLDER` reads it.
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
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from hydra.utils import instantiate
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from omegaconf import DictConfig
from rich.console import Console
from rich.table import Table

from lightning_topt import __version__
from lightning_topt.basics.units import format_bytes, format_seconds
from lightning_topt.plugins.monitors import StepMeasurement, StepMonitor

SCHEMA_VERSION = 1


def run(config: DictConfig) -> None:
    """Train what `config` describes; files go to Hydra's run folder.

    Raises:
        ValueError: for a multirun. Ranks run the command line again, which would start the whole
            sweep on each.
    """
    if HydraConfig.get().mode == RunMode.MULTIRUN:
        raise ValueError(
            "topt train does not run sweeps (--multirun): start one `topt train` for each value"
        )
    folder = Path(HydraConfig.get().runtime.output_dir)
    # before the model is built: its weights come from the seed too
    pl.seed_everything(config.seed, workers=True)

    # what the configuration names
    datamodule: pl.LightningDataModule = instantiate(config.data)
    model: pl.LightningModule = instantiate(config.model)
    callbacks = [instantiate(callback, _convert_="all") for callback in config.callbacks.values()]
    if config.optimizer_step is not None:
        callbacks.append(instantiate(config.optimizer_step, _convert_="all"))
    trainer: pl.Trainer = instantiate(
        config.trainer,
        strategy=instantiate(config.strategy, _convert_="all"),
        callbacks=callbacks,
        logger=CSVLogger(folder, name="csv", version=""),
        _convert_="all",
    )

    # the fit, and the metrics of its best checkpoint; of the last weights where none was saved
    trainer.fit(model, datamodule=datamodule)
    checkpoint = trainer.checkpoint_callback
    saved = isinstance(checkpoint, ModelCheckpoint) and bool(checkpoint.best_model_path)
    results = trainer.validate(
        model, datamodule=datamodule, ckpt_path="best" if saved else None, verbose=False
    )
    metrics = {name: float(value) for result in results for name, value in result.items()}

    # the record: rank 0 writes what all have measured
    measurements = [
        callback.measurement for callback in callbacks if isinstance(callback, StepMonitor)
    ]
    # of several monitors the first one counts
    if trainer.is_global_zero:
        record = build_record(trainer, measurement=next(iter(measurements), None), metrics=metrics)
        (folder / "run.json").write_text(json.dumps(record, indent=2) + "\n")
        print_record(record, folder)


def build_record(
    trainer: pl.Trainer, *, measurement: StepMeasurement | None, metrics: Mapping[str, float]
) -> dict[str, Any]:
    """Return the record of a finished fit.

    `plan` and `predicted` are None under strategies that do not plan.
    """
    plan = getattr(trainer.strategy, "parallel_plan", None)  # of strategies that plan
    predicted = None if plan is None else plan.to_dict()["predicted"]
    measured = None
    # without a StepMonitor nothing is measured
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


def print_record(record: Mapping[str, Any], folder: Path) -> None:
    """Print a table of a record for people.

    Predicted and measured step time, peak memory of each rank, then the metrics.
    """
    # either may be missing: strategies that do not plan, runs without a StepMonitor
    predicted, measured = record["predicted"] or {}, record["measured"] or {}
    title = (
        f"{record['strategy']} on {record['world_size']} {record['device']} rank(s), "
        f"{record['global_step']} steps"
    )
    table = Table(title=title)
    for column in ("", "predicted", "measured", "error"):
        table.add_column(column, justify="left" if not column else "right")
    # one peak is predicted for all ranks; each rank has measured its own
    seconds = (predicted.get("step_seconds"), measured.get("median_step_seconds"))
    table.add_row("step time (median)", *_cells(*seconds, show=format_seconds))
    for rank, peak in enumerate(measured.get("peak_bytes_per_rank", [])):
        table.add_row(
            f"peak memory, rank {rank}",
            *_cells(predicted.get("peak_bytes"), peak, show=format_bytes),
        )
    # metrics are not predicted
    for name, value in record["metrics"].items():
        table.add_row(name, "", f"{value:.4f}", "")

    console = Console()
    console.print(table)
    if record["plan"] and record["plan"]["reason"]:
        console.print(record["plan"]["reason"], highlight=False)
    console.print(f"run folder: {folder}", highlight=False, soft_wrap=True)


def _cells(
    predicted: float | None, measured: float | None, *, show: Callable[[float], str]
) -> tuple[str, str, str]:
    """Return what is predicted, what is measured, and the error of the prediction."""
    # relative to what is measured; + means predicted too large
    error = "" if not predicted or not measured else f"{100 * (predicted / measured - 1):+.1f} %"
    shown = ["-" if value is None else show(value) for value in (predicted, measured)]
    return shown[0], shown[1], error

"""`topt train`: fit, validate the best checkpoint, and write and print `run.json`.

`run.json` holds what a run planned, predicted, measured and reached; its schema is in
docs/reference/schemas.md. `topt predict runs=FOLDER` reads it. Where a plan was searched, the run
folder has it as ``plan.yaml`` and all that was searched as ``frontier.html``.
"""

from __future__ import annotations

import json
import logging
import platform
import shutil
import sys
import textwrap
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from hydra.core.hydra_config import HydraConfig
from hydra.utils import instantiate
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from omegaconf import DictConfig
from rich.console import Console

from lightning_topt import __version__
from lightning_topt.basics.units import format_bytes, format_seconds
from lightning_topt.cli.example_step import model_name
from lightning_topt.cli.plan_steps import memory_limit_of, save_frontier_page
from lightning_topt.costs.accuracy import Accuracy, sentence_of
from lightning_topt.plan.frontier_report import table
from lightning_topt.plan.parallel_plan import ParallelPlan
from lightning_topt.plugins.monitors import StepMeasurement, StepMonitor

SCHEMA_VERSION = 1
# what the words of a plan mean, in the order in which they build on one another
_MEANINGS = {
    "DDP": "each rank keeps all parameters, gradients and optimizer state",
    "ZeRO-1": "each rank keeps its part of the optimizer state",
    "ZeRO-2": "each rank keeps its part of the gradients and of the optimizer state",
    "ZeRO-3": "each rank keeps its part of the parameters, too",
    "recompute": "activations are computed again in the backward pass, not kept",
    "compile": "the layers run compiled code",
    "split": "the layers are cut over the ranks, which compute each of them together",
    "stages": "each rank runs a part of the layers, one after the other",
}


def run(config: DictConfig) -> float | None:
    """Train what `config` describes; files go to Hydra's run folder.

    Returns:
        the configuration's metric of the best checkpoint, which Hydra's sweepers go by
    """
    folder = Path(HydraConfig.get().runtime.output_dir)
    logging.getLogger("lightning.pytorch.utilities.rank_zero").addFilter(_fits_terminal)
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
        # SLURM's requeued jobs go on from a file there, which no other job may find
        default_root_dir=config.trainer.get("default_root_dir") or folder,
        _convert_="all",
    )

    # A requeued job goes on in this folder, and Lightning's logger would delete earlier metrics.
    earlier = folder / "csv" / "metrics.csv"
    if trainer.is_global_zero and earlier.is_file():
        earlier.rename(earlier.with_name(f"metrics.{len([*earlier.parent.glob('*.csv')])}.csv"))

    # the fit, and the metrics of its best checkpoint; of the last weights where none was saved
    trainer.fit(model, datamodule=datamodule)
    checkpoint = trainer.checkpoint_callback
    saved = isinstance(checkpoint, ModelCheckpoint) and bool(checkpoint.best_model_path)
    results = trainer.validate(
        model, datamodule=datamodule, ckpt_path="best" if saved else None, verbose=False
    )
    metrics = {name: float(value) for result in results for name, value in result.items()}

    # rank 0 writes what all ranks have measured
    measured = (each.measurement for each in callbacks if isinstance(each, StepMonitor))
    if trainer.is_global_zero:
        report(trainer, folder, measurement=next(measured, None), metrics=metrics)
    return metrics.get(config.metric.name)


def report(
    trainer: pl.Trainer,
    folder: Path,
    *,
    measurement: StepMeasurement | None,
    metrics: Mapping[str, float],
) -> None:
    """Write and print the record of a finished fit, and write its plan."""
    record = build_record(trainer, measurement=measurement, metrics=metrics)
    (folder / "run.json").write_text(json.dumps(record, indent=2) + "\n")
    strategy: Any = trainer.strategy
    # the cluster that the strategy was given, if any: it may know how far predictions were off
    cluster = getattr(getattr(strategy, "request", None), "cluster", None)
    print_record(record, accuracy=None if cluster is None else cluster.accuracy)
    if (plan := getattr(strategy, "parallel_plan", None)) is not None:
        plan.save(folder / "plan.yaml")
    if (planning := getattr(strategy, "planning", None)) is not None:  # a plan was searched
        planning.frontier.save(folder / "frontier.json")
        page, _ = save_frontier_page(
            folder,
            planning,
            model=model_name(planning.graph),
            where=planning.chosen.plan.cluster,
            memory_limit=memory_limit_of(strategy.request, cluster),
        )
        _say(f"Report, for a browser: {page}", soft_wrap=True)
    _say(f"run folder: {folder}", soft_wrap=True)


def _fits_terminal(record: logging.LogRecord) -> bool:
    # Wrap a line of ours or Lightning's in a terminal; leave out rules and advertisements
    text = record.getMessage()
    # the width of the terminal, or COLUMNS; 0: this is no terminal, and lines stay as they are
    if width := shutil.get_terminal_size((0, 0)).columns:
        record.msg, record.args = textwrap.fill(text, width), ()
    return "-" * 100 not in text and "Tip:" not in text


def build_record(
    trainer: pl.Trainer, *, measurement: StepMeasurement | None, metrics: Mapping[str, float]
) -> dict[str, Any]:
    """Return the record of a finished fit.

    `plan` and `predicted` are None under strategies that do not plan. `predicted` is None too
    where the plan's prediction is of a step with more or fewer batches (`accumulate_grad_batches`).
    """
    plan = getattr(trainer.strategy, "parallel_plan", None)  # of strategies that plan
    # a step of other micro-batches than the measured one is no prediction of it
    parts = trainer.accumulate_grad_batches
    predicted = measured = None
    if plan is not None and plan.accumulate == parts:
        predicted = plan.to_dict()["predicted"]
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
        "accumulate": parts,
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


def print_record(record: Mapping[str, Any], *, accuracy: Accuracy | None) -> None:
    """Print the plan and why, what was predicted and measured, and the metrics.

    `accuracy` says how far predictions for the cluster were off, where that was measured.
    """
    # either may be missing: strategies that do not plan, runs without a StepMonitor
    predicted, measured = record["predicted"] or {}, record["measured"] or {}
    _say("")
    if record["plan"]:
        summary = ParallelPlan.from_dict(record["plan"]).summary()
        _say(f"Plan, as numbers of blocks and how they run: {summary}", style="bold")
        for word, meaning in _MEANINGS.items():
            if word in summary:
                _say(f"  {word}: {meaning}")
        if record["plan"]["reason"]:
            _say(f"Why: {record['plan']['reason']}")

    title = (
        f"{record['strategy']} on {record['world_size']} {record['device']} rank(s), "
        f"{record['global_step']} steps"
    )
    rows = table("", "predicted", "measured", "error")
    rows.title, rows.title_justify = title, "left"
    seconds = predicted.get("step_seconds"), measured.get("median_step_seconds")
    rows.add_row("step time (median)", *_cells(*seconds, show=format_seconds))
    # one peak is predicted for all ranks; each rank has measured its own
    for rank, peak in enumerate(measured.get("peak_bytes_per_rank", [])):
        cells = _cells(predicted.get("peak_bytes"), peak, show=format_bytes)
        rows.add_row(f"peak memory, rank {rank}", *cells)
    for name, value in record["metrics"].items():  # which are not predicted
        rows.add_row(name, "", f"{value:.4f}", "")
    Console().print(rows)
    if predicted:
        _say(sentence_of(accuracy))
    elif record["plan"] and record["plan"]["predicted"]:
        _say(
            f"The plan's prediction is of a step with {record['plan'].get('accumulate', 1)} "
            f"batch(es) and is not compared: a step had {record['accumulate']} "
            "(trainer.accumulate_grad_batches)."
        )


def _say(text: str, **style: Any) -> None:
    Console().print(text, highlight=False, markup=False, **style)


def _cells(
    predicted: float | None, measured: float | None, *, show: Callable[[float], str]
) -> tuple[str, str, str]:
    # what is predicted, what is measured, and the error: + means predicted too large
    error = "" if not predicted or not measured else f"{100 * (predicted / measured - 1):+.1f} %"
    left, right = ("-" if value is None else show(value) for value in (predicted, measured))
    return left, right, error

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
from rich.table import Table

from lightning_topt import __version__
from lightning_topt.basics.units import format_bytes, format_seconds
from lightning_topt.cli.example_step import model_name
from lightning_topt.costs.cluster import Cluster, sentence_of
from lightning_topt.plan.parallel_plan import ParallelPlan
from lightning_topt.plugins.monitors import StepMeasurement, StepMonitor
from lightning_topt.plugins.plan_artifacts import memory_limit_of, save_frontier_page

SCHEMA_VERSION = 1
# what the words of a plan mean, in the order in which they build on one another
_MEANINGS = {
    "DDP": "each rank keeps all parameters, gradients and optimizer state",
    "ZeRO-1": "each rank keeps its part of the optimizer state",
    "ZeRO-2": "each rank keeps its part of the gradients and of the optimizer state",
    "ZeRO-3": "each rank keeps its part of the parameters, too",
    "recompute": "activations are computed again in the backward pass, not kept",
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

    if trainer.is_global_zero:
        keep_metrics(folder / "csv")

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
        report(trainer, folder, measurement=next(iter(measurements), None), metrics=metrics)
    return metrics.get(config.metric.name)


def keep_metrics(folder: Path) -> None:
    """Rename the metrics of an earlier fit in a folder, which Lightning's logger would delete.

    A requeued job goes on there: its earlier steps are in ``metrics.1.csv``, ``metrics.2.csv`` ...
    """
    metrics = folder / "metrics.csv"
    if metrics.is_file():
        earlier = len([*folder.glob("metrics.*.csv")])
        metrics.rename(folder / f"metrics.{earlier + 1}.csv")


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
    page = None
    try:
        page = save_plan(trainer, folder)
    finally:  # what was trained and measured is said, whatever the plan's files come to
        print_record(record, folder, page=page, cluster=_cluster_of(trainer))


def save_plan(trainer: pl.Trainer, folder: Path) -> Path | None:
    """Write the plan of a finished fit, and what was searched as a page; return the page."""
    strategy: Any = trainer.strategy
    if (plan := getattr(strategy, "parallel_plan", None)) is not None:
        plan.save(folder / "plan.yaml")
    planning = getattr(strategy, "planning", None)
    if planning is None:  # nothing was searched
        return None
    planning.frontier.save(folder / "frontier.json")
    limit = memory_limit_of(strategy.request, _cluster_of(trainer))
    where, model = planning.chosen.plan.cluster, model_name(planning.graph)
    return save_frontier_page(folder, planning, model=model, where=where, memory_limit=limit)[0]


def _cluster_of(trainer: pl.Trainer) -> Cluster | None:
    # The cluster that the strategy was given; None: it has none, or has measured
    request = getattr(trainer.strategy, "request", None)
    return None if request is None else request.cluster


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
    `machine_was_busy` where other programs had the cores while the machine was measured for the
    plan, or in the measured steps: the two then say nothing about each other.
    """
    plan = getattr(trainer.strategy, "parallel_plan", None)  # of strategies that plan
    # a step of other micro-batches than the measured one is no prediction of it
    parts = trainer.accumulate_grad_batches
    predicted = measured = None
    if plan is not None and plan.accumulate == parts:
        predicted = plan.to_dict()["predicted"]
    # of what was measured for the plan, or elsewhere for the cluster that was given
    share = getattr(trainer.strategy, "planned_core_wait_share", 0.0)
    # without a StepMonitor nothing is measured
    if measurement is not None:
        measured = {
            "steps": measurement.steps,
            "median_step_seconds": measurement.median_step_seconds,
            "peak_bytes_per_rank": list(measurement.peak_bytes_per_rank),
            "core_wait_share": measurement.core_wait_share,
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
        "planned_core_wait_share": share,
        "measured": measured,
        "machine_was_busy": share > 0 or (measurement is not None and measurement.machine_was_busy),
        "metrics": dict(metrics),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "lightning": version("lightning"),
            "lightning_topt": __version__,
        },
    }


def print_record(
    record: Mapping[str, Any],
    folder: Path,
    *,
    page: Path | None = None,
    cluster: Cluster | None = None,
) -> None:
    """Print a record for people.

    The plan and why, predicted and measured step time, peak memory of each rank, metrics, and where
    the files are. `cluster` knows how far predictions were off, where that was measured.
    """
    # either may be missing: strategies that do not plan, runs without a StepMonitor
    predicted, measured = record["predicted"] or {}, record["measured"] or {}
    console = Console()

    def say(text: str, **style: Any) -> None:
        console.print(text, highlight=False, markup=False, **style)

    say("")
    # what was planned
    if record["plan"]:
        summary = ParallelPlan.from_dict(record["plan"]).summary()
        say(f"Plan, as numbers of blocks and how they run: {summary}", style="bold")
        for word, meaning in _MEANINGS.items():
            if word in summary:
                say(f"  {word}: {meaning}")
        if record["plan"]["reason"]:
            say(f"Why: {record['plan']['reason']}")

    # what was predicted and measured
    title = (
        f"{record['strategy']} on {record['world_size']} {record['device']} rank(s), "
        f"{record['global_step']} steps"
    )
    table = Table(title=title, title_justify="left")
    for column in ("", "predicted", "measured", "error"):
        table.add_column(column, justify="left" if not column else "right")
    # one peak is predicted for all ranks, busy or not; each rank has measured its own
    accuracy = None if cluster is None else cluster.accuracy
    seconds = (predicted.get("step_seconds"), measured.get("median_step_seconds"))
    share = None if accuracy is None else accuracy.seconds.p90
    cells = _cells(*seconds, show=format_seconds, share=share)
    if record["machine_was_busy"] and cells[2]:
        cells = (*cells[:2], "machine was busy")
    table.add_row("step time (median)", *cells)
    figure = None if accuracy is None else accuracy.bytes
    share = None if figure is None else figure.p90
    for rank, peak in enumerate(measured.get("peak_bytes_per_rank", [])):
        cells = _cells(predicted.get("peak_bytes"), peak, show=format_bytes, share=share)
        table.add_row(f"peak memory, rank {rank}", *cells)
    # metrics are not predicted
    for name, value in record["metrics"].items():
        table.add_row(name, "", f"{value:.4f}", "")
    console.print(table)
    if predicted:
        say(sentence_of(accuracy))
    elif record["plan"] and record["plan"]["predicted"]:
        say(
            f"The plan's prediction is of a step with {record['plan'].get('accumulate', 1)} "
            f"batch(es) and is not compared: a step had {record['accumulate']} "
            "(trainer.accumulate_grad_batches)."
        )
    if record["machine_was_busy"]:
        say(_busy_sentence(record), style="yellow")

    # where it is
    if page is not None:
        say(f"Report, for a browser: {page}", soft_wrap=True)
    say(f"run folder: {folder}", soft_wrap=True)


def _busy_sentence(record: Mapping[str, Any]) -> str:
    # What other programs did to the two times, as a line for people
    share = record["planned_core_wait_share"]
    if share:
        return (
            "The machine was busy while it was measured for the plan: in "
            f"{100 * share:.0f} % of the time a rank waited while other programs had its core. "
            "A run that finds the machine quiet measures again."
        )
    share = record["measured"]["core_wait_share"]
    return (
        f"The machine was busy: in {100 * share:.0f} % of the measured time a rank waited while "
        "other programs had its core. On a quiet machine steps take less."
    )


def _cells(
    predicted: float | None,
    measured: float | None,
    *,
    show: Callable[[float], str],
    share: float | None = None,
) -> tuple[str, str, str]:
    """Return what is predicted, what is measured, and the error of the prediction.

    Nine of ten earlier predictions were off by less than `share`.
    """
    # relative to what is measured; + means predicted too large
    error = "" if not predicted or not measured else f"{100 * (predicted / measured - 1):+.1f} %"
    shown = ["-" if value is None else show(value) for value in (predicted, measured)]
    if predicted is not None and share is not None:
        shown[0] += f" \u00b1 {100 * share:.0f} %"
    return shown[0], shown[1], error

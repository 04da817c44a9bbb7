"""`topt stalls`: what is the wait for data made of, and what would remove it?

    measure     the training loader of a data module, under the model's own training loop
    serving     let a data module give other batches, as each run of a measurement does

No training is kept. ``stalls.json`` (docs/reference/schemas.md) goes to Hydra's run folder.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from hydra.core.hydra_config import HydraConfig
from hydra.utils import instantiate
from omegaconf import DictConfig
from rich.console import Console
from rich.table import Table

from lightning_topt.basics.units import format_seconds
from lightning_topt.cli.example_step import plugins_of_planning
from lightning_topt.data.stalls import StallMeasurement, Watched, measure_stalls

REMEDIES = {  # by part of a batch's time
    "step": "a faster accelerator",
    "fetching": "a cache, a faster link, more workers",
    "preparing": "a cache, more cores",
    "loading": "another number of workers",
}
QUIET: dict[str, Any] = {  # what the Trainer of a measurement does not do
    "strategy": "auto",
    "logger": False,
    "callbacks": [],
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "max_epochs": 1,
    "max_steps": -1,
    "limit_train_batches": 1.0,
    "limit_val_batches": 0,
    "num_sanity_val_steps": 0,
}


def run(config: DictConfig) -> None:
    """Measure what `config` describes; files go to Hydra's run folder.

    Raises:
        ValueError: for several devices; and what `measure_stalls` raises.
    """
    pl.seed_everything(config.seed, workers=True)
    datamodule: pl.LightningDataModule = instantiate(config.data)
    model: pl.LightningModule = instantiate(config.model)
    measurement = measure(
        model,
        datamodule,
        trainer=lambda: instantiate(
            config.trainer, **QUIET, **plugins_of_planning(config.trainer), _convert_="all"
        ),
        seconds=config.seconds,
        memory_bytes=config.memory_bytes,
        cores=config.cores,
        seed=config.seed,
    )
    folder = Path(HydraConfig.get().runtime.output_dir)
    record = {"schema_version": 2, **measurement.to_dict()}
    (folder / "stalls.json").write_text(json.dumps(record, indent=2) + "\n")
    console = Console()
    print_report(measurement, console=console)
    console.print(f"run folder: {folder}", highlight=False, soft_wrap=True)


def print_report(measurement: StallMeasurement, *, console: Console) -> None:
    """Print the parts of a batch's time, and what would help."""
    title = (
        f"{100 * measurement.fraction:.0f} % of training waits for data "
        f"({measurement.num_workers} workers, {measurement.cores} cores, batches of "
        f"{measurement.batch_size})"
    )
    table = Table(title=title, title_justify="left")
    for column in ("per batch", "time", "share", "what removes it"):
        table.add_column(column, justify="right" if column in ("time", "share") else "left")
    total = measurement.cold.batch_seconds
    for name, seconds in measurement.parts.items():
        share = f"{100 * seconds / total:.0f} %"
        table.add_row(name, format_seconds(seconds), share, REMEDIES[name])
    speed = f"{measurement.batch_size / total:.0f} samples/s"
    table.add_row("all", format_seconds(total), "100 %", speed)
    console.print(table)
    for sentence in measurement.advice:
        console.print(sentence, highlight=False)


def measure(
    model: pl.LightningModule,
    datamodule: pl.LightningDataModule,
    *,
    trainer: Callable[[], pl.Trainer],
    **options: Any,
) -> StallMeasurement:
    """Measure the data module's training loader under the model's training loop.

    Every run is a fit of one epoch. The model's weights change.

    Args:
        model: the LightningModule.
        datamodule: gives the loader.
        trainer: makes a new Trainer of one device at each call.
        **options: of `measure_stalls`.
    """
    # one process: the loader is that of a rank
    first: pl.Trainer = trainer()
    if first.world_size > 1:
        raise ValueError(
            f"topt stalls measures one process, not {first.world_size}: set trainer.devices=1, and "
            "cores to its share"
        )
    # set up once, as a fit would; the fits below are given the batches
    datamodule.trainer = first
    datamodule.prepare_data()
    datamodule.setup("fit")
    loader = datamodule.train_dataloader()

    # each run of the measurement is a fit of its own, on the batches that it is given
    def train(batches: Watched) -> None:
        with serving(datamodule, batches):
            trainer().fit(model, datamodule=datamodule)

    return measure_stalls(loader, train=train, **options)


@contextmanager
def serving(datamodule: pl.LightningDataModule, batches: object) -> Iterator[None]:
    """Let the data module, set up already, give `batches` as its training loader.

    Its hooks of a batch's transfer stay.
    """
    # attributes of the object, which hide the methods of its class
    given = {
        "prepare_data": lambda: None,
        "setup": lambda stage: None,
        "teardown": lambda stage: None,
        "train_dataloader": lambda: batches,
    }
    # what the object itself had there is put back
    before = {name: vars(datamodule)[name] for name in given if name in vars(datamodule)}
    vars(datamodule).update(given)
    try:
        yield
    finally:
        for name in given:
            del vars(datamodule)[name]
        vars(datamodule).update(before)

"""`topt train` fits, validates the best checkpoint and writes `run.json`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from hydra.utils import instantiate
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from omegaconf import DictConfig

from lightning_topt.cli.run_record import build_record, print_record, write_record
from lightning_topt.plugins.step_monitor import StepMonitor


def run(config: DictConfig) -> None:
    """Train what `config` describes; files go to Hydra's run folder.

    Raises ValueError for a multirun: ranks run the command line again, which would start the whole
    sweep on each.
    """
    if HydraConfig.get().mode == RunMode.MULTIRUN:
        raise ValueError(
            "topt train does not run sweeps (--multirun): start one `topt train` for each value"
        )
    folder = Path(HydraConfig.get().runtime.output_dir)
    pl.seed_everything(config.seed, workers=True)
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
    trainer.fit(model, datamodule=datamodule)
    metrics = _best_metrics(trainer, model, datamodule)
    measurements = [
        callback.measurement for callback in callbacks if isinstance(callback, StepMonitor)
    ]
    if trainer.is_global_zero:
        record = build_record(trainer, measurement=next(iter(measurements), None), metrics=metrics)
        write_record(record, folder / "run.json")
        print_record(record, folder)


def _best_metrics(
    trainer: pl.Trainer, model: pl.LightningModule, datamodule: pl.LightningDataModule
) -> dict[str, Any]:
    """Validation metrics of the best checkpoint; of the last weights where none was saved."""
    checkpoint = trainer.checkpoint_callback
    saved = isinstance(checkpoint, ModelCheckpoint) and bool(checkpoint.best_model_path)
    results = trainer.validate(
        model, datamodule=datamodule, ckpt_path="best" if saved else None, verbose=False
    )
    return {name: float(value) for result in results for name, value in result.items()}

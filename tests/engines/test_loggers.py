"""What monitors log, read back from loggers: CSV, TensorBoard, W&B (offline) and MLflow (files)."""

from __future__ import annotations

import csv
import importlib
import re
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.loggers import CSVLogger, MLFlowLogger, TensorBoardLogger, WandbLogger

from lightning_topt import AutoParallelStrategy, StallMonitor
from lightning_topt.costs.cluster import Cluster, Device, Link
from lightning_topt.plugins.monitors import StepMonitor
from tests.plugins.trainer_ranks import OwnShare, RecordingGPT, compressed, make_trainer, on_ranks

STEPS = {"topt/step_seconds", "topt/predicted_step_seconds"}
WAITS = {"topt/data_wait_seconds", "topt/data_wait_share", "topt/data_batch_seconds"}
EXCHANGE = {"topt/exchange_bytes_per_step", "topt/exchange_exposed_seconds"}
LINK = Link(1e-5, 1e9)
CLUSTER = Cluster(
    "toy", Device("toy", 1 << 40, {"float32": 1e10}, 1e10), 2, 1, LINK, LINK, backend="gloo"
)


def read_csv(folder: str) -> set[str]:
    with next(Path(folder).rglob("metrics.csv")).open() as file:
        rows = [*csv.DictReader(file)]
    return {name for row in rows for name, value in row.items() if value}


def read_tensorboard(folder: str) -> set[str]:
    module = importlib.import_module("tensorboard.backend.event_processing.event_accumulator")
    events = module.EventAccumulator(folder)
    events.Reload()
    return set(events.Tags()["scalars"])


def read_wandb(folder: str) -> set[str]:
    data = next(Path(folder).rglob("*.wandb")).read_bytes()  # names are plain text in it
    return {name.decode() for name in re.findall(rb"topt/[a-z_]+", data)}


def read_mlflow(folder: str) -> set[str]:
    paths = [path for path in Path(folder).rglob("*") if path.is_file() and "metrics" in path.parts]
    return {"/".join(path.parts[path.parts.index("metrics") + 1 :]) for path in paths}


LOGGERS: dict[str, Any] = {
    "csv": (None, lambda folder: CSVLogger(folder, flush_logs_every_n_steps=1), read_csv),
    "tensorboard": (
        "tensorboard",
        lambda f: TensorBoardLogger(f, name="", version=""),
        read_tensorboard,
    ),
    "wandb": ("wandb", lambda folder: WandbLogger(save_dir=folder, offline=True), read_wandb),
    "mlflow": ("mlflow", lambda folder: MLFlowLogger(tracking_uri=f"file:{folder}"), read_mlflow),
}


def fit(rank: int, kind: str, folder: str, exchanges: bool) -> None:
    with pytest.MonkeyPatch.context() as patch:  # of a process that serves other tests
        patch.setenv("WANDB_DATA_DIR", f"{folder}/data")
        patch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
        fit_with(rank, kind, folder, exchanges)


def fit_with(rank: int, kind: str, folder: str, exchanges: bool) -> None:
    strategy = (
        compressed() if exchanges else AutoParallelStrategy(cluster=CLUSTER, objective="memory")
    )
    _, make, _ = LOGGERS[kind]
    trainer = make_trainer(
        strategy,
        devices=2,
        logger=make(folder) if rank == 0 else False,
        callbacks=[StepMonitor(warmup_steps=1), StallMonitor()],
        log_every_n_steps=1,
        max_epochs=2,
    )
    trainer.fit(RecordingGPT(), OwnShare(8, length=64))
    for logger in trainer.loggers:
        logger.finalize("success")
    if kind == "wandb" and rank == 0:
        importlib.import_module("wandb").finish()


@pytest.mark.parametrize("exchanges", [False, True], ids=["plan", "exchange"])
@pytest.mark.parametrize("kind", LOGGERS)
def test_names_reach_the_logger(
    kind: str, exchanges: bool, tmp_path: Path, monkeypatch: Any
) -> None:
    package, _, read = LOGGERS[kind]
    if package is not None:
        pytest.importorskip(package, reason=f"no {package}")
    on_ranks(fit, kind, str(tmp_path), exchanges)
    assert read(str(tmp_path)) >= WAITS | (EXCHANGE if exchanges else STEPS)

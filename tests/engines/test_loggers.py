"""What monitors log, read back from loggers: CSV, TensorBoard, W&B (offline) and MLflow (files)."""

from __future__ import annotations

import csv
import importlib
import json
import re
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.loggers import CSVLogger, MLFlowLogger, TensorBoardLogger, WandbLogger

from lightning_topt import AutoParallelStrategy, StallMonitor
from lightning_topt.costs.cluster import Cluster, Device, Link
from lightning_topt.plugins.monitors import StepMonitor
from tests.plugins.trainer_ranks import OwnShare, RecordingGPT, compressed, make_trainer, on_ranks
from tests.processes import wait_until

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


# ---- the plan ------------------------------------------------------------------------------------


def plan_in_tensorboard(folder: str) -> tuple[dict[str, Any], set[str]]:
    module = importlib.import_module("tensorboard.backend.event_processing.event_accumulator")
    events = module.EventAccumulator(folder)
    events.Reload()
    (event,) = events.Tensors("topt/plan/text_summary")
    (text,) = event.tensor_proto.string_val
    return json.loads(text.decode().removeprefix("```json").removesuffix("```")), set()


def plan_in_wandb(folder: str) -> tuple[dict[str, Any], set[str]]:
    # W&B keeps copies of the files of an artifact until the run is uploaded. Its own process writes
    # the record of the run, the last part after the run is over.
    path = next(Path(folder).rglob("*.wandb"))
    wait_until(lambda: b"topt-plan-" in path.read_bytes() and b"plan.json" in path.read_bytes())
    record = path.read_bytes()
    staged = [path.read_bytes() for path in Path(folder, "data").rglob("*") if path.is_file()]
    (plan,) = [content for content in staged if content.startswith(b"{")]
    pages = [content for content in staged if b"<html" in content[:500]]
    return json.loads(plan), {"frontier.html"} if pages and b"frontier.html" in record else set()


def plan_in_mlflow(folder: str) -> tuple[dict[str, Any], set[str]]:
    (plan,) = Path(folder).rglob("artifacts/topt/plan.json")
    return json.loads(plan.read_text()), {path.name for path in plan.parent.glob("*.html")}


PLANS: dict[str, Any] = {
    "tensorboard": plan_in_tensorboard,
    "wandb": plan_in_wandb,
    "mlflow": plan_in_mlflow,
}


def fit(rank: int, kind: str, folder: str, exchanges: bool) -> dict[str, Any] | None:
    with pytest.MonkeyPatch.context() as patch:  # of a process that serves other tests
        patch.setenv("WANDB_DATA_DIR", f"{folder}/data")
        patch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
        return fit_with(rank, kind, folder, exchanges)


def fit_with(rank: int, kind: str, folder: str, exchanges: bool) -> dict[str, Any] | None:
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
    plan = None if exchanges else trainer.strategy.parallel_plan
    return None if plan is None else plan.to_dict()


@pytest.mark.parametrize("exchanges", [False, True], ids=["plan", "exchange"])
@pytest.mark.parametrize("kind", LOGGERS)
def test_names_reach_the_logger(
    kind: str, exchanges: bool, tmp_path: Path, monkeypatch: Any
) -> None:
    package, _, read = LOGGERS[kind]
    if package is not None:
        pytest.importorskip(package, reason=f"no {package}")
    plans = on_ranks(fit, kind, str(tmp_path), exchanges)
    if kind in PLANS and not exchanges:
        plan, pages = PLANS[kind](str(tmp_path))
        assert plan == plans[0]
        assert pages == (set() if kind == "tensorboard" else {"frontier.html"})
    assert read(str(tmp_path)) >= WAITS | (EXCHANGE if exchanges else STEPS)

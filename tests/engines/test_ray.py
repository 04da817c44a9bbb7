"""Fits that Ray starts: its `TorchTrainer`, two workers of a local Ray."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader

from lightning_topt import AutoParallelStrategy, CompressedDDPStrategy
from lightning_topt.communication import Dense

ray = pytest.importorskip("ray", reason="no ray[train]")
train = pytest.importorskip("ray.train", reason="no ray[train]")

ROOT = Path(__file__).parents[2]
STEPS, EPOCHS = 8, 3


class Module(L.LightningModule):
    """Notes the losses of all steps, and is killed where a test wants that."""

    def __init__(self, notes: Path, killed_at: int | None) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(
            torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1)
        )
        self.notes, self.killed_at = notes, killed_at

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss: torch.Tensor = (self.net(batch) - batch.sum(1, keepdim=True)).square().mean()
        return loss

    def on_train_batch_end(self, outputs: Any, batch: torch.Tensor, batch_idx: int) -> None:
        note = {"rank": self.global_rank, "step": self.global_step, "loss": float(outputs["loss"])}
        with (self.notes / f"rank-{self.global_rank}").open("a") as file:
            file.write(json.dumps(note) + "\n")
        first = self.notes / "killed"
        if self.global_step == self.killed_at and self.global_rank == 1 and not first.exists():
            first.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.log("val_loss", self.net(batch).square().mean(), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), 1e-2)


def fit(config: dict[str, Any]) -> None:
    """What a worker runs."""
    from ray.train.lightning import RayDDPStrategy, RayLightningEnvironment, RayTrainReportCallback

    strategies = {
        "ddp": RayDDPStrategy,
        "topt": AutoParallelStrategy,
        "zero2": lambda: AutoParallelStrategy(plan="zero2"),
        "topt_compressed": lambda: CompressedDDPStrategy(Dense()),
    }
    folder = Path(config["folder"])
    L.seed_everything(0)
    callbacks: list[Any] = [ModelCheckpoint(folder / "checkpoints", save_last=True)]
    if config["reports"]:
        callbacks.append(RayTrainReportCallback())
    trainer = L.Trainer(
        strategy=strategies[config["strategy"]](),
        accelerator="cpu",
        devices=2,
        plugins=[RayLightningEnvironment()],
        max_epochs=EPOCHS,
        logger=False,
        callbacks=callbacks,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    data = torch.linspace(-1, 1, STEPS * 2 * 4 * 8).reshape(-1, 8)
    module = Module(folder, config["killed_at"])
    trainer.fit(
        module, DataLoader(data, 4, shuffle=True), DataLoader(data[:8], 4), ckpt_path="last"
    )
    if trainer.is_global_zero:
        validated = float(trainer.callback_metrics["val_loss"])
        (folder / "end").write_text(
            json.dumps({"ranks": trainer.world_size, "val_loss": validated})
        )


@pytest.fixture(scope="module", autouse=True)
def local_ray() -> Iterator[None]:
    """Two CPUs of this machine."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    variables = {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    ray.init(num_cpus=2, include_dashboard=False, runtime_env={"env_vars": variables})
    yield
    ray.shutdown()


def run(
    folder: Path, strategy: str, *, reports: bool = False, killed_at: int | None = None
) -> tuple[dict[tuple[int, int], float], dict[str, float], Any]:
    """The loss of each rank and step, the last one where it came twice, the end, Ray's result."""
    folder.mkdir()
    options = {
        "folder": str(folder),
        "strategy": strategy,
        "reports": reports,
        "killed_at": killed_at,
    }
    from ray.train.torch import TorchTrainer

    result = TorchTrainer(
        fit,
        train_loop_config=options,
        scaling_config=train.ScalingConfig(num_workers=2),
        run_config=train.RunConfig(
            name="run",
            storage_path=str(folder / "ray"),
            failure_config=train.FailureConfig(max_failures=1 if killed_at else 0),
        ),
    ).fit()
    notes = [
        json.loads(line)
        for path in sorted(folder.glob("rank-*"))
        for line in path.read_text().splitlines()
    ]
    losses = {(note["rank"], note["step"]): note["loss"] for note in notes}
    return losses, json.loads((folder / "end").read_text()), result


@pytest.mark.parametrize("strategy", ["topt", "zero2", "topt_compressed"])
def test_fits_are_those_of_rays_own_strategy(tmp_path: Path, strategy: str) -> None:
    expected, expected_end, _ = run(tmp_path / "ddp", "ddp")
    losses, end, result = run(tmp_path / strategy, strategy, reports=True)
    assert len(losses) == 2 * STEPS * EPOCHS and end["ranks"] == 2
    # Sums of two ranks are in one order; ZeRO cuts parameters, whose updates stay elementwise.
    assert losses == pytest.approx(expected, rel=1e-5)
    assert end["val_loss"] == pytest.approx(expected_end["val_loss"], rel=1e-5)
    # A checkpoint that Ray keeps is one of Lightning's.
    with result.checkpoint.as_directory() as kept:
        [file] = Path(kept).glob("*.ckpt")
        saved = torch.load(file, weights_only=False)
    assert saved["global_step"] == STEPS * EPOCHS
    assert saved["state_dict"]["net.0.weight"].shape == (16, 8)


def test_a_fit_goes_on_after_a_worker_is_killed(tmp_path: Path) -> None:
    expected, expected_end, _ = run(tmp_path / "whole", "topt")
    losses, end, _ = run(tmp_path / "killed", "topt", killed_at=STEPS + 3)
    assert (tmp_path / "killed" / "killed").exists()
    assert losses == pytest.approx(expected, rel=1e-5)
    assert end["val_loss"] == pytest.approx(expected_end["val_loss"], rel=1e-5)

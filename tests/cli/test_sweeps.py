"""Hydra's sweeps (``-m``) of apps whose jobs have several ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hydra.core.hydra_config import HydraConfig

from lightning_topt.plugins import lost_ranks
from tests.preloaded import preloaded_topt

ROOT = Path(__file__).parents[2]

APP = """
import json
import os
import hydra
import lightning as L
import torch
from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf
from torch.utils.data import DataLoader

class Module(L.LightningModule):
    def __init__(self, rate):
        super().__init__()
        self.net, self.rate = torch.nn.Linear(8, 1), rate

    def training_step(self, batch, batch_idx):
        loss = self.net(batch).square().mean()
        self.log("loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), self.rate)

@hydra.main(version_base="1.3", config_path=".", config_name="app")
def main(config):
    import lightning_topt  # workers of a launcher get this function alone
    if config.fails and config.rate == 0.1:
        raise RuntimeError("a job that fails")
    L.seed_everything(0)
    trainer = L.Trainer(
        strategy=config.strategy, accelerator="cpu", devices=2, max_steps=3, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )
    loader = DataLoader(torch.linspace(0, 1, 512).reshape(64, 8), batch_size=4)
    trainer.fit(Module(config.rate), loader)
    loss = float(trainer.callback_metrics["loss"])
    note = {
        **OmegaConf.to_container(config, resolve=True), "ranks": trainer.world_size, "loss": loss,
        "process": os.getpid(), "overrides": list(HydraConfig.get().overrides.task),
    }
    with open(f"{config.folder}/rank-{trainer.global_rank}.json", "w") as file:
        json.dump(note, file)
    return loss

main()
"""
CONFIG = """
rate: 1.0
fails: false
strategy: topt_compressed
number: ${hydra:job.num}
folder: ${hydra:runtime.output_dir}
sweep: ${hydra:sweep.dir}
"""


def swept(folder: Path, *words: str, python: str = sys.executable) -> dict[str, list[Any]]:
    """What each rank of each job has noted, by the job's folder."""
    command = sweep_of(folder, *words, python=python)
    paths = filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    result = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=240
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return notes_of(folder)


def sweep_of(folder: Path, *words: str, python: str = sys.executable) -> list[str]:
    """Write the app into a folder, and return the command of a sweep there."""
    (folder / "app.yaml").write_text(CONFIG)
    (folder / "app.py").write_text(APP)
    return [python, f"{folder}/app.py", "--multirun", f"hydra.sweep.dir={folder}/sweep", *words]


def notes_of(folder: Path) -> dict[str, list[Any]]:
    """Return what each rank of each job of the sweep has noted, by the job's folder."""
    return {
        job.name: [json.loads(path.read_text()) for path in sorted(job.glob("rank-*.json"))]
        for job in sorted((folder / "sweep").iterdir())
        if job.is_dir() and not job.name.startswith(".")
    }


def test_each_job_has_its_own_ranks_values_and_folder(tmp_path: Path) -> None:
    subdir = 'hydra.sweep.subdir="rate=${rate}"'
    jobs = swept(tmp_path, "rate=0.1,0.2", subdir, python=preloaded_topt())
    assert jobs.keys() == {"rate=0.1", "rate=0.2"}
    for number, (name, ranks) in enumerate(jobs.items()):
        first, second = ranks
        assert first["ranks"] == second["ranks"] == 2
        assert first["rate"] == second["rate"] == (0.1, 0.2)[number]
        assert first["number"] == second["number"] == number
        assert first["folder"] == second["folder"] == f"{tmp_path}/sweep/{name}"
        assert first["sweep"] == second["sweep"] == f"{tmp_path}/sweep"
        assert first["overrides"] == second["overrides"]
        assert first["loss"] == second["loss"]
        assert first["process"] != second["process"]
    first_job, second_job = jobs.values()
    assert first_job[0]["loss"] != second_job[0]["loss"]
    # The sweep's process is rank 0 of all jobs; each has another rank 1.
    assert first_job[0]["process"] == second_job[0]["process"]
    assert first_job[1]["process"] != second_job[1]["process"]


BASIC = "hydra._internal.core_plugins.basic_launcher.BasicLauncher"
SUBMITIT = "hydra_plugins.hydra_submitit_launcher.submitit_launcher.SlurmLauncher"
SWEEPER = "hydra._internal.core_plugins.basic_sweeper.BasicSweeper"
JOBLIB = "hydra_plugins.hydra_joblib_launcher.joblib_launcher.JoblibLauncher"
OPTUNA = "hydra_plugins.hydra_optuna_sweeper.optuna_sweeper.OptunaSweeper"
STEP = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1"}


@pytest.mark.parametrize(
    ("launcher", "sweeper", "variables", "refused"),
    [
        (BASIC, SWEEPER, STEP, None),
        (SUBMITIT, OPTUNA, STEP, None),  # ranks of a job, not of the sweep
        (BASIC, OPTUNA, STEP, "in turn"),
        (BASIC, OPTUNA, {}, None),
        (JOBLIB, SWEEPER, STEP, "in turn"),
    ],
)
def test_sweeps_of_started_ranks(
    launcher: str,
    sweeper: str,
    variables: dict[str, str],
    refused: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    job = {"launcher": {"_target_": launcher}, "sweeper": {"_target_": sweeper}}
    monkeypatch.setattr(HydraConfig, "get", lambda: job)
    monkeypatch.setattr(lost_ranks, "job_folder", lambda: "first")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    if refused is None:
        lost_ranks.check_job()
    else:
        with pytest.raises(ValueError, match=refused):
            lost_ranks.check_job()


def test_a_rank_that_hangs_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lost_ranks, "END_SECONDS", 0.1)
    processes = [subprocess.Popen(["sleep", "60"]), subprocess.Popen(["true"])]
    stopped: list[int] = []
    monkeypatch.setattr(lost_ranks, "_started", [])
    monkeypatch.setattr(lost_ranks, "job_folder", lambda: "first")
    monkeypatch.setenv("LOCAL_RANK", "0")
    lost_ranks.know_ranks(processes, lambda: stopped.append(1))
    lost_ranks.begin_job()  # of the same job
    assert "LOCAL_RANK" in os.environ and not stopped
    monkeypatch.setattr(lost_ranks, "job_folder", lambda: "second")
    lost_ranks.begin_job()
    assert stopped == [1] and "LOCAL_RANK" not in os.environ
    assert [process.returncode for process in processes] == [-9, 0]

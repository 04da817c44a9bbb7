"""Hydra's launchers and sweepers with jobs of two ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cli.test_sweeps import swept

ROOT = Path(__file__).parents[2]


def test_joblib_runs_jobs_side_by_side(tmp_path: Path) -> None:
    pytest.importorskip("hydra_plugins.hydra_joblib_launcher", reason="no hydra-joblib-launcher")
    jobs = swept(tmp_path, "rate=0.1,0.2,0.3", "hydra/launcher=joblib", "hydra.launcher.n_jobs=2")
    assert [[rank["rate"] for rank in ranks] for ranks in jobs.values()] == [
        [rate] * 2 for rate in (0.1, 0.2, 0.3)
    ]
    assert all(first["loss"] == second["loss"] for first, second in jobs.values())
    assert len({rank["process"] for ranks in jobs.values() for rank in ranks}) >= 5


def test_submitit_runs_jobs_in_processes_of_its_own(tmp_path: Path) -> None:
    pytest.importorskip(
        "hydra_plugins.hydra_submitit_launcher", reason="no hydra-submitit-launcher"
    )
    jobs = swept(tmp_path, "rate=0.1,0.2", "hydra/launcher=submitit_local")
    check_jobs(tmp_path, jobs)
    assert len({rank["process"] for ranks in jobs.values() for rank in ranks}) == 4


RAY = (
    "hydra/launcher=ray",
    "hydra.launcher.ray.init.address=local",
    "+hydra.launcher.ray.init.num_cpus=2",
    "+hydra.launcher.ray.init.include_dashboard=false",
    "+hydra.launcher.ray.remote.num_cpus=2",  # as many as a job has ranks
)


def test_ray_runs_jobs_in_its_workers(tmp_path: Path) -> None:
    """A worker may run both jobs, one after the other."""
    pytest.importorskip("hydra_plugins.hydra_ray_launcher", reason="no hydra-ray-launcher")
    pytest.importorskip("ray", reason="no ray")
    jobs = swept(tmp_path, "rate=0.1,0.2", *RAY)
    check_jobs(tmp_path, jobs)
    assert len({rank["process"] for ranks in jobs.values() for rank in ranks}) >= 3


def check_jobs(folder: Path, jobs: dict[str, list[Any]]) -> None:
    """Two jobs of two ranks each, with rates and folders of their own."""
    assert jobs.keys() == {"0", "1"}
    for (name, ranks), rate in zip(jobs.items(), (0.1, 0.2), strict=True):
        assert [rank["rate"] for rank in ranks] == [rate] * 2
        assert [rank["ranks"] for rank in ranks] == [2, 2]
        assert {rank["folder"] for rank in ranks} == {f"{folder}/sweep/{name}"}
        assert ranks[0]["loss"] == ranks[1]["loss"]


@pytest.mark.parametrize("launcher", ["submitit", "ray"])
def test_the_command_in_workers_of_a_launcher(launcher: str, tmp_path: Path) -> None:
    """Both jobs use what is measured once; their second ranks are started by the command line."""
    name = f"hydra_plugins.hydra_{launcher}_launcher"
    pytest.importorskip(name, reason=f"no hydra-{launcher}-launcher")
    options = {"submitit": ("hydra/launcher=submitit_local",), "ray": RAY}[launcher]
    words = ["trainer.max_steps=6", "trainer.limit_val_batches=1", "seed=1,2"]
    words += ["model.num_layers=2", "model.hidden=32", "model.num_heads=2", "model.seq_len=32"]
    words += ["data.max_bytes=40000", f"hydra.sweep.dir={tmp_path}/sweep"]
    run_topt(tmp_path, "train", "-m", *words, *options)
    records = [json.loads((tmp_path / "sweep" / n / "run.json").read_text()) for n in "01"]
    assert [record["world_size"] for record in records] == [2, 2]
    assert [record["global_step"] for record in records] == [6, 6]
    assert records[0]["metrics"] != records[1]["metrics"]  # of two seeds
    for name in "01":
        files = {path.name for path in (tmp_path / "sweep" / name).iterdir()}
        assert {"train.log", "train_rank_1.log", "plan.yaml", ".hydra"} <= files
    kept = [*(tmp_path / "cache").rglob("*.json")]
    assert kept, [*tmp_path.rglob("*")]


def run_topt(folder: Path, *words: str) -> None:
    """Run the command in a folder, with a cache there."""
    command = [sys.executable, "-m", "lightning_topt.cli.main", *words]
    environment = {
        **os.environ,
        "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
        "XDG_CACHE_HOME": str(folder / "cache"),
    }
    result = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300
    )
    assert result.returncode == 0, result.stdout + result.stderr


def test_optuna_goes_on_after_a_job_that_fails(tmp_path: Path) -> None:
    """The first of two. The sampler `grid` has no order, and cannot have a last job that fails."""
    pytest.importorskip("hydra_plugins.hydra_optuna_sweeper", reason="no hydra-optuna-sweeper")
    jobs = swept(
        tmp_path,
        "rate=choice(0.1,0.2)",
        "fails=true",
        "hydra/sweeper=optuna",
        "hydra/sweeper/sampler=random",
        "hydra.sweeper.sampler.seed=10",  # 0.1, then 0.2
        "hydra.sweeper.n_jobs=1",
        "hydra.sweeper.n_trials=2",
        "hydra.sweeper.max_failure_rate=1.0",
    )
    assert {name: len(ranks) for name, ranks in jobs.items()} == {"0": 0, "1": 2}


def test_optuna_optimizes_the_metric_of_the_best_checkpoint(tmp_path: Path) -> None:
    pytest.importorskip("hydra_plugins.hydra_optuna_sweeper", reason="no hydra-optuna-sweeper")
    words = ["experiment=digits", "strategy=topt_compressed", "gradient_exchange=dense"]
    words += ["trainer.max_epochs=1", "trainer.limit_train_batches=4"]
    words += ["hydra/sweeper=optuna", "hydra.sweeper.n_jobs=1", "hydra.sweeper.n_trials=2"]
    words += ["hydra.sweeper.direction=maximize", "+hydra.sweeper.sampler.seed=0"]
    words += ["+model.learning_rate=interval(0.0001,0.01)", f"hydra.sweep.dir={tmp_path}/sweep"]
    run_topt(tmp_path, "train", "-m", *words)
    best = yaml.safe_load((tmp_path / "sweep" / "optimization_results.yaml").read_text())
    records = [
        json.loads(path.read_text()) for path in sorted((tmp_path / "sweep").glob("*/run.json"))
    ]
    assert [record["world_size"] for record in records] == [2, 2]
    assert best["best_value"] == max(record["metrics"]["val_accuracy"] for record in records)

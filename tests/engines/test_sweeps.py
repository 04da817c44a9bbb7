"""Hydra's launchers and sweepers with jobs of two ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

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
    words = ["experiment=demo", "data.max_bytes=100000", "model.num_layers=1", "model.hidden=32"]
    words += ["strategy=topt_compressed", "gradient_exchange=dense"]
    words += ["trainer.max_epochs=1", "trainer.limit_train_batches=4"]
    words += ["hydra/sweeper=optuna", "hydra.sweeper.n_jobs=1", "hydra.sweeper.n_trials=2"]
    words += ["hydra.sweeper.direction=minimize", "+hydra.sweeper.sampler.seed=0"]
    words += ["+model.learning_rate=interval(0.0001,0.01)", f"hydra.sweep.dir={tmp_path}/sweep"]
    run_topt(tmp_path, "train", "-m", *words)
    best = yaml.safe_load((tmp_path / "sweep" / "optimization_results.yaml").read_text())
    records = [
        json.loads(path.read_text()) for path in sorted((tmp_path / "sweep").glob("*/run.json"))
    ]
    assert [record["world_size"] for record in records] == [2, 2]
    assert best["best_value"] == min(record["metrics"]["val_bits_per_byte"] for record in records)

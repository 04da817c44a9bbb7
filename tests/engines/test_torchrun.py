"""Ranks of torchrun: elastic fits and sweeps."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cli.test_sweeps import ROOT
from tests.torchrun_job import Job, check_same, jobs, undisturbed

__all__ = ["jobs", "undisturbed"]  # fixtures
pytestmark = pytest.mark.timeout(600)  # each start imports torch and Lightning anew


def test_torchrun_restarts_what_waits(jobs: Any, undisturbed: Job) -> None:
    """The fit goes on from its last checkpoint."""
    job = jobs([["kill_torchrun_rank in", 5, 1], ["fail in", 7, 2]], saves=True)
    job.run(3, restarts=2)
    check_same(job, undisturbed)


def test_a_killed_torchrun_takes_its_ranks_along(jobs: Any) -> None:
    job = jobs([["hold in", 3, None]])
    job.start("--standalone", "--nproc-per-node", "1", is_parent=True)
    held = job.folder / "held"
    wait_for(lambda: held.exists() and held.read_text() != "", job)
    training, waiting = map(int, held.read_text().split())
    torchrun = int(Path(f"/proc/{waiting}/stat").read_text().rpartition(")")[2].split()[1])
    os.kill(torchrun, signal.SIGKILL)
    for process in (training, waiting):
        wait_for(lambda process=process: not Path(f"/proc/{process}").exists(), job)


TORCHRUN = "torch.distributed.run", "--standalone", "--nproc-per-node", "2"


def run_sweep(folder: Path, *words: str) -> None:
    paths = filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])
    variables = {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        [sys.executable, "-m", *TORCHRUN, *words],
        cwd=folder,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]


def test_a_sweep_of_the_command_under_torchrun(tmp_path: Path) -> None:
    """Ranks share the folder that the first one has named."""
    words = ["trainer.max_steps=6", "trainer.limit_val_batches=1", "seed=1,2"]
    words += ["model.num_layers=2", "model.hidden=32", "model.num_heads=2", "model.seq_len=32"]
    words += ["data.max_bytes=40000", "trainer.devices=2"]
    run_sweep(tmp_path, "-m", "lightning_topt.cli.main", "train", "-m", *words)
    [sweep] = (tmp_path / "outputs" / "train").iterdir()
    records = [json.loads((sweep / n / "run.json").read_text()) for n in "01"]
    for record in records:
        assert (record["world_size"], record["global_step"]) == (2, 6)
    assert records[0]["metrics"] != records[1]["metrics"]  # of two seeds
    for n in "01":
        files = {path.name for path in (sweep / n).iterdir()}
        assert {"train.log", "train_rank_1.log", ".hydra"} <= files


def wait_for(condition: Callable[[], bool], job: Job) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline, job.output()
        time.sleep(0.02)

"""Fits that go on after a loss, under real torchrun: which steps they make, on which samples, and
what they leave behind.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment
from lightning.pytorch.demos.boring_classes import BoringModel

from lightning_topt import AutoParallelStrategy
from lightning_topt.plugins.elastic import (
    MOST_LOSSES_WITHOUT_STEP,
    RANK_LOST,
    ElasticRun,
)
from tests.launch import run_ranks
from tests.preloaded import preloaded_topt
from tests.torchrun_job import Job, check_same, check_same_end, jobs, undisturbed

__all__ = ["jobs", "undisturbed"]  # fixtures


def test_losses_of_ranks_change_nothing(jobs: Any, undisturbed: Job) -> None:
    """In the first step of all, twice in one step, in the last batch of an epoch, in the first one
    of the next; with workers.
    """
    events = [["kill in", 1, 2], ["kill in", 3, 1], ["kill in", 3, 0], ["kill in", 4, 0]]
    job = jobs([*events, ["kill in", 5, 2]], workers=1)
    job.run(3)
    job.check_samples()
    check_same(job, undisturbed)
    assert len(list(job.folder.glob("event-*"))) == 5


def test_a_loss_after_an_update(jobs: Any, undisturbed: Job) -> None:
    """The ranks that are left have made the step, whatever hook they are in: it is not repeated."""
    job = jobs([["kill end", 3, 1], ["kill end", 4, 2], ["kill end", 8, 0]])
    job.run(3)
    check_same_end(job, undisturbed)
    assert job.losses().keys() | {3, 4, 8} == undisturbed.losses().keys()


def test_a_kill_while_a_state_is_written(jobs: Any, undisturbed: Job) -> None:
    """The next one writes it."""
    job = jobs([["kill_first_that_saves in", 5, None], ["kill in", 6, 0]])
    job.run(3)
    assert (job.folder / "first").exists()
    job.check_samples()
    check_same(job, undisturbed)


def test_a_window_that_is_not_full_comes_again(jobs: Any) -> None:
    plain, disturbed = jobs([], accumulate=2), jobs([["kill odd", 3, 1]], accumulate=2)
    for job in (plain, disturbed):
        job.run(2)
    check_same_end(disturbed, plain)
    assert disturbed.losses().keys() == plain.losses().keys()


def test_a_loss_in_a_validation_lets_all_of_it_come_again(jobs: Any) -> None:
    plain = jobs([], validates=True)
    disturbed = jobs([["kill validate", 6, 1], ["kill validate", 12, 0]], validates=True)
    for job in (plain, disturbed):
        job.run(2)
        job.check_samples()
    check_same(disturbed, plain)
    for job in (plain, disturbed):
        validated = Counter(note["validated"] for note in job.notes() if "validated" in note)
        assert validated == {6: 2, 12: 2}, job.output()


def test_sharded_plans_go_on_from_the_last_checkpoint(jobs: Any) -> None:
    plain, job = (
        jobs([], plan="zero2", saves=True),
        jobs([["kill in", 6, 1]], plan="zero2", saves=True),
    )
    for each in (plain, job):
        each.run(2)
    assert "it has a part of it" in job.output()
    assert "training begins again from the start" not in job.output()
    check_same(job, plain)
    steps = Counter(note["step"] for note in job.notes())
    assert [step for step in steps if steps[step] == 4] == [5]  # saved after step 4


def test_an_error_of_the_user_ends_the_job(jobs: Any) -> None:
    job = jobs([["fail in", 3, 1]])
    job.run(2, succeeds=False)
    assert "of the user" in job.output()


@pytest.mark.parametrize(
    "options",
    [
        {"checkpoint": "sharded"},
        {"async_checkpoint": True},
        {"start_method": "spawn"},
        {"allow_staleness": True},
    ],
)
def test_options_that_cannot_hold_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        AutoParallelStrategy(elastic=True, **options)


def test_without_torchrun_it_is_refused() -> None:
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        strategy=AutoParallelStrategy(elastic=True),
        logger=False,
        enable_checkpointing=False,
    )
    with pytest.raises(ValueError, match="torchrun"):
        trainer.fit(BoringModel())


def elastic_run(
    *,
    device: str = "cpu",
    backend: str | None = None,
    on_plateau: bool = False,
    lengths: list[float] | None = None,
) -> ElasticRun:
    strategy: Any = SimpleNamespace(
        cluster_environment=object.__new__(TorchElasticEnvironment),
        root_device=torch.device(device),
        process_group_backend=backend,
        lr_scheduler_configs=[SimpleNamespace(reduce_on_plateau=on_plateau)],
    )
    data: Any = SimpleNamespace(lengths=lengths)
    return ElasticRun(strategy, SimpleNamespace(), data, SimpleNamespace())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "automatic", "stops_early", "word"),
    [
        ({"device": "cuda"}, True, False, "gloo"),
        ({"backend": "mpi"}, True, False, "gloo"),
        ({}, False, False, "automatic"),
        ({}, True, True, "EarlyStopping"),
    ],
)
def test_fits_that_cannot_go_on_are_refused(
    options: dict[str, Any],
    automatic: bool,
    stops_early: bool,
    word: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    trainer: Any = SimpleNamespace(
        early_stopping_callbacks=[object()] * stops_early,
        lightning_module=SimpleNamespace(automatic_optimization=automatic),
    )
    with pytest.raises(ValueError, match=word):
        elastic_run(**options)._check(trainer)


def _check_training(rank: int, options: list[dict[str, Any]]) -> str:
    try:
        elastic_run(**options[rank])._check_training()
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ([{"lengths": [6]}] * 2, ""),
        ([{"lengths": [6]}, {"lengths": [5]}], "equally many"),
        ([{"on_plateau": True}] * 2, "ReduceLROnPlateau"),
        ([{"lengths": None}] * 2, "map-style"),
    ],
)
def test_states_that_a_loss_takes_are_refused(options: list[dict[str, Any]], word: str) -> None:
    for error in run_ranks(_check_training, 2, options):
        assert word in error if word else not error


# ---- the process that waits

BEGIN = """
import os, signal, sys, time
from lightning_topt.plugins.elastic import RANK_LOST, _Keeper
os.setsid()
print("before")
keeper = _Keeper()
keeper.keep()
print("process", flush=True)
count = os.path.getsize("count") if os.path.exists("count") else 0
open("count", "a").write("x")
"""
KILL = "os.kill(os.getpid(), signal.SIGKILL)"


@pytest.mark.parametrize(
    ("code", "status", "processes"),
    [
        ("sys.exit(0)", 0, 1),
        ("sys.exit(3)", 3, 1),
        (f"keeper.note_step()\nif count < 5: {KILL}", 0, 6),
        ("keeper.note_step()\nif count < 5: os._exit(RANK_LOST)", 0, 6),
        # losses without a step between them
        ("os._exit(RANK_LOST)", RANK_LOST, MOST_LOSSES_WITHOUT_STEP),
        (KILL, 128 + signal.SIGKILL, MOST_LOSSES_WITHOUT_STEP),
        # a signal goes on, once, and none is started again
        ("os.kill(os.getppid(), signal.SIGTERM); time.sleep(60)", 128 + signal.SIGTERM, 1),
    ],
)
def test_lost_processes_are_replaced(
    code: str, status: int, processes: int, tmp_path: Path
) -> None:
    done = subprocess.run(
        [preloaded_topt(), "-c", BEGIN + code],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"},
        cwd=tmp_path,
        text=True,
        stdout=subprocess.PIPE,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout.split()) == (status, ["before", *["process"] * processes])

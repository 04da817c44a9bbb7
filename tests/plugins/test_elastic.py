"""Fits that go on after a loss, under real torchrun: their steps, samples, and what they leave."""

from __future__ import annotations

import os
import signal
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from lightning_topt import AutoParallelStrategy
from lightning_topt.plugins.elastic import MOST_LOSSES_WITHOUT_STEP
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


@pytest.mark.thorough
def test_a_window_that_is_not_full_comes_again(jobs: Any) -> None:
    plain, disturbed = jobs([], accumulate=2), jobs([["kill odd", 3, 1]], accumulate=2)
    for job in (plain, disturbed):
        job.run(2)
    check_same_end(disturbed, plain)
    assert disturbed.losses().keys() == plain.losses().keys()


@pytest.fixture(scope="module")
def validated(tmp_path_factory: pytest.TempPathFactory) -> Job:
    """Two ranks that nothing disturbs."""
    job = Job(tmp_path_factory.mktemp("validated") / "job", [], validates=True)
    job.run(2)
    return job


def test_a_loss_in_a_validation_lets_all_of_it_come_again(jobs: Any, validated: Job) -> None:
    disturbed = jobs([["kill validate", 6, 1], ["kill validate", 12, 0]], validates=True)
    disturbed.run(2)
    check_same(disturbed, validated)
    for job in (validated, disturbed):
        job.check_samples()
        counts = Counter(note["validated"] for note in job.notes() if "validated" in note)
        assert counts == {6: 2, 12: 2}, job.output()


def test_sharded_plans_go_on_from_the_last_checkpoint(jobs: Any, validated: Job) -> None:
    """The other job is of ``ddp``."""
    job = jobs([["kill in", 6, 1]], plan="zero2", saves=True)
    job.run(2)
    assert "it has a part of it" in job.output()
    assert "training begins again from the start" not in job.output()
    check_same(job, validated)
    steps = Counter(note["step"] for note in job.notes() if "step" in note)
    assert [step for step in steps if steps[step] == 4] == [5]  # saved after step 4


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"checkpoint": "sharded"}, "checkpoint"),
        ({"start_method": "spawn"}, "start_method"),
        ({"allow": "staleness"}, "staleness"),
    ],
)
def test_options_that_cannot_hold_are_refused(options: dict[str, Any], word: str) -> None:
    with pytest.raises(ValueError, match=f"leave out {word}"):
        AutoParallelStrategy(elastic=True, **options)


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
        ("sys.exit(3)", 3, 1),
        ("keeper.note_step()\nif count < 5: os._exit(RANK_LOST)", 0, 6),
        # losses without a step between them
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

"""A process that waits forks the one that trains again after a loss, and ends as it did after all
else.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from lightning_topt.communication.rank_keeper import MOST_LOSSES_WITHOUT_STEP, RANK_LOST
from tests.preloaded import preloaded_python

BEGIN = """
import os, signal, sys, time
from lightning_topt.communication.rank_keeper import RANK_LOST, keep_rank
os.setsid()
print("before")
progress = keep_rank()
print("process", progress.restarts, flush=True)
"""


def run(code: str) -> tuple[int, list[str]]:
    done = subprocess.run(
        [preloaded_python(), "-c", BEGIN + code],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        text=True,
        stdout=subprocess.PIPE,
        timeout=60,
        check=False,
    )
    return done.returncode, done.stdout.splitlines()


def process_lines(count: int) -> list[str]:
    return ["before", *(f"process {number}" for number in range(count))]


@pytest.mark.parametrize("status", [0, 1, 3])
def test_an_end_is_passed_on(status: int) -> None:
    assert run(f"sys.exit({status})") == (status, process_lines(1))


@pytest.mark.parametrize(
    "loss",
    ["os.kill(os.getpid(), signal.SIGKILL)", "os.abort()", "os._exit(RANK_LOST)"],
)
def test_a_lost_process_is_replaced(loss: str) -> None:
    code = f"progress.step()\nif progress.restarts < 5:\n    {loss}\nassert progress.steps == 6"
    assert run(code) == (0, process_lines(6))


def test_losses_without_a_step_between_them_end() -> None:
    assert run("os._exit(RANK_LOST)") == (RANK_LOST, process_lines(MOST_LOSSES_WITHOUT_STEP))
    status, lines = run("os.kill(os.getpid(), signal.SIGKILL)")
    assert status == 128 + signal.SIGKILL
    assert lines == process_lines(MOST_LOSSES_WITHOUT_STEP)


def test_signals_reach_the_process_that_trains_and_none_follows() -> None:
    code = """
signal.signal(signal.SIGTERM, lambda *_: (print("asked", flush=True), os._exit(RANK_LOST)))
os.kill(os.getppid(), signal.SIGTERM)
time.sleep(50)
"""
    assert run(code) == (RANK_LOST, [*process_lines(1), "asked"])


def test_a_signal_to_the_group_comes_once() -> None:
    code = """
seen = []
signal.signal(signal.SIGUSR1, lambda *_: seen.append(1))
os.killpg(os.getpgid(os.getppid()), signal.SIGUSR1)
while not seen:
    time.sleep(0.01)
time.sleep(0.2)
print(len(seen))
"""
    assert run(code) == (0, [*process_lines(1), "1"])


def test_it_ends_with_the_process_that_waits(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    code = f"""
from pathlib import Path
Path({str(pid)!r} + ".new").write_text(str(os.getpid()))
os.rename({str(pid)!r} + ".new", {str(pid)!r})
os.kill(os.getppid(), signal.SIGKILL)
time.sleep(50)
"""
    run(code)
    process, deadline = Path(f"/proc/{pid.read_text()}"), time.monotonic() + 20
    while process.exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not process.exists()

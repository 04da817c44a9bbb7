"""Elastic fits whose ranks torchrun starts again: how they go on with the state of those left."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.launch import free_port
from tests.torchrun_job import Job, check_same, jobs, undisturbed

__all__ = ["jobs", "undisturbed"]  # fixtures
pytestmark = pytest.mark.timeout(600)  # each start imports torch and Lightning anew


def test_torchrun_restarts_what_waits_and_the_state_survives(jobs: Any, undisturbed: Job) -> None:
    job = jobs([["kill_torchrun_rank in", 5, 1], ["fail in", 7, 2]])
    job.run(3, restarts=2)
    job.check_samples()
    check_same(job, undisturbed)


def test_ranks_shrink_to_a_node_and_grow_back(jobs: Any) -> None:
    """A node is killed with all that is on it; another one comes."""
    job = jobs([["hold in", 5, None], ["hold in", 12, None]])
    port = free_port()
    agent = (
        *("--nnodes", "1:2", "--nproc-per-node", "1", "--max-restarts", "3"),
        *("--rdzv-backend", "c10d", "--rdzv-id", "job", "--rdzv-endpoint", f"127.0.0.1:{port}"),
        *("--rdzv-conf", "last_call_timeout=5,keep_alive_interval=1"),
    )
    first = job.start(*agent, is_parent=True)
    wait_for(lambda: is_listening(port), job)  # it has the store
    second = job.start(*agent, is_parent=True)
    held = [job.folder / f"held-5-{number}" for number in (0, 1)]
    wait_for(lambda: all(path.exists() and path.read_text() for path in held), job)
    for process in (second.pid, *map(int, held[1].read_text().split())):
        os.kill(process, signal.SIGKILL)
    (job.folder / "go-5").touch()
    wait_for(lambda: (job.folder / "held-12-0").exists(), job)  # until torchrun asks it to end
    job.start(*agent, is_parent=True)
    assert first.wait(timeout=180) == 0, job.output()
    worlds = {note["step"]: note["world"] for note in job.notes()}
    assert [worlds[step] for step in sorted(worlds)] == [2] * 4 + [1] * 8 + [2] * 4, worlds
    job.check_samples()


def test_a_killed_torchrun_takes_its_ranks_along(jobs: Any) -> None:
    job = jobs([["hold in", 3, None]])
    job.start("--standalone", "--nproc-per-node", "1", is_parent=True)
    held = job.folder / "held-3-0"
    wait_for(lambda: held.exists() and held.read_text() != "", job)
    training, waiting = map(int, held.read_text().split())
    torchrun = int(Path(f"/proc/{waiting}/stat").read_text().rpartition(")")[2].split()[1])
    os.kill(torchrun, signal.SIGKILL)
    for process in (training, waiting):
        wait_for(lambda process=process: not Path(f"/proc/{process}").exists(), job)


def is_listening(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


def wait_for(condition: Callable[[], bool], job: Job) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline, job.output()
        time.sleep(0.02)

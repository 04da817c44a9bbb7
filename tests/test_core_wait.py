"""Whether threads had cores: as Linux counts it, as the clock tells it, and with others at work."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from lightning_topt.basics import core_wait
from lightning_topt.basics.core_wait import CoreWait, core_wait_seconds, is_busy
from tests.clock import Clock

linux = pytest.mark.skipif(
    not Path("/proc/thread-self/schedstat").exists(), reason="needs Linux's /proc"
)
Counts = Callable[[str, float], None]  # a thread, and the seconds that it had no core


@contextmanager
def other_programs(cores: set[int], *, on_each: int = 1) -> Iterator[None]:
    """Programs that keep `cores` busy, each of which stays on one."""
    code = "import os, sys\nos.sched_setaffinity(0, {int(sys.argv[1])})\nprint()\nwhile True: pass"
    jobs = [
        subprocess.Popen([sys.executable, "-uSc", code, str(core)], stdout=subprocess.PIPE)
        for core in sorted(cores) * on_each
    ]
    try:
        for job in jobs:
            assert job.stdout is not None and job.stdout.readline() == b"\n"  # it spins from now on
        yield
    finally:
        for job in jobs:
            job.kill()
            job.communicate()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(core_wait, "time", clock)
    return clock


@pytest.fixture
def counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Counts:
    """Writes what Linux would say of threads; the calling one is "1"."""
    threads = tmp_path / "task"

    def count(thread: str, waited: float) -> None:
        (threads / thread).mkdir(parents=True, exist_ok=True)
        (threads / thread / "schedstat").write_text(f"5000 {round(waited * 1e9)} 7\n")

    count("1", 0.0)
    monkeypatch.setattr(core_wait, "_OWN", str(threads / "1" / "schedstat"))
    monkeypatch.setattr(core_wait, "_THREADS", str(threads))
    return count


def test_a_share_is_the_part_of_the_time_since_the_watch_began(clock: Clock, counts: Counts):
    counts("1", 3.0)
    watch = CoreWait()
    counts("1", 3.5)
    clock.now += 2.0
    assert watch.share() == 0.25


def test_threads_that_compute_count_together_also_those_that_come_and_go(
    clock: Clock, counts: Counts, tmp_path: Path
):
    counts("2", 1.0)
    counts("3", 0.0)
    watch, one = CoreWait(computes=True), CoreWait()
    (tmp_path / "task" / "3" / "schedstat").unlink()  # this one ends
    counts("2", 1.5)
    counts("4", 0.5)
    clock.now += 1.0
    assert watch.share() == 1.0 and one.share() == 0.0


def test_where_linux_does_not_count_the_clocks_tell_of_what_computes(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(core_wait, "_OWN", "/nowhere")
    clock.busy = 0.6
    computes, waits = CoreWait(computes=True), CoreWait()
    clock.now += 2.0
    assert computes.share() == pytest.approx(0.4) and math.isnan(waits.share())
    assert math.isnan(core_wait_seconds()) and math.isnan(core_wait_seconds(of_all=True))


@pytest.mark.parametrize(
    ("share", "ranks", "threads", "is_it"),
    [
        (0.1, 2, 1, False),
        (0.3, 2, 1, True),
        (0.6, 4, 1, False),  # four ranks of two cores take them from one another: a half
        (0.8, 4, 1, True),
        (1.1, 1, 3, False),  # so do three threads
        (1.3, 1, 3, True),
        (math.nan, 1, 1, False),
    ],
)
def test_what_ranks_take_from_one_another_is_no_sign_of_others(
    share: float, ranks: int, threads: int, is_it: bool, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(core_wait, "usable_cores", lambda: 2)
    assert is_busy(share, ranks=ranks, threads=threads) == is_it


@linux
def test_a_thread_whose_core_others_have_waits():
    cores = os.sched_getaffinity(0)
    core = {min(cores)}
    with other_programs(core):
        os.sched_setaffinity(0, core)
        try:
            watch, waited, start = CoreWait(), core_wait_seconds(), time.perf_counter()
            while time.perf_counter() - start < 0.4:
                pass
            assert 0.05 < core_wait_seconds() - waited < 0.45
            assert 0.1 < watch.share() < 1.1
        finally:
            os.sched_setaffinity(0, cores)

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
from lightning_topt.basics.core_wait import CoreWait, is_busy
from tests.clock import Clock

linux = pytest.mark.skipif(
    not Path("/proc/thread-self/schedstat").exists(), reason="needs Linux's /proc"
)
Counts = Callable[[float], None]


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
    """Writes how long Linux would say that the thread had no core."""
    file = tmp_path / "schedstat"

    def count(waited: float) -> None:
        file.write_text(f"5000 {round(waited * 1e9)} 7\n")

    count(0.0)
    monkeypatch.setattr(core_wait, "_COUNTS", str(file))
    return count


def test_where_linux_does_not_count_the_clocks_tell_of_what_computes(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(core_wait, "_COUNTS", "/nowhere")
    clock.busy = 0.6
    watch = CoreWait(threads=1)
    clock.now += 0.01
    assert math.isnan(watch.share())  # too short a time
    clock.now += 2.0
    assert watch.share() == pytest.approx(0.4) and math.isnan(watch.seconds())


@pytest.mark.parametrize(
    ("share", "ranks", "threads", "is_it"),
    [
        (0.1, 2, 1, False),
        (0.3, 2, 1, True),
        (0.6, 4, 1, False),  # four ranks of two cores take them from one another: a half
        (0.8, 4, 1, True),
        (0.5, 1, 3, False),  # so do three threads: a third
        (0.6, 1, 3, True),
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
            watch, start = CoreWait(threads=1), time.perf_counter()
            while time.perf_counter() - start < 0.4:
                pass
            assert 0.1 < watch.share() < 1
        finally:
            os.sched_setaffinity(0, cores)

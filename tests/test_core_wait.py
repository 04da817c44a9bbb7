"""Whether threads had cores: with other programs at work, and with more threads than cores."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lightning_topt.basics import core_wait
from lightning_topt.basics.core_wait import CoreWait, is_busy


@pytest.mark.parametrize(
    ("share", "ranks", "threads", "is_it"),
    [
        (0.1, 2, 1, False),
        (0.3, 2, 1, True),
        (0.6, 4, 1, False),  # four ranks of two cores take them from one another: a half
        (0.8, 4, 1, True),
        (0.5, 1, 3, False),  # so do three threads: a third
        (0.6, 1, 3, True),
    ],
)
def test_what_ranks_take_from_one_another_is_no_sign_of_others(
    share: float, ranks: int, threads: int, is_it: bool, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(core_wait, "usable_cores", lambda: 2)
    assert is_busy(share, ranks=ranks, threads=threads) == is_it


@pytest.mark.skipif(not Path("/proc/thread-self/schedstat").exists(), reason="needs Linux's /proc")
def test_a_thread_whose_core_others_have_waits():
    code = "import os, sys\nos.sched_setaffinity(0, {int(sys.argv[1])})\nprint()\nwhile True: pass"
    cores = os.sched_getaffinity(0)
    command = [sys.executable, "-uSc", code, str(min(cores))]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as other:
        try:
            assert (
                other.stdout is not None and other.stdout.readline() == b"\n"
            )  # spins from now on
            os.sched_setaffinity(0, {min(cores)})
            watch, start = CoreWait(threads=1), time.perf_counter()
            while time.perf_counter() - start < 0.4:
                pass
            assert 0.1 < watch.share() < 1
        finally:
            os.sched_setaffinity(0, cores)
            other.kill()

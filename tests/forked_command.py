"""`topt` in a copy of the test's own process, which has imported everything: a command that is
refused takes a third of a second there, four in a process of its own.
"""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, NoReturn

import torch

import topt_console
from lightning_topt.cli import advise, calibrate, plan, predict, stalls, train, verify, what_if

IMPORTED = (advise, calibrate, plan, predict, stalls, train, verify, what_if)


class Ended(NamedTuple):
    """How a copy ended: its exit status, and what it wrote to both streams."""

    status: int
    output: str


def forked_topt(*words: str, folder: Path, seconds: int = 120) -> Ended:
    """Do what the console script does, in `folder`. One that takes too long has the status -14."""

    def main() -> None:
        sys.argv = ["topt", *words]
        topt_console.main()

    return forked(main, folder=folder, seconds=seconds)


def forked(call: Callable[[], object], *, folder: Path, seconds: int = 120) -> Ended:
    """Call a function as a program in `folder`, ended by SystemExit or by an exception."""
    output = folder / ".output"
    pid = os.fork()
    if pid == 0:
        _run(call, folder, output, seconds)
    _, status = os.waitpid(pid, 0)
    return Ended(os.waitstatus_to_exitcode(status), output.read_text())


def _run(call: Callable[[], object], folder: Path, output: Path, seconds: int) -> NoReturn:
    status = 70
    try:
        signal.alarm(seconds)
        torch.set_num_threads(1)  # a copy has one thread
        os.chdir(folder)
        file = os.open(output, os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
        os.dup2(file, 1)
        os.dup2(file, 2)
        for name, number in (("stdout", 1), ("stderr", 2)):
            setattr(sys, name, open(number, "w", buffering=1, closefd=False))  # noqa: SIM115
        os.environ.pop("HYDRA_FULL_ERROR", None)
        call()
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        status = 1
    finally:
        os._exit(status)

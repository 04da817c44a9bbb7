"""`topt` in a copy of the test's own process, which has imported everything: a command that is
refused takes a third of a second there, four in a process of its own.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import traceback
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple, NoReturn

import torch

import topt_console
from lightning_topt.cli import calibrate, plan, predict, train, verify, what_if
from lightning_topt.cli.example_step import ModelSetup
from tests.launch import free_port, torchrun_environment

IMPORTED = (calibrate, plan, predict, train, verify, what_if)


class Ended(NamedTuple):
    """How a copy ended: its exit status, and what it wrote to both streams."""

    status: int
    output: str


def forked_topt(*words: str, folder: Path, ranks: int = 1, reads_only: bool = False) -> Ended:
    """Do what the console script does, in `folder`, on so many `ranks`; how rank 0 ended.

    One that takes too long has the status -14.
    """
    return forked_ranks(partial(console, words, reads_only), ranks, folder=folder)[0]


def console(words: Sequence[str], reads_only: bool) -> None:
    """Do what the console script does; what `reads_only` ends before a step is captured."""
    if reads_only:
        ModelSetup.capture = lambda *_, **__: sys.exit(0)  # type: ignore[method-assign]
    sys.argv = ["topt", *words]
    topt_console.main()


def finished(ended: Ended) -> str:
    """Return the output of a program that ended well."""
    assert ended.status == 0, ended.output
    return ended.output


def forked(*calls: Callable[[], object], folder: Path, seconds: int = 120) -> list[Ended]:
    """Call functions side by side, each as a program in `folder`.

    They end by SystemExit, or by an exception with its traceback.
    """
    outputs = [folder / f".output_{index}" for index in range(len(calls))]
    processes = []
    for call, output in zip(calls, outputs, strict=True):
        processes.append(os.fork())
        if processes[-1] == 0:
            _run(call, folder, output, seconds)
    statuses = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in processes]
    return [Ended(*each) for each in zip(statuses, (o.read_text() for o in outputs), strict=True)]


def forked_ranks(call: Callable[[], object], ranks: int, *, folder: Path) -> list[Ended]:
    """Call a function as a program, on several `ranks` as torchrun would start them."""
    if ranks == 1:
        return forked(call, folder=folder)
    port = free_port()

    def start(rank: int) -> object:
        os.environ |= torchrun_environment(rank, ranks, port=port)
        return call()

    return forked(*(partial(start, rank) for rank in range(ranks)), folder=folder)


def _speak_as_a_program() -> None:
    """Write log lines and warnings to the streams of now, which pytest had replaced."""
    for logger in logging.root.manager.loggerDict.values():
        for handler in getattr(logger, "handlers", ()):
            if type(handler) is logging.StreamHandler:
                handler.setStream(sys.stderr)
    warnings.resetwarnings()
    warnings.showwarning = lambda message, category, file, line, *_: print(
        warnings.formatwarning(message, category, file, line), file=sys.stderr
    )


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
        _speak_as_a_program()
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

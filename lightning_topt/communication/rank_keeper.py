"""A process that outlives its rank: it waits for the one that trains, and starts it again.

torchrun ends all ranks of a node when one of them ends, and starts new interpreters. Here the
process that torchrun has started stays behind. It forks the one that trains. Where that is killed,
or ends because another rank was lost (`RANK_LOST`), it forks again, from the state before the
training: all imports are done, and torchrun sees nothing of it.

    progress = keep_rank()      # returns in each process that is to train
    ...
    progress.step()             # after each optimizer step
    os._exit(RANK_LOST)         # a collective call has failed: begin again together

Every other end of the training process is passed on, so torchrun restarts as ever. So does the
third loss in a row without a step between them. Signals go to the process that trains. It dies with
the one that waits.
"""

from __future__ import annotations

import logging
import mmap
import os
import signal
import struct
import sys
import time
from types import FrameType
from typing import Any, NoReturn

from torch._C._distributed_c10d import TCPStore

from lightning_topt.basics.forked_call import die_with

log = logging.getLogger(__name__)

RANK_LOST = 75  # exit status; EX_TEMPFAIL of sysexits.h
MOST_LOSSES_WITHOUT_STEP = 3
FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
_SHARED = struct.Struct("<Qd")  # steps, seconds of the longest one


class RankProgress:
    """What the process that trains says to the one that waits.

    Attributes:
        restarts: how often a process that trained was replaced before this one.
    """

    def __init__(self) -> None:
        self.restarts = 0
        self._shared = mmap.mmap(-1, _SHARED.size)  # with forked processes
        self._last_step: float | None = None

    @property
    def steps(self) -> int:
        """How many optimizer steps all processes of this rank have made."""
        return int(_SHARED.unpack(self._shared[:])[0])

    @property
    def longest_seconds(self) -> float:
        """The longest time between two steps."""
        return float(_SHARED.unpack(self._shared[:])[1])

    def step(self) -> None:
        """Count an optimizer step."""
        now, before = time.monotonic(), self._last_step
        self._last_step = now
        longest = max(self.longest_seconds, 0.0 if before is None else now - before)
        self._shared[:] = _SHARED.pack(self.steps + 1, longest)


def keep_rank() -> RankProgress:
    """Fork a process that trains, as often as ranks are lost; return in each of these.

    The calling process waits, and ends as the last of them did. It must have no process group yet,
    and no device in use.
    """
    progress, waiting = RankProgress(), _Waiting()
    losses, seen = 0, 0
    while True:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()  # or both processes would write what is left
        if not waiting.fork():
            return progress
        status = waiting.wait()
        is_loss = status < 0 or status == RANK_LOST
        losses, seen = (losses + 1 if progress.steps == seen else 1), progress.steps
        if not is_loss or waiting.is_ending:
            _end(status)
        if losses >= MOST_LOSSES_WITHOUT_STEP:
            log.error("%d losses without a step between them: torchrun is to restart", losses)
            _end(status)
        progress.restarts += 1


class _Waiting:
    """Waits for `process`, to which signals go on.

    Attributes:
        process: that trains.
        is_ending: whether the ranks were asked to end, so that none is started again.
    """

    def __init__(self) -> None:
        self.process = 0
        self.is_ending = False
        self._before: dict[int, Any] = {}

    def fork(self) -> bool:
        """Fork the process that trains; return whether this is the one that waits."""
        # Signals wait meanwhile: each process then handles them as it is to.
        before, own = signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED), os.getpid()
        try:
            self.process = os.fork()
            if self.process == 0:
                # torchrun sends signals to the group of the process that waits: each comes once
                os.setpgid(0, 0)
                die_with(own)
                for number, handler in self._before.items():
                    signal.signal(number, handler)
                return False
            for number in FORWARDED:
                self._before.setdefault(number, signal.getsignal(number))
                signal.signal(number, self._forward)
            return True
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def wait(self) -> int:
        """Return how the process has ended: its exit status, or a signal's number, negative."""
        return os.waitstatus_to_exitcode(os.waitpid(self.process, 0)[1])

    def _forward(self, number: int, frame: FrameType | None) -> None:
        self.is_ending |= number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
        try:
            os.kill(self.process, number)
        except ProcessLookupError:  # it has ended
            return


def keep_store(port: int) -> None:
    """Fork a process that hosts torchrun's store, at `port`, as long as this process waits.

    Where torchrun has none that it shares between attempts, rank 0 is to host it. That rank would
    take it along.
    """
    own = os.getpid()
    if os.fork() != 0:
        return
    os.setpgid(0, 0)
    die_with(own)
    for number in FORWARDED:
        signal.signal(number, signal.SIG_IGN)
    store = TCPStore("localhost", port, is_master=True, wait_for_workers=False)
    while store is not None:
        signal.pause()


def _end(status: int) -> NoReturn:
    """End without what `atexit` holds: that is the training process's to run."""
    os._exit(status if status >= 0 else 128 - status)

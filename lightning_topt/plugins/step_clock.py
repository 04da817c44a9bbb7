"""Clocks of a fit's first steps.

StepsOfPlan   steps under a plan, to be compared with its prediction
PhaseClock    where the time of steps under ddp goes; what would treat it is a `Hint`
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter, thread_time
from typing import Any

import torch

from lightning_topt.basics.core_wait import CoreWait, is_busy

STEPS_OF_PLAN, HINT_BATCHES = 20, 20
LEAST_SHARE, FULL_SHARE = 0.1, 0.9  # of a step; of a device's memory


class StepsOfPlan:
    """Times the first 20 steps under a plan, on one rank, without waiting for an accelerator.

    A step is what `StepMonitor` measures: its batches from their start to the end of their backward
    pass or the update, not the wait for data.

    Args:
        device: of this rank.
        ranks: on this machine.
        then: called once, with the median seconds of these steps, and whether the machine was busy.
    """

    def __init__(
        self, device: torch.device, *, ranks: int, then: Callable[[float, bool], None]
    ) -> None:
        self._device, self._ranks, self._then = device, ranks, then
        # of every step, the beginning and end of its batches; the last one is under way
        self._steps: list[list[tuple[Any, Any]]] = [[]]
        self._began: Any = None
        self._host_began = 0.0
        self._host = self._waited = 0.0  # seconds of this thread; those without a core
        self._core_wait: CoreWait | None = None
        self._is_over = False

    def begin_batch(self) -> None:
        """A batch begins."""
        if self._is_over:
            return
        if len(self._steps) > STEPS_OF_PLAN:
            self._settle()
            return
        self._began = self._now()
        self._host_began = perf_counter()
        self._core_wait = CoreWait(threads=torch.get_num_threads())

    def end_batch(self, *, updates: bool) -> None:
        """A batch is over; where it `updates`, a step is."""
        if self._is_over or self._core_wait is None:
            return
        self._waited += self._core_wait.seconds()
        self._host += perf_counter() - self._host_began
        self._steps[-1].append((self._began, self._now()))
        self._core_wait = None
        if updates:
            self._steps.append([])
        if len(self._steps) > STEPS_OF_PLAN:
            self._settle()

    def _now(self) -> Any:
        """Return the time, or a mark in the work of an accelerator."""
        if self._device.type == "cpu":
            return perf_counter()
        mark = torch.Event(self._device, enable_timing=True)
        mark.record()
        return mark

    def _settle(self) -> None:
        """Call `then`, once the device has got to the end of the last step."""
        on_cpu, steps = self._device.type == "cpu", self._steps[:STEPS_OF_PLAN]
        if not on_cpu and not steps[-1][-1][1].query():
            return
        self._is_over = True
        seconds = [
            sum(end - start if on_cpu else start.elapsed_time(end) / 1e3 for start, end in batches)
            for batches in steps
        ]
        share = self._waited / max(self._host, 1e-9)
        self._steps = []
        self._then(
            statistics.median(seconds),
            is_busy(share, ranks=self._ranks, threads=torch.get_num_threads()),
        )


# ---- where the time of a step goes ---------------------------------------------------------------


@dataclass(frozen=True)
class Hint:
    """The largest share of a step that a word of ours treats.

    Attributes:
        cause: ``"data"``, ``"exchange"``, ``"update"`` or ``"memory"``.
        share: of a step's seconds, or of the device's memory.
        text: the sentence, with the word.
    """

    cause: str
    share: float
    text: str


class PhaseClock:
    """Times the phases of `HINT_BATCHES` batches of a fit under ddp, on one rank.

    Args:
        device: of this rank. An accelerator is not waited for: of its steps the wait for data and
            the memory are known alone.
        waited: returns the seconds that loaders have kept the fit waiting so far.
    """

    def __init__(self, device: torch.device, waited: Callable[[], float]) -> None:
        self._device, self._waited = device, waited
        self._seconds = {"exchange": 0.0, "update": 0.0, "closure": 0.0}
        # of each batch: when it began, what loaders had waited, and what phases had taken
        self._marks: list[tuple[float, float, dict[str, float]]] = []

    @property
    def is_over(self) -> bool:
        """Whether all batches were timed."""
        return len(self._marks) > HINT_BATCHES

    def begin_batch(self) -> None:
        """A batch begins, for which loaders were waited for."""
        self._marks.append((perf_counter(), self._waited(), dict(self._seconds)))

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Time a backward pass; what its thread does not compute it waits for other ranks."""
        start, on_core = perf_counter(), thread_time()
        wait = CoreWait(threads=torch.get_num_threads())
        yield
        waited = perf_counter() - start - (thread_time() - on_core)
        without_core = wait.seconds()
        self._seconds["exchange"] += max(waited - max(without_core, 0.0), 0.0)

    @contextmanager
    def update(self) -> Iterator[Callable[[Callable[[], Any]], Callable[[], Any]]]:
        """Time a step of an optimizer without its closure, which the function given wraps."""

        def timed(closure: Callable[[], Any]) -> Callable[[], Any]:
            def call() -> Any:
                start = perf_counter()
                try:
                    return closure()
                finally:
                    self._seconds["closure"] += perf_counter() - start

            return call

        start, before = perf_counter(), self._seconds["closure"]
        yield timed
        inside = self._seconds["closure"] - before
        self._seconds["update"] += perf_counter() - start - inside

    def shares(self) -> dict[str, float]:
        """Return the shares of a step that are data, exchange and update.

        Batches that took three times as long as most are left out: others ran between them.
        """
        batches = [
            (after[0] - begun[0], after[1] - begun[1], begun[2], after[2])
            for begun, after in itertools.pairwise(self._marks)
        ]
        most = 3 * statistics.median(seconds for seconds, *_ in batches)
        kept = [batch for batch in batches if batch[0] <= most]
        total = sum(seconds for seconds, *_ in kept)
        found = {"data": sum(waited for _, waited, *_ in kept) / total}
        if self._device.type == "cpu":
            for name in ("exchange", "update"):
                found[name] = sum(new[name] - old[name] for *_, old, new in kept) / total
        return found

"""Clocks of a fit's steps: the first ones under a plan, and those that nobody planned.

StepsOfPlan   the first steps under a plan, to be compared with its prediction
PhaseClock    data, forward and backward, exchange and update of the first steps under ddp
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from time import perf_counter
from typing import Any

import torch

from lightning_topt.basics.core_wait import CoreWait, is_busy

STEPS_OF_PLAN = 20


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

"""Where the time of a fit's first steps under ddp goes; what would treat it is a `Hint`."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter, thread_time
from typing import Any

import torch

from lightning_topt.basics.core_wait import CoreWait

HINT_BATCHES = 20
LEAST_SHARE, FULL_SHARE = 0.1, 0.9  # of a step; of a device's memory


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

"""The fate of one contribution, and the handle that is waited for."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

import numpy as np

from lightning_topt.communication.bounded_loss.packed_halves import unpack_halves
from lightning_topt.communication.bounded_loss.raw_memory import Array


class PeerSilentError(RuntimeError):
    """Other ranks, those in `ranks`, are gone or do not answer; the exchange is over."""

    def __init__(self, text: str, ranks: tuple[int, ...]) -> None:
        super().__init__(text)
        self.ranks = ranks


@dataclass(frozen=True)
class Outcome:
    """Elements of this rank's contribution that no sum has: `ranges` (k, 2) int64, first and end,
    ascending; `values` float32, one after the other; of `numel` in all.
    """

    ranges: Array
    values: Array
    numel: int

    @property
    def lost_share(self) -> float:
        """The share of elements that no sum has."""
        return len(self.values) / max(self.numel, 1)

    def add_to(self, residual: Array) -> None:
        """Add what was not delivered to `residual` (numel,)."""
        taken = 0
        for start, stop in self.ranges:
            residual[start:stop] += self.values[taken : taken + stop - start]
            taken += stop - start

    def keep_only(self, contribution: Array) -> None:
        """Zero what was delivered of `contribution` (numel,), which becomes the residual."""
        done = 0
        for start, stop in self.ranges:
            contribution[done:start] = 0
            done = stop
        contribution[done:] = 0


@dataclass
class Handle:
    """One bucket on its way. `values` and `out` are the caller's memory; `staging` is the
    exchange's, None where not needed.

    What travels is read from `sent` and comes to `taken`: the caller's memory, or words of two
    values each (`packed`).
    """

    bucket: int
    values: Array
    out: Array
    staging: Array | None
    tolerance: float
    scale: float
    rescale: bool
    priority: int
    parts_left: int = 0
    error: Exception | None = None
    lost: list[tuple[int, int]] = field(default_factory=list)  # ranges, in any order
    outcome: Outcome | None = None
    done: threading.Event = field(default_factory=threading.Event)
    finished: float = 0.0  # when the sums were there, of `time.perf_counter`
    packed: tuple[Array, Array] | None = None  # what is sent, and the sums

    @property
    def sent(self) -> Array:
        """Return what leaves this rank, in elements of 32 bits."""
        return self.values if self.packed is None else self.packed[0]

    @property
    def taken(self) -> Array:
        """Return where the sums come to, in elements of 32 bits."""
        if self.packed is not None:
            return self.packed[1]
        return self.out if self.staging is None else self.staging

    def is_completed(self) -> bool:
        """Return whether `wait` would return at once."""
        return self.done.is_set()

    def wait(self, timeout: float | None = None) -> Outcome:
        """Block until the sum is in `out`; what was not delivered. Raises PeerSilentError;
        TimeoutError after `timeout` s.
        """
        if not self.done.wait(timeout):
            raise TimeoutError(f"bucket {self.bucket} is not exchanged after {timeout:g} s")
        if self.error is not None:
            raise self.error
        if self.outcome is None:
            ranges = _merged(self.lost)
            if self.packed is not None:
                ranges = np.minimum(2 * ranges, len(self.values))
            parts = [self.values[start:stop] for start, stop in ranges]
            values = np.concatenate(parts) if parts else np.empty(0, np.float32)
            self.outcome = Outcome(ranges, values, len(self.values))
            if self.packed is not None:
                unpack_halves(self.packed[1].view(np.uint32), self.out)
            elif self.staging is not None:
                self.out[:] = self.staging
        return self.outcome


def _merged(ranges: list[tuple[int, int]]) -> Array:
    """Return ascending ranges, those that touch as one."""
    merged: list[list[int]] = []
    for start, stop in sorted(ranges):
        if merged and merged[-1][1] == start:
            merged[-1][1] = stop
        else:
            merged.append([start, stop])
    return np.array(merged, np.int64).reshape(-1, 2)

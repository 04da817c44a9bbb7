"""The minibatches that complete an update, as far as a run knows them; from these follow the
staleness of its passes.
"""

from __future__ import annotations

from collections import deque
from typing import Literal

from lightning_topt.schedules.staleness import Staleness, running_staleness

_KEPT = 16  # times the stages and the lag per hop: more than staleness look back


class UpdatePattern:
    """The updates of `stage` since the last drained state."""

    def __init__(self, *, num_stages: int, stage: int, lag_per_hop: int) -> None:
        self.sizes = {"stage": stage, "num_stages": num_stages, "lag_per_hop": lag_per_hop}
        self._reach = _KEPT * num_stages * lag_per_hop
        self._known: dict[int, bool] = {}
        self._pending: deque[int] = deque()
        self._start = self._latest = 0
        self._accumulate = 1
        self._end: int | None = None
        self._last_complete, self._last_completes = -1, True
        self.version = 0  # updates of this stage

    def begin(self, minibatch: int, *, completes: bool, accumulate: int) -> None:
        """Count a minibatch that comes in."""
        self._known[minibatch], self._latest, self._accumulate = completes, minibatch, accumulate
        self._known.pop(minibatch - self._reach, None)
        if completes:
            self._pending.append(minibatch)
            self._last_complete = minibatch

    def expect(self, minibatches: int | None, *, last_completes: bool = True) -> None:
        """Expect so many minibatches in all before the next drained state; None: that is not
        known.
        """
        self._end, self._last_completes = minibatches, last_completes

    def restart(self, minibatches: int) -> None:
        """Begin anew: the run is drained."""
        self._start, self._end, self.version = minibatches, None, 0

    def updated(self, minibatch: int) -> None:
        """Count the update with this minibatch as done."""
        assert self._pending and self._pending[0] == minibatch, (minibatch, self._pending)
        self._pending.popleft()
        self.version += 1

    @property
    def pending(self) -> tuple[int, ...]:
        """The minibatches that have come in and complete updates of this stage still to be done,
        the next one first.
        """
        return tuple(self._pending)

    def completes(self, minibatch: int) -> bool:
        """Return whether a minibatch completes an update: as was said, or as is to be expected."""
        if minibatch <= self._latest:
            return self._known[minibatch]
        is_last = self._last_completes and minibatch + 1 == self._end
        return is_last or (minibatch - self._last_complete) % self._accumulate == 0

    def staleness(self, kind: Literal["forward", "backward"], minibatch: int) -> Staleness:
        """Return the staleness of the pass that comes now."""
        found = running_staleness(
            minibatch - self._start,
            kind=kind,
            completes=lambda index: self.completes(index + self._start),
            num_minibatches=None if self._end is None else self._end - self._start,
            **self.sizes,
        )
        return found._replace(version=self.version)

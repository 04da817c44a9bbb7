"""A clock that stands still but for what the test says."""

from __future__ import annotations


class Clock:
    """In place of the module `time`; `now` is in seconds, of which a core works a fraction of
    `busy`.
    """

    def __init__(self, *, busy: float = 1.0) -> None:
        self.now, self.busy = 0.0, busy

    def perf_counter(self) -> float:
        return self.now

    def process_time(self) -> float:
        return self.busy * self.now

    thread_time = process_time

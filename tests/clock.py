"""A clock that stands still but for what the test says."""

from __future__ import annotations


class Clock:
    """In place of the module `time`; `now` is in seconds."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now

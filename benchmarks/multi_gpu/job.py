"""The cases of a part on several ranks, with a watchdog.

    for name in job.left(["zero1", "zero3"]):
        with job.case(name, seconds=60) as row:
            row["measured_step_seconds"] = ...       # the row of rank 0 is written

A case that fails, or is not done in time, ends this process: other ranks may wait for it in a
collective call. torchrun ends these, and whoever started it starts it again for the cases left.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.gpu_report.reporting import Report, free_memory, read_lines, synchronize

_TIMED_SECONDS, _MOST_CALLS = 0.2, 50


@dataclass(frozen=True)
class Job:
    """One part as one of its `ranks`."""

    report: Report
    rank: int
    ranks: int
    begun: frozenset[str] = field(init=False)

    def __post_init__(self) -> None:
        lines = [line for line in read_lines(self.report.path) if line["part"] == self.report.part]
        begun = frozenset(line["name"] for line in lines if line["kind"] == "begun")
        object.__setattr__(self, "begun", begun)
        dist.barrier()  # all have read before the first writes

    @property
    def device(self) -> torch.device:
        """The device of this rank."""
        return self.report.device

    def left(self, names: Sequence[str]) -> list[str]:
        """Return those of `names` that no earlier run has begun."""
        return [name for name in names if name not in self.begun]

    @contextmanager
    def case(self, name: str, *, seconds: float) -> Iterator[dict[str, Any]]:
        """Give a row to fill in `seconds`; a failure, or the end of that time, ends the process."""
        if self.rank == 0:
            self.report.write("begun", {"name": name})
        row: dict[str, Any] = {}
        watchdog = threading.Timer(seconds, self._end, (name, seconds, row))
        watchdog.daemon = True
        watchdog.start()
        start = time.monotonic()
        try:
            yield row
            synchronize(self.device)
        except Exception as error:
            self.report.failure(f"{name}, rank {self.rank}", error, **row)
            _leave()
        watchdog.cancel()
        if self.rank == 0:
            self.report.row(name, **row, wall_s=round(time.monotonic() - start, 2))
        free_memory(self.device)
        dist.barrier()

    def _end(self, name: str, seconds: float, row: dict[str, Any]) -> None:
        faulthandler.dump_traceback()
        error = TimeoutError(f"not done in {seconds:.0f} s")
        self.report.failure(f"{name}, rank {self.rank}", error, **row)
        _leave()

    # ---- of all ranks ----------------------------------------------------------------------------

    def seconds_of(self, call: Callable[[], Any]) -> float:
        """Return the seconds of a collective call: of many in a row, on the slowest rank."""
        call()
        once = self._slowest(call, 1)
        count = max(1, min(_MOST_CALLS, int(_TIMED_SECONDS / max(once, 1e-6))))
        return min(self._slowest(call, count) for _ in range(3))

    def _slowest(self, call: Callable[[], Any], count: int) -> float:
        dist.barrier()
        synchronize(self.device)
        start = time.perf_counter()
        for _ in range(count):
            call()
        synchronize(self.device)
        return self.largest((time.perf_counter() - start) / count)

    def largest(self, value: float) -> float:
        """Return the largest of the values of all ranks."""
        found = torch.tensor(value, dtype=torch.float64, device=self.device)
        dist.all_reduce(found, dist.ReduceOp.MAX)
        return float(found)

    def of_rank_0(self, value: Any) -> Any:
        """Return the value of rank 0, one that can be pickled."""
        values = [value]
        dist.broadcast_object_list(values, 0, device=self.device)
        return values[0]

    def empty(self, nbytes: int) -> Tensor:
        """Return memory of the device, as float32."""
        return torch.zeros(max(nbytes // 4, self.ranks), device=self.device)


def _leave() -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)

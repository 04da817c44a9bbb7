"""One thread that carries all buckets of an exchange, in order and overlapped.

A bucket's exchange is a generator that yields what it waits for (`bucket.Stages`). While one bucket
waits for the network the thread starts the next. All ranks must issue the works of one process
group in the same order whatever the timing, so each stage has its own group and a bucket enters a
stage only after the bucket before it has. No collective runs in a callback (on gloo those abort the
process) and no thread is started per bucket.
"""

from __future__ import annotations

import queue
import threading
from dataclasses import dataclass, field
from math import inf
from time import monotonic, perf_counter
from typing import Any

import torch
from torch import Tensor

from lightning_topt.communication.bucket import Stages
from lightning_topt.communication.node.node_exchange import Waitable
from lightning_topt.communication.peers import POLL_SECONDS, PeerMonitor
from lightning_topt.communication.streams import Streams

SHORTEST_PAUSE, LONGEST_PAUSE = 2e-5, 1e-3  # seconds between two looks at works in flight


@dataclass
class _Task:
    stages: Stages
    future: torch.futures.Future[Tensor]
    mark: Any
    stage: float = -1  # the stage it has entered
    waits_for: Waitable | None = None
    deadline: float = field(default=inf)


class ExchangeWorker:
    """Runs `Stages` one after the other in one daemon thread, which starts with the first.

    A generator that raises FloatingPointError fails alone; after any other error, or a wait longer
    than `timeout_seconds`, the worker is over: `error` says why, and every future and every later
    call raises it.
    """

    def __init__(self, *, streams: Streams, monitor: PeerMonitor, timeout_seconds: float) -> None:
        self.streams, self.monitor, self.timeout_seconds = streams, monitor, timeout_seconds
        self.error: Exception | None = None
        self.busy_seconds = 0.0  # with at least one bucket in flight
        self._queue: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._idle = threading.Event()
        self._idle.set()
        self._in_flight, self._busy_since = 0, 0.0
        self._thread: threading.Thread | None = None

    def submit(self, stages: Stages) -> torch.futures.Future[Tensor]:
        """Queue one bucket; the future of its result. Raises the worker's `error`."""
        task = _Task(stages, self.streams.future(), self.streams.mark())
        with self._lock:
            if self.error:
                raise self.error
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="gradient-exchange", daemon=True
                )
                self._thread.start()
            if not self._in_flight:
                self._busy_since = perf_counter()
            self._in_flight += 1
            self._idle.clear()
            self._queue.put(task)
        return task.future

    def drain(self) -> None:
        """Block until no bucket is in flight. Raises the worker's `error`."""
        self._idle.wait()  # the thread's own deadline bounds this
        if self.error:
            raise self.error

    def close(self) -> None:
        """End the thread, after what is in flight; at most a few seconds."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._queue.put(None)
            # where the last reference is dropped there
            if thread is not threading.current_thread():
                thread.join(timeout=5)

    def _run(self) -> None:
        tasks: list[_Task] = []
        pause = SHORTEST_PAUSE
        with self.streams.worker():
            while self._receive(tasks, pause if tasks else POLL_SECONDS):
                try:
                    moved = self._advance_all(tasks)
                    if not moved and self.monitor.look():
                        raise RuntimeError("another rank reported a failure")
                except Exception as error:
                    self._fail(tasks, self.monitor.diagnose(error))
                    return
                pause = SHORTEST_PAUSE if moved else min(2 * pause, LONGEST_PAUSE)

    def _receive(self, tasks: list[_Task], seconds: float) -> bool:
        """Take what was submitted, waiting up to `seconds` for the first; whether to go on."""
        try:
            task = self._queue.get(timeout=seconds)
            while task is not None:
                tasks.append(task)
                task = self._queue.get_nowait()
        except queue.Empty:
            return True
        return False

    def _advance_all(self, tasks: list[_Task]) -> bool:
        """Give each task one turn, oldest first; whether any could use it."""
        moved, reached = False, inf
        for task in tasks[:]:
            if task.stage + 1 <= reached and self._is_ready(task):
                moved = True
                self._advance(task)
                if task.waits_for is None:
                    tasks.remove(task)
                    self._finished()
            reached = task.stage
        return moved

    def _is_ready(self, task: _Task) -> bool:
        if task.waits_for is None or task.waits_for.is_completed():
            return True
        if monotonic() > task.deadline:
            raise TimeoutError(f"waited longer than {self.timeout_seconds:g} s for another rank")
        return False

    def _advance(self, task: _Task) -> None:
        """Run one stage; afterwards `task.waits_for` is None where it was the last."""
        try:
            if task.waits_for is None:
                self.streams.after(task.mark)
            else:
                task.waits_for.wait()
            task.waits_for = next(task.stages)
            task.stage += 1
            task.deadline = monotonic() + self.timeout_seconds
        except StopIteration as stop:
            task.waits_for, task.stage = None, inf
            task.future.set_result(stop.value)
        except FloatingPointError as error:
            task.waits_for, task.stage = None, inf
            task.future.set_exception(error)  # type: ignore[arg-type]

    def _finished(self) -> None:
        with self._lock:
            self._in_flight -= 1
            if not self._in_flight:
                self.busy_seconds += perf_counter() - self._busy_since
                self._idle.set()

    def _fail(self, tasks: list[_Task], error: Exception) -> None:
        with self._lock:
            self.error = error
            self._receive(tasks, SHORTEST_PAUSE)
            for task in tasks:
                task.future.set_exception(error)  # type: ignore[arg-type]
            self._in_flight = 0
            self._idle.set()

"""One thread that carries all buckets of an exchange, in order and overlapped.

A bucket's exchange is a generator that yields what it waits for (`bucket.Stages`). While one bucket
waits for the network, the thread starts the next:

    bucket 0   select | all-gather ......... | decode
    bucket 1            select | all-gather ......... | decode

All ranks must issue the works of one process group in the same order whatever the timing, so each
stage has its own group and a bucket enters a stage only after the bucket before it has. No
collective runs in a callback (on gloo those abort the process) and no thread is started per bucket.

`Streams` are what differs between devices: nothing on a CPU, one side stream on CUDA.
"""

from __future__ import annotations

import queue
import threading
from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from math import inf
from time import monotonic, perf_counter
from typing import Any

import torch
from torch import Tensor

from lightning_topt.communication.bucket import Stages
from lightning_topt.communication.collectives import Waitable
from lightning_topt.communication.rank_watch import POLL_SECONDS, PeerMonitor

SHORTEST_PAUSE, LONGEST_PAUSE = 2e-5, 1e-3  # seconds between two checks of works in flight


class ExchangeWorker:
    """Runs `Stages` one after the other in one daemon thread, which starts with the first.

    A generator that raises FloatingPointError fails alone. After any other error, or a wait longer
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
        self._in_flight, self._busy_since = 0, 0.0  # under `_lock`
        self._thread: threading.Thread | None = None

    def submit(self, stages: Stages) -> torch.futures.Future[Tensor]:
        """Queue one bucket; return the future of its result. Raises the worker's `error`."""
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
            # not where the thread itself drops the last reference
            if thread is not threading.current_thread():
                thread.join(timeout=5)

    def _run(self) -> None:
        tasks: list[_Task] = []
        pause = SHORTEST_PAUSE
        with self.streams.worker():
            while self._receive(tasks, pause if tasks else POLL_SECONDS):
                try:
                    moved = self._advance_all(tasks)
                    # asks the store at most once a second
                    if not moved and self.monitor.others_failed():
                        raise RuntimeError("another rank reported a failure")
                except Exception as error:
                    self._fail(tasks, self.monitor.diagnose(error))
                    return
                pause = SHORTEST_PAUSE if moved else min(2 * pause, LONGEST_PAUSE)

    def _receive(self, tasks: list[_Task], seconds: float) -> bool:
        # Take what was submitted, waiting up to `seconds` for the first; False: end the thread
        try:
            task = self._queue.get(timeout=seconds)
            while task is not None:
                tasks.append(task)
                task = self._queue.get_nowait()
        except queue.Empty:
            return True
        return False

    def _advance_all(self, tasks: list[_Task]) -> bool:
        # Advance buckets that are ready by a stage, oldest first; return whether any was
        moved, reached = False, inf  # reached: the stage of the bucket before
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
        # Whether the bucket waits for nothing. Raises TimeoutError after its deadline.
        if task.waits_for is None or task.waits_for.is_completed():
            return True
        if monotonic() > task.deadline:
            raise TimeoutError(f"waited longer than {self.timeout_seconds:g} s for another rank")
        return False

    def _advance(self, task: _Task) -> None:
        # Run one stage; afterwards `task.waits_for` is None where it was the last
        try:
            if task.waits_for is None:
                self.streams.after(task.mark)
            else:
                task.waits_for.wait()
            # until it yields what it waits for
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
        # Count a bucket that is back; wake `drain` after the last
        with self._lock:
            self._in_flight -= 1
            if not self._in_flight:
                self.busy_seconds += perf_counter() - self._busy_since
                self._idle.set()

    def _fail(self, tasks: list[_Task], error: Exception) -> None:
        # Give `error` to every bucket in flight or queued, and to all later calls
        with self._lock:
            self.error = error
            self._receive(tasks, SHORTEST_PAUSE)
            for task in tasks:
                task.future.set_exception(error)  # type: ignore[arg-type]
            self._in_flight = 0
            self._idle.set()


@dataclass
class _Task:
    """One bucket in the worker."""

    stages: Stages
    future: torch.futures.Future[Tensor]
    mark: Any  # when the gradients are there
    stage: float = -1  # the stage it has entered
    waits_for: Waitable | None = None
    deadline: float = inf


def make_streams(device: torch.device) -> Streams:
    """Return the streams of a device."""
    return CudaStreams(device) if device.type == "cuda" else HostStreams()


class Streams(ABC):
    """The order of operations between the calling thread and the worker.

    The worker's operations come after the gradient's, the optimizer's after the worker's.
    """

    @abstractmethod
    def mark(self) -> Any:
        """Mark where the calling thread is now, for `after`."""

    @abstractmethod
    def after(self, mark: Any) -> None:
        """Let the worker's next operations start when `mark` has been reached."""

    @abstractmethod
    def worker(self) -> AbstractContextManager[Any]:
        """Return the context around everything that the worker does."""

    @abstractmethod
    def future(self) -> torch.futures.Future[torch.Tensor]:
        """Return a future that is complete once the worker's operations before it are done."""

    @abstractmethod
    def seconds_between(self, start: Any, stop: Any) -> float:
        """Return the seconds from one mark to another; waits for both."""


class HostStreams(Streams):
    """CPU: operations are done when they return."""

    def mark(self) -> float:
        """Return the time."""
        return perf_counter()

    def after(self, mark: float) -> None:
        """Do nothing: there is nothing to wait for."""

    def worker(self) -> AbstractContextManager[Any]:
        """Return an empty context: there is nothing to set."""
        return nullcontext()

    def future(self) -> torch.futures.Future[torch.Tensor]:
        """Return a plain future."""
        return torch.futures.Future()

    def seconds_between(self, start: float, stop: float) -> float:
        """Return their difference."""
        return stop - start


class CudaStreams(Streams):
    """CUDA: the worker has a stream of its own; marks are events."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.stream = device, torch.cuda.Stream(device)

    def mark(self) -> torch.cuda.Event:
        """Return an event on the calling thread's stream."""
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def after(self, mark: torch.cuda.Event) -> None:
        """Make the worker's stream wait for the event."""
        self.stream.wait_event(mark)

    def worker(self) -> AbstractContextManager[Any]:
        """Return the context in which the worker's stream is the current one, on its device."""
        return torch.cuda.stream(self.stream)

    def future(self) -> torch.futures.Future[torch.Tensor]:
        """Return a future that records the worker's stream when completed."""
        return torch.futures.Future(devices=[self.device])

    def seconds_between(self, start: torch.cuda.Event, stop: torch.cuda.Event) -> float:
        """Return the seconds measured on the device, once it has passed both."""
        start.synchronize()
        stop.synchronize()
        return float(start.elapsed_time(stop)) / 1e3

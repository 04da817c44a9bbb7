"""Streams are what differs between devices in a thread that exchanges buckets: nothing on CPU, one
side stream on CUDA.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext
from time import perf_counter
from typing import Any

import torch


class Streams(ABC):
    """Orders the worker's operations after the gradient's, and the optimizer's after the
    worker's.
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
        """Return a future whose waiters wait for what the worker had issued when it was
        completed.
        """

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
        self.device, self.stream = device, torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def mark(self) -> torch.cuda.Event:
        """Return an event on the calling thread's stream."""
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
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


def make_streams(device: torch.device) -> Streams:
    """Return the streams of a device."""
    return CudaStreams(device) if device.type == "cuda" else HostStreams()

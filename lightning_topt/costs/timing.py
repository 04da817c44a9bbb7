"""Time a call on any device: the one place that knows how devices report time."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

_SHORT_SECONDS, _MIN_REPEATS = 1e-4, 3


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished its work; nothing to wait for on CPU."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def time_once(call: Callable[[], Any], *, device: torch.device) -> float:
    """Return the wall-clock seconds of one call, with the device idle before and after."""
    synchronize(device)
    start = time.perf_counter()
    call()
    synchronize(device)
    return time.perf_counter() - start


def time_call(
    call: Callable[[], Any], *, device: torch.device, budget_seconds: float, max_repeats: int = 100
) -> float:
    """Return the median seconds of a call after one unmeasured one, repeated for about
    `budget_seconds`, at least three times.

    Where one call is much shorter than a synchronization, several run between two of them.
    """
    call()
    first = time_once(call, device=device)
    inner = max(1, round(_SHORT_SECONDS / max(first, 1e-7)))

    def batch() -> None:
        for _ in range(inner):
            call()

    possible = int((budget_seconds - 2 * first) / max(first * inner, 1e-7))
    repeats = min(max(possible, _MIN_REPEATS), max_repeats)
    return statistics.median(time_once(batch, device=device) / inner for _ in range(repeats))

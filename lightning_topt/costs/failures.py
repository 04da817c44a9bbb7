"""Failures, checkpoints and restarts: how much longer a run takes than its steps.

    equation                                                       function
    M = 1 / (r * devices)                                          Failures.seconds_between
    C = checkpoint bytes / B                                       checkpoint_seconds
    tau = sqrt(2 C M) (1 + sqrt(C / 2M) / 3 + C / 2M / 9) - C      daly_interval
          for C < 2M, else M
    T = M exp(R / M) (exp((tau + C) / M) - 1) T_s / tau            expected_seconds

Daly, FGCS 22(3), 2006. Failures are independent.

r failures per device and second, M mean seconds between failures of any device, C seconds to write
a checkpoint (training waits), R seconds from a failure to training again, B bytes/s of the store
for all ranks together, tau seconds of training between two checkpoints, T_s seconds of steps alone,
T seconds of the run. Failures are a Poisson process; what was trained since the last checkpoint is
lost, and one failure stops the run whichever device it hits.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

_MOST = 700.0  # exponents that a float takes


@dataclass(frozen=True)
class Failures:
    """How often devices of a cluster are lost, and what that costs.

    Args:
        per_device_hour: failures of a device per hour; 0: none.
        restart_seconds: from a failure to the first step after it, but for reading the checkpoint.
        checkpoint_bandwidth: bytes per second that all ranks together write to, and read from, the
            store of checkpoints; None: they take no time.

    Raises ValueError for negative numbers, and a bandwidth of 0.
    """

    per_device_hour: float = 0.0
    restart_seconds: float = 0.0
    checkpoint_bandwidth: float | None = None

    def __post_init__(self) -> None:
        if min(self.per_device_hour, self.restart_seconds) < 0:
            raise ValueError("failures: rates and restart_seconds are at least 0")
        if self.checkpoint_bandwidth is not None and not self.checkpoint_bandwidth > 0:
            raise ValueError("failures.checkpoint_bandwidth is positive")

    def seconds_between(self, devices: int) -> float:
        """Return the mean seconds between failures of any of `devices` devices.

        Infinite without failures.
        """
        rate = self.per_device_hour * devices
        return 3600.0 / rate if rate > 0 else math.inf


@dataclass(frozen=True)
class RunTime:
    """The seconds of a run.

    Attributes:
        step_seconds: of its steps alone.
        seconds: with checkpoints, failures and restarts.
        interval_seconds: of training between checkpoints; infinite: none is written.
        checkpoint_seconds: to write one.
        failures: how many are expected.
    """

    step_seconds: float
    seconds: float
    interval_seconds: float = math.inf
    checkpoint_seconds: float = 0.0
    failures: float = 0.0

    @property
    def overhead(self) -> float:
        """The share of the steps that checkpoints and failures add."""
        return self.seconds / self.step_seconds - 1 if self.step_seconds else 0.0


def daly_interval(checkpoint_seconds: float, *, seconds_between: float) -> float:
    """Return Daly's seconds of training between checkpoints; infinite without failures."""
    if math.isinf(seconds_between):
        return math.inf
    ratio = checkpoint_seconds / (2 * seconds_between)
    if ratio >= 1:
        return seconds_between
    young = math.sqrt(2 * checkpoint_seconds * seconds_between)
    return young * (1 + math.sqrt(ratio) / 3 + ratio / 9) - checkpoint_seconds


def expected_seconds(
    step_seconds: float,
    *,
    interval_seconds: float,
    checkpoint_seconds: float,
    restart_seconds: float,
    seconds_between: float,
) -> float:
    """Return the expected seconds of a run of `step_seconds`.

    Infinite where it would hardly ever reach a checkpoint.
    """
    if math.isinf(seconds_between):
        return step_seconds
    segment = (interval_seconds + checkpoint_seconds) / seconds_between
    again = restart_seconds / seconds_between
    if segment + again > _MOST:
        return math.inf
    return seconds_between * math.exp(again) * math.expm1(segment) * step_seconds / interval_seconds


def run_time(
    step_seconds: float,
    *,
    failures: Failures | None,
    devices: int,
    checkpoint_bytes: float,
) -> RunTime:
    """Return what a run of `step_seconds` seconds of steps takes on `devices` devices.

    With checkpoints at Daly's interval. `checkpoint_bytes` are those of one checkpoint of all
    ranks. Without `failures`, or their rate, nothing is added.
    """
    if failures is None or failures.per_device_hour == 0:
        return RunTime(step_seconds, step_seconds)
    between = failures.seconds_between(devices)
    rate = math.inf if failures.checkpoint_bandwidth is None else failures.checkpoint_bandwidth
    writing = max(checkpoint_bytes / rate, 1e-3)  # nothing is written in no time
    interval = min(daly_interval(writing, seconds_between=between), max(step_seconds, 1e-9))
    total = expected_seconds(
        step_seconds,
        interval_seconds=interval,
        checkpoint_seconds=writing,
        restart_seconds=failures.restart_seconds + writing,
        seconds_between=between,
    )
    return RunTime(step_seconds, total, interval, writing, total / between)

"""Measured seconds of collectives by message size."""

from __future__ import annotations

import bisect
import math
from dataclasses import dataclass

COLLECTIVES = ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "all_to_all", "send_recv")
CurveKey = tuple[str, int, int]  # collective, size and stride of the group


@dataclass(frozen=True)
class CollectiveCurve:
    """Seconds of one collective by size of the whole tensor in bytes, both ascending, back to back
    and undisturbed.

    `wait_seconds` is what it takes more, at any size, after ranks have computed: they come one
    after another, and threads wait for cores. Raises ValueError for other values.
    """

    sizes: tuple[float, ...]
    seconds: tuple[float, ...]
    wait_seconds: float = 0.0

    def __post_init__(self) -> None:
        if not self.sizes or len(self.sizes) != len(self.seconds):
            raise ValueError("a measured collective needs as many bytes as seconds, at least one")
        if list(self.sizes) != sorted(set(self.sizes)) or min(*self.sizes, *self.seconds) <= 0:
            raise ValueError(
                "a measured collective needs positive seconds and strictly ascending positive bytes"
            )
        if not 0 <= self.wait_seconds < math.inf:
            raise ValueError("the seconds that a collective waits for ranks must be at least 0")

    def seconds_at(self, size: float) -> float:
        """Interpolate log-log; below the smallest size take its time, above the largest its
        bandwidth. Without the wait.
        """
        if size <= self.sizes[0]:
            return self.seconds[0]
        if size >= self.sizes[-1]:
            return self.seconds[-1] * size / self.sizes[-1]
        right = bisect.bisect_right(self.sizes, size)
        (x0, x1), (y0, y1) = self.sizes[right - 1 : right + 1], self.seconds[right - 1 : right + 1]
        share = math.log(size / x0) / math.log(x1 / x0)
        return float(y0 * (y1 / y0) ** share)  # a straight line on logarithmic axes

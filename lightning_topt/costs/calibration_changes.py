"""Two calibrations of one machine differ constant by constant.

change of a constant   now / before - 1; of shares (`overlap`, loss) now - before
change of a curve      the same at each size that both have
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from lightning_topt.costs.calibration_check import DEVICE_CONSTANTS, name_of
from lightning_topt.costs.cluster import Cluster
from lightning_topt.costs.node_types import Device, Link


@dataclass(frozen=True)
class Change:
    """A constant `before` and `now` (of a curve: seconds at the size that changed most, `at`), and
    the largest and the median change of its `points`, without signs. `is_share`: changes are
    differences of shares, else shares of the value before.
    """

    constant: str
    before: float
    now: float
    largest: float
    median: float
    points: int = 1
    at: str = ""
    is_share: bool = False

    def to_dict(self) -> dict[str, Any]:
        """Return plain values."""
        return asdict(self)


def changes_between(before: Cluster, now: Cluster) -> list[Change]:
    """Return what differs between two calibrations of the same ranks; constants that one of them
    lacks are left out.
    """
    return [
        *_device_changes(before.device, now.device),
        *_link_changes("inside nodes", before.intra, now.intra),
        *_link_changes("between nodes", before.inter, now.inter),
        *_share("overlap of exchanges", before.overlap, now.overlap),
        *_curve_changes(before, now),
    ]


def largest_and_median(changes: Sequence[Change]) -> tuple[Change, float] | None:
    """Return the change that is the largest, and the median over constants of their largest ones,
    without differences of shares; None where nothing is left.
    """
    ratios = [each for each in changes if not each.is_share]
    if not ratios:
        return None
    return max(ratios, key=lambda each: each.largest), statistics.median(
        each.largest for each in ratios
    )


def _device_changes(before: Device, now: Device) -> Iterator[Change]:
    for dtype in before.flops:
        if dtype in now.flops:
            yield from _ratio(f"rate of {dtype} products", before.flops[dtype], now.flops[dtype])
    for name, title in DEVICE_CONSTANTS.items():
        yield from _ratio(title, getattr(before, name), getattr(now, name))


def _link_changes(where: str, before: Link | None, now: Link | None) -> Iterator[Change]:
    if before is None or now is None:
        return
    yield from _ratio(f"latency {where}", before.latency_seconds, now.latency_seconds)
    yield from _ratio(f"bandwidth {where}", before.bandwidth, now.bandwidth)
    first, second = before.datagrams, now.datagrams
    if first is not None and second is not None:
        yield from _ratio(f"rate of datagrams {where}", first.bandwidth, second.bandwidth)
        yield from _ratio(
            f"round trip {where}", first.round_trip_seconds, second.round_trip_seconds
        )
        yield from _share(f"loss of datagrams {where}", first.loss, second.loss)


def _curve_changes(before: Cluster, now: Cluster) -> Iterator[Change]:
    for key, curve in now.collectives.items():
        known = before.collectives.get(key)
        shared = [size for size in curve.sizes if known is not None and size in known.sizes]
        if known is None or not shared:
            continue
        ratios = {size: curve.seconds_at(size) / known.seconds_at(size) - 1 for size in shared}
        worst = max(shared, key=lambda size: abs(ratios[size]))
        yield Change(
            name_of(key),
            known.seconds_at(worst),
            curve.seconds_at(worst),
            abs(ratios[worst]),
            statistics.median(map(abs, ratios.values())),
            points=len(shared),
            at=f"{worst:.0f} bytes",
        )


def _ratio(name: str, before: float, now: float) -> Iterator[Change]:
    if before > 0 and now > 0 and math.isfinite(before) and math.isfinite(now):
        change = abs(now / before - 1)
        yield Change(name, before, now, change, change)


def _share(name: str, before: float, now: float) -> Iterator[Change]:
    yield Change(name, before, now, abs(now - before), abs(now - before), is_share=True)

"""How far a calibration can be trusted: against itself, and against an earlier one.

`check_calibration` puts what the table says beside what is measured once more, and in other places:

    constant                    points
    a rate of products          each size that was measured; the table has one rate for all
    memory, kernels, faults     the same measurement once more
    a collective                the sizes of its curve once more, and the means between them,
                                where the table interpolates
    a link                      the curves of groups that it joins; the table has the ring
                                formulas of `communication`

error of a point = |table / measured - 1|, of seconds. Links are used for groups without a curve
alone.

`changes_between` compares two calibrations of one machine:

    change of a constant   now / before - 1; of shares (`overlap`, loss) now - before
    change of a curve      the same at each size that both have
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from lightning_topt.basics.units import format_bytes
from lightning_topt.costs.calibrate import fastest
from lightning_topt.costs.cluster import Cluster, CollectiveCurve, CurveKey, Device, Link
from lightning_topt.costs.communication import Group, mesh_groups, ring_seconds
from lightning_topt.costs.measuring import average, kept_global_state
from lightning_topt.costs.timers import (
    collective_timers,
    device_timers,
    measure_page_faults,
    process_groups,
    product_flops,
)

DEVICE_CONSTANTS = {  # fields of `Device`
    "memory_bandwidth": "memory bandwidth",
    "op_overhead_seconds": "smallest kernel",
    "framework_seconds": "framework around a kernel",
    "launch_seconds": "launch of a kernel",
    "page_fault_seconds_per_byte": "page faults",
}
_ROUNDS = 2  # of which the fastest counts, as in a calibration
_GROUP_SHARE = 0.15  # of the time, for each kind of group


# ---- Against itself


@kept_global_state()
def check_calibration(
    cluster: Cluster, *, device: torch.device | str = "cpu", budget_seconds: float = 1.5
) -> list[CheckedPoint]:
    """Return what `cluster` says beside what is measured now, in about `budget_seconds`.

    `calibrate` has measured it with these ranks. Collective: every rank calls it, and gets the
    same.
    """
    device, half = torch.device(device), budget_seconds / _ROUNDS
    devices = device_timers(device, budget_seconds=0.5 * half)
    groups = mesh_groups(cluster.num_devices, devices_per_node=cluster.devices_per_node)
    ops = {op for op, *_ in cluster.collectives}
    budgets = {
        group: (0.5 if group.size == cluster.num_devices else _GROUP_SHARE) * half
        for group in groups
    }
    with process_groups(groups) as made:
        timers = collective_timers(made, ops=ops, device=device, budgets=budgets)
        timers = {key: timer for key, timer in timers.items() if key in cluster.collectives}
        # at the sizes of the curves and between them
        for key, timer in timers.items():
            timer.sizes = sizes_between(cluster.collectives[key])
        parts: dict[Any, Callable[[], Mapping[Any, float]]] = {**devices, **timers}
        rounds = [{name: measure() for name, measure in parts.items()} for _ in range(_ROUNDS)]
    times = {name: fastest([each[name] for each in rounds]) for name in parts}
    faults = average([measure_page_faults(device)])[0]
    return [
        *_device_points(cluster, times, faults=faults),
        *(
            point
            for key in timers
            for point in _curve_points(key, cluster.collectives[key], times[key])
        ),
        *_link_points(cluster),
    ]


@dataclass(frozen=True)
class CheckedPoint:
    """Seconds at one point of a constant, as the table has them and as they were measured.

    `at` says where the constant was looked at.
    """

    constant: str
    at: str
    table: float
    measured: float

    @property
    def error(self) -> float:
        """By how much the table is off, as a share of what was measured.

        Below 0 where it has less.
        """
        return self.table / self.measured - 1


def summarize(points: Sequence[CheckedPoint]) -> list[CheckedConstant]:
    """Return the errors of each constant, in the order in which they come first."""
    found = []
    for constant in dict.fromkeys(point.constant for point in points):
        own = [point for point in points if point.constant == constant]
        worst = max(own, key=lambda point: abs(point.error))
        median = statistics.median(abs(point.error) for point in own)
        found.append(CheckedConstant(constant, len(own), median, abs(worst.error), worst.at))
    return found


@dataclass(frozen=True)
class CheckedConstant:
    """The errors of a constant at its points: shares, and where the largest is."""

    constant: str
    points: int
    median: float
    largest: float
    at: str

    def to_dict(self) -> dict[str, Any]:
        """Return plain values."""
        return asdict(self)


def sizes_between(curve: CollectiveCurve) -> list[int]:
    """Return the sizes of a curve, and the geometric means of neighbours, ascending."""
    means = (math.sqrt(a * b) for a, b in zip(curve.sizes, curve.sizes[1:], strict=False))
    return sorted({int(size) for size in (*curve.sizes, *means)})


def _device_points(
    cluster: Cluster, times: Mapping[Any, Mapping[Any, float]], *, faults: float
) -> Iterator[CheckedPoint]:
    device = cluster.device
    for (dtype, size), seconds in times["products"].items():
        table = product_flops(size) / device.flops_of(dtype)
        yield CheckedPoint(f"rate of {dtype} products", f"{size} x {size}", table, seconds)
    host = times["host"]
    again = {
        "memory_bandwidth": times["copies"]["byte"],
        "op_overhead_seconds": times["small"]["call"],
        "framework_seconds": host.get("kernel", 0.0),
        "launch_seconds": host.get("launch", 0.0),
        "page_fault_seconds_per_byte": faults,
    }
    for name, title in DEVICE_CONSTANTS.items():
        table = 1 / device.memory_bandwidth if name == "memory_bandwidth" else getattr(device, name)
        if table > 0 and again[name] > 0:
            yield CheckedPoint(title, "once more", table, again[name])


def _curve_points(
    key: CurveKey, curve: CollectiveCurve, times: Mapping[Any, float]
) -> Iterator[CheckedPoint]:
    for size, seconds in sorted(times.items()):
        place = format_bytes(size) + ("" if size in curve.sizes else ", between measured sizes")
        yield CheckedPoint(name_of(key), place, curve.seconds_at(size), seconds)


def _link_points(cluster: Cluster) -> Iterator[CheckedPoint]:
    """Yield the formula of a link at the points of the curves in groups that it alone joins."""
    local = cluster.devices_per_node
    links: list[tuple[str, Link | None, Group]] = [
        ("link inside nodes, as rings", cluster.intra, Group(local)),
        ("link between nodes, as rings", cluster.inter, Group(cluster.num_nodes, local)),
    ]
    for name, link, group in links:
        for (op, *own), curve in cluster.collectives.items():
            if link is None or op == "all_to_all" or own != [group.size, group.stride]:
                continue
            for size, seconds in zip(curve.sizes, curve.seconds, strict=True):
                table = ring_seconds(op, size=size, ranks=group.size, link=link)
                yield CheckedPoint(name, f"{op} of {format_bytes(size)}", table, seconds)


def name_of(key: CurveKey) -> str:
    """Return a curve's name for people."""
    op, size, stride = key
    return f"{op} of {size} ranks" + (f", every {stride}th" if stride > 1 else "")


# ---- Against an earlier one


def changes_between(before: Cluster, now: Cluster) -> list[Change]:
    """Return what differs between two calibrations of the same ranks.

    Constants that one of them lacks are left out.
    """
    return [
        *_device_changes(before.device, now.device),
        *_link_changes("inside nodes", before.intra, now.intra),
        *_link_changes("between nodes", before.inter, now.inter),
        *_share("overlap of exchanges", before.overlap, now.overlap),
        *_curve_changes(before, now),
    ]


def largest_and_median(changes: Sequence[Change]) -> tuple[Change, float] | None:
    """Return the largest change, and the median over constants of their largest ones.

    Without differences of shares; None where nothing is left.
    """
    ratios = [each for each in changes if not each.is_share]
    if not ratios:
        return None
    return max(ratios, key=lambda each: each.largest), statistics.median(
        each.largest for each in ratios
    )


@dataclass(frozen=True)
class Change:
    """A constant before and now, and how much its points have changed.

    Attributes:
        constant: its name for people.
        before: its value then; of a curve: seconds at the size that changed most.
        now: the same now.
        largest: the largest change of its points, without signs.
        median: the median change.
        points: how many there are.
        at: the size that changed most.
        is_share: changes are differences of shares, else shares of the value before.
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

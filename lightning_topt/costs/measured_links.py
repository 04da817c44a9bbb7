"""Time collectives over the ranks of the default process group, and what of them hides behind computation."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from lightning_topt.communication.collectives import all_gather_into, reduce_scatter_into
from lightning_topt.costs.cluster import Link
from lightning_topt.costs.collective_curves import CollectiveCurve, CurveKey
from lightning_topt.costs.ranks import average, own_rank, world_size
from lightning_topt.costs.timing import time_call, time_once

SIZES = tuple(4 << shift for shift in (10, 13, 16, 19, 22, 24))  # 4 KiB to 64 MiB
_MIN_SIZES, _MIN_REPEATS = 4, 2  # of collectives, however short the time is
_OVERLAP_BYTES, _OVERLAP_SECONDS = 4 << 20, 0.05  # at most, of one exchange beside computation
_OVERLAP_MATRIX = {"cpu": 256, "cuda": 2048}

Call = Callable[[], Any]
Points = dict[float, float]  # seconds by bytes of the whole tensor


class CollectiveTimer:
    """Times one collective by size of the whole tensor: the first call finds out how many sizes the time allows."""

    def __init__(self, make: Callable[[torch.Tensor], Call], *, device: torch.device, budget_seconds: float) -> None:
        self.make, self.device, self.budget_seconds = make, device, budget_seconds
        self.sizes: Sequence[int] = ()

    def __call__(self) -> Points:
        """Seconds by size, the same on every rank. Collective."""
        points: Points = {}
        deadline = time.perf_counter() + self.budget_seconds
        for size, larger in zip(self.sizes or SIZES, (*(self.sizes or SIZES)[1:], 0), strict=True):
            call = self.make(torch.ones(max(size // 4 // world_size(), 1) * world_size(), device=self.device))
            points[float(size)] = _time_together(call, device=self.device, deadline=deadline)
            expected = points[float(size)] * larger / size * (_MIN_REPEATS + 1)
            if not self.sizes and len(points) >= _MIN_SIZES and average([deadline - time.perf_counter()])[0] < expected:
                break
        self.sizes = [int(size) for size in points]
        return points


def collective_timers(device: torch.device, *, budget_seconds: float) -> dict[str, CollectiveTimer]:
    """A timer of each collective over all ranks; none for a single rank.

    all_gather and reduce_scatter are those that sharded plans run (`communication.collectives`).
    """
    if world_size() == 1:
        return {}
    calls = _collective_calls(world_size())
    each = budget_seconds / len(calls)
    return {op: CollectiveTimer(make, device=device, budget_seconds=each) for op, make in calls.items()}


def curve(points: Mapping[Any, float]) -> CollectiveCurve:
    """The curve through seconds by size. A larger message never takes less time; what says otherwise is noise."""
    sizes = sorted(points)
    seconds = np.maximum.accumulate([points[size] for size in sizes])
    return CollectiveCurve(tuple(sizes), tuple(float(value) for value in seconds))


def node_timer(group: dist.ProcessGroup, *, device: torch.device, budget_seconds: float) -> Callable[[], Points]:
    """A timer of all_reduces of two sizes among the ranks of a node, in all nodes at once."""

    def measure() -> Points:
        points, deadline = {}, time.perf_counter() + budget_seconds
        for size in (SIZES[0], SIZES[3]):
            call = partial(dist.all_reduce, torch.ones(size // 4, device=device), group=group)
            points[float(size)] = _time_together(call, device=device, deadline=deadline)
        return points

    return measure


def node_group(ranks_per_node: int) -> dist.ProcessGroup:
    """A new group of the ranks on this rank's node. Collective."""
    firsts = range(0, world_size(), ranks_per_node)
    groups: list[Any] = [dist.new_group(list(range(first, first + ranks_per_node))) for first in firsts]
    found: dist.ProcessGroup = groups[own_rank() // ranks_per_node]
    return found


def fit_link(curves: Mapping[CurveKey, CollectiveCurve], ranks: int) -> Link:
    """The link whose ring formula gives the smallest and the largest measured all_reduce of `ranks` ranks."""
    found = next((curve for (op, _, _), curve in curves.items() if op == "all_reduce"), None)
    if found is None:  # one rank: no exchange will ever be estimated
        return Link(latency_seconds=0.0, bandwidth=1.0)
    steps = 2 * (ranks - 1)
    size, seconds = found.sizes[-1] - found.sizes[0], found.seconds[-1] - found.seconds[0]
    if seconds <= 0:  # a single size, or no difference to be seen
        size, seconds = found.sizes[-1], found.seconds[-1]
    return Link(found.seconds[0] / steps, size * steps / (ranks * seconds))


def measure_overlap(device: torch.device, *, all_reduce: CollectiveCurve | None, budget_seconds: float) -> float:
    """Share of an all_reduce that runs beside matrix products which take about as long: the least of several rounds.

    The message has 4 MiB, less where `all_reduce`, the measured curve, says that this takes more than 50 ms; 0 for a single
    rank, which has no curve. Collective.
    """
    if all_reduce is None:
        return 0.0
    n = _OVERLAP_MATRIX["cpu" if device.type == "cpu" else "cuda"]
    left, right = torch.rand(2, n, n, device=device)
    short = [size for size in all_reduce.sizes if all_reduce.seconds_at(size) <= _OVERLAP_SECONDS]
    message = torch.ones(int(min(_OVERLAP_BYTES, max(short, default=all_reduce.sizes[0]))) // 4, device=device)

    def exchange() -> None:
        dist.all_reduce(message)

    seconds = _time_together(exchange, device=device, deadline=time.perf_counter())
    product = average([time_call(lambda: left @ right, device=device, budget_seconds=0.1 * budget_seconds)])[0]
    count = max(1, round(seconds / product))

    def compute() -> None:
        for _ in range(count):
            left @ right

    def both() -> None:
        work: Any = dist.all_reduce(message, async_op=True)
        compute()
        work.wait()

    repeats = int(np.clip(budget_seconds / (6 * seconds), 3, 10))
    times = [[time_once(call, device=device) for call in (exchange, compute, both)] for _ in range(repeats)]
    hidden = min((alone + computing - together) / min(alone, computing) for alone, computing, together in times)
    return float(np.clip(average([hidden])[0], 0.0, 1.0))


def _collective_calls(ranks: int) -> dict[str, Callable[[torch.Tensor], Call]]:
    def part(whole: torch.Tensor) -> torch.Tensor:
        return torch.ones(whole.numel() // ranks, device=whole.device)

    def gather(whole: torch.Tensor) -> Call:
        local = part(whole)
        return lambda: all_gather_into(torch.empty_like(whole), local)  # FSDP2 allocates the result each time

    def reduce(whole: torch.Tensor) -> Call:
        local = part(whole)
        return lambda: reduce_scatter_into(local, whole)

    return {
        "all_reduce": lambda whole: lambda: dist.all_reduce(whole),
        "reduce_scatter": reduce,
        "all_gather": gather,
        "broadcast": lambda whole: lambda: dist.broadcast(whole, 0),
    }


def _time_together(call: Call, *, device: torch.device, deadline: float) -> float:
    """Median seconds of a collective call, the same number of calls and the same result on every rank."""
    first = time_once(call, device=device)
    first, left = average([first, deadline - time.perf_counter()])
    repeats = int(np.clip(left / 4 / max(first, 1e-6), _MIN_REPEATS, 20))
    return float(average([float(np.median([time_once(call, device=device) for _ in range(repeats)]))])[0])

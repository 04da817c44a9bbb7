"""Time collectives in the groups that meshes of these ranks have, how long ranks wait for one
another before them, and what of them hides behind computation.

Curves are of calls back to back. In a step ranks compute before they exchange, so they come one
after another, to threads that wait for busy cores: an all_reduce of 1.5 MiB by two ranks of two
shared cores took 0.7 ms at best, on average 2.7 ms after 3 ms of products, 4.4 ms after 6 to 25 ms
and 5.1 ms after 50 to 100 ms; by four ranks 2.3 ms at best, 11 ms after 3 ms, 14 to 17 ms after 10
to 50 ms. But ranks that share cores compute faster while one of them waits, so `WaitTimer` times
whole rounds. What it measures does not grow with the size.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_topt.communication.collectives import all_gather_into, reduce_scatter_into
from lightning_topt.costs.cluster import Link
from lightning_topt.costs.collective_curves import CollectiveCurve, CurveKey
from lightning_topt.costs.groups import Group, ranks_of_groups
from lightning_topt.costs.ranks import average, own_rank, world_size
from lightning_topt.costs.timing import time_call, time_once

SIZES = tuple(4 << shift for shift in (10, 13, 16, 19, 22, 24))  # 4 KiB to 64 MiB
_MIN_SIZES, _MIN_REPEATS = 4, 2  # of collectives, however short the time is
_SHARES = {
    "broadcast": 0.5,
    "all_to_all": 0.25,
    "send_recv": 0.25,
}  # of the time of the others, which steps have more of
_OVERLAP_BYTES, _OVERLAP_SECONDS = 4 << 20, 0.05  # at most, of one exchange beside computation
_MATRIX = {"cpu": 256, "cuda": 2048}
# what ranks compute between the exchanges of a step; an activation
_WORK_SECONDS, _WAIT_BYTES = 0.02, 1 << 18
_WAIT_PARTS = 4

Call = Callable[[], Any]
Points = dict[float, float]  # seconds by bytes of the whole tensor
ProcessGroups = Mapping[Group, dist.ProcessGroup]  # this rank's, of each kind of group


class CollectiveTimer:
    """Times one collective by size of the whole tensor, in all groups of one kind at the same time,
    as they train.

    `make` is given a tensor of a multiple of `elements` elements. The first call finds out how many
    sizes the time allows.
    """

    def __init__(
        self,
        make: Callable[[Tensor], Call],
        *,
        elements: int,
        device: torch.device,
        budget_seconds: float,
    ) -> None:
        self.make, self.elements, self.device, self.budget_seconds = (
            make,
            elements,
            device,
            budget_seconds,
        )
        self.sizes: Sequence[int] = ()

    def __call__(self) -> Points:
        """Seconds by size, the same on every rank. Collective."""
        points: Points = {}
        deadline = time.perf_counter() + self.budget_seconds
        for size, larger in zip(self.sizes or SIZES, (*(self.sizes or SIZES)[1:], 0), strict=True):
            whole = torch.ones(
                max(size // 4 // self.elements, 1) * self.elements, device=self.device
            )
            seconds = _time_together(self.make(whole), device=self.device, deadline=deadline)
            points[float(whole.nbytes)] = seconds
            expected = seconds * larger / size * (_MIN_REPEATS + 1)
            if (
                not self.sizes
                and len(points) >= _MIN_SIZES
                and average([deadline - time.perf_counter()])[0] < expected
            ):
                break
        self.sizes = [int(size) for size in points]
        return points


class WaitTimer:
    """`WaitTimer` times what 20 ms of products and an all_reduce take more than both apart: the
    mean, for a step takes the sum of all. Where ranks share cores, a rank that waits leaves them to
    the others, which makes up for much of it. Making one is collective.
    """

    def __init__(
        self, group: dist.ProcessGroup, *, device: torch.device, budget_seconds: float
    ) -> None:
        self.group, self.device, self.budget_seconds = group, device, budget_seconds
        self.message = torch.ones(_WAIT_BYTES // 4, device=device)
        product = average(
            [time_call(_products(device, 1), device=device, budget_seconds=0.1 * budget_seconds)]
        )[0]
        self.work = _products(device, max(1, round(_WORK_SECONDS / product)))

    def __call__(self) -> Points:
        """Seconds at the size of the message, the same on every rank. Collective."""

        def call() -> None:
            dist.all_reduce(self.message, group=self.group)

        def after_work() -> None:
            self.work()
            call()

        first = average([time_once(after_work, device=self.device)])[0]
        repeats = int(np.clip(self.budget_seconds / max(2 * first, 1e-6), _WAIT_PARTS, 40))
        in_turn, more = repeats // _WAIT_PARTS, 0.0
        for _ in range(_WAIT_PARTS):  # in turns, for a machine that changes its speed meanwhile
            for sign, part in ((1, after_work), (-1, self.work)):
                call()
                more += sign * time_once(partial(_repeat, part, in_turn), device=self.device)
        alone = min(time_once(call, device=self.device) for _ in range(repeats))
        return {float(_WAIT_BYTES): max(average([more / (_WAIT_PARTS * in_turn) - alone])[0], 0.0)}


def _repeat(call: Call, times: int) -> None:
    for _ in range(times):
        call()


@contextmanager
def process_groups(groups: Sequence[Group]) -> Iterator[ProcessGroups]:
    """Yield this rank's process group of each kind in `groups`, as long as the context lasts.
    Collective.

    All ranks make all groups of a kind, those beside their own too, as torch demands.
    """
    made: dict[Group, dist.ProcessGroup] = {}
    try:
        for group in groups:
            for ranks in ranks_of_groups(group, world_size()):
                found: Any = (
                    dist.group.WORLD if len(ranks) == world_size() else dist.new_group(ranks)
                )
                if own_rank() in ranks:
                    made[group] = found
        yield made
    finally:
        for group, found in made.items():
            if group.size != world_size():
                dist.destroy_process_group(found)


def collective_timers(
    groups: ProcessGroups,
    *,
    ops: Collection[str],
    device: torch.device,
    budgets: Mapping[Group, float],
) -> dict[CurveKey, CollectiveTimer]:
    """Return a timer of each of `ops` in each kind of group, for which all of them together have
    the seconds in `budgets`.

    all_gather and reduce_scatter are those that sharded plans run (`communication.collectives`).
    """
    timers = {}
    for group, process_group in groups.items():
        calls = {
            op: make
            for op, make in _collective_calls(group.size, process_group).items()
            if op in ops
        }
        each = budgets[group] / sum(_SHARES.get(op, 1.0) for op in calls)
        for op, make in calls.items():
            elements = group.size ** (
                2 if op == "all_to_all" else 1
            )  # every rank sends a part of its part to every other
            seconds = each * _SHARES.get(op, 1.0)
            timers[op, group.size, group.stride] = CollectiveTimer(
                make, elements=elements, device=device, budget_seconds=seconds
            )
    return timers


def curve(points: Mapping[Any, float], *, wait_seconds: float = 0.0) -> CollectiveCurve:
    """Return the curve through seconds by size. A larger message never takes less time: neighbours
    that say otherwise get their geometric mean (pool adjacent violators; Ayer et al., Ann. Math.
    Statist. 26(4), 1955).
    """
    sizes = sorted(points)
    pools: list[list[float]] = []
    for size in sizes:
        pools.append([math.log(points[size])])
        while len(pools) > 1 and statistics.mean(pools[-2]) > statistics.mean(pools[-1]):
            last = pools.pop()
            pools[-1] += last
    seconds = tuple(math.exp(statistics.mean(pool)) for pool in pools for _ in pool)
    return CollectiveCurve(tuple(sizes), seconds, wait_seconds)


def fit_link(curves: Mapping[CurveKey, CollectiveCurve], group: Group) -> Link:
    """Return the link whose ring formula gives the smallest and the largest measured all_reduce in
    groups like `group`.
    """
    found = curves.get(("all_reduce", group.size, group.stride))
    if found is None:  # one rank: no exchange will ever be estimated
        return Link(latency_seconds=0.0, bandwidth=1.0)
    steps = 2 * (group.size - 1)
    size, seconds = found.sizes[-1] - found.sizes[0], found.seconds[-1] - found.seconds[0]
    if seconds <= 0:  # a single size, or no difference to be seen
        size, seconds = found.sizes[-1], found.seconds[-1]
    return Link(found.seconds[0] / steps, size * steps / (group.size * seconds))


def measure_overlap(
    device: torch.device, *, all_reduce: CollectiveCurve | None, budget_seconds: float
) -> float:
    """Return the share of an all_reduce that runs beside matrix products which take about as long:
    the least of several rounds.

    The message has 4 MiB, less where `all_reduce`, the measured curve, says that this takes more
    than 50 ms; 0 for a single rank, which has no curve. Collective.
    """
    if all_reduce is None:
        return 0.0
    short = [size for size in all_reduce.sizes if all_reduce.seconds_at(size) <= _OVERLAP_SECONDS]
    message = torch.ones(
        int(min(_OVERLAP_BYTES, max(short, default=all_reduce.sizes[0]))) // 4, device=device
    )

    def exchange() -> None:
        dist.all_reduce(message)

    seconds = _time_together(exchange, device=device, deadline=time.perf_counter())
    product = average(
        [time_call(_products(device, 1), device=device, budget_seconds=0.1 * budget_seconds)]
    )[0]
    compute = _products(device, max(1, round(seconds / product)))

    def both() -> None:
        work: Any = dist.all_reduce(message, async_op=True)
        compute()
        work.wait()

    repeats = int(np.clip(budget_seconds / (6 * seconds), 3, 10))
    times = [
        [time_once(call, device=device) for call in (exchange, compute, both)]
        for _ in range(repeats)
    ]
    hidden = min(
        (alone + computing - together) / min(alone, computing)
        for alone, computing, together in times
    )
    return float(np.clip(average([hidden])[0], 0.0, 1.0))


def _collective_calls(ranks: int, group: dist.ProcessGroup) -> dict[str, Callable[[Tensor], Call]]:
    def part(whole: Tensor) -> Tensor:
        return torch.ones(whole.numel() // ranks, device=whole.device)

    def gather(whole: Tensor) -> Call:
        local = part(whole)
        return lambda: all_gather_into(
            torch.empty_like(whole), local, group=group
        )  # FSDP2 allocates the result each time

    def reduce(whole: Tensor) -> Call:
        local = part(whole)
        return lambda: reduce_scatter_into(local, whole, group=group)

    def exchange(whole: Tensor) -> Call:
        sent, received = part(whole), part(whole)
        return lambda: dist.all_to_all_single(received, sent, group=group)

    def pass_on(whole: Tensor) -> Call:
        """Return a call that sends from every rank to the next one of its group."""
        received, rank = torch.empty_like(whole), dist.get_rank(group)
        send = dist.P2POp(dist.isend, whole, group=group, group_peer=(rank + 1) % ranks)
        receive = dist.P2POp(dist.irecv, received, group=group, group_peer=(rank - 1) % ranks)

        def call() -> None:
            for work in dist.batch_isend_irecv([send, receive]):
                work.wait()

        return call

    return {
        "all_reduce": lambda whole: lambda: dist.all_reduce(whole, group=group),
        "reduce_scatter": reduce,
        "all_gather": gather,
        "broadcast": lambda whole: lambda: dist.broadcast(whole, group=group, group_src=0),
        "all_to_all": exchange,
        "send_recv": pass_on,
    }


def _products(device: torch.device, count: int) -> Call:
    n = _MATRIX["cpu" if device.type == "cpu" else "cuda"]
    left, right = torch.rand(2, n, n, device=device)

    def compute() -> None:
        for _ in range(count):
            left @ right

    return compute


def _time_together(call: Call, *, device: torch.device, deadline: float) -> float:
    """Median seconds of a collective call, the same number of calls and the same result on every
    rank.
    """
    first = time_once(call, device=device)
    first, left = average([first, deadline - time.perf_counter()])
    repeats = int(np.clip(left / 4 / max(first, 1e-6), _MIN_REPEATS, 20))
    return float(
        average([float(np.median([time_once(call, device=device) for _ in range(repeats)]))])[0]
    )

"""Measure the machine this process runs on: a Cluster with the rates that programs get here, now.

Every rank of the default process group calls these functions at the same time. Results are averaged
over ranks and equal on all of them. Without a process group one process measures itself. Random
generators stay as they are.

A busy moment of the machine must not decide about a plan: each part is measured in two halves, with
all others between them, and again while the two fastest differ, or a rank had no core for too long
(`repeat_parts`). What was busy in every round is marked: `Cluster.busy_share`.
"""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch

from lightning_topt.basics.core_wait import CoreWait, is_busy
from lightning_topt.communication.collectives import backend_of
from lightning_topt.costs.cluster import (
    COLLECTIVES,
    Cluster,
    CollectiveCurve,
    CurveKey,
    Device,
    Link,
)
from lightning_topt.costs.communication import Group, mesh_groups
from lightning_topt.costs.compute import KernelKey, kernel_key, roofline_seconds
from lightning_topt.costs.measuring import (
    average,
    kept_global_state,
    most,
    synchronize,
    time_issue,
    time_kernel,
    world_size,
)
from lightning_topt.costs.timers import (
    WaitTimer,
    collective_timers,
    curve,
    device_timers,
    fit_link,
    measure_datagrams,
    measure_overlap,
    measure_page_faults,
    measured_device,
    process_groups,
)
from lightning_topt.graph.kernels import make_call
from lightning_topt.graph.op_graph import Kernel, OpGraph

USUAL_COLLECTIVES = COLLECTIVES[:4]  # of data parallelism
_GROUP_SHARE = 0.15  # of the time, for each kind of group beside that of all ranks
_OVERLAPS_AGREE = 0.2
_MANY_LAUNCHES = 2e-4  # seconds of the host for a call: those of one kernel are 30 us
_SMALL_SHARE, _LATEST = 0.1, 3  # of the kernels' expected seconds; of the time to measure them in
_AGREE = 1.2  # two times are the same within this factor
_MAX_ROUNDS = 5
Part = TypeVar("Part", bound=Hashable)
Times = Mapping[Any, float]  # seconds by what was measured


@kept_global_state()
def calibrate(
    *,
    device: torch.device | str = "cpu",
    num_nodes: int = 1,
    budget_seconds: float = 1.5,
    collectives: Collection[str] = USUAL_COLLECTIVES,
    datagrams: bool = False,
) -> Cluster:
    """Measure device and links, in about `budget_seconds` altogether, 2 s on a busy machine.

    Collective: every rank calls it. The least that is measured takes longer than that over slow
    links.

    Half of the time goes to `collectives` of 4 KiB to 64 MiB (CUDA: 256 MiB) over all ranks, as
    many sizes as it allows; the rest to matrix products per dtype, memory bandwidth, the cost of a
    small operator, and to what an all_reduce hides behind matrix products. Each other kind of group
    that a mesh of these ranks can have (`mesh_groups`; two ranks have none) takes a sixth of the
    time more, all groups of a kind at once. Making groups and opening their connections comes
    before, and is not counted. Each part is measured in two halves, with all the others between
    them. Where a time of the halves differs by more than 20 %, or other programs had the cores of
    CPU ranks, that part is measured again, until 1.4 times the time is over; of all rounds the
    fastest counts, of waits the median.

    Args:
        device: what ranks train on.
        num_nodes: how many machines the ranks are on.
        budget_seconds: as above.
        collectives: those that are measured, all_reduce among them.
        datagrams: measure loss, round trip and rate of these too, which takes a third of the time
            more.

    Raises:
        ValueError: unless the ranks can be spread evenly over that many nodes.
    """
    assert "all_reduce" in collectives and set(collectives) <= set(COLLECTIVES)
    device, ranks = torch.device(device), world_size()
    if num_nodes < 1 or ranks % num_nodes:
        raise ValueError(f"{ranks} ranks cannot be spread evenly over {num_nodes} nodes")
    local = ranks // num_nodes
    half = 0.5 * budget_seconds
    groups = mesh_groups(ranks, devices_per_node=local)
    budgets = {group: (0.45 if group.size == ranks else _GROUP_SHARE) * half for group in groups}
    allowed = 1.4 * budget_seconds * (1 + _GROUP_SHARE * (len(groups) - 1))
    computing: dict[Any, Callable[[], Times]] = dict(
        device_timers(device, budget_seconds=0.35 * half)
    )
    # an accelerator's times are its own, whoever has the cores
    watched = {
        name: WatchedPart(measure, ranks=local)
        for name, measure in computing.items()
        if device.type == "cpu"
    }
    # rounds of every part: device, collectives, waits
    with process_groups(groups) as made:
        timers = collective_timers(made, ops=collectives, device=device, budgets=budgets)
        waits = {
            ("wait", group): WaitTimer(found, device=device, budget_seconds=budgets[group] / 4)
            for group, found in made.items()
        }
        deadline = time.perf_counter() + allowed  # connections are open by now
        rounds = repeat_parts(
            computing | watched | timers | waits,
            seconds_left=lambda: average([deadline - time.perf_counter()])[0],
            busy=lambda name: name in watched and watched[name].busy_share > 0,
        )
    # from times to curves, links and rates
    times = {name: fastest(found) for name, found in rounds.items()}
    curves = {key: curve(times[key], wait_seconds=_wait(rounds, key)) for key in timers}
    inter = fit_link(curves, Group(num_nodes, local))
    intra = fit_link(curves, Group(local)) if local > 1 else inter
    if datagrams:
        inter, intra = _with_datagrams(
            inter, intra, num_nodes=num_nodes, local=local, budget_seconds=budget_seconds / 3
        )
    # All ranks begin together: that they take memory at the same time costs each a third more, as
    # in a step.
    average([0.0])
    faults = average([measure_page_faults(device)])[0]
    measured = measured_device(device, times, page_fault_seconds_per_byte=faults)
    return Cluster(
        name=f"measured_{platform.node() or 'here'}",
        device=measured,
        devices_per_node=local,
        num_nodes=num_nodes,
        intra=intra,
        inter=inter if num_nodes > 1 else None,
        collectives=curves,
        overlap=_overlap(
            device, curves.get(("all_reduce", ranks, 1)), budget_seconds=0.1 * budget_seconds
        ),
        backend=backend_of(device) if ranks > 1 else ("gloo" if device.type == "cpu" else "nccl"),
        source=f"measured by {ranks} rank(s) with torch {torch.__version__} on {measured.name}",
        busy_share=max((part.busy_share for part in watched.values()), default=0.0),
    )


def _with_datagrams(
    inter: Link, intra: Link, *, num_nodes: int, local: int, budget_seconds: float
) -> tuple[Link, Link]:
    """Return the links with what was measured of datagrams.

    In one node, whose ranks have one link, both.
    """
    if num_nodes * local == 1:
        return inter, intra
    if num_nodes == 1 or local == 1:
        path = measure_datagrams(Group(num_nodes * local), budget_seconds=budget_seconds)
        return replace(inter, datagrams=path), replace(intra, datagrams=path)
    between = measure_datagrams(Group(num_nodes, local), budget_seconds=budget_seconds / 2)
    inside = measure_datagrams(Group(local), budget_seconds=budget_seconds / 2)
    return replace(inter, datagrams=between), replace(intra, datagrams=inside)


def _wait(rounds: Mapping[Any, Sequence[Mapping[Any, float]]], key: CurveKey) -> float:
    """Return what ranks wait for one another before a collective.

    Of messages between two ranks, schedules say it.
    """
    op, *group = key
    return 0.0 if op == "send_recv" else next(iter(usual(rounds["wait", Group(*group)]).values()))


def _overlap(
    device: torch.device, all_reduce: CollectiveCurve | None, *, budget_seconds: float
) -> float:
    # The mean of two halves; where they disagree, the median of three
    half = 0.5 * budget_seconds
    shares = [measure_overlap(device, all_reduce=all_reduce, budget_seconds=half) for _ in range(2)]
    if abs(shares[0] - shares[1]) > _OVERLAPS_AGREE:
        shares.append(measure_overlap(device, all_reduce=all_reduce, budget_seconds=half))
    return statistics.median(shares)


# ---- Repeat measurements until they agree


class WatchedPart:
    """A part in which ranks compute, and how long other programs had their cores meanwhile.

    `ranks` of them are on one machine; `measure` returns the times of a round.
    """

    def __init__(self, measure: Callable[[], Times], *, ranks: int) -> None:
        self._measure, self._ranks = measure, ranks
        self._shares: list[float] = []  # of each round, the same on all ranks

    def __call__(self) -> Times:
        """Return the times of a round. Collective."""
        watch = CoreWait(threads=torch.get_num_threads())
        times = self._measure()
        self._shares.append(most(watch.share()))
        return times

    @property
    def busy_share(self) -> float:
        """The share of the quietest round, where that is one of a busy machine; else 0."""
        return busy_share(min(self._shares, default=0.0), ranks=self._ranks)


def busy_share(share: float, *, ranks: int) -> float:
    """Return `share`, of `CoreWait`, where it is one of a busy machine with `ranks`; else 0."""
    return min(share, 1.0) if is_busy(share, ranks=ranks, threads=torch.get_num_threads()) else 0.0


def repeat_parts(
    parts: Mapping[Part, Callable[[], Times]],
    *,
    seconds_left: Callable[[], float],
    busy: Callable[[Part], bool] = lambda _: False,
) -> dict[Part, list[Times]]:
    """Return the rounds of every part, repeated while they differ.

    Every part is measured in two halves, one after all others, and again while the two fastest
    differ: when a time in one is more than 20 % above the same time in the other. A part that is
    still `busy` is measured again too. There are at most five rounds, and no more when
    `seconds_left` returns less than 0. `fastest` and `usual` make one time of them.

    All ranks must get the same times and seconds (`measuring.average`), as they then repeat the
    same parts.
    """
    rounds: dict[Part, list[Times]] = {name: [] for name in parts}
    for _ in range(2):
        for name, measure in parts.items():
            rounds[name].append(measure())
    for _ in range(_MAX_ROUNDS - 2):
        again = [name for name, times in rounds.items() if not agree(times) or busy(name)]
        if not again or seconds_left() < 0:
            break
        for name in again:
            rounds[name].append(parts[name]())
    return rounds


def agree(rounds: Sequence[Times]) -> bool:
    """Return whether of every time the two least are within 20 %."""
    by_key = (sorted(times[key] for times in rounds if key in times) for key in fastest(rounds))
    return all(len(times) > 1 and times[1] <= _AGREE * times[0] for times in by_key)


def fastest(rounds: Sequence[Times]) -> dict[Hashable, float]:
    """Return the least of every time.

    For work on one device, which other programs can only make slower.
    """
    return _of_each(rounds, min)


def usual(rounds: Sequence[Times]) -> dict[Hashable, float]:
    """Return the median of every time.

    For what varies by itself, such as how long ranks wait for one another.
    """
    return _of_each(rounds, statistics.median)


def _of_each(
    rounds: Sequence[Times], choose: Callable[[list[float]], float]
) -> dict[Hashable, float]:
    found: dict[Hashable, list[float]] = {}
    for times in rounds:
        for key, seconds in times.items():
            found.setdefault(key, []).append(seconds)
    return {key: choose(seconds) for key, seconds in found.items()}


# ---- Kernels of a graph


@kept_global_state()
def measure_kernels(
    graph: OpGraph,
    *,
    device: torch.device | str = "cpu",
    budget_seconds: float = 2.0,
    known: Collection[KernelKey] = (),
) -> dict[KernelKey, float]:
    """Return the seconds of the graph's kernels on `device` at ``graph.batch_size``.

    Collective: all ranks measure the same kernels at the same time, those expected to cost most
    first. It ends when `budget_seconds` are over, or up to twice that later, once what is left is
    expected to be less than a tenth of the step. Left out are kernels that cannot be made outside
    the model, for which formulas stand in (`estimate_kernel_seconds`), and those that are `known`.
    """
    device = torch.device(device)
    start = time.perf_counter()
    by_cost = _by_cost(graph)
    ahead = sum(cost for _, cost in by_cost.values())
    enough = _SMALL_SHARE * ahead
    seconds: dict[KernelKey, float] = {}
    for key, (kernel, cost) in by_cost.items():
        ahead -= cost
        if key in known:
            continue
        call = _try_call(kernel, device)
        possible, spent = average([float(call is not None), time.perf_counter() - start])
        if spent >= budget_seconds * (1 if ahead + cost < enough else _LATEST):
            break
        if possible == 1.0 and call is not None:
            seconds[key] = time_kernel(call, device=device, budget_seconds=0.0, max_repeats=2)
            # cuDNN's recurrent layers launch hundreds of kernels in a call, which ends with them
            if device.type != "cpu" and (issue := time_issue(call, device=device)) > _MANY_LAUNCHES:
                seconds[key] = max(seconds[key], issue)
    return dict(zip(seconds, average([*seconds.values()]), strict=True))


def _by_cost(graph: OpGraph) -> dict[KernelKey, tuple[Kernel, float]]:
    """Return distinct kernels and their expected seconds, most seconds altogether first.

    Expected by a rough roofline.
    """
    rough = Device("any", 1, {"float32": 5e10}, 1e10, 2e-6)
    totals: dict[KernelKey, float] = {}
    kernels: dict[KernelKey, Kernel] = {}
    for op in graph.ops:
        for kernel in (*op.forward, *op.backward):
            key = kernel_key(kernel)
            kernels[key] = kernel
            totals[key] = totals.get(key, 0.0) + kernel.count * roofline_seconds(
                kernel, batch_size=graph.batch_size, device=rough
            )
    return {
        key: (kernels[key], totals[key])
        for key in sorted(totals, key=lambda key: (-totals[key], key))
    }


def _try_call(kernel: Kernel, device: torch.device) -> Callable[[], None] | None:
    # A call of the kernel that has worked once; None where it cannot be made
    try:
        call = make_call(kernel, device)
        call()
    except (ValueError, RuntimeError, IndexError, TypeError):
        return None
    synchronize(device)
    return call

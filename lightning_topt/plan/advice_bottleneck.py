"""Advice on bottlenecks: each resource of the machines twice as fast, one at a time, and the same
plan priced again.

    gain of a resource = T(plan) / T(plan, resource twice as fast) - 1

The next bottleneck is the largest gain once the first one is twice as fast.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import replace

from lightning_topt.basics.units import format_bytes
from lightning_topt.costs.cluster import Cluster
from lightning_topt.costs.collective_curves import CollectiveCurve
from lightning_topt.costs.groups import Group
from lightning_topt.costs.node_types import Device, Link
from lightning_topt.plan.advice_page import MODEL, Advice
from lightning_topt.plan.choose import NoPlanFitsError, choose
from lightning_topt.plan.parallel_plan import ParallelPlan
from lightning_topt.plan.plan_frontier import PlanFrontier
from lightning_topt.plan.priced_plan import price_plan
from lightning_topt.plan.scenarios import Estimate
from lightning_topt.plan.search_request import SearchRequest

FASTER = 2.0
_LITTLE = 0.02  # gain: no bottleneck
_FORMULA = "gain = T / T(resource twice as fast) - 1"


def _device(change: Callable[[Device], Device]) -> Callable[[Cluster], Cluster]:
    def of(cluster: Cluster) -> Cluster:
        if not cluster.nodes:
            return replace(cluster, device=change(cluster.device))
        nodes = [replace(node, device=change(node.device)) for node in cluster.nodes]
        return _of_nodes(cluster, nodes=nodes)

    return of


def _of_nodes(cluster: Cluster, **changed: object) -> Cluster:
    common = {"nodes", "intra", "device", "devices_per_node", "num_nodes"}
    rest = {
        f.name: getattr(cluster, f.name)
        for f in dataclasses.fields(cluster)
        if f.name not in common
    }
    given: dict[str, object] = {"nodes": cluster.nodes, "intra": cluster.intra, **rest, **changed}
    return Cluster.of_nodes(**given)  # type: ignore[arg-type]


def _faster_link(link: Link) -> Link:
    return Link(link.latency_seconds / FASTER, link.bandwidth * FASTER)


def _intra(cluster: Cluster) -> Cluster:
    intra, curves = _faster_link(cluster.intra), _faster_curves(cluster, inside=True)
    if not cluster.nodes:
        return replace(cluster, intra=intra, collectives=curves)
    nodes = [
        replace(node, intra=_faster_link(node.intra or cluster.intra)) for node in cluster.nodes
    ]
    return _of_nodes(cluster, nodes=nodes, intra=intra, collectives=curves)


def _inter(cluster: Cluster) -> Cluster:
    assert cluster.inter is not None
    return replace(
        cluster,
        inter=_faster_link(cluster.inter),
        collectives=_faster_curves(cluster, inside=False),
    )


def _faster_curves(
    cluster: Cluster, *, inside: bool
) -> Mapping[tuple[str, int, int], CollectiveCurve]:
    return {
        key: replace(curve, seconds=tuple(seconds / FASTER for seconds in curve.seconds))
        if Group(*key[1:]).is_inside(cluster.devices_per_node) == inside
        else curve
        for key, curve in cluster.collectives.items()
    }


def _arithmetic(device: Device) -> Device:
    return replace(device, flops={dtype: rate * FASTER for dtype, rate in device.flops.items()})


def _host(device: Device) -> Device:
    names = "launch_seconds", "framework_seconds", "op_overhead_seconds"
    return replace(device, **{name: getattr(device, name) / FASTER for name in names})


RESOURCES: Mapping[str, Callable[[Cluster], Cluster]] = {
    "arithmetic of the device": _device(_arithmetic),
    "memory bandwidth of the device": _device(
        lambda d: replace(d, memory_bandwidth=d.memory_bandwidth * FASTER)
    ),
    "host (launching kernels)": _device(_host),
    "links inside nodes": _intra,
    "network between nodes": _inter,
}


def seconds_on(request: SearchRequest, plan: ParallelPlan, cluster: Cluster) -> float:
    """Return the seconds of a step of `plan`, one that `search_plans(request)` found, on another
    cluster of as many devices; from formulas alone, without measured kernels.
    """
    return price_plan(
        replace(request, cluster=cluster, kernel_seconds={}), plan
    ).predicted.step_seconds


def gains(request: SearchRequest, plan: ParallelPlan, cluster: Cluster) -> dict[str, float]:
    """Return how many more steps per second (0.1: 10 %) each resource brings that is twice as fast,
    on `cluster`.
    """
    base = seconds_on(request, plan, cluster)
    names = [
        name for name in RESOURCES if name != "network between nodes" or cluster.inter is not None
    ]
    return {name: base / seconds_on(request, plan, RESOURCES[name](cluster)) - 1 for name in names}


def advise_bottleneck(
    request: SearchRequest, at: Estimate, frontier: PlanFrontier, *, limit: float
) -> list[Advice]:
    """Return where the plan `at` is slow, and where once that is mended; what twice the memory
    would bring.

    `limit` are the bytes that a device may use.
    """
    return [*_speed(request, at), _memory(at, frontier, limit)]


def _speed(request: SearchRequest, at: Estimate) -> list[Advice]:
    plan, cluster = at.point.plan, request.cluster
    first = gains(request, plan, cluster)
    slow = max(first, key=lambda name: first[name])
    second = gains(request, plan, RESOURCES[slow](cluster))
    following = max(second, key=lambda name: second[name])
    rows = [
        {"twice as fast": name, "gain": first[name], f"gain after {slow}": second[name]}
        for name in sorted(first, key=lambda name: -first[name])
    ]
    bubble = (
        ""
        if plan.schedule is None
        else " Waits of its stages for one another shrink with the slowest of them."
    )
    if first[slow] < _LITTLE:
        sentence = (
            "No resource alone is a bottleneck: twice as fast, none brings "
            f"{100 * _LITTLE:.0f} %.{bubble}"
        )
    else:
        sentence = (
            f"The {slow}: twice as fast it brings {100 * first[slow]:.0f} % more steps per second. "
            f"Next: the {following}, "
            f"{100 * second[following]:.0f} % after that.{bubble}"
        )
    inputs = {"T": seconds_on(request, plan, cluster), "cluster": cluster.name}
    return [
        Advice(
            "bottleneck",
            sentence,
            first[slow],
            "of the steps per second",
            _FORMULA,
            inputs,
            MODEL,
            rows,
        )
    ]


def _memory(at: Estimate, frontier: PlanFrontier, limit: float) -> Advice:
    """The frontier holds the plans that need more memory as well."""
    now = at.point.step_seconds
    try:
        larger = choose(frontier.candidates, memory_limit=2 * limit).step_seconds
    except NoPlanFitsError:
        larger = now
    gain = max(now / min(larger, now) - 1, 0.0)
    brings = f"{100 * gain:.0f} % more steps per second" if gain >= _LITTLE else "nothing"
    return Advice(
        "bottleneck",
        f"Memory: twice as much brings {brings}; the plan takes {format_bytes(at.peak_bytes)} of "
        f"{format_bytes(limit)}.",
        gain,
        "of the steps per second",
        "gain = T / T(fastest plan within twice the memory) - 1",
        {"T": now, "T within twice the memory": larger, "limit": limit},
        f"{MODEL}; the frontier of time and memory (TensorOpt, arXiv 2004.10856)",
    )

"""Advice on bottlenecks: resources of the machines, and data.

Each resource of the machines is made twice as fast, one at a time, and the same plan is priced
again. The next bottleneck is the largest gain once the first one is twice as fast. Data come from
what `topt stalls` measured: whether training waits for them, and the least cache worth having.

    equation                                        function           source
    gain = T(plan) / T(plan, twice as fast) - 1     advise_bottleneck  the cost model
    step of a job = max(T, B / rate of the loader)  advise_data        the slower of the two
    x* = (D / S - N / R) / (D / S - D / C),         least_share        DS-Analyzer, arXiv 2007.06775
         R = min(P, G)                                                 (derived)

D: bytes of all samples; S: bytes/s of their source; C: those of the cache; N: samples; P and G:
samples per second of preparation and of the device. The advice itself plays the loader through
(`data/stalls/model.py`), as its stages share cores.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from lightning_topt.basics.units import format_bytes
from lightning_topt.costs.cluster import Cluster, CollectiveCurve, Device, Link
from lightning_topt.costs.communication import Group
from lightning_topt.data.stalls.model import NEARLY, SetUp, StallCosts, batch_seconds, least_cache
from lightning_topt.plan.advice import MODEL, Advice
from lightning_topt.plan.choose import NoPlanFitsError, choose
from lightning_topt.plan.explanation import price_plan
from lightning_topt.plan.parallel_plan import ParallelPlan
from lightning_topt.plan.plan_frontier import PlanFrontier
from lightning_topt.plan.plan_search import SearchRequest
from lightning_topt.plan.scenarios import Estimate

FASTER = 2.0
_LITTLE = 0.02  # gain: no bottleneck
_FORMULA = "gain = T / T(resource twice as fast) - 1"
_SOURCE = (
    "Mohan et al., Analyzing and Mitigating Data Stalls in DNN Training, arXiv 2007.06775, section "
    "3"
)
_RUN = "run `topt stalls` with the same model and data, and give its stalls.json as stalls="


# ---- resources of the machines


def advise_bottleneck(
    request: SearchRequest, at: Estimate, frontier: PlanFrontier, *, limit: float
) -> list[Advice]:
    """Return where the plan `at` is slow, and where once that is mended.

    It also says what twice the memory would bring. `limit` are the bytes that a device may use.
    """
    return [*_speed(request, at), _memory(at, frontier, limit)]


def _speed(request: SearchRequest, at: Estimate) -> list[Advice]:
    plan, cluster = at.point.plan, request.cluster
    # the first bottleneck, and the next one once that is mended
    # each resource alone, twice as fast; then again on machines where the slowest is
    first = gains(request, plan, cluster)
    slow = max(first, key=lambda name: first[name])
    second = gains(request, plan, RESOURCES[slow](cluster))
    following = max(second, key=lambda name: second[name])
    rows = [
        {"twice as fast": name, "gain": first[name], f"gain after {slow}": second[name]}
        for name in sorted(first, key=lambda name: -first[name])
    ]
    # waits of stages are no resource, but shrink with what makes the slowest stage slow
    bubble = (
        ""
        if plan.schedule is None
        else " Waits of its stages for one another shrink with the slowest of them."
    )
    if first[slow] < _LITTLE:
        sentence = (
            f"No resource alone is a bottleneck: twice as fast, none brings {100 * _LITTLE:.0f} "
            f"%.{bubble}"
        )
    else:
        sentence = (
            f"The {slow}: twice as fast it brings {100 * first[slow]:.0f} % more steps per second. "
            f"Next: the {following}, {100 * second[following]:.0f} % after that.{bubble}"
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
    now = at.point.step_seconds
    # the frontier has the plans that need more memory as well
    # None fits at all, or none is faster: then memory is not what limits.
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


def gains(request: SearchRequest, plan: ParallelPlan, cluster: Cluster) -> dict[str, float]:
    """Return the gain in steps per second (0.1: 10 %) of each resource that is twice as fast."""
    base = seconds_on(request, plan, cluster)
    # one node has no network between nodes
    names = [
        name for name in RESOURCES if name != "network between nodes" or cluster.inter is not None
    ]
    return {name: base / seconds_on(request, plan, RESOURCES[name](cluster)) - 1 for name in names}


def seconds_on(request: SearchRequest, plan: ParallelPlan, cluster: Cluster) -> float:
    """Return the seconds of a step of `plan` on another cluster of as many devices.

    The plan is one that `search_plans(request)` found. Formulas alone, without measured kernels.
    """
    return price_plan(
        # kernels were measured on the machine as it is
        replace(request, cluster=cluster, kernel_seconds={}),
        plan,
    ).predicted.step_seconds


# ---- clusters with one resource twice as fast


def _device(change: Callable[[Device], Device]) -> Callable[[Cluster], Cluster]:
    """Return a change of clusters that changes the devices of all nodes."""

    def of(cluster: Cluster) -> Cluster:
        # a cluster of several kinds of nodes takes its totals from them: change each, build it anew
        if not cluster.nodes:
            return replace(cluster, device=change(cluster.device))
        nodes = [replace(node, device=change(node.device)) for node in cluster.nodes]
        return _of_nodes(cluster, nodes=nodes)

    return of


def _of_nodes(cluster: Cluster, **changed: object) -> Cluster:
    """Return a cluster of several kinds of nodes with some of its fields changed."""
    common = {"nodes", "intra", "device", "devices_per_node", "num_nodes"}
    rest = {
        # what follows from the nodes is left to `Cluster.of_nodes`
        f.name: getattr(cluster, f.name)
        for f in dataclasses.fields(cluster)
        if f.name not in common
    }
    given: dict[str, object] = {"nodes": cluster.nodes, "intra": cluster.intra, **rest, **changed}
    return Cluster.of_nodes(**given)  # type: ignore[arg-type]


def _intra(cluster: Cluster) -> Cluster:
    intra, curves = _faster_link(cluster.intra), _faster_curves(cluster, inside=True)
    if not cluster.nodes:
        return replace(cluster, intra=intra, collectives=curves)
    nodes = [
        # a node without a link of its own has that of the cluster
        replace(node, intra=_faster_link(node.intra or cluster.intra))
        for node in cluster.nodes
    ]
    return _of_nodes(cluster, nodes=nodes, intra=intra, collectives=curves)


def _inter(cluster: Cluster) -> Cluster:
    assert cluster.inter is not None
    return replace(
        cluster,
        inter=_faster_link(cluster.inter),
        collectives=_faster_curves(cluster, inside=False),
    )


def _faster_link(link: Link) -> Link:
    return Link(link.latency_seconds / FASTER, link.bandwidth * FASTER)


def _faster_curves(
    cluster: Cluster, *, inside: bool
) -> Mapping[tuple[str, int, int], CollectiveCurve]:
    return {
        # measured curves stand for the links below them: half the seconds where their group is
        key: replace(curve, seconds=tuple(seconds / FASTER for seconds in curve.seconds))
        if Group(*key[1:]).is_inside(cluster.devices_per_node) == inside
        else curve
        for key, curve in cluster.collectives.items()
    }


def _arithmetic(device: Device) -> Device:
    return replace(device, flops={dtype: rate * FASTER for dtype, rate in device.flops.items()})


def _host(device: Device) -> Device:
    # what the host takes for each kernel and operator
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


# ---- data


@dataclass(frozen=True)
class MeasuredStalls:
    """What `stalls.json` holds of a loader: costs and set-up, of one process."""

    costs: StallCosts
    setup: SetUp

    @classmethod
    def read(cls, data: Any) -> MeasuredStalls:
        """Read the values of a ``stalls.json``. Raises ValueError for others."""
        try:
            costs: dict[str, Any] = {
                # JSON has no infinity: null is one
                k: math.inf if v is None else v
                for k, v in dict(data["costs"]).items()
            }
            return cls(StallCosts(**costs), SetUp(**data["set_up"]))
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"stalls is a stalls.json that `topt stalls` wrote, and this is none: {error}"
            ) from error

    @property
    def samples_per_second(self) -> float:
        """Samples per second that the loader delivers to a device that takes no time."""
        # a device that takes next to no time never makes the loader wait
        fast = dataclasses.replace(self.setup, step_speedup=1e6)
        return self.costs.batch_size / batch_seconds(self.costs, fast)


def advise_data(at: Estimate, stalls: MeasuredStalls | None) -> list[Advice]:
    """Return whether the plan `at` would wait for its data, and what cache is worth having."""
    if stalls is None:
        return [
            Advice(
                "data", f"Whether training waits for data is not known: {_RUN}.", source=_SOURCE
            ),
            Advice("cache", f"The least useful cache is not known: {_RUN}.", source=_SOURCE),
        ]
    return [_loader(at, stalls), _cache(at, stalls)]


def _loader(at: Estimate, stalls: MeasuredStalls) -> Advice:
    # both per data rank: what the plan takes, what one loader gives
    taken, given = _per_process(at), stalls.samples_per_second
    ratio = taken / given
    says = "is fast enough" if ratio <= 1 else f"is too slow: steps take {ratio:.2f} times as long"
    return Advice(
        "data",
        f"A loader as measured {says}; it delivers {given:.4g} samples per second, a rank of the "
        f"plan takes {taken:.4g}.",
        max(ratio, 1.0),
        "times the step",
        "max(T, b / rate) / T",
        {"T": at.step_seconds, "b": taken * at.step_seconds, "rate": given},
        f"{_SOURCE}; rate: the simulation of docs/how_to/find_stalls.md",
    )


def _cache(at: Estimate, stalls: MeasuredStalls) -> Advice:
    costs, taken = stalls.costs, _per_process(at)
    # the loader beside a device as fast as the plan, with the least cache that keeps up
    speedup = costs.step_seconds / (costs.batch_size / taken)
    setup = dataclasses.replace(stalls.setup, step_speedup=max(speedup, 1e-6))
    share = least_cache(costs, setup)
    size = share * costs.entry_bytes * costs.num_items
    data = costs.source_bytes * costs.num_items
    # samples per second of preparation, where every sample is missed
    preparing = setup.cores / costs.miss_seconds if costs.miss_seconds > 0 else math.inf
    inputs: Mapping[str, Any] = {
        "D": data,
        "S": costs.link_bytes_per_second,
        "C": costs.entry_bytes / costs.hit_seconds if costs.hit_seconds > 0 else math.inf,
        "N": costs.num_items,
        "R": min(preparing, taken),
    }
    # by the formula, which knows nothing of shared cores
    by_formula = None
    if math.isfinite(costs.link_bytes_per_second) and data > 0:
        by_formula = least_share(
            data, source=inputs["S"], cache=inputs["C"], samples=inputs["N"], rate=inputs["R"]
        )
    says = (
        "No cache is worth having"
        if share == 0
        else f"A cache of {100 * share:.0f} % of the samples, {format_bytes(size)},"
    )
    rest = (
        "the loader is as fast without."
        if share == 0
        else f"is the least within {100 * NEARLY:.0f} % of one with all of them."
    )
    return Advice(
        "cache",
        f"{says}{': ' if share == 0 else ' '}{rest}",
        size,
        "bytes",
        "x* = (D / S - N / R) / (D / S - D / C), here by playing the loader",
        {**inputs, "x* by the formula": by_formula, "share": share},
        _SOURCE,
    )


def least_share(
    data_bytes: float, *, source: float, cache: float, samples: int, rate: float
) -> float:
    """Return x*, the least share of samples in a cache at which fetching keeps up with `rate`.

    The rate is in samples per second.
    """
    fetch, hit, goal = data_bytes / source, data_bytes / cache, samples / rate
    return min(max((fetch - goal) / (fetch - hit), 0.0), 1.0) if fetch > hit else 0.0


def _per_process(at: Estimate) -> float:
    """Return the samples per second that one data rank takes."""
    return at.samples_per_second / at.point.plan.data_parallel_size

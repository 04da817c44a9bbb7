"""How sure the predictions of plans are: an interval for the seconds and the bytes of each.

    frontier = with_intervals(frontier, search.cluster, search.graph, level=0.9)
    frontier.points[0].seconds_interval    # an Interval; None: nothing is known of the errors
    interval_sentences((point.seconds_interval, point.bytes_interval), cluster)

Intervals are those of `costs.accuracy`, from the errors that the cluster's file states. A plan is
like the runs that were measured by its sizes and techniques. An interval names what is outside:

    devices, parameters                          of any plan
    positions, hidden, tokens of a microbatch    where the model embeds tokens
    tensor, pipeline, sharded, recomputation ... techniques of the plan
    flash attention, softmax attention           of the model
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from lightning_topt.basics.units import format_bytes, format_seconds
from lightning_topt.costs.accuracy import LEVEL, Interval
from lightning_topt.costs.cluster import Cluster
from lightning_topt.graph.op_graph import OpGraph
from lightning_topt.plan.parallel_plan import ParallelPlan
from lightning_topt.plan.plan_frontier import PlanFrontier, PlanPoint
from lightning_topt.schedules.schedules import CONTINUOUS_SCHEDULES

Intervals = tuple[Interval | None, Interval | None]  # of seconds, and of bytes
NO_TOKENS = "a model without embeddings of tokens"


def with_intervals(
    frontier: PlanFrontier, cluster: Cluster, graph: OpGraph, *, level: float = LEVEL
) -> PlanFrontier:
    """Return the frontier with the intervals of all plans on `cluster`; `graph` is their model."""
    known = KnownErrors.of(cluster, graph)

    def sure(point: PlanPoint) -> PlanPoint:
        costs = point.step_seconds, point.peak_bytes
        seconds, size = known.intervals(point.plan, *costs, level=level)
        return replace(point, seconds_interval=seconds, bytes_interval=size)

    points, uniform = (tuple(map(sure, each)) for each in (frontier.points, frontier.uniform))
    return replace(frontier, points=points, uniform=uniform)


def interval_sentences(intervals: Intervals, cluster: Cluster) -> list[str]:
    """Return sentences for people on the intervals of one plan; none where nothing is known."""
    seconds, size = intervals
    first = seconds or size
    if first is None:
        return []
    known = []
    if seconds is not None:
        known.append(f"{format_seconds(seconds.low)} to {format_seconds(seconds.high)} of a step")
    if size is not None:
        known.append(f"{format_bytes(size.low)} to {format_bytes(size.high)} at the peak")
    says = f"Intervals, right for {_in_words(first.level)} such predictions: {', '.join(known)}."
    for of, interval in (("times", seconds), ("peaks", size)):
        if interval is not None and interval.outside:
            names = ", ".join(interval.outside)
            says += f" Outside of measured {of}, so less sure: {names}."
    has_domain = cluster.accuracy is not None and cluster.accuracy.domain is not None
    inside = has_domain and "Outside" not in says
    return [says + (" Inside of what was measured." if inside else "")]


def _in_words(level: float) -> str:
    return "nine of ten" if level == LEVEL else f"{100 * level:g} % of"


# ---- what a plan is like


@dataclass(frozen=True)
class KnownErrors:
    """What is known of the errors of predictions for one model on a cluster.

    Args:
        cluster: with its `accuracy`.
        sizes: of the model, by the names that domains have.
        kinds: techniques that every plan of the model has.
    """

    cluster: Cluster
    sizes: Mapping[str, float]
    kinds: tuple[str, ...]

    @classmethod
    def of(cls, cluster: Cluster, graph: OpGraph) -> KnownErrors:
        """Return what is known of plans for `graph`.

        Kinds of attention, and whether there are tokens, count where the cluster's file says that
        of its runs.
        """
        sizes, kinds = sizes_of_model(graph), list[str]()
        domain = None if cluster.accuracy is None else cluster.accuracy.domain
        if domain is not None and "positions" in domain.sizes and "positions" not in sizes:
            kinds.append(NO_TOKENS)
        if domain is not None and any(name.endswith(" attention") for name in domain.techniques):
            kinds += attention_of(graph)
        return cls(cluster, sizes, tuple(kinds))

    def intervals(
        self, plan: ParallelPlan, seconds: float, size: float, *, level: float = LEVEL
    ) -> Intervals:
        """Return the intervals of a plan that is predicted to take `seconds` and `size` bytes."""
        like = self.sizes_of(plan), (*self.kinds, *techniques_of(plan))
        return (
            self.cluster.seconds_interval(seconds, *like, level=level),
            self.cluster.bytes_interval(size, *like, level=level),
        )

    def sizes_of(self, plan: ParallelPlan) -> dict[str, float]:
        """Return the sizes of the model and of a plan for it."""
        sizes = {"devices": float(plan.mesh.size), **self.sizes}
        if plan.batch_size is not None and "positions" in sizes:
            # stages cut a rank's batch into microbatches; batches that ranks bring are not cut
            cut = plan.num_microbatches if plan.schedule is not None and not plan.own_batches else 1
            sizes["tokens of a microbatch"] = sizes["positions"] * plan.batch_size / cut
        return sizes


def sizes_of_model(graph: OpGraph) -> dict[str, float]:
    """Return the sizes of a model, by the names that domains have.

    Positions and hidden size are those of its largest embedding of tokens (batch x positions x
    hidden size); without one they are left out.
    """
    sizes = {"parameters": float(sum(p.numel for p in graph.parameters))}
    shapes = [spec.shape for op in graph.ops if op.kind == "Embedding" for spec in op.outputs]
    if embedded := [shape for shape in shapes if len(shape) == 3]:
        _, positions, hidden = max(embedded, key=lambda shape: shape[0] * shape[1] * shape[2])
        sizes |= {"positions": float(positions), "hidden": float(hidden)}
    return sizes


def techniques_of(plan: ParallelPlan) -> tuple[str, ...]:
    """Return the techniques by which a plan is like other runs or not."""
    exchange, configs = plan.gradient_exchange, plan.configs.values()
    used = {
        "tensor": bool(plan.mesh.tensor_axes),
        "pipeline": plan.schedule is not None,
        "interleaved": plan.schedule is not None and plan.stages_per_rank > 1,
        "stale weights": plan.schedule in CONTINUOUS_SCHEDULES,
        "sharded": any(config.storage.level > 1 for config in configs),
        "recomputation": any(config.recompute for config in configs),
        "compressed gradients": exchange is not None and not exchange.is_exact,
        "local steps": plan.local_steps is not None,
    }
    return tuple(name for name, is_used in used.items() if is_used)


def attention_of(graph: OpGraph) -> list[str]:
    """Return the kinds of attention of a step: one kernel, or scores that are written."""
    names = {kernel.name for op in graph.ops for kernel in op.forward}
    kinds = {
        "flash attention": any("attention" in name for name in names),
        "softmax attention": any("._softmax" in name for name in names),
    }
    return [kind for kind, is_there in kinds.items() if is_there]

"""`PlanFrontier`: the plans that no other beats, each with its expected costs; and `frontier.json`.

    frontier = search_plans(request)
    frontier = of_steps(frontier, accumulate=2, facts=...)       # of several micro-batches
    frontier = with_intervals(frontier, request.cluster, request.graph, level=0.9)
    frontier.points[0].seconds_interval    # an Interval; None: nothing is known of the errors
    frontier.save("frontier.json")

Plans of one search share few blocks and configurations. The file has each of these once and plans
have indices instead: a search of 81 blocks may find a thousand plans of a few dozen configurations.
With every block written out these are 68 MB of text, with indices one MB.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_topt.basics.units import format_bytes, format_seconds
from lightning_topt.costs.accuracy import LEVEL, Interval
from lightning_topt.costs.sizes import parameter_bytes
from lightning_topt.graph.mesh_axes import Mesh
from lightning_topt.graph.op_config import OpConfig
from lightning_topt.plan.parallel_plan import ParallelPlan, StepEstimate
from lightning_topt.plan.plan_values import config_to_dict
from lightning_topt.schedules.schedules import CONTINUOUS_SCHEDULES

if TYPE_CHECKING:  # fits with a plan do without them
    from lightning_topt.costs.cluster import Cluster
    from lightning_topt.costs.optimizer import OptimizerProfile
    from lightning_topt.graph.op_graph import OpGraph

SCHEMA_VERSION = 5
Intervals = tuple[Interval | None, Interval | None]  # of seconds, and of bytes
NO_TOKENS = "a model without embeddings of tokens"


def factor_words(median: float, low: float, high: float) -> str:
    """Return how many times the dense steps, for people, such as ``1.21 x (1.15 to 1.30)``."""
    most = "not reached" if math.isinf(high) else f"{high:.2f}"
    return f"{median:.2f} x ({low:.2f} to {most})"


@dataclass(frozen=True)
class TimeToLoss:
    """How long a plan takes to the loss that dense synchronous training reaches.

    Args:
        seconds, low, high: expected, least, most; infinity where some runs did not get there.
        factor, factor_low, factor_high: steps that are needed, in those of dense training: the
            median of the runs that were measured, the least and the most.
        rests_on: which runs; "" where the steps are those of dense training by definition.
        steps: of the dense training; None: not known, and `seconds` are for one of its steps.
    """

    seconds: float
    low: float
    high: float
    factor: float = 1.0
    factor_low: float = 1.0
    factor_high: float = 1.0
    rests_on: str = ""
    steps: float | None = None

    @property
    def factor_words(self) -> str:
        """The factor for people, such as ``1.21 x (1.15 to 1.30)``."""
        if not self.rests_on:
            return "1 x"
        return factor_words(self.factor, self.factor_low, self.factor_high)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values; null where something is infinite, or not known."""
        return {
            name: value if not isinstance(value, float) or math.isfinite(value) else None
            for name, value in asdict(self).items()
        }


@dataclass(frozen=True)
class PlanPoint:
    """A plan with its expected costs.

    Args:
        step_seconds: of a step.
        peak_bytes: per device, at the peak.
        devices: number of them.
        plan: the plan.
        seconds_interval, bytes_interval: how sure both are (`with_intervals`); None: not known.
        to_loss: where that is the objective, how long it takes to a loss (`step_factors`).
    """

    step_seconds: float
    peak_bytes: float
    devices: int
    plan: ParallelPlan
    seconds_interval: Interval | None = None
    bytes_interval: Interval | None = None
    to_loss: TimeToLoss | None = None

    @property
    def compared_seconds(self) -> float:
        """The seconds that plans are compared by: to a loss where that is known, else of a step."""
        return self.step_seconds if self.to_loss is None else self.to_loss.seconds

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, without the plan, and without intervals that are not known."""
        intervals = {
            name: asdict(value)
            for name in ("seconds_interval", "bytes_interval")
            if (value := getattr(self, name)) is not None
        }
        costs = {name: getattr(self, name) for name in ("step_seconds", "peak_bytes", "devices")}
        to_loss = {} if self.to_loss is None else {"to_loss": self.to_loss.to_dict()}
        return {**costs, **intervals, **to_loss}


@dataclass(frozen=True)
class PlanFrontier:
    """All plans that no other plan for as many devices beats in both time and memory.

    They are ordered by devices and memory. Plans whose gradients are views of DDP's buckets are
    compared with one another only: a choice may prefer others to them. `frontier.json` holds
    exactly these fields (docs/reference/schemas.md).

    Args:
        points: the plans.
        exact: whether the search proves that no other plan is better.
        capture_seconds, search_seconds: what capturing the model and the search took.
        error_bound: where it is not exact, no plan is better than one of these by more than this
            share in both costs.
        uniform: plans that treat all blocks alike, whether others beat them or not: a choice may
            prefer them (see `choose`). With split parameters, where some plan of that split may be
            on the frontier.
        left_out: where the time to a loss is the objective, the ways of training whose steps are
            not known, each with the reason, as clauses. Time is then that to the loss.
    """

    points: tuple[PlanPoint, ...]
    exact: bool
    capture_seconds: float
    search_seconds: float
    error_bound: float = 0.0
    uniform: tuple[PlanPoint, ...] = ()
    left_out: tuple[str, ...] = ()

    @property
    def candidates(self) -> tuple[PlanPoint, ...]:
        """All plans that may be chosen: the frontier, then the uniform ones that are not on it."""
        known = {point.step_seconds for point in self.points}  # far quicker to compare than plans
        others = (p for p in self.uniform if p.step_seconds not in known or p not in self.points)
        return (*self.points, *others)

    def shown_with(self, chosen: PlanPoint) -> tuple[PlanPoint, ...]:
        """Return the points to show: the frontier, and the chosen one where it is not on it."""
        return self.points if chosen in self.points else (*self.points, chosen)

    @classmethod
    def of(
        cls,
        points: Iterable[PlanPoint],
        *,
        uniform: Iterable[PlanPoint] = (),
        capture_seconds: float = 0.0,
        search_seconds: float = 0.0,
        error_bound: float = 0.0,
        left_out: Iterable[str] = (),
    ) -> PlanFrontier:
        """Return the frontier of any points: those that others for as many devices beat go."""
        # by ascending memory, a plan is on the frontier if it is faster than all before it
        kept: list[PlanPoint] = []
        fastest: dict[tuple[int, bool], float] = {}
        for point in sorted(points, key=lambda p: (p.devices, p.peak_bytes, p.compared_seconds)):
            # what is compared with one another: see the class
            kind = point.devices, point.plan.gradient_views
            if kind not in fastest or point.compared_seconds < fastest[kind]:
                kept.append(point)
                fastest[kind] = point.compared_seconds
        return cls(
            tuple(kept),
            error_bound == 0,
            capture_seconds,
            search_seconds,
            error_bound,
            tuple(uniform),
            tuple(left_out),
        )

    def to_json(self) -> str:
        """Return the frontier as `frontier.json` holds it."""
        # one numbering for both lists; its tables go last, when all plans have been through it
        lists, shared = {"points": self.points, "uniform": self.uniform}, _SharedBlocks()
        plain = {
            key: [{**p.to_dict(), "plan": shared.plain(p.plan)} for p in points]
            for key, points in lists.items()
        }
        return json.dumps(
            {"schema_version": SCHEMA_VERSION, **vars(self), **plain, **shared.tables}
        )

    def save(self, path: str | Path) -> None:
        """Write `to_json` to a file."""
        Path(path).write_text(self.to_json() + "\n")


# ---- steps of several micro-batches, from the prediction of one
#
#     T_k = k T - (k - 1) (u + x)
#
# T seconds of a micro-batch's forward, backward, exchange x and update u; k micro-batches of a
# step, whose gradients are added up. Plans with sharded gradients exchange at every micro-batch: x
# is 0 for them.


@dataclass(frozen=True)
class ModelFacts:
    """Bytes of a checkpoint, and seconds of a full update by block."""

    checkpoint_bytes: float
    update_seconds: dict[str, float]

    @classmethod
    def of(cls, graph: OpGraph, optimizer: OptimizerProfile, cluster: Cluster) -> ModelFacts:
        """Return the facts of a graph and its optimizer on `cluster`.

        A checkpoint has parameters and optimizer state.
        """
        size, seconds = 0.0, {block.name: 0.0 for block in graph.blocks}
        for parameter in graph.parameters:
            size += parameter_bytes(parameter)
            # a frozen parameter is in the checkpoint, but has no state and no update
            if parameter.trainable:
                size += optimizer.state_bytes(parameter.name)
                seconds[parameter.block] += optimizer.update_seconds(
                    parameter.name, numel=parameter.numel, device=cluster.device
                )
        return cls(size, seconds)

    def update_of(self, plan: ParallelPlan) -> float:
        """Return the seconds of the update of one rank under `plan`."""
        total = 0.0
        for block, config in plan.configs.items():
            # ranks that share the optimizer state share its update
            axes = config.storage.sharded_axes("optimizer_state")
            share = 1 / plan.mesh.ranks_along(axes) if axes else 1.0
            total += share * self.update_seconds.get(block, 0.0)
        # along tensor axes every rank updates its slices; a rank of a pipeline updates its stages,
        # about as much as the others
        return total / plan.mesh.ranks_along((*plan.mesh.tensor_axes, *plan.mesh.pipeline_axes))


def step_of_microbatches(point: PlanPoint, *, accumulate: int, facts: ModelFacts) -> PlanPoint:
    """Return the point of a step of so many micro-batches like that of `point`, with one update."""
    plan, predicted = point.plan, point.plan.predicted
    # With one micro-batch the step of `point` is the step: its update need not be told apart.
    if accumulate == 1 or predicted is None:
        return point
    # what is done once: the update, and the exchange of unsharded gradients
    exposed, once = predicted.exposed_communication_seconds, facts.update_of(plan)
    if plan.keeps_gradients_whole and plan.schedule is None:
        once += exposed
    else:
        exposed *= accumulate
    # k steps less what k - 1 of them leave out, and never less than one step
    seconds = max(accumulate * point.step_seconds - (accumulate - 1) * once, point.step_seconds)
    exposed = min(exposed, seconds)
    of_step = StepEstimate(seconds, point.peak_bytes, seconds - exposed, exposed)
    of_steps = replace(plan, predicted=of_step, accumulate=accumulate)
    return replace(point, step_seconds=seconds, plan=of_steps)


def of_steps(frontier: PlanFrontier, *, accumulate: int, facts: ModelFacts) -> PlanFrontier:
    """Return a frontier of micro-batches as one of steps of `accumulate` of them.

    It is not exact: a plan that others beat in a micro-batch may do more of it only once in a step.
    """
    if accumulate == 1:
        return frontier
    points, uniform = (
        [step_of_microbatches(point, accumulate=accumulate, facts=facts) for point in several]
        for several in (frontier.points, frontier.uniform)
    )
    # a plan that another one beats in a step is dropped
    kept = PlanFrontier.of(points, uniform=uniform)
    # what is left out takes at least its micro-batch, a plan of the frontier k of its own
    bound = accumulate * (1 + frontier.error_bound) - 1
    return replace(
        frontier, points=kept.points, uniform=kept.uniform, exact=False, error_bound=bound
    )


# ---- how sure the predictions are
#
# Intervals are those of `costs.accuracy`, from the errors that the cluster's file states. A plan is
# like the runs that were measured by its sizes and techniques. An interval names what is outside:
#
#     devices, parameters                          of any plan
#     positions, hidden, tokens of a microbatch    where the model embeds tokens
#     tensor, pipeline, sharded, recomputation ... techniques of the plan
#     flash attention, softmax attention           of the model


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


# ---- blocks and configurations that many plans share


@dataclass
class _SharedBlocks:
    """Number names of blocks and plain configurations in the order in which they are written.

    Plans that were written have to live as long as this object, which knows configurations by
    identity.
    """

    blocks: dict[str, int] = field(default_factory=dict)
    configs: dict[str, int] = field(default_factory=dict)
    _known: dict[tuple[int, int], int] = field(default_factory=dict)

    def plain(self, plan: ParallelPlan) -> dict[str, object]:
        """Return `plan` as `ParallelPlan.to_dict` does, with indices in place of blocks."""
        # a name or configuration that is new gets the next number
        stages = [
            {
                "blocks": [
                    self.blocks.setdefault(each.block, len(self.blocks)) for each in stage.blocks
                ],
                "configs": [self._index_of(each.config, plan.mesh) for each in stage.blocks],
            }
            for stage in plan.stages
        ]
        return {**plan.to_dict(stages=False), "stages": stages}

    def _index_of(self, config: OpConfig, mesh: Mesh) -> int:
        # Plans of a search share objects, and comparing these by value is slow.
        key = id(config), id(mesh)
        if key not in self._known:
            # equal configurations that are different objects end at one number here
            plain = json.dumps(config_to_dict(config, mesh))
            self._known[key] = self.configs.setdefault(plain, len(self.configs))
        return self._known[key]

    @property
    def tables(self) -> dict[str, list[object]]:
        """The two lists, as plain values."""
        return {"blocks": [*self.blocks], "configs": [json.loads(plain) for plain in self.configs]}

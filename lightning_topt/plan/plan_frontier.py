"""`PlanFrontier`: the plans that no other beats, each with its expected costs; and `frontier.json`.

    frontier = search_plans(request)
    frontier.save("frontier.json")
    frontier = PlanFrontier.from_json(Path("frontier.json").read_text())

Plans of one search share few blocks and configurations. The file has each of these once and plans
have indices instead: a search of 81 blocks may find a thousand plans of a few dozen configurations.
With every block written out these are 68 MB of text, with indices one MB.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_topt.costs.accuracy import Interval
from lightning_topt.costs.plain_values import one_line, parse_json
from lightning_topt.costs.sizes import parameter_bytes
from lightning_topt.graph.errors import PlanError
from lightning_topt.graph.mesh_axes import Mesh
from lightning_topt.graph.op_config import OpConfig
from lightning_topt.plan.parallel_plan import ParallelPlan, StepEstimate
from lightning_topt.plan.plan_values import config_to_dict

if TYPE_CHECKING:  # fits with a plan do without them
    from lightning_topt.costs.cluster import Cluster
    from lightning_topt.costs.optimizer import OptimizerProfile
    from lightning_topt.graph.op_graph import OpGraph

SCHEMA_VERSION = 5


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
        seconds_interval, bytes_interval: how sure both are (`plan_intervals`); None: not known.
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

    @classmethod
    def from_json(cls, text: str) -> PlanFrontier:
        """Read what `to_json` wrote. Raises PlanError, also on another schema version."""
        try:
            return _read_frontier(parse_json(text))
        except (ValueError, TypeError, LookupError, AttributeError) as error:
            raise PlanError(f"cannot read the frontier: {one_line(error)}") from error

    def save(self, path: str | Path) -> None:
        """Write `to_json` to a file."""
        Path(path).write_text(self.to_json() + "\n")


def _read_frontier(data: Any) -> PlanFrontier:
    if data.get("schema_version") != SCHEMA_VERSION:
        raise ValueError(
            f"it was not written by schema version {SCHEMA_VERSION}; run `topt plan` again"
        )

    def plan_of(plain: Mapping[str, Any]) -> ParallelPlan:
        stages = [
            [
                {"block": data["blocks"][block], **data["configs"][config]}
                for block, config in zip(stage["blocks"], stage["configs"], strict=True)
            ]
            for stage in plain["stages"]
        ]
        return ParallelPlan.from_dict({**plain, "stages": [{"blocks": each} for each in stages]})

    def interval_of(plain: Mapping[str, Any]) -> Interval:
        return Interval(**{**plain, "outside": tuple(plain["outside"])})

    def point_of(plain: Mapping[str, Any]) -> PlanPoint:
        found = {**plain, "plan": plan_of(plain["plan"])}
        for name in {"seconds_interval", "bytes_interval"} & found.keys():
            found[name] = interval_of(found[name])
        if (to_loss := found.get("to_loss")) is not None:
            # null is infinite, but for steps that are not known
            endless = {name: math.inf for name in ("high", "factor_high") if to_loss[name] is None}
            found["to_loss"] = TimeToLoss(**{**to_loss, **endless})
        return PlanPoint(**found)

    fields = {each.name: data[each.name] for each in dataclasses.fields(PlanFrontier)}
    for name in ("points", "uniform"):
        fields[name] = tuple(point_of(plain) for plain in data[name])
    return PlanFrontier(**{**fields, "left_out": tuple(data["left_out"])})


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

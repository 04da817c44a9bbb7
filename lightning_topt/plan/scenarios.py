"""Scenarios say on which machines a model might be trained, and how; estimates what a plan takes
there: time, memory, money.

    equation                                      function              source
    T_k = k T - (k - 1) (u + x)                   accumulated_seconds   exchange x, update u: once a
                                                                        step
    steps = tokens / (batch * tokens per sample)  Work.steps_of
    run = expected_seconds(steps * T_k)           estimate              costs/failures.py
    money = run / 3600 * devices * price          estimate

T seconds of a micro-batch's forward, backward, exchange and update; k micro-batches of a step,
whose gradients are added up. Plans with sharded gradients exchange at every micro-batch: x is 0 for
them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from lightning_topt.costs.cluster import Cluster
from lightning_topt.costs.failures import RunTime, run_time
from lightning_topt.costs.optimizer import OptimizerProfile
from lightning_topt.costs.sizes import parameter_bytes
from lightning_topt.graph.op_graph import OpGraph
from lightning_topt.plan.choose import TIME_ERROR
from lightning_topt.plan.parallel_plan import ParallelPlan
from lightning_topt.plan.plan_frontier import PlanPoint


@dataclass(frozen=True)
class Work:
    """`Work` is what a run takes: `tokens`, `samples` or `steps`. Raises ValueError unless exactly
    one is given, above 0.
    """

    tokens: float | None = None
    samples: float | None = None
    steps: float | None = None

    def __post_init__(self) -> None:
        given = [amount for amount in (self.tokens, self.samples, self.steps) if amount is not None]
        if len(given) != 1 or not 0 < given[0] < math.inf:
            raise ValueError(
                "work is one of tokens, samples or steps, above 0: for instance work.tokens=300e9"
            )

    def steps_of(self, scenario: Scenario) -> float:
        """Return the steps of a run, in parts of one. Raises ValueError for tokens of samples whose
        length is not known.
        """
        if self.steps is not None:
            return self.steps
        if self.samples is not None:
            return self.samples / scenario.batch_size
        if scenario.seq_len is None:
            raise ValueError(
                "work.tokens needs the tokens of a sample, and the model has no seq_len: set "
                "seq_len, or give work.samples"
            )
        assert self.tokens is not None
        return self.tokens / (scenario.batch_size * scenario.seq_len)

    def __str__(self) -> str:
        for name in ("tokens", "samples", "steps"):
            if (amount := getattr(self, name)) is not None:
                return f"{_count(amount)} {name}"
        raise AssertionError("one of them is given")


def _count(amount: float) -> str:
    for unit, factor in (("T", 1e12), ("B", 1e9), ("M", 1e6)):
        if amount >= factor:
            return f"{amount / factor:g} {unit}"
    return f"{amount:g}"


@dataclass(frozen=True)
class Scenario:
    """`devices` of `cluster`, rented as `spot` devices or not, with `batch_size` samples of a step,
    of `seq_len` tokens each (None: no tokens).
    """

    cluster: Cluster = field(repr=False)
    devices: int
    batch_size: int
    seq_len: int | None = None
    spot: bool = False

    @property
    def price_per_hour(self) -> float | None:
        """The price of one device; None where the cluster has none."""
        device = self.cluster.device
        return device.spot_price_per_hour if self.spot else device.price_per_hour

    def __str__(self) -> str:
        samples = f"{self.batch_size} samples" + (f" of {self.seq_len}" if self.seq_len else "")
        return f"{self.devices} x {self.cluster.name}{' (spot)' if self.spot else ''}, {samples}"


@dataclass(frozen=True)
class ModelFacts:
    """`ModelFacts` are what a run needs to know of a model beside its plan: bytes of a checkpoint,
    seconds of a whole update by block.
    """

    checkpoint_bytes: float
    update_seconds: dict[str, float]

    @classmethod
    def of(cls, graph: OpGraph, optimizer: OptimizerProfile, cluster: Cluster) -> ModelFacts:
        """Return those of a graph and its optimizer; a checkpoint has parameters and optimizer
        state.
        """
        size, seconds = 0.0, {block.name: 0.0 for block in graph.blocks}
        for parameter in graph.parameters:
            size += parameter_bytes(parameter)
            if parameter.trainable:
                size += optimizer.state_bytes(parameter.name)
                took = optimizer.update_seconds(
                    parameter.name, numel=parameter.numel, device=cluster.device
                )
                seconds[parameter.block] += took
        return cls(size, seconds)

    def update_of(self, plan: ParallelPlan) -> float:
        """Return the seconds of the update of one rank under `plan`."""
        total = 0.0
        for block, config in plan.configs.items():
            axes = config.storage.sharded_axes("optimizer_state")
            share = 1 / plan.mesh.ranks_along(axes) if axes else 1.0
            total += share * self.update_seconds.get(block, 0.0)
        return total / plan.mesh.ranks_along(plan.mesh.tensor_axes)


@dataclass(frozen=True)
class TimeError:
    """The share by which predicted times may be wrong, and where that is from."""

    share: float = TIME_ERROR
    source: str = "assumed: no run on these machines was compared with its prediction"

    @classmethod
    def of(cls, cluster: Cluster) -> TimeError:
        """Return that of a cluster: nine of ten predictions were closer to what was measured, where
        anything was.
        """
        if cluster.accuracy is None:
            return cls()
        figure = cluster.accuracy.seconds
        where = f" ({cluster.accuracy.source})" if cluster.accuracy.source else ""
        return cls(figure.p90, f"nine of ten of {figure.runs} measured runs were closer{where}")


@dataclass(frozen=True)
class Estimate:
    """A plan in a scenario: `step_seconds` of a step of `accumulate` micro-batches, of which
    `point` is the plan of one; of a run (None: no work was given) its time and its price (None: the
    cluster has none).
    """

    scenario: Scenario
    point: PlanPoint
    step_seconds: float
    accumulate: int = 1
    run: RunTime | None = None
    money: float | None = None
    error: TimeError = field(default_factory=TimeError)

    @property
    def samples_per_second(self) -> float:
        """Samples per second of all devices together."""
        return self.scenario.batch_size / self.step_seconds

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens per second of all devices together; None where samples have none."""
        length = self.scenario.seq_len
        return None if length is None else self.samples_per_second * length

    @property
    def peak_bytes(self) -> float:
        """Bytes of each device at the peak."""
        return self.point.peak_bytes

    @property
    def money_per_sample(self) -> float | None:
        """The price of one sample, without failures; None where the cluster has no price."""
        price = self.scenario.price_per_hour
        return (
            None
            if price is None
            else price * self.scenario.devices / 3600 / self.samples_per_second
        )


def accumulated_seconds(point: PlanPoint, *, accumulate: int, update_seconds: float) -> float:
    """Return the seconds of a step of so many micro-batches, each as `point` has it, with one
    update.
    """
    plan, once = point.plan, update_seconds
    if plan.keeps_gradients_whole and plan.schedule is None and plan.predicted is not None:
        once += plan.predicted.exposed_communication_seconds
    return max(accumulate * point.step_seconds - (accumulate - 1) * once, point.step_seconds)


def estimate(
    scenario: Scenario,
    point: PlanPoint,
    *,
    facts: ModelFacts,
    work: Work | None = None,
    accumulate: int = 1,
) -> Estimate:
    """Return what the plan of `point` takes in `scenario`; with `work` of a whole run. Raises
    ValueError as `Work.steps_of`.
    """
    update = facts.update_of(point.plan) if accumulate > 1 else 0.0
    step = accumulated_seconds(point, accumulate=accumulate, update_seconds=update)
    found = Estimate(scenario, point, step, accumulate, error=TimeError.of(scenario.cluster))
    if work is None:
        return found
    run = run_time(
        work.steps_of(scenario) * step,
        failures=scenario.cluster.failures,
        devices=scenario.devices,
        checkpoint_bytes=facts.checkpoint_bytes,
        spot=scenario.spot,
    )
    price = scenario.price_per_hour
    money = None if price is None else run.seconds / 3600 * scenario.devices * price
    return Estimate(scenario, point, step, accumulate, run, money, found.error)

"""Scenarios: on which machines a model might be trained, the best plan of each, the choice.

    scenario = Scenario(cluster, devices=8, batch_size=64)
    found = search_scenario(request, scenario, work=Work(samples=1e6))
    chosen, why = choose_estimate([found.chosen], objective="money", limits=Limits(deadline=86400))

An `Estimate` is what a plan takes in a scenario: time, memory, money.

    equation                                      function             source
    T_k = k T - (k - 1) (u + x)                   step_of_microbatches x and u once per step
    steps = tokens / (batch * tokens per sample)  Work.steps_of
    run = expected_seconds(steps * T_k)           estimate             costs/failures.py
    money = run / 3600 * devices * price          estimate

T seconds of a micro-batch's forward, backward, exchange x and update u; k micro-batches of a step,
whose gradients are added up. Plans with sharded gradients exchange at every micro-batch: x is 0 for
them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from lightning_topt.basics.units import (
    format_bytes,
    format_count,
    format_duration,
    format_money,
    format_seconds,
)
from lightning_topt.costs.cluster import Cluster
from lightning_topt.costs.failures import RunTime, run_time
from lightning_topt.costs.intervals import LEVEL
from lightning_topt.costs.optimizer import OptimizerProfile
from lightning_topt.costs.sizes import parameter_bytes
from lightning_topt.graph.op_graph import OpGraph
from lightning_topt.plan.choose import (
    OBJECTIVES,
    TIME_ERROR,
    NoPlanFitsError,
    check_objective,
    choose,
    fitting_points,
)
from lightning_topt.plan.parallel_plan import ParallelPlan, PlanError, StepEstimate
from lightning_topt.plan.plan_frontier import PlanFrontier, PlanPoint
from lightning_topt.plan.plan_intervals import with_intervals
from lightning_topt.plan.plan_search import SearchRequest, search_plans


@dataclass(frozen=True)
class Workload:
    """What a run takes: `tokens`, `samples` or `steps`.

    Raises:
        ValueError: not exactly one is given, above 0.
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
        """Return the steps of a run, in parts of one.

        Raises:
            ValueError: work is in tokens, and the length of samples is not known.
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
                return f"{format_count(amount)} {name}"
        raise AssertionError("one of them is given")


@dataclass(frozen=True)
class Scenario:
    """Machines to train on and a batch to train with.

    Args:
        cluster: where the devices are.
        devices: so many of them.
        batch_size: samples of a step.
        seq_len: tokens of each sample; None: no tokens.
        spot: whether devices are rented as spot devices.
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
    """What a run needs to know of a model besides its plan.

    Bytes of a checkpoint, and seconds of a full update by block.
    """

    checkpoint_bytes: float
    update_seconds: dict[str, float]

    @classmethod
    def of(cls, graph: OpGraph, optimizer: OptimizerProfile, cluster: Cluster) -> ModelFacts:
        """Return those of a graph and its optimizer.

        A checkpoint has parameters and optimizer state.
        """
        size, seconds = 0.0, {block.name: 0.0 for block in graph.blocks}
        for parameter in graph.parameters:
            size += parameter_bytes(parameter)
            # a frozen parameter is in the checkpoint, but has no state and no update
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
            # ranks that share the optimizer state share its update
            axes = config.storage.sharded_axes("optimizer_state")
            share = 1 / plan.mesh.ranks_along(axes) if axes else 1.0
            # along tensor axes every rank updates its slices
            total += share * self.update_seconds.get(block, 0.0)
        # a rank of a pipeline updates its stages, about as much as the others
        return total / plan.mesh.ranks_along((*plan.mesh.tensor_axes, *plan.mesh.pipeline_axes))


@dataclass(frozen=True)
class TimeError:
    """The share by which predicted times may be wrong, and where that is from."""

    share: float = TIME_ERROR
    source: str = "assumed: no run on these machines was compared with its prediction"

    @classmethod
    def of(cls, cluster: Cluster) -> TimeError:
        """Return that of a cluster.

        Where anything was measured, nine of ten predictions were closer to it.
        """
        if cluster.accuracy is None:
            return cls()
        figure = cluster.accuracy.seconds
        where = f" ({cluster.accuracy.source})" if cluster.accuracy.source else ""
        return cls(figure.p90, f"nine of ten of {figure.runs} measured runs were closer{where}")


@dataclass(frozen=True)
class Estimate:
    """What a plan takes in a scenario.

    Args:
        scenario: the machines and the batch.
        point: the plan; its times are those of a step (`step_of_microbatches`).
        run: the time of a run; None: no work was given.
        money: the price of a run; None: the cluster has no price.
        error: of the times.
    """

    scenario: Scenario
    point: PlanPoint
    run: RunTime | None = None
    money: float | None = None
    error: TimeError = field(default_factory=TimeError)

    @property
    def accumulate(self) -> int:
        """Number of micro-batches of a step."""
        return self.point.plan.accumulate

    @property
    def step_seconds(self) -> float:
        """Seconds of a step."""
        return self.point.step_seconds

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


def estimate(
    scenario: Scenario,
    point: PlanPoint,
    *,
    facts: ModelFacts,
    work: Workload | None = None,
) -> Estimate:
    """Return what the plan of `point` takes in `scenario`; with `work` of a whole run.

    The times of `point` are those of a step, which may have several micro-batches.

    Raises:
        ValueError: as `Workload.steps_of`.
    """
    error = TimeError.of(scenario.cluster)
    if work is None:
        return Estimate(scenario, point, error=error)
    # the whole run, with checkpoints and what failures cost
    run = run_time(
        work.steps_of(scenario) * point.step_seconds,
        failures=scenario.cluster.failures,
        devices=scenario.devices,
        checkpoint_bytes=facts.checkpoint_bytes,
        spot=scenario.spot,
    )
    price = scenario.price_per_hour
    money = None if price is None else run.seconds / 3600 * scenario.devices * price
    return Estimate(scenario, point, run, money, error)


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


# ---- the search of one scenario


_MOST_MICROBATCHES = 256
_MOST_SHOWN = 100  # plans of a frontier


@dataclass(frozen=True)
class ScenarioResult:
    """What a search of a scenario found.

    Args:
        scenario: the scenario.
        estimates: of its frontiers, one for each number of micro-batches, thinned out.
        chosen: the best that fits.
        frontier: that of the chosen one.
        facts: of the model.
    """

    scenario: Scenario
    estimates: tuple[Estimate, ...]
    chosen: Estimate
    frontier: PlanFrontier
    facts: ModelFacts

    def on_spot(self, *, work: Workload | None) -> ScenarioResult:
        """Return the same plans on spot devices."""
        # spot devices change price and failures, not plans and the times of their steps
        scenario = replace(self.scenario, spot=True)

        def of(each: Estimate) -> Estimate:
            return estimate(scenario, each.point, facts=self.facts, work=work)

        return replace(
            self,
            scenario=scenario,
            estimates=tuple(map(of, self.estimates)),
            chosen=of(self.chosen),
        )


def search_scenario(
    request: SearchRequest,
    scenario: Scenario,
    *,
    objective: str = "time",
    memory_limit: float | None = None,
    memory_margin: float = 0.05,
    difference: float | None = None,
    confidence: float = LEVEL,
    accumulate: Sequence[int] | None = None,
    work: Workload | None = None,
    progress: Callable[[str], None] | None = None,
) -> ScenarioResult:
    """Return the plans of `request`, on one number of devices, and the best that fits.

    The whole batch is searched at once, and as micro-batches whose gradients are added up.
    Pipelines cut their batches themselves and are searched with one micro-batch alone. Raises what
    `search_plans` and `choose` raise.

    Args:
        request: what to search.
        scenario: for the estimates.
        objective: as in `choose`.
        memory_limit: bytes per device; None: the memory of a device.
        memory_margin: as in `choose`.
        difference: as in `choose`.
        confidence: the level of the intervals.
        accumulate: numbers of micro-batches to try; None: 1, and powers of 2 until more of them
            take longer.
        work: of a whole run.
        progress: as in `search_plans`.
    """
    # what is the same for every number of micro-batches
    limit = request.cluster.device.memory_bytes if memory_limit is None else memory_limit
    facts = ModelFacts.of(request.graph, request.optimizer, request.cluster)
    best: tuple[Estimate, PlanFrontier] | None = None  # the best plan so far, with its frontier
    shown: list[Estimate] = []
    unfit: NoPlanFitsError | None = None  # why the last frontier without a fitting plan has none
    before = math.inf  # time of the number of micro-batches before this one
    stopped = False  # from here on more micro-batches take longer

    def of(point: PlanPoint) -> Estimate:
        return estimate(scenario, point, facts=facts, work=work)

    def by(each: Estimate) -> float:
        # On one number of devices throughput, money and duration follow the time of a step.
        return each.peak_bytes if objective == "memory" else each.step_seconds

    for count, asked in _requests(request, accumulate):
        # then only requests with a tensor axis are still searched
        if stopped and asked.split is None:
            continue
        try:
            frontier = with_intervals(
                of_steps(search_plans(asked, progress=progress), accumulate=count, facts=facts),
                request.cluster,
                request.graph,
                level=confidence,
            )
        except (PlanError, ValueError):
            # Not every number can be searched: an error only where the first one cannot be.
            if best is None and unfit is None:
                raise
            continue

        # the plans of the frontier that fit, and the best of them
        fits = fitting_points(frontier.points, memory_limit=limit, memory_margin=memory_margin)
        shown += [of(point) for point in fits[:: max(len(fits) // _MOST_SHOWN, 1)]]
        try:
            # what `choose` knows; the other objectives compare scenarios, below
            goal = objective if objective in ("time", "memory") else "time"
            chosen = of(
                choose(
                    frontier.candidates,
                    objective=goal,
                    memory_limit=limit,
                    memory_margin=memory_margin,
                    difference=difference,
                )
            )
        except NoPlanFitsError as none:
            unfit = none
            continue
        if best is None or by(chosen) < by(best[0]):
            best = chosen, frontier
        # stop where more micro-batches take longer
        stopped |= accumulate is None and count > 1 and by(chosen) >= before
        # The first one has stages to choose from too, so it says nothing about more micro-batches.
        before = by(chosen) if count > 1 else math.inf
    if best is None:
        assert unfit is not None
        raise unfit
    return ScenarioResult(scenario, tuple(shown), *best, facts)


def _requests(
    request: SearchRequest, accumulate: Sequence[int] | None
) -> Iterator[tuple[int, SearchRequest]]:
    """Yield numbers of micro-batches with what is searched for each.

    Where nobody says which, meshes with a tensor axis are searched for the first and the last
    alone: the others cost searches and are in between.
    """
    batch, (devices,) = request.global_batch_size, request.device_counts
    if accumulate and (wrong := [count for count in accumulate if batch % count]):
        raise ValueError(
            f"a batch of {batch} samples cannot be cut into {wrong[0]} equal micro-batches "
            "(accumulate)"
        )
    # samples that a micro-batch has at least: one for each data rank, of the largest tensor groups
    least = (
        max(devices // request.cluster.devices_per_node, 1)
        if request.split is not None
        else devices
    )
    least = least if request.mesh is None else request.mesh.data_parallel_size
    powers = [2**k for k in range(_MOST_MICROBATCHES.bit_length()) if batch % 2**k == 0]
    counts = [count for count in accumulate or powers if count == 1 or batch // count >= least]
    for count in counts:
        if count == 1:
            yield 1, request
        elif request.pipelines is None or not request.pipelines.is_given:
            plain = of_microbatches(request, count)
            # with a tensor axis, the last count alone; without, as many as there are samples for
            if accumulate or request.mesh is not None or count == counts[-1]:
                yield count, plain
            elif batch // count >= devices:
                yield count, replace(plain, split=None)


def of_microbatches(request: SearchRequest, count: int) -> SearchRequest:
    """Return what is searched for one of `count` micro-batches of `request`."""
    if count == 1:
        return request
    return replace(
        request, global_batch_size=request.global_batch_size // count, pipelines=None, stale=None
    )


# ---- the choice among scenarios


SCENARIO_OBJECTIVES = (*OBJECTIVES, "throughput", "money", "duration")
_NEEDS_WORK = ("duration",)  # objectives that are about a whole run


@dataclass(frozen=True)
class Limits:
    """What may be chosen; None: anything.

    Args:
        deadline: seconds of a run.
        budget: money of a run.
        step_seconds: of a step.
        samples_per_second: at least so many.
        currency: of the budget and of prices, a word for people.
    """

    deadline: float | None = None
    budget: float | None = None
    step_seconds: float | None = None
    samples_per_second: float | None = None
    currency: str = ""

    def excess(self, each: Estimate) -> float:
        """Return by how much the worst of the limits is missed.

        1 where all are kept, 2 where one is exceeded twofold.
        """
        # what is taken over what is allowed: above 1 a limit is missed
        found = [1.0]
        if self.deadline is not None and each.run is not None:
            found.append(each.run.seconds / max(self.deadline, 1e-9))
        if self.budget is not None:
            found.append(
                # without a price nobody can say that a budget is kept
                float("inf") if each.money is None else each.money / max(self.budget, 1e-9)
            )
        if self.step_seconds is not None:
            found.append(each.step_seconds / max(self.step_seconds, 1e-9))
        if self.samples_per_second is not None:
            found.append(self.samples_per_second / each.samples_per_second)
        return max(found)

    def in_words(self) -> str:
        """Return what is asked for, as it ends a sentence."""
        words = []
        if self.deadline is not None:
            words.append(f"within {format_duration(self.deadline)}")
        if self.budget is not None:
            words.append(f"for {format_money(self.budget, self.currency)}")
        if self.step_seconds is not None:
            words.append(f"with steps of {format_seconds(self.step_seconds)}")
        if self.samples_per_second is not None:
            words.append(f"at {self.samples_per_second:g} samples per second")
        return " and ".join(words)


def check_asked(objective: str, limits: Limits, *, has_work: bool) -> None:
    """Raise ValueError for an unknown objective, or for one or a limit that needs work."""
    check_objective(objective, allowed=SCENARIO_OBJECTIVES)
    needs = [
        name
        for name, value in (("deadline", limits.deadline), ("budget", limits.budget))
        if value is not None
    ]
    if not has_work and (needs or objective in _NEEDS_WORK):
        asked = f"limits.{needs[0]}" if needs else f"objective={objective}"
        raise ValueError(
            f"{asked} is about a whole run: say what it takes, for instance work.tokens=300e9"
        )


def default_objective(estimates: Sequence[Estimate], limits: Limits, *, given: str) -> str:
    """Return what is minimised where nobody said.

    Money of a run where prices are known, unless there is a budget, which is spent for a short run.
    The most samples per second of several scenarios; else `given`.
    """
    # 1. of whole runs: the money, or the time where money is limited
    if any(each.run is not None for each in estimates):
        priced = any(each.money is not None for each in estimates)
        return "money" if priced and limits.budget is None else "duration"
    # 2. without work, of several scenarios: what they do per second
    several = len({str(each.scenario) for each in estimates}) > 1
    return "throughput" if several and given == "time" else given


def choose_estimate(
    estimates: Sequence[Estimate], *, objective: str, limits: Limits
) -> tuple[Estimate, str]:
    """Return the best of `estimates` within `limits`, and why it is.

    Raises:
        ValueError: prices are needed and no cluster has any.
        NoPlanFitsError: nothing keeps the limits; the nearest is named.
    """
    assert estimates
    # plans without a price do not take part where money counts
    if objective == "money" or limits.budget is not None:
        priced = [each for each in estimates if each.money_per_sample is not None]
        if not priced:
            first = estimates[0]
            name = "spot_price_per_hour" if first.scenario.spot else "price_per_hour"
            raise ValueError(
                f"the cluster {first.scenario.cluster.name!r} has no price: set cluster.device."
                f"{name} (of one device; +cluster.device. where the file has no such entry), or "
                "leave out objective=money and limits.budget"
            )
        estimates = priced
    # the best of what keeps every limit
    kept = [each for each in estimates if limits.excess(each) <= 1]
    if not kept:
        raise NoPlanFitsError(_why_none(estimates, limits))
    chosen = min(kept, key=_cost(objective))
    return chosen, _why(chosen, kept, estimates, objective=objective, limits=limits)


def _cost(objective: str) -> Callable[[Estimate], tuple[float, float]]:
    # without work there is no run to pay for: samples are compared
    def money(each: Estimate) -> float:
        found = each.money_per_sample if each.money is None else each.money
        assert found is not None
        return found

    # two numbers each: the second decides between plans that are equal in the first
    by: dict[str, Callable[[Estimate], tuple[float, float]]] = {
        "time": lambda each: (each.step_seconds, each.peak_bytes),
        "memory": lambda each: (each.peak_bytes, each.step_seconds),
        "devices": lambda each: (each.scenario.devices, each.step_seconds),
        "throughput": lambda each: (-each.samples_per_second, each.peak_bytes),
        "money": lambda each: (money(each), each.step_seconds),
        "duration": lambda each: (
            each.run.seconds if each.run else each.step_seconds,
            each.money or 0.0,
        ),
    }
    return by[objective]


_SUPERLATIVES = {
    "time": "the shortest steps",
    "memory": "the least memory",
    "devices": "the fewest devices",
    "throughput": "the most samples per second",
    "money": "the cheapest",
    "duration": "the soonest finished",
}


def in_words(each: Estimate, currency: str) -> str:
    """Return an estimate in a few words: time, memory, money."""
    words = [f"{format_seconds(each.step_seconds)} per step", format_bytes(each.peak_bytes)]
    if each.run is not None:
        words.append(format_duration(each.run.seconds))
    if each.money is not None:
        words.append(f"{format_money(each.money, currency)} in all")
    elif each.money_per_sample is not None:
        words.append(f"{format_money(1000 * each.money_per_sample, currency)} per 1000 samples")
    return ", ".join(words)


def _why(
    chosen: Estimate,
    kept: Sequence[Estimate],
    all_of_them: Sequence[Estimate],
    *,
    objective: str,
    limits: Limits,
) -> str:
    # the choice: on which machines, of how many plans, how many others missed the limits
    words = limits.in_words()
    verb = "finishes" if len(kept) == 1 else "finish"
    within = (
        f" that {verb} {words}"
        if limits.deadline or limits.budget
        else f" {words}"
        if words
        else ""
    )
    count = "the only one" if len(kept) == 1 else f"{_SUPERLATIVES[objective]} of {len(kept)}"
    left = len(all_of_them) - len(kept)
    parts = [
        f"{chosen.scenario}: {count}{within}"
        + (f", {left} {'does' if left == 1 else 'do'} not" if left and within else "")
    ]
    # what comes next on other machines
    if others := [each for each in kept if str(each.scenario) != str(chosen.scenario)]:
        best = min(others, key=_cost(objective))
        parts.append(f"next: {best.scenario}, {in_words(best, limits.currency)}")
    # the cheapest is seldom the soonest: name both
    if objective == "money" and chosen.run is not None and len(kept) > 1:
        soonest = min(kept, key=_cost("duration"))
        if soonest.scenario != chosen.scenario:
            parts.append(f"soonest: {soonest.scenario}, {in_words(soonest, limits.currency)}")
    # what the estimate rests on: failures, and the error of predictions
    if chosen.run is not None and chosen.run.failures > 0:
        parts.append(_interruptions(chosen))
    share = 100 * chosen.error.share
    parts.append(f"times may be off by {share:.0f} % ({chosen.error.source})")
    return "; ".join(parts) + "."


def _interruptions(each: Estimate) -> str:
    run = each.run
    assert run is not None
    return (
        f"{run.failures:.1f} failures expected, a checkpoint of "
        f"{format_seconds(run.checkpoint_seconds)} every {format_duration(run.interval_seconds)}, "
        f"together {100 * run.overhead:.1f} % more than the steps"
    )


def _why_none(estimates: Sequence[Estimate], limits: Limits) -> str:
    # the plan that misses the limits by least says what would have to be allowed
    nearest = min(estimates, key=limits.excess)
    what = "finishes" if limits.deadline is not None or limits.budget is not None else "runs"
    count = "the plan" if len(estimates) == 1 else f"none of {len(estimates)} plans"
    verb = f"does not {what[:-2] if what == 'finishes' else 'run'}" if len(estimates) == 1 else what
    return (
        f"{count} {verb} {limits.in_words()}: the nearest is {nearest.scenario} with "
        f"{in_words(nearest, limits.currency)}; allow more, or give other clusters, device_counts "
        "or batch sizes"
    )


def unpriced(estimates: Iterable[Estimate]) -> list[str]:
    """Return the names of clusters without a price, each once."""
    return [
        *dict.fromkeys(
            e.scenario.cluster.name for e in estimates if e.scenario.price_per_hour is None
        )
    ]

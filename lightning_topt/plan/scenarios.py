"""Scenarios: on which machines a model might be trained, the best plan of each, the choice.

    scenario = Scenario(cluster, devices=8, batch_size=64)
    best = search_scenario(request, scenario, work=Workload(samples=1e6))
    chosen, why = choose_estimate([best.chosen], objective="money", limits=Limits(deadline=86400))
    print_scenarios([best.chosen], chosen, limits=Limits(), console=Console())

An `Estimate` is what a plan takes in a scenario: time, memory, money.

    equation                                      function             source
    steps = tokens / (batch * tokens per sample)  Workload.steps_of
    run = expected_seconds(steps * T)             estimate             costs/cluster.py
    money = run / 3600 * devices * price          estimate
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from lightning_topt.basics.units import format_bytes, format_duration, format_money, format_seconds
from lightning_topt.costs.accuracy import LEVEL
from lightning_topt.costs.cluster import Cluster, RunTime, run_time
from lightning_topt.plan.choose import (
    OBJECTIVES,
    TIME_ERROR,
    NoPlanFitsError,
    check_objective,
    choose,
)
from lightning_topt.plan.frontier_report import table
from lightning_topt.plan.parallel_plan import PlanError
from lightning_topt.plan.plan_frontier import (
    ModelFacts,
    PlanFrontier,
    PlanPoint,
    of_steps,
    with_intervals,
)
from lightning_topt.plan.plan_search import SearchRequest, search_plans

SCHEMA_VERSION = 3
_MOST_MICROBATCHES = 256


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
        """Return the steps of a run, in parts of one."""
        if self.steps is not None:
            return self.steps
        if self.samples is not None:
            return self.samples / scenario.batch_size
        assert self.tokens is not None and scenario.seq_len is not None
        return self.tokens / (scenario.batch_size * scenario.seq_len)


@dataclass(frozen=True)
class Scenario:
    """Machines to train on and a batch to train with.

    Args:
        cluster: where the devices are.
        devices: so many of them.
        batch_size: samples of a step.
        seq_len: tokens of each sample; None: no tokens.
    """

    cluster: Cluster = field(repr=False)
    devices: int
    batch_size: int
    seq_len: int | None = None

    def __str__(self) -> str:
        return f"{self.devices} x {self.cluster.name}, {self.batch_size} samples"


@dataclass(frozen=True)
class Estimate:
    """What a plan takes in a scenario.

    Args:
        scenario: the machines and the batch.
        point: the plan; its times are those of a step (`step_of_microbatches`).
        run: the time of a run; None: no work was given.
        money: the price of a run; None: the cluster has no price.
    """

    scenario: Scenario
    point: PlanPoint
    run: RunTime | None = None
    money: float | None = None

    @property
    def step_seconds(self) -> float:
        """Seconds of a step."""
        return self.point.step_seconds

    @property
    def samples_per_second(self) -> float:
        """Samples per second of all devices together."""
        return self.scenario.batch_size / self.step_seconds

    @property
    def peak_bytes(self) -> float:
        """Bytes of each device at the peak."""
        return self.point.peak_bytes

    @property
    def money_per_sample(self) -> float | None:
        """The price of one sample, without failures; None where the cluster has no price."""
        price = self.scenario.cluster.device.price_per_hour
        if price is None:
            return None
        return price * self.scenario.devices / 3600 / self.samples_per_second

    @property
    def plan_in_words(self) -> str:
        """How the blocks of the plan run, on which mesh and in which schedule, in a few words."""
        plan = self.point.plan
        # other meshes are named by the summary
        mesh = f" on data {plan.mesh.size}" if plan.mesh.names == ("data",) else ""
        return f"{plan.summary()}{mesh}"

    @property
    def in_words(self) -> str:
        """Time, memory and money in a few words."""
        words = [f"{format_seconds(self.step_seconds)} per step", format_bytes(self.peak_bytes)]
        if self.run is not None:
            words.append(format_duration(self.run.seconds))
        if self.money is not None:
            words.append(f"{format_money(self.money)} in all")
        return ", ".join(words)


def estimate(
    scenario: Scenario, point: PlanPoint, *, facts: ModelFacts, work: Workload | None = None
) -> Estimate:
    """Return what the plan of `point` takes in `scenario`; with `work` of a whole run.

    The times of `point` are those of a step, which may have several micro-batches.

    Raises:
        ValueError: as `Workload.steps_of`.
    """
    if work is None:
        return Estimate(scenario, point)
    # the whole run, with checkpoints and what failures cost
    run = run_time(
        work.steps_of(scenario) * point.step_seconds,
        failures=scenario.cluster.failures,
        devices=scenario.devices,
        checkpoint_bytes=facts.checkpoint_bytes,
    )
    price = scenario.cluster.device.price_per_hour
    money = None if price is None else run.seconds / 3600 * scenario.devices * price
    return Estimate(scenario, point, run, money)


# ---- the search of one scenario


@dataclass(frozen=True)
class ScenarioResult:
    """The best plan of a scenario that fits, and the frontier on which it was found."""

    chosen: Estimate
    frontier: PlanFrontier


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
    """Return the best plan of `request`, on one number of devices, that fits.

    The whole batch is searched at once, and as micro-batches whose gradients are added up. Raises
    what `search_plans` and `choose` raise.

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
    limit = request.cluster.device.memory_bytes if memory_limit is None else memory_limit
    facts = ModelFacts.of(request.graph, request.optimizer, request.cluster)
    best: tuple[PlanPoint, PlanFrontier] | None = None
    unfit: NoPlanFitsError | None = None  # why the last frontier without a fitting plan has none
    before = math.inf  # cost of the number of micro-batches before this one
    stopped = False  # from here on more micro-batches take longer

    def cost(point: PlanPoint) -> float:
        # On one number of devices throughput, money and duration follow the time of a step.
        return point.peak_bytes if objective == "memory" else point.step_seconds

    for count, asked in _requests(request, accumulate):
        # then only requests with a tensor axis are still searched
        if stopped and asked.split is None:
            continue
        try:
            frontier = search_plans(asked, progress=progress)
        except (PlanError, ValueError):
            # Not every number can be searched: an error only where the first one cannot be.
            if best is None and unfit is None:
                raise
            continue
        frontier = of_steps(frontier, accumulate=count, facts=facts)
        frontier = with_intervals(frontier, request.cluster, request.graph, level=confidence)
        try:
            chosen = choose(
                frontier.candidates,
                # what `choose` knows; the other objectives compare scenarios, below
                objective=objective if objective == "memory" else "time",
                memory_limit=limit,
                memory_margin=memory_margin,
                difference=difference,
            )
        except NoPlanFitsError as none:
            unfit = none
            continue
        if best is None or cost(chosen) < cost(best[0]):
            best = chosen, frontier
        stopped |= accumulate is None and count > 1 and cost(chosen) >= before
        # The first one has stages to choose from too, so it says nothing about more micro-batches.
        before = cost(chosen) if count > 1 else math.inf
    if best is None:
        assert unfit is not None
        raise unfit
    return ScenarioResult(estimate(scenario, best[0], facts=facts, work=work), best[1])


# Numbers of micro-batches with what is searched for each. Where nobody says which, meshes with a
# tensor axis are searched for the first and the last alone: the others cost searches and are in
# between.
def _requests(
    request: SearchRequest, accumulate: Sequence[int] | None
) -> Iterator[tuple[int, SearchRequest]]:
    batch, (devices,) = request.global_batch_size, request.device_counts
    if accumulate and (wrong := [count for count in accumulate if batch % count]):
        raise ValueError(
            f"a batch of {batch} samples cannot be cut into {wrong[0]} equal micro-batches "
            "(accumulate)"
        )
    # samples that a micro-batch has at least: one for each data rank, of the largest tensor groups
    least = devices
    if request.mesh is not None:
        least = request.mesh.data_parallel_size
    elif request.split is not None:
        least = max(devices // request.cluster.devices_per_node, 1)
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
    """Return what is searched for one of `count` micro-batches of `request`.

    Pipelines cut their batches themselves, and are searched with one micro-batch alone.
    """
    if count == 1:
        return request
    return replace(
        request, global_batch_size=request.global_batch_size // count, pipelines=None, stale=None
    )


# ---- the choice among scenarios


@dataclass(frozen=True)
class Limits:
    """What a run may take: `deadline` seconds, and a `budget` of money; None: anything."""

    deadline: float | None = None
    budget: float | None = None

    def excess(self, each: Estimate) -> float:
        """Return what is taken over what is allowed, of the limit that is missed most.

        1 where both are kept, 2 where one is exceeded twofold.
        """
        shares = [1.0]
        if self.deadline is not None and each.run is not None:
            shares.append(each.run.seconds / max(self.deadline, 1e-9))
        if self.budget is not None:
            # without a price nobody can say that a budget is kept
            shares.append(math.inf if each.money is None else each.money / max(self.budget, 1e-9))
        return max(shares)

    def __str__(self) -> str:
        words = [] if self.deadline is None else [f"within {format_duration(self.deadline)}"]
        words += [] if self.budget is None else [f"for {format_money(self.budget)}"]
        return " and ".join(words)


# what is compared, and the word for the best; without work there is no run to pay for: samples are
# compared
_OBJECTIVES: dict[str, tuple[Callable[[Estimate], float | None], str]] = {
    "time": (lambda each: each.step_seconds, "the shortest steps"),
    "memory": (lambda each: each.peak_bytes, "the least memory"),
    "devices": (lambda each: each.scenario.devices, "the fewest devices"),
    "throughput": (lambda each: -each.samples_per_second, "the most samples per second"),
    "money": (
        lambda each: each.money_per_sample if each.money is None else each.money,
        "the cheapest",
    ),
    "duration": (
        lambda each: each.step_seconds if each.run is None else each.run.seconds,
        "the soonest finished",
    ),
}
SCENARIO_OBJECTIVES = tuple(_OBJECTIVES)
assert set(OBJECTIVES) <= set(SCENARIO_OBJECTIVES)


def check_asked(objective: str, limits: Limits, *, has_work: bool) -> None:
    """Raise ValueError for an unknown objective, or for one or a limit that needs work."""
    check_objective(objective, allowed=SCENARIO_OBJECTIVES)
    if not has_work and (limits.deadline or limits.budget or objective == "duration"):
        raise ValueError(
            "limits.deadline, limits.budget and objective=duration are about a whole run: say what "
            "it takes, for instance work.tokens=300e9"
        )


def default_objective(estimates: Sequence[Estimate], limits: Limits, *, given: str) -> str:
    """Return what is minimised where nobody said.

    Money of a run where prices are known, unless there is a budget, which is spent for a short run.
    The most samples per second of several scenarios; else `given`.
    """
    if any(each.run is not None for each in estimates):
        priced = any(each.money is not None for each in estimates)
        return "money" if priced and limits.budget is None else "duration"
    return "throughput" if len(estimates) > 1 and given == "time" else given


def choose_estimate(
    estimates: Sequence[Estimate], *, objective: str, limits: Limits
) -> tuple[Estimate, str]:
    """Return the best of `estimates` within `limits`, and why it is.

    Raises:
        ValueError: prices are needed and no cluster has any.
        NoPlanFitsError: nothing keeps the limits; the nearest is named.
    """
    # plans without a price do not take part where money counts
    if objective == "money" or limits.budget is not None:
        priced = [each for each in estimates if each.money_per_sample is not None]
        if not priced:
            raise ValueError(
                f"the cluster {estimates[0].scenario.cluster.name!r} has no price: set cluster."
                "device.price_per_hour (of one device; +cluster.device. where the file has no such "
                "entry), or leave out objective=money and limits.budget"
            )
        estimates = priced
    kept = [each for each in estimates if limits.excess(each) <= 1]
    if not kept:
        # the plan that misses the limits by least says what would have to be allowed
        nearest = min(estimates, key=limits.excess)
        raise NoPlanFitsError(
            f"no plan of {len(estimates)} scenario(s) runs {limits}: the nearest is "
            f"{nearest.scenario} with {nearest.in_words}; allow more, or give "
            "other clusters, device_counts or batch sizes"
        )
    compared, best = _OBJECTIVES[objective]
    order = sorted(kept, key=lambda each: (compared(each), each.step_seconds, each.peak_bytes))
    chosen = order[0]
    within = f" {limits}" if str(limits) else ""
    parts = [f"{chosen.scenario}: {best} of {len(kept)} of {len(estimates)}{within}"]
    if len(order) > 1:
        parts.append(f"next: {order[1].scenario}, {order[1].in_words}")
    if chosen.run is not None and chosen.run.failures > 0:
        parts.append(
            f"{chosen.run.failures:.1f} failures expected, a checkpoint every "
            f"{format_duration(chosen.run.interval_seconds)}, together "
            f"{100 * chosen.run.overhead:.1f} % more than the steps"
        )
    parts.append(_error_words(chosen.scenario.cluster))
    return chosen, "; ".join(parts) + "."


# by how much predicted times may be wrong
def _error_words(cluster: Cluster) -> str:
    if cluster.accuracy is None:
        return f"times may be off by {100 * TIME_ERROR:.0f} %, which is assumed"
    figure = cluster.accuracy.seconds
    return (
        f"times may be off by {100 * figure.p90:.0f} %: nine of ten of {figure.runs} measured runs "
        "were closer"
    )


# ---- the report


def print_scenarios(
    estimates: Sequence[Estimate], chosen: Estimate, *, limits: Limits, console: Console
) -> None:
    """Print the best plan of every scenario, the chosen one marked with a star."""
    with_run = any(each.run is not None for each in estimates)

    def money(each: Estimate) -> str:
        # of the whole run where its length is known, else of 1000 samples
        per_sample = each.money_per_sample
        amount = each.money if with_run else None if per_sample is None else 1000 * per_sample
        return "no price" if amount is None else format_money(amount)

    columns: dict[str, Callable[[Estimate], str]] = {
        "cluster": lambda each: escape(each.scenario.cluster.name),
        "devices": lambda each: str(each.scenario.devices),
        "batch": lambda each: str(each.scenario.batch_size),
        "step": lambda each: format_seconds(each.step_seconds),
        "memory": lambda each: format_bytes(each.peak_bytes),
        "samples/s": lambda each: f"{each.samples_per_second:.4g}",
    }
    if with_run:
        columns["run"] = lambda each: "" if each.run is None else format_duration(each.run.seconds)
    if any(each.money_per_sample is not None for each in estimates):
        columns["money" if with_run else "per 1000 samples"] = money
    beyond = any(limits.excess(each) > 1 for each in estimates)
    shown = table(
        "",
        *columns,
        left=("cluster",),
        caption="* chosen" + (f"; ! not {limits}" if beyond else ""),
    )
    for each in estimates:
        mark = "*" if each is chosen else "!" if limits.excess(each) > 1 else ""
        style = "bold green" if each is chosen else "dim" if mark else None
        shown.add_row(mark, *(cell(each) for cell in columns.values()), style=style)
    console.print(shown)
    console.print(f"plan: {chosen.plan_in_words}", highlight=False, markup=False)


def save_scenarios(
    path: Path,
    estimates: Sequence[Estimate],
    chosen: Estimate | None,
    *,
    limits: Limits,
    reason: str,
    notes: Sequence[str],
) -> None:
    """Write `scenarios.json`; nothing is `chosen` where no scenario keeps the limits."""
    record = {
        "schema_version": SCHEMA_VERSION,
        "limits": vars(limits),
        "reason": reason,
        "notes": [*notes],
        "estimates": [
            {**_plain(each), "within_limits": limits.excess(each) <= 1, "chosen": each is chosen}
            for each in estimates
        ],
    }
    path.write_text(json.dumps(record, indent=1) + "\n")


def _plain(each: Estimate) -> dict[str, Any]:
    scenario, point, run = each.scenario, each.point, each.run
    values: dict[str, Any] = {
        "cluster": scenario.cluster.name,
        "devices": scenario.devices,
        "batch_size": scenario.batch_size,
        "seq_len": scenario.seq_len,
        "price_per_hour": scenario.cluster.device.price_per_hour,
        "accumulate": point.plan.accumulate,
        "step_seconds": each.step_seconds,
        "seconds_interval": point.seconds_interval and asdict(point.seconds_interval),
        "peak_bytes": each.peak_bytes,
        "bytes_interval": point.bytes_interval and asdict(point.bytes_interval),
        "samples_per_second": each.samples_per_second,
        "run_seconds": run and run.seconds,
        "overhead": run and run.overhead,
        "failures": run and run.failures,
        "money": each.money,
        "money_per_sample": each.money_per_sample,
        "plan": each.plan_in_words,
    }
    # JSON has no infinity
    return {name: None if value == math.inf else value for name, value in values.items()}

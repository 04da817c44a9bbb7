"""Choosing one of the estimates of several scenarios, within limits of time and money, and saying
why.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from lightning_topt.basics.units import format_bytes, format_duration, format_money, format_seconds
from lightning_topt.plan.choose import OBJECTIVES, NoPlanFitsError, check_objective
from lightning_topt.plan.scenarios import Estimate

SCENARIO_OBJECTIVES = (*OBJECTIVES, "throughput", "money", "duration")
_NEEDS_WORK = ("duration",)


@dataclass(frozen=True)
class Limits:
    """`Limits` say what may be chosen: a run of at most so many seconds and so much money, steps of
    at most so many seconds, at least so many samples per second; None: any.
    """

    deadline: float | None = None
    budget: float | None = None
    step_seconds: float | None = None
    samples_per_second: float | None = None

    def excess(self, each: Estimate) -> float:
        """Return by how much the worst of the limits is missed: 1 where all are kept, 2 where one
        is exceeded twofold.
        """
        found = [1.0]
        if self.deadline is not None and each.run is not None:
            found.append(each.run.seconds / max(self.deadline, 1e-9))
        if self.budget is not None:
            found.append(
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
            words.append(f"for {format_money(self.budget)}")
        if self.step_seconds is not None:
            words.append(f"with steps of {format_seconds(self.step_seconds)}")
        if self.samples_per_second is not None:
            words.append(f"at {self.samples_per_second:g} samples per second")
        return " and ".join(words)


def check_asked(objective: str, limits: Limits, *, has_work: bool) -> None:
    """Raise ValueError for an unknown objective, and for one or a limit that needs the work of a
    run.
    """
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
    """Return what is minimised where nobody said: money of a run where prices are known, unless
    there is a budget, which is spent for a short run; the most samples per second of several
    scenarios; else `given`.
    """
    if any(each.run is not None for each in estimates):
        priced = any(each.money is not None for each in estimates)
        return "money" if priced and limits.budget is None else "duration"
    several = len({str(each.scenario) for each in estimates}) > 1
    return "throughput" if several and given == "time" else given


def choose_estimate(
    estimates: Sequence[Estimate], *, objective: str, limits: Limits
) -> tuple[Estimate, str]:
    """Return the best of `estimates` within `limits`, and why it is.

    Raises ValueError where prices are needed and no cluster has any, NoPlanFitsError where nothing
    keeps the limits: the nearest is named.
    """
    assert estimates
    if objective == "money" or limits.budget is not None:
        priced = [each for each in estimates if each.money_per_sample is not None]
        if not priced:
            raise ValueError(_why_no_price(estimates[0]))
        estimates = priced
    kept = [each for each in estimates if limits.excess(each) <= 1]
    if not kept:
        raise NoPlanFitsError(_why_none(estimates, limits))
    chosen = min(kept, key=_cost(objective))
    return chosen, _why(chosen, kept, estimates, objective=objective, limits=limits)


def _cost(objective: str) -> Callable[[Estimate], tuple[float, float]]:
    def money(each: Estimate) -> float:
        found = each.money_per_sample if each.money is None else each.money
        assert found is not None
        return found

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


def in_words(each: Estimate) -> str:
    """Return an estimate in a few words: time, memory, money."""
    words = [f"{format_seconds(each.step_seconds)} per step", format_bytes(each.peak_bytes)]
    if each.run is not None:
        words.append(format_duration(each.run.seconds))
    if each.money is not None:
        words.append(f"{format_money(each.money)} in all")
    elif each.money_per_sample is not None:
        words.append(f"{format_money(1000 * each.money_per_sample)} per 1000 samples")
    return ", ".join(words)


def _why(
    chosen: Estimate,
    kept: Sequence[Estimate],
    all_of_them: Sequence[Estimate],
    *,
    objective: str,
    limits: Limits,
) -> str:
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
    if others := [each for each in kept if str(each.scenario) != str(chosen.scenario)]:
        best = min(others, key=_cost(objective))
        parts.append(f"next: {best.scenario}, {in_words(best)}")
    if objective == "money" and chosen.run is not None and len(kept) > 1:
        soonest = min(kept, key=_cost("duration"))
        if soonest.scenario != chosen.scenario:
            parts.append(f"soonest: {soonest.scenario}, {in_words(soonest)}")
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
        f"{format_seconds(run.checkpoint_seconds)} every "
        f"{format_duration(run.interval_seconds)}, together {100 * run.overhead:.1f} % more than "
        "the steps"
    )


def _why_none(estimates: Sequence[Estimate], limits: Limits) -> str:
    nearest = min(estimates, key=limits.excess)
    what = "finishes" if limits.deadline is not None or limits.budget is not None else "runs"
    count = "the plan" if len(estimates) == 1 else f"none of {len(estimates)} plans"
    verb = f"does not {what[:-2] if what == 'finishes' else 'run'}" if len(estimates) == 1 else what
    return (
        f"{count} {verb} {limits.in_words()}: the nearest is {nearest.scenario} with "
        f"{in_words(nearest)}; allow more, or give "
        "other clusters, device_counts or batch sizes"
    )


def _why_no_price(each: Estimate) -> str:
    name = "spot_price_per_hour" if each.scenario.spot else "price_per_hour"
    return (
        f"the cluster {each.scenario.cluster.name!r} has no price: set cluster.device.{name} (of "
        "one device; +cluster.device. "
        "where the file has no such entry), or leave out objective=money and limits.budget"
    )


def unpriced(estimates: Iterable[Estimate]) -> list[str]:
    """Return the names of clusters without a price, each once."""
    return [
        *dict.fromkeys(
            e.scenario.cluster.name for e in estimates if e.scenario.price_per_hour is None
        )
    ]

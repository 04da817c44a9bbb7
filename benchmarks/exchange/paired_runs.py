"""Measure step factors by short paired runs of one model, and keep them in a table.

    found = race(ways, train, pairing=Pairing(steps=400))      # train makes one run, and is given
    keep_row(own_file(), row_of(way, factors, ...))            # StepTable.of_model reads it

Every run of a seed has the same first weights and samples. First the dense synchronous runs: their
curves are what all others are compared with. Then all ways have a run of the first seed. It is
looked at after a quarter, a half and all of the dense run's steps. One that is clearly behind ends
there, and its way is dropped. The other ways have runs of all seeds.

A factor is the steps until the dense run's lowest loss, divided by those of the dense run. It is
None where the loss is not reached within `longest` times the steps.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import math
import os
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from lightning_topt.plan.step_factors import VERSION, FactorRow, StepTable

Curve = Sequence[tuple[float, float]]  # optimizer steps, and the loss then

REACHED, BEHIND, DIVERGED = "reached", "behind", "diverged"
RUNGS = 0.25, 0.5, 1.0  # of the dense run's steps: when a run is looked at
NOISE = 0.1  # of the loss that the dense run has gained


class WayFailedError(ValueError):
    """A way of training that cannot run, and why."""


@dataclass(frozen=True, eq=False)
class Way:
    """A way of training, as in a `FactorRow`.

    `words` are for people, and `how` is for what makes the runs.
    """

    words: str
    method: str = "dense"
    options: Mapping[str, Any] = field(default_factory=dict)
    ranks: int = 1
    staleness: int = 0
    prediction: str | Mapping[str, Any] = ""
    how: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Pairing:
    """How runs are paired.

    Args:
        steps: optimizer steps of a dense run.
        longest: how many times as many another run has at most.
        seeds: one run each, of first weights and samples.
        rates: learning rates that every way is tried with; None: that of the module.
    """

    steps: int
    longest: float = 2.0
    seeds: tuple[int, ...] = (0, 1)
    rates: tuple[float | None, ...] = (None,)

    @property
    def most_steps(self) -> int:
        """Steps of the longest run."""
        return math.ceil(self.steps * self.longest)


@dataclass(frozen=True)
class Target:
    """The dense run of a seed, with which another run is compared while it goes on."""

    dense: tuple[tuple[float, float], ...]
    pairing: Pairing

    @property
    def goal(self) -> tuple[float, float]:
        """The step of the dense run's lowest loss, and that loss."""
        return min(self.dense, key=lambda point: point[1])

    def verdict(self, curve: Curve) -> str | None:
        """Return why a run ends at the last point of its curve; None: it goes on."""
        if not curve:
            return None
        if not math.isfinite(curve[-1][1]):
            return DIVERGED
        if self.factor(curve) is not None:
            return REACHED
        before = curve[-2][0] if len(curve) > 1 else 0.0
        rungs = (share * self.pairing.steps for share in RUNGS)
        if any(before < rung <= curve[-1][0] for rung in rungs) and self.is_behind(curve):
            return BEHIND
        return None

    def is_behind(self, curve: Curve) -> bool:
        """Return whether a run is clearly behind.

        Its lowest loss is above that of the dense run after 1 / `longest` of the steps, by more
        than a tenth of what the dense run had gained by then since its first point.
        """
        share = curve[-1][0] / self.pairing.longest
        dense = [value for step, value in self.dense if step <= share]
        if not dense:
            return False
        noise = NOISE * (dense[0] - min(dense))
        return min(value for _, value in curve) > min(dense) + noise

    def factor(self, curve: Curve) -> float | None:
        """Return the steps to the goal by those of the dense run; None: not reached."""
        step, loss = self.goal
        reached = steps_to(curve, loss)
        return None if reached is None else round(reached / step, 4)


def steps_to(curve: Curve, loss: float) -> float | None:
    """Return the step at which a curve first reaches `loss`, on a line between two points."""
    before: tuple[float, float] | None = None
    for step, value in curve:
        if value <= loss:
            if before is None or not math.isfinite(before[1]):
                return step
            return before[0] + (step - before[0]) * (before[1] - loss) / (before[1] - value)
        before = step, value
    return None


# ---- the race


class RunKey(NamedTuple):
    """One run: its way, seed and learning rate; for a dense run, without a target."""

    way: Way
    seed: int
    rate: float | None


# makes a run, and returns its curve; raises WayFailedError
Train = Callable[[RunKey, Target | None], Curve]
Say = Callable[[str], None]


@dataclass
class Found:
    """What a race has found so far.

    - `factors`: of each way, one for each seed at its better learning rate;
    - `dropped`: ways that were clearly behind, with the words of it;
    - `failed`: ways that cannot run, and why.
    """

    factors: dict[Way, tuple[float | None, ...]] = field(default_factory=dict)
    dropped: dict[Way, str] = field(default_factory=dict)
    failed: dict[Way, str] = field(default_factory=dict)


# dense runs by rank count and seed, at the better learning rate
_Targets = dict[tuple[int, int], Target]


def race(
    ways: Sequence[Way],
    train: Train,
    *,
    pairing: Pairing,
    say: Say = print,
    keep: Callable[[Way, tuple[float | None, ...]], None] = lambda way, factors: None,
) -> Found:
    """Measure the factors of all ways; see the module.

    Args:
        ways: others than dense ones.
        train: makes one run.
        pairing: steps, seeds and learning rates.
        say: called with a line of each run.
        keep: called with the factors of a way as soon as all its runs are made.

    Raises:
        ValueError: the dense run does not train.
    """
    targets: _Targets = {}
    for ranks in dict.fromkeys(way.ranks for way in ways):
        targets |= _dense_targets(ranks, train, pairing=pairing, say=say)
    found = Found()
    factors: dict[tuple[Way, float | None], list[float | None]] = {}
    # all ways with the first seed, then those that are left with the others
    for seed in pairing.seeds:
        for way in ways:
            if way in found.failed or way in found.dropped:
                continue
            target, verdicts, words = targets[way.ranks, seed], [], []
            try:
                for rate in pairing.rates:
                    curve = train(RunKey(way, seed, rate), target)
                    factors.setdefault((way, rate), []).append(target.factor(curve))
                    verdicts.append(target.verdict(curve))
                    words.append(_words_of(curve, target))
                    say(f"{_name(way, seed, rate)}: {words[-1]}")
            except WayFailedError as error:
                found.failed[way] = str(error)
                say(f"{way.words} cannot run: {error}")
                continue
            if seed == pairing.seeds[0] and all(v in (BEHIND, DIVERGED) for v in verdicts):
                found.dropped[way] = "; ".join(words)
            if seed == pairing.seeds[-1] or way in found.dropped:
                of_rates = [tuple(factors[way, rate]) for rate in pairing.rates]
                found.factors[way] = min(of_rates, key=_median)
                keep(way, found.factors[way])
    return found


def _dense_targets(ranks: int, train: Train, *, pairing: Pairing, say: Say) -> _Targets:
    """Make the dense runs; return those of the learning rate whose lowest losses are lowest."""
    way = Way("dense", ranks=ranks)
    of_rates: list[dict[int, Target]] = []
    for rate in pairing.rates:
        runs = {}
        for seed in pairing.seeds:
            try:
                curve = tuple((step, loss) for step, loss in train(RunKey(way, seed, rate), None))
            except WayFailedError as error:
                raise ValueError(f"the dense run fails: {error}") from error
            runs[seed] = Target(curve, pairing)
            step, loss = runs[seed].goal
            shown = f"{loss:.4f} after {step:.0f} steps" if math.isfinite(loss) else "diverged"
            say(f"{_name(way, seed, rate)}: lowest loss {shown}")
        of_rates.append(runs)
    best = min(of_rates, key=lambda runs: statistics.median(t.goal[1] for t in runs.values()))
    for seed, target in best.items():
        step, loss = target.goal
        if not math.isfinite(loss) or len(target.dense) < 2 or step == target.dense[0][0]:
            raise ValueError(
                f"the dense run of seed {seed} does not train: its loss is lowest at the first of "
                f"{len(target.dense)} checks ({loss:.4g} after {step:.0f} steps). Take a lower "
                "learning rate, more steps or a smaller --check-every"
            )
    return {(ranks, seed): target for seed, target in best.items()}


def _median(factors: Sequence[float | None]) -> float:
    return statistics.median_high(math.inf if value is None else value for value in factors)


def _name(way: Way, seed: int, rate: float | None) -> str:
    at = "" if rate is None else f", learning rate {rate:g}"
    return f"{way.words} on {way.ranks} data rank(s), seed {seed}{at}"


def _words_of(curve: Curve, target: Target) -> str:
    """Return what came of a run."""
    (step, _), verdict = curve[-1], target.verdict(curve)
    if verdict == REACHED:
        return f"{target.factor(curve):.2f} x the dense run's steps"
    if verdict == DIVERGED:
        return f"not reached: it diverged after {step:.0f} steps"
    if verdict == BEHIND:
        lowest = min(value for _, value in curve)
        return (
            f"clearly behind, so it ends after {step:.0f} steps: its lowest loss is {lowest:.4g}, "
            f"and the dense run was lower after {step / target.pairing.longest:.0f} steps"
        )
    return f"not reached in {step:.0f} steps"


# ---- the table of the user


def row_of(
    way: Way,
    factors: Sequence[float | None],
    *,
    optimizer: str,
    steps: int,
    model: str,
    source: str,
) -> FactorRow:
    """Return the row of a way's factors, of today."""
    return FactorRow(
        method=way.method,
        options=dict(way.options),
        optimizer=optimizer,
        ranks=way.ranks,
        staleness=way.staleness,
        steps=steps,
        factors=tuple(factors),
        model=model,
        source=source,
        date=datetime.date.today().isoformat(),
        prediction=way.prediction,
    )


def keep_row(path: Path, row: FactorRow) -> None:
    """Add a row to a table in a file, in place of an earlier one about the same."""
    rows = [*StepTable.read(path).rows] if path.exists() else []
    rows = [each for each in rows if _subject(each) != _subject(row)] + [row]
    data = {"version": VERSION, "rows": [_plain(each) for each in rows]}
    write_whole(path, json.dumps(data, indent=1) + "\n")


def _subject(row: FactorRow) -> str:
    """Return all that a row says but what was found, and when."""
    values = {k: v for k, v in _plain(row).items() if k not in ("factors", "source", "date")}
    return json.dumps(values, sort_keys=True)


def _plain(row: FactorRow) -> dict[str, Any]:
    return dataclasses.asdict(row)


def write_whole(path: Path, text: str) -> None:
    """Write a file that nobody sees half written, whatever ends this process."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(text)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise

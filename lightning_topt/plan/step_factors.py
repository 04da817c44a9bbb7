"""Choose by the time to a loss: how many steps a way of training needs, times seconds per step.

    training = Training("AdamW", steps=1000)
    chosen = choose_by_loss(frontier.candidates, training, table=StepTable.read())

Plans that compute what dense synchronous training computes need as many steps as it. Compressed
gradients and stale weights need more. How many is measured: a row of ``step_factors.json`` has the
steps to the dense run's lowest loss, divided by those of the dense run, one number for each seed.
Rows were made by benchmarks/exchange/step_factors.py. A plan that no row is about is left out of
the choice, and the reason names it. Nothing is guessed between rows: a row counts for its method
with all options, its optimizer and its number of ranks, and for lengths near its own.
"""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_topt.basics.units import format_seconds
from lightning_topt.communication.method_registry import read_method
from lightning_topt.plan.choose import NoPlanFitsError, choose
from lightning_topt.plan.parallel_plan import ParallelPlan
from lightning_topt.plan.plan_frontier import PlanFrontier, PlanPoint
from lightning_topt.plan.plan_search import SearchRequest, search_plans
from lightning_topt.prediction import default_prediction, make_prediction, prediction_to_value

VERSION = 1
OBJECTIVE = "time_to_loss"
FILE = Path(__file__).with_name("step_factors.json")
NEAR = 4.0  # lengths within this factor of a row's count as measured


@dataclass(frozen=True)
class Training:
    """What a fit trains by: the class name of its optimizer, and its steps; None: not known."""

    optimizer: str
    steps: float | None = None


@dataclass(frozen=True)
class StepFactor:
    """How many times the steps of dense synchronous training are needed: median, least, most.

    `rests_on` says by which measurement; "" means by definition. Not reached is infinity.
    """

    median: float
    low: float
    high: float
    rests_on: str = ""

    @property
    def words(self) -> str:
        """For people, such as ``1.21 x (1.15 to 1.30)``."""
        if not self.rests_on:
            return "1 x"
        high = "not reached" if math.isinf(self.high) else f"{self.high:.2f}"
        return f"{self.median:.2f} x ({self.low:.2f} to {high})"


SAME = StepFactor(1.0, 1.0, 1.0)


@dataclass(frozen=True)
class FactorRow:
    """Measured factors, one for each seed; None: the loss was not reached.

    Args:
        method: of the exchange, by name; "dense" for gradients as they are.
        options: those of the method, or of the `prediction`; what is left out is as by default.
        optimizer: its class name.
        ranks: with gradients of their own.
        staleness: updates that the first stage misses; 0 for synchronous training.
        prediction: the rule for stale weights; "" for synchronous training.
        steps: of the dense run.
        factors: see above.
        model, source, date: what trained, the committed file of the runs, and when.
    """

    method: str
    options: Mapping[str, Any]
    optimizer: str
    ranks: int
    staleness: int
    steps: int
    factors: tuple[float | None, ...]
    model: str
    source: str
    date: str
    prediction: str = ""

    def factor(self) -> StepFactor:
        """Return the median and the range over the seeds."""
        values = [math.inf if value is None else value for value in self.factors]
        return StepFactor(
            statistics.median_high(values),
            min(values),
            max(values),
            f"{len(values)} runs of {self.steps} steps, {self.model} ({self.source}, {self.date})",
        )

    def is_of(self, plan: ParallelPlan, optimizer: str) -> bool:
        """Return whether the row is about plans that train as `plan` does, of any length."""
        exchange = plan.gradient_exchange
        if self.optimizer != optimizer or self.staleness != plan.in_flight:
            return False
        if self.staleness and self.prediction != _rule_name(plan, optimizer):
            return False
        if exchange is None or exchange.is_exact:
            return self.method == "dense"
        if self.method != exchange.name or self.ranks != plan.mesh.data_parallel_size:
            return False
        return read_method({"method": self.method, **self.options}) == exchange


@dataclass(frozen=True)
class StepTable:
    """The rows of a table of step factors."""

    rows: tuple[FactorRow, ...]

    @classmethod
    def read(cls, path: Path = FILE) -> StepTable:
        """Return the table of a file; by default that of the package. Raises ValueError."""
        try:
            data = json.loads(path.read_text())
        except ValueError as error:
            raise ValueError(f"{path} is no table of step factors ({error}): remove it") from error
        if data.get("version") != VERSION:
            raise ValueError(
                f"{path} is a table of step factors of version {data.get('version')}, and this "
                f"release reads {VERSION}: make it again by benchmarks/exchange/step_factors.py"
            )
        rows = ({**row, "factors": tuple(row["factors"])} for row in data["rows"])
        return cls(tuple(FactorRow(**row) for row in rows))

    @classmethod
    def of_model(cls, model: str) -> StepTable:
        """Return the rows of the package, and what this user has measured of a model.

        `topt calibrate quality=...` measures it. A way of training that it has a row of is not
        looked up in the package's table. Raises ValueError for a file that is no such table.

        Args:
            model: as `model_words` names it.
        """
        table, path = cls.read(), own_file()
        if path is None or not path.is_file():
            return table
        own = tuple(row for row in cls.read(path).rows if row.model == model)
        known = [_way(row) for row in own]
        return cls(own + tuple(row for row in table.rows if _way(row) not in known))

    def factor_of(self, plan: ParallelPlan, training: Training) -> StepFactor | str:
        """Return the factor of a plan, or why there is none, as a clause."""
        if is_synchronous_and_exact(plan):
            return SAME
        rows = [row for row in self.rows if row.is_of(plan, training.optimizer)]
        if not rows:
            return f"no run of {_way_of(plan, training.optimizer)} was measured"
        if training.steps is None or math.isinf(training.steps):
            return max(rows, key=lambda row: row.steps).factor()  # the nearest to a long training
        steps = max(training.steps, 1.0)
        nearest = min(rows, key=lambda row: abs(math.log(row.steps / steps)))
        if not 1 / NEAR <= nearest.steps / steps <= NEAR:
            return (
                f"{_way_of(plan, training.optimizer)} was measured in {nearest.steps} steps, and "
                f"this training has {steps:.0f}"
            )
        factor = nearest.factor()
        if math.isinf(factor.median):
            return (
                f"{_way_of(plan, training.optimizer)} did not reach the dense run's loss "
                f"({factor.rests_on})"
            )
        return factor


def own_file() -> Path | None:
    """Return where this user's rows are kept, beside the folder of measured machines.

    None for a user without a home.
    """
    # importing it takes longer than the choice
    from lightning_topt.costs.measurements import default_directory  # noqa: PLC0415

    try:
        return default_directory().parent / FILE.name
    except RuntimeError:
        return None


def model_words(name: str, parameters: int) -> str:
    """Return what a model is known by: its class name and its number of parameters."""
    return f"{name} of {parameters:,} parameters"


def _way(row: FactorRow) -> tuple[Any, ...]:
    """Return what a row is about, but for the model and the length."""
    method = read_method({"method": row.method, **({} if row.staleness else row.options)})
    return method, row.optimizer, row.ranks, row.staleness, row.prediction


def is_synchronous_and_exact(plan: ParallelPlan) -> bool:
    """Return whether a plan computes what dense synchronous training computes."""
    exchange = plan.gradient_exchange
    return plan.in_flight == 0 and (exchange is None or exchange.is_exact)


def _rule_name(plan: ParallelPlan, optimizer: str) -> str:
    rule = plan.prediction
    value = prediction_to_value(
        default_prediction(optimizer, flight=max(plan.in_flight, 1))
        if rule is None
        else make_prediction(rule)
    )
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True)


def _way_of(plan: ParallelPlan, optimizer: str) -> str:
    """Return words for what a row has to be about."""
    parts = []
    if plan.gradient_exchange is not None and not plan.gradient_exchange.is_exact:
        parts.append(plan.gradient_exchange.words)
    if staleness := plan.in_flight:
        parts.append(f"{staleness} missing updates by {_rule_name(plan, optimizer)}")
    ranks = plan.mesh.data_parallel_size
    return f"{' and '.join(parts) or 'dense'} under {optimizer} with {ranks} data rank(s)"


# ---- the search and the choice


def search_each_way(
    request: SearchRequest, *, progress: Callable[[str], None] | None = None
) -> PlanFrontier:
    """Return the best plans of each way of training, in one frontier.

    A compressed plan with a faster step does not take an exact one out, which may need fewer steps:
    what is best of its own way but not of all stays among the `uniform` plans, for a choice.
    """
    alone = dataclasses.replace(request, exchanges=(), stale=None)
    ways = [alone, *(dataclasses.replace(alone, exchanges=(each,)) for each in request.exchanges)]
    if request.stale is not None:
        ways.append(dataclasses.replace(alone, stale=request.stale))
    found = [search_plans(way, progress=progress) for way in ways]
    if len(found) == 1:
        return found[0]
    points = [point for each in found for point in each.points]
    return PlanFrontier.of(
        points,
        uniform=dict.fromkeys(points + [point for each in found for point in each.uniform]),
        capture_seconds=request.capture_seconds,
        search_seconds=sum(each.search_seconds for each in found),
        error_bound=max(each.error_bound for each in found),
        predicted_as=found[0].predicted_as,
    )


def choose_by_loss(
    points: Sequence[PlanPoint], training: Training, *, table: StepTable, **options: Any
) -> PlanPoint:
    """Return the plan that is predicted to reach the dense run's loss soonest.

    As in `choose`, whose `options` these are, of plans that are as good as the best the simplest is
    taken: exact ones before compressed and stale ones. The plan's reason says what the factor rests
    on, and which plans are left out.

    Raises:
        NoPlanFitsError: nothing fits, of the plans whose factor is known.
    """
    factors = {id(point): table.factor_of(point.plan, training) for point in points}
    left_out = dict.fromkeys(found for found in factors.values() if isinstance(found, str))
    # seconds of as much progress as a dense step makes
    scaled: dict[int, PlanPoint] = {}
    for place, point in enumerate(points):
        factor = factors[id(point)]
        if isinstance(factor, StepFactor):
            seconds = point.step_seconds * factor.median
            scaled[place] = dataclasses.replace(point, step_seconds=seconds)
    if not scaled:
        raise NoPlanFitsError(
            "no plan has a known number of steps to a loss: " + "; ".join(left_out)
        )
    found = choose([*scaled.values()], objective="time", **options)
    place = next(
        place
        for place, point in scaled.items()
        if (point.step_seconds, point.peak_bytes, point.devices)
        == (found.step_seconds, found.peak_bytes, found.devices)
        and point.plan == found.plan
    )
    chosen = points[place]
    factor = factors[id(chosen)]
    assert isinstance(factor, StepFactor)
    reason = _why(chosen, factor, training, [*left_out])
    return dataclasses.replace(chosen, plan=dataclasses.replace(chosen.plan, reason=reason))


def seconds_to_loss(
    point: PlanPoint, factor: StepFactor, *, steps: float = 1.0
) -> tuple[float, float, float]:
    """Return seconds to the loss that a dense run of `steps` reaches: expected, least, most.

    The range is that of the seeds times the interval of the step's seconds, where there is one.
    """
    sure = point.seconds_interval
    low, high = (point.step_seconds,) * 2 if sure is None else (sure.low, sure.high)
    return (
        steps * factor.median * point.step_seconds,
        steps * factor.low * low,
        steps * factor.high * high,
    )


def _why(point: PlanPoint, factor: StepFactor, training: Training, left_out: Sequence[str]) -> str:
    known = training.steps is not None and math.isfinite(training.steps)
    steps = float(training.steps or 1.0) if known else 1.0
    expected, low, high = seconds_to_loss(point, factor, steps=steps)
    most = "an unknown time" if math.isinf(high) else format_seconds(high)
    goal = f"of a dense run of {steps:.0f} steps" if known else "step of a dense run"
    sentences = [
        f"The least time to the loss {goal}, up to the prediction's error: "
        f"{format_seconds(expected)} ({format_seconds(low)} to {most}), "
        f"{format_seconds(point.step_seconds)} per step and {factor.words} the steps"
    ]
    sentences.append(
        f"The factor rests on {factor.rests_on}"
        if factor.rests_on
        else "Its steps are those of dense synchronous training, by definition"
    )
    if left_out:
        sentences.append(f"Left out of the choice: {'; '.join(left_out)}")
    return ". ".join(sentences) + "."

"""Choose by the time to a loss: how many steps a way of training needs, times seconds per step.

    training = Training("AdamW", steps=1000)
    frontier = by_loss(search_each_way(request), training, table=StepTable.read())
    chosen = choose_by_loss(frontier, training, table=StepTable.read())

Plans that compute what dense synchronous training computes need as many steps as it. Compressed
gradients and stale weights need more. How many is measured: a row of ``step_factors.json`` has the
steps to the dense run's lowest loss, divided by those of the dense run, one number for each seed.
Rows were made by benchmarks/exchange/step_factors.py. A plan that no row is about is left out of
the choice, and the reason names it. Nothing is guessed between rows: a row counts for its method
with all options, its optimizer and its number of ranks, and for lengths near its own: short
trainings pay more for missing updates and compression than long ones. Of every model the row of the
nearest length counts, all models together.
"""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_topt.basics.units import format_seconds
from lightning_topt.communication.exchange_method import (
    ByNodes,
    ExchangeMethod,
    LocalMethod,
    read_method,
)
from lightning_topt.plan.choose import NoPlanFitsError, choose_place
from lightning_topt.plan.parallel_plan import ParallelPlan
from lightning_topt.plan.plan_frontier import PlanFrontier, PlanPoint, TimeToLoss
from lightning_topt.plan.plan_search import SearchRequest, search_plans
from lightning_topt.weight_prediction import (
    Prediction,
    TwoVersions,
    default_prediction,
    make_prediction,
    prediction_to_value,
)

VERSION = 1
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


SAME = StepFactor(1.0, 1.0, 1.0)


@dataclass(frozen=True)
class TrainingWay:
    """How a plan trains, as far as it decides how many steps a loss needs.

    Args:
        optimizer: its class name.
        ranks: with gradients of their own.
        exchange: what changes the training; None: gradients as they are.
        staleness: updates that the first stage misses; 0 for synchronous training.
        prediction: the rule for stale weights; None for synchronous training.
    """

    optimizer: str
    ranks: int
    exchange: ExchangeMethod | None = None
    staleness: int = 0
    prediction: Prediction | None = None

    @classmethod
    def of(cls, plan: ParallelPlan, optimizer: str) -> TrainingWay:
        """Return the way of a plan under the optimizer of that class name."""
        gradients, rule = plan.gradient_exchange, None
        if plan.in_flight:
            rule = plan.weight_prediction or default_prediction(
                optimizer, flight=plan.in_flight, accumulate=plan.accumulate
            )
        if gradients is not None and gradients.is_exact:
            gradients = None
        return cls(
            optimizer,
            plan.mesh.data_parallel_size,
            plan.local_steps or gradients,
            0 if rule is None else missing_updates(rule, plan.in_flight),
            rule,
        )

    @property
    def is_dense_and_synchronous(self) -> bool:
        """Whether it computes what dense synchronous training computes."""
        return self.exchange is None and not self.staleness

    @property
    def words(self) -> str:
        """For people: what a row of a table has to be about."""
        parts = [] if self.exchange is None else [self.exchange.words]
        if self.prediction is not None:
            rule = prediction_to_value(self.prediction)
            parts.append(f"{self.staleness} missing updates by {rule}")
        what = " and ".join(parts) or "dense"
        return f"{what} under {self.optimizer} with {self.ranks} data rank(s)"


@dataclass(frozen=True)
class FactorRow:
    """Measured factors, one for each seed; None: the loss was not reached.

    Args:
        method: of the exchange, by name; "dense" for gradients as they are.
        options: those of the method; what is left out is as by default.
        optimizer: its class name.
        ranks: with gradients of their own.
        staleness: updates that the first stage misses; 0 for synchronous training.
        prediction: the rule for stale weights, as `make_prediction` takes it; "" for synchronous
            training.
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
    prediction: str | Mapping[str, Any] = ""

    def apart(self, steps: float) -> float:
        """Return the logarithm of how many times longer, or shorter, `steps` are."""
        return abs(math.log(self.steps / steps))

    def is_of(self, way: TrainingWay) -> bool:
        """Return whether the row is about that way of training, of any length.

        A row of stale weights alone counts for any number of data ranks, whose gradients are
        averaged; one of an exchange for its own number of ranks.
        """
        if (self.optimizer, self.staleness) != (way.optimizer, way.staleness):
            return False
        if self.staleness and make_prediction(self.prediction) != way.prediction:
            return False
        if way.exchange is None:
            return self.method == "dense"
        if self.method != way.exchange.name or self.ranks != way.ranks:
            return False
        method = read_method({"method": self.method, **self.options})
        return _decided(method) == _decided(way.exchange)


def _decided(method: ExchangeMethod) -> ExchangeMethod:
    """Return a method whose ranks are all alike, where it leaves open whether nodes sum first.

    Rows were measured so, and plans have it decided.
    """
    if isinstance(method, ByNodes | LocalMethod) and method.hierarchical is None:
        return dataclasses.replace(method, hierarchical=False)
    return method


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

        `benchmarks.exchange.quality` measures it. A way of training that it has a row of is not
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

    def methods(self, optimizer: str, *, ranks: Collection[int]) -> list[ExchangeMethod]:
        """Return the exchanges and local steps of synchronous rows, as their options say.

        Those that were measured with the optimizer, and with one of these numbers of ranks.
        """
        found = [
            read_method({"method": row.method, **row.options})
            for row in self.rows
            if row.method != "dense" and not row.staleness
            if row.optimizer == optimizer and row.ranks in ranks
        ]
        return [*dict.fromkeys(found)]

    def factor_of(self, plan: ParallelPlan, training: Training) -> StepFactor | str:
        """Return the factor of a plan, or why there is none, as a clause.

        It is that of the runs of its way of training that are nearest in length, all models
        together.
        """
        way, steps = TrainingWay.of(plan, training.optimizer), training.steps
        if way.is_dense_and_synchronous:
            return SAME
        rows = [row for row in self.rows if row.is_of(way)]
        if not rows:
            return f"no run of {way.words} was measured"
        longest = max(row.steps for row in rows)
        length = longest if steps is None or math.isinf(steps) else max(steps, 1.0)
        near = nearest_in_length(rows, length)
        if not near:
            nearest = min(rows, key=lambda row: row.apart(length))
            return (
                f"{way.words} was measured in {nearest.steps} steps, and this training has "
                f"{length:.0f}"
            )
        factor = pooled(near)
        if math.isinf(factor.median):
            return f"{way.words} did not reach the dense run's loss ({factor.rests_on})"
        return factor


def nearest_in_length(rows: Sequence[FactorRow], steps: float) -> list[FactorRow]:
    """Return the row of each model whose length is nearest to `steps`, if it is near at all."""
    found: dict[tuple[str, str], FactorRow] = {}
    for row in sorted(rows, key=lambda row: row.apart(steps)):
        if row.apart(steps) <= math.log(NEAR):
            found.setdefault((row.model, row.source), row)
    return [*found.values()]


def pooled(rows: Sequence[FactorRow]) -> StepFactor:
    """Return the median over the models, each by the median of its seeds, and the range of all."""
    values = [[math.inf if each is None else each for each in row.factors] for row in rows]
    runs = (
        f"{len(row.factors)} runs of {row.steps} steps, {row.model} ({row.source}, {row.date})"
        for row in rows
    )
    median = statistics.median(map(statistics.median_high, values))
    low, high = min(map(min, values)), max(map(max, values))
    return StepFactor(median, low, high, " and ".join(runs))


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
    # What a row is about, but for the model and the length
    method = read_method({"method": row.method, **({} if row.staleness else row.options)})
    return method, row.optimizer, row.ranks, row.staleness, row.prediction


def missing_updates(rule: Prediction, in_flight: int) -> int:
    """Return the updates that the first stage misses, with so many minibatches in flight.

    Two versions are for batches that are cut into as many minibatches as are in flight, so that
    one is missing on any number of stages.
    """
    return min(in_flight, 1) if isinstance(rule, TwoVersions) else in_flight


# ---- the search and the choice


def search_each_way(
    request: SearchRequest, *, progress: Callable[[str], None] | None = None
) -> PlanFrontier:
    """Return the best plans of each way of training, in one frontier.

    A compressed plan with a faster step does not take an exact one out, which may need fewer steps:
    what is best of its own way but not of all stays among the `uniform` plans, for a choice.
    """
    alone = dataclasses.replace(request, exchanges=(), local_steps=(), stale=None)
    ways = [alone, *(dataclasses.replace(alone, exchanges=(each,)) for each in request.exchanges)]
    ways += [dataclasses.replace(alone, local_steps=(each,)) for each in request.local_steps]
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
    )


def by_loss(frontier: PlanFrontier, training: Training, *, table: StepTable) -> PlanFrontier:
    """Return the frontier over time to a loss, memory and devices, of plans whose factor is known.

    Points have `to_loss`, and `left_out` says of which ways of training the factor is not known. A
    frontier that is one already stays as it is.
    """
    if all(point.to_loss is not None for point in frontier.candidates):
        return frontier
    left_out = dict.fromkeys(frontier.left_out)
    known = []
    for point in frontier.candidates:
        factor = table.factor_of(point.plan, training)
        if isinstance(factor, StepFactor):
            to_loss = time_to_loss(point, factor, steps=training.steps)
            known.append(dataclasses.replace(point, to_loss=to_loss))
        else:
            left_out[factor] = None
    points = PlanFrontier.of(known).points
    on_it = {id(point) for point in points}
    others = tuple(point for point in known if id(point) not in on_it)
    return dataclasses.replace(frontier, points=points, uniform=others, left_out=(*left_out,))


def choose_by_loss(
    frontier: PlanFrontier, training: Training, *, table: StepTable, **options: Any
) -> PlanPoint:
    """Return the plan that is predicted to reach the dense run's loss soonest.

    As in `choose`, whose `options` these are, of plans that are as good as the best the simplest is
    taken: exact ones before compressed and stale ones. The plan's reason says what the factor rests
    on, and which plans are left out.

    Raises:
        NoPlanFitsError: nothing fits, of the plans whose factor is known.
    """
    frontier = by_loss(frontier, training, table=table)
    points = frontier.candidates
    if not points:
        raise NoPlanFitsError(
            "no plan has a known number of steps to a loss: " + "; ".join(frontier.left_out)
        )
    # seconds of as much progress as a dense step makes
    scaled = [
        dataclasses.replace(point, step_seconds=point.step_seconds * point.to_loss.factor)
        for point in points
        if point.to_loss is not None
    ]
    place, _ = choose_place(scaled, objective="time", **options)
    chosen = points[place]
    reason = _why(chosen, frontier.left_out)
    return dataclasses.replace(chosen, plan=dataclasses.replace(chosen.plan, reason=reason))


def time_to_loss(point: PlanPoint, factor: StepFactor, *, steps: float | None = None) -> TimeToLoss:
    """Return how long a plan takes to the loss that a dense run of `steps` reaches.

    The range is that of the seeds times the interval of the step's seconds, where there is one.
    Where the steps are not known, it is for one of them.
    """
    known = steps is not None and math.isfinite(steps)
    count = float(steps or 1.0) if known else 1.0
    sure = point.seconds_interval
    low, high = (point.step_seconds,) * 2 if sure is None else (sure.low, sure.high)
    return TimeToLoss(
        count * factor.median * point.step_seconds,
        count * factor.low * low,
        count * factor.high * high,
        factor.median,
        factor.low,
        factor.high,
        factor.rests_on,
        count if known else None,
    )


def _why(point: PlanPoint, left_out: Sequence[str]) -> str:
    found = point.to_loss
    assert found is not None
    most = "an unknown time" if math.isinf(found.high) else format_seconds(found.high)
    goal = (
        "step of a dense run"
        if found.steps is None
        else f"of a dense run of {found.steps:.0f} steps"
    )
    sentences = [
        f"The least time to the loss {goal}, up to the prediction's error: "
        f"{format_seconds(found.seconds)} ({format_seconds(found.low)} to {most}), "
        f"{format_seconds(point.step_seconds)} per step and {found.factor_words} the steps"
    ]
    sentences.append(
        f"The factor rests on {found.rests_on}"
        if found.rests_on
        else "Its steps are those of dense synchronous training, by definition"
    )
    if left_out:
        sentences.append(left_out_sentence(left_out))
    return ". ".join(sentences).removesuffix(".") + "."


def left_out_sentence(left_out: Sequence[str]) -> str:
    """Return for people which ways of training a frontier by time to a loss lacks, and why."""
    return f"Left out of the choice: {'; '.join(left_out)}."

"""The choice by the time to a loss, against a look at every plan; and the table that is shipped."""

from __future__ import annotations

import dataclasses
import json
import math
import random
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from benchmarks.exchange import step_factors as harness
from benchmarks.exchange.paired_runs import keep_row
from lightning_topt.communication import BF16, TopK
from lightning_topt.costs.cluster import Link
from lightning_topt.graph.mesh_axes import Axis, Mesh
from lightning_topt.graph.op_config import OpConfig
from lightning_topt.plan.parallel_plan import BlockPlan, ParallelPlan, StagePlan, uniform_plan
from lightning_topt.plan.pipeline_search import StaleWeights
from lightning_topt.plan.plan_frontier import PlanFrontier, PlanPoint
from lightning_topt.plan.step_factors import (
    FILE,
    SAME,
    FactorRow,
    StepFactor,
    StepTable,
    Training,
    choose_by_loss,
    model_words,
    own_file,
    pooled,
    search_each_way,
    time_to_loss,
)
from lightning_topt.weight_prediction import (
    Prediction,
    default_prediction,
    make_prediction,
    prediction_to_value,
)
from tests.plan.test_pipelines import NODES, make_request

ROOT = Path(__file__).parents[2]
MIB = 2.0**20
FEW_BITS = {"density": None, "bits": 2}
ADAMW = Training("AdamW", 1000)
Rule = str | Mapping[str, Any] | Prediction | None


def row(method: str = "bf16", *factors: float | None, **changes: object) -> FactorRow:
    given = {
        "options": {},
        "optimizer": "AdamW",
        "ranks": 2,
        "staleness": 0,
        "steps": 1000,
        "model": "a GPT",
        "source": "runs.json",
        "date": "2026-01-01",
    }
    return FactorRow(method, factors=factors, **{**given, **changes})


TABLE = StepTable(
    (
        row("bf16", 0.9, 1.0, 1.1),
        row("topk", 1.4, 2.0, None, options=FEW_BITS),
        row("topk", 1.2, 1.2, 1.3, options=FEW_BITS, steps=12000),
        row("topk", None, None, 1.9, options={"density": 0.01}),
    )
)
METHODS = {
    "exact": None,
    "bf16": BF16(),
    "few bits": TopK(density=None, bits=2),
    "1 %": TopK(density=0.01),
    "2 %": TopK(density=0.02),
}


def point(seconds: float, method: str = "exact", mib: float = 100, ranks: int = 2) -> PlanPoint:
    plan = uniform_plan(0, data_parallel_size=ranks)
    plan = dataclasses.replace(plan, gradient_exchange=METHODS[method])
    return PlanPoint(seconds, mib * MIB, ranks, plan)


def pipeline(stages: int, prediction: Rule) -> ParallelPlan:
    """A continuous pipeline on one data rank."""
    rule = None if prediction is None else prediction_to_value(make_prediction(prediction))
    blocks = [[{"block": str(stage), "storage": "ddp"}] for stage in range(stages)]
    blocks[0].append({"block": "", "storage": "ddp"})
    return ParallelPlan.from_dict(
        {
            "version": 2,
            "mesh": [{"name": "pipeline", "size": stages}, {"name": "data", "size": 1}],
            "schedule": "continuous",
            **({} if rule is None else {"prediction": rule}),
            "stages": [{"blocks": each} for each in blocks],
        }
    )


def of(points: list[PlanPoint]) -> PlanFrontier:
    return PlanFrontier.of(points, uniform=points)


def test_factors_are_medians_and_ranges():
    assert TABLE.factor_of(point(1).plan, ADAMW) == SAME
    found = TABLE.factor_of(point(1, "bf16").plan, ADAMW)
    assert isinstance(found, StepFactor)
    assert (found.median, found.low, found.high) == (1.0, 0.9, 1.1)
    assert "3 runs of 1000 steps, a GPT (runs.json, 2026-01-01)" in found.rests_on
    found = TABLE.factor_of(point(1, "few bits").plan, ADAMW)
    assert isinstance(found, StepFactor)
    assert (found.median, found.low, found.high) == (2.0, 1.4, math.inf)
    assert time_to_loss(point(1), found).factor_words == "2.00 x (1.40 to not reached)"
    # a search has decided that nodes do not sum first, as in the runs of the table
    decided = dataclasses.replace(METHODS["few bits"], hierarchical=False)
    plan = dataclasses.replace(point(1).plan, gradient_exchange=decided)
    assert TABLE.factor_of(plan, ADAMW) == found
    # the row that is near in length
    found = TABLE.factor_of(point(1, "few bits").plan, Training("AdamW", 9000))
    assert isinstance(found, StepFactor)
    assert found.median == 1.2
    # all models that have a row that is near, each by the one that is nearest
    longer = row("bf16", 3.0, steps=2000, model="an LSTM")
    table = StepTable((*TABLE.rows, row("bf16", 1.05, 1.3, steps=300, model="an LSTM"), longer))
    found = table.factor_of(point(1, "bf16").plan, Training("AdamW", 600))
    assert isinstance(found, StepFactor)
    assert (found.median, found.low, found.high) == (1.15, 0.9, 1.3)
    assert "a GPT" in found.rests_on and "an LSTM" in found.rests_on


@pytest.mark.parametrize(
    ("method", "training", "ranks", "why"),
    [
        ("2 %", ADAMW, 2, "no run of"),
        ("bf16", Training("SGD", 1000), 2, "under SGD"),
        ("bf16", ADAMW, 4, "with 4 data rank"),
        ("bf16", Training("AdamW", 100_000), 2, "was measured in 1000 steps, and .* 100000"),
        ("1 %", ADAMW, 2, "did not reach the dense run's loss"),
    ],
)
def test_what_is_not_known_has_a_reason(method, training, ranks, why):
    found = TABLE.factor_of(point(1, method, ranks=ranks).plan, training)
    assert isinstance(found, str)
    assert re.search(why, found), found


def stale_plan(method: str = "exact", *, ranks: int = 2, prediction: str = "spectrain"):
    """Two stages whose weights miss updates, between `ranks` data ranks."""
    mesh = Mesh((Axis("pipeline", 2), Axis("data", ranks)))
    storage = OpConfig.zero(0, axes=2)
    stages = (
        StagePlan((BlockPlan("a", storage), BlockPlan("", storage))),
        StagePlan((BlockPlan("b", storage),)),
    )
    return ParallelPlan(
        mesh,
        stages,
        schedule="continuous",
        prediction=prediction,
        gradient_exchange=METHODS[method],
    )


def test_stale_weights_count_for_any_number_of_ranks_and_nothing_is_guessed_of_both() -> None:
    plan = stale_plan("bf16")
    staleness = plan.in_flight
    assert staleness > 0
    stale = row("dense", 1.2, 1.5, 1.8, ranks=1, staleness=staleness, prediction="spectrain")
    table = StepTable((*TABLE.rows, stale))
    for ranks in (2, 4):
        alone = table.factor_of(stale_plan(ranks=ranks), ADAMW)
        assert isinstance(alone, StepFactor)
        assert alone.median == 1.5
    # each of both was measured, and not the two together
    assert "no run of" in str(table.factor_of(plan, ADAMW))
    both = row("bf16", 1.3, 1.4, 1.4, staleness=staleness, prediction="spectrain")
    found = StepTable((*table.rows, both)).factor_of(plan, ADAMW)
    assert isinstance(found, StepFactor)
    assert (found.median, found.low, found.high) == (1.4, 1.3, 1.4)


def test_the_choice_is_that_of_a_look_at_every_plan():
    draw = random.Random(0)
    chosen_ways = set()
    for _ in range(300):
        points = [
            point(draw.uniform(1, 3), method, draw.uniform(50, 150))
            for method in draw.choices([*METHODS], k=8)
        ] + [point(draw.uniform(2, 4), "exact", 50)]
        limit = draw.uniform(60, 160) * MIB
        # the oracle: seconds by hand, over every plan that fits and whose factor is known
        known = {None: 1.0, METHODS["bf16"]: 1.0, METHODS["few bits"]: 2.0}
        times = [
            each.step_seconds * known[each.plan.gradient_exchange]
            for each in points
            if each.plan.gradient_exchange in known and each.peak_bytes * 1.05 <= limit
        ]
        options = {"memory_limit": limit, "difference": 0.0}
        found = choose_by_loss(of(points), ADAMW, table=TABLE, **options)
        exchange = found.plan.gradient_exchange
        assert found.step_seconds * known[exchange] == min(times)
        assert found.peak_bytes * 1.05 <= limit
        chosen_ways.add(exchange)
        # within the error, an exact plan is preferred, and never a worse one than the error allows
        found = choose_by_loss(of(points), ADAMW, table=TABLE, memory_limit=limit)
        seconds = found.step_seconds * known[found.plan.gradient_exchange]
        assert seconds <= min(times) * 1.15 + 2e-3
    assert chosen_ways == {*known}


def test_each_way_of_training_is_searched() -> None:
    """A plan is there though its step takes longer than that of another way."""
    slow = dataclasses.replace(NODES, inter=Link(1e-5, 1e8))
    given = {"cluster": slow, "exchanges": [BF16(), METHODS["1 %"]]}
    rule = StaleWeights(lambda flight: make_prediction("none"))
    request = dataclasses.replace(make_request(layers=4), stale=rule, **given)
    found = {
        (point.plan.gradient_exchange and point.plan.gradient_exchange.name, point.plan.in_flight)
        for point in search_each_way(request).candidates
    }
    assert {(name, flight > 0) for name, flight in found} == {
        *((name, False) for name in (None, "bf16", "topk")),
        (None, True),
    }


def test_the_shipped_table_is_what_the_committed_runs_give():
    runs = json.loads(harness.RUNS.read_text())
    rows = json.loads(json.dumps([*harness.table_rows(runs), *harness.pipeline_rows()]))
    assert json.loads(harness.TABLE.read_text()) == {"version": 1, "rows": rows}
    table = StepTable.read()
    assert {each.method for each in table.rows} >= {"dense", "bf16", "topk"}
    for each in table.rows:
        assert (ROOT / each.source).is_file()
        assert each.factors and pooled([each]).low > 0
    stale = {each.staleness: each for each in table.rows if each.method == "dense"}
    assert stale.keys() == {1, 3}
    # the rules of stale weights that are the default, whole batches and cut
    for flight, accumulate in ((1, 1), (3, 1), (3, 4)):
        rule = default_prediction("AdamW", flight=flight, accumulate=accumulate)
        assert isinstance(table.factor_of(pipeline(flight + 1, rule), ADAMW), StepFactor)
    assert isinstance(table.factor_of(pipeline(3, "spectrain"), ADAMW), str)


@pytest.mark.parametrize("stages", [2, 4, 8])
def test_two_versions_miss_one_update_on_any_number_of_stages(stages):
    """They are for cut batches; other rules miss as many updates as minibatches are in flight."""
    feedback = {"rule": "two_versions", "error_feedback": True}
    table = StepTable(
        (
            row("dense", 1.2, ranks=1, staleness=1, prediction=feedback),
            row("dense", 1.3, ranks=1, staleness=1, prediction="spectrain"),
            row("dense", 1.4, ranks=1, staleness=3, prediction="spectrain"),
        )
    )

    def median(prediction: Rule) -> float | None:
        found = table.factor_of(pipeline(stages, prediction), ADAMW)
        return found.median if isinstance(found, StepFactor) else None

    assert median(feedback) == 1.2
    assert median("two_versions") is None
    assert median("spectrain") == median(None) == {2: 1.3, 4: 1.4, 8: None}[stages]
    # a batch that is cut into so many minibatches has another default
    found = table.factor_of(dataclasses.replace(pipeline(stages, None), accumulate=stages), ADAMW)
    assert isinstance(found, StepFactor) and found.median == 1.2
    found = table.factor_of(pipeline(stages, "two_versions"), ADAMW)
    assert isinstance(found, str) and "no run of 1 missing updates by two_versions under" in found


# ---- the table of the user


def test_rows_of_the_users_model_go_before_those_of_the_package(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path, net = own_file(), model_words("Net", 1234)
    assert path == tmp_path / "lightning_topt" / FILE.name
    plan, training = point(1, "bf16").plan, Training("AdamW", 1000)
    shipped = StepTable.read()
    assert StepTable.of_model(net) == shipped
    keep_row(path, row("bf16", 7.5, model=net, source="mine"))
    keep_row(path, row("bf16", 9.5, model="Other of 1 parameters", source="mine"))
    found = StepTable.of_model(net).factor_of(plan, training)
    assert isinstance(found, StepFactor) and found.median == 7.5
    assert found.rests_on.startswith("1 runs of 1000 steps, Net of 1,234 parameters (mine, ")
    # a model that nothing was measured of has the package's rows alone
    assert StepTable.of_model("Net of 5 parameters") == shipped
    # another way, and another length of this one
    few = point(1, "few bits").plan
    assert StepTable.of_model(net).factor_of(few, training) == shipped.factor_of(few, training)
    assert "was measured in 1000 steps" in str(
        StepTable.of_model(net).factor_of(plan, Training("AdamW", 9000))
    )
    assert BF16() == plan.gradient_exchange
    path.write_text("{")
    with pytest.raises(ValueError, match="is no table of step factors"):
        StepTable.of_model(net)

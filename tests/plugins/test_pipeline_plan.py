"""A pipeline by its number of stages: sizes are checked when it is given."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_topt import AutoParallelStrategy, PipelineStrategy
from lightning_topt.plan.explanation import price_plan
from lightning_topt.plan.parallel_plan import PlanError
from lightning_topt.plan.plan_frontier import PlanFrontier, PlanPoint
from lightning_topt.plugins import plan_request
from lightning_topt.plugins.plan_options import PipelinePlan, read_plan_option
from lightning_topt.plugins.plan_request import AllowedStaleness, rule_for
from lightning_topt.plugins.traced_planning import (
    choose_microbatches,
    choose_pipeline,
    pipeline_request,
)
from lightning_topt.prediction import default_prediction, make_prediction
from tests.plan.test_pipelines import make_request


@pytest.mark.parametrize(
    ("samples", "ranks", "count"),
    [(32, 4, 16), (24, 4, 12), (6, 4, 4), (3, 4, 3), (8, 2, 8), (10, 2, 2), (1, 8, 1)],
)
def test_microbatches_divide_the_batch_where_they_can(samples: int, ranks: int, count: int) -> None:
    assert choose_microbatches(samples, ranks) == count


def test_meshes_have_a_data_axis_for_ranks_that_are_left() -> None:
    def shape(world_size: int, **options: Any) -> dict[str, int]:
        mesh = PipelinePlan(**options).mesh(world_size, num_nodes=1)
        return dict(zip(mesh.names, mesh.shape, strict=True))

    assert shape(4) == {"pipeline": 4, "data": 1}
    assert shape(8, stages=4) == {"pipeline": 4, "data": 2}
    assert shape(4, stages=4, schedule="zbv") == {"pipeline": 2, "data": 2}
    assert shape(2, schedule="interleaved") == {"pipeline": 2, "data": 1}
    with pytest.raises(
        PlanError,
        match=r"3 stages, 1 on each rank, need 3 ranks or a multiple of that, and this run has 4",
    ):
        shape(4, stages=3)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"schedule": "1f2b"}, "schedule"),
        (
            {"stages": 5, "schedule": "interleaved"},
            "runs 2 stages on each rank, so stages is a multiple of that; got 5",
        ),
        ({"stages": 4, "stages_per_rank": 2}, r"schedule '1f1b' runs 1 stage on each rank, got 2"),
        (
            {"schedule": "continuous", "microbatches": 4},
            "whole batches one after the other, without microbatches",
        ),
        ({"schedule": "continuous", "stages_per_rank": 2}, "one stage on each rank"),
        ({"schedule": "continuous", "prediction": "oracle"}, "prediction is one of spectrain"),
        (
            {"prediction": "spectrain"},
            "for the schedules continuous and continuous_overlapped, and this one is '1f1b'",
        ),
    ],
)
def test_wrong_sizes_are_named(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        PipelineStrategy(**options)


@pytest.mark.parametrize(
    "option",
    ["plan", "find_unused"],
)
def test_options_that_a_pipeline_does_not_have_are_refused(option: str) -> None:
    with pytest.raises(TypeError, match=f"does not take '{option}'"):
        PipelineStrategy(**{option: 1})


def test_stale_weights_are_allowed_where_they_can_be() -> None:
    mesh = {"mesh": {"pipeline": 2}}
    never = {"mesh": {"pipeline": 2}, "schedule": "continuous"}
    rule = make_prediction("spectrain")
    assert AutoParallelStrategy(
        plan=mesh, allow_staleness="spectrain"
    ).request.stale == AllowedStaleness(True, rule)
    assert AutoParallelStrategy(plan=never, allow_staleness=True).request.stale == AllowedStaleness(
        True
    )
    assert (
        PipelineStrategy(2, "continuous").request.stale.allowed
        and not PipelineStrategy(2).request.stale.allowed
    )
    given = PipelineStrategy(
        2, "continuous", prediction={"rule": "two_versions", "synchronous_updates": 7}
    )
    plan: Any = given.request.plan
    assert plan.prediction == make_prediction({"rule": "two_versions", "synchronous_updates": 7})
    with pytest.raises(
        PlanError, match=r"changes the training\. To run it, say allow_staleness=True"
    ):
        AutoParallelStrategy(plan=never)
    for other in ("zero1", {"mesh": {"data": 2}}, {"mesh": {"pipeline": 2}, "schedule": "1f1b"}):
        with pytest.raises(
            ValueError,
            match="allow_staleness is for the schedules continuous and continuous_overlapped, "
            "which the",
        ):
            AutoParallelStrategy(plan=other, allow_staleness=True)
    with pytest.raises(
        ValueError,
        match=r"allow_staleness is true, false or a rule of weights: .* is one of spectrain",
    ):
        AutoParallelStrategy(plan=mesh, allow_staleness="oracle")
    with pytest.raises(ValueError, match="beside an axis 'data' alone"):
        AutoParallelStrategy(
            plan={"mesh": {"pipeline": 2, "data": 1, "tensor": 2}}, allow_staleness=True
        )
    with pytest.raises(
        ValueError,
        match="in a pipeline no exchange is searched: leave out allow_compression or plan",
    ):
        AutoParallelStrategy(plan=mesh, allow_staleness=True, allow_compression=True)


def test_rules_suit_the_optimizer() -> None:
    parameters = [torch.nn.Parameter(torch.zeros(2))]
    adam, plain = torch.optim.AdamW(parameters), torch.optim.SGD(parameters, lr=0.1)
    assert rule_for(adam) == default_prediction("AdamW") and rule_for(plain) == make_prediction(
        "stash"
    )
    assert rule_for(adam, make_prediction("spectrain")) == make_prediction("spectrain")
    for optimizer, rule, says in (
        (torch.optim.Adagrad(parameters), "spectrain", "knows the optimizers SGD, Adam, AdamW"),
        (plain, "multistep", "momentum"),
        (torch.optim.LBFGS(parameters), None, "several times per update"),
    ):
        with pytest.raises(ValueError, match=says):
            rule_for(optimizer, None if rule is None else make_prediction(rule))


def test_a_default_rule_that_was_not_measured_is_said_once(monkeypatch: Any) -> None:
    said: list[str] = []
    monkeypatch.setattr(plan_request, "rank_zero_info", said.append)
    plan: Any = SimpleNamespace(in_flight=7)  # eight stages
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(2))])
    for steps in (1000, -1, 9000):
        trainer: Any = SimpleNamespace(accumulate_grad_batches=1, max_steps=steps)
        plan_request.say_if_not_measured(plan, optimizer, trainer)
    assert len(said) == 1 and "9,000 updates were not measured" in said[0]


def test_plans_by_name() -> None:
    assert read_plan_option("pipeline") == PipelinePlan()
    assert AutoParallelStrategy(plan="pipeline+recompute").request.plan == PipelinePlan(
        recompute=True
    )
    assert PipelineStrategy(4, "gpipe", 8).request.plan == PipelinePlan(4, "gpipe", 8)


@pytest.mark.parametrize("plan", ["pipeline", {"mesh": {"pipeline": 2}}, {"mesh": {"data": 2}}])
def test_compression_is_not_ignored_where_it_cannot_be(plan: Any) -> None:
    with pytest.raises(
        ValueError, match="no exchange is searched: leave out allow_compression or plan"
    ):
        AutoParallelStrategy(plan=plan, allow_compression=True)


def test_plans_that_recompute_are_compared_as_they_run() -> None:
    given = PipelinePlan(2, "1f1b", 4, recompute=True)
    mesh = given.mesh(2, num_nodes=1)
    request = replace(make_request(layers=3), device_counts=(2,))
    search = pipeline_request(given, mesh, request, count=4, samples=16)
    seen: list[PlanPoint] = []

    def choose(frontier: PlanFrontier) -> PlanPoint:
        seen.extend(frontier.candidates)
        return min(seen, key=lambda point: point.step_seconds)

    plan = choose_pipeline(given, mesh, search, choose=choose)
    able = {block.name for block in search.graph.blocks if block.recomputable}
    assert able and seen
    for point in seen:
        assert {name for name, config in point.plan.configs.items() if config.recompute} == able
        priced = price_plan(search, point.plan)
        assert (point.step_seconds, point.peak_bytes) == (
            priced.predicted.step_seconds,
            priced.predicted.peak_bytes,
        )
    # What a limit is compared with is less than without.
    free = replace(given, recompute=False)
    kept = choose_pipeline(
        free, mesh, search, choose=lambda found: min(found.candidates, key=lambda p: p.step_seconds)
    )
    assert plan.predicted is not None and kept.predicted is not None
    assert plan.predicted.peak_bytes < kept.predicted.peak_bytes

"""A pipeline by its number of stages: sizes are checked when it is given."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_topt import AutoParallelStrategy, PipelineStrategy
from lightning_topt.plan.parallel_plan import PlanError
from lightning_topt.plugins.plan_options import PipelinePlan
from lightning_topt.plugins.plan_request import Allowed
from lightning_topt.weight_prediction import make_prediction


def test_meshes_have_a_data_axis_for_ranks_that_are_left() -> None:
    def shape(world_size: int, **options: Any) -> dict[str, int]:
        mesh = PipelinePlan(**options).mesh(world_size, num_nodes=1)
        return dict(zip(mesh.names, mesh.shape, strict=True))

    assert shape(4) == {"pipeline": 4, "data": 1}
    assert shape(8, stages=4) == {"pipeline": 4, "data": 2}
    assert shape(4, stages=4, schedule="zbv") == {"pipeline": 2, "data": 2}
    assert shape(2, schedule="interleaved") == {"pipeline": 2, "data": 1}
    with pytest.raises(PlanError, match="need 3 ranks"):
        shape(4, stages=3)


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"schedule": "1f2b"}, "schedule"),
        ({"stages": 5, "schedule": "interleaved"}, "multiple"),
        ({"stages": 4, "stages_per_rank": 2}, "1 stage on each rank"),
        ({"schedule": "continuous", "microbatches": 4}, "microbatches"),
        ({"schedule": "continuous", "stages_per_rank": 2}, "one stage on each rank"),
        ({"schedule": "continuous", "prediction": "oracle"}, "spectrain"),
        ({"prediction": "spectrain"}, "continuous"),
    ],
)
def test_wrong_sizes_are_named(options: dict[str, Any], word: str) -> None:
    with pytest.raises(ValueError, match=word):
        PipelineStrategy(**options)


def test_stale_weights_are_allowed_where_they_can_be() -> None:
    mesh = {"mesh": {"pipeline": 2}}
    never = {"mesh": {"pipeline": 2}, "schedule": "continuous"}
    rule = make_prediction("spectrain")
    by_rule = AutoParallelStrategy(plan=mesh, allow={"staleness": "spectrain"}).request
    assert by_rule.allowed == Allowed(staleness=rule) and by_rule.allowed.rule == rule
    by_optimizer = AutoParallelStrategy(plan=never, allow="staleness").request
    assert by_optimizer.allowed == Allowed(staleness=True) and by_optimizer.allowed.rule is None
    assert PipelineStrategy(2, "continuous").request.allowed == Allowed(staleness=True)
    assert PipelineStrategy(2).request.allowed == Allowed()
    given = PipelineStrategy(
        2, "continuous", prediction={"rule": "two_versions", "synchronous_updates": 7}
    )
    plan: Any = given.request.plan
    assert plan.prediction == make_prediction({"rule": "two_versions", "synchronous_updates": 7})
    with pytest.raises(PlanError, match="allow='staleness'"):
        AutoParallelStrategy(plan=never)
    tensor = {"mesh": {"pipeline": 2, "data": 1, "tensor": 2}}
    flushed = {"mesh": {"pipeline": 2}, "schedule": "1f1b"}
    for plan, options, word in (
        *((plan, {}, "continuous") for plan in ("zero1", {"mesh": {"data": 2}}, flushed)),
        (mesh, {"staleness": "oracle"}, "spectrain"),
        (tensor, {}, "beside an axis"),
        (mesh, {"compression": True}, "compression"),
        (mesh, {"local_steps": True}, "local_steps"),
    ):
        with pytest.raises(ValueError, match=word):
            AutoParallelStrategy(plan=plan, allow={"staleness": True, **options})

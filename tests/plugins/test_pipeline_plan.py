"""A pipeline by its number of stages: sizes are checked when it is given."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_topt import AutoParallelStrategy, PipelineStrategy
from lightning_topt.plan.parallel_plan import PlanError
from lightning_topt.plugins.pipeline_plan import choose_microbatches
from lightning_topt.plugins.read_options import PipelinePlan, read_plan_option


@pytest.mark.parametrize(
    ("samples", "ranks", "count"), [(32, 4, 16), (24, 4, 12), (6, 4, 4), (3, 4, 3), (8, 2, 8), (10, 2, 2), (1, 8, 1)]
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
        PlanError, match=r"3 stages, 1 on each rank, need 3 ranks or a multiple of that, and this run has 4"
    ):
        shape(4, stages=3)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"schedule": "1f2b"}, "schedule"),
        ({"stages": 0}, "stages"),
        ({"stages": "4"}, "stages"),
        ({"microbatches": 0}, "microbatches"),
        (
            {"stages": 5, "schedule": "interleaved"},
            "runs 2 stages on each rank, so stages is a multiple of that; got 5",
        ),
        ({"stages": 4, "stages_per_rank": 2}, r"schedule '1f1b' runs 1 stage on each rank, got 2"),
    ],
)
def test_wrong_sizes_are_named(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        PipelineStrategy(**options)


@pytest.mark.parametrize("option", ["plan", "memory_limit", "objective", "allow_compression", "find_unused"])
def test_options_that_a_pipeline_does_not_have_are_refused(option: str) -> None:
    with pytest.raises(TypeError, match=f"does not take '{option}'"):
        PipelineStrategy(**{option: 1})


def test_plans_by_name() -> None:
    assert read_plan_option("pipeline") == PipelinePlan()
    assert AutoParallelStrategy(plan="pipeline+recompute").request.plan == PipelinePlan(recompute=True)
    assert PipelineStrategy(4, "gpipe", 8).request.plan == PipelinePlan(4, "gpipe", 8)


@pytest.mark.parametrize("plan", ["pipeline", {"mesh": {"pipeline": 2}}, {"mesh": {"data": 2}}])
def test_compression_is_not_ignored_where_it_cannot_be(plan: Any) -> None:
    with pytest.raises(ValueError, match="leave out allow_compression, or plan"):
        AutoParallelStrategy(plan=plan, allow_compression=True)

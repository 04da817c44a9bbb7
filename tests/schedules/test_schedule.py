"""Values of schedules."""

from __future__ import annotations

import pytest

from lightning_topt.schedules.schedule import single_stage_schedule


def test_the_schedule_of_one_stage() -> None:
    schedule = single_stage_schedule(3)
    assert [(a.kind[0], a.microbatch_index) for a in schedule.actions[0]] == [
        (k, i) for i in range(3) for k in "fb"
    ]
    assert (
        schedule.num_stages,
        schedule.num_ranks,
        schedule.stages_of(0),
        schedule.stages_of(1),
    ) == (1, 1, (0,), ())
    with pytest.raises(ValueError, match="at least one microbatch"):
        single_stage_schedule(0)

"""Compiled walks beside those in Python, and the pace of a continuous pipeline beside walks."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest

from lightning_topt.schedules import timing
from lightning_topt.schedules.check import ScheduleError
from lightning_topt.schedules.schedules import (
    SCHEDULES,
    Schedule,
    continuous_schedule,
    make_schedule,
)
from lightning_topt.schedules.timing import (
    StageCosts,
    chained_rank_seconds,
    many_rank_seconds,
    seconds_per_minibatch,
    step_seconds,
)

SETS = 70  # more than are walked at once


def every_schedule() -> list[Schedule]:
    sizes = [(1, 3), (2, 7), (3, 4), (4, 9)]
    found = [
        make_schedule(name, num_ranks=ranks, num_microbatches=count, stages_per_rank=chunks)
        for (ranks, count), (name, rule) in itertools.product(sizes, SCHEDULES.items())
        for chunks in range(rule.least_stages, min(rule.most_stages or 3, 3) + 1)
    ]
    found += [
        continuous_schedule(num_ranks=3, num_minibatches=8, lag_per_hop=lag, accumulate=2)
        for lag in (1, 2)
    ]
    return found


def test_compiled_seconds_are_those_of_a_walk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "is_worth_compiling", lambda schedule: False)
    rng = np.random.default_rng(0)
    for schedule in every_schedule():
        stages = schedule.num_stages
        rows = [rng.uniform(0.1, 1, (stages, SETS)) for _ in range(5)]
        edges = [*itertools.pairwise(range(stages))]
        between = [
            dict(zip(edges, rng.uniform(0, 0.7, (len(edges), SETS)), strict=True)) for _ in range(2)
        ]
        for transfers in (between, [between[0], None], [None, None]):
            given = (rows[0], rows[1], rows[2], rows[3], rows[4]), (transfers[0], transfers[1])
            found = chained_rank_seconds(schedule, rows, given[1])
            assert found is not None and found.shape == (schedule.num_ranks, SETS)
            np.testing.assert_array_equal(found, many_rank_seconds(schedule, *given))


def test_a_schedule_that_hangs_is_said_to(monkeypatch: pytest.MonkeyPatch) -> None:
    schedule = make_schedule("1f1b", num_ranks=2, num_microbatches=2)
    hangs = replace(schedule, actions=(schedule.actions[0][::-1], schedule.actions[1]))
    monkeypatch.setattr(timing, "is_worth_compiling", lambda schedule: True)
    once = np.ones((2, 1))
    with pytest.raises(ScheduleError):
        many_rank_seconds(hangs, (once, once, None, None, None), (None, None))
    with pytest.raises(ValueError, match="no seconds of backward_input"):
        zero_bubble = make_schedule("zero_bubble", num_ranks=2, num_microbatches=2)
        many_rank_seconds(zero_bubble, (once, once, None, None, None), (None, None))


@pytest.mark.parametrize("lag_per_hop", [1, 2, 3])
def test_the_pace_is_that_of_a_long_walk(lag_per_hop: int) -> None:
    """A step of 60 more minibatches takes so many times as long; of the same costs, many stages
    wait for links, some do not.
    """
    rng, alone = np.random.default_rng(lag_per_hop), 0
    for number in range(40):
        stages = 1 + number % 5
        forward, backward, update = rng.integers(1, 9, (3, stages)).astype(float)
        there, back = rng.integers(0, (1, 4, 20)[number % 3], (2, stages)).astype(float)
        found = seconds_per_minibatch(
            (forward + backward)[:, None],
            update[:, None],
            np.stack([there, back])[..., None],
            lag_per_hop=lag_per_hop,
        )
        edges = range(1, stages)
        costs = StageCosts(
            forward.tolist(),
            backward.tolist(),
            update=update.tolist(),
            transfer_seconds={(s - 1, s): there[s] for s in edges},
            gradient_seconds={(s - 1, s): back[s] for s in edges},
        )
        period = 60
        lengths = [
            step_seconds(
                continuous_schedule(
                    num_ranks=stages, num_minibatches=count, lag_per_hop=lag_per_hop
                ),
                costs,
            )
            for count in (200, 200 + period)
        ]
        assert found[0] == pytest.approx((lengths[1] - lengths[0]) / period, rel=0.01), (
            number,
            costs,
        )
        alone += found[0] == (forward + backward + update).max()
    assert 5 < alone < 40


def test_the_pace_of_many_sets_of_costs_is_that_of_one_by_one() -> None:
    rng = np.random.default_rng(0)
    passes, updates, transfers = rng.random((4, 9)), rng.random((4, 9)), 3 * rng.random((2, 4, 9))
    together = seconds_per_minibatch(passes, updates, transfers, lag_per_hop=2)
    alone = [
        seconds_per_minibatch(passes[:, [n]], updates[:, [n]], transfers[..., [n]], lag_per_hop=2)[
            0
        ]
        for n in range(9)
    ]
    np.testing.assert_allclose(together, alone)

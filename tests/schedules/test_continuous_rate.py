"""The pace of a pipeline that never flushes, against the simulation of many minibatches."""

from __future__ import annotations

import numpy as np
import pytest

from lightning_topt.schedules.continuous import continuous_schedule
from lightning_topt.schedules.continuous_rate import seconds_per_minibatch
from lightning_topt.schedules.schedule_timing import step_seconds
from lightning_topt.schedules.stage_costs import StageCosts


@pytest.mark.parametrize("lag_per_hop", [1, 2, 3])
def test_equals_the_simulation(lag_per_hop: int) -> None:
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


def test_many_sets_of_costs_at_once_are_those_one_by_one() -> None:
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

"""What `KnownPlans` says of a chain, against all its plans."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from lightning_topt.costs.chain_table import BlockCosts, ChainTable
from lightning_topt.plan.known_plans import KnownPlans


def table(rng: np.random.Generator) -> ChainTable:
    """A chain of five blocks, two of them distinct, under three configurations each."""

    def block() -> BlockCosts:
        names = (
            "seconds",
            "backward",
            "exchange",
            "static",
            "kept",
            "late",
            "hump",
            "held",
            "forward_hump",
        )
        costs = {name: rng.uniform(0.1, 1.0, 3) for name in names}
        return BlockCosts((0, 1, 2), **(costs | {"seconds": costs["seconds"] + costs["backward"]}))

    return ChainTable((block(), block()), (0, 1, 1, 1, 0), *rng.uniform(0, 1, 3).tolist())


def every_plan(of: ChainTable) -> np.ndarray:
    return np.stack(of.evaluate(np.array([*itertools.product(range(3), repeat=5)])), axis=1)


def known(costs: np.ndarray) -> KnownPlans:
    """The best ones of `costs`."""
    best = [c for c in costs if not ((costs <= c).all(axis=1) & (costs < c).any(axis=1)).any()]
    return KnownPlans(np.unique(np.array(best), axis=0))


@pytest.mark.parametrize("shift", [-0.2, 0.0, 0.03, 0.1, 0.3])
def test_a_chain_that_is_dropped_has_no_plan_that_the_known_ones_do_not_beat(shift: float) -> None:
    dropped = 0
    for seed in range(60):
        rng = np.random.default_rng(seed)
        mine = table(rng)
        plans = every_plan(mine)
        # Plans of the same shape, a little better or worse; or those of another chain.
        others = known(
            plans * (1 - shift) if seed % 2 else every_plan(table(rng)) * (1 - 3 * shift)
        )
        better = [p for p in plans if not (others.costs <= p).all(axis=1).any()]
        if not others.may_gain(mine):
            dropped += 1
            assert not better
    assert dropped or shift <= 0
    assert dropped >= 20 or shift < 0.3


def test_a_few_prices_rule_out_no_chain_that_all_prices_would_not() -> None:
    seen = set()
    for seed in range(80):
        rng = np.random.default_rng(seed)
        seconds, size = np.sort(rng.uniform(1, 2, 9)), np.sort(rng.uniform(1, 2, 9))[::-1]
        mine, points = KnownPlans(np.stack([seconds, size], axis=1)), rng.uniform(1.0, 2.2, (3, 2))
        least = (points[:, :1] + points[:, 1:] * mine.prices).min(axis=0)
        corners = seconds[1:, None] + mine.prices[1:] * size[:-1, None]
        slow = (
            least[0] < seconds[0]
            or points[:, 1].min() < size[-1]
            or (corners > least[1:]).all(axis=1).any()
        )
        assert mine.may_gain_above(points[:, 1].min(), mine.prices, least) == slow
        seen.add(bool(slow))
    assert seen == {True, False}

"""search_chain against every plan and a simulated step, and what it says when it may not finish."""

import numpy as np
import pytest

from lightning_topt.frontier import chain_search, search_chain
from tests.frontier.tables import (
    assert_costs_are_evaluated,
    assert_equals_every_plan,
    block_of,
    evaluate,
    every_plan,
    random_chain,
    simulate,
)


@pytest.fixture(params=["numpy", "compiled", "compiled in small steps"])
def way(request, monkeypatch):
    """By NumPy alone; compiled; with few partial plans at first, few comparisons, tiny chunks."""
    if request.param != "numpy":
        monkeypatch.setattr(chain_search, "_SMALL", 0)
    if request.param == "compiled in small steps":
        monkeypatch.setattr(chain_search, "_FIRST_CAP", 2)
        monkeypatch.setattr(chain_search, "_WIDER", 2)
        monkeypatch.setattr(chain_search, "_COMPARED", (2, 1))
        monkeypatch.setattr(chain_search, "_CHUNK", 20)


def test_evaluate_equals_a_simulated_step():
    rng = np.random.default_rng(0)
    for _ in range(60):
        blocks, forward = int(rng.integers(1, 7)), bool(rng.random() < 0.5)
        table = random_chain(rng, blocks=blocks, configs=3, forward=forward)
        plans = np.stack(
            [rng.integers(0, len(block_of(table, n).configs), 8) for n in range(len(table.order))],
            axis=1,
        )
        seconds, size = evaluate(table, plans)
        for plan, *costs in zip(plans, seconds, size, strict=True):
            np.testing.assert_allclose(costs, simulate(table, plan), rtol=1e-14)


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("forbidden", [0.0, 0.2])
def test_equals_every_plan(way, ties, forbidden):
    rng = np.random.default_rng([ties, int(10 * forbidden)])
    for trial in range(24):
        table = random_chain(
            rng,
            blocks=int(rng.integers(1, 8)),
            configs=4,
            ties=ties,
            forbidden=forbidden,
            distinct=2 if trial % 3 == 2 else None,
            late=trial % 4 > 0,
            forward=trial % 5 > 2,
        )
        assert_equals_every_plan(table, search_chain(table))


def test_long_chains_equal_every_plan(way):
    rng = np.random.default_rng(0)
    for trial in range(3):
        table = random_chain(rng, blocks=11, configs=3, ties=trial == 2, forward=trial > 0)
        assert_equals_every_plan(table, search_chain(table))


@pytest.mark.parametrize(
    "limit", [{"max_points": 1}, {"max_points": 3}, {"max_bytes": 500.0}, {"epsilon": 0.05}]
)
@pytest.mark.parametrize("ties", [False, True])
def test_what_was_given_up_stays_within_the_bound(monkeypatch, ties, limit):
    monkeypatch.setattr(chain_search, "_SMALL", 0)
    rng, inexact = np.random.default_rng([ties, len(limit)]), 0
    for trial in range(12):
        table = random_chain(rng, blocks=7, configs=4, ties=ties, forbidden=0.1 * (trial % 3))
        found = search_chain(table, **limit)
        inexact += not found.exact
        assert found.exact == (found.error_bound == 0)
        assert found.error_bound <= limit.get("epsilon", np.inf)
        factor = 1 + found.error_bound + 1e-12
        for seconds, size in every_plan(table):
            assert any(
                p.step_seconds <= seconds * factor and p.peak_bytes <= size * factor
                for p in found.points
            )
        assert_costs_are_evaluated(table, found)
    assert inexact


def test_time_that_is_up_leaves_what_is_known():
    table = random_chain(np.random.default_rng(1), blocks=60, configs=8)
    found = search_chain(table, max_seconds=1e-9)
    assert found.points and not found.exact and 0 < found.error_bound < np.inf
    assert_costs_are_evaluated(table, found)

"""search_frontier against brute force, point for point."""

import time

import numpy as np
import pytest

from lightning_topt.costs.cost_table import CostTable, EdgeCosts, OperatorCosts
from lightning_topt.frontier import fold
from lightning_topt.frontier.brute_force import brute_force_frontier
from lightning_topt.frontier.search import search_frontier
from tests.frontier.tables import SHAPES, random_table


def assert_equals_brute_force(table, frontier):
    expected = brute_force_frontier(table)
    assert frontier.exact and frontier.error_bound == 0 and len(frontier) == len(expected)
    found = np.array([(p.step_seconds, p.peak_bytes) for p in frontier.points]).reshape(-1, 2)
    wanted = np.array([(p.step_seconds, p.peak_bytes) for p in expected]).reshape(-1, 2)
    np.testing.assert_array_equal(found, wanted)
    for point in frontier.points:
        assert table.evaluate(point.choice) == (point.step_seconds, point.peak_bytes)
    assert all(a.peak_bytes < b.peak_bytes for a, b in zip(frontier.points, frontier.points[1:], strict=False))


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("forbidden", [0.0, 0.2])
@pytest.mark.parametrize("shape", SHAPES)
def test_equals_brute_force(shape, forbidden, ties):
    rng = np.random.default_rng([len(shape), int(10 * forbidden), ties])
    for paths, moments in ((1, 1), (2, 1), (1, 3), (2, 4)):
        for _ in range(5):
            table = random_table(
                rng, shape=shape, operators=int(rng.integers(1, 7)) if shape != "ring" else int(rng.integers(3, 7)),
                paths=paths, moments=moments, forbidden=forbidden, ties=ties,
            )  # fmt: skip
            assert_equals_brute_force(table, search_frontier(table))


def test_sums_that_round_differently_lose_nothing_but_the_rounding():
    rng = np.random.default_rng(0)
    for shape in ("isolated", "chain", "complete"):
        table = random_table(rng, shape=shape, grid=3000.0, same=True)
        frontier, expected = search_frontier(table), brute_force_frontier(table)
        for plan in expected:
            assert any(
                p.step_seconds <= plan.step_seconds + 1e-12 and p.peak_bytes <= plan.peak_bytes + 1e-12
                for p in frontier.points
            )


@pytest.mark.parametrize("same", [False, True])
@pytest.mark.parametrize("ties", [False, True])
def test_bounds_and_chunks_keep_every_point(monkeypatch, same, ties):
    """The same with bounds from the first part on, few comparisons for dominance and tiny chunks."""
    monkeypatch.setattr(fold, "_BOUNDS_FROM", 1)
    monkeypatch.setattr(fold, "_EXACT_DOMINANCE", 4)
    monkeypatch.setattr(fold, "_PIVOTS", 2)
    monkeypatch.setattr(fold, "_CHUNK", 20)
    rng = np.random.default_rng([same, ties])
    for trial in range(25):
        moments = 1 + trial % 5
        table = random_table(rng, shape="isolated", operators=6, configs=4, moments=moments, same=same, ties=ties)
        assert_equals_brute_force(table, search_frontier(table))


@pytest.mark.parametrize("shape", ["isolated", "chain", "skips", "complete"])
@pytest.mark.parametrize("max_points", [1, 3, 6])
def test_thinned_frontiers_stay_within_their_bound(shape, max_points):
    rng = np.random.default_rng([len(shape), max_points])
    thinned = 0
    for _ in range(12):
        table = random_table(rng, shape=shape, operators=5, configs=4)
        try:
            frontier = search_frontier(table, max_points=max_points)
        except ValueError as error:
            assert max_points == 1 and "allow more points" in str(error)
            continue
        assert len(frontier) <= max_points
        thinned += not frontier.exact
        for plan in brute_force_frontier(table):
            near = (frontier.seconds[:, 0] <= plan.step_seconds * (1 + frontier.error_bound) + 1e-12) & (
                frontier.bytes[:, 0] <= plan.peak_bytes * (1 + frontier.error_bound) + 1e-12
            )
            assert near.any()
        for point in frontier.points:
            assert table.evaluate(point.choice) == (point.step_seconds, point.peak_bytes)
    assert thinned


def test_conditioning_says_when_it_is_too_much():
    table = random_table(np.random.default_rng(0), shape="complete", operators=6, configs=4, same=True)
    assert_equals_brute_force(table, search_frontier(table, max_branches=64))
    with pytest.raises(ValueError, match="max_branches is 3"):
        search_frontier(table, max_branches=3)


def test_all_plans_forbidden_gives_an_empty_frontier():
    one = np.ones((2, 1))
    operators = tuple(OperatorCosts(name, (0, 1), one, one) for name in "ab")
    forbidden = EdgeCosts("a", "b", np.full((2, 2, 1), np.inf), np.zeros((2, 2, 1)))
    frontier = search_frontier(CostTable(operators, (forbidden,), np.zeros(1), np.zeros(1)))
    assert len(frontier) == 0 and frontier.points == []
    never = OperatorCosts("c", (0,), np.full((1, 1), np.inf), np.ones((1, 1)))
    assert len(search_frontier(CostTable((never,), (), np.zeros(1), np.zeros(1)))) == 0


def test_no_operators_is_the_fixed_cost():
    (point,) = search_frontier(CostTable((), (), np.array([1.0, 3.0]), np.array([7.0]))).points
    assert (point.step_seconds, point.peak_bytes, point.choice) == (3.0, 7.0, {})


def test_bad_tables_are_refused():
    none = OperatorCosts("a", (), np.zeros((0, 1)), np.zeros((0, 1)))
    with pytest.raises(ValueError, match="no configuration"):
        search_frontier(CostTable((none,), (), np.zeros(1), np.zeros(1)))
    minus = OperatorCosts("a", (0,), np.full((1, 1), -np.inf), np.zeros((1, 1)))
    with pytest.raises(ValueError, match="minus infinity"):
        search_frontier(CostTable((minus,), (), np.zeros(1), np.zeros(1)))
    with pytest.raises(ValueError, match="max_points"):
        search_frontier(CostTable((), (), np.zeros(1), np.zeros(1)), max_points=0)


def test_long_chain_does_not_exhaust_the_stack():
    rng = np.random.default_rng(0)
    table = random_table(rng, shape="chain", operators=600, configs=2, paths=1, moments=1, ties=True)
    frontier = search_frontier(table)
    assert frontier.exact and len(frontier) > 1
    for point in frontier.points:
        assert table.evaluate(point.choice) == (point.step_seconds, point.peak_bytes)


def test_equal_operators_with_many_columns_are_fast_and_exact():
    table = random_table(np.random.default_rng(1), shape="isolated", operators=14, configs=8, moments=6, same=True)
    start = time.process_time()
    frontier = search_frontier(table)
    assert frontier.exact and len(frontier) > 1
    assert time.process_time() - start < 5  # 0.3 s on the machine of benchmarks/results; brute force has 4e12 plans

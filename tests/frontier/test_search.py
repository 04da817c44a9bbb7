"""search_frontier against brute force, point for point, and what it says when it may not finish."""

import numpy as np
import pytest

from lightning_topt.costs.cost_table import CostTable, EdgeCosts, OperatorCosts
from lightning_topt.frontier import layer_search
from tests.frontier import graph_search
from tests.frontier.brute_force import brute_force_frontier
from tests.frontier.graph_search import search_frontier
from tests.frontier.tables import (
    SHAPES,
    assert_costs_are_evaluated,
    assert_equals_brute_force,
    random_table,
)


@pytest.fixture(params=["numpy", "compiled", "compiled in small steps", "compiled without joining"])
def way(request, monkeypatch):
    """By NumPy alone; compiled; with few partial plans at first, few comparisons and tiny chunks;
    from one end only.
    """
    if request.param != "numpy":
        monkeypatch.setattr(layer_search, "_SMALL", 0)
    if request.param == "compiled in small steps":  # also of joined plans
        monkeypatch.setattr(layer_search, "_FIRST_CAP", 2)
        monkeypatch.setattr(layer_search, "_WIDER", 2)
        monkeypatch.setattr(layer_search, "_COMPARED", (2, 1))
        monkeypatch.setattr(layer_search, "_CHUNK", 20)
        monkeypatch.setattr(layer_search, "_ROOM", 3)
    if request.param == "compiled without joining":
        monkeypatch.setattr(layer_search, "_PAIRS", -1)


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("forbidden", [0.0, 0.2])
@pytest.mark.parametrize("shape", SHAPES)
def test_equals_brute_force(way, shape, forbidden, ties):
    rng = np.random.default_rng([len(shape), int(10 * forbidden), ties])
    for paths, moments in ((1, 1), (2, 1), (1, 3), (2, 4)):
        for _ in range(5):
            table = random_table(
                rng,
                shape=shape,
                operators=int(rng.integers(1, 7)) if shape != "ring" else int(rng.integers(3, 7)),
                paths=paths,
                moments=moments,
                forbidden=forbidden,
                ties=ties,
            )
            assert_equals_brute_force(table, search_frontier(table))


@pytest.mark.parametrize("same", [False, True])
def test_equal_operators_and_many_columns(way, same):
    rng = np.random.default_rng(same)
    for trial in range(12):
        table = random_table(
            rng,
            shape="isolated",
            operators=6,
            configs=4,
            moments=1 + trial % 5,
            same=same,
            ties=trial % 2 == 0,
        )
        assert_equals_brute_force(table, search_frontier(table))


def test_sums_that_round_differently_lose_nothing_but_the_rounding():
    rng = np.random.default_rng(0)
    for shape in ("isolated", "chain", "complete"):
        table = random_table(rng, shape=shape, grid=3000.0, same=True)
        frontier, expected = search_frontier(table), brute_force_frontier(table)
        for plan in expected:
            assert any(
                p.step_seconds <= plan.step_seconds + 1e-12
                and p.peak_bytes <= plan.peak_bytes + 1e-12
                for p in frontier.points
            )


def assert_bound_holds(table, frontier):
    """Every plan has a point that is at most ``1 + error_bound`` times as dear in both costs."""
    for plan in brute_force_frontier(table):
        factor = 1 + frontier.error_bound + 1e-12
        near = (frontier.seconds <= plan.step_seconds * factor) & (
            frontier.bytes <= plan.peak_bytes * factor
        )
        assert near.any() or frontier.error_bound == np.inf
    assert_costs_are_evaluated(table, frontier)


@pytest.mark.parametrize("shape", ["isolated", "chain", "skips", "complete"])
@pytest.mark.parametrize(
    "limit",
    [
        {"max_points": 1},
        {"max_points": 3},
        {"max_bytes": 500.0},
        {"max_branches": 5},
        {"epsilon": 0.05},
    ],
)
def test_what_was_given_up_stays_within_the_bound(monkeypatch, shape, limit):
    monkeypatch.setattr(layer_search, "_SMALL", 0)
    rng = np.random.default_rng([len(shape), len(limit)])
    inexact = 0
    for trial in range(10):
        table = random_table(
            rng,
            shape=shape,
            operators=5,
            configs=4,
            paths=1 + trial % 2,
            forbidden=0.1 * (trial % 3),
        )
        frontier = search_frontier(table, **limit)
        inexact += not frontier.exact
        assert frontier.exact == (frontier.error_bound == 0)
        if frontier.exact:
            assert_equals_brute_force(table, frontier)
        assert_bound_holds(table, frontier)
        assert frontier.error_bound <= limit.get("epsilon", np.inf)
    assert inexact or (limit == {"max_branches": 5} and shape == "isolated")


@pytest.mark.parametrize("columns", [1, 2])
def test_time_that_is_up_leaves_what_is_known(columns):
    rng = np.random.default_rng(columns)
    table = random_table(
        rng, shape="chain", operators=60, configs=8, paths=columns, moments=columns
    )
    frontier = search_frontier(table, max_seconds=1e-9)
    assert len(frontier) and not frontier.exact and 0 < frontier.error_bound < np.inf
    assert_costs_are_evaluated(table, frontier)
    whole = search_frontier(
        random_table(rng, shape="chain", operators=6, configs=3), max_seconds=60
    )
    assert whole.exact


@pytest.mark.parametrize(
    "limit", [{"max_branches": 4}, {"max_points": 1}, {"max_points": 2, "epsilon": 0.3}]
)
def test_plans_that_cost_little_or_nothing(monkeypatch, limit):
    """No relative error can be stated where the least costs are zero or less."""
    monkeypatch.setattr(layer_search, "_SMALL", 0)
    rng = np.random.default_rng(3)
    tables = [
        random_table(rng, shape="complete", operators=4, configs=4, ties=True) for _ in range(25)
    ]
    found = [search_frontier(table, **limit) for table in tables]
    assert any(frontier.error_bound > 0 for frontier in found)
    assert any(frontier.error_bound == np.inf for frontier in found) or "max_branches" not in limit
    for table, frontier in zip(tables, found, strict=True):
        if frontier.exact:
            assert_equals_brute_force(table, frontier)
        assert_bound_holds(table, frontier)


def test_all_plans_forbidden_gives_an_empty_frontier(way):
    one = np.ones((2, 1))
    operators = tuple(OperatorCosts(name, (0, 1), one, one) for name in "ab")
    forbidden = EdgeCosts("a", "b", np.full((2, 2, 1), np.inf), np.zeros((2, 2, 1)))
    frontier = search_frontier(CostTable(operators, (forbidden,), np.zeros(1), np.zeros(1)))
    assert len(frontier) == 0 and frontier.points == [] and frontier.exact
    never = OperatorCosts("c", (0,), np.full((1, 1), np.inf), np.ones((1, 1)))
    assert len(search_frontier(CostTable((never,), (), np.zeros(1), np.zeros(1)))) == 0


def test_no_operators_is_the_fixed_cost():
    (point,) = search_frontier(CostTable((), (), np.array([1.0, 3.0]), np.array([7.0]))).points
    assert (point.step_seconds, point.peak_bytes, point.choice) == (3.0, 7.0, {})


def test_bad_tables_and_limits_are_refused():
    none = OperatorCosts("a", (), np.zeros((0, 1)), np.zeros((0, 1)))
    with pytest.raises(ValueError, match="no configuration"):
        search_frontier(CostTable((none,), (), np.zeros(1), np.zeros(1)))
    minus = OperatorCosts("a", (0,), np.full((1, 1), -np.inf), np.zeros((1, 1)))
    with pytest.raises(ValueError, match="minus infinity"):
        search_frontier(CostTable((minus,), (), np.zeros(1), np.zeros(1)))
    nothing = CostTable((), (), np.zeros(1), np.zeros(1))
    for limit in ({"max_points": 0}, {"max_branches": 0}, {"max_seconds": 0}, {"max_bytes": -1}):
        with pytest.raises(ValueError, match="must be at least 1"):
            search_frontier(nothing, **limit)
    for epsilon in (-0.1, 1.0):
        with pytest.raises(ValueError, match="epsilon"):
            search_frontier(nothing, epsilon=epsilon)


def test_long_chain_does_not_exhaust_the_stack():
    rng = np.random.default_rng(0)
    table = random_table(
        rng, shape="chain", operators=600, configs=2, paths=1, moments=1, ties=True
    )
    frontier = search_frontier(table)
    assert frontier.exact and len(frontier) > 1
    assert_costs_are_evaluated(table, frontier)


def test_operators_are_reordered_where_the_table_scatters_neighbours():
    """A chain whose operators are listed alternately from both ends: its own order would join half
    of them.
    """
    rng = np.random.default_rng(1)
    chain = random_table(rng, shape="chain", operators=16, configs=4, same=True)
    order = [index for pair in zip(range(8), range(15, 7, -1), strict=True) for index in pair]
    shuffled = CostTable(
        tuple(chain.operators[i] for i in order),
        chain.edges,
        chain.fixed_seconds,
        chain.fixed_bytes,
    )
    graph = graph_search.TableGraph(shuffled)
    assert graph.most_transitions(graph.order(()), ()) <= 64
    found, expected = (search_frontier(table, max_seconds=1e6) for table in (shuffled, chain))
    assert [(p.step_seconds, p.peak_bytes) for p in found.points] == [
        (p.step_seconds, p.peak_bytes) for p in expected.points
    ]
    assert_costs_are_evaluated(shuffled, found)

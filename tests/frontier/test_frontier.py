"""The algebra against slow twins, and its laws."""

import itertools

import numpy as np
import pytest

from lightning_topt.frontier.frontier import (
    Frontier,
    constant,
    decide,
    dominates,
    gather,
    product,
    reduce,
    thin,
    thin_to,
    union,
)
from lightning_topt.frontier.pareto import pareto_rows, pareto_rows_2, unique_rows


def slow_minimal(costs):
    """The distinct minimal rows, sorted."""
    rows = sorted(set(map(tuple, costs.tolist())))
    return [r for r in rows if not any(o != r and all(a <= b for a, b in zip(o, r, strict=True)) for o in rows)]


def random_costs(rng, n, c, *, ties):
    return rng.integers(0, 4, (n, c)).astype(float) if ties else rng.random((n, c))


def random_frontier(rng, name, n, *, paths=1, moments=2, ties=False):
    return decide(name, random_costs(rng, n, paths, ties=ties), random_costs(rng, n, moments, ties=ties))


def rows_of(frontier):
    return sorted(map(tuple, frontier.costs.tolist()))


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("columns", [1, 2, 3, 5, 8])
def test_pareto_rows_equals_slow_twin(columns, ties):
    rng = np.random.default_rng([columns, ties])
    for n in (1, 2, 3, 17, 100, 700):
        costs = random_costs(rng, n, columns, ties=ties)
        assert sorted(map(tuple, costs[pareto_rows(costs)].tolist())) == slow_minimal(costs)
        some = {tuple(row) for row in costs[pareto_rows(costs, pivots=3)].tolist()}
        assert some >= set(slow_minimal(costs))


def test_pareto_rows_with_constant_equal_and_many_kept_columns():
    rng = np.random.default_rng(0)
    first = rng.random(6000)
    costs = np.stack([first, np.ones(6000), 1 - first, 5 + first, rng.random(6000)], axis=1)
    assert len(pareto_rows(costs)) == 6000  # first and 1 - first trade off: all minimal, in many blocks and chunks
    assert len(pareto_rows(costs[:, [0, 1, 3]])) == 1
    assert len(pareto_rows(np.ones((5, 3)))) == 1
    assert len(pareto_rows(np.ones((5, 0)))) == 1
    assert len(pareto_rows(np.ones((0, 3)))) == 0


@pytest.mark.parametrize("ties", [False, True])
def test_sort_and_sweep_with_bins_equals_the_general_filter(ties):
    rng = np.random.default_rng(ties)
    costs = random_costs(rng, 40_000, 2, ties=ties)
    costs[:, 1] += 1 / (costs[:, 0] + 0.01)
    swept = costs[pareto_rows_2(costs[:, 0], costs[:, 1])]
    assert sorted(map(tuple, swept.tolist())) == slow_minimal_2(costs)
    assert (np.diff(swept[:, 0]) > 0).all() and (np.diff(swept[:, 1]) < 0).all()


def slow_minimal_2(costs):
    kept = []
    for row in sorted(map(tuple, costs.tolist())):
        if not kept or row[1] < kept[-1][1]:
            kept.append(row)
    return kept


def test_unique_rows_treats_both_zeros_as_equal():
    assert len(unique_rows(np.array([[0.0, 1.0], [-0.0, 1.0], [1.0, 0.0]]))) == 2


@pytest.mark.parametrize("ties", [False, True])
def test_product_and_union_equal_slow_twins(ties):
    rng = np.random.default_rng(ties)
    for _ in range(30):
        left, right = (random_frontier(rng, name, int(rng.integers(1, 9)), ties=ties) for name in "ab")
        sums = np.array([a + b for a, b in itertools.product(left.costs, right.costs)])
        assert rows_of(product(left, right)) == slow_minimal(sums)
        assert rows_of(union(left, right)) == slow_minimal(np.concatenate([left.costs, right.costs]))


def test_laws():
    rng = np.random.default_rng(3)
    for _ in range(30):
        a, b, c = (random_frontier(rng, name, int(rng.integers(1, 7)), ties=True) for name in "abc")
        assert rows_of(product(a, b)) == rows_of(product(b, a))
        assert rows_of(product(product(a, b), c)) == rows_of(product(a, product(b, c)))
        assert rows_of(union(union(a, b), c)) == rows_of(union(a, union(b, c)))
        assert rows_of(product(a, union(b, c))) == rows_of(union(product(a, b), product(a, c)))
        assert rows_of(reduce(reduce(a))) == rows_of(reduce(a))
        assert dominates(reduce(a), a).all()
        assert rows_of(product(a, constant(np.zeros(1), np.zeros(2)))) == rows_of(reduce(a))


def test_product_in_chunks(monkeypatch):
    rng = np.random.default_rng(4)
    left, right = (random_frontier(rng, name, 60, moments=1) for name in "ab")
    whole = rows_of(product(left, right))
    monkeypatch.setattr("lightning_topt.frontier.frontier._CHUNK", 50)
    assert rows_of(product(left, right)) == whole


def test_empty_operands():
    empty = random_frontier(np.random.default_rng(0), "a", 0)
    full = random_frontier(np.random.default_rng(0), "b", 3)
    assert len(product(empty, full)) == len(product(full, empty)) == 0
    assert rows_of(union(empty, full)) == rows_of(reduce(full))
    assert len(reduce(empty)) == 0 and dominates(empty, full).tolist() == [False] * 3


def test_dominates():
    left = decide("a", np.array([[1.0], [3.0]]), np.array([[3.0], [1.0]]))
    right = decide("b", np.array([[1.0], [2.0], [3.0], [0.0]]), np.array([[3.0], [2.0], [2.0], [9.0]]))
    assert dominates(left, right).tolist() == [True, False, True, False]


def test_choices_lead_back_through_sums_and_unions():
    rng = np.random.default_rng(5)
    a, b, c = (random_frontier(rng, name, 6) for name in "abc")
    c = Frontier(c.seconds - 0.5, c.bytes - 0.5, c.history)
    mixed = union(product(a, b), product(product(a, b), c))
    choices = mixed.choices()
    assert set(choices) == set("abc") and {-1} < set(choices["c"].tolist())  # c is decided in some points only
    for row in range(len(mixed)):
        parts = [part.costs[choices[name][row]] for name, part in zip("abc", (a, b, c), strict=True)]
        total = sum(parts) if choices["c"][row] >= 0 else sum(parts[:2])
        np.testing.assert_allclose(total, mixed.costs[row])


def test_points_take_the_slowest_path_and_the_worst_moment():
    frontier = decide("a", np.array([[1.0, 2.0], [4.0, 3.0]]), np.array([[5.0, 6.0], [8.0, 7.0]]))
    assert [(p.step_seconds, p.peak_bytes, p.choice) for p in frontier.points] == [(2, 6, {"a": 0}), (4, 8, {"a": 1})]


@pytest.mark.parametrize("epsilon", [0.01, 0.1, 1.0])
def test_thin_keeps_a_point_near_every_point(epsilon):
    rng = np.random.default_rng(6)
    frontier = reduce(random_frontier(rng, "a", 3000, paths=2, moments=2))
    thinned = thin(frontier, epsilon, seconds_scale=0.5, bytes_scale=2.0)
    assert len(thinned) < len(frontier) and not thinned.exact and thinned.error_bound == epsilon
    relaxed = Frontier(frontier.seconds + epsilon * 0.5, frontier.bytes + epsilon * 2, frontier.history)
    assert dominates(thinned, relaxed).all()
    with pytest.raises(ValueError, match="positive"):
        thin(frontier, 0.0, seconds_scale=1, bytes_scale=1)


def test_thin_to_leaves_small_frontiers_alone_and_bounds_add_up():
    rng = np.random.default_rng(7)
    a, b = (reduce(random_frontier(rng, name, 500)) for name in "ab")
    assert thin_to(a, 500, seconds_scale=1, bytes_scale=1) is a
    small = [thin_to(f, 10, seconds_scale=1, bytes_scale=1) for f in (a, b)]
    assert all(len(f) <= 10 for f in small)
    assert product(*small).error_bound == small[0].error_bound + small[1].error_bound
    assert gather(small).error_bound == max(f.error_bound for f in small)

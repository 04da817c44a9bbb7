"""Array kernels against slow twins."""

import itertools

import numpy as np
import pytest

from lightning_topt.frontier import layer_kernels
from lightning_topt.frontier.pareto import pareto_rows, pareto_rows_2


def slow_minimal(costs):
    """The distinct minimal rows, sorted."""
    rows = sorted(set(map(tuple, costs.tolist())))
    return [
        r
        for r in rows
        if not any(o != r and all(a <= b for a, b in zip(o, r, strict=True)) for o in rows)
    ]


def random_costs(rng, n, c, *, ties):
    return rng.integers(0, 4, (n, c)).astype(float) if ties else rng.random((n, c))


def compiled_rows(costs, *, most, first=None):
    """`layer_kernels.minimal` as `chain_search` calls it; groups begin at `first`."""
    first = np.array([0, len(costs)] if first is None else first)
    held, floor, kept, counts = (
        np.empty_like(costs),
        np.empty((len(costs) // 16 + 1, costs.shape[1])),
        np.empty(len(costs), np.int64),
        np.zeros(len(first), np.int64),
    )
    order = np.lexsort((costs.sum(axis=1), np.repeat(np.arange(len(first) - 1), np.diff(first))))
    layer_kernels.minimal(costs, first, order, held, floor, kept, counts, most)
    return (
        np.split(kept[: counts.sum()], np.cumsum(counts)[1:-1])
        if len(first) > 2
        else kept[: counts.sum()]
    )


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("columns", [1, 2, 3, 5, 8])
def test_pareto_rows_equals_slow_twin(columns, ties):
    rng = np.random.default_rng([columns, ties])
    for n in (1, 2, 3, 17, 100, 700):
        costs = random_costs(rng, n, columns, ties=ties)
        minimal = slow_minimal(costs)
        assert sorted(map(tuple, costs[pareto_rows(costs)].tolist())) == minimal
        assert sorted(map(tuple, costs[compiled_rows(costs, most=n)].tolist())) == minimal
        some = list(map(tuple, costs[compiled_rows(costs, most=1)].tolist()))
        assert set(some) >= set(minimal) and len(some) == len(set(some))


def test_groups_are_not_compared():
    rng = np.random.default_rng(0)
    costs, first = random_costs(rng, 300, 4, ties=False), [0, 120, 120, 121, 300]
    parts = compiled_rows(costs, most=300, first=first)
    assert len(parts) == 4 and len(parts[1]) == 0
    for rows, (a, b) in zip(parts, itertools.pairwise(first), strict=True):
        assert sorted(map(tuple, costs[rows].tolist())) == slow_minimal(costs[a:b])


@pytest.mark.parametrize("ties", [False, True])
def test_sort_and_sweep_equals_the_general_filter(ties):
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

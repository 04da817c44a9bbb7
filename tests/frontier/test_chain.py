"""search_chain against brute force, simulation, and one column per point in time."""

import numpy as np
import pytest

from lightning_topt.costs.chain_table import BlockCosts, ChainTable
from lightning_topt.frontier import layer_search
from lightning_topt.frontier.chain_search import chain_layers, search_chain
from tests.frontier.graph_search import search_frontier
from tests.frontier.tables import (
    assert_equals_brute_force,
    one_column_per_point_in_time,
    random_chain,
    simulate,
)


@pytest.fixture(params=["numpy", "compiled"])
def way(request, monkeypatch):
    if request.param == "compiled":
        monkeypatch.setattr(layer_search, "_SMALL", 0)


@pytest.mark.parametrize("layouts", [None, 2])
def test_evaluate_equals_a_simulated_step(layouts):
    rng = np.random.default_rng(0)
    for _ in range(60):
        blocks, forward = int(rng.integers(1, 7)), bool(rng.random() < 0.5)
        table = random_chain(
            rng, blocks=blocks, configs=3, edges=0.6, layouts=layouts, forward=forward
        )
        plans = np.stack(
            [rng.integers(0, len(table.block(n).configs), 8) for n in range(len(table.order))],
            axis=1,
        )
        seconds, size = table.evaluate(plans)
        for plan, *costs in zip(plans, seconds, size, strict=True):
            np.testing.assert_allclose(costs, simulate(table, plan), rtol=1e-14)


@pytest.mark.parametrize("edges", [0.0, 0.6, 1.0])
@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("forbidden", [0.0, 0.2])
def test_equals_brute_force(way, edges, ties, forbidden):
    rng = np.random.default_rng([int(10 * edges), ties, int(10 * forbidden)])
    for trial in range(12):
        table = random_chain(
            rng,
            blocks=int(rng.integers(1, 6)),
            configs=4,
            edges=edges,
            ties=ties,
            forbidden=forbidden,
            distinct=2 if trial % 3 == 2 else None,
            layouts=3 if trial % 2 else None,
            late=trial % 4 > 0,
            forward=trial % 5 > 2,
        )
        assert_equals_brute_force(table, search_chain(table))


@pytest.mark.parametrize("blocks", [2, 5, 9, 12])
def test_equals_one_column_per_point_in_time(way, blocks):
    rng = np.random.default_rng(blocks)
    for trial in range(4):
        table = random_chain(
            rng,
            blocks=blocks,
            configs=3,
            edges=[0.0, 0.5, 1.0][trial % 3],
            ties=trial == 3,
            forward=trial > 1,
        )
        few, many = search_chain(table), search_frontier(one_column_per_point_in_time(table))
        assert few.exact and many.exact and len(few)
        np.testing.assert_allclose(few.seconds, many.seconds, rtol=1e-14)
        np.testing.assert_allclose(few.bytes, many.bytes, rtol=1e-14)


@pytest.mark.parametrize("forward", [False, True])
def test_columns_do_not_grow_with_depth(forward):
    """A chain of 60 blocks costs no more per block than one of 20 (the number of candidates, not
    seconds).
    """
    rng = np.random.default_rng(0)
    table = random_chain(rng, blocks=4, configs=4, forward=forward)
    layers = [chain_layers(ChainTable(table.blocks, (0, 1, 2, 3) * count)) for count in (5, 15)]
    assert {layer.columns for some in layers for layer in some} == {5 if forward else 4, 2}


def test_bad_tables_are_refused():
    one = np.ones(1)
    block = BlockCosts((0,), *[one] * 7)
    with pytest.raises(ValueError, match="no configuration"):
        BlockCosts((), *[np.ones(0)] * 7)
    with pytest.raises(ValueError, match="kept has shape"):
        BlockCosts((0,), one, one, one, one, np.ones(2), one, one)
    with pytest.raises(ValueError, match="seconds holds NaN"):
        BlockCosts((0,), one * np.nan, one, one, one, one, one, one)
    with pytest.raises(ValueError, match="from 0 to 0"):
        ChainTable((block,), (0, 1))
    with pytest.raises(ValueError, match="need 1 edges"):
        ChainTable((block,), (0, 0), (None, None))


def test_no_blocks_is_the_fixed_cost():
    (point,) = search_chain(
        ChainTable((), (), fixed_seconds=2.0, fixed_bytes=3.0, update_bytes=4.0)
    ).points
    assert (point.step_seconds, point.peak_bytes, point.choice) == (2.0, 7.0, {})

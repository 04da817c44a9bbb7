"""Operators of a block eliminated to a matrix over its boundary, against brute force over all
operators of the chain.
"""

import itertools

import numpy as np
import pytest

from lightning_topt.costs.chain_table import BlockCosts, BlockEdge, ChainTable
from lightning_topt.costs.cost_table import CostTable, EdgeCosts, OperatorCosts
from lightning_topt.frontier.chain_search import search_chain
from tests.frontier.graph_search import eliminate_block
from tests.frontier.tables import SHAPES


def random_block(rng, *, shape, operators, configs, humps=1, ties=False, forbidden=0.0):
    """A block's table: (seconds, backward, exchange) with backward a part of seconds, (static,
    kept, late, humps).
    """

    def costs(*size):
        def values(*more):
            return (
                rng.integers(0, 3, (*size, *more)).astype(float)
                if ties
                else rng.integers(0, 1024, (*size, *more)) / 1024
            )

        seconds = values(3)
        seconds[..., 1] = np.minimum(seconds[..., 0], seconds[..., 1])
        seconds[rng.random(size) < forbidden, 0] = np.inf
        return seconds, values(3 + humps)

    counts = [int(rng.integers(1, configs + 1)) for _ in range(operators)]
    nodes = tuple(OperatorCosts(f"op{i}", tuple(range(k)), *costs(k)) for i, k in enumerate(counts))
    edges = tuple(
        EdgeCosts(f"op{i}", f"op{j}", *costs(counts[i], counts[j]))
        for i, j in SHAPES[shape](rng, operators)
    )
    return CostTable(nodes, edges, np.zeros(3), np.zeros(3 + humps))


def all_plans(table, *, first, last):
    """The block with every plan that is allowed as a configuration: what elimination must not lose
    anything of.
    """
    names = [operator.name for operator in table.operators]
    plans, rows = [], []
    for plan in itertools.product(*(range(len(operator.configs)) for operator in table.operators)):
        seconds, size = table.fixed_seconds.copy(), table.fixed_bytes.copy()
        for operator, c in zip(table.operators, plan, strict=True):
            seconds, size = seconds + operator.seconds[c], size + operator.bytes[c]
        for edge in table.edges:
            pair = plan[names.index(edge.source)], plan[names.index(edge.target)]
            seconds, size = seconds + edge.seconds[pair], size + edge.bytes[pair]
        if np.isfinite(seconds).all():
            plans.append(plan)
            rows.append([*seconds, *size[:3], size[3:].max()])
    sides = (
        np.array([plan[names.index(name)] for plan in plans], np.intp) for name in (first, last)
    )
    return BlockCosts(tuple(plans), *np.array(rows).T, *sides)


@pytest.mark.parametrize("shape", ["chain", "skips", "ring", "tree", "isolated"])
@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("forbidden", [0.0, 0.1])
def test_a_chain_of_eliminated_blocks_equals_one_of_all_plans(shape, ties, forbidden):
    rng = np.random.default_rng([len(shape), ties, int(10 * forbidden)])
    fewer = 0
    for trial in range(6):
        tables = [
            random_block(
                rng,
                shape=shape,
                operators=4,
                configs=3,
                humps=1 + trial % 2,
                ties=ties,
                forbidden=forbidden,
            )
            for _ in range(2)
        ]
        last = "op0" if trial == 5 else "op3"
        try:
            small = [eliminate_block(table, first="op0", last=last) for table in tables]
        except ValueError as error:
            assert "forbid every plan" in str(error) and forbidden
            continue
        whole = [all_plans(table, first="op0", last=last) for table in tables]
        order = (0, 1, 0)
        edges = []
        for a, b in itertools.pairwise(order):
            size = (
                len(tables[a].operators[-1 if last == "op3" else 0].configs),
                len(tables[b].operators[0].configs),
            )
            edges.append(BlockEdge(*(rng.integers(0, 512, (2, *size)) / 1024)))
        found, expected = (
            search_chain(ChainTable(tuple(blocks), order, tuple(edges)))
            for blocks in (small, whole)
        )
        assert found.exact and expected.exact
        np.testing.assert_array_equal(found.seconds, expected.seconds)
        np.testing.assert_array_equal(found.bytes, expected.bytes)
        fewer += sum(len(block.configs) for block in small) < sum(
            len(block.configs) for block in whole
        )
        # what a plan says it costs is what it costs
        for block, full in zip(small, whole, strict=True):
            for i, plan in enumerate(block.configs):
                at = full.configs.index(plan)
                for name in (
                    "seconds",
                    "backward",
                    "exchange",
                    "static",
                    "kept",
                    "late",
                    "hump",
                    "inputs",
                    "outputs",
                ):
                    assert getattr(block, name)[i] == getattr(full, name)[at]
    assert fewer or forbidden


def test_layouts_may_be_forbidden_to_meet():
    """An edge of a forbidden diagonal: neighbours must differ."""
    one = np.ones(2)
    block = BlockCosts((0, 1), np.array([1.0, 2.0]), one, 0 * one, one, one, one, one)
    apart = BlockEdge(np.where(np.eye(2, dtype=bool), np.inf, 0.0), np.zeros((2, 2)))
    frontier = search_chain(ChainTable((block,), (0,) * 5, (apart,) * 4))
    (point,) = frontier.points
    assert list(point.choice.values()) == [0, 1, 0, 1, 0]


def test_bad_blocks_are_refused():
    rng = np.random.default_rng(0)
    table = random_block(rng, shape="chain", operators=3, configs=3)
    with pytest.raises(ValueError, match="no operators"):
        eliminate_block(table, first="op0", last="op9")
    with pytest.raises(ValueError, match="max_branches is 1"):
        eliminate_block(
            random_block(rng, shape="complete", operators=4, configs=4),
            first="op0",
            last="op3",
            max_branches=1,
        )

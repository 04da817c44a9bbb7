"""search_meshes against the union of what each mesh gives by itself."""

import numpy as np
import pytest

from lightning_topt.costs.chain_table import ChainTable
from lightning_topt.frontier import chain_search
from lightning_topt.frontier.chain_search import search_meshes
from tests.frontier.tables import evaluate, every_plan, random_chain


def union(tables):
    """(seconds, bytes) of the best plans of all tables, by bytes ascending."""
    points = sorted(plan[::-1] for table in tables for plan in every_plan(table))
    best = []
    for size, seconds in points:
        if not best or seconds < best[-1][0]:
            best.append((seconds, size))
    return best


def random_meshes(rng, count, **options):
    """Chains of which some are dearer throughout."""
    made = []
    for _ in range(count):
        table = random_chain(rng, blocks=int(rng.integers(1, 5)), configs=3, **options)
        more = float(rng.integers(0, 8))
        made.append(ChainTable(table.blocks, table.order, more, more, table.update_bytes))
    return made


@pytest.mark.parametrize("prices", [False, True])
@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("forbidden", [0.0, 0.3])
def test_equals_brute_force_over_all_meshes(monkeypatch, prices, ties, forbidden):
    if prices:
        monkeypatch.setattr(chain_search, "_UNPRICED", 0)
        monkeypatch.setattr(chain_search, "_SMALL", 0)
    rng = np.random.default_rng([prices, ties, int(10 * forbidden)])
    for _ in range(15):
        tables = random_meshes(rng, int(rng.integers(1, 5)), ties=ties, forbidden=forbidden)
        found = search_meshes((i, lambda table=table: table) for i, table in enumerate(tables))
        assert found.exact
        assert [(p.step_seconds, p.peak_bytes) for p in found.points] == union(tables)
        for point in found.points:
            plans = np.array([list(point.choice.values())])
            seconds, size = evaluate(tables[point.label], plans)
            assert (seconds[0], size[0]) == (point.step_seconds, point.peak_bytes)


@pytest.mark.parametrize("prices", [False, True])
def test_chains_of_different_depth_and_columns_side_by_side(monkeypatch, prices):
    if prices:
        monkeypatch.setattr(chain_search, "_UNPRICED", 0)
    rng = np.random.default_rng(7)
    for _ in range(10):
        depths = rng.permutation([0, 2, 4])
        tables = [
            random_chain(rng, blocks=int(depth), configs=3, forward=n == 0)
            if depth
            else ChainTable((), (), 3.0, 3.0, 1.0)
            for n, depth in enumerate(depths)
        ]
        found = search_meshes((i, lambda table=table: table) for i, table in enumerate(tables))
        assert found.exact and [(p.step_seconds, p.peak_bytes) for p in found.points] == union(
            tables
        )
        assert all(len(point.choice) == depths[point.label] for point in found.points)


def test_no_mesh_and_no_allowed_plan():
    assert search_meshes([]).points == ()
    table = random_chain(np.random.default_rng(0), blocks=2, configs=2, forbidden=1.1)
    assert search_meshes([("a", lambda: table)]).points == ()

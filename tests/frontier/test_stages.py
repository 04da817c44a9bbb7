"""Pipelines cut exactly: the search against every way to cut, and against known plans."""

import numpy as np
import pytest

from lightning_topt.costs.chain_table import (
    StageBlock,
    StageChain,
    StageExtras,
    StageKind,
    StageLink,
    StageTable,
)
from lightning_topt.frontier import stage_search
from lightning_topt.frontier.stage_kernels import states_of_runs
from lightning_topt.frontier.stage_search import StageCuts, runs_of, search_stages
from tests.frontier.brute_force import brute_force_stages, stage_costs

SCHEDULES = ("gpipe", "1f1b", "zero_bubble", "continuous")


def grid(rng, *size, ties=False):
    return rng.integers(0, 4, size).astype(float) if ties else rng.integers(1, 1024, size) / 1024


def random_chain(rng, order, configs, *, ties):
    blocks = []
    for count in configs:
        seconds, once, static, kept, hump = (grid(rng, count, ties=ties) for _ in range(5))
        seconds[rng.random(count) < 0.1] = np.inf
        blocks.append(StageBlock(tuple(range(count)), seconds, once, static, kept, hump))
    return StageChain(tuple(blocks), order)


def random_stages(rng, schedule, *, blocks, stages, ties=False, distinct=None, configs=2):
    """Stages and links have own costs; stages hold as many microbatches as their schedule says."""
    order = (
        tuple(rng.integers(0, distinct or blocks, blocks).tolist())
        if distinct
        else tuple(range(blocks))
    )
    counts = rng.integers(1, configs + 1, max(order) + 1)
    chain = random_chain(rng, order, counts, ties=ties)
    extras = tuple(
        StageExtras(*(grid(rng, len(counts), ties=ties) * rng.integers(0, 2) for _ in range(5)))
        for _ in range(2)
    )
    links = tuple(
        StageLink(*(grid(rng, blocks, ties=ties) * rng.integers(0, 2) for _ in range(4)))
        for _ in range(2)
    )
    micro = int(rng.integers(1, 6))
    held = {"gpipe": [micro] * stages}.get(
        schedule, [min(stages - s, micro) for s in range(stages)]
    )
    flushes = schedule != "continuous"
    held = held if flushes else [stages - s for s in range(stages)]
    waits = [
        ((w, 1.0), (w - 0.5, s + 1.0)) if schedule == "zero_bubble" else ()
        for s, w in enumerate(held)
    ]
    kinds = tuple(
        StageKind(
            int(rng.integers(0, 2)), w, int(rng.integers(0, 2)), late, 0.0 if flushes else w - 1.0
        )
        for w, late in zip(held, waits, strict=True)
    )
    shared = grid(rng, 3, blocks, blocks + 1, ties=ties) if rng.random() < 0.3 else None
    lead, load = {"zero_bubble": (0.5, micro - 0.5), "continuous": (0.0, 1.0)}.get(
        schedule, (1.0, micro - 1.0)
    )
    return StageTable(
        chain, extras, kinds, links, lead, load, 1.0, shared, float(rng.integers(0, 3)), 1.0
    )


def costs(frontier):
    return [(point.step_seconds, point.peak_bytes) for point in frontier.points]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("ties", [False, True])
def test_equals_brute_force(schedule, ties):
    """216 chains in all, of up to 10 blocks and 4 stages, which differ as their links do."""
    rng = np.random.default_rng([SCHEDULES.index(schedule), ties])
    sizes = [
        (2, 2, 3),
        (3, 2, 3),
        (4, 3, 2),
        (5, 4, 2),
        (7, 4, 1),
        (10, 4, 1),
        (8, 3, 2),
        (6, 1, 2),
        (5, 5, 2),
    ]
    several = 0
    for number in range(27):
        blocks, stages, configs = sizes[number % len(sizes)]
        distinct = 2 if number % 3 == 0 else None
        table = random_stages(
            rng,
            schedule,
            blocks=blocks,
            stages=stages,
            configs=configs,
            distinct=distinct,
            ties=ties,
        )
        found = search_stages(table)
        assert found.exact and costs(found) == brute_force_stages(table)
        for point in found.points:
            assert stage_costs(table, point.ends, point.configs) == (
                point.step_seconds,
                point.peak_bytes,
            )
        several += len(found.points) > 1
    assert several > 10


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_compiled_cuts_are_those_of_arrays(schedule, monkeypatch):
    rng, feasible = np.random.default_rng(5), 0
    for _ in range(20):
        table = random_stages(
            rng, schedule, blocks=9, stages=int(rng.integers(1, 6)), distinct=4, configs=3
        )
        limits = [(np.inf, np.inf), *(rng.random((6, 2)) * 20).tolist()]
        found = []
        for small in (np.inf, -1):
            monkeypatch.setattr(stage_search, "_SMALL_CUTS", small)
            cuts = StageCuts(table)
            found.append([cuts.cheapest(size=size, load=load) for size, load in limits])
        leads = [[cut and cut.lead for cut in each] for each in found]
        assert leads[0] == leads[1]
        feasible += any(leads[0][1:])
        for cut, (size, load) in zip(found[1], limits, strict=True):
            assert cut is None or (cut.size < size and cut.load < load)
    assert feasible > 7


def test_plans_between_two_sizes_are_those_of_the_whole_search():
    rng, cut = np.random.default_rng(7), 0
    for _ in range(20):
        table = random_stages(rng, "1f1b", blocks=6, stages=3)
        every = [(p.step_seconds, p.peak_bytes) for p in search_stages(table).points]
        if len(every) < 3:
            continue
        room = (every[0][1] + every[-1][1]) / 2
        below, above = (
            search_stages(table, between=between) for between in ((0.0, room), (room, np.inf))
        )
        assert below.exact and above.exact
        found = [[(p.step_seconds, p.peak_bytes) for p in each.points] for each in (below, above)]
        assert found[0] == [each for each in every if each[1] < room]
        assert [each for each in found[1] if each[1] >= room] == [
            each for each in every if each[1] >= room
        ]
        cut += bool(found[0]) and bool(found[1])
    assert cut


def test_plans_that_known_ones_beat_are_left_out():
    rng = np.random.default_rng(6)
    for _ in range(40):
        table = random_stages(rng, "1f1b", blocks=6, stages=3)
        every = costs(search_stages(table))
        if not every:
            continue
        known = np.array(every)[rng.random(len(every)) < 0.5] + rng.integers(-1, 2, 2) / 64
        known = np.concatenate([known, grid(rng, 2, 2) * 20])
        left = [(t, m) for t, m in every if not any(a <= t and b <= m for a, b in known)]
        assert costs(search_stages(table, known=known)) == left


@pytest.mark.parametrize("epsilon", [0.01, 0.3])
def test_an_epsilon_keeps_its_bound_and_fewer_plans(epsilon):
    rng = np.random.default_rng(7)
    counts = [0, 0]
    for _ in range(20):
        table = random_stages(rng, "1f1b", blocks=9, stages=3, configs=4)
        exact, near = search_stages(table), search_stages(table, epsilon=epsilon)
        assert near.error_bound <= epsilon + 1e-12
        for seconds, size in costs(exact):
            factor = 1 + near.error_bound + 1e-12
            assert any(t <= seconds * factor and m <= size * factor for t, m in costs(near))
        counts[0], counts[1] = counts[0] + len(exact.points), counts[1] + len(near.points)
    assert counts[1] < counts[0]


@pytest.mark.parametrize(("epsilon", "most"), [(0.0, 2**12), (0.2, 2**12), (0.0, 6), (0.1, 6)])
def test_compiled_states_are_those_of_arrays(epsilon, most):
    rng, thinned, shorter = np.random.default_rng(6), 0, 0
    for ties in (False, True, False, True):
        for order in ((0, 1, 1, 1, 1, 1, 2), tuple(rng.integers(0, 3, 8).tolist()), (0,) * 9):
            chain = random_chain(rng, order, [3, 2, 2], ties=ties)
            runs, blocks, step = runs_of(order), stage_search._on_grids(chain), epsilon / 18
            slow = stage_search._run_states_in_arrays(runs, blocks, step, most)
            found = states_of_runs(runs.shorter, runs.last, blocks, step, most)
            for name, values in zip(vars(slow), found, strict=True):
                np.testing.assert_array_equal(getattr(slow, name), values)
            thinned += slow.error_bound > 0
            shorter += len(slow.costs)
    assert (thinned > 0) == (epsilon > 0 or most < 10) and shorter > 100
    many = [np.random.default_rng(0).random((1100, 5))]
    assert states_of_runs(np.array([-1]), np.array([0]), many, 0.0, 2**12) is None

"""The simulation beside its slow twin, formulas of papers, and closed forms."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import numpy as np
import pytest

from benchmarks.pipelines.simulated_memory import MemoryCosts, peak_bytes
from lightning_topt.schedules.schedules import (
    SCHEDULES,
    Schedule,
    continuous_schedule,
    make_schedule,
)
from lightning_topt.schedules.timing import (
    StageCosts,
    held_counts,
    many_rank_seconds,
    simulate,
    step_seconds,
)
from tests.schedules.slow_simulator import SlowSimulator


def equal_costs(
    num_stages: int, forward: float, backward: float, transfer: float = 0.0, **more: object
) -> StageCosts:
    half = [backward / 2] * num_stages
    edges = dict.fromkeys(itertools.pairwise(range(num_stages)), transfer)
    return StageCosts([forward] * num_stages, [backward] * num_stages, half, half, edges, **more)  # type: ignore[arg-type]


def random_costs(num_stages: int, draw: random.Random, *, skips: bool = True) -> MemoryCosts:
    def row(most: float = 1.0) -> list[float]:
        return [draw.uniform(0.1, most) for _ in range(num_stages)]

    edges = list(itertools.pairwise(range(num_stages)))
    if skips:
        edges += [
            e
            for e in itertools.combinations(range(num_stages), 2)
            if e[1] > e[0] + 1 and draw.random() < 0.2
        ]
    hops, back, sizes = ({edge: draw.uniform(0, 0.7) for edge in edges} for _ in range(3))
    times = (row(), row(), row(), row(), hops, back, row())
    return MemoryCosts(*times, row(9), row(), row(0.5), row(0.2), row(0.3), sizes, row(3))


def drawn_schedule(draw: random.Random) -> Schedule:
    ranks, parts, name = (
        draw.randint(1, 5),
        draw.randint(1, 9),
        draw.choice([*SCHEDULES, "continuous"]),
    )
    if name == "continuous":
        lag, accumulate = draw.randint(1, 2), draw.randint(1, 2)
        return continuous_schedule(
            num_ranks=ranks, num_minibatches=parts, lag_per_hop=lag, accumulate=accumulate
        )
    return make_schedule(name, num_ranks=ranks, num_microbatches=parts)


def test_times_are_those_of_the_slow_twin() -> None:
    draw = random.Random(7)
    for _ in range(300):
        schedule = drawn_schedule(draw)
        costs = random_costs(schedule.num_stages, draw)
        found, twin = simulate(schedule, costs), SlowSimulator(schedule, costs)
        assert found.step_seconds == pytest.approx(twin.run(), rel=1e-12)
        for span in found.spans:
            assert (span.start, span.end) == pytest.approx(
                twin.spans[span.action], rel=1e-12, abs=1e-12
            )


def test_many_sets_of_costs_at_once_are_those_of_one_after_the_other() -> None:
    draw = random.Random(3)
    for _ in range(30):
        schedule = drawn_schedule(draw)
        sets = [random_costs(schedule.num_stages, draw, skips=False) for _ in range(4)]
        names = ("forward", "backward", "backward_input", "backward_weight", "update")
        rows = tuple(np.array([getattr(each, name) for each in sets]).T for name in names)
        hops = {
            edge: np.array([each.transfer_seconds[edge] for each in sets])
            for edge in sets[0].transfer_seconds or ()
        }
        back = {
            edge: np.array([each.gradient_seconds[edge] for each in sets])
            for edge in sets[0].gradient_seconds or ()
        }
        found = many_rank_seconds(schedule, rows, (hops, back))
        np.testing.assert_allclose(
            found.max(axis=0), [step_seconds(schedule, each) for each in sets], rtol=1e-12
        )


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_bubbles_of_the_papers(ranks: int) -> None:
    """Bubbles of the busiest rank, in units of passes F = 1 and B = W = 1."""
    parts = 3 * ranks
    for name, stages_per_rank, bubble in (
        ("gpipe", 1, 3 * (ranks - 1)),
        ("1f1b", 1, 3 * (ranks - 1)),
        ("interleaved", 2, 3 * (ranks - 1) / 2),
        ("interleaved", 4, 3 * (ranks - 1) / 4),
        ("looped_bfs", 2, 3 * (ranks - 1) / 2),
        ("zero_bubble", 1, ranks - 1),  # (P - 1) (F + B - W)
        ("interleaved_zero_bubble", 2, (ranks - 1) / 2),
        ("zbv", 2, (ranks - 1) / 2),
    ):
        schedule = make_schedule(
            name, num_ranks=ranks, num_microbatches=parts, stages_per_rank=stages_per_rank
        )
        part = 1 / stages_per_rank  # the model is the same, its stages smaller
        found = simulate(schedule, equal_costs(schedule.num_stages, part, 2 * part))
        assert found.busy_seconds == pytest.approx([3 * parts] * ranks)
        assert found.step_seconds - 3 * parts == pytest.approx(bubble), name
        assert found.bubble_fraction == pytest.approx(bubble / (3 * parts + bubble))


def test_bubbles_of_zero_bubble_schedules_whose_passes_differ() -> None:
    """(P - 1) (F + B - W) over the stages per rank, for W <= B, but not beyond."""
    for name, stages_per_rank in (
        ("zero_bubble", 1),
        ("interleaved_zero_bubble", 2),
        ("interleaved_zero_bubble", 3),
    ):
        schedule = make_schedule(
            name, num_ranks=4, num_microbatches=16, stages_per_rank=stages_per_rank
        )
        for half, weight in ((1.0, 1.0), (1.2, 0.8), (1.5, 1.0), (0.8, 1.2)):
            passes = [
                [each / stages_per_rank] * schedule.num_stages
                for each in (1.0, half + weight, half, weight)
            ]
            lost = step_seconds(schedule, StageCosts(*passes)) - 16 * (1.0 + half + weight)
            formula = 3 * (1.0 + half - weight) / stages_per_rank
            assert lost == pytest.approx(formula) if weight <= half else lost > formula + 0.1


def test_held_counts_give_the_peak_of_activations() -> None:
    draw = random.Random(5)
    for _ in range(60):
        schedule = drawn_schedule(draw)
        costs = replace(
            random_costs(schedule.num_stages, draw),
            transfer_bytes=None,
            static_bytes=None,
            forward_bytes=None,
            backward_bytes=None,
            version_bytes=None,
        )
        peaks = []
        for rank, counts in enumerate(held_counts(schedule)):
            stages = schedule.stages_of(rank)
            sizes = [
                row[stage]
                for row in (costs.activation_bytes or [], costs.weight_bytes or [])
                for stage in stages
            ]
            peaks.append((counts @ np.array(sizes)).max())
        assert peak_bytes(simulate(schedule, costs)) == pytest.approx(peaks)

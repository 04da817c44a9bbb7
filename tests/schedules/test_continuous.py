"""Continuous schedules: their pieces and legality; staleness as in the papers."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from benchmarks.pipelines.simulated_memory import MemoryCosts, peak_bytes
from lightning_topt.execution.pipeline.stage_weights import running_staleness
from lightning_topt.schedules.check import ScheduleError, check_schedule
from lightning_topt.schedules.schedules import Action, Schedule, continuous_schedule, every
from lightning_topt.schedules.staleness import staleness
from lightning_topt.schedules.timing import held_counts, simulate


def texts(actions: tuple[Action, ...]) -> str:
    return " ".join(f"{action.kind[0].upper()}{action.microbatch_index}" for action in actions)


def test_the_lists_of_two_and_three_ranks() -> None:
    schedule = continuous_schedule(num_ranks=3, num_minibatches=3)
    assert [texts(row) for row in schedule.actions] == [
        "F0 F1 F2 B0 U0 B1 U1 B2 U2",
        "F0 F1 B0 U0 F2 B1 U1 B2 U2",
        "F0 B0 U0 F1 B1 U1 F2 B2 U2",
    ]
    schedule = continuous_schedule(num_ranks=2, num_minibatches=5, lag_per_hop=2, accumulate=2)
    assert [texts(row) for row in schedule.actions] == [
        "F0 F1 F2 B0 F3 B1 U1 F4 B2 B3 U3 B4 U4",
        "F0 B0 F1 B1 U1 F2 B2 F3 B3 U3 F4 B4 U4",
    ]


def test_staleness_is_that_of_spectrain() -> None:
    """Section 3 of the paper: forward N - 1 - k + k // 2, backward k // 2; for N = 4: 3, 2, 2, 1
    and 0, 0, 1, 1.
    """
    for stages in range(1, 10):
        found = staleness(continuous_schedule(num_ranks=stages, num_minibatches=6 * stages))
        middle = 3 * stages
        assert [each.forward[middle].round_trip for each in found] == [
            stages - 1 - k + k // 2 for k in range(stages)
        ]
        assert [each.backward[middle].round_trip for each in found] == [
            k // 2 for k in range(stages)
        ]
        assert [each.forward[middle].missing for each in found] == [
            stages - 1 - k for k in range(stages)
        ]
        assert [each.forward[middle].version for each in found] == [
            middle - (stages - 1 - k) for k in range(stages)
        ]
        assert [each.backward[middle].missing for each in found] == [0] * stages
        assert all(each.forward[-1].round_trip <= stages - 1 for each in found)


def test_staleness_in_warm_up_and_drain_by_hand() -> None:
    """Two stages, three minibatches. Rank 0: F0 F1 B0 U0 F2 B1 U1 B2 U2; rank 1: F0 B0 U0 F1 B1 U1
    F2 B2 U2.
    """
    first, second = staleness(continuous_schedule(num_ranks=2, num_minibatches=3))
    assert [tuple(each) for each in first.forward] == [(0, 0, 0), (0, 1, 1), (1, 1, 1)]
    assert [tuple(each) for each in first.backward] == [(0, 0, 0), (1, 0, 0), (2, 0, 0)]
    # stage 1 runs F0 1-2, B0 2-3, F1 3-4, B1 4-5, F2 5-6, B2 6-7; stage 0 ends its updates at 4, 6
    # and 8
    assert [tuple(each) for each in second.forward] == [(0, 0, 0), (1, 0, 0), (2, 0, 0)]
    one = staleness(continuous_schedule(num_ranks=1, num_minibatches=3, accumulate=2))[0]
    assert [tuple(each) for each in one.forward] == [(0, 0, 0), (0, 0, 0), (1, 0, 0)]


def test_staleness_of_a_run_is_that_of_its_whole_schedule() -> None:
    draw = random.Random(16)
    for _ in range(25):
        ranks, lag, accumulate = draw.randint(1, 4), draw.randint(1, 2), draw.randint(1, 3)
        count = draw.choice((1, 3, 50, 90))
        ends = every(accumulate, num_minibatches=count)
        whole = staleness(
            continuous_schedule(
                num_ranks=ranks, num_minibatches=count, lag_per_hop=lag, accumulate=accumulate
            )
        )
        for stage in range(ranks):
            for kind in ("forward", "backward"):
                for index, expected in enumerate(getattr(whole[stage], kind)):
                    found = running_staleness(
                        index,
                        stage=stage,
                        kind=kind,
                        num_stages=ranks,
                        completes=ends,
                        num_minibatches=count,
                        lag_per_hop=lag,
                    )
                    assert found[1:] == expected[1:]
                    if index + 4 * ranks * lag < count:  # the end does not matter yet
                        open_end = running_staleness(
                            index,
                            stage=stage,
                            kind=kind,
                            num_stages=ranks,
                            completes=every(accumulate),
                            lag_per_hop=lag,
                        )
                        assert open_end == found


def test_memory_in_flight_and_versions() -> None:
    for ranks in (1, 2, 4, 8):
        for lag in (1, 2):
            schedule = continuous_schedule(num_ranks=ranks, num_minibatches=80, lag_per_hop=lag)
            behind = [(ranks - 1 - stage) * lag for stage in range(ranks)]
            assert [int(rows.max()) for rows in held_counts(schedule)] == [
                each + 1 for each in behind
            ]
            costs = MemoryCosts([1.0] * ranks, [1.0] * ranks, activation_bytes=[10.0] * ranks)
            assert [*peak_bytes(simulate(schedule, costs))] == [10 * (each + 1) for each in behind]
            kept = replace(costs, activation_bytes=None, version_bytes=[1.0] * ranks)
            assert [*peak_bytes(simulate(schedule, kept))] == behind
    # PipeDream-2BW: one more with m >= N
    grouped = continuous_schedule(num_ranks=4, num_minibatches=80, accumulate=4)
    ones = MemoryCosts([1.0] * 4, [1.0] * 4, version_bytes=[1.0] * 4)
    assert max(peak_bytes(simulate(grouped, ones))) == 1


def changed(schedule: Schedule, rank: int, row: str) -> Schedule:
    kinds = {"F": "forward", "B": "backward", "U": "update"}
    actions = [*schedule.actions]
    actions[rank] = tuple(Action(kinds[word[0]], rank, int(word[1:])) for word in row.split())  # type: ignore[arg-type]
    return replace(schedule, actions=tuple(actions))


@pytest.mark.parametrize(
    ("row", "word"),
    [
        ("F0 U0 B0 F1 B1 U1", r"microbatches \[\]"),
        ("F0 B0 F1 B1 U0 U1", r"microbatches \[0, 1\]"),
        ("F0 B0 F1 B1 U1", "updates of microbatches"),
    ],
)
def test_updates_that_are_wrong_are_named(row: str, word: str) -> None:
    schedule = continuous_schedule(num_ranks=2, num_minibatches=2)
    check_schedule(changed(schedule, 1, "F0 B0 U0 F1 B1 U1"))
    with pytest.raises(ScheduleError, match=word):
        check_schedule(changed(schedule, 1, row))

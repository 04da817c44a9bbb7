"""The checker: good schedules pass, mistakes are named; mutations beside the interpreter."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from lightning_topt.schedules.check import ScheduleError, check_schedule
from lightning_topt.schedules.schedules import (
    SCHEDULES,
    Action,
    Schedule,
    continuous_schedule,
    make_schedule,
)
from tests.schedules.slow_interpreter import runs

Rows = list[list[Action]]


def mutated(schedule: Schedule, change: Callable[[Rows], object]) -> Schedule:
    rows = [list(actions) for actions in schedule.actions]
    change(rows)
    return replace(schedule, actions=tuple(map(tuple, rows)))


def swap(row: list[Action], one: int, other: int) -> None:
    row[one], row[other] = row[other], row[one]


ONE_F_ONE_B = make_schedule(
    "1f1b", num_ranks=2, num_microbatches=3
)  # rank 0: F0 F1 B0 F2 B1 B2; rank 1: F0 B0 F1 B1 F2 B2


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (lambda rows: swap(rows[1], 0, 1), "backward forward of microbatch 0"),
        (lambda rows: rows[0].pop(3), "microbatch 2 in stage 0"),
        (lambda rows: rows[0].append(rows[1].pop()), "no such stage"),
        (lambda rows: rows.pop(), "ranks"),
    ],
)
def test_mistakes_are_named(change: Callable[[Rows], object], word: str) -> None:
    with pytest.raises(ScheduleError, match=word):
        check_schedule(mutated(ONE_F_ONE_B, change))


def test_skips_are_waited_for() -> None:
    """Stage 2 runs microbatch 1 first: legal where it needs nothing of stage 1."""
    rows = {
        0: [("forward", 0, 0), ("forward", 0, 1)],
        1: [("forward", 1, 0), ("forward", 2, 1), ("forward", 1, 1), ("forward", 2, 0)],
    }
    schedule = Schedule(
        "mine", 2, (0, 1, 1), tuple(tuple(Action(*each) for each in rows[rank]) for rank in (0, 1))
    )  # type: ignore[arg-type]
    check_schedule(schedule, needs={1: [0], 2: [0]})
    with pytest.raises(ScheduleError, match=r"deadlock: rank 1 .* microbatch 1 in stage 2"):
        check_schedule(schedule)
    with pytest.raises(ValueError, match="stages before it"):
        check_schedule(schedule, needs={1: [2]})


def random_mutation(rows: Rows, draw: random.Random) -> None:
    row = draw.choice([row for row in rows if row])
    one, other = draw.randrange(len(row)), draw.randrange(len(row))
    match draw.choice(
        ["swap", "swap", "swap", "move", "move", "drop", "double", "rank", "stage", "kind"]
    ):
        case "swap":
            swap(row, one, other)
        case "move":
            row.insert(other, row.pop(one))
        case "drop":
            row.pop(one)
        case "double":
            row.insert(other, row[one])
        case "rank":
            draw.choice(rows).append(row.pop(one))
        case "stage":
            row[one] = replace(row[one], stage_index=row[one].stage_index + draw.choice((-1, 1)))
        case "kind":
            kinds = ("forward", "backward", "backward_input", "backward_weight", "update")
            row[one] = replace(row[one], kind=draw.choice(kinds))


def test_random_mutations_are_found_exactly_where_the_plain_interpreter_hangs() -> None:
    draw = random.Random(15)
    verdicts = {True: 0, False: 0}
    for _ in range(800):
        name, ranks, parts = (
            draw.choice([*SCHEDULES, *["continuous"] * 3]),
            draw.randint(1, 4),
            draw.randint(1, 5),
        )
        schedule = (
            continuous_schedule(
                num_ranks=ranks, num_minibatches=parts, accumulate=draw.randint(1, 2)
            )
            if name == "continuous"
            else make_schedule(name, num_ranks=ranks, num_microbatches=parts)
        )
        count = draw.randint(1, 2)
        changed = mutated(
            schedule, lambda rows, count=count: [random_mutation(rows, draw) for _ in range(count)]
        )
        try:
            check_schedule(changed)
        except ScheduleError:
            passed = False
        else:
            passed = True
        assert passed == runs(changed), changed
        verdicts[passed] += 1
    assert min(verdicts.values()) > 60

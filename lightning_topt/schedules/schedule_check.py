"""`check_schedule`: can a schedule run to its end? Without processes, and complete before a tensor
moves.

Every pass is there once and on the rank of its stage, each after what it needs, and no ranks wait
for one another in a circle. A send without a receive or the reverse cannot be, once this holds:
both follow from the passes at their ends.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import get_args

from lightning_topt.schedules.schedule import Action, Kind, Schedule
from lightning_topt.schedules.schedule_order import Done, Edges, Waiting, run_order

_KINDS = get_args(Kind)
_BEFORE: Mapping[Kind, Kind] = {
    "backward": "forward",
    "backward_input": "forward",
    "backward_weight": "backward_input",
}
_ENDS = ("backward", "backward_weight")  # after which a microbatch's gradients are complete


class ScheduleError(ValueError):
    """A schedule that cannot run, with the `rank` and the `action` in question where there is
    one.
    """

    def __init__(self, text: str, *, rank: int | None = None, action: Action | None = None) -> None:
        super().__init__(text)
        self.rank = rank
        self.action = action


def check_schedule(schedule: Schedule, *, needs: Mapping[int, Sequence[int]] | None = None) -> None:
    """Return if every rank of the schedule comes to its end with every pass run once.

    `needs` are earlier stages from which each stage receives, by default the one before it. A
    schedule without any backward pass is one of an evaluation; one with updates applies every
    microbatch once, the same ones together on all stages. Sends do not block. Raises ScheduleError
    with the rank, the action and the reason; ValueError where `needs` names stages that are not
    before the one that needs them.
    """
    edges = Edges(schedule.num_stages, needs=needs)
    _check_ranks(schedule)
    found = _check_places(schedule)
    _check_complete(schedule, found)
    _check_own_order(schedule)
    _check_updates(schedule)
    _, waiting = run_order(schedule, edges)
    if waiting:
        _raise_deadlock(schedule, waiting)


def describe(action: Action) -> str:
    """Return an action in words, such as "forward of microbatch 3 in stage 1"."""
    return f"{action.kind} of microbatch {action.microbatch_index} in stage {action.stage_index}"


def _check_ranks(schedule: Schedule) -> None:
    if schedule.num_microbatches < 1:
        raise ScheduleError(f"schedule {schedule.name!r} has no microbatch")
    ranks = range(schedule.num_ranks)
    for stage, rank in enumerate(schedule.rank_of_stage):
        if rank not in ranks:
            raise ScheduleError(
                f"stage {stage} is on rank {rank}, but there are actions of {len(ranks)} ranks",
                rank=rank,
            )
    for rank in ranks:
        if not schedule.stages_of(rank):
            raise ScheduleError(f"rank {rank} has no stage", rank=rank)


def _check_places(schedule: Schedule) -> dict[Action, int]:
    """The rank of each action; each is of a stage and microbatch that are there, on the right rank,
    once.
    """
    found: dict[Action, int] = {}
    for rank, action in _all_actions(schedule):
        text = f"rank {rank} is to run {describe(action)}"
        if action.kind not in _KINDS:
            raise ScheduleError(
                f"{text}; a pass is one of {', '.join(_KINDS)}", rank=rank, action=action
            )
        if not 0 <= action.stage_index < schedule.num_stages:
            raise ScheduleError(
                f"{text}; stages are 0 to {schedule.num_stages - 1}", rank=rank, action=action
            )
        if not 0 <= action.microbatch_index < schedule.num_microbatches:
            raise ScheduleError(
                f"{text}; microbatches are 0 to {schedule.num_microbatches - 1}",
                rank=rank,
                action=action,
            )
        home = schedule.rank_of_stage[action.stage_index]
        if home != rank:
            raise ScheduleError(f"{text}, a stage of rank {home}", rank=rank, action=action)
        if action in found:
            raise ScheduleError(f"{text} twice", rank=rank, action=action)
        found[action] = rank
    return found


def _check_complete(schedule: Schedule, found: Mapping[Action, int]) -> None:
    is_training = any(action.kind != "forward" for action in found)
    for stage, index in itertools.product(
        range(schedule.num_stages), range(schedule.num_microbatches)
    ):
        rank = schedule.rank_of_stage[stage]
        forward, backward = Action("forward", stage, index), Action("backward", stage, index)
        split = [Action("backward_input", stage, index), Action("backward_weight", stage, index)]
        there = [action for action in split if action in found]
        if backward in found and there:
            text = f"rank {rank} is to run {describe(backward)} and {there[0].kind} of the same"
            raise ScheduleError(text, rank=rank, action=there[0])
        wanted = [forward]
        if is_training and backward not in found:
            wanted += split if there else [backward]
        for action in wanted:
            if action not in found:
                raise ScheduleError(
                    f"rank {rank} never runs {describe(action)}", rank=rank, action=action
                )


def _check_own_order(schedule: Schedule) -> None:
    for rank, actions in enumerate(schedule.actions):
        before: set[Action] = set()
        for action in actions:
            first = _BEFORE.get(action.kind)
            if (
                first is not None
                and Action(first, action.stage_index, action.microbatch_index) not in before
            ):
                text = f"rank {rank} is to run {describe(action)} before its {first}"
                raise ScheduleError(text, rank=rank, action=action)
            before.add(action)


def _check_updates(schedule: Schedule) -> None:
    """Each update follows the gradients of all its microbatches and of no others, and all stages
    have the same.
    """
    last = sorted(
        {action.microbatch_index for _, action in _all_actions(schedule) if action.kind == "update"}
    )
    for stage in range(schedule.num_stages if last else 0):
        rank = schedule.rank_of_stage[stage]
        found, there = [-1], set[int]()
        for action in (action for action in schedule.actions[rank] if action.stage_index == stage):
            index = action.microbatch_index
            if action.kind in _ENDS:
                there.add(index)
            elif action.kind == "update":
                odd = sorted(there ^ set(range(found[-1] + 1, index + 1))) or [index] * (
                    index <= found[-1]
                )
                if odd:
                    what = "with" if odd[0] in there else "without"
                    text = (
                        f"rank {rank} is to run {describe(action)} {what} the gradients of "
                        f"microbatch {odd[0]}"
                    )
                    raise ScheduleError(text, rank=rank, action=action)
                found.append(index)
                there.clear()
        missing = next((index for index in (*last, *sorted(there)) if index not in found), None)
        if missing is not None:
            action = Action("update", stage, missing)
            raise ScheduleError(
                f"rank {rank} never runs {describe(action)}", rank=rank, action=action
            )


def _raise_deadlock(schedule: Schedule, waiting: Mapping[int, Waiting]) -> None:
    """Name the circle of ranks: a rank that waits, the one that it waits for, and so on until one
    comes again.
    """
    path: list[int] = []
    rank = min(waiting)
    while rank not in path:
        path.append(rank)
        rank = schedule.rank_of_stage[waiting[rank].missing.stage_index]
    circle = path[path.index(rank) :]
    texts = [
        f"rank {each} cannot run {describe(waiting[each].action)} before "
        f"{_in_words(schedule, waiting[each].missing)}"
        for each in circle
    ]
    raise ScheduleError(
        f"deadlock: {'; '.join(texts)}", rank=circle[0], action=waiting[circle[0]].action
    )


def _in_words(schedule: Schedule, done: Done) -> str:
    rank = schedule.rank_of_stage[done.stage_index]
    return (
        f"rank {rank} has run {done.kind} of microbatch {done.microbatch_index} in stage "
        f"{done.stage_index}"
    )


def _all_actions(schedule: Schedule) -> list[tuple[int, Action]]:
    return [(rank, action) for rank, actions in enumerate(schedule.actions) for action in actions]

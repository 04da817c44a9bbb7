"""Check that a schedule can run to its end, without processes and before a tensor moves.

After `check_schedule` every pass is there once, on the rank of its stage and after what it needs.
No ranks wait for one another in a circle. A send without a receive, or the reverse, cannot occur
then: both follow from the passes at their ends. That holds over NCCL as well, where a send waits
for its receive, with a queue for each pair of ranks ([Note: a queue for each pair] in
`execution.pipeline.messages`).

`Edges` says what stages need of one another; `run_order` finds an order in which all passes can
run, which the simulation walks as well.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import NamedTuple, get_args

from lightning_topt.schedules.schedules import Action, Kind, Schedule

_KINDS = get_args(Kind)
_BEFORE: Mapping[Kind, Kind] = {
    "backward": "forward",
    "backward_input": "forward",
    "backward_weight": "backward_input",
}
_ENDS = ("backward", "backward_weight")  # after which a microbatch's gradients are complete


class ScheduleError(ValueError):
    """A schedule that cannot run, with the `rank` and the `action` in question if there is one."""

    def __init__(self, text: str, *, rank: int | None = None, action: Action | None = None) -> None:
        super().__init__(text)
        self.rank = rank
        self.action = action


def check_schedule(schedule: Schedule, *, needs: Mapping[int, Sequence[int]] | None = None) -> None:
    """Return if every rank of the schedule comes to its end with every pass run once.

    A schedule without any backward pass is one of an evaluation. One with updates applies every
    microbatch once, and all stages update with the same ones together. Sends do not block.

    Args:
        schedule: any schedule, also one written by hand.
        needs: earlier stages from which each stage receives, by default the one before it.

    Raises:
        ScheduleError: with the rank, the action and the reason.
        ValueError: where `needs` names stages that are not before the one that needs them.
    """
    edges = Edges(schedule.num_stages, needs=needs)
    # Passes first, each check relying on those before it; then the order among ranks.
    _check_ranks(schedule)
    found = _check_places(schedule)
    _check_complete(schedule, found)
    _check_own_order(schedule)
    _check_updates(schedule)
    _, waiting = run_order(schedule, edges)
    if waiting:
        _raise_deadlock(schedule, waiting)


class Done(NamedTuple):
    """A pass that has been run.

    ``"backward"`` stands for backward and backward_input: after either, stages before can go on.
    """

    kind: str
    stage_index: int
    microbatch_index: int


class Waiting(NamedTuple):
    """The action with which a rank waits, and a pass that it waits for."""

    action: Action
    missing: Done


class Edges:
    """The tensors that stages receive.

    `sources` (stages,) are the stages that each receives from in forward, `readers` those from
    whom its gradients come back.
    """

    def __init__(self, num_stages: int, *, needs: Mapping[int, Sequence[int]] | None) -> None:
        """Make the edges of earlier stages that each stage needs, by default the one before it.

        Raises ValueError where a stage needs one that is not before it.
        """
        if needs is None:
            needs = {stage: (stage - 1,) for stage in range(1, num_stages)}
        for stage, sources in needs.items():
            if not 0 <= stage < num_stages or any(not 0 <= source < stage for source in sources):
                raise ValueError(
                    f"a stage receives from stages before it, of 0 to {num_stages - 1}; stage "
                    f"{stage} is to receive from {sorted(sources)}"
                )
        self.sources = tuple(tuple(sorted(needs.get(stage, ()))) for stage in range(num_stages))
        self.readers = tuple(
            tuple(reader for reader in range(num_stages) if stage in self.sources[reader])
            for stage in range(num_stages)
        )

    @cached_property
    def inputs(self) -> dict[tuple[Kind, int], tuple[tuple[str, int], ...]]:
        """By pass (kind, stage): what it needs of the same microbatch, as results (kind, stage)."""
        found: dict[tuple[Kind, int], tuple[tuple[str, int], ...]] = {}
        for stage in range(len(self.sources)):
            # backward needs the stage's forward, and the gradients of all that read its output
            readers = (
                ("forward", stage),
                *(("backward", reader) for reader in self.readers[stage]),
            )
            found["forward", stage] = tuple(("forward", source) for source in self.sources[stage])
            found["backward", stage] = found["backward_input", stage] = readers
            # gradients of parameters and updates need the stage itself alone
            found["backward_weight", stage] = found["update", stage] = (("backward", stage),)
        return found


def run_order(
    schedule: Schedule, edges: Edges
) -> tuple[list[tuple[int, Action]], dict[int, Waiting]]:
    """Return (rank, action) in an order in which all can run, and where ranks hang.

    Sends do not block: a rank waits only for what it receives. The second result has each rank
    that does not come to its end.
    """
    order: list[tuple[int, Action]] = []
    done: set[tuple[str, int, int]] = set()  # plain tuples, which equal `Done`, are made faster
    positions = [0] * schedule.num_ranks  # the next action of each rank
    waiting: dict[int, Waiting] = {}
    waited_for: dict[tuple[str, int, int], list[int]] = {}  # ranks, by the pass that they wait for
    inputs, ready = edges.inputs, list(range(schedule.num_ranks))
    while ready:
        # run this rank until an action lacks what it needs
        rank = ready.pop()
        waiting.pop(rank, None)
        for action in itertools.islice(schedule.actions[rank], positions[rank], None):
            kind, stage, index = action.kind, action.stage_index, action.microbatch_index
            missing = next(
                (each for each in inputs[kind, stage] if (*each, index) not in done), None
            )
            if missing is not None:
                waiting[rank] = Waiting(action, Done(*missing, index))
                waited_for.setdefault(waiting[rank].missing, []).append(rank)
                break
            positions[rank] += 1
            order.append((rank, action))
            # no other rank waits for gradients of parameters, or for an update
            if kind not in ("backward_weight", "update"):
                result = ("forward" if kind == "forward" else "backward", stage, index)
                done.add(result)
                # who waited for this result goes on
                ready += waited_for.pop(result, ())
    return order, waiting


# ---- The checks, in the order in which they are made.


def _check_ranks(schedule: Schedule) -> None:
    if schedule.num_microbatches < 1:
        raise ScheduleError(f"schedule {schedule.name!r} has no microbatch")
    # every stage on a rank that there is, every rank with a stage
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
    """Check that each action has a known stage and microbatch, is on its rank, and is there once.

    Returns the rank of each action.
    """
    found: dict[Action, int] = {}
    for rank, action in _all_actions(schedule):
        # known kind, stage and microbatch; on its rank; once
        text = f"rank {rank} is to run {_describe(action)}"
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
    # Check that every stage runs forward, and in training backward, of every microbatch
    # forward passes alone are an evaluation
    is_training = any(action.kind != "forward" for action in found)
    for stage, index in itertools.product(
        range(schedule.num_stages), range(schedule.num_microbatches)
    ):
        rank = schedule.rank_of_stage[stage]
        forward, backward = Action("forward", stage, index), Action("backward", stage, index)
        split = [Action("backward_input", stage, index), Action("backward_weight", stage, index)]
        there = [action for action in split if action in found]
        # a backward pass is whole or in two halves, not both
        if backward in found and there:
            text = f"rank {rank} is to run {_describe(backward)} and {there[0].kind} of the same"
            raise ScheduleError(text, rank=rank, action=there[0])
        wanted = [forward]
        if is_training and backward not in found:
            wanted += split if there else [backward]
        for action in wanted:
            if action not in found:
                raise ScheduleError(
                    f"rank {rank} never runs {_describe(action)}", rank=rank, action=action
                )


def _check_own_order(schedule: Schedule) -> None:
    # Check that each rank runs forward before backward, and backward_input before its weights
    for rank, actions in enumerate(schedule.actions):
        before: set[Action] = set()
        for action in actions:
            first = _BEFORE.get(action.kind)
            if (
                first is not None
                and Action(first, action.stage_index, action.microbatch_index) not in before
            ):
                text = f"rank {rank} is to run {_describe(action)} before its {first}"
                raise ScheduleError(text, rank=rank, action=action)
            before.add(action)


def _check_updates(schedule: Schedule) -> None:
    """Check that each update has the gradients of all its microbatches and of no others.

    All stages have the same updates.
    """
    updates = sorted(
        {action.microbatch_index for _, action in _all_actions(schedule) if action.kind == "update"}
    )
    for stage in range(schedule.num_stages if updates else 0):
        rank = schedule.rank_of_stage[stage]
        found = [-1]  # the last microbatch of each update so far
        gradients = set[int]()  # microbatches with gradients since the last update
        for action in (action for action in schedule.actions[rank] if action.stage_index == stage):
            index = action.microbatch_index
            if action.kind in _ENDS:
                gradients.add(index)
            elif action.kind == "update":
                # An update takes all gradients since the one before it, up to its own microbatch;
                # that is a later one than the last of the update before.
                odd = sorted(gradients ^ set(range(found[-1] + 1, index + 1))) or [index] * (
                    index <= found[-1]
                )
                if odd:
                    what = "with" if odd[0] in gradients else "without"
                    text = (
                        f"rank {rank} is to run {_describe(action)} {what} the gradients of "
                        f"microbatch {odd[0]}"
                    )
                    raise ScheduleError(text, rank=rank, action=action)
                found.append(index)
                gradients.clear()
        # updates that other stages have, and gradients that no update takes
        missing = next((i for i in (*updates, *sorted(gradients)) if i not in found), None)
        if missing is not None:
            action = Action("update", stage, missing)
            raise ScheduleError(
                f"rank {rank} never runs {_describe(action)}", rank=rank, action=action
            )


def _raise_deadlock(schedule: Schedule, waiting: Mapping[int, Waiting]) -> None:
    # Name the circle of ranks that wait for one another
    # a rank that waits, the one that it waits for, and so on until one comes again
    path: list[int] = []
    rank = min(waiting)
    while rank not in path:
        path.append(rank)
        rank = schedule.rank_of_stage[waiting[rank].missing.stage_index]
    circle = path[path.index(rank) :]
    texts = []
    for each in circle:
        action, missing = waiting[each]
        other = schedule.rank_of_stage[missing.stage_index]
        texts.append(
            f"rank {each} cannot run {_describe(action)} before rank {other} has run "
            f"{_describe(missing)}"
        )
    raise ScheduleError(
        f"deadlock: {'; '.join(texts)}", rank=circle[0], action=waiting[circle[0]].action
    )


def _describe(action: Action | Done) -> str:
    # An action in words, such as "forward of microbatch 3 in stage 1"
    return f"{action.kind} of microbatch {action.microbatch_index} in stage {action.stage_index}"


def _all_actions(schedule: Schedule) -> list[tuple[int, Action]]:
    return [(rank, action) for rank, actions in enumerate(schedule.actions) for action in actions]

"""Check that a schedule can run to its end, without processes and before a tensor moves.

After `check_schedule` every pass is there once, on the rank of its stage and after what it needs.
No ranks wait for one another in a circle. A send without a receive, or the reverse, cannot occur
then: both follow from the passes at their ends. That holds over NCCL as well, where a send waits
for its receive, with a queue for each pair of ranks ([Note: a queue for each pair] in
`execution.pipeline.step_program`).

`Edges` says what stages need of one another; `run_order` finds an order in which all passes can
run, which the simulation walks as well.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

from lightning_topt.schedules.schedules import Action, Kind, Schedule

# The passes of a microbatch through a stage: of an evaluation, of training, with backward in two.
_EVALUATION = ("forward",)
_TRAINING = (("forward", "backward"), ("forward", "backward_input", "backward_weight"))
_ENDS = ("backward", "backward_weight")  # after which a microbatch's gradients are complete


class ScheduleError(ValueError):
    """A schedule that cannot run."""


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
    _check_passes(schedule)
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


# every stage runs all passes of every microbatch once, in their order, on its own rank
def _check_passes(schedule: Schedule) -> None:
    if set(schedule.rank_of_stage) != set(range(schedule.num_ranks)):
        raise ScheduleError(
            f"stages are on ranks {list(schedule.rank_of_stage)}, and there are actions of ranks 0 "
            f"to {schedule.num_ranks - 1}: each rank has a stage"
        )
    passes: dict[tuple[int, int], list[str]] = {
        each: []
        for each in itertools.product(range(schedule.num_stages), range(schedule.num_microbatches))
    }
    for rank, actions in enumerate(schedule.actions):
        for action in actions:
            kinds = passes.get((action.stage_index, action.microbatch_index))
            if kinds is None or schedule.rank_of_stage[action.stage_index] != rank:
                raise ScheduleError(
                    f"rank {rank} is to run {_describe(action)}, and has no such stage or "
                    "microbatch"
                )
            if action.kind != "update":
                kinds.append(action.kind)
    # forward passes alone are an evaluation
    is_training = any(action.kind != "forward" for row in schedule.actions for action in row)
    allowed = _TRAINING if is_training else (_EVALUATION,)
    for (stage, index), found in passes.items():
        if tuple(found) not in allowed:
            raise ScheduleError(
                f"rank {schedule.rank_of_stage[stage]} is to run {' '.join(found) or 'nothing'} of "
                f"microbatch {index} in stage {stage}, and not "
                f"{' or '.join(map(' '.join, allowed))}"
            )


# each update has the gradients of all its microbatches and of no others, alike on all stages
def _check_updates(schedule: Schedule) -> None:
    by_stage = []
    for stage, rank in enumerate(schedule.rank_of_stage):
        updates, gradients = [-1], list[int]()  # the last microbatch of each; since the last one
        for action in schedule.actions[rank]:
            index = action.microbatch_index
            if action.stage_index == stage and action.kind in _ENDS:
                gradients.append(index)
            elif action.stage_index == stage and action.kind == "update":
                # An update takes all gradients since the one before it, up to its own microbatch.
                taken = list(range(updates[-1] + 1, index + 1))
                if sorted(gradients) != taken or not taken:
                    raise ScheduleError(
                        f"rank {rank} is to run {_describe(action)} with the gradients of "
                        f"microbatches {sorted(gradients)}"
                    )
                updates.append(index)
                gradients.clear()
        by_stage.append((updates, gradients))
        if (len(updates) > 1 and gradients) or updates != by_stage[0][0]:
            raise ScheduleError(
                f"rank {rank} runs updates of microbatches {updates[1:]} in stage {stage}, and "
                f"not of all microbatches together with stage 0 ({by_stage[0][0][1:]})"
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
    raise ScheduleError(f"deadlock: {'; '.join(texts)}")


def _describe(action: Action | Done) -> str:
    # An action in words, such as "forward of microbatch 3 in stage 1"
    return f"{action.kind} of microbatch {action.microbatch_index} in stage {action.stage_index}"

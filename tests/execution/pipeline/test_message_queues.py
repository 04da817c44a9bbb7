"""All schedules with messages in queues, as over NCCL: none hangs, and none takes longer."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, NamedTuple

import pytest
import torch

from lightning_topt.execution.pipeline.stage_layout import Crossings
from lightning_topt.execution.pipeline.step_program import Message, all_messages, program_of
from lightning_topt.graph.step_flow import LeafSpec, TensorRef
from lightning_topt.schedules.check import ScheduleError, check_schedule
from lightning_topt.schedules.schedules import (
    CONTINUOUS_SCHEDULES,
    SCHEDULES,
    Action,
    Schedule,
    forward_schedule,
    lag_of,
    make_schedule,
)
from tests.execution.pipeline.message_queues import Compute, Operation, Receive, Send, Wait, seconds

RANKS, MICROBATCHES = (2, 3, 4, 5, 8), (*range(1, 9), 12, 16)
TRAINED = LeafSpec((2, 3), (3, 1), torch.float32, True)
SECONDS = {"forward": 1.0, "backward": 2.0, "backward_input": 1.0, "backward_weight": 1.0}
TRANSFERS = (0.1, 0.2)  # seconds of a message


class Sent(NamedTuple):
    """A message, small: it is a key."""

    source: int
    target: int
    microbatch: int
    sender: int
    receiver: int


def of(message: Message) -> Sent:
    return Sent(
        message.source, message.target, message.microbatch, message.sender, message.receiver
    )


def chain(num_stages: int, *, skips: bool = False) -> Crossings:
    """Each stage needs the one before; with `skips` all need the first as well."""
    targets = {TensorRef(stage, 0): (stage + 1,) for stage in range(num_stages - 1)}
    if skips:
        targets[TensorRef(0, 0)] = tuple(range(1, num_stages))
    return Crossings(targets, dict.fromkeys(targets, TRAINED), tuple(range(num_stages)))


def schedules_of(name: str) -> Iterator[Schedule]:
    rule = SCHEDULES[name]
    for stages in sorted({rule.least_stages, rule.most_stages or 3}):
        for ranks, microbatches in itertools.product(RANKS, MICROBATCHES):
            yield make_schedule(
                name, num_ranks=ranks, num_microbatches=microbatches, stages_per_rank=stages
            )


def operations(
    schedule: Schedule, crossings: Crossings, *, sends_wait: bool = True
) -> list[list[Operation]]:
    """What `run_actions` does on each rank."""
    messages = all_messages(schedule, [crossings] * schedule.num_microbatches)
    found = []
    for rank in range(schedule.num_ranks):
        of_rank: list[Operation] = []
        for step in program_of(schedule, messages, rank=rank, sends_wait=sends_wait):
            of_rank += [Receive(of(message)) for message in step.begins]
            of_rank += [Wait(of(m)) for m in step.needs if m.sender != rank]
            of_rank.append(Compute(SECONDS[step.action.kind]))
            of_rank += [Send(of(m)) for m in step.sends if m.receiver != rank]
        found.append(of_rank)
    return found


def a_link_for_each_pair(message: Sent) -> Hashable:
    return message.sender, message.receiver


def a_group_for_each_direction(message: Sent) -> Hashable:
    return message.source < message.target, message.sender < message.receiver


def one_group(message: Sent) -> Hashable:
    return None


def slowdown(
    programs: Sequence[Sequence[Operation]], transfer: float, queue_of: Callable[[Sent], Hashable]
) -> float | None:
    """By which part of its time a step takes longer than with free links; None: it hangs."""

    def transfer_of(message: Sent) -> float:
        return transfer

    took = seconds(programs, queue_of=queue_of, transfer_of=transfer_of)
    free = seconds(programs, queue_of=None, transfer_of=transfer_of)
    assert took is None or free is not None
    return None if took is None or free is None else took / free - 1


def waits_for_device(program: Sequence[Operation], after: Any = Compute | Send) -> list[Operation]:
    """Wherever the rank has computed or sent something, it waits for all that it has begun."""
    found: list[Operation] = []
    begun: list[Hashable] = []
    for operation in program:
        found.append(operation)
        if isinstance(operation, Receive | Send):
            begun.append(operation.message)
        if isinstance(operation, after):
            found += [Wait(message) for message in begun]
            begun = []
    return found


def hangs_where_all_wait(programs: Sequence[Sequence[Operation]]) -> bool:
    """Whether ranks are in a circle where each waits for its device, or only some of them do."""
    waiting = [waits_for_device(program) for program in programs]
    return seconds(waiting, queue_of=a_link_for_each_pair, transfer_of=lambda _: 0.1) is None


@pytest.mark.parametrize("name", SCHEDULES)
def test_no_schedule_hangs_or_takes_longer(name: str) -> None:
    for schedule in schedules_of(name):
        programs = operations(schedule, chain(schedule.num_stages))
        where = (schedule.num_ranks, schedule.num_stages, schedule.num_microbatches)
        found = slowdown(programs, TRANSFERS[-1], a_link_for_each_pair)
        assert found is not None and found < 0.02, (where, found)
        assert not hangs_where_all_wait(programs), where


def test_all_schedules_take_as_long_where_every_stage_needs_the_first() -> None:
    for name in SCHEDULES:
        for ranks, microbatches in ((2, 5), (3, 8), (4, 4), (5, 12)):
            schedule = make_schedule(name, num_ranks=ranks, num_microbatches=microbatches)
            programs = operations(schedule, chain(schedule.num_stages, skips=True))
            found = slowdown(programs, 0.2, a_link_for_each_pair)
            assert found is not None and found < 0.02, (name, ranks, microbatches, found)
            assert not hangs_where_all_wait(programs), (name, ranks, microbatches)


def test_an_evaluation_takes_as_long() -> None:
    for ranks in ((0, 1, 2), (0, 1, 2, 0, 1, 2), (0, 1, 2, 3, 3, 2, 1, 0)):
        schedule = forward_schedule(ranks)
        programs = operations(schedule, chain(len(ranks)))
        found = slowdown(programs, 0.2, a_link_for_each_pair)
        assert found is not None and found < 0.02, ranks
        assert not hangs_where_all_wait(programs), ranks


def test_a_group_for_each_direction_hangs() -> None:
    """What the links and the one order are for: so it was without both."""
    schedule = make_schedule("1f1b", num_ranks=4, num_microbatches=8)
    programs = operations(schedule, chain(4), sends_wait=False)
    assert slowdown(programs, 0.1, a_group_for_each_direction) is None
    assert slowdown(programs, 0.1, one_group) is None


def any_schedule(rng: random.Random) -> Schedule:
    """Any order in which passes can run, or with two of a rank's passes in each other's place."""
    ranks, microbatches = rng.randint(2, 4), rng.randint(1, 5)
    rank_of_stage = tuple(range(ranks)) * rng.randint(1, 2)
    stages = len(rank_of_stage)
    rows: list[list[Action]] = [[] for _ in range(ranks)]
    # the next pass of each microbatch: forward through all stages, then backward
    passes = [
        *(("forward", stage) for stage in range(stages)),
        *(("backward", stage) for stage in reversed(range(stages))),
    ]
    places = [0] * microbatches
    while unfinished := [m for m in range(microbatches) if places[m] < len(passes)]:
        microbatch = rng.choice(unfinished)
        kind, stage = passes[places[microbatch]]
        places[microbatch] += 1
        rows[rank_of_stage[stage]].append(Action(kind, stage, microbatch))  # type: ignore[arg-type]
    if rng.random() < 0.7:
        row = rng.choice(rows)
        one, other = rng.randrange(len(row)), rng.randrange(len(row))
        row[one], row[other] = row[other], row[one]
    return Schedule("any", microbatches, rank_of_stage, tuple(map(tuple, rows)))


def test_schedules_run_in_queues_if_and_only_if_the_check_passes_them() -> None:
    rng, found = random.Random(0), Counter[bool]()
    while min(found[True], found[False]) < 50:
        schedule = any_schedule(rng)
        try:
            check_schedule(schedule)
            runs = True
        except ScheduleError as error:
            if not str(error).startswith("deadlock"):  # what is wrong on one rank
                continue
            runs = False
        programs = operations(schedule, chain(schedule.num_stages))
        assert (slowdown(programs, 0.1, a_link_for_each_pair) is not None) == runs, schedule
        found[runs] += 1


# ---- asynchronous pipelines ----------------------------------------------------------------------


def iterations(
    stage: int,
    *,
    num_stages: int,
    minibatches: int,
    lag_per_hop: int,
    is_ahead: bool = True,
    meets: bool = False,
) -> list[Operation]:
    """What `ContinuousRun` does over NCCL on the rank of a stage, until it is drained.

    Not `is_ahead`: shapes are others in each minibatch. `meets`: stages get each batch together.
    """
    found: list[Operation] = []
    begun: set[Hashable] = set()
    lag = lag_of(stage, num_ranks=num_stages, lag_per_hop=lag_per_hop)
    is_last, is_early = stage + 1 == num_stages, lag_per_hop > 1

    def receive(what: str, source: int, minibatch: int) -> None:
        message = what, source, stage, minibatch
        if message not in begun:
            begun.add(message)
            found.append(Receive(message))

    def meet(minibatch: int) -> None:
        others = [other for other in range(num_stages) if other != stage]
        found.extend(Send(("batch", stage, other, minibatch)) for other in others)
        found.extend(Receive(("batch", other, stage, minibatch)) for other in others)
        found.extend(Wait(("batch", other, stage, minibatch)) for other in others)

    def ahead(minibatch: int) -> None:
        # shapes are known from two minibatches
        if is_ahead and not meets and stage and 2 <= minibatch < minibatches:
            receive("activations", stage - 1, minibatch)

    def begin_back(minibatch: int, there: range, *whats: str) -> None:
        if not is_last and minibatch in there:
            for what in whats or ("gradients", "values"):
                receive(what, stage + 1, minibatch)

    def backward(minibatch: int, there: range) -> None:
        for each in (minibatch, minibatch + 1) if is_early else (minibatch,):
            begin_back(each, there)
        if minibatch not in there:
            return
        if not is_last:
            found.append(Wait(("gradients", stage + 1, stage, minibatch)))
        found.append(Compute(2.0))
        if stage:
            found.append(Send(("gradients", stage, stage - 1, minibatch)))
        if not is_last:
            found.append(Wait(("values", stage + 1, stage, minibatch)))

    def update(minibatch: int) -> None:
        if minibatch >= 0:
            found.append(Compute(0.3))
            if stage:
                found.append(Send(("values", stage, stage - 1, minibatch)))

    for minibatch in range(minibatches):
        if meets:
            meet(minibatch)
        behind = minibatch - lag
        there = range(max(0, behind), minibatch + 1)
        if not is_early:
            begin_back(behind, range(max(0, behind), minibatch), "gradients")
        if stage:
            receive("activations", stage - 1, minibatch)
            found.append(Wait(("activations", stage - 1, stage, minibatch)))
        if is_early and minibatch > 1:  # this one was begun ahead as well
            ahead(minibatch + 1)
        found.append(Compute(1.0))
        if not is_last:
            found.append(Send(("activations", stage, stage + 1, minibatch)))
        backward(behind, there)
        ahead(minibatch + 1)
        if meets:
            begin_back(behind + lag_per_hop, there)
        update(behind)
        found.append(Compute(0.0))  # user code
    for minibatch in range(max(0, minibatches - lag), minibatches):
        backward(minibatch, range(minibatch, minibatches))
        update(minibatch)
    return found


def link_or_meeting(message: tuple[str, int, int, int]) -> Hashable:
    return message if message[0] == "batch" else message[1:3]


@pytest.mark.parametrize("name", CONTINUOUS_SCHEDULES)
def test_asynchronous_pipelines_do_not_hang_or_take_longer(name: str) -> None:
    lag_per_hop = CONTINUOUS_SCHEDULES[name]
    for ranks, minibatches in itertools.product(RANKS, (*MICROBATCHES, 64)):
        programs = [
            iterations(stage, num_stages=ranks, minibatches=minibatches, lag_per_hop=lag_per_hop)
            for stage in range(ranks)
        ]
        for transfer in TRANSFERS:

            def transfer_of(message: tuple[str, int, int, int], seconds: float = transfer) -> float:
                return 0.0 if message[0] == "values" else seconds

            took = seconds(programs, queue_of=lambda m: m[1:3], transfer_of=transfer_of)
            free = seconds(programs, queue_of=None, transfer_of=transfer_of)
            assert took is not None and free is not None, (ranks, minibatches)
            assert took <= 1.02 * free + 1e-9, (ranks, minibatches, transfer, took / free)


@pytest.mark.parametrize("name", CONTINUOUS_SCHEDULES)
@pytest.mark.parametrize("how", [{}, {"is_ahead": False}, {"meets": True}])
def test_asynchronous_stages_may_wait_for_their_devices(name: str, how: dict[str, bool]) -> None:
    """All at once, wherever they compute or have done an iteration."""
    for ranks, minibatches in itertools.product(RANKS, (1, 2, 3, 5, 12, 24)):
        waiting = [
            waits_for_device(
                iterations(
                    stage,
                    num_stages=ranks,
                    minibatches=minibatches,
                    lag_per_hop=CONTINUOUS_SCHEDULES[name],
                    **how,
                ),
                after=Compute,
            )
            for stage in range(ranks)
        ]
        found = seconds(waiting, queue_of=link_or_meeting, transfer_of=lambda m: 0.1)
        assert found is not None, (ranks, minibatches)

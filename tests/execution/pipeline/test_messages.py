"""Messages around the actions of a schedule: both ends of a channel agree on their order, and none
comes late.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from lightning_topt.execution.pipeline.messages import (
    Crossings,
    Message,
    ProgramStep,
    rank_program,
)
from lightning_topt.execution.pipeline.pipeline_run import linked_ranks
from lightning_topt.execution.pipeline.stage_layout import StageLayout
from lightning_topt.graph.step_flow import LeafSpec, TensorRef
from lightning_topt.schedules.schedules import SCHEDULES, Schedule, forward_schedule, make_schedule

TRAINED = LeafSpec((2, 3), (3, 1), torch.float32, True)
INDEX = LeafSpec((2,), (1,), torch.int64, False)


def crossings_of(num_stages: int) -> Crossings:
    """One call in each stage: its output goes to the next stage, that of the first to all, with an
    index.
    """
    targets = {TensorRef(stage, 0): (stage + 1,) for stage in range(num_stages - 1)}
    targets[TensorRef(0, 0)] = targets[TensorRef(0, 1)] = tuple(range(1, num_stages))
    specs = {ref: INDEX if ref.leaf else TRAINED for ref in targets}
    return Crossings(targets, specs, tuple(range(num_stages)))


def schedules() -> list[Schedule]:
    found = []
    for name, rule in SCHEDULES.items():
        for ranks in (2, 3, 4):
            for count in (1, 2, 5, 8):
                for stages in {rule.least_stages, rule.most_stages or 3}:
                    found.append(
                        make_schedule(
                            name, num_ranks=ranks, num_microbatches=count, stages_per_rank=stages
                        )
                    )
    return [*found, forward_schedule((0, 1, 2, 2, 1, 0), 4)]


def channel(message: Message) -> tuple[int, int, bool]:
    return message.sender, message.receiver, message.is_gradient


def check(schedule: Schedule, *, sends_wait: bool) -> None:
    crossings = [crossings_of(schedule.num_stages)] * schedule.num_microbatches
    ranks = [
        rank_program(schedule, crossings, rank=rank, sends_wait=sends_wait)
        for rank in range(schedule.num_ranks)
    ]
    sent, begun = {}, {}
    for rank, steps in enumerate(ranks):
        assert tuple(step.action for step in steps) == schedule.actions[rank]
        known: set[Message] = set()
        for index, step in enumerate(steps):
            known |= set(step.begins)
            assert all(message.sender == rank or message in known for message in step.needs)
            assert all(m.used == index and m.receiver == rank for m in step.needs)
            assert all(m.made == index and m.sender == rank for m in step.sends)
            for message in step.begins:
                begun.setdefault(channel(message), []).append(message)
            for message in step.sends:
                if message.receiver != rank:
                    sent.setdefault(channel(message), []).append(message)
    assert sent == begun, "the order of a channel"
    per_microbatch = 3 * schedule.num_stages - 4 if schedule.num_stages > 1 else 0
    backward = schedule.name != "forward"
    local = sum(m.sender == m.receiver for steps in ranks for step in steps for m in step.sends)
    trained = 2 * schedule.num_stages - 3
    expected = schedule.num_microbatches * (per_microbatch + trained * backward)
    assert sum(map(len, sent.values())) + local == expected
    run_to_the_end(ranks)
    ends = sorted(stage for steps in ranks for step in steps for stage in step.ends)
    assert ends == (list(range(schedule.num_stages)) if backward else [])


def run_to_the_end(ranks: Sequence[Sequence[ProgramStep]]) -> None:
    """Sends do not block; a rank waits for what it needs."""
    places, here = [0] * len(ranks), set()
    while any(place < len(steps) for place, steps in zip(places, ranks, strict=True)):
        before = list(places)
        for rank, steps in enumerate(ranks):
            while places[rank] < len(steps) and here.issuperset(steps[places[rank]].needs):
                here |= set(steps[places[rank]].sends)
                places[rank] += 1
        assert places != before, "all wait"


@pytest.mark.parametrize("name", [*SCHEDULES, "forward"])
def test_channels_are_in_one_order_at_both_ends(name: str) -> None:
    of_name = [schedule for schedule in schedules() if schedule.name == name]
    assert of_name
    for schedule in of_name:
        check(schedule, sends_wait=False)
        check(schedule, sends_wait=True)


def test_links_lead_back_where_something_has_a_gradient() -> None:
    """All stages need an index of the first, and the last one a parameter of it."""
    specs = {TensorRef(s, 0): TRAINED for s in range(3)} | {TensorRef(0, 1): INDEX}
    targets = {TensorRef(s, 0): (s + 1,) for s in range(3)} | {TensorRef(0, 1): (1, 2, 3)}
    crossings = Crossings(targets, specs, (0, 1, 2, 3))
    parameters = (frozenset({"a"}), frozenset[str](), frozenset[str](), frozenset({"a"}))
    layout = StageLayout((0, 1, 2, 3), parameters, {})
    neighbours = {(s, s + 1) for s in range(3)} | {(s + 1, s) for s in range(3)}
    found = linked_ranks(layout, crossings, is_asynchronous=False)
    assert found == neighbours | {(0, 2), (0, 3)}
    found = linked_ranks(layout, crossings, is_asynchronous=True)
    assert found == neighbours | {(0, 2), (0, 3), (3, 0)}
    frozen = Crossings(targets, dict.fromkeys(specs, INDEX), (0, 1, 2, 3))
    assert (1, 0) not in linked_ranks(layout, frozen, is_asynchronous=False)
    # stages of one rank need none
    looped = StageLayout((0, 1, 0, 1), parameters, {})
    found = linked_ranks(looped, crossings, is_asynchronous=False)
    assert found == {(0, 1), (1, 0)}

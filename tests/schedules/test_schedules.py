"""Schedules compared with torch's own lists; sizes that are not legal."""

from __future__ import annotations

import itertools
import logging

import pytest

from lightning_topt.schedules.schedules import SCHEDULES, Action, make_schedule
from tests.schedules.slow_interpreter import runs

TORCH_NAMES = {
    "gpipe": "GPipe",
    "1f1b": "1F1B",
    "interleaved": "Interleaved1F1B",
    "looped_bfs": "LoopedBFS",
    "interleaved_zero_bubble": "InterleavedZeroBubble",
    "zbv": "ZBVZeroBubble",
}
KINDS = {
    "FORWARD": "forward",
    "FULL_BACKWARD": "backward",
    "BACKWARD_INPUT": "backward_input",
    "BACKWARD_WEIGHT": "backward_weight",
}


def torch_actions(
    name: str, num_ranks: int, num_microbatches: int, stages_per_rank: int
) -> list[list[Action]]:
    """Return torch's list without bubbles and without what it does with gradients afterwards."""
    from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops

    ranks = get_schedule_ops(TORCH_NAMES[name], num_ranks, num_microbatches, stages_per_rank)
    return [
        [
            Action(KINDS[op.computation_type.name], op.stage_index, op.microbatch_index)
            for op in ops
            if op is not None and op.computation_type.name in KINDS
        ]
        for ops in ranks
    ]


def is_torch_size(name: str, num_ranks: int, num_microbatches: int) -> bool:
    if not name.startswith("interleaved"):
        return True
    return num_microbatches % max(1, num_microbatches // num_ranks) == 0


@pytest.mark.parametrize("name", TORCH_NAMES)
def test_schedules_are_those_of_torch(name: str) -> None:
    logging.getLogger("torch.distributed.pipelining").setLevel(logging.ERROR)
    compared = 0
    for num_ranks, num_microbatches in itertools.product((2, 3, 4), (1, 2, 3, 6, 8)):
        for stages in (SCHEDULES[name].least_stages, 3)[
            : 1 + (SCHEDULES[name].most_stages is None)
        ]:
            if not is_torch_size(name, num_ranks, num_microbatches):
                continue
            if name == "1f1b" and num_microbatches < num_ranks:
                continue  # torch's list counts passes there that are not
            ours = make_schedule(
                name, num_ranks=num_ranks, num_microbatches=num_microbatches, stages_per_rank=stages
            )
            theirs = torch_actions(name, num_ranks, num_microbatches, stages)
            # torch 2.13 begins at microbatch 1 on the last rank
            last = len(theirs) - (name == "1f1b")
            assert [list(actions) for actions in ours.actions[:last]] == theirs[:last]
            compared += 1
    assert compared >= 9


def test_every_size_runs_in_the_interpreter() -> None:
    counts = itertools.product(SCHEDULES.items(), (1, 2, 3, 4, 6), (1, 2, 3, 4, 7, 9), (1, 2, 3, 4))
    for (name, rule), ranks, parts, stages in counts:
        if not rule.least_stages <= stages <= (rule.most_stages or 4):
            continue
        schedule = make_schedule(
            name, num_ranks=ranks, num_microbatches=parts, stages_per_rank=stages
        )
        assert runs(schedule), (name, ranks, parts, stages)
        assert schedule.rank_of_stage == rule.rank_of_stage(num_ranks=ranks, stages_per_rank=stages)
        kinds = {action.kind for actions in schedule.actions for action in actions}
        assert ("backward_weight" in kinds) == rule.splits_backward


@pytest.mark.parametrize(
    ("name", "sizes", "message"),
    [
        ("1f2b", (2, 2, 1), "schedule is one of gpipe, 1f1b, "),
        ("1f1b", (2, 2, 2), "'1f1b' runs 1 stage on each rank, got 2; choose among interleaved, "),
        ("zbv", (2, 2, 3), "'zbv' runs 2 stages on each rank, got 3; choose among interleaved, "),
    ],
)
def test_sizes_that_are_not_legal(name: str, sizes: tuple[int, int, int], message: str) -> None:
    ranks, parts, stages = sizes
    with pytest.raises(ValueError, match=message):
        make_schedule(name, num_ranks=ranks, num_microbatches=parts, stages_per_rank=stages)

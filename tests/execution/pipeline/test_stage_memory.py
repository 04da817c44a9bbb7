"""What ranks hold while a schedule runs: graphs of microbatches under way, and no others."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_topt.execution.engine import Engine
from lightning_topt.execution.pipeline.pipeline_run import Example
from lightning_topt.schedules.schedules import SCHEDULES
from tests.execution.pipeline.stage_models import loss_of, make, plan_of, tokens
from tests.launch import run_ranks

COUNT = 8  # microbatches


class Saved:
    """A tensor that a graph holds."""

    def __init__(self, tensor: Tensor, microbatch: int) -> None:
        self.tensor, self.microbatch = tensor, microbatch


def graphs_held(rank: int, schedules: Sequence[str]) -> list[list[int]]:
    """For each schedule how many microbatches had a graph at each forward pass of this rank."""
    return [_graphs_held(schedule) for schedule in schedules]


def _graphs_held(schedule: str) -> list[int]:
    alive: weakref.WeakSet[Saved] = weakref.WeakSet()
    counts: list[int] = []

    def pack(tensor: Tensor) -> Saved:
        alive.add(
            saved := Saved(tensor.detach(), len(counts))
        )  # what a node saves of its result must not hold the node
        return saved

    def step(model: Any, part: Tensor) -> Tensor:
        counts.append(len({each.microbatch for each in alive}))
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved.tensor):
            return loss_of(model, part)

    plan = plan_of(2, schedule, stages=2 * SCHEDULES[schedule].least_stages)
    engine = Engine(plan, make("plain"), device=torch.device("cpu"))
    parts = list(tokens(COUNT, 2))
    engine.apply(example=Example(step, parts[0]))
    del counts[:]  # of the trace
    engine.run_step(parts, step)
    engine.release()
    return counts


SPLIT = [name for name, rule in SCHEDULES.items() if rule.splits_backward]


@pytest.fixture(scope="module")
def held() -> list[list[list[int]]]:
    return run_ranks(graphs_held, 2, [*SPLIT, "1f1b"])


@pytest.mark.parametrize("name", [*SPLIT, "1f1b"])
def test_graphs_end_with_their_microbatches(name: str, held: list[list[list[int]]]) -> None:
    stages = SCHEDULES[name].least_stages
    for of_rank in held:
        counts = of_rank[[*SPLIT, "1f1b"].index(name)]
        assert len(counts) == COUNT * stages
        assert max(counts) <= 2 * stages  # of passes; eight where all results kept their graphs

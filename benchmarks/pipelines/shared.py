"""Shared by the pipeline benchmarks: cuts by measured seconds, and the loop without flush.

`block_seconds`, `cut` and `plan_of` make the plan of a pipeline without a search. `iterations` runs
a pipeline without flush on one minibatch, for benchmarks that time it.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_topt.execution.engine import Engine
from lightning_topt.execution.pipeline.continuous_run import BackwardResult
from lightning_topt.graph.mesh_axes import Mesh
from lightning_topt.graph.op_config import OpConfig
from lightning_topt.plan.parallel_plan import BlockPlan, ParallelPlan, StagePlan


def block_seconds(
    module: nn.Module,
    loss_of: Callable[[nn.Module], Tensor],
    blocks: Sequence[str],
    *,
    steps: int = 5,
) -> list[float]:
    """Return the seconds of forward and backward of each block in a step, (blocks,).

    What follows a block counts with it. A block returns a tensor. Its backward lasts from when the
    gradient of that tensor is there until another block's is.
    """
    began: list[tuple[float, int]] = []  # when a pass of a block began, and the block's number

    def mark(number: int) -> None:
        began.append((time.perf_counter(), number))

    def mark_gradient(number: int, output: Tensor) -> None:
        output.register_hook(lambda _: mark(number))

    hooks = []
    for number, name in enumerate(blocks):
        block = module.get_submodule(name)
        hooks.append(block.register_forward_pre_hook(lambda *_, n=number: mark(n)))
        hooks.append(
            block.register_forward_hook(lambda *given, n=number: mark_gradient(n, given[-1]))
        )
    found: list[list[float]] = []
    for _ in range(steps):
        began.clear()
        loss = loss_of(module)
        mark(len(blocks) - 1)
        loss.backward()
        mark(-1)
        module.zero_grad()
        seconds = [0.0] * len(blocks)
        for (start, number), (end, _) in itertools.pairwise(began):
            seconds[number] += end - start
        found.append(seconds)
    for hook in hooks:
        hook.remove()
    return [statistics.median(each) for each in zip(*found, strict=True)]


def cut(
    seconds: Sequence[float], weights: Sequence[float], count: int, *, share: float = 1.0
) -> list[int]:
    """Return the first block of each of `count` stages, so that the longest stage is shortest.

    No stage has more than `share` of all weights unless all cuts do.
    """
    total = sum(weights)
    best: tuple[Any, list[int]] | None = None
    for inner in itertools.combinations(range(1, len(seconds)), count - 1):
        starts = [0, *inner]
        parts = list(itertools.pairwise([*starts, len(seconds)]))
        heaviest = max(sum(weights[a:b]) for a, b in parts) / total
        key = max(heaviest - share, 0.0), max(sum(seconds[a:b]) for a, b in parts)
        if best is None or key < best[0]:
            best = key, starts
    assert best is not None, "more stages than blocks"
    return best[1]


def plan_of(
    blocks: Sequence[str], starts: Sequence[int], *, mesh: Mesh, schedule: str, microbatches: int
) -> ParallelPlan:
    """Return the plan whose stages begin at `starts`, everything stored as in data parallelism."""
    config = OpConfig.zero(0, axes=len(mesh.axes), over=())
    stages = tuple(
        StagePlan((*(BlockPlan(name, config) for name in blocks[a:b]), BlockPlan("", config)))
        for a, b in itertools.pairwise([*starts, len(blocks)])
    )
    return ParallelPlan(mesh, stages, schedule=schedule, num_microbatches=microbatches)


def weights_of(module: nn.Module, blocks: Sequence[str]) -> list[float]:
    """Return the elements of the parameters of each block, (blocks,)."""
    return [
        float(sum(p.numel() for p in module.get_submodule(name).parameters())) for name in blocks
    ]


@torch.no_grad()
def check_blocks(module: nn.Module, blocks: Sequence[str]) -> None:
    """Raise ValueError where parameters are outside of the blocks."""
    outside = [
        name
        for name, _ in module.named_parameters()
        if not any(name.startswith(f"{b}.") for b in blocks)
    ]
    if outside:
        raise ValueError(f"parameters outside of all blocks: {', '.join(outside)}")


Iteration = Callable[[], object]


def iterations(
    engine: Engine,
    optimizer: Optimizer,
    batch: Any,
    loss: Callable[..., Any],
    *,
    accumulate: int = 1,
) -> tuple[Iteration, Iteration]:
    """Return two functions: one iteration without flush, and the drain after the last one.

    An iteration takes in `batch` once more, and updates with the minibatch that comes back, if that
    is the last one of `accumulate`. `engine` has its plan applied; `loss(module, batch)` is a step.
    """
    engine.attach_optimizers([optimizer])
    run = engine.continuous

    def iterate() -> None:
        completes = run.minibatches % accumulate == accumulate - 1
        finish(
            run.advance(
                batch, loss, weight=1 / accumulate, completes=completes, accumulate=accumulate
            )
        )

    def finish(result: BackwardResult) -> None:
        if result.completes:
            with run.update(result):
                optimizer.step()
            optimizer.zero_grad()

    def end() -> None:
        for result in run.drain():
            finish(result)

    return iterate, end

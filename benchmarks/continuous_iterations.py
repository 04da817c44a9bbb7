"""The loop of a pipeline that never flushes on one minibatch, for benchmarks that time it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer

from lightning_topt.execution.engine import Engine
from lightning_topt.execution.pipeline.continuous_run import BackwardResult

Iteration = Callable[[], object]


def iterations(
    engine: Engine, optimizer: Optimizer, batch: Any, loss: Callable[..., Any]
) -> tuple[Iteration, Iteration]:
    """Return what takes in `batch` once more and updates with the minibatch that comes back, and
    what waits for the rest.

    `engine` has its plan applied; `loss(module, batch)` is a step.
    """
    engine.attach_optimizers([optimizer])
    run = engine.continuous

    def finish(turn: BackwardResult) -> None:
        if turn.minibatch is not None:
            with run.update(turn):
                optimizer.step()
            optimizer.zero_grad()

    def end() -> None:
        for turn in run.drain():
            finish(turn)

    return lambda: finish(run.advance(batch, loss)), end

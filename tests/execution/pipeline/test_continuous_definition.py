"""Ranks of a continuous pipeline against the pipeline by its definition: rules and optimizers,
all parameters, the losses of all minibatches.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_topt.execution.engine import Engine
from lightning_topt.execution.pipeline.pipeline_run import Example
from lightning_topt.graph.mesh_axes import Axis, Mesh
from lightning_topt.graph.op_config import OpConfig
from lightning_topt.plan.parallel_plan import BlockPlan, ParallelPlan, StagePlan
from tests.launch import run_ranks
from tests.weight_prediction.test_simulators import (
    assert_equal_training,
    by_definition,
    make_batches,
    make_optimizer,
    make_stages,
    rate,
)

# Each rule, and each optimizer with rules of either kind. All pairs:
# tests/weight_prediction/test_simulators.py.
OF_THREE = [("Adam", "multistep"), ("SGD", "stash"), ("Adam", "spectrain")]
OF_FOUR = [*(("SGD", "none"), ("Adam", "stash")), *(("AdamW", "pipeoptim"), ("NAdam", "nesterov"))]


class Job(NamedTuple):
    """A training on so many ranks."""

    ranks: int
    optimizer: str
    rule: str
    lag_per_hop: int = 1
    accumulate: int = 1

    @property
    def plan(self) -> ParallelPlan:
        config = OpConfig.zero(0, axes=1, over=())
        stages = tuple(
            StagePlan(
                (BlockPlan(str(s), config), BlockPlan("", config))
                if s == 0
                else (BlockPlan(str(s), config),)
            )
            for s in range(self.ranks)
        )
        schedule = "continuous" if self.lag_per_hop == 1 else "continuous_overlapped"
        return ParallelPlan(
            Mesh((Axis("pipeline", self.ranks),)), stages, schedule=schedule, prediction=self.rule
        )


JOBS = [
    *(Job(3, *case) for case in OF_THREE),
    *(Job(4, *case) for case in OF_FOUR),
    Job(4, "AdamW", "two_versions", accumulate=6, lag_per_hop=2),
    Job(4, "AdamW", "multistep", accumulate=3),
    Job(3, "SGD", "spectrain", lag_per_hop=2),
]


def loss_of(model: Any, batch: Any) -> Tensor:
    return F.mse_loss(model(batch[0]), batch[1])


def train(job: Job) -> tuple[dict[str, Tensor], list[float]]:
    model, batches = make_stages(job.ranks), make_batches()
    engine = Engine(job.plan, model, device=torch.device("cpu"))
    engine.apply(example=Example(loss_of, batches[0]))
    optimizer = make_optimizer(job.optimizer, list(model.named_parameters()))
    engine.attach_optimizers([optimizer])
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    run, losses = engine.continuous, {}

    def finish(result: Any) -> None:
        losses.update({index: loss.item() for index, loss in result.losses.items()})
        if result.minibatch is not None and result.completes:
            run.clip_norm(result, 1.0)
            with run.update(result):
                optimizer.step()
            optimizer.zero_grad()

    for index, batch in enumerate(batches):
        completes = (index + 1) % job.accumulate == 0 or index + 1 == len(batches)
        sizes = {"accumulate": job.accumulate, "remaining": len(batches) - 1 - index}
        finish(run.advance(batch, loss_of, weight=1 / job.accumulate, completes=completes, **sizes))
        scheduler.step()
    for result in run.drain():
        finish(result)
    state = {name: value.clone() for name, value in engine.module_state().items()}
    engine.release()
    return state, [losses[index] for index in range(len(batches))]


def train_all(rank: int, jobs: list[Job]) -> list[tuple[dict[str, Tensor], list[float]]]:
    return [train(job) for job in jobs]


@pytest.fixture(scope="module")
def trained() -> dict[Job, tuple[dict[str, Tensor], list[float]]]:
    found = {}
    for size in (3, 4):
        jobs = [job for job in JOBS if job.ranks == size]
        ranks = run_ranks(train_all, size, jobs, timeout_seconds=240)
        for index, job in enumerate(jobs):
            # all know the losses
            assert all(of_rank[index][1] == ranks[0][index][1] for of_rank in ranks)
            found[job] = ranks[0][index]
    return found


@pytest.mark.parametrize("job", JOBS, ids=lambda job: "-".join(map(str, job)))
def test_ranks_compute_what_the_definition_says(
    job: Job, trained: dict[Job, tuple[dict[str, Tensor], list[float]]]
) -> None:
    state, losses = trained[job]
    model: nn.Sequential = make_stages(job.ranks)
    model.load_state_dict(state)
    sizes = {"lag_per_hop": job.lag_per_hop, "accumulate": job.accumulate}
    assert_equal_training(
        (model, losses), by_definition(job.optimizer, job.rule, job.ranks, **sizes)
    )

"""A plan with a tensor axis from `topt plan` is verified, and trains as one process does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from torch.utils.data import DataLoader, DistributedSampler

from lightning_topt.demo import ByteGPT, ByteSequences
from lightning_topt.plan.parallel_plan import ParallelPlan
from tests.cli.test_main import TINY
from tests.forked_command import finished
from tests.forked_command import forked_topt as topt
from tests.plugins.trainer_ranks import make_trainer, mean_over_ranks, on_ranks, topt_trainer

CLUSTER = ["cluster=local_cpu", "data.batch_size=4"]
PLANNED = ["mesh={tensor:2}", "strategy.objective=memory"]


class Losses(Callback):
    """The loss of every step."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_train_batch_end(
        self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.seen.append(mean_over_ranks(outputs["loss"]))


def model() -> ByteGPT:
    torch.manual_seed(0)
    return ByteGPT(num_layers=2, hidden=32, num_heads=2, seq_len=32, warmup_steps=1)


def data() -> ByteSequences:
    return ByteSequences(bytes(range(256)) * 8, 32)


def fit(rank: int, plan: Path) -> list[float]:
    losses = Losses()
    topt_trainer(str(plan), callbacks=[losses], max_epochs=1).fit(
        model(), DataLoader(data(), batch_size=4)
    )
    return losses.seen


def test_a_plan_with_a_tensor_axis_is_verified_and_trains_as_one_process_does(
    tmp_path: Path,
) -> None:
    path = tmp_path / "plan" / "plan.yaml"
    finished(
        topt("plan", *TINY, *CLUSTER, *PLANNED, f"hydra.run.dir={path.parent}", folder=tmp_path)
    )
    plan = ParallelPlan.load(path)
    assert plan.mesh.names == ("tensor",) and plan.batch_size == 4
    assert all(block.config.parameters for block in plan.blocks if block.block)
    output = finished(topt("verify", *TINY, *CLUSTER, f"plan={path}", folder=tmp_path))
    assert output.strip().endswith("would run")
    alone, samples = Losses(), data()
    order = DistributedSampler(samples, num_replicas=1, rank=0)  # Lightning's order
    make_trainer(callbacks=[alone]).fit(model(), DataLoader(samples, batch_size=4, sampler=order))
    assert len(alone.seen) == 16 and alone.seen[-1] < alone.seen[0]
    for losses in on_ranks(fit, path):
        assert losses == pytest.approx(alone.seen, rel=1e-4)

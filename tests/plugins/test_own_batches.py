"""What a rank needs to run the batch of another one: a step that leaves nothing behind."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import lightning as L
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_topt import AutoParallelStrategy
from lightning_topt.costs.cluster import Cluster, Device, Link
from lightning_topt.plan.choose import NoPlanFitsError
from lightning_topt.plugins.plan_request import PlanRequest
from lightning_topt.plugins.planning import trace_step
from lightning_topt.plugins.requirements import OWN_BATCHES, why_not
from tests.models import MLP
from tests.plugins.trainer_ranks import make_trainer, on_ranks, topt_trainer


class Ranked(MLP):
    def training_step(self, batch: Tensor) -> Tensor:
        self.note()
        return super().training_step(batch)

    def note(self) -> None:
        if self.global_rank == 0:
            self.net(torch.zeros(4, 16))


class Writing(MLP):
    def training_step(self, batch: Tensor) -> Tensor:
        self.logger.log_metrics({})
        return super().training_step(batch)


logger = logging.getLogger(__name__)


class Noting(MLP):
    """Writes with a logger of Python, which each rank has."""

    def training_step(self, batch: Tensor) -> Tensor:
        logger.info("a step")
        return super().training_step(batch)


class ReadsValues(Ranked):
    """Runs on real tensors, for it reads a value."""

    def training_step(self, batch: Tensor) -> Tensor:
        loss = super().training_step(batch)
        return loss * 2 if loss.item() > 0 else loss


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (MLP(), None),
        (Ranked(), "reads global_rank"),
        (ReadsValues(), "reads global_rank"),
        (Writing(), "uses logger"),
        (Noting(), None),
    ],
)
def test_steps_that_would_differ_on_other_ranks(
    module: L.LightningModule, reason: str | None, tmp_path: Path
) -> None:
    """What a step reads is seen while it is traced."""
    trainer = make_trainer(logger=CSVLogger(tmp_path))
    trainer.strategy.connect(module)
    found = why_not(trace_step(PlanRequest(), trainer, torch.zeros(4, 16)), OWN_BATCHES)
    assert found is None if reason is None else reason in (found or "")


class Deep(MLP):
    """Eight equal layers: the smallest plan splits them over ranks, inside or between them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.net = nn.Sequential(
            *(nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(8))
        )


def needed_and_run(rank: int, nodes: int, width: int) -> tuple[str, str]:
    """The error where nothing fits, and the plan that runs under the limit which it names."""
    device = Device("core", 2**33, {"float32": 3e9}, 8e9, 3e-6)
    cluster = Cluster(
        "toy", device, 2 // nodes, nodes, Link(1e-5, 1e9), Link(1e-5, 1e9), backend="gloo"
    )

    def fit(limit: str) -> L.Trainer:
        trainer = topt_trainer(
            options={"cluster": cluster, "memory_limit": limit}, limit_train_batches=2
        )
        trainer.fit(Deep(width), DataLoader(torch.zeros(16, width), batch_size=4))
        return trainer

    with pytest.raises(RuntimeError if rank else NoPlanFitsError) as caught:
        fit("1KiB")
    number, unit = re.findall(r"The smallest needs (\S+) (\w+)", str(caught.value))[0]
    strategy = fit(f"{float(number) + 0.01}{unit}").strategy  # the number is rounded
    assert isinstance(strategy, AutoParallelStrategy) and strategy.parallel_plan is not None
    return str(caught.value), strategy.parallel_plan.summary()


@pytest.mark.parametrize(
    ("nodes", "width", "kind"), [(1, 64, "data 1 x tensor 2"), (2, 640, "offload")]
)
def test_the_error_names_the_smallest_plan_of_any_kind_and_that_one_runs(
    nodes: int, width: int, kind: str
) -> None:
    (error, summary), _ = on_ranks(needed_and_run, nodes, width)
    assert kind in error.partition("Set memory_limit")[0] and kind in summary

"""Pipelines whose ranks bring a batch each: where they are found, checkpoints, steps that cannot be
cut.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from lightning_topt.costs.cluster import Link
from lightning_topt.plan.parallel_plan import ParallelPlan
from lightning_topt.plugins.requirements import SEARCHED_STAGES, why_not
from lightning_topt.plugins.searched_plan import TracedStep, why_not_cut
from tests.models import GPT
from tests.plugins.test_group_steps import (
    CLIPPED,
    FAST,
    Case,
    Wordless,
    check,
    cluster,
    staged_plan,
)
from tests.plugins.trainer_ranks import loader, on_ranks, topt_trainer

EXACT: dict[str, Any] = {"relative": 1e-6, "batches": Wordless}
SLOW = Link(1e-5, 1e6)


@pytest.mark.parametrize(
    ("case", "summary", "reason"),
    [
        (
            Case(2, options={"cluster": cluster(1, 2, SLOW)}, width=64, **EXACT),
            "2 stages",
            "the model is cut into stages",
        ),
        (
            Case(4, None, CLIPPED, {"cluster": cluster(1, 4, SLOW)}, 64, **EXACT),
            "pipeline 2 x data 2, 2 stages",
            "the model is cut into stages",
        ),
        (
            Case(2, options={"cluster": cluster(1, 2, FAST)}, **EXACT),
            "5 x DDP",
            "As fast as any plan",
        ),
    ],
)
def test_pipelines_are_found_where_they_are_best(case: Case, summary: str, reason: str) -> None:
    found = check(case)
    assert found["planned"][1] == "search"
    assert summary in found["planned"][0] and reason in found["planned"][2]
    assert found["plan"].get("own_batches", False) == ("stages" in summary)


class Unnumbered(GPT):
    """Takes no index."""

    def __init__(self) -> None:
        super().__init__(width=16, heads=2)
        self.losses: list[float] = []

    def training_step(self, batch: Any) -> Any:
        return super().training_step(batch, 0)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(outputs["loss"].item())

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", super().training_step(batch, 0), sync_dist=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2, eps=1e-4)


class Averaging(Unnumbered):
    """Keeps a mean that steps change."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(()))

    def training_step(self, batch: Any) -> Any:
        self.mean.mul_(0.9)
        return super().training_step(batch)


class Warming(Unnumbered):
    """Another step would call other modules."""

    def training_step(self, batch: Any) -> Any:
        return super().training_step(batch) * min(1, self.global_step)


class Branching(Unnumbered):
    def training_step(self, batch: Any) -> Any:
        factor = random.choice([1, 1])
        return super().training_step(batch) * factor


class Valued(Unnumbered):
    def training_step(self, batch: Any) -> Any:
        return super().training_step(batch) * int(batch[0].sum() >= 0)


def reasons(rank: int) -> dict[str, Any]:
    found = {}
    for module in (Unnumbered(), Averaging(), Branching(), Valued()):
        trainer = topt_trainer()
        module.trainer, module._trainer = trainer, trainer
        trainer.strategy.connect(module)
        plan = ParallelPlan.from_dict(staged_plan(1))
        found[type(module).__name__] = why_not_cut(trainer, next(iter(loader(4))), plan)
    warming = Warming()
    warming.trainer, warming._trainer = trainer, trainer
    trainer.strategy.connect(warming)
    step = TracedStep.of(trainer, next(iter(loader(4))))
    found["Warming"] = why_not(step.fit(trainer.strategy.request), SEARCHED_STAGES)
    return found


def test_steps_that_cannot_be_cut_are_seen_before_they_run() -> None:
    for found in on_ranks(reasons):
        assert found["Unnumbered"] is None
        assert "change the buffer 'mean'" in found["Averaging"]
        assert "draws numbers of Python" in found["Branching"]
        assert "reads values of its batch" in found["Valued"]
        assert "reads global_step" in found["Warming"]

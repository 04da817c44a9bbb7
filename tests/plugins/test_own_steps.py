"""Optimizers that ask their closure as they like, or communicate: as ``ddp``, or refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_topt import AutoParallelStrategy, ParallelOptimizerStep
from lightning_topt.optim.update_rule import UnsplittableOptimizer
from tests.plugins.test_pipeline_fits import cluster
from tests.plugins.trainer_ranks import OwnShare, RecordingGPT, make_trainer, on_ranks


class Plain(torch.optim.Optimizer):
    """Gradient descent; subclasses ask the closure in other ways."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @property
    def trained(self) -> list[Tensor]:
        return [p for group in self.param_groups for p in group["params"] if p.grad is not None]

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else torch.enable_grad()(closure)()
        self.update()
        return loss

    def update(self) -> None:
        for parameter in self.trained:
            parameter -= 0.1 * parameter.grad


class ByLoss(Plain):
    """Needs its closure."""

    @torch.no_grad()
    def step(self, closure: Any) -> Any:
        self.loss = torch.enable_grad()(closure)()
        self.update()
        return self.loss


class Sharpness(Plain):
    """Asks twice, the second time at parameters moved by the norm of all gradients; without a
    closure it is plain.
    """

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            loss, trained = torch.enable_grad()(closure)(), self.trained
            norm = torch.stack([p.grad.norm() for p in trained]).norm()
            moves = [0.05 * p.grad / norm for p in trained]
            torch._foreach_add_(trained, moves)
            torch.enable_grad()(closure)()
            torch._foreach_sub_(trained, moves)
        self.update()
        return loss


class Normalised(Plain):
    def update(self) -> None:
        norm = torch.stack([p.grad.norm() for p in self.trained]).norm()
        for parameter in self.trained:
            parameter -= 0.1 * parameter.grad / norm


class Gathered(Plain):
    """Shares its work by itself: each rank updates every other parameter and sends it."""

    def update(self) -> None:
        for index, parameter in enumerate(self.trained):
            owner = index % dist.get_world_size()
            if owner == dist.get_rank():
                parameter -= 0.1 * parameter.grad
            dist.broadcast(parameter.data, owner)


KINDS: dict[str, Any] = {
    "LBFGS": lambda parameters: torch.optim.LBFGS(parameters, lr=0.1, max_iter=3),
    **{kind.__name__: kind for kind in (ByLoss, Sharpness, Normalised, Gathered)},
}


class Stepped(RecordingGPT):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def configure_optimizers(self) -> Any:
        return KINDS[self.kind](self.parameters())


def fit(rank: int, kind: str, plan: str | None) -> list[float]:
    torch.manual_seed(0)
    module, strategy = (
        Stepped(kind),
        "ddp" if plan in ("ddp", "shared") else AutoParallelStrategy(plan=plan, cluster=cluster(2)),
    )
    callbacks = [ParallelOptimizerStep(always=True)] if plan == "shared" else []
    make_trainer(strategy, devices=2, limit_train_batches=3, callbacks=callbacks).fit(
        module, OwnShare(8)
    )
    return module.losses


def fits(rank: int, kind: str, plans: tuple[str | None, ...]) -> list[list[float]]:
    return [fit(rank, kind, plan) for plan in ("ddp", *plans)]


EQUAL: list[tuple[str, tuple[str | None, ...]]] = [
    ("ByLoss", (None, "zero1", "zero3", "shared")),
    ("Sharpness", (None, "zero3")),
    ("Normalised", (None, "zero2")),
    ("Gathered", (None,)),
    ("LBFGS", (None,)),
]


@pytest.mark.parametrize(("kind", "plans"), EQUAL)
def test_steps_that_are_those_of_ddp(kind: str, plans: tuple[str | None, ...]) -> None:
    for expected, *found in on_ranks(fits, kind, plans):
        for losses in found:
            assert losses == pytest.approx(expected, rel=1e-5)


def refused(rank: int, kind: str, plan: str) -> tuple[bool, str, int]:
    module = Stepped(kind)
    strategy = "ddp" if plan == "shared" else AutoParallelStrategy(plan=plan, cluster=cluster(2))
    callbacks = [ParallelOptimizerStep(always=True)] if plan == "shared" else []
    trainer = make_trainer(strategy, devices=2, callbacks=callbacks)
    with pytest.raises(ValueError) as caught:
        trainer.fit(module, OwnShare(8))
    return isinstance(caught.value, UnsplittableOptimizer), str(caught.value), trainer.global_step


REFUSED = [
    *(("LBFGS", plan, "LBFGS") for plan in ("zero3", "shared")),
    *(("Sharpness", plan, "several times per step") for plan in ("zero1", "shared")),
    ("Normalised", "pipeline", "depends on which others"),
    ("Gathered", "zero2", "shared between ranks already"),
]


@pytest.mark.parametrize(("kind", "plan", "says"), REFUSED)
def test_steps_that_are_refused_by_name(kind: str, plan: str, says: str) -> None:
    for is_unsplittable, message, steps in on_ranks(refused, kind, plan):
        assert is_unsplittable and kind in message and says in message
        assert "plan" in message or "Leave" in message
        assert steps == 0

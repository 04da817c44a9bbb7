"""Averages of weights by Lightning's callbacks: under sharded plans as under ddp, and resumed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import (
    EMAWeightAveraging,
    StochasticWeightAveraging,
    WeightAveraging,
)
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_topt import AutoParallelStrategy
from tests.plugins.trainer_ranks import (
    OwnShare,
    RecordingGPT,
    SaveAfterEpoch,
    make_trainer,
    on_ranks,
    once_on_ranks,
)

EPOCHS = 4


class Averaged(RecordingGPT):
    """Has rows that two ranks cannot share evenly, and a batch norm where that is wanted."""

    def __init__(self, norm: bool) -> None:
        torch.manual_seed(0)
        super().__init__(vocab=33)
        self.batch_norm = nn.BatchNorm1d(33) if norm else nn.Identity()
        self.validated: list[float] = []

    def forward(self, tokens: Tensor) -> Tensor:
        logits = super().forward(tokens)
        return self.batch_norm(logits.flatten(0, 1)).view_as(logits)  # type: ignore[no-any-return]

    def on_validation_epoch_end(self) -> None:
        self.validated.append(float(self.trainer.callback_metrics.get("val_loss", 0.0)))


AVERAGES: dict[str, Any] = {
    "ema": lambda: EMAWeightAveraging(decay=0.8, update_every_n_steps=2),
    "means": lambda: WeightAveraging(use_buffers=False),
    "swa": lambda: StochasticWeightAveraging(
        swa_lrs=5e-3, swa_epoch_start=2, annealing_epochs=1, device=None
    ),
}


def fit(
    plan: str | None, kind: str, norm: bool, *, epochs: int = EPOCHS, path: str | None = None
) -> tuple[Averaged, Any, Any]:
    strategy = DDPStrategy() if plan is None else AutoParallelStrategy(plan=plan)
    averages, module = AVERAGES[kind](), Averaged(norm)
    trainer = make_trainer(
        strategy, devices=dist.get_world_size(), max_epochs=epochs, callbacks=[averages]
    )
    share = OwnShare(8, length=16)
    trainer.fit(module, share, share, ckpt_path=path, weights_only=False)
    return module, averages, trainer


def kept(averages: Any) -> dict[str, Tensor]:
    found: dict[str, Tensor] = averages._average_model.state_dict()
    assert not any(isinstance(value, DTensor) for value in found.values())
    return found


def fitted(rank: int, plan: str | None, kind: str, norm: bool) -> Any:
    module, averages, _ = fit(plan, kind, norm)
    return module.losses, module.validated, module.state_dict(), kept(averages)


# SWA goes through the data once more for the statistics of a batch norm.
CASES = [*((kind, "zero3", False) for kind in ("ema", "means", "swa")), ("swa", "zero2", True)]


@pytest.mark.parametrize(("kind", "plan", "norm"), CASES)
def test_averages_are_those_of_ddp(kind: str, plan: str, norm: bool) -> None:
    ddp = once_on_ranks(fitted, None, kind, norm)
    for expected, found in zip(ddp, on_ranks(fitted, plan, kind, norm), strict=True):
        assert len(expected[0]) >= 8
        for values, own in zip(expected[:2], found[:2], strict=True):
            assert own == pytest.approx(values, rel=1e-4)
        for state, own in zip(expected[2:], found[2:], strict=True):
            assert_equal(own, state)


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=5e-6, msg=name)


def resumed(rank: int, kind: str, plans: tuple[str, str], path: str) -> Any:
    first, second = plans
    trainer = make_trainer(
        AutoParallelStrategy(plan=first),
        devices=2,
        max_epochs=EPOCHS,
        callbacks=[AVERAGES[kind](), SaveAfterEpoch(path, 2)],
    )
    share = OwnShare(8, length=16)
    trainer.fit(Averaged(False), share, share)
    module, averages, _ = fit(second, kind, False, path=path)
    return module.losses, module.state_dict(), kept(averages)


@pytest.mark.parametrize(
    ("kind", "plans"), [("ema", ("ddp", "zero3")), ("swa", ("zero3", "zero2"))]
)
def test_averages_are_saved_and_resumed_under_other_plans(
    kind: str, plans: tuple[str, str], tmp_path: Path
) -> None:
    straight = once_on_ranks(fitted, None, kind, False)
    found = on_ranks(resumed, kind, plans, str(tmp_path / "c.ckpt"))
    for (losses, _, *expected), (own, *states) in zip(straight, found, strict=True):
        assert own == pytest.approx(losses[6:], rel=1e-4) and own
        for state, values in zip(expected, states, strict=True):
            assert_equal(values, state)

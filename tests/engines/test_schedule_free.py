"""`schedulefree`: weights of training and of evaluation, under plans as under ddp."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor

from lightning_topt import AutoParallelStrategy
from tests.plugins.trainer_ranks import OwnShare, RecordingGPT, make_trainer, on_ranks

schedulefree = pytest.importorskip("schedulefree", reason="no schedulefree")


class Free(RecordingGPT):
    """Averages by its optimizer, which goes to evaluation and back."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(vocab=33)
        self.validated: list[float] = []

    def configure_optimizers(self) -> Any:
        return schedulefree.AdamWScheduleFree(self.parameters(), lr=1e-2, warmup_steps=2, eps=1e-4)

    def on_train_epoch_start(self) -> None:
        self.optimizers().train()

    def on_validation_start(self) -> None:
        self.optimizers().eval()

    def on_validation_end(self) -> None:
        self.optimizers().train()
        self.validated.append(float(self.trainer.callback_metrics["val_loss"]))

    def on_train_end(self) -> None:
        self.optimizers().eval()


Result = tuple[list[float], list[float], dict[str, Tensor]]


def fit(plan: str | None, path: str | None = None, epochs: int = 2) -> tuple[Result, Any]:
    strategy = DDPStrategy() if plan is None else AutoParallelStrategy(plan=plan)
    module, share = Free(), OwnShare(8, length=24)
    trainer = make_trainer(strategy, devices=2, max_epochs=epochs, num_sanity_val_steps=0)
    trainer.fit(module, share, share, ckpt_path=path, weights_only=False)
    return (module.losses, module.validated, module.state_dict()), trainer


def beside_ddp(rank: int, plan: str, folder: str) -> Any:
    expected, _ = fit(None)
    try:
        return expected, fit(plan)[0]
    except ValueError as error:
        return expected, str(error)


@pytest.mark.parametrize("plan", ["ddp", "zero2", "zero3"])
def test_schedule_free(plan: str, tmp_path: Path) -> None:
    for expected, found in on_ranks(beside_ddp, plan, str(tmp_path)):
        assert not isinstance(found, str), found
        assert len(expected[0]) == 6 and len(expected[1]) == 2
        assert found[0] == pytest.approx(expected[0], rel=1e-5)
        assert found[1] == pytest.approx(expected[1], rel=1e-5)
        for name, value in expected[2].items():
            torch.testing.assert_close(found[2][name], value, rtol=1e-4, atol=5e-6, msg=name)


def test_a_shared_step_is_refused(tmp_path: Path) -> None:
    for _, found in on_ranks(beside_ddp, "zero1", str(tmp_path)):
        assert "moves parameters in train() and eval()" in found

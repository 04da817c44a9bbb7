"""Fits on CUDA: where the host waits in steady steps; random states after the warm-up."""

from __future__ import annotations

import collections
import warnings
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch

import lightning_topt
from lightning_topt import AutoParallelStrategy
from lightning_topt.execution.memory import warm_up
from tests.models import GPT
from tests.plugins.trainer_ranks import loader

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
PACKAGE = Path(lightning_topt.__file__).parent
WARM_STEPS = 4
# Waits that a steady step may have, by file of the package: why.
ALLOWED: dict[str, str] = {}


class Waits(L.Callback):
    """Counts the lines at which torch made the host wait in steady steps."""

    def __init__(self) -> None:
        self.lines: collections.Counter[str] = collections.Counter()
        self.steps = 0
        self._caught: Any = None

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step >= WARM_STEPS:
            self._caught = warnings.catch_warnings(record=True)
            self._found = self._caught.__enter__()
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")

    def on_train_batch_end(self, *_: Any) -> None:
        if self._caught is None:
            return
        torch.cuda.set_sync_debug_mode("default")
        self._caught.__exit__(None, None, None)
        self._caught, self.steps = None, self.steps + 1
        self.lines.update(
            f"{each.filename}:{each.lineno}"
            for each in self._found
            if "synchroniz" in str(each.message)
        )


def fit(strategy: Any, module: L.LightningModule, *callbacks: L.Callback) -> None:
    trainer = L.Trainer(
        accelerator="cuda",
        devices=1,
        strategy=strategy,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        max_epochs=1,
        callbacks=list(callbacks),
    )
    trainer.fit(module, loader(8))


def waits_under(strategy: Any) -> collections.Counter[str]:
    waits = Waits()
    torch.manual_seed(0)
    fit(strategy, GPT(layers=3), waits)
    assert waits.steps >= 3, "no steady step was seen"
    return waits.lines


def test_a_wait_is_seen() -> None:
    class Waiting(GPT):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            assert loss.item() > 0  # the host waits here
            return loss

    waits = Waits()
    fit("auto", Waiting(layers=1), waits)
    assert any(line.startswith(__file__) for line in waits.lines)


@pytest.mark.parametrize("plan", ["ddp", "zero1", "zero3", "ddp+recompute"])
def test_steady_steps_wait_no_more_than_under_ddp(plan: str) -> None:
    theirs = waits_under("ddp")
    ours = waits_under(AutoParallelStrategy(plan=plan))
    more = {
        line: count
        for line, count in (ours - theirs).items()
        if not any(line.startswith(str(PACKAGE / name)) for name in ALLOWED)
    }
    assert not more


def test_warm_up_leaves_random_states() -> None:
    device = torch.device("cuda", 0)
    torch.cuda.manual_seed(3)
    before = torch.get_rng_state(), torch.cuda.get_rng_state(device)
    warm_up(device)
    after = torch.get_rng_state(), torch.cuda.get_rng_state(device)
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))

"""Fits that are over before a plan was made."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_topt import AutoParallelStrategy, read_sharded_checkpoint
from tests.plugins.trainer_ranks import RecordingGPT, loader, make_trainer, on_ranks


def saved_after_one_step(rank: int, path: Path, form: str) -> Any:
    strategy = AutoParallelStrategy(checkpoint=form)
    trainer, module = make_trainer(strategy, devices=2, limit_train_batches=1), RecordingGPT()
    trainer.fit(module, loader(4))
    trainer.save_checkpoint(path)
    return {name: value.clone() for name, value in module.state_dict().items()}


def resumed(rank: int, path: Path) -> tuple[int, list[float]]:
    trainer = make_trainer(AutoParallelStrategy(), devices=2, limit_train_batches=1, max_epochs=2)
    module = RecordingGPT()
    trainer.fit(module, loader(4), ckpt_path=path)
    return trainer.global_step, module.losses


@pytest.mark.parametrize("form", ["full", "sharded"])
def test_their_checkpoints_are_saved_and_resumed(form: str, tmp_path: Path) -> None:
    path = tmp_path / "saved.ckpt"
    states = on_ranks(saved_after_one_step, path, form)
    if form == "full":
        saved = torch.load(path, weights_only=False)["state_dict"]
    else:
        saved = read_sharded_checkpoint(path)["state_dict"]
    assert saved.keys() == states[0].keys()
    for name, value in saved.items():
        torch.testing.assert_close(value, states[0][name], rtol=0, atol=0)
    for step, losses in on_ranks(resumed, path):
        assert (step, len(losses)) == (2, 1)

"""Fits whose checkpoints are in file systems of fsspec: ``memory://``, ``file://``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_topt import (
    CompressedDDPStrategy,
    LocalStepsStrategy,
    newest_checkpoint,
    read_sharded_checkpoint,
)
from lightning_topt.execution.checkpoint_files import holds_shards
from tests.plugins.trainer_ranks import RecordingGPT, loader, make_trainer, on_ranks, topt_trainer


class Trained(RecordingGPT):
    def train_dataloader(self) -> Any:
        return loader(8)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log("score", float(self.global_step))
        return loss


def fit(form: str, folder: str, **options: Any) -> Any:
    torch.manual_seed(0)
    keep = ModelCheckpoint(
        folder,
        filename="{step}",
        every_n_train_steps=1,
        save_top_k=2,
        monitor="score",
        mode="max",
        save_last=True,
    )
    trainer = topt_trainer(
        "zero2",
        options={"checkpoint": form, **options},
        max_steps=3,
        callbacks=[keep],
        enable_checkpointing=True,
    )
    module = Trained()
    trainer.fit(module, ckpt_path=newest_checkpoint(folder))
    return trainer, module


def in_memory(rank: int) -> Any:
    files, found = fsspec.filesystem("memory"), {}
    for form, kind in (("full", LocalStepsStrategy), ("sharded", CompressedDDPStrategy)):
        folder = f"memory://{form}"
        trainer, module = fit(form, folder)
        names = sorted(path.rpartition("/")[2] for path in files.ls(folder, detail=False))
        middle = f"{folder}/step=2.ckpt"
        files.copy(middle, f"memory://{form}-again/last.ckpt", recursive=True)
        resumed = fit(form, f"memory://{form}-again")[1].losses
        other = make_trainer(kind(), devices=1, max_steps=3)  # reads it too
        other.fit(Trained(), ckpt_path=middle, weights_only=False)
        trainer.save_checkpoint(f"{folder}/after.ckpt")
        found[form] = names, module.losses, resumed, holds_shards(middle), other.global_step
    return found


def test_in_memory() -> None:
    (found,) = on_ranks(in_memory, world_size=1)
    for form, (names, losses, resumed, is_folder, other) in found.items():
        assert names == ["last.ckpt", "step=2.ckpt", "step=3.ckpt"]
        assert resumed == pytest.approx(losses[2:], rel=1e-5) and other == 3
        assert is_folder == (form == "sharded")


def by_url(rank: int, folder: Path) -> Any:
    trainer = topt_trainer("zero2", options={"checkpoint": "sharded"}, max_steps=1)
    trainer.fit(Trained())
    url = f"file://{folder}/by-url.ckpt"
    trainer.save_checkpoint(url)
    torch.manual_seed(1)
    again = topt_trainer("zero3", max_steps=2, max_epochs=2)
    again.fit(Trained(), ckpt_path=url)
    return holds_shards(folder / "by-url.ckpt"), again.global_step


def test_a_url_of_the_disk_is_its_path(tmp_path: Path) -> None:
    assert on_ranks(by_url, tmp_path) == [(True, 2), (True, 2)]
    assert read_sharded_checkpoint(f"file://{tmp_path}/by-url.ckpt")["global_step"] == 1

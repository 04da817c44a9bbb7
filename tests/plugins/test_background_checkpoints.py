"""``async_checkpoint=True``: a fit goes on while a checkpoint of one of its steps is written."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO

from lightning_topt import AutoParallelStrategy, read_sharded_checkpoint
from lightning_topt.execution import sharded_checkpoint
from tests.plugins.trainer_ranks import OwnShare, RecordingGPT, make_trainer, on_new_ranks

WRITTEN = 2  # the step whose checkpoint is compared


class Trained(RecordingGPT):
    def train_dataloader(self) -> Any:
        return OwnShare(8, length=64)


class Opens(Callback):
    """Lets what is written go on only after step 4, so that training has gone on before."""

    def __init__(self, gate: threading.Event) -> None:
        self.gate, self.at = gate, 4

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == self.at:
            self.gate.set()


def fit(folder: Path, form: str, *callbacks: Any, plugin: bool = False, **options: Any) -> Any:
    torch.manual_seed(0)
    keep = ModelCheckpoint(
        folder, filename="{step}", every_n_train_steps=WRITTEN, save_top_k=-1, monitor=None
    )
    plugins = [AsyncCheckpointIO()] if plugin else None
    trainer = make_trainer(
        AutoParallelStrategy(plan="zero2", checkpoint=form, **options),
        devices=2,
        max_steps=6,
        callbacks=[keep, *callbacks],
        enable_checkpointing=True,
        plugins=plugins,
    )
    module = Trained()
    trainer.fit(module)
    return trainer, module


def read(path: Path) -> Any:
    if path.is_dir():
        return read_sharded_checkpoint(path)
    return torch.load(path, weights_only=True)


def goes_on_while_it_is_written(rank: int, folder: Path) -> list[str]:
    unequal = []
    for form in ("full", "sharded"):
        fit(folder / form, form)
        for way in ({"async_checkpoint": True}, {"plugin": True}):
            gate = threading.Event()
            write, save = sharded_checkpoint.write_state, TorchCheckpointIO.save_checkpoint

            def waits(*args: Any, own: Any = write, gate: Any = gate, **kwargs: Any) -> None:
                assert gate.wait(120)
                own(*args, **kwargs)

            place = folder / f"{form}, {next(iter(way))}"
            with pytest.MonkeyPatch.context() as patch:
                if form == "sharded":
                    patch.setattr(sharded_checkpoint, "write_state", waits)
                else:

                    def saves(*args: Any, own: Any = save, gate: Any = gate, **kw: Any) -> None:
                        assert gate.wait(120)
                        own(*args, **kw)

                    patch.setattr(TorchCheckpointIO, "save_checkpoint", saves)
                fit(place, form, Opens(gate), **way)
            for step in (2, 4, 6):
                name = f"step={step}.ckpt"
                one, other = read(place / name), read(folder / form / name)
                if one["global_step"] != step:
                    unequal.append(f"{place} {name}")
                torch.testing.assert_close(one["state_dict"], dict(other["state_dict"]))
                torch.testing.assert_close(
                    one["optimizer_states"][0]["state"], other["optimizer_states"][0]["state"]
                )
    return unequal


def test_a_fit_goes_on_while_a_checkpoint_is_written(tmp_path: Path) -> None:
    for unequal in on_new_ranks(goes_on_while_it_is_written, tmp_path):
        assert not unequal


def fails(rank: int, folder: Path) -> dict[str, Any]:
    """Saves fail on rank 0, from the first or from the last one on: who is told of it, and what is
    left.
    """
    said: dict[str, Any] = {}
    write = sharded_checkpoint.write_state
    for name, first in (("first", 1), ("last", 3)):
        count = 0

        def broken(path: Any, *args: Any, first: int = first, **kwargs: Any) -> None:
            nonlocal count
            count += 1
            if count < first:
                write(path, *args, **kwargs)
            elif rank == 0:
                raise OSError(28, "No space left on device")

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sharded_checkpoint, "write_state", broken)
            with pytest.raises(RuntimeError) as error:
                fit(folder / name, "sharded", async_checkpoint=True)
        said[name] = str(error.value), count
    return said


def test_errors_are_raised_by_the_next_save_or_at_the_end_on_all_ranks(tmp_path: Path) -> None:
    for rank, said in enumerate(on_new_ranks(fails, tmp_path)):
        for text, _ in said.values():
            assert "could not be written in the background" in text
            assert ("No space left" in text) == (rank == 0)
        assert said["first"][1] < 3 and said["last"][1] == 3
    assert sorted(path.name for path in (tmp_path / "last").iterdir()) == [
        "step=2.ckpt",
        "step=4.ckpt",
    ]


def keeps_one(rank: int, folder: Path) -> Any:
    """With one checkpoint kept, the one before goes once the next is whole."""
    seen: list[list[str]] = []
    write = sharded_checkpoint.write_state

    def looks(path: Any, *args: Any, **kwargs: Any) -> None:
        if rank == 0:
            seen.append(sorted(each.name for each in folder.iterdir() if "=" in each.name))
        if len(seen) == 3:
            raise OSError("disk full")
        write(path, *args, **kwargs)

    torch.manual_seed(0)
    keep = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=2, save_top_k=1)
    trainer = make_trainer(
        AutoParallelStrategy(plan="zero2", checkpoint="sharded", async_checkpoint=True),
        devices=1,
        max_steps=6,
        callbacks=[keep],
        enable_checkpointing=True,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sharded_checkpoint, "write_state", looks)
        folder.mkdir(exist_ok=True)
        with pytest.raises(RuntimeError, match="disk full"):
            trainer.fit(Trained())
    return seen, sorted(path.name for path in folder.iterdir())


def test_the_checkpoint_before_goes_once_the_next_is_whole(tmp_path: Path) -> None:
    ((seen, left),) = on_new_ranks(keeps_one, tmp_path / "kept", world_size=1)
    assert seen == [[], ["step=2.ckpt"], ["step=4.ckpt"]] and left == ["step=4.ckpt"]


def after_a_fit(rank: int, folder: Path) -> Any:
    trainer, _ = fit(folder, "sharded", async_checkpoint=True)
    trainer.save_checkpoint(folder / "after.ckpt")  # there when this returns
    return read(folder / "after.ckpt")["global_step"]


def test_a_save_after_the_fit_is_there_at_once(tmp_path: Path) -> None:
    assert on_new_ranks(after_a_fit, tmp_path) == [6, 6]


def test_wrong_options_are_refused() -> None:
    with pytest.raises(ValueError, match="async_checkpoint is True or False, not 3"):
        AutoParallelStrategy(async_checkpoint=3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="leave out async_checkpoint"):
        AutoParallelStrategy(async_checkpoint=True, elastic=True)

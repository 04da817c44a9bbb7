"""The files of a checkpoint folder: damage is found, they run no code, and a kill at any moment of
a save leaves a complete checkpoint.
"""

from __future__ import annotations

import json
import os
import pickle
import random
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_topt.execution.sharded_checkpoint import (
    MANIFEST,
    REST,
    _digest,
    holds_shards,
    open_sharded,
    read_sharded_checkpoint,
    save_sharded,
)
from tests.launch import run_ranks


def save(path: Path, step: int) -> None:
    """Save a module and an optimizer's state, each filled with `step`."""
    module = {"weight": torch.full((4, 8), float(step)), "extra": step}
    optimizer = {
        "state": {
            0: {"exp_avg": torch.full((4, 8), float(step), dtype=torch.bfloat16), "step": step}
        },
        "param_groups": [{"lr": 0.1, "params": [0]}],
    }
    save_sharded(path, module=module, optimizers=[optimizer], rest={"step": step})


def step_of(path: Path) -> int:
    """Return the step of a checkpoint, all of whose values must be of that step."""
    checkpoint = read_sharded_checkpoint(path)
    step, (optimizer,) = checkpoint["step"], checkpoint["optimizer_states"]
    state = checkpoint["state_dict"]
    assert state["extra"] == step and optimizer["state"][0]["step"] == step
    assert (state["weight"] == step).all() and (optimizer["state"][0]["exp_avg"] == step).all()
    return int(step)


def files_of(path: Path) -> Path:
    """Return the folder of the files of a checkpoint."""
    return path / json.loads((path / MANIFEST).read_text())["content"]["folder"]


def save_one(rank: int, path: Path) -> None:
    save(path, 7)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("saved") / "step=7.ckpt"
    run_ranks(save_one, 1, path)
    return path


@pytest.fixture
def copied(saved: Path, tmp_path: Path) -> Path:
    return shutil.copytree(saved, tmp_path / "copied.ckpt")


@pytest.fixture
def without_manifest(saved: Path, tmp_path: Path) -> Path:
    """The form of releases before."""
    return shutil.copytree(files_of(saved), tmp_path / "before.ckpt")


def test_folders_of_releases_before_are_read(saved: Path, without_manifest: Path) -> None:
    assert holds_shards(without_manifest)
    assert step_of(saved) == step_of(without_manifest) == 7


class RunsCode:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def test_metadata_runs_no_code(without_manifest: Path, tmp_path: Path) -> None:
    victim, file = tmp_path / "victim", without_manifest / ".metadata"
    pickle.loads(pickle.dumps(RunsCode(victim)))
    victim.rmdir()  # where it is unpickled, it is made
    metadata = pickle.loads(file.read_bytes())
    for hostile in (RunsCode(victim), metadata):
        metadata.planner_data = RunsCode(victim)
        file.write_bytes(pickle.dumps(hostile))
        for reads in (read_sharded_checkpoint, open_sharded):  # by a user, and in training
            with pytest.raises(ValueError, match=r"\.metadata of the checkpoint .* run code"):
                reads(without_manifest)
            assert not victim.exists()


def test_a_manifest_names_no_folder_elsewhere(copied: Path, tmp_path: Path) -> None:
    files_of(copied).rename(tmp_path / files_of(copied).name)
    content = json.loads((copied / MANIFEST).read_text())["content"]
    for elsewhere, says in ((f"../{content['folder']}", "is missing"), ("..", "is damaged")):
        content["folder"] = elsewhere
        text = json.dumps({"content": content, "checksum": _digest(content)})
        (copied / MANIFEST).write_text(text)
        with pytest.raises(ValueError, match=says):
            read_sharded_checkpoint(copied)


def test_a_flipped_bit_is_found_in_every_file(copied: Path) -> None:
    draw = random.Random(0)
    files = [path for path in copied.rglob("*") if path.is_file()]
    assert {path.name for path in files} == {MANIFEST, REST, ".metadata", "__0_0.distcp"}
    for file in files:
        whole = file.read_bytes()
        for _ in range(40):
            damaged = bytearray(whole)
            damaged[draw.randrange(len(whole))] ^= 1 << draw.randrange(8)
            file.write_bytes(damaged)
            with pytest.raises(ValueError, match=f"^{file.name} of the checkpoint .* is damaged"):
                read_sharded_checkpoint(copied)
        file.write_bytes(whole[:-1])
        with pytest.raises(ValueError, match=f"^{file.name} of the checkpoint .* is damaged"):
            read_sharded_checkpoint(copied)
        file.write_bytes(whole)
    assert step_of(copied) == 7
    (files_of(copied) / "__0_0.distcp").unlink()
    with pytest.raises(ValueError, match=r"^__0_0.distcp of the checkpoint .* is missing"):
        read_sharded_checkpoint(copied)


def test_a_newer_form_is_refused(copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_topt.execution.sharded_checkpoint._VERSION", 0)
    with pytest.raises(ValueError, match="written by a newer release"):
        read_sharded_checkpoint(copied)


class Killed(BaseException):
    pass


def killed_at_every_operation(rank: int, folder: Path, saved: Path) -> dict[str, list[int]]:
    """Save over each kind of thing, killed at the first, second, ... operation on a file.

    Returns the steps that were read after each kill; 0 where there is nothing to be read.
    """
    left = -1

    def count(event: str, args: tuple[Any, ...]) -> None:
        nonlocal left
        changes = event in ("os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.open", "open")
        if left < 0 or not changes or not str(args[0]).startswith(str(folder)):
            return
        left -= 1
        if left < 0:
            raise Killed

    sys.addaudithook(count)
    found: dict[str, list[int]] = {}
    before = {"this form": saved, "the form before": files_of(saved), "nothing": None}
    for name, form in before.items():
        target = folder / name / "last.ckpt"
        found[name] = []
        for operation in range(1000):
            shutil.rmtree(target.parent, ignore_errors=True)
            target.parent.mkdir()
            if form is not None:
                shutil.copytree(form, target)
            left = operation
            try:
                save(target, 8)
            # torch.distributed.checkpoint makes another error of it
            except BaseException:
                assert left < 0
            finished, left = left >= 0, -1
            found[name].append(step_of(target) if holds_shards(target) else 0)
            save(target, 9)
            assert step_of(target) == 9
            assert [path.name for path in target.parent.iterdir()] == ["last.ckpt"]
            assert len([*target.iterdir()]) == 2
            if finished:
                break
    return found


def test_a_kill_at_any_moment_of_a_save_loses_nothing(saved: Path, tmp_path: Path) -> None:
    (found,) = run_ranks(killed_at_every_operation, 1, tmp_path, saved)
    for name, steps in found.items():
        before = 0 if name == "nothing" else 7
        kept = steps.index(8)
        assert kept > 5, "no operation was seen"
        assert steps == [before] * kept + [8] * (len(steps) - kept)

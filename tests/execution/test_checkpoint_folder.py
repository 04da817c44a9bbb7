"""The files of a checkpoint folder: damage is named, they run no code, and a kill at any moment of
a save leaves a complete checkpoint.
"""

from __future__ import annotations

import json
import os
import pickle
import shutil
import sys
from pathlib import Path, PurePath
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from lightning_topt.execution import checkpoint_files
from lightning_topt.execution.checkpoint_files import (
    _VALUES,
    MANIFEST,
    REST,
    ShardFolder,
    _digest,
    beside,
    holds_shards,
)
from lightning_topt.execution.sharded_checkpoint import (
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


class RunsCode:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def test_metadata_runs_no_code(copied: Path, tmp_path: Path) -> None:
    victim, file = tmp_path / "victim", files_of(copied) / ".metadata"
    pickle.loads(pickle.dumps(RunsCode(victim)))
    victim.rmdir()  # where it is unpickled, it is made
    metadata = pickle.loads(file.read_bytes())
    for hostile in (RunsCode(victim), metadata):
        metadata.planner_data = RunsCode(victim)
        file.write_bytes(pickle.dumps(hostile))
        for reads in (read_sharded_checkpoint, open_sharded):  # by a user, and in training
            with pytest.raises(ValueError, match=r"\.metadata of the checkpoint .* run code"):
                reads(copied)
            assert not victim.exists()


def test_metadata_of_any_release_of_torch_is_read(copied: Path, monkeypatch: Any) -> None:
    file, state_of = files_of(copied) / ".metadata", TensorProperties.__getstate__
    metadata = ShardFolder.at(copied).metadata
    for more in ((), ((1,),)):  # from torch 2.15 on strides, too
        state = lambda of, more=more: (*state_of(of)[:5], *more)  # noqa: E731
        monkeypatch.setattr(TensorProperties, "__getstate__", state)
        file.write_bytes(pickle.dumps(metadata))
        assert step_of(copied) == 7


def text(value: str) -> bytes:
    """Return a pickle's opcodes for a text."""
    return pickle.BINUNICODE + len(value).to_bytes(4, "little") + value.encode()


def test_metadata_has_no_tensor_turn_into_bytes(copied: Path, tmp_path: Path) -> None:
    # torch unpickles what is no tensor. This makes `module.weight` one when it is read again: it
    # puts that name into the cache of a function, from which a key is taken.
    folder, victim = files_of(copied), tmp_path / "victim"
    torch.save({"sharded_checkpoint": {"module": {}, "optimizers": []}}, folder / REST)
    torch.save(RunsCode(victim), folder / "__0_0.distcp")
    size = (folder / "__0_0.distcp").stat().st_size
    shape = torch.Size([2])
    tensor = TensorStorageMetadata(
        TensorProperties(dtype=torch.float32), shape, [ChunkStorageMetadata(torch.Size([0]), shape)]
    )
    metadata = Metadata(
        {"module.weight": tensor, torch.strided: BytesStorageMetadata()},  # type: ignore[dict-item]
        storage_data={MetadataIndex("module.weight"): _StorageInfo("__0_0.distcp", 0, size)},
    )
    puts = b"N}" + text("cache") + b"}" + text("torch.strided") + text("module.weight") + b"ss\x86b"
    whole = pickle.dumps(metadata, 2)
    hostile = whole[:-1] + b"ctorch.serialization\n_get_layout\n" + puts + b"0."
    before = dict(torch.serialization._get_layout.cache)  # type: ignore[attr-defined]
    for content in (hostile, whole):
        (folder / ".metadata").write_bytes(content)
        with pytest.raises(ValueError, match=r"^\.metadata of the checkpoint .* cannot be read"):
            read_sharded_checkpoint(copied)
        assert not victim.exists()
    assert torch.serialization._get_layout.cache == before  # type: ignore[attr-defined]


def test_metadata_sets_no_attributes(copied: Path) -> None:
    file = files_of(copied) / ".metadata"
    whole = pickle.dumps(ShardFolder.at(copied).metadata)
    sets = text("name") + text("same.distcp")
    for module, name in [*_VALUES, ("pathlib", "PurePath"), ("pathlib", "PurePosixPath")]:
        named = f"c{module}\n{name}\n".encode()
        for state in (b"}" + sets + b"s", b"N}" + sets + b"s\x86"):
            file.write_bytes(b"\x80\x03" + named + state + b"b0" + whole[2:])
            with pytest.raises(ValueError, match="cannot be read: it sets attributes of"):
                _ = ShardFolder.at(copied).metadata
    assert PurePath("../other").name == "other"
    file.write_bytes(whole)
    assert step_of(copied) == 7


def test_a_manifest_names_no_folder_elsewhere(copied: Path, tmp_path: Path) -> None:
    files_of(copied).rename(tmp_path / files_of(copied).name)
    assert not holds_shards(copied)  # a file of this name alone may be anybody's
    (copied / "shards.other").mkdir()
    content = json.loads((copied / MANIFEST).read_text())["content"]
    for elsewhere, says in ((f"../{content['folder']}", "is missing"), ("..", "is damaged")):
        content["folder"] = elsewhere
        text = json.dumps({"content": content, "checksum": _digest(content)})
        (copied / MANIFEST).write_text(text)
        with pytest.raises(ValueError, match=says):
            read_sharded_checkpoint(copied)


def test_what_is_damaged_or_missing_is_named(copied: Path) -> None:
    for file in [path for path in copied.rglob("*") if path.is_file()]:
        whole = file.read_bytes()
        file.write_bytes(whole[: len(whole) // 2])
        with pytest.raises(ValueError, match=r"damaged|cannot be read") as error:
            read_sharded_checkpoint(copied)
        assert str(error.value).startswith(f"{file.name} of the checkpoint")
        file.write_bytes(whole)
    assert step_of(copied) == 7
    (files_of(copied) / "__0_0.distcp").unlink()
    with pytest.raises(ValueError, match=r"^__0_0.distcp of the checkpoint .* is missing"):
        read_sharded_checkpoint(copied)


def test_a_newer_form_is_refused(copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_topt.execution.checkpoint_files._VERSION", 0)
    with pytest.raises(ValueError, match="written by a newer release"):
        read_sharded_checkpoint(copied)


class Killed(BaseException):
    pass


def found_at(target: Path) -> int:
    """Return the step of the checkpoint at `target`, 0 where there is none.

    A file has its step, a folder of files is of step 7.
    """
    if target.is_file():
        return int(target.read_text())
    if any((target / name).exists() for name in "ab"):
        return 7 * all((target / name).exists() for name in "ab")
    return step_of(target) if holds_shards(target) else 0


def killed_at_every_operation(rank: int, folder: Path, saved: Path) -> dict[str, list[int]]:
    """Save over each kind of thing, killed at the first, second, ... operation on a file.

    Returns the steps that were read after each kill.
    """
    left = -1

    def count(event: str, args: tuple[Any, ...]) -> None:
        nonlocal left
        in_folders = event in ("os.rename", "os.remove", "os.rmdir", "os.mkdir")
        if left < 0 or not (in_folders or event == "open"):
            return
        place = str(args[0])
        if in_folders and args[-1] >= 0:  # in `shutil.rmtree`: of an open folder
            place = os.path.join(os.readlink(f"/proc/self/fd/{args[-1]}"), place)
        if not place.startswith(str(folder)):
            return
        left -= 1
        if left < 0:
            raise Killed

    sys.addaudithook(count)
    found: dict[str, list[int]] = {}
    forms = {
        "this form, with what killed saves left": saved,
        "nothing": None,
        "a file": None,
        "a folder of files": None,
    }
    for name, form in forms.items():
        target = folder / name / "last.ckpt"
        found[name] = []
        for operation in range(1000):
            shutil.rmtree(target.parent, ignore_errors=True)
            target.parent.mkdir()
            if form is not None:
                shutil.copytree(form, target)
            elif name == "a file":
                target.write_text("7")
            elif name == "a folder of files":
                target.mkdir()
                for file in "ab":
                    (target / file).touch()
            if "left" in name:
                (target / "shards.left").mkdir()
                (target / "shards.left" / REST).touch()
                for left_over in beside(target):
                    shutil.copytree(form or target, left_over)
            left = operation
            try:
                save(target, 8)
            # torch.distributed.checkpoint makes another error of it
            except BaseException:
                assert left < 0
            finished, left = left >= 0, -1
            found[name].append(found_at(target))
            save(target, 9)
            assert step_of(target) == 9
            assert {path.name for path in target.parent.iterdir()} <= {"last.ckpt"}
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
        # Where a checkpoint replaces something else, nothing has its name for a moment.
        between = [0] if "file" in name else []
        assert steps == [before] * (kept - len(between)) + between + [8] * (len(steps) - kept)
        assert len(steps) - kept > (4 if name.startswith("th") else 0)  # kills while tidying up


def fails_on_rank_0(rank: int, path: Path) -> list[str]:
    """What a rank is told of saves that fail on rank 0, or that it writes elsewhere."""
    target, said = path / "last.ckpt", []
    save(target, 7)

    def full(content: Any, file: Path) -> None:
        raise OSError(28, "No space left on device")

    def broken(file: Path) -> None:
        raise PermissionError(file)

    tensors = {"weight": torch.ones(2) * rank}
    apart = {
        "path": path / f"of rank {rank}" / "last.ckpt",
        "module": {f"of {rank}": torch.ones(2)},
    }
    for options in (
        {"path": target, "module": tensors, "save_rest": full},
        {"path": path / "last.ckpt" / MANIFEST / "last.ckpt", "module": tensors},
        apart,
    ):
        with pytest.raises((OSError, RuntimeError)) as error:
            save_sharded(**{"optimizers": [], "rest": {}, **options})  # type: ignore[arg-type]
        said.append(str(error.value))
        assert step_of(target) == 7
    # What cannot be tidied up stays.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint_files, "_remove", broken)
        save(target, 8)
    return [*said, str(step_of(target))]


def test_errors_of_rank_0_are_raised_on_all_ranks(tmp_path: Path) -> None:
    for found in run_ranks(fails_on_rank_0, 2, tmp_path):
        full, no_folder, apart, step = found
        assert "No space left on device" in full and "Not a directory" in no_folder
        assert "all ranks must see one file system" in apart and step == "8"

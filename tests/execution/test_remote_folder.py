"""Checkpoint folders in a file system of fsspec: written, damaged, and cut off at every request."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from lightning_topt.execution.checkpoint_files import (
    MANIFEST,
    holds_shards,
    newest_checkpoint,
    place_of,
    remove_folder,
    replace_by_file,
)
from lightning_topt.execution.sharded_checkpoint import is_folder, read_sharded_checkpoint
from tests.execution.test_checkpoint_folder import save, step_of
from tests.launch import run_ranks

TARGET = "memory://run/last.ckpt"


class Killed(BaseException):
    pass


def cut_off_at_every_request(rank: int) -> dict[str, list[int]]:
    """Save over each kind of thing; the file system fails at the first, second, ... request, and
    does nothing from then on. Returns the steps that were read after each.
    """
    left, own = -1, {}
    files = fsspec.filesystem("memory")

    def counted(name: str) -> Any:
        def request(self: Any, *args: Any, **kwargs: Any) -> Any:
            nonlocal left
            changes = name != "open" or "w" in (args[1] if len(args) > 1 else kwargs["mode"])
            if left >= 0 and changes:
                left -= 1
                if left < 0:
                    left = 0  # the next ones too
                    raise Killed
            return own[name](self, *args, **kwargs)

        return request

    for name in ("open", "rm", "rm_file", "cp_file", "mkdir"):
        own[name] = getattr(MemoryFileSystem, name)
    found: dict[str, list[int]] = {}
    with pytest.MonkeyPatch.context() as patch:
        for name in own:
            patch.setattr(MemoryFileSystem, name, counted(name))
        for form in ("nothing", "a checkpoint, and what a killed save left"):
            found[form] = []
            for request in range(100):
                if files.exists("/run"):
                    files.rm("/run", recursive=True)
                if form != "nothing":
                    save(TARGET, 7)  # type: ignore[arg-type]
                if "left" in form:
                    files.pipe("/run/last.ckpt/shards.left/part", b"part")
                left = request
                try:
                    save(TARGET, 8)  # type: ignore[arg-type]
                except BaseException:
                    assert left == 0
                finished, left = left > 0, -1
                found[form].append(step_of(TARGET) if holds_shards(TARGET) else 0)  # type: ignore[arg-type]
                save(TARGET, 9)  # type: ignore[arg-type]
                assert step_of(TARGET) == 9  # type: ignore[arg-type]
                assert len(files.ls("/run/last.ckpt")) == 2
                if finished:
                    break
    return found


def test_a_save_that_is_cut_off_loses_nothing() -> None:
    (found,) = run_ranks(cut_off_at_every_request, 1)
    for form, steps in found.items():
        before, kept = (0 if form == "nothing" else 7), steps.index(8)
        assert kept > 3, "no request was seen"
        assert steps == [before] * kept + [8] * (len(steps) - kept)


def damaged_and_removed(rank: int) -> list[str]:
    files, said = fsspec.filesystem("memory"), []
    save(TARGET, 7)  # type: ignore[arg-type]
    assert newest_checkpoint("memory://run") == TARGET
    for path in files.find("/run/last.ckpt"):
        whole = files.cat_file(path)
        files.pipe_file(path, whole[: len(whole) // 2])
        with pytest.raises(ValueError, match=r"damaged|cannot be read") as error:
            read_sharded_checkpoint(TARGET)
        said.append(str(error.value))
        files.pipe_file(path, whole)
    assert step_of(TARGET) == 7  # type: ignore[arg-type]
    # a file takes its place, as in an object store, where both may have one name
    replace_by_file(TARGET, lambda path: None)
    assert not files.find("/run") and not is_folder(TARGET)
    save(TARGET, 8)  # type: ignore[arg-type]
    files.rm("/run/last.ckpt/" + MANIFEST)
    assert newest_checkpoint("memory://run") is None
    with pytest.raises(FileNotFoundError, match="cut off"):
        is_folder(TARGET)
    remove_folder(TARGET)
    assert not files.exists("/run/last.ckpt")
    return said


def test_damage_is_named_and_folders_are_removed() -> None:
    (said,) = run_ranks(damaged_and_removed, 1)
    names = {text.partition(" ")[0] for text in said}
    assert len(said) == 4 and names == {".metadata", "__0_0.distcp", MANIFEST, "trainer_state.pt"}


def test_the_newest_on_a_disk(tmp_path: Path) -> None:
    assert newest_checkpoint(tmp_path) is None
    for name, seconds in (("last.ckpt", 10), ("last-v1.ckpt", 30), ("other.ckpt", 40)):
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (seconds, seconds))
    (tmp_path / "last-v2.ckpt").mkdir()  # no checkpoint
    assert newest_checkpoint(tmp_path) == str(tmp_path / "last-v1.ckpt")
    assert newest_checkpoint(f"file://{tmp_path}", "") == str(tmp_path / "other.ckpt")


def test_paths_of_the_disk_and_others() -> None:
    assert place_of("file:///tmp/a.ckpt") == Path("/tmp/a.ckpt") == place_of("/tmp/a.ckpt")
    remote = place_of("memory://run/a.ckpt/")
    assert str(remote / "b") == "memory://run/a.ckpt/b" and (remote / "b").parent == remote

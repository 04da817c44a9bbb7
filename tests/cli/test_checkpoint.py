"""`topt checkpoint`: inspect, verify and convert, on folders and plain files."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf

from lightning_topt.cli import checkpoint
from tests.execution.test_checkpoint_folder import files_of, save
from tests.launch import run_ranks


def save_one(rank: int, path: Path) -> None:
    save(path, 7)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("saved") / "step=7.ckpt"
    run_ranks(save_one, 2, path)
    return path


def topt(action: str, path: Any, **options: Any) -> None:
    config = {"action": action, "path": str(path), "to": None, "trusted": False, **options}
    checkpoint.run(OmegaConf.create(config))


def test_inspect_says_what_is_in_it(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    topt("inspect", saved)
    shown = capsys.readouterr().out
    assert "form: sharded" in shown and "plan: none" in shown
    module, optimizer = (
        next(line for line in shown.splitlines() if name in line)
        for name in ("module", "optimizer 0")
    )
    assert "32" in module and "128 B" in module and "64 B" in optimizer


def test_verify_finds_damage(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    topt("verify", saved)
    assert "whole" in capsys.readouterr().out
    copied = shutil.copytree(saved, tmp_path / "copied.ckpt")
    for file in files_of(copied).iterdir():
        content = file.read_bytes()
        if not content:  # of a rank that had nothing to write
            continue
        flipped = bytearray(content)
        numbers = content.find(torch.full((4,), 7.0).numpy().tobytes())
        flipped[numbers] ^= 1
        file.write_bytes(content[: len(content) // 2] if numbers < 0 else flipped)
        with pytest.raises(SystemExit) as end:
            topt("verify", copied)
        shown = capsys.readouterr().out.replace("\n", " ")
        assert end.value.code == 1 and "problem" in shown
        file.write_bytes(content)
    topt("verify", copied)


@pytest.mark.parametrize("form", ["ckpt", "safetensors"])
def test_convert_writes_one_file(
    saved: Path, tmp_path: Path, form: str, capsys: pytest.CaptureFixture[str]
) -> None:
    to = tmp_path / f"whole.{form}"
    topt("convert", saved, to=str(to))
    if form == "ckpt":
        plain = torch.load(to, weights_only=True)
        assert plain["step"] == 7 and plain["state_dict"]["extra"] == 7
        assert (plain["optimizer_states"][0]["state"][0]["exp_avg"] == 7).all()
        weights = plain["state_dict"]
        topt("verify", to)
        topt("inspect", to)
        assert "form: a plain file" in capsys.readouterr().out
    else:
        load_file = pytest.importorskip("safetensors.torch", reason="no safetensors").load_file
        weights = load_file(to)
        assert {*weights} == {"weight"}
        assert "left out: extra, " in capsys.readouterr().out
    assert torch.equal(weights["weight"], torch.full((4, 8), 7.0))
    assert [path.name for path in tmp_path.iterdir()] == [to.name]
    with pytest.raises(ValueError, match="is there already"):
        topt("convert", saved, to=str(to))


def test_damage_of_a_plain_file_is_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "a.ckpt"
    torch.save({"state_dict": {"a": torch.ones(1000)}}, path)
    content = bytearray(path.read_bytes())
    content[content.index(torch.ones(4).numpy().tobytes()) + 2000] ^= 1
    path.write_bytes(content)
    with pytest.raises(SystemExit):
        topt("verify", path)
    assert "is damaged" in " ".join(capsys.readouterr().out.split())


def test_wrong_use_ends_with_a_sentence(saved: Path, tmp_path: Path) -> None:
    for action, path, options, says in (
        ("inspect", tmp_path / "no.ckpt", {}, "there is no checkpoint at"),
        ("convert", saved, {}, "to=<file> belongs to convert"),
        ("verify", saved, {"to": "a"}, "to=<file> belongs to convert"),
        ("mend", saved, {}, "action is one of"),
    ):
        with pytest.raises(ValueError, match=says):
            topt(action, path, **options)

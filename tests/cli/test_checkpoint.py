"""`topt checkpoint`: sharded checkpoints become safetensors, with one tensor in memory."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lightning_topt.cli import main
from lightning_topt.execution.sharded_checkpoint import save_sharded
from lightning_topt.execution.states import rows_of_tensor
from lightning_topt.techniques.weight_files import stored_weights
from tests.launch import run_ranks

SHAPE, LAYERS = (1024, 2048), 24  # 8 MiB each
PEAK = """
import sys, threading, time
from pathlib import Path
import lightning_topt.cli.checkpoint
def anonymous():
    status = Path("/proc/self/status").read_text()
    return int(status.partition("RssAnon:")[2].split()[0]) * 1024
def watch():
    while True:
        peaks[0] = max(peaks[0], anonymous())
        time.sleep(0.001)
before = anonymous()
peaks = [before]
threading.Thread(target=watch, daemon=True).start()
lightning_topt.cli.checkpoint.run(sys.argv[1:])
print(peaks[0] - before)
"""


def save(rank: int, path: Path) -> None:
    half = SHAPE[0] // 2
    rows = range(rank * half, (rank + 1) * half)
    values = {
        f"net.{n}.weight": rows_of_tensor(
            torch.full((half, SHAPE[1]), n + rank / 2), rows=rows, full_shape=SHAPE
        )
        for n in range(LAYERS)
    }
    save_sharded(path, module=values, optimizers=[], rest={})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("checkpoint") / "wide.ckpt"
    run_ranks(save, 2, path)
    return path


def test_one_tensor_is_in_memory(folder: Path) -> None:
    target = folder.with_name("model.safetensors")
    arguments = [str(folder), str(target), "--module", "net"]
    job = [sys.executable, "-c", PEAK, *arguments]
    said = subprocess.run(job, capture_output=True, text=True, check=True).stdout.split()
    assert said[0] == str(target) and int(said[1]) < 60e6, said
    stored = stored_weights(target)
    assert {*stored} == {f"{n}.weight" for n in range(LAYERS)}
    for n in range(LAYERS):
        value = stored[f"{n}.weight"].read()
        assert (value[0] == n).all() and (value[-1] == n + 0.5).all() and value.shape == SHAPE


def test_the_command(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def topt(*arguments: object) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["topt", "checkpoint", *map(str, arguments)])
        try:
            main.run("checkpoint")
        except SystemExit as end:
            return int(end.code or 0), capsys.readouterr().err
        return 0, capsys.readouterr().out

    target = folder.with_name("parts.safetensors")
    code, said = topt(folder, target, "--shard-size", "100MiB")
    assert code == 0 and said.splitlines() == [
        str(folder.with_name(f"parts-{n:05}-of-00002.safetensors")) for n in (1, 2)
    ]
    for arguments, words in (
        ((folder.parent, target), "is not a checkpoint folder"),
        ((folder, "model.bin"), "does not end with .safetensors: give"),
        (
            (folder, target, "--module", "nett"),
            "has no tensors of 'nett', but such as 'net.0.weight'",
        ),
        ((folder, target, "--shard-size", "5 parsec"), "--shard-size: '5 parsec' has the unit"),
        ((folder,), "the following arguments are required: file"),
    ):
        code, said = topt(*arguments)
        assert code == 2 and words in said

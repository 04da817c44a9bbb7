"""The lines and the summary of the GPU report, whatever happens in a part."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmarks.gpu_report.__main__ import Part, run
from benchmarks.gpu_report.reporting import read_lines
from tests.preloaded import preloaded_python

CPU = torch.device("cpu")


def test_a_part_that_does_not_end_is_ended_and_the_next_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mains = {"waits": lambda: time.sleep(600), "works": lambda: None, "fails": lambda: 1 / 0}
    options = SimpleNamespace(device="cpu", quick=True)
    options.results, options.log = tmp_path / "lines.jsonl", tmp_path / "log.txt"
    ends = {}
    for name, main in mains.items():
        monkeypatch.setitem(
            sys.modules, f"benchmarks.gpu_report.{name}", SimpleNamespace(main=main)
        )
        seconds = 0.5 if name == "waits" else 60
        ends[name] = run(Part(0, name, seconds), options, seconds, fork=True)
    assert ends == {
        "waits": "ended at its deadline of 0 s",
        "works": "done",
        "fails": "exit status 1",
    }
    assert "==== part 0: works ====" in options.log.read_text()


def test_the_driver_writes_its_three_files(tmp_path: Path) -> None:
    command = [preloaded_python(), "-m", "benchmarks.gpu_report", f"--out={tmp_path}"]
    job = subprocess.run(
        [*command, "--device=cpu", "--quick", "--only=0", "--seconds=0=100"],
        capture_output=True,
        timeout=200,
    )
    assert job.returncode == 0, job.stderr.decode()[-2000:]
    lines = read_lines(tmp_path / "gpu_report.jsonl")
    assert [line["status"] for line in lines if "status" in line] == ["done"]
    assert {path.name for path in tmp_path.iterdir()} == {
        "gpu_report.jsonl",
        "log.txt",
        "summary.md",
    }

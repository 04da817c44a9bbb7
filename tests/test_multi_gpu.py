"""The parts for several GPUs: what ends a case, and which cases are left."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

import pytest
import torch

from benchmarks.gpu_report.reporting import Report, read_lines
from benchmarks.multi_gpu import hazards
from benchmarks.multi_gpu.job import Job
from tests.launch import free_port, run_ranks, torchrun_environment

CASES = ["works", "hangs", "fails", "works too"]


def do_cases(rank: int, path: Path) -> None:
    job = Job(Report("part", path, torch.device("cpu"), True, 60.0), rank, 2)
    for name in job.left(CASES):
        with job.case(name, seconds=1.0) as row:
            row["known"] = 1
            if name == "hangs" and rank == 1:
                time.sleep(600)
            if name == "fails" and rank == 1:
                raise ValueError("so it does")
            row["sum"] = job.largest(float(rank))


def test_a_case_that_hangs_or_fails_is_a_line_and_the_next_runs_go_on(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    for ends in (True, True, False, False):  # the last has nothing left to do
        with pytest.raises(RuntimeError) if ends else contextlib.nullcontext():
            run_ranks(do_cases, 2, path, timeout_seconds=30)
    lines = read_lines(path)
    rows = {line["name"]: line["known"] + line["sum"] for line in lines if line["kind"] == "row"}
    assert rows == {"works": 2, "works too": 2}
    failures = {line["name"]: line["error"] for line in lines if line["kind"] == "failure"}
    assert failures["hangs, rank 1"] == "TimeoutError: not done in 1 s"
    assert failures["fails, rank 1"] == "ValueError: so it does"
    assert [line["name"] for line in lines if line["kind"] == "begun"] == CASES


def do_hazards(rank: int, path: Path, port: int) -> None:
    os.environ.update(torchrun_environment(rank, 2, port=port))
    hazards.SECONDS = 120.0
    hazards.run(Job(Report("hazards", path, torch.device("cpu"), True, 60.0), rank, 2))


@pytest.mark.thorough
def test_hazards_are_rehearsed_over_gloo(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    run_ranks(do_hazards, 2, path, free_port(), timeout_seconds=250)
    rows = {line["name"]: line for line in read_lines(path) if line["kind"] == "row"}
    equal = {name for name, row in rows.items() if row.get("off_ddp", 1.0) < 1e-5}
    assert equal == {"full card", "recomputed dropout", "complex between stages"}
    assert [row["steps"] for row in rows.values() if "steps" in row] == [3, 3, 8]
    assert rows["topk"]["alone_seconds"] > 0 and (tmp_path / "topk.json").exists()

"""The parts for several GPUs: what ends a case, and which cases are left."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from benchmarks.gpu_report.reporting import Report, read_lines
from benchmarks.multi_gpu.job import Job
from tests.launch import run_ranks

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
    for _ in range(2):
        with pytest.raises(RuntimeError):
            run_ranks(do_cases, 2, path, timeout_seconds=30)
    run_ranks(do_cases, 2, path, timeout_seconds=30)
    run_ranks(do_cases, 2, path, timeout_seconds=30)  # nothing is left
    lines = read_lines(path)
    rows = {line["name"]: line for line in lines if line["kind"] == "row"}
    assert set(rows) == {"works", "works too"}
    assert all(row["known"] == row["sum"] == 1 for row in rows.values())
    failures = {line["name"]: line["error"] for line in lines if line["kind"] == "failure"}
    assert failures["hangs, rank 1"] == "TimeoutError: not done in 1 s"
    assert failures["fails, rank 1"] == "ValueError: so it does"
    assert [line["name"] for line in lines if line["kind"] == "begun"] == CASES

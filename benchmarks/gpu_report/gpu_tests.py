"""Part 1: the tests that need a GPU. Also the pytest plugin that writes each result at once."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.common import ROOT
from benchmarks.gpu_report.reporting import Report, run_part

_VARIABLE = "TOPT_GPU_REPORT"
_WORKERS, _TEST_SECONDS = 4, 50


def run(report: Report) -> None:
    files = [
        str(path.relative_to(ROOT))
        for path in sorted((ROOT / "tests").rglob("test_*.py"))
        if "mark.gpu" in path.read_text()
    ]
    report.note("files", files=files)
    command = [sys.executable, "-u", "-m", "pytest", "-m", "gpu", "-p", __spec__.name]
    command += ["-n", str(_WORKERS), f"--timeout={_TEST_SECONDS}", "--tb=short", "-q", "-rs"]
    command += ["--durations=8", "-p", "no:cacheprovider", *files]
    environment = {**os.environ, _VARIABLE: f"{report.path}", "OMP_NUM_THREADS": "2"}
    job = subprocess.run(command, cwd=ROOT, env=environment, check=False)
    counts: dict[str, int] = {}
    for line in report.rows_written():
        if outcome := line.get("outcome"):
            counts[outcome] = counts.get(outcome, 0) + 1
    report.row("all", outcome=str(counts), exit_status=job.returncode)
    if job.returncode not in (0, 5):
        report.failure("pytest", RuntimeError(f"exit status {job.returncode}, {counts}"))


# ---- the plugin ----------------------------------------------------------------------------------


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Write one line per test, in the process that hears of all of them."""
    if _VARIABLE not in os.environ or "PYTEST_XDIST_WORKER" in os.environ:
        return
    if report.when != "call" and report.outcome == "passed":
        return
    columns: dict[str, Any] = {"outcome": report.outcome, "seconds": round(report.duration, 2)}
    name = report.nodeid.removeprefix("tests/")
    lines = Report("gpu_tests", Path(os.environ[_VARIABLE]), torch.device("cpu"), False, 0.0)
    if report.outcome == "failed":
        text = report.longreprtext.splitlines()
        errors = [line for line in text if line.startswith("E ")]
        message = (errors or text or [""])[0].removeprefix("E ").strip()
        columns["traceback"] = text[-30:]
        lines.write("failure", {"name": name, "error": f"{report.when}: {message}", **columns})
    else:
        lines.write("row", {"name": name, **columns})


def pytest_collectreport(report: pytest.CollectReport) -> None:
    """Write what could not be collected."""
    if _VARIABLE in os.environ and report.outcome == "failed":
        lines = Report("gpu_tests", Path(os.environ[_VARIABLE]), torch.device("cpu"), False, 0.0)
        text = report.longreprtext.splitlines()
        values = {"error": text[-1] if text else "", "traceback": text[-30:]}
        lines.write("failure", {"name": f"collecting {report.nodeid}", **values})


def main() -> None:
    run_part("gpu_tests", run, __doc__)


if __name__ == "__main__":
    main()

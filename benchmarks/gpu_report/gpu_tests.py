"""Part 1: the tests that need a GPU. Also the pytest plugin that writes each result at once."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.common import ROOT
from benchmarks.gpu_report.reporting import Report, processes, run_part

_VARIABLE = "TOPT_GPU_REPORT"
_WORKERS, _TEST_SECONDS = 8, 30


def run(report: Report) -> None:
    files = [
        str(path.relative_to(ROOT))
        for path in sorted((ROOT / "tests").rglob("test_*.py"))
        if "mark.gpu" in path.read_text()
    ]
    report.note("files", files=files)
    context = processes()  # a process that has imported already takes no time to start
    jobs = [
        context.Process(target=_test, args=(files[number::_WORKERS], report))
        for number in range(_WORKERS)
    ]
    for job in jobs:
        job.start()
    for job in jobs:
        job.join(max(0.0, report.left() - 2))
    counts: dict[str, int] = {}
    for line in report.rows_written():
        if outcome := line.get("outcome"):
            counts[outcome] = counts.get(outcome, 0) + 1
    codes = [job.exitcode for job in jobs]
    report.row("all", outcome=str(counts), exit_statuses=str(codes))
    for number, code in enumerate(codes):
        if code not in (0, 1, 5):  # 1: failures, which are lines already
            error = RuntimeError(f"exit status {code} of those of {files[number::_WORKERS]}")
            report.failure("pytest", error)


def _test(files: list[str], report: Report) -> None:
    os.environ |= {_VARIABLE: f"{report.path}", "OMP_NUM_THREADS": "2"}
    arguments = ["-m", "gpu", "-p", __spec__.name, f"--timeout={_TEST_SECONDS}", "--tb=short"]
    arguments += ["-q", "-rs", "--durations=8", "-p", "no:cacheprovider", "-p", "no:xdist", *files]
    code = pytest.main(arguments)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(int(code))


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
    run_part("gpu_tests", run, __doc__, forks=True)


if __name__ == "__main__":
    main()

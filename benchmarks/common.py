"""Shared by all benchmarks: run a measured job elsewhere, and say on which machine it ran.

`run_module` runs a job in a process of its own, `measure_at` with the package of another checkout.
Jobs on several nodes run in `benchmarks.lab`. Pages of results are written to `RESULTS`.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch.optim import Optimizer

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
# an override that finds the models of examples/hugging_face.py
PUBLISHED_MODELS = f"hydra.searchpath=[file://{ROOT / 'examples' / 'conf'}]"
# Options of a Trainer that writes nothing.
QUIET = {
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


class JobFailed(RuntimeError):
    """A job that ended without a result; `steps` it had finished, `output` is what it printed."""

    def __init__(self, message: str, *, steps: int, output: str) -> None:
        super().__init__(message)
        self.steps, self.output = steps, output


def run_gpt(*, timeout: float = 560, **options: Any) -> dict[str, Any]:
    """Run `benchmarks.gpt_run` with ``--key=value`` options, as `run_module` does."""
    return run_module("benchmarks.gpt_run", timeout=timeout, **options)


def run_module(name: str, *flags: str, timeout: float = 560, **options: Any) -> dict[str, Any]:
    """Run a module that writes its result as JSON to ``--out``, here, and return that result.

    Args:
        name: as after ``python -m``.
        flags: arguments before the options, such as ``--worker``.
        timeout: seconds.
        options: ``key=value`` becomes ``--key=value``; None is left out.

    Raises:
        JobFailed: the job ended without a result.
    """
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "result.json"
        arguments = [f"--{k.replace('_', '-')}={v}" for k, v in options.items() if v is not None]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-m", name, *flags, f"--out={out}", *arguments]
        job = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=timeout, check=False
        )
        if job.returncode or not out.exists():
            progress = out.with_suffix(".progress")
            steps = int(progress.read_text()) if progress.exists() else 0
            raise JobFailed(
                f"exit status {job.returncode}", steps=steps, output=job.stdout + job.stderr
            )
        result: dict[str, Any] = json.loads(out.read_text())
        return result


def measure_at(
    checkout: Path, name: str, arguments: Sequence[Any], *, timeout: float | None = None
) -> dict[str, Any]:
    """Return what ``benchmarks.<name>.measure(*arguments)`` finds with `checkout`'s package.

    It runs in a new process. The benchmarks are always those of this folder. Raises TimeoutExpired
    after `timeout` seconds, JobFailed with the output of errors.
    """
    code = (
        "import importlib, json, sys, types; benchmarks = "
        "types.ModuleType('benchmarks');benchmarks.__path__ = [sys.argv[1]]; "
        "sys.modules['benchmarks'] = benchmarks;measure = importlib.import_module('benchmarks.' + "
        "sys.argv[2]).measure;print(json.dumps(measure(*json.loads(sys.argv[3]))))"
    )
    command = [
        sys.executable,
        "-P",
        "-c",
        code,
        str(ROOT / "benchmarks"),
        name,
        json.dumps(arguments),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(checkout)}
    job = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=timeout, check=False
    )
    if job.returncode:
        raise JobFailed(f"exit status {job.returncode}", steps=0, output=job.stdout + job.stderr)
    result: dict[str, Any] = json.loads(job.stdout.splitlines()[-1])
    return result


def machine() -> str:
    """Hardware and versions, one line each."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = {line.split(":")[1].strip() for line in lines if line.startswith("model name")}
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    return "\n".join(
        [
            f"- {os.cpu_count()} x {', '.join(names) or platform.processor()}, {platform.system()} "
            f"{platform.release()}",
            f"- Python {platform.python_version()}, torch {torch.__version__}, lightning "
            f"{version('lightning')}",
            f"- commit {commit.stdout.strip() or 'unknown'}",
        ]
    )


def mib(size: float) -> str:
    """Bytes as MiB."""
    return f"{size / 2**20:.0f}"


def spread(values: Sequence[float], digits: int = 3) -> str:
    """Median and range."""
    low, middle, high = (
        f"{value:.{digits}f}" for value in (min(values), statistics.median(values), max(values))
    )
    return f"{middle} ({low} to {high})"


def measure_update_seconds(optimizers: Iterable[Optimizer], **options: Any) -> dict[str, float]:
    """Return the seconds per element of each parameter's update by name, as `time_updates`."""
    from lightning_topt.costs.optimizer import time_updates  # noqa: PLC0415  (few need it)

    times = time_updates(optimizers, **options)
    return {name: each.seconds for each in times for name in each.names}

"""A random trial of the benchmarks, whose checks see what they are to see."""

from __future__ import annotations

import os
import subprocess

import pytest

from benchmarks.common import ROOT
from tests.preloaded import preloaded_topt

SEED = 12  # resumed inside an epoch on another number of ranks


def said_of(strategy: str) -> str:
    """What the script says of the trial."""
    made = subprocess.run(["unshare", "-m", "-n", "true"], capture_output=True, check=False)
    if made.returncode:
        pytest.skip("namespaces cannot be made here")
    module = ["-m", "benchmarks.robustness.random_trials"]
    job = subprocess.run(
        [preloaded_topt(), *module, f"--seed={SEED}", f"--strategy={strategy}"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=200,
        check=True,
    )
    return job.stdout


def test_a_trial_is_as_one_process() -> None:
    said = said_of("topt")
    assert said.startswith(f"{SEED} ") and said.endswith(" ok\n"), said


def test_what_ddp_repeats_is_found() -> None:
    """A fit of Lightning's own strategy goes on inside an epoch."""
    assert "lost" in said_of("ddp")

"""Every example runs as its docstring says."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.preloaded import preloaded_python

ROOT = Path(__file__).parent.parent
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example(path, tmp_path):
    assert f"python examples/{path.name}" in path.read_text()
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    job = subprocess.run(
        [preloaded_python(), str(path)],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert job.returncode == 0, job.stdout + job.stderr
    assert job.stdout.strip()

"""What `topt plan` imports."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
# read by Lightning and transformers for a few names, and by no plan
UNREAD = ("torchmetrics.functional", "scipy.signal", "scipy.stats", "sklearn", "pandas")
SMALL = (
    *("model.num_layers=3", "model.hidden=64", "model.seq_len=16", "data.max_bytes=40000"),
    *("cluster=a100_8x8", "batch_size=64", "pipeline=false", "tensor=false"),
)
PLANS = """
import atexit, sys
import topt_console
sys.argv = ["topt", *sys.argv[1:]]
atexit.register(lambda: sys.stderr.write("IMPORTED " + " ".join(sys.modules)))
topt_console.main()
"""
LIGHT = """
import sys
from topt_console.light_packages import LightPackages
sys.meta_path.insert(0, LightPackages())
import torchmetrics, scipy.optimize

# a name or two: nothing else is read
from torchmetrics import Metric, MetricCollection, MeanMetric
assert "torchmetrics.functional" not in sys.modules and issubclass(MeanMetric, Metric)
assert scipy.optimize.linear_sum_assignment([[1, 0], [0, 1]])[1].tolist() == [1, 0]
assert "scipy.optimize._minimize" not in sys.modules

# a submodule: the package is read first, and everything is there once
before = torchmetrics
import torchmetrics.classification
assert torchmetrics is before and torchmetrics.Metric is Metric
assert torchmetrics.classification is sys.modules["torchmetrics.classification"]
assert torchmetrics.Accuracy is torchmetrics.classification.Accuracy
assert torchmetrics.MetricCollection is MetricCollection and torchmetrics.MeanMetric is MeanMetric
assert torchmetrics.classification.__spec__.name == "torchmetrics.classification"

# another name, of modules: they are as ever
assert scipy.optimize.minimize_scalar(lambda x: (x - 1) ** 2).x > 0.99
print("done")
"""


def in_python(code: str, *arguments: str, folder: Path) -> tuple[str, str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    job = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert job.returncode == 0, job.stdout + job.stderr
    return job.stdout, job.stderr


def test_a_plan_imports_no_metrics_and_no_scipy(tmp_path: Path) -> None:
    output, errors = in_python(PLANS, "plan", *SMALL, "hydra.run.dir=run", folder=tmp_path)
    errors, _, imported = errors.partition("IMPORTED ")
    names = set(imported.split())
    assert {"torchmetrics", "lightning.pytorch"} <= names
    assert not names & set(UNREAD)
    # nothing is added where the output is no terminal
    assert "..." not in errors and "\r" not in errors + output
    assert (tmp_path / "run" / "plan.yaml").exists()


def test_light_packages_are_read_in_full_where_more_is_asked_of_them(tmp_path: Path) -> None:
    assert in_python(LIGHT, folder=tmp_path)[0] == "done\n"

"""`topt` in an interpreter to which nothing was imported: what it imports, and that it works."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from lightning_topt.plan.parallel_plan import ParallelPlan
from tests.cli.test_main import TINY

ROOT = Path(__file__).parents[2]
# read by Lightning and transformers for a few names, and by no plan
UNREAD = ("torchmetrics.functional", "scipy.signal", "scipy.stats", "sklearn", "pandas")
PROGRAM = """
import os, sys
import topt_console

def topt(*words):
    sys.argv = ["topt", *words]
    topt_console.main()

at = sys.argv.index("train")
plan, train = sys.argv[1:at], sys.argv[at:]
topt(*plan)
sys.stderr.write("IMPORTED " + " ".join(sys.modules) + "\\n")
print("PLANNED", flush=True)
if not (child := os.fork()):
    topt(*train)
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0

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


def test_a_new_interpreter_plans_without_metrics_and_scipy_and_trains_by_the_plan(
    tmp_path: Path,
) -> None:
    """Then light packages are read in full, where more is asked of them."""
    tiny, path = [*TINY, "trainer.devices=1"], tmp_path / "plan" / "plan.yaml"
    plan = ["plan", *tiny, "cluster=local_cpu", "strategy.objective=memory"]
    plan += ["strategy.memory_limit=1GiB", f"hydra.run.dir={path.parent}"]
    train = ["train", *tiny, f"strategy.plan={path}", "trainer.limit_train_batches=8"]
    train += [f"hydra.run.dir={tmp_path}/train"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    job = subprocess.run(
        [sys.executable, "-c", PROGRAM, *plan, *train],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert job.returncode == 0 and job.stdout.endswith("done\n"), job.stdout + job.stderr
    errors, _, imported = job.stderr.partition("IMPORTED ")
    names = set(imported.partition("\n")[0].split())
    assert {"torchmetrics", "lightning.pytorch"} <= names
    assert not names & set(UNREAD)
    # nothing is added where the output is no terminal
    assert "..." not in errors and "\r" not in errors + job.stdout.partition("PLANNED")[0]
    # the fit
    record = json.loads((tmp_path / "train" / "run.json").read_text())
    assert record["plan"]["stages"] == ParallelPlan.load(path).to_dict()["stages"]
    assert record["predicted"]["peak_bytes"] > 0 and record["strategy"] == "AutoParallelStrategy"

"""`topt` as users run it, in copies of this process and in its own: files and exit codes."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
from lightning.pytorch import Callback

from benchmarks.prediction.saved_frontier import frontier_of_json
from lightning_topt.communication import TopK
from lightning_topt.costs.cluster import Cluster
from lightning_topt.plan.choose import TIME_ERROR, TIME_ERROR_SECONDS
from lightning_topt.plan.parallel_plan import ParallelPlan
from tests.forked_command import Ended, finished
from tests.forked_command import forked_topt as topt
from tests.preloaded import preloaded_topt

ROOT = Path(__file__).parents[2]
TINY_GPT = ["model.num_layers=2", "model.hidden=32", "model.num_heads=2", "model.seq_len=32"]
TINY = [*TINY_GPT, "data.max_bytes=40000", "trainer.limit_val_batches=2"]
ALONE = [*TINY, "tensor=false", "pipeline=false"]  # on data axes


def run_topt(*arguments, folder):
    """In a process of its own, whose ranks Lightning starts."""
    return run_python("-m", "lightning_topt.cli.main", *arguments, folder=folder)


def run_python(*arguments, folder):
    command = [preloaded_topt(), *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    environment.pop("HYDRA_FULL_ERROR", None)
    result = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=240
    )
    return Ended(result.returncode, result.stdout + result.stderr)


class RaisesInFit(Callback):
    """What a bug in a user's code looks like to the CLI."""

    def on_train_start(self, trainer, pl_module):
        raise RuntimeError("a bug of the user's")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """One run on two ranks under Lightning's own ddp; several tests look at its files."""
    folder = tmp_path_factory.mktemp("train")
    arguments = [
        "strategy=ddp",
        *TINY,
        "trainer.limit_train_batches=12",
        f"hydra.run.dir={folder}/run",
    ]
    return folder / "run", finished(run_topt("train", *arguments, folder=folder))


def test_train_writes_its_record(trained):
    folder, _ = trained
    record = json.loads((folder / "run.json").read_text())
    assert record["schema_version"] == 1
    assert record["command"][:3] == ["topt", "train", "strategy=ddp"]
    assert record["world_size"] == 2 and record["global_step"] == 12
    assert record["plan"] is None and record["predicted"] is None
    assert record["measured"]["steps"] == 7
    assert record["measured"]["median_step_seconds"] > 0
    assert len(record["measured"]["peak_bytes_per_rank"]) == 2
    assert 4 < record["metrics"]["val_bits_per_byte"] < 9


def test_a_bug_in_user_code_keeps_its_traceback(tmp_path):
    bug = "+callbacks.bug._target_=tests.cli.test_main.RaisesInFit"
    ended = topt("train", "strategy=ddp", "trainer.devices=1", *TINY, bug, folder=tmp_path)
    assert ended.status == 1
    assert "Traceback" in ended.output and "a bug of the user's" in ended.output


def test_plan_writes_the_frontier_and_the_plan(tmp_path):
    output = finished(topt("plan", *TINY, f"hydra.run.dir={tmp_path}/run", folder=tmp_path))
    frontier = json.loads((tmp_path / "run" / "frontier.json").read_text())
    assert frontier["schema_version"] == 5 and frontier["exact"] is True
    assert frontier["capture_seconds"] > 0 and frontier["search_seconds"] > 0
    points = sorted(frontier["points"], key=lambda point: point["peak_bytes"])
    seconds = [point["step_seconds"] for point in points]
    assert seconds == sorted(seconds, reverse=True), "no point is dominated"
    read = frontier_of_json((tmp_path / "run" / "frontier.json").read_text())
    assert all(point.plan.mesh.size == point.devices == 2 for point in read.points)
    uniform = [point.plan for point in read.uniform]
    assert {name for plan in uniform for name in plan.mesh.names} >= {"data", "tensor"}, (
        "both were searched"
    )
    plan = ParallelPlan.load(tmp_path / "run" / "plan.yaml")
    assert (
        plan.reason
        and plan.predicted.step_seconds <= (1 + TIME_ERROR) * min(seconds) + TIME_ERROR_SECONDS
    )
    assert "<html" in (tmp_path / "run" / "frontier.html").read_text()
    assert plan.reason.split()[0] in output


def test_plans_may_compress_gradients_where_the_command_line_allows_it(tmp_path):
    slow = [*ALONE, "cluster=local_cpu", "cluster.intra.bandwidth=10Mb/s"]
    allowed = "strategy.allow={compression: [bf16, {method: topk, density: 0.001}]}"
    output = finished(
        topt("plan", *slow, allowed, f"hydra.run.dir={tmp_path}/plan", folder=tmp_path)
    )
    assert "gradients top-k 0.1 %" in output and "which was allowed" in " ".join(output.split())
    plan = ParallelPlan.load(tmp_path / "plan" / "plan.yaml")
    assert plan.gradient_exchange == TopK(density=0.001, hierarchical=False)
    given = f"strategy.plan={tmp_path}/plan/plan.yaml"
    refused = topt("train", *TINY, given, folder=tmp_path, ranks=2)
    assert refused.status == 2 and "allow='compression'" in refused.output


def test_plans_by_the_time_to_a_loss_are_one_frontier_with_what_they_rest_on(tmp_path):
    slow = [*ALONE, "cluster=local_cpu", "cluster.intra.bandwidth=1Mb/s", "device_counts=[2,4]"]
    slow += ["cluster.devices_per_node=4"]
    asked = ["objective=time_to_loss", "data.batch_size=8", "trainer.max_steps=1000"]
    run = f"hydra.run.dir={tmp_path}/plan"
    output = finished(topt("plan", *slow, *asked, run, folder=tmp_path))
    said = " ".join(output.split())
    assert "time to the loss" in said and "of 1000 steps" in said and "steps needed" in said
    # local steps of the table, with two ranks
    plan = ParallelPlan.load(tmp_path / "plan" / "plan.yaml")
    assert plan.local_steps is not None and plan.mesh.size == 2
    assert plan.local_steps.words in said
    assert "The factor rests on" in plan.reason
    assert "Left out of the choice: " in said and "did not reach the dense run's loss" in said
    text = (tmp_path / "plan" / "frontier.json").read_text()
    frontier = frontier_of_json(text)
    assert json.loads(frontier.to_json()) == json.loads(text)
    assert any("with 2 data rank(s) did not reach" in why for why in frontier.left_out)
    found = {point.devices: [] for point in frontier.points}
    for point in frontier.points:
        to_loss = point.to_loss
        assert to_loss.steps == 1000
        assert to_loss.seconds == pytest.approx(1000 * to_loss.factor * point.step_seconds)
        assert to_loss.low <= to_loss.seconds <= to_loss.high
        # by memory: each is sooner there than all that need less
        assert all(to_loss.seconds < other for other in found[point.devices])
        found[point.devices].append(to_loss.seconds)
    page = (tmp_path / "plan" / "frontier.html").read_text()
    assert "Time to the loss" in page and "The factor rests on" in page


def test_splits_that_cannot_be_are_named(tmp_path):
    model = ["model._target_=tests.cli.reads_values.Hidden", "cluster=local_cpu"]
    output = finished(topt("plan", *TINY, *model, f"hydra.run.dir={tmp_path}/run", folder=tmp_path))
    assert "Left out over 2 ranks of a tensor axis: module 'blocks.0" in " ".join(output.split())


def test_a_plan_on_a_given_mesh_says_what_a_batch_of_the_loader_is(tmp_path):
    mesh = ["mesh={data:32,tensor:2}", "cluster=a100_8x8", "strategy.objective=memory"]
    output = finished(topt("plan", *TINY, *mesh, f"hydra.run.dir={tmp_path}/run", folder=tmp_path))
    plan = ParallelPlan.load(tmp_path / "run" / "plan.yaml")
    assert plan.mesh.names == ("data", "tensor") and plan.mesh.shape == (32, 2)
    assert all(block.config.parameters for block in plan.blocks if block.block)
    batch = f"with batches of {plan.batch_size} in the loader a step has {32 * plan.batch_size}"
    assert batch in " ".join(output.split())


def test_calibrate_writes_a_cluster_and_keeps_it_for_later_runs(
    tmp_path, monkeypatch, short_measurements
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    output = finished(topt("calibrate", f"output={tmp_path}/cluster.yaml", folder=tmp_path))
    cluster = Cluster.load(tmp_path / "cluster.yaml")
    assert (cluster.devices_per_node, cluster.num_nodes, cluster.backend) == (2, 1, "gloo")
    (kept,) = (tmp_path / "caches" / "lightning_topt" / "measurements").glob("*.json")
    assert "measuring this machine" in output and str(kept) in "".join(output.split("\n"))
    (entry,) = json.loads(kept.read_text())["entries"].values()
    assert Cluster.from_dict(entry["value"]) == cluster
    # again, on ranks as torchrun starts them
    arguments = f"output={tmp_path}/again.yaml", f"hydra.run.dir={tmp_path}/run"
    finished(topt("calibrate", *arguments, folder=tmp_path, ranks=2))
    assert Cluster.load(tmp_path / "again.yaml").num_devices == 2


def test_the_demo_ends_with_what_was_planned_predicted_and_measured(tmp_path):
    words = ["experiment=demo", "strategy.memory_limit=96MiB", f"hydra.run.dir={tmp_path}/run"]
    words += ["trainer.limit_train_batches=8", "trainer.limit_val_batches=1", "model.num_layers=2"]
    output = finished(topt("train", *words, folder=tmp_path, ranks=2))
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert record["predicted"]["peak_bytes"] * 1.05 <= 96 * 2**20
    plan = ParallelPlan.load(tmp_path / "run" / "plan.yaml")
    assert plan.to_dict() == record["plan"]
    end = output[output.index("Plan, as numbers of blocks") :]
    assert plan.summary().split(",")[0] in end and "Why: " in end and "predicted" in end
    assert f"Report, for a browser: {tmp_path}/run/frontier.html" in end
    page = (tmp_path / "run" / "frontier.html").read_text()
    assert "<h1>gpt (1.73 M parameters) on " in page and "memory limit 96.00 MiB" in page
    # but for those that end with a path
    assert all(len(line) <= 80 for line in end.splitlines() if str(tmp_path) not in line)


def test_a_step_that_depends_on_values_is_planned_for_its_own_batch(tmp_path):
    model = ["model._target_=tests.cli.reads_values.ReadsValues", "cluster=local_cpu"]
    finished(topt("plan", *TINY, *model, f"hydra.run.dir={tmp_path}/run", folder=tmp_path))
    assert ParallelPlan.load(tmp_path / "run" / "plan.yaml").model == "ReadsValues"
    refused = topt("plan", *TINY, *model, "device_counts=[1,2]", folder=tmp_path)
    assert refused.status == 2 and "batch" in refused.output
    refused = topt("plan", *TINY, *model, "tensor=true", folder=tmp_path)
    assert refused.status == 2 and "the step depends on values of tensors" in refused.output

"""`topt predict plan=...`: one plan, priced as the search prices it; `runs=FOLDER`: recorded runs,
predicted and measured.
"""

from __future__ import annotations

import json
import re
import sys

import numpy as np
import pytest

from lightning_topt.cli import main
from lightning_topt.cli.predict import corrected, correction_factors, least_factors, read_runs
from lightning_topt.costs.cluster import Cluster, Device, Link
from lightning_topt.plan.parallel_plan import ParallelPlan

TINY = [
    "model.num_layers=2",
    "model.hidden=32",
    "model.num_heads=2",
    "model.seq_len=32",
    "data.max_bytes=40000",
]


@pytest.fixture
def topt(tmp_path, monkeypatch, capsys):
    """Run a command on a small model; its exit code and output."""

    def run(command, *arguments):
        monkeypatch.setattr(
            sys, "argv", ["topt", command, *TINY, f"hydra.run.dir={tmp_path}/{command}", *arguments]
        )
        monkeypatch.setenv("COLUMNS", "200")
        code = 0
        try:
            main.run(command)
        except SystemExit as end:
            code = end.code
        said = capsys.readouterr()
        return code, " ".join((said.out + said.err).split())

    return run


@pytest.mark.parametrize(
    ("cluster", "options"),
    [
        ("a100_8x8", ["device_counts=[8]", "tensor=false", "pipeline=false"]),
        ("a100_8x8", ["mesh={data:2,tensor:2}", "trainer.accumulate_grad_batches=4"]),
        ("a100_8x8", ["mesh={pipeline:2,data:2}", "data.batch_size=16"]),
        ("local_cpu", ["pipeline={stages:2,schedule:zero_bubble}"]),
    ],
)
def test_a_plan_is_priced_as_it_was_searched(topt, tmp_path, cluster, options):
    """The search's prediction of the plan that it chose, and that of the same plan with nothing
    predicted, are one.
    """
    code, _ = topt("plan", f"cluster={cluster}", *options)
    assert code == 0
    path, out = tmp_path / "plan" / "plan.yaml", tmp_path / "out.yaml"
    plan = ParallelPlan.load(path)
    assert plan.accumulate == (4 if "trainer.accumulate_grad_batches=4" in options else 1)
    data = plan.to_dict() | {"predicted": None}
    ParallelPlan.from_dict(data).save(path)
    code, output = topt("predict", f"plan={path}", f"cluster={cluster}", f"out={out}")
    assert (
        code == 0
        and "step time" in output
        and "forward" in output
        and ("not known: no run on it" in output or "Measured before" in output)
    )
    predicted = ParallelPlan.load(out).predicted
    assert predicted.step_seconds == pytest.approx(plan.predicted.step_seconds, rel=1e-6)
    assert predicted.peak_bytes == pytest.approx(plan.predicted.peak_bytes, rel=1e-6)
    assert predicted.compute_seconds == pytest.approx(plan.predicted.compute_seconds, rel=1e-6)


def test_plans_by_name_and_what_they_are_made_of(topt):
    code, output = topt("predict", "plan=zero3", "ranks=16", "cluster=a100_8x8")
    assert code == 0 and "ZeRO-3" in output and "gather" in output


def step_seconds(output: str) -> float:
    number, unit = re.search(r"step time ([\d.]+) (\w+)", output).groups()
    return float(number) * {"us": 1e-6, "ms": 1e-3, "s": 1.0}[unit]


def test_a_compiled_step_is_planned_and_priced(topt, tmp_path):
    """The plan page, frontier.json and the terminal say which step is predicted."""
    target = "model._target_=tests.cli.reads_values.Elementwise"
    model = ["cluster=a100_8x8", "data.batch_size=64", target]
    seconds = {}
    for kind, given in (("eager", []), ("compiled", ["compiled=true"])):
        code, output = topt("plan", *model, "device_counts=[8]", "mesh={data:4,tensor:2}", *given)
        assert code == 0 and f"Predicted as {kind}" in output
        frontier = json.loads((tmp_path / "plan" / "frontier.json").read_text())
        assert frontier["predicted_as"] == kind
        assert f"Predicted as {kind}" in (tmp_path / "plan" / "frontier.html").read_text()
        code, output = topt("predict", *model, "plan=zero1", "ranks=8", *given)
        assert code == 0 and f"Predicted as {kind}" in output
        seconds[kind] = (
            min(point["step_seconds"] for point in frontier["points"]),
            step_seconds(output),
        )
    assert all(b < a for a, b in zip(*seconds.values(), strict=True))
    code, output = topt("plan", *model, "compiled=perhaps")
    assert code == 2 and "compiled is True or False" in output


def test_configurations_that_are_predicted_only(topt, tmp_path):
    plain = ["plan=zero1", "ranks=8", "cluster=a100_8x8", "data.batch_size=64"]
    code, output = topt("predict", *plain)
    assert code == 0 and "Predicted only" not in output
    # 1 MB/s: what goes to the host is all that counts
    slow = "cluster.device.host_bandwidth=1MB/s"
    code, waiting = topt("predict", *plain, "offload=true", slow)
    assert code == 0 and "Predicted only, nothing here runs it: activations" in waiting
    assert "offloading in backward" in waiting
    assert step_seconds(waiting) > 10 * step_seconds(output)
    refused = {
        "leave out one of them": ["offload=true", f"out={tmp_path}/plan.yaml"],
        "of which this plan has none": ["tensor_overlap=true"],
        "host_bandwidth in the cluster's file": [
            "offload=true",
            "cluster.device.host_bandwidth=0",
        ],
    }
    for sentence, given in refused.items():
        code, output = topt("predict", *plain, *given)
        assert code == 2 and sentence in output
    again = ["plan=zero1+recompute", *plain[1:]]
    code, output = topt("predict", *again, "offload=true")
    assert code == 2 and "without recomputation" in output


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["plan=zero3", "ranks=128", "cluster=a100_8x8"], "128 ranks do not fit the cluster"),
        (["plan=missing.yaml", "cluster=a100_8x8"], "is neither a file nor one of"),
        (["plan={mesh:{data:2,tensor:2}}", "cluster=a100_8x8"], "are found by a search"),
    ],
)
def test_one_sentence_for_plans_that_cannot_be(topt, arguments, sentence):
    code, output = topt("predict", *arguments)
    assert code == 2 and sentence in output and "Traceback" not in output


def test_a_plan_of_another_model(topt, tmp_path):
    assert topt("plan", "cluster=local_cpu", "tensor=false", "pipeline=false")[0] == 0
    path = tmp_path / "plan" / "plan.yaml"
    code, output = topt("predict", f"plan={path}", "cluster=local_cpu", "model.hidden=64")
    assert code == 2 and "made for another model" in output
    data = ParallelPlan.load(path).to_dict() | {"fingerprint": None}
    named = next(block for block in data["stages"][0]["blocks"] if block["block"])
    named["block"] = "encoder"
    ParallelPlan.from_dict(data).save(path)
    code, output = topt("predict", f"plan={path}", "cluster=local_cpu")
    assert code == 2 and "'encoder' is not a module" in output


# ---- recorded runs -------------------------------------------------------------------------------


def record(
    folder,
    number,
    *,
    compute,
    communication,
    measured,
    cluster="lab",
    peak=1.02,
    ranks=2,
    busy=None,
):
    """A run.json of a run whose memory was `peak` times what was predicted.

    `busy`: whether its machine was; None: earlier releases do not say.
    """
    predicted = {
        "step_seconds": compute + communication,
        "peak_bytes": 1e9,
        "compute_seconds": compute,
        "exposed_communication_seconds": communication,
    }
    run = {
        "schema_version": 1,
        "world_size": ranks,
        "device": "cpu",
        "plan": {"cluster": cluster},
        "predicted": predicted,
        "measured": {
            "steps": 10,
            "median_step_seconds": measured,
            "peak_bytes_per_rank": [0.9e9, 1e9 * peak],
        },
    }
    if busy is not None:
        run["machine_was_busy"] = busy
    (folder / str(number)).mkdir(parents=True)
    (folder / str(number) / "run.json").write_text(json.dumps(run))


@pytest.fixture
def runs(tmp_path):
    """Computing takes 1.2 times, links 1.5 times what was predicted; some files are none of
    these.
    """
    folder = tmp_path / "outputs"
    for number in range(6):
        compute, communication = 1.0 + number, 0.3 * (number % 3)
        record(
            folder,
            number,
            compute=compute,
            communication=communication,
            measured=1.2 * compute + 1.5 * communication,
        )
    record(folder, 6, compute=1.0, communication=1.0, measured=9.0, cluster="elsewhere")
    (folder / "broken").mkdir()
    (folder / "broken" / "run.json").write_text("{")
    (folder / "ddp").mkdir()
    (folder / "ddp" / "run.json").write_text(
        json.dumps({"plan": None, "predicted": None, "measured": None})
    )
    return folder


def test_recorded_runs_are_compared_and_corrected(topt, runs, tmp_path):
    machines = Cluster(
        "lab",
        Device("d", 10**9, {"float32": 1.2e12}, 1.2e11),
        2,
        1,
        Link(1e-5, 1.5e9),
        backend="gloo",
    )
    machines.save(tmp_path / "lab.yaml")
    saved = tmp_path / "better.yaml"
    code, output = topt(
        "predict", f"runs={runs}", f"cluster_file={tmp_path}/lab.yaml", f"save_cluster={saved}"
    )
    assert code == 0 and "lab on 2 cpu rank(s)" in output and "elsewhere on 2 cpu rank(s)" in output
    assert "half of 6 runs within" in output and "each run predicted from the others" in output
    better = Cluster.load(saved)
    assert better.device.flops["float32"] == pytest.approx(1e12, rel=0.03)
    assert better.device.memory_bandwidth == pytest.approx(1e11, rel=0.03)
    assert better.intra.bandwidth == pytest.approx(1e9, rel=0.1)
    assert better.accuracy.seconds.median < 0.03 < 0.15  # from about 20 %
    assert (
        better.accuracy.bytes.median == pytest.approx(0.02, rel=0.05)
        and better.accuracy.bytes.runs == 6
    )
    alone = ["data.batch_size=8", "tensor=false", "pipeline=false"]
    code, output = topt("plan", *alone, f"strategy.cluster={saved}")
    assert code == 0 and "half of 6 runs within" in output


def test_a_cluster_learns_from_its_runs_on_any_number_of_ranks(topt, tmp_path):
    folder, saved = tmp_path / "outputs", tmp_path / "better.yaml"
    for number in range(6):
        ranks = 2 if number < 2 else 4
        record(
            folder,
            number,
            compute=1.0 + number,
            communication=0.0,
            measured=1.2 * (1.0 + number),
            ranks=ranks,
        )
    Cluster("lab", Device("d", 10**9, {"float32": 1.2e12}, 1.2e11), 2, 1, Link(0.0, 1.0)).save(
        tmp_path / "lab.yaml"
    )
    code, output = topt(
        "predict", f"runs={folder}", f"cluster_file={tmp_path}/lab.yaml", f"save_cluster={saved}"
    )
    assert code == 0 and "lab on 2 cpu rank(s)" in output and "lab on 4 cpu rank(s)" in output
    assert str(folder) not in output.partition("cluster: ")[0]  # runs are named as below the folder
    assert Cluster.load(saved).accuracy.seconds.runs == 6


def test_runs_of_a_busy_machine_say_nothing_about_its_constants(topt, runs, tmp_path):
    for number, busy in ((7, True), (8, True), (9, False)):
        seconds = 50.0 if busy else 1.2
        record(runs, number, compute=1.0, communication=0.0, measured=seconds, busy=busy)
    code, output = topt("predict", f"runs={runs}")
    assert code == 0 and output.count("│ machine was busy │") == 2
    assert "2 of 9 runs, whose machine was busy" in " ".join(output.split())
    assert "half of 7 runs within" in output
    machines = Cluster("lab", Device("d", 10**9, {"float32": 1.2e12}, 1.2e11), 2, 1, Link(0.0, 1.0))
    machines.save(tmp_path / "lab.yaml")
    saved, only = tmp_path / "better.yaml", tmp_path / "only"
    files = f"cluster_file={tmp_path}/lab.yaml", f"save_cluster={saved}"
    assert topt("predict", f"runs={runs}", *files)[0] == 0
    assert Cluster.load(saved).accuracy.seconds.runs == 7
    # nothing else
    record(only, 1, compute=1.0, communication=0.0, measured=50.0, busy=True)
    code, output = topt("predict", f"runs={only}")
    assert code == 0 and "1 of 1 runs" in " ".join(output.split()) and "half of" not in output
    code, output = topt("predict", f"runs={only}", *files)
    assert code == 2 and "the machine was busy in all runs on 'lab'" in output


def test_runs_by_machine(runs):
    found = [*read_runs(runs)]
    assert len(found) == 7 and {run.machine for run in found} == {
        "lab on 2 cpu rank(s)",
        "elsewhere on 2 cpu rank(s)",
    }
    assert correction_factors([run for run in found if "lab" in run.machine]) == pytest.approx(
        (1.2, 1.5), rel=0.1
    )
    few = [run for run in found if "elsewhere" in run.machine]
    machines = Cluster("elsewhere", Device("d", 10**9, {"float32": 1.0}, 1.0), 2, 1, Link(0.0, 1.0))
    # one run says how wrong it was, not why
    assert corrected(machines, few).device == machines.device


def test_runs_of_other_machines(topt, runs):
    code, output = topt(
        "predict", f"runs={runs}", "cluster=local_cpu", f"save_cluster={runs}/c.yaml"
    )
    assert code == 2 and "no run below" in output and "elsewhere on 2 cpu rank(s)" in output
    code, output = topt("predict", f"runs={runs}", f"save_cluster={runs}/c.yaml")
    assert code == 2 and "say which" in output


def test_factors_between_kinds_of_time():
    first, second = np.array([1.0, 2.0, 0.1, 1.0]), np.array([0.1, 0.0, 1.0, 1.0])
    found = least_factors(
        lambda a: a[0] * first + a[1] * second, 1.2 * first + 0.7 * second, widths=(0.5, 0.5)
    )
    assert found == pytest.approx([1.2, 0.7], rel=0.01)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["cluster=a100_64x8"], "say what is to be predicted"),
        (["runs={runs}", "plan=zero3", "cluster=a100_64x8"], "one of the two"),
        (["runs={table}", "out=out.csv"], "python -m benchmarks.prediction.rows {table}"),
        (["runs={empty}"], "no run.json below"),
        (["runs={runs}", "ranks=4"], "ranks belongs to the prediction of a plan"),
        (
            ["plan=zero3", "cluster=a100_64x8", "save_cluster=c.yaml"],
            "save_cluster belongs to the prediction of runs",
        ),
    ],
)
def test_one_sentence_for_what_cannot_be(topt, runs, tmp_path, arguments, sentence):
    (tmp_path / "table.csv").write_text("gpus\n1\n")
    (tmp_path / "empty").mkdir()
    paths = {"runs": runs, "table": tmp_path / "table.csv", "empty": tmp_path / "empty"}
    code, output = topt("predict", *(argument.format(**paths) for argument in arguments))
    assert code == 2 and sentence.format(**paths) in output and "Traceback" not in output

"""`topt predict plan=...`: one plan, priced as the search prices it; `runs=FOLDER`: recorded runs,
predicted and measured.
"""

from __future__ import annotations

import json
import sys

import pytest

from lightning_topt.cli import main
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
        ("a100_8x8", ["mesh={data:2,tensor:2}", "trainer.accumulate_grad_batches=4"]),
        ("a100_8x8", ["mesh={pipeline:2,data:2}", "data.batch_size=16"]),
        ("local_cpu", ["pipeline={stages:2,schedule:zero_bubble}"]),
    ],
)
def test_a_plan_is_priced_as_it_was_searched(topt, tmp_path, cluster, options):
    """The search's prediction of its plan is that of the same plan with nothing predicted."""
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


def record(folder, number, *, compute, communication, measured, cluster="lab", peak=1.02, ranks=2):
    """A run.json of a run whose memory was `peak` times what was predicted."""
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
    (folder / str(number)).mkdir(parents=True)
    (folder / str(number) / "run.json").write_text(json.dumps(run))


@pytest.fixture
def runs(tmp_path):
    """Computing takes 1.2 times, links 1.5 times what was predicted; some files are none."""
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


def lab(folder):
    device = Device("d", 10**9, {"float32": 1.2e12}, 1.2e11)
    Cluster("lab", device, 2, 1, Link(1e-5, 1.5e9), backend="gloo").save(folder / "lab.yaml")
    return f"cluster_file={folder}/lab.yaml"


def test_a_cluster_learns_its_errors_from_recorded_runs(topt, runs, tmp_path):
    # on another number of ranks
    record(runs, 7, compute=1.0, communication=0.0, measured=1.2, ranks=4)
    saved = tmp_path / "better.yaml"
    code, output = topt("predict", f"runs={runs}", lab(tmp_path), f"save_cluster={saved}")
    assert code == 0 and "half of 6 runs within" in output
    assert all(
        f"{name} cpu rank(s)" in output for name in ("lab on 2", "lab on 4", "elsewhere on 2")
    )
    better = Cluster.load(saved)
    assert better.accuracy.seconds.runs == better.accuracy.bytes.runs == 7
    assert 0.15 < better.accuracy.seconds.median < 0.25
    assert better.accuracy.bytes.median == pytest.approx(0.02, rel=0.05)
    alone = ["data.batch_size=8", "tensor=false", "pipeline=false"]
    code, output = topt("plan", *alone, f"strategy.cluster={saved}")
    assert code == 0 and "half of 7 runs within" in output


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["cluster=a100_64x8"], "say what is to be predicted"),
        (["runs={empty}"], "no run.json below"),
        (["runs={runs}", "cluster=local_cpu", "save_cluster=c.yaml"], "elsewhere on 2 cpu rank(s)"),
    ],
)
def test_one_sentence_for_what_cannot_be(topt, runs, tmp_path, arguments, sentence):
    (tmp_path / "empty").mkdir()
    paths = {"runs": runs, "empty": tmp_path / "empty"}
    code, output = topt("predict", *(argument.format(**paths) for argument in arguments))
    assert code == 2 and sentence in output and "Traceback" not in output

"""`topt verify` in this process: its tables, its file, its exit code."""

from __future__ import annotations

import json
import sys
from dataclasses import replace

import pytest

from lightning_topt.cli import main
from lightning_topt.graph.mesh_axes import Axis, Mesh
from lightning_topt.graph.op_config import OpConfig
from lightning_topt.plan.parallel_plan import BlockPlan, ParallelPlan, StagePlan, uniform_plan
from lightning_topt.plan.plan_values import PRESETS

TINY = [
    "model.num_layers=2",
    "model.hidden=32",
    "model.num_heads=2",
    "model.seq_len=32",
    "data.max_bytes=40000",
]
WIDE = 300


@pytest.fixture
def topt_verify(tmp_path, monkeypatch, capsys):
    """Run it; its exit code, output and JSON."""

    def run(*arguments):
        path = tmp_path / "verify.json"
        command = [
            "topt",
            "verify",
            *TINY,
            f"json={path}",
            f"hydra.run.dir={tmp_path}/run",
            *arguments,
        ]
        monkeypatch.setattr(sys, "argv", command)
        monkeypatch.setenv("COLUMNS", str(WIDE))
        code = 0
        try:
            main.run("verify")
        except SystemExit as end:
            code = end.code
        said = capsys.readouterr()
        return code, said.out + said.err, json.loads(path.read_text()) if path.exists() else None

    return run


def test_a_plan_by_name(topt_verify):
    code, output, record = topt_verify(
        "plan=zero3", "ranks=64", "cluster=a100_8x8", "global_batch_size=512"
    )
    assert code == 0 and "would run" in output
    assert record["schema_version"] == 3 and record["would_run"] and record["world_size"] == 64
    assert sorted(rank for group in record["held"] for rank in group["ranks"]) == list(range(64))
    assert record["held"][0]["ranks"][0] == 0 and "0-31" in output


def staged_plan(data=1):
    """Two stages of one block each, beside `data` ranks."""
    mesh = Mesh((Axis("pipeline", 2), *([Axis("data", data)] if data > 1 else [])))
    config = OpConfig(PRESETS["ddp"].storage(mesh))
    stages = [StagePlan((BlockPlan(f"blocks.{index}", config),)) for index in range(2)]
    stages[0] = StagePlan((*stages[0].blocks, BlockPlan("", config)))
    return ParallelPlan(mesh, tuple(stages), schedule="1f1b", num_microbatches=4)


def test_a_plan_with_stages(topt_verify, tmp_path):
    staged_plan(data=128).save(tmp_path / "plan.yaml")
    code, output, record = topt_verify(
        f"plan={tmp_path}/plan.yaml", "cluster=a100_8x8", "cluster.num_nodes=32"
    )
    assert code == 0 and "would run" in output
    assert len(record["held"]) == 2 and len(record["held"][0]["ranks"]) == 128
    replace(staged_plan(), num_microbatches=2, own_batches=True).save(tmp_path / "plan.yaml")
    code, output, _ = topt_verify(f"plan={tmp_path}/plan.yaml", "global_batch_size=7")
    assert code == 1 and "a batch of 7 samples cannot be divided evenly over 2" in output


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (
            ["plan=ddp", "ranks=64", "global_batch_size=100"],
            1,
            "cannot be divided evenly over 64 data-parallel ranks",
        ),
        ([], 2, "say which plan"),
        (["plan=zero9", "ranks=4"], 2, "neither a file nor one of"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_would_not_run_and_wrong_use(topt_verify, arguments, code, words):
    found, output, _ = topt_verify(*arguments)
    assert (found, words in output) == (code, True), output
    assert "Traceback" not in output


def test_a_plan_file_of_another_model(topt_verify, tmp_path):
    plan = replace(uniform_plan(3, data_parallel_size=4, blocks=["layers.0"]), fingerprint="0" * 16)
    plan.save(tmp_path / "plan.yaml")
    code, output, record = topt_verify(f"plan={tmp_path}/plan.yaml")
    assert code == 1 and record["held"] == []
    assert "made for another model" in output and "does not have: ['layers.0']" in output

"""`topt predict runs=FILE.csv`: rows of Megatron runs, priced as the search prices pipelines."""

from __future__ import annotations

import csv
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from hydra_plugins.lightning_topt_searchpath import conf_dir
from lightning_topt.cli import main
from lightning_topt.cli.megatron_gpt import takes_fused_softmax
from lightning_topt.cli.megatron_rows import (
    COLUMNS,
    TIME,
    MegatronCosts,
    MegatronRow,
    captured_step,
    cluster_for,
    fit_rows,
    read_rows,
    sizes_of,
)
from lightning_topt.costs.cluster import Cluster, NodeType
from lightning_topt.costs.training_step import TrainingStep
from lightning_topt.frontier.stage_search import StagePoint
from lightning_topt.plan.stage_blocks import StageBlocks, repeat_blocks
from lightning_topt.plan.stage_simulation import (
    peak_bytes_of,
    stage_bytes,
    stage_seconds,
    step_seconds_of,
)
from lightning_topt.plan.stage_tables import PipelineShape

HEADER = [*COLUMNS.values(), TIME]
# Iterations of github VIA-Research/vTrain, data/ground_truth_single.csv (MIT, Copyright (c) 2024
# VIA Research Group).
LINES = [
    [4, 16, 1, 2048, 16, 24, 1024, 2, 1, 2, 760.096736],
    [4, 2, 1, 1024, 16, 24, 1024, 2, 1, 2, 128.658889],
    [4, 4, 1, 1024, 16, 20, 1024, 1, 2, 2, 108.849175],
    [8, 32, 2, 1024, 16, 16, 1024, 2, 4, 1, 250.414646],
]
SMALL = MegatronRow(
    4, 8, 2, hidden=64, heads=4, layers=4, sequence=32, tensor=1, data=2, pipeline=2
)


def cluster(name: str = "a100_64x8") -> Cluster:
    return Cluster.load(conf_dir() / "cluster" / f"{name}.yaml")


def write(path: Path, lines=LINES, header=HEADER) -> Path:
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([header, *lines])
    return path


@pytest.fixture
def topt_predict(tmp_path, monkeypatch, capsys):
    """Run it; its exit code and output."""

    def run(*arguments):
        monkeypatch.setattr(
            sys, "argv", ["topt", "predict", f"hydra.run.dir={tmp_path}/run", *arguments]
        )
        monkeypatch.setenv("COLUMNS", "200")
        code = 0
        try:
            main.run("predict")
        except SystemExit as end:
            code = end.code
        said = capsys.readouterr()
        return code, " ".join((said.out + said.err).split())

    return run


def test_rows_of_a_file_are_predicted(topt_predict, tmp_path):
    """From the constants of the cluster file alone within 20 %, as a whole."""
    runs, out = write(tmp_path / "runs.csv"), tmp_path / "out" / "predictions.csv"
    code, output = topt_predict(f"runs={runs}", "cluster=a100_64x8", f"out={out}")
    assert code == 0 and "4 rows" in output and "mean error" in output
    with out.open() as file:
        found = [*csv.DictReader(file)]
    assert [[row[name] for name in HEADER] for row in found] == [
        [str(value) for value in line] for line in LINES
    ]
    errors = [abs(float(row["predicted_seconds"]) / (float(row[TIME]) / 1e3) - 1) for row in found]
    assert sum(errors) / len(errors) < 0.2
    assert all(1e9 < float(row["predicted_peak_bytes"]) < 40e9 for row in found)


def test_constants_are_fitted_to_another_file(topt_predict, tmp_path):
    runs, known = write(tmp_path / "runs.csv", LINES[:1]), write(tmp_path / "known.csv", LINES[1:])
    out, saved = tmp_path / "out.csv", tmp_path / "cluster.yaml"
    given = (
        f"runs={runs}",
        "cluster=a100_64x8",
        f"calibrate_on={known}",
        f"out={out}",
        f"save_cluster={saved}",
    )
    code, output = topt_predict(*given)
    assert code == 0 and "device.launch_seconds" in output and "the 3 rows of known.csv" in output
    fitted = Cluster.load(saved)
    assert (
        fitted.accuracy is not None
        and fitted.device.launch_seconds != cluster().device.launch_seconds
    )
    row = next(iter(csv.DictReader(out.open())))
    assert float(row["predicted_error"]) == pytest.approx(fitted.accuracy.seconds.p90)
    code, _ = topt_predict(f"runs={runs}", f"cluster_file={saved}", f"out={tmp_path}/again.csv")
    again = next(iter(csv.DictReader((tmp_path / "again.csv").open())))
    assert code == 0 and float(again["predicted_seconds"]) == pytest.approx(
        float(row["predicted_seconds"])
    )


def test_a_fit_never_learns_a_row():
    """Rows that cannot be told apart by what is known of them get one time, whatever was
    measured.
    """
    predicted = MegatronCosts(cluster("a100_8x8")).step_seconds(SMALL)
    fitted = fit_rows(
        cluster("a100_8x8"), [replace(SMALL, seconds=factor * predicted) for factor in (1.0, 1.44)]
    )
    assert 1.05 * predicted < MegatronCosts(fitted.cluster).step_seconds(SMALL) < 1.4 * predicted


@pytest.mark.parametrize("tensor", [1, 2])
def test_repeated_blocks_are_the_model_of_that_depth(tensor):
    """Five layers from three of them, against five that were captured; with the head's tied weights
    on both stages.
    """
    row = replace(SMALL, layers=5, pipeline=1, data=2, tensor=tensor, gpus=2 * tensor)
    machines = cluster("a100_8x8")
    sizes = sizes_of(row)
    assert sizes.layers == 3
    base, slow = captured_step(sizes), captured_step(replace(sizes, layers=5))
    twin = StageBlocks(
        TrainingStep(
            slow.graph, machines, slow.base.optimizer, slow.base.mesh, slow.graph.batch_size
        )
    )
    assert len(twin.names) == 5
    short = TrainingStep(
        base.graph, machines, base.base.optimizer, base.base.mesh, base.graph.batch_size
    )
    fast = repeat_blocks(StageBlocks(short), (0, 1, 1, 1, 2))
    for stages, ends in ((1, (5,)), (2, (2, 5))):
        shape = PipelineShape(stages, 2, "1f1b", 1, 4, 2.0, tensor=tensor)
        point = StagePoint(0.0, 0.0, ends, (0,) * stages, (0,) * 5)
        steps = [
            step_seconds_of(stage_seconds(each, shape, [point]), shape)[0] for each in (fast, twin)
        ]
        peaks = [
            peak_bytes_of(each, shape, stage_bytes(each, shape, [point]))[0]
            for each in (fast, twin)
        ]
        assert steps[0] == pytest.approx(steps[1], rel=1e-9) and peaks[0] == pytest.approx(
            peaks[1], rel=1e-6
        )


def test_a_row_costs_what_its_stages_cost():
    costs = MegatronCosts(cluster("a100_8x8"))
    priced = costs.price(SMALL)
    assert priced.step_seconds == costs.step_seconds(SMALL)
    assert sum(priced.seconds.values()) == pytest.approx(priced.step_seconds)
    deeper = costs.price(replace(SMALL, layers=8))
    assert deeper.step_seconds > 1.3 * priced.step_seconds and deeper.peak_bytes > priced.peak_bytes
    more = costs.price(replace(SMALL, batch=80))
    assert more.step_seconds > 5 * priced.step_seconds and more.peak_bytes == pytest.approx(
        priced.peak_bytes, rel=0.01
    )


def test_layers_that_stages_cannot_share_evenly():
    costs = MegatronCosts(cluster("a100_8x8"))
    five, six = (costs.step_seconds(replace(SMALL, layers=layers)) for layers in (5, 6))
    assert costs.step_seconds(SMALL) < five < six


def test_recomputation_where_memory_would_not_do():
    """A run that was measured did fit."""
    row = replace(SMALL, hidden=128, sequence=128, layers=8, samples=16, batch=128)
    roomy = cluster("a100_8x8")
    plain = MegatronCosts(roomy).price(row)
    tight = replace(roomy, device=replace(roomy.device, memory_bytes=int(plain.peak_bytes) - 1))
    again = MegatronCosts(tight).price(row)
    assert (
        again.peak_bytes < plain.peak_bytes
        and again.seconds["backward"] > 1.2 * plain.seconds["backward"]
    )
    assert again.step_seconds == pytest.approx(MegatronCosts(tight).step_seconds(row))
    # not for any run: nothing follows
    tiny = replace(roomy, device=replace(roomy.device, memory_bytes=1000))
    assert MegatronCosts(tiny).price(row) == plain


def test_tensor_groups_pay_for_their_sums():
    whole = replace(SMALL, pipeline=1, data=1, tensor=1, gpus=1)
    slow = cluster("a100_8x8")
    slow = replace(slow, intra=replace(slow.intra, latency_seconds=1.0))
    split = MegatronCosts(slow).step_seconds(replace(whole, tensor=2, gpus=2))
    # a microbatch: 4 sums of a layer and 1 of either end, 3 of the loss, each 2 x 1 s of latency
    assert split == pytest.approx(
        4 * 2 * (4 * 4 + 2 + 3) + MegatronCosts(slow).step_seconds(whole), rel=0.05
    )


def test_fused_softmax_where_megatron_has_it():
    assert takes_fused_softmax(samples=2, heads=2, sequence=1024)
    assert not takes_fused_softmax(samples=1, heads=2, sequence=1024)
    assert not takes_fused_softmax(samples=1, heads=4, sequence=16)
    fused, plain = (
        captured_step(replace(sizes_of(SMALL), fused=fused)).graph for fused in (True, False)
    )
    assert sum(len(op.forward) for op in plain.ops) > sum(len(op.forward) for op in fused.ops)


def test_more_nodes_where_rows_need_them():
    row = replace(SMALL, data=64, batch=256, gpus=128)
    assert cluster_for([row], cluster("a100_8x8")).num_nodes == 16
    assert cluster_for([row], cluster()) == cluster()
    with pytest.raises(ValueError, match="network between nodes"):
        cluster_for([row], cluster("local_cpu"))
    device = cluster().device
    kinds = [NodeType(device, 8), NodeType(device, 8)]
    mixed = Cluster.of_nodes(kinds, name="mixed", intra=cluster().intra, inter=cluster().inter)
    with pytest.raises(ValueError, match="several kinds"):
        cluster_for([row], mixed)
    with pytest.raises(ValueError, match=r"cluster\.num_nodes=16"):
        MegatronCosts(cluster("a100_8x8")).price(row)


def test_columns_in_any_order_and_more_of_them(tmp_path):
    lines = [["x", *reversed(line)] for line in LINES]
    path = write(tmp_path / "runs.csv", lines, ["comment", *reversed(HEADER)])
    file = read_rows(path)
    assert [row.gpus for row in file.rows] == [4, 4, 4, 8] and file.rows[
        0
    ].seconds == pytest.approx(0.760096736)
    file.save(tmp_path / "out.csv", {"predicted_seconds": [1.0, 2.0, 3.0, 4.0]})
    assert (tmp_path / "out.csv").read_text().splitlines()[1].endswith("4,1")
    untimed = read_rows(write(tmp_path / "untimed.csv", [line[:-1] for line in LINES], HEADER[:-1]))
    assert [row.seconds for row in untimed.rows] == [None] * 4


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({7: 3}, "tensor 3 x data 1 x pipeline 2 are 6 ranks, not the 4"),
        ({4: 15}, "hidden size 2048 cannot be divided evenly over 15 attention heads"),
        ({7: 4, 0: 8, 4: 2}, "attention heads 2 cannot be divided evenly over 4"),
        ({5: 1}, "2 stages of pipeline parallelism need as many layers, not 1"),
        ({2: 3}, "global batch 16 cannot be divided evenly over 3"),
        ({6: 0}, "sequence length is a whole number from 1"),
        ({3: "wide"}, "hidden size is a whole number, not 'wide'"),
        ({3: 2048.5}, "hidden size is a whole number"),
        ({10: "fast"}, "iteration time (ms) is a number above 0"),
    ],
)
def test_rows_that_no_run_can_have(tmp_path, topt_predict, changes, sentence):
    line = [changes.get(index, value) for index, value in enumerate(LINES[0])]
    path = write(tmp_path / "runs.csv", [LINES[1], line])
    code, output = topt_predict(f"runs={path}", "cluster=a100_64x8")
    assert code == 2 and sentence in output and "line 3" in output and "Traceback" not in output


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["runs={runs}"], "say for which machines"),
        (["cluster=a100_64x8"], "say what is to be predicted"),
        (["runs={runs}", "plan=zero3", "cluster=a100_64x8"], "one of the two"),
        (["runs={missing}", "cluster=a100_64x8"], "cannot read"),
        (["runs={foreign}", "cluster=a100_64x8"], "lacks the columns"),
        (["runs={empty}", "cluster=a100_64x8"], "is empty"),
        (["runs={header}", "cluster=a100_64x8"], "no rows below its header"),
        (
            ["runs={runs}", "calibrate_on={untimed}", "cluster=a100_64x8"],
            "lacks the column ['iteration time (ms)']",
        ),
        (["runs={runs}", "cluster=a100_64x8", "cluster_file={runs}"], "leave out one of them"),
        (["runs={runs}", "cluster_file={runs}"], "cannot read the cluster"),
        (
            ["runs={runs}", "cluster=a100_64x8", "ranks=4"],
            "ranks belongs to the prediction of a plan",
        ),
        (
            ["plan=zero3", "cluster=a100_64x8", "calibrate_on={runs}"],
            "calibrate_on belongs to the prediction of runs",
        ),
        (["runs={folder}"], "no run.json below"),
        (["runs={runs}", "cluster=[a100_8x8,h100_2x8]"], "for one cluster"),
    ],
)
def test_one_sentence_for_what_cannot_be(tmp_path, topt_predict, arguments, sentence):
    (tmp_path / "folder").mkdir()
    (tmp_path / "empty.csv").write_text("")
    paths = {
        "runs": write(tmp_path / "runs.csv"),
        "missing": tmp_path / "missing.csv",
        "foreign": write(tmp_path / "foreign.csv", [[1, 2]], ["epoch", "loss"]),
        "empty": tmp_path / "empty.csv",
        "header": write(tmp_path / "header.csv", []),
        "untimed": write(tmp_path / "untimed.csv", [line[:-1] for line in LINES], HEADER[:-1]),
        "folder": tmp_path / "folder",
    }
    code, output = topt_predict(*(argument.format(**paths) for argument in arguments))
    assert code == 2 and sentence in output and "Traceback" not in output


def test_a_batch_of_one_data_rank():
    """Data ranks exchange gradients once for any number of microbatches."""
    costs = MegatronCosts(cluster("a100_8x8"))
    alone = replace(SMALL, data=1, batch=4, gpus=2)
    assert costs.step_seconds(SMALL) > costs.step_seconds(alone)
    assert costs.price(SMALL).seconds["once"] > costs.price(alone).seconds["once"]

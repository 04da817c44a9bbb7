"""Rows of training runs (`benchmarks.prediction.rows`), priced as the search prices plans."""

from __future__ import annotations

import csv
import statistics
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.prediction import rows
from benchmarks.prediction.repeated_blocks import repeat_blocks
from benchmarks.prediction.run_prices import RunPrices, captured_step, sizes_of
from benchmarks.prediction.training_runs import (
    TIME,
    ModelSizes,
    RunsAgain,
    TrainingRun,
    model_named,
    read_run_file,
)
from hydra_plugins.lightning_topt_searchpath import conf_dir
from lightning_topt.costs.cluster import Cluster
from lightning_topt.costs.training_step import TrainingStep
from lightning_topt.frontier.stage_search import StagePoint
from lightning_topt.plan.stage_blocks import StageBlocks
from lightning_topt.plan.stage_simulation import (
    peak_bytes_of,
    stage_bytes,
    stage_seconds,
    step_seconds_of,
)
from lightning_topt.plan.stage_tables import PipelineShape

ROOT = Path(__file__).parents[1]
HEADER = [
    "# GPUs",
    "global batch",
    "micro batch",
    "hidden size",
    "attention heads",
    "# layers",
    "sequence length",
    "tensor parallelism",
    "data parallelism",
    "pipeline parallelism",
    TIME,
]
# Iterations of github VIA-Research/vTrain, data/ground_truth_single.csv (MIT, Copyright (c) 2024
# VIA Research Group).
LINES = [
    [4, 16, 1, 2048, 16, 24, 1024, 2, 1, 2, 760.096736],
    [4, 2, 1, 1024, 16, 24, 1024, 2, 1, 2, 128.658889],
    [4, 4, 1, 1024, 16, 20, 1024, 1, 2, 2, 108.849175],
    [8, 32, 2, 1024, 16, 16, 1024, 2, 4, 1, 250.414646],
]
TINY = ModelSizes("gpt", 64, 4, 4, 4, 256, 50_257)
SMALL = TrainingRun(4, 8, 2, 32, TINY, tensor=1, data=2, pipeline=2, attention="softmax")


def changed(run: TrainingRun, **values) -> TrainingRun:
    """The run with other sizes of its model, or of its own."""
    of_model = {name: values.pop(name) for name in [*values] if hasattr(TINY, name)}
    return replace(run, model=replace(run.model, **of_model), **values)


def cluster(name: str = "a100_64x8") -> Cluster:
    return Cluster.load(conf_dir() / "cluster" / f"{name}.yaml")


def write(path: Path, lines=LINES, header=HEADER) -> Path:
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([header, *lines])
    return path


@pytest.fixture
def predict(monkeypatch, capsys):
    """Run the command; its exit code and output."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["rows", *map(str, arguments)])
        monkeypatch.setenv("COLUMNS", "200")
        code = 0
        try:
            rows.main()
        except SystemExit as end:
            code = end.code
        said = capsys.readouterr()
        return code, " ".join((said.out + said.err).split())

    return run


def test_rows_of_a_file_are_predicted(predict, tmp_path):
    """From the constants of the cluster file alone within 20 %, as a whole."""
    runs, out = write(tmp_path / "runs.csv"), tmp_path / "out" / "predictions.csv"
    code, output = predict(runs, "--cluster", "a100_64x8", "--out", out)
    assert code == 0 and "4 rows" in output and "mean error" in output
    assert "as one kernel: 4 rows; as eager: 0." in output
    with out.open() as file:
        found = [*csv.DictReader(file)]
    assert [[row[name] for name in HEADER] for row in found] == [
        [str(value) for value in line] for line in LINES
    ]
    errors = [abs(float(row["predicted_seconds"]) / (float(row[TIME]) / 1e3) - 1) for row in found]
    assert sum(errors) / len(errors) < 0.2
    assert all(1e9 < float(row["predicted_peak_bytes"]) < 40e9 for row in found)


@pytest.mark.parametrize("tensor", [1, 2])
def test_repeated_blocks_are_the_model_of_that_depth(tensor):
    """Five layers from three, against five that were captured; tied weights on both stages."""
    row = changed(SMALL, layers=5, pipeline=1, data=2, tensor=tensor, gpus=2 * tensor)
    machines = cluster("a100_8x8")
    sizes = sizes_of(row, layers=3)
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
        point = StagePoint(0.0, 0.0, ends, (0,) * 5)
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


def test_recomputation_takes_time_and_saves_memory():
    """What is between nothing and everything lies there."""
    costs = RunPrices(cluster("a100_8x8"))
    row = changed(SMALL, hidden=128, inner=512, sequence=128, layers=8, samples=16, batch=128)
    names = ["none", "selective(op)", "selective(2)", "full"]
    found = {name: costs.price(replace(row, recompute=RunsAgain.named(name))) for name in names}
    seconds = [found[name].step_seconds for name in names]
    assert seconds == sorted(seconds) and len({*seconds}) == 4
    assert found["full"].seconds["backward"] > 1.2 * found["none"].seconds["backward"]
    for name in names[1:3]:
        assert found["full"].peak_bytes < found[name].peak_bytes < found["none"].peak_bytes
    # scores are kept only without
    attention = costs.price(replace(row, recompute=RunsAgain(attention=True)))
    assert attention.peak_bytes < found["none"].peak_bytes
    assert found["none"].step_seconds < attention.step_seconds < found["full"].step_seconds
    with pytest.raises(ValueError, match="recompute is none, full"):
        RunsAgain.named("some")


# ---- published tables

PUBLISHED = """model,arch,gpu,gpus,tp,pp,dp,cp,seq,mbs,gbs,recompute,sharding,extras,step_seconds
mpt-1b,mpt,h100_80gb,8,1,1,8,1,2048,14,112,none,FULL_SHARD,,0.6308
gpt-1024-8-16,megatron,a100_80gb,64,8,8,1,1,2048,1,64,selective,,"sequence parallel, m=1",
llama3_8b,llama,h100_96gb_hbm2e_500w,8,1,1,8,1,8192,2,16,selective(op),FULL_SHARD,compile,2.8435
"""


def test_published_tables_are_read(tmp_path, predict):
    path, out = tmp_path / "published.csv", tmp_path / "out.csv"
    header, *lines = PUBLISHED.splitlines(keepends=True)
    path.write_text(PUBLISHED)
    first, second, third = read_run_file(path).runs
    assert first.level == 3 and first.model == model_named("mpt-1b") and not first.fused
    assert second.sequence_parallel and second.recompute.attention and second.seconds is None
    assert second.attention == "softmax" and second.stages_per_rank == 1
    assert third.recompute.operators and third.fused and third.model.key_heads == 8
    # each on the machine that it names
    path.write_text("".join([header, lines[0], lines[2]]))
    code, output = predict(path, "--out", out)
    assert code == 0 and "for rows on h100_96gb_hbm2e_500w" in output
    found = [*csv.DictReader(out.open())]
    assert all(0.05 < float(row["predicted_seconds"]) < 20 for row in found)
    assert all(1e8 < float(row["predicted_peak_bytes"]) < 90e9 for row in found)


def test_errors_of_the_shipped_constants_are_those_of_the_results():
    """The table by kind of GPU, from the rows of benchmarks/results, which have three digits."""
    rows = (ROOT / "benchmarks/results/published_predictions.md").read_text().split("## Each row")
    page = (ROOT / "docs/results/predictions.md").read_text()
    for gpu in ("a100", "h100"):
        cells = [line.split(" | ") for line in rows[1].splitlines() if f" x {gpu}_" in line]
        measured, *kinds = ([float(cell[place]) for cell in cells] for place in (2, 3, 4))
        (line,) = (line for line in page.splitlines() if line.startswith(f"| `{gpu}_*`"))
        count, *shown = line.strip("| ").split(" | ")[2:]
        assert int(count) == len(cells)
        for predicted, said in zip(kinds, shown, strict=True):
            errors = [abs(a / b - 1) for a, b in zip(predicted, measured, strict=True)]
            expected = statistics.median(errors), max(errors)
            figures = [float(figure.strip(" %")) / 100 for figure in said.split(",")]
            assert figures == pytest.approx(expected, abs=0.006)
    one_node = (ROOT / "benchmarks/results/vtrain_predictions.md").read_text()
    for name in ("nothing fitted | 240", "**mean of the splits** | 200"):
        (line,) = (line for line in one_node.splitlines() if name in line)
        mean, p90 = line.split(" | ")[2:4]
        assert f"mean {mean.replace('%', ' %')}, p90 {p90.replace('%', ' %')}" in page

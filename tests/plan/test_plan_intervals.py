"""Intervals of plans: what a plan is like, and where tables, pages and files show it."""

from __future__ import annotations

import dataclasses
import io
import json
import math
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks.prediction.saved_frontier import frontier_of_json
from lightning_topt.costs.accuracy import CPU_BYTES, WIDER, Accuracy, Domain, ErrorFigure, Interval
from lightning_topt.costs.cluster import Cluster, Device, Link
from lightning_topt.graph.capture import capture
from lightning_topt.graph.op_config import OpConfig
from lightning_topt.graph.op_graph import OpGraph
from lightning_topt.plan.frontier_report import print_table, save_html
from lightning_topt.plan.parallel_plan import BlockPlan, ParallelPlan, StepEstimate
from lightning_topt.plan.plan_frontier import (
    NO_TOKENS,
    KnownErrors,
    PlanFrontier,
    PlanPoint,
    interval_sentences,
    with_intervals,
)
from tests.models import GPT, MLP, batch_for

ROOT = Path(__file__).parents[2]
SECONDS, BYTES = ErrorFigure(0.1, 0.25, 20), ErrorFigure(0.1, 0.5, 9, above=0.3)
MEASURED = ["sharded", "tensor", "flash attention"]


def machines(accuracy: Accuracy | None, *, backend: str = "nccl") -> Cluster:
    device = Device("d", 10**9, {"float32": 1e12}, 1e11)
    return Cluster("c", device, 8, 1, Link(1e-5, 1e9), backend=backend, accuracy=accuracy)


def gpt() -> OpGraph:
    module = GPT(layers=2, width=32, context=16)
    return capture(module, batch_for(module))


def domain(graph: OpGraph, **changed: tuple[float, float]) -> Domain:
    parameters = float(sum(p.numel for p in graph.parameters))
    sizes = {
        "devices": (2.0, 4.0),
        "parameters": (parameters / 2, parameters),
        "positions": (16.0, 16.0),
        "hidden": (32.0, 64.0),
        "tokens of a microbatch": (128.0, 256.0),
    }
    return Domain(sizes | changed, tuple(MEASURED))


def point(level: int = 0, *, devices: int = 4, recompute: bool = False) -> PlanPoint:
    blocks = [BlockPlan("", OpConfig.zero(level, recompute=recompute))]
    predicted = StepEstimate(2.0, 1e6, 1.5, 0.5)
    plan = ParallelPlan.of_blocks(blocks, mesh=devices, batch_size=8, predicted=predicted)
    return PlanPoint(2.0, 1e6, devices, plan)


def test_a_plan_like_those_measured_and_others():
    graph = gpt()
    cluster = machines(Accuracy(SECONDS, BYTES, domain=domain(graph), bytes_domain=domain(graph)))
    points = [point(2), point(2, devices=16), point(2, recompute=True)]
    frontier = with_intervals(PlanFrontier.of(points), cluster, graph)
    like, large = (next(p for p in frontier.points if p.devices == count) for count in (4, 16))
    assert like.seconds_interval == Interval(1.6, 2.5)
    assert like.bytes_interval.high == pytest.approx(1.5e6)
    assert large.seconds_interval.outside == ("devices",)
    assert large.seconds_interval.high == pytest.approx(2.5 * math.exp(2 * WIDER))
    again = KnownErrors.of(cluster, graph).intervals(points[2].plan, 2.0, 1e6)
    assert again[0].outside == ("recomputation",)
    assert again[0].high == pytest.approx(2.5 * math.exp(WIDER))


@pytest.mark.parametrize("name", ["positions", "hidden", "tokens of a microbatch"])
def test_sizes_of_a_model_of_tokens(name: str):
    graph = gpt()
    sizes = KnownErrors.of(machines(None), graph).sizes_of(point().plan)
    assert sizes["positions"] == 16 and sizes["hidden"] == 32
    assert sizes["tokens of a microbatch"] == 8 * 16
    smaller = domain(graph, **{name: (sizes[name] / 4, sizes[name] / 2)})
    known = KnownErrors.of(machines(Accuracy(SECONDS, domain=smaller)), graph)
    seconds, size = known.intervals(point().plan, 2.0, 1e6)
    assert seconds.outside == (name,) and size is None
    assert seconds.high == pytest.approx(2.5 * math.exp(WIDER))


def test_models_unlike_those_measured():
    module = MLP()
    graph = capture(module, batch_for(module))
    known = KnownErrors.of(machines(Accuracy(SECONDS, domain=domain(gpt()))), graph)
    assert NO_TOKENS in known.intervals(point().plan, 2.0, 1e6)[0].outside


def test_what_is_not_known_has_no_interval():
    graph = gpt()
    for backend, has_bytes in (("nccl", False), ("gloo", True)):
        cluster = machines(None, backend=backend)
        (found,) = with_intervals(PlanFrontier.of([point()]), cluster, graph).points
        assert found.seconds_interval is None
        assert (found.bytes_interval is not None) == has_bytes
        said = interval_sentences((found.seconds_interval, found.bytes_interval), cluster)
        assert bool(said) == has_bytes and not any("of a step" in each for each in said)


def test_tables_pages_and_files_show_intervals(tmp_path):
    graph = gpt()
    cluster = machines(Accuracy(SECONDS, BYTES, domain=domain(graph), bytes_domain=domain(graph)))
    points = [point(2), dataclasses.replace(point(1, devices=16), peak_bytes=1e5)]
    frontier = with_intervals(PlanFrontier.of(points), cluster, graph, level=0.5)
    assert frontier_of_json(frontier.to_json()) == frontier
    written = json.loads(frontier.to_json())["points"]
    assert written[0]["seconds_interval"]["level"] == 0.5
    assert written[1]["bytes_interval"]["outside"] == ["devices"]
    low, high = (written[0]["seconds_interval"][end] for end in ("low", "high"))
    assert 1.6 < low < 2 < high < 2.5 and low * high == pytest.approx(4)

    text = io.StringIO()
    print_table(frontier.points, frontier.points[0], console=Console(file=text, width=120))
    table = text.getvalue()
    assert table.count("50 % interval") == 2
    assert f"{low:.3g} s to {high:.3g} s" in table

    save_html(tmp_path / "page.html", frontier.points, frontier.points[0])
    page = (tmp_path / "page.html").read_text()
    assert f'"50 % interval of the time":"{low:.3g} s to {high:.3g} s"' in page
    assert f'"ends":{{"x":[{frontier.points[0].bytes_interval.low!r},' in page  # of the whiskers
    assert f'"y":[{low!r},{high!r}]}}' in page

    both = frontier.points[0].seconds_interval, frontier.points[0].bytes_interval
    (sentence,) = interval_sentences(both, cluster)
    assert sentence.startswith("Intervals, right for 50 % of such predictions: ")
    assert sentence.endswith("Inside of what was measured.")
    outside = frontier.points[1].seconds_interval, frontier.points[1].bytes_interval
    said = interval_sentences(outside, cluster)[0]
    assert "Outside of measured times, so less sure: devices. Outside of measured peaks" in said


def test_files_of_clusters_have_the_figures_that_were_measured():
    """Those of benchmarks/results/uncertainty.md, to a tenth of a percent."""
    text = (ROOT / "benchmarks" / "results" / "uncertainty.md").read_text()

    def row(label: str) -> list[float]:
        (line,) = (line for line in text.splitlines() if line.startswith(f"| {label} |"))
        return [float(cell.strip(" %")) for cell in line.strip("| ").split("|")[1:]]

    def shown(figure: ErrorFigure) -> list[float]:
        shares = (figure.median, figure.p90, *([] if figure.above is None else [figure.above]))
        return [figure.runs, *(pytest.approx(100 * share) for share in shares)]

    assert row("CPU ranks, our own") == shown(CPU_BYTES)
    clusters = [Cluster.load(path) for path in sorted((ROOT / "conf" / "cluster").glob("*00_*"))]
    assert len(clusters) >= 6
    for cluster in clusters:
        if cluster.accuracy is not None:
            assert row("H100, published") == shown(cluster.accuracy.bytes)
            assert row("all") == shown(cluster.accuracy.difference)

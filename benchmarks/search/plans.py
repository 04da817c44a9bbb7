"""How long the whole search of plans takes, with pipelines or tensor axes and without them.

    python -m benchmarks.search.plans pipelines               # two minutes
    python -m benchmarks.search.plans tensor                  # two minutes
    python -m benchmarks.search.plans tensor --against ../x   # alternating with another checkout

Figures are CPU seconds, minimum and median. Models are GPTs of `topt plan` (float32, AdamW) on the
meta device; their whole step is captured before, at two batch sizes. Every run searches from the
captured step again, in a process that has searched once.

`pipelines`: data axes, stages x microbatches x schedules, cuts and prices. Tensor axes are added to
these, alone and under stages. `tensor`: candidates for splits, captures of a rank's step, prices
and chains. Steps on slices are captured during a search, and counted separately.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import RESULTS, ROOT, machine, measure_at
from lightning_topt.costs.cluster import Cluster
from lightning_topt.costs.optimizer import OptimizerProfile, read_optimizer
from lightning_topt.demo import ByteGPT
from lightning_topt.graph.capture import capture
from lightning_topt.graph.module_copy import build_on_meta
from lightning_topt.graph.op_graph import OpGraph
from lightning_topt.plan.pipeline_search import PipelineRequest
from lightning_topt.plan.plan_search import SearchRequest, search_plans
from lightning_topt.plugins.searched_plan import make_fake_optimizers
from lightning_topt.techniques.tensor_parallel import split_model
from lightning_topt.techniques.tensor_parallel.function_trace import FunctionTrace

RUNS = 5
Result = dict[str, Any]


@dataclass(frozen=True)
class Page:
    """A page with a row for each case; its rows also have what another checkout found."""

    result: str  # name of the file
    title: str
    heads: Sequence[str]
    heads_before: Sequence[str]
    notes: Sequence[str]
    cases: Sequence[tuple[Any, ...]]
    measure: Callable[..., Result]
    cells: Callable[[Any, Result], Sequence[str]]
    cells_before: Callable[[Result], Sequence[str]]


def main() -> None:
    """Measure all cases of a page and write it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("name", choices=list(PAGES))
    parser.add_argument("--against", type=Path, help="another checkout")
    options = parser.parse_args()
    name, page = options.name, PAGES[options.name]
    against = options.against.resolve() if options.against else None
    heads = [*page.heads]
    if against:
        heads += [*(f"before: {head}" for head in page.heads_before), "frontier"]
    lines = [
        f"# {page.title}",
        "",
        f"`python -m benchmarks.search.plans {name}"
        + (" --against <checkout>`" if against else "`"),
        "",
        machine(),
        f"- load average before the run: {os.getloadavg()[0]:.1f}",
        *(f"- {note}" for note in page.notes),
        "",
        "| " + " | ".join(heads) + " |",
        "|" + "---|" * len(heads),
    ]
    for case in page.cases:
        mine = measure_at(ROOT, "search.plans", (name, *case))
        row = [*page.cells(case, mine)]
        if against:
            before = measure_at(against, "search.plans", (name, *case))
            same = "the same" if before["frontier"] == mine["frontier"] else "others"
            row += [*page.cells_before(before), same]
        lines.append("| " + " | ".join(row) + " |")
        print(lines[-1], flush=True)
    (RESULTS / f"{page.result}.md").write_text("\n".join(lines) + "\n")


def measure(name: str, *case: Any) -> Result:
    """Measure a case of the page `name` with the package that is imported here."""
    warnings.simplefilter("ignore")
    return PAGES[name].measure(*case)


@dataclass(frozen=True)
class Captured:
    """A GPT on the meta device, its captured step, and its optimizer."""

    module: Any
    batch: torch.Tensor
    graph: OpGraph
    trace: FunctionTrace
    optimizer: OptimizerProfile

    def split(self) -> split_model.SplitModel:
        """Return a new model of splits, which has captured nothing yet."""
        return split_model.SplitModel(self.module, self.batch, self.graph, self.trace)


def capture_gpt(layers: int, hidden: int, heads: int, seq_len: int) -> Captured:
    """Build a GPT and capture its step."""
    module: Any = build_on_meta(lambda: ByteGPT(layers, hidden, heads, seq_len=seq_len))
    batch, trace = torch.zeros(2, seq_len + 1, dtype=torch.long), FunctionTrace()
    graph = capture(module, batch, adapt=trace.of)
    optimizers, named = make_fake_optimizers(module, device=torch.device("cpu"))
    return Captured(module, batch, graph, trace, read_optimizer(optimizers, named_parameters=named))


def count_captures() -> list[float]:
    """Return a list to which each capture of a step on slices adds its CPU seconds from now on."""
    captures: list[float] = []
    capture_split = split_model.SplitModel.capture_split

    def counted(*args: Any, **kwargs: Any) -> Any:
        started = time.process_time()
        try:
            return capture_split(*args, **kwargs)
        finally:
            captures.append(time.process_time() - started)

    split_model.SplitModel.capture_split = counted  # type: ignore[method-assign]
    return captures


# ---- the page of pipelines -----------------------------------------------------------------------

# layers, hidden, heads, devices, cluster, samples of a step, steps of a sample, epsilon
PIPELINE_CASES = (
    (24, 1024, 16, 8, "a100_8x8", 8, 1024, 0.0),
    (48, 1024, 16, 64, "a100_8x8", 64, 1024, 0.001),
    (48, 1024, 16, 64, "a100_8x8", 64, 1024, 0.0),
    (48, 1024, 16, 64, "cloud_25gbe_16x8", 256, 1024, 0.001),
    (96, 12288, 96, 1024, "a100_128x8", 2048, 2048, 0.01),
)
NODES = {"a100_128x8": ("a100_8x8", 128)}  # clusters with more nodes than those of a file


def measure_pipelines(*case: Any) -> Result:
    """Search five times with and without pipelines, three times with tensor axes too."""
    layers, hidden, heads, devices, name, samples, steps, epsilon = case
    gpt, cluster, captures = (
        capture_gpt(layers, hidden, heads, steps),
        cluster_of(name),
        count_captures(),
    )

    def search(*, pipelines: bool, splits: bool = False) -> tuple[float, Any]:
        given: dict[str, Any] = {
            "pipelines": PipelineRequest() if pipelines else None,
            "epsilon": epsilon,
            "max_seconds": 120.0,
            "split": gpt.split() if splits else None,
        }
        request = SearchRequest(gpt.graph, cluster, gpt.optimizer, (devices,), samples, **given)
        captures.clear()
        started = time.process_time()
        found = search_plans(request)
        return time.process_time() - started - sum(captures), found

    search(pipelines=True)  # loads what is loaded once
    runs = [search(pipelines=True) for _ in range(RUNS)]
    found = runs[0][1]
    with_splits = [search(pipelines=True, splits=True) for _ in range(3)]
    captured = [len(captures), sum(captures)]
    both = [
        p
        for p in with_splits[0][1].points
        if p.plan.schedule is not None and p.plan.mesh.tensor_axes
    ]
    return {
        "split": [seconds for seconds, _ in with_splits],
        "captured": captured,
        "split_points": [len(with_splits[0][1].points), len(both)],
        "seconds": [seconds for seconds, _ in runs],
        "points": len(found.points),
        "staged": sum(point.plan.schedule is not None for point in found.points),
        "error": found.error_bound,
        "without": [search(pipelines=False)[0] for _ in range(RUNS)],
        "frontier": [(point.step_seconds, point.peak_bytes) for point in found.points],
    }


def cluster_of(name: str) -> Cluster:
    """Return a cluster of `conf/cluster`, or one of its kind with more nodes."""
    file, nodes = NODES.get(name, (name, None))
    cluster = Cluster.load(ROOT / f"conf/cluster/{file}.yaml")
    return cluster if nodes is None else replace(cluster, name=name, num_nodes=nodes)


def pipeline_cells(case: tuple[Any, ...], found: Result) -> list[str]:
    """Return the row of a case, for this package."""
    layers, hidden, _, devices, cluster, samples, steps, epsilon = case
    return [
        f"{layers} layers of {hidden} on {devices} of {cluster}, {samples} x {steps}",
        f"{100 * epsilon:g} %",
        least_and_median(found["seconds"]),
        least_and_median(found["without"]),
        least_and_median(found["split"]),
        f"{found['captured'][0]} in {found['captured'][1]:.2f}",
        f"{found['points']}, {found['staged']} with stages",
        f"{found['split_points'][0]}, {found['split_points'][1]} with stages on slices",
        error_of(found),
    ]


# ---- the page of tensor axes; GPTs have hidden 1024 and 16 heads ---------------------------------

# layers, devices, cluster, samples of a step, steps of a sample
TENSOR_CASES = (
    (24, 8, "a100_8x8", 8, 1024),
    (48, 64, "a100_8x8", 64, 1024),
    (24, 8, "h100_2x8", 8, 1024),
    (24, 8, "a100_8x8", 2, 1024),
    (48, 64, "a100_8x8", 16, 1024),
)


def measure_tensor(layers: int, devices: int, name: str, samples: int, steps: int) -> Result:
    """Search five times with and five times without tensor axes."""
    captures, gpt, cluster = (
        count_captures(),
        capture_gpt(layers, 1024, 16, steps),
        cluster_of(name),
    )

    def search(*, splits: bool) -> tuple[float, Any]:
        split = gpt.split() if splits else None
        request = SearchRequest(gpt.graph, cluster, gpt.optimizer, (devices,), samples, split=split)
        started = time.process_time()
        found = search_plans(request)
        return time.process_time() - started, found

    search(splits=True)  # loads what is loaded once
    captures.clear()
    runs = [search(splits=True) for _ in range(RUNS)]
    found = runs[0][1]
    return {
        "seconds": [seconds for seconds, _ in runs],
        "captures": len(captures) // RUNS,
        "capture_seconds": sum(captures) / RUNS,
        "points": len(found.points),
        "split": sum("tensor" in point.plan.mesh.names for point in found.points),
        "error": found.error_bound,
        "without": [search(splits=False)[0] for _ in range(RUNS)] if samples % devices == 0 else [],
        "frontier": [(point.step_seconds, point.peak_bytes) for point in found.points],
    }


def tensor_cells(case: tuple[Any, ...], found: Result) -> list[str]:
    """Return the row of a case, for this package."""
    layers, devices, cluster, samples, steps = case
    return [
        f"{layers} layers on {devices} of {cluster}, {samples} x {steps}",
        least_and_median(found["seconds"]),
        captures_of(found),
        least_and_median(found["without"]) if found["without"] else "none",
        f"{found['points']}, {found['split']} split",
        error_of(found),
    ]


def captures_of(found: Result) -> str:
    """Return how many steps were captured, and their seconds together."""
    return f"{found['captures']} in {found['capture_seconds']:.2f}"


def least_and_median(seconds: Sequence[float]) -> str:
    """Return both, which is what noise leaves of CPU seconds."""
    return f"{min(seconds):.2f}, {statistics.median(seconds):.2f}"


def error_of(result: Result) -> str:
    """Return the error bound of the search."""
    return "0 (exact)" if not result["error"] else f"{100 * result['error']:.2g} %"


BATCH_NOTE = "batch: samples of a step over all ranks x steps of a sample"
PAGES = {
    "pipelines": Page(
        "pipeline_search",
        title="Search over pipelines and all data meshes",
        heads=[
            "model, cluster, batch",
            "epsilon",
            "search",
            "without pipelines",
            "with tensor axes",
            "captures",
            "plans on the frontier",
            "plans with tensor axes",
            "error bound",
        ],
        heads_before=["search"],
        notes=[
            f"CPU seconds of one process, minimum and median of {RUNS} (3 with tensor axes), "
            "without captures",
            "captures: of steps on slices, and their seconds together, beside the search with "
            "tensor axes",
            BATCH_NOTE,
        ],
        cases=PIPELINE_CASES,
        measure=measure_pipelines,
        cells=pipeline_cells,
        cells_before=lambda before: [least_and_median(before["seconds"])],
    ),
    "tensor": Page(
        "tensor_search",
        title="Search over all meshes with a tensor axis",
        heads=[
            "model, cluster, batch",
            "search",
            "captures",
            "without tensor axes",
            "plans on the frontier",
            "error bound",
        ],
        heads_before=["search", "captures"],
        notes=[
            f"CPU seconds of one process, minimum and median of {RUNS}; captures: how many, and "
            "their seconds together (mean)",
            BATCH_NOTE,
        ],
        cases=TENSOR_CASES,
        measure=measure_tensor,
        cells=tensor_cells,
        cells_before=lambda before: [least_and_median(before["seconds"]), captures_of(before)],
    ),
}


if __name__ == "__main__":
    main()

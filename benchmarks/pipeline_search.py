"""How long the whole search takes with pipelines and without: CPU seconds, minimum and median.

    python -m benchmarks.pipeline_search                       # two minutes
    python -m benchmarks.pipeline_search --against ../before   # in turns with another checkout

Models are GPTs of `topt plan` (float32, AdamW) on the meta device, captured before at two batch
sizes. Every run searches from the captured step again, in a process that has searched once: data
axes, stages x microbatches x schedules, cuts, prices. With tensor axes: beside these, alone and
under stages; steps on slices are captured then, which is counted by itself.
"""

from __future__ import annotations

import time
import warnings
from typing import Any

from benchmarks.common import ROOT
from benchmarks.search_page import error_of, least_and_median, write_page

RUNS = 5
# layers, hidden, heads, devices, cluster, samples of a step, steps of a sample, epsilon
CASES = (
    (24, 1024, 16, 8, "a100_8x8", 8, 1024, 0.0),
    (48, 1024, 16, 64, "a100_8x8", 64, 1024, 0.001),
    (48, 1024, 16, 64, "a100_8x8", 64, 1024, 0.0),
    (48, 1024, 16, 64, "cloud_25gbe_16x8", 256, 1024, 0.001),
    (96, 12288, 96, 1024, "a100_128x8", 2048, 2048, 0.01),
)
NODES = {"a100_128x8": ("a100_8x8", 128)}  # clusters with more nodes than those of a file


def measure(*case: Any) -> dict[str, Any]:
    """Search once to load what is loaded once, then five times with and five times without
    pipelines, here.
    """
    import torch  # noqa: PLC0415

    from lightning_topt.cli.tasks.byte_lm import ByteGPT  # noqa: PLC0415
    from lightning_topt.costs.optimizer import read_optimizer  # noqa: PLC0415
    from lightning_topt.graph.capture import capture  # noqa: PLC0415
    from lightning_topt.graph.module_copy import build_on_meta  # noqa: PLC0415
    from lightning_topt.plan.pipeline_search import PipelineRequest  # noqa: PLC0415
    from lightning_topt.plan.plan_search import search_plans  # noqa: PLC0415
    from lightning_topt.plugins.planning import make_fake_optimizers  # noqa: PLC0415
    from lightning_topt.techniques.tensor_parallel import split_model as split_candidates  # noqa: PLC0415
    from lightning_topt.techniques.tensor_parallel.function_trace import FunctionTrace  # noqa: PLC0415

    try:
        from lightning_topt.plan.plan_search import SearchRequest  # noqa: PLC0415
    except ModuleNotFoundError:  # where checkouts from before that file have it
        from lightning_topt.plan.plan_search import SearchRequest  # type: ignore[no-redef]  # noqa: PLC0415

    warnings.simplefilter("ignore")
    layers, hidden, heads, devices, name, samples, steps, epsilon = case
    module: Any = build_on_meta(lambda: ByteGPT(layers, hidden, heads, seq_len=steps))
    batch, trace = torch.zeros(2, steps + 1, dtype=torch.long), FunctionTrace()
    graph = capture(module, batch, adapt=trace.of)
    optimizers, named = make_fake_optimizers(module, device=torch.device("cpu"))
    profile = read_optimizer(optimizers, named_parameters=named)
    cluster = cluster_of(name)

    captures: list[float] = []
    capture_split = split_candidates.capture_split

    def counted(*args: Any, **kwargs: Any) -> Any:
        started = time.process_time()
        try:
            return capture_split(*args, **kwargs)
        finally:
            captures.append(time.process_time() - started)

    split_candidates.capture_split = counted

    def search(*, pipelines: bool, splits: bool = False) -> tuple[float, Any]:
        wanted = PipelineRequest() if pipelines else None
        split = split_candidates.SplitModel(module, batch, graph, trace) if splits else None
        given: dict[str, Any] = {
            "pipelines": wanted,
            "epsilon": epsilon,
            "max_seconds": 120.0,
            "split": split,
        }
        request = SearchRequest(graph, cluster, profile, (devices,), samples, **given)
        captures.clear()
        started = time.process_time()
        found = search_plans(request)
        return time.process_time() - started - sum(captures), found

    search(pipelines=True)
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


def cluster_of(name: str) -> Any:
    """Return a cluster of `conf/cluster`, or one of its kind with more nodes."""
    from dataclasses import replace  # noqa: PLC0415

    from lightning_topt.costs.cluster import Cluster  # noqa: PLC0415

    file, nodes = NODES.get(name, (name, None))
    cluster = Cluster.load(ROOT / f"conf/cluster/{file}.yaml")
    return cluster if nodes is None else replace(cluster, name=name, num_nodes=nodes)


def cells(case: tuple[Any, ...], found: dict[str, Any]) -> list[str]:
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


def main() -> None:
    """Measure all cases and write the page."""
    write_page(
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
            "batch: samples of a step over all ranks x steps of a sample",
        ],
        cases=CASES,
        cells=cells,
        cells_before=lambda before: [least_and_median(before["seconds"])],
    )


if __name__ == "__main__":
    main()

"""How long the whole search takes over meshes with and without a tensor axis: CPU seconds, minimum
and median.

    python -m benchmarks.tensor_search                       # two minutes
    python -m benchmarks.tensor_search --against ../before   # in turns with another checkout

The model is the GPT of `topt plan` (hidden 1024, 16 heads, float32, AdamW), on the meta device; its
whole step is captured before, at two batch sizes. Every run searches from the captured step again,
in a process that has searched once: candidates for splits, captures of a rank's step, prices,
chains.
"""

from __future__ import annotations

import time
import warnings
from typing import Any

from benchmarks.common import ROOT
from benchmarks.search_page import error_of, least_and_median, write_page

RUNS = 5
# layers, devices, cluster, samples of a step, steps of a sample
CASES = (
    (24, 8, "a100_8x8", 8, 1024),
    (48, 64, "a100_8x8", 64, 1024),
    (24, 8, "h100_2x8", 8, 1024),
    (24, 8, "a100_8x8", 2, 1024),
    (48, 64, "a100_8x8", 16, 1024),
)


def measure(layers: int, devices: int, name: str, samples: int, steps: int) -> dict[str, Any]:
    """Search once to load what is loaded once, then five times with and five times without tensor
    axes, here.
    """
    import torch  # noqa: PLC0415

    from lightning_topt.cli.tasks.byte_lm import ByteGPT  # noqa: PLC0415
    from lightning_topt.costs.cluster import Cluster  # noqa: PLC0415
    from lightning_topt.costs.optimizer import read_optimizer  # noqa: PLC0415
    from lightning_topt.graph.capture import capture  # noqa: PLC0415
    from lightning_topt.graph.module_copy import build_on_meta  # noqa: PLC0415
    from lightning_topt.plan.plan_search import search_plans  # noqa: PLC0415
    from lightning_topt.plugins.planning import make_fake_optimizers  # noqa: PLC0415
    from lightning_topt.techniques.tensor_parallel import split_model as split_candidates  # noqa: PLC0415
    from lightning_topt.techniques.tensor_parallel.function_trace import FunctionTrace  # noqa: PLC0415

    try:
        from lightning_topt.plan.plan_search import SearchRequest  # noqa: PLC0415
    except ModuleNotFoundError:  # where checkouts from before that file have it
        from lightning_topt.plan.plan_search import SearchRequest  # type: ignore[no-redef]  # noqa: PLC0415

    warnings.simplefilter("ignore")
    captures: list[float] = []

    def counted(*args: Any, **kwargs: Any) -> Any:
        started = time.process_time()
        try:
            return capture_split(*args, **kwargs)
        finally:
            captures.append(time.process_time() - started)

    capture_split = split_candidates.capture_split
    split_candidates.capture_split = counted
    module: Any = build_on_meta(lambda: ByteGPT(layers, 1024, 16, seq_len=steps))
    batch, trace = torch.zeros(2, steps + 1, dtype=torch.long), FunctionTrace()
    graph = capture(module, batch, adapt=trace.of)
    optimizers, named = make_fake_optimizers(module, device=torch.device("cpu"))
    profile = read_optimizer(optimizers, named_parameters=named)
    cluster = Cluster.load(ROOT / f"conf/cluster/{name}.yaml")

    def search(*, splits: bool) -> tuple[float, Any]:
        model = split_candidates.SplitModel(module, batch, graph, trace) if splits else None
        request = SearchRequest(graph, cluster, profile, (devices,), samples, split=model)
        started = time.process_time()
        found = search_plans(request)
        return time.process_time() - started, found

    search(splits=True)
    captures.clear()
    runs = [search(splits=True) for _ in range(RUNS)]
    found = runs[0][1]
    result = {
        "seconds": [seconds for seconds, _ in runs],
        "captures": len(captures) // RUNS,
        "capture_seconds": sum(captures) / RUNS,
        "points": len(found.points),
        "split": sum("tensor" in point.plan.mesh.names for point in found.points),
        "error": found.error_bound,
        "without": [search(splits=False)[0] for _ in range(RUNS)] if samples % devices == 0 else [],
    }
    result["frontier"] = [(point.step_seconds, point.peak_bytes) for point in found.points]
    return result


def cells(case: tuple[Any, ...], found: dict[str, Any]) -> list[str]:
    """Return the row of a case, for this package."""
    layers, devices, cluster, samples, steps = case
    return [
        f"{layers} layers on {devices} of {cluster}, {samples} x {steps}",
        least_and_median(found["seconds"]),
        _captures(found),
        least_and_median(found["without"]) if found["without"] else "none",
        f"{found['points']}, {found['split']} split",
        error_of(found),
    ]


def _captures(found: dict[str, Any]) -> str:
    return f"{found['captures']} in {found['capture_seconds']:.2f}"


def main() -> None:
    """Measure all cases and write the page."""
    write_page(
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
            "batch: samples of a step over all ranks x steps of a sample",
        ],
        cases=CASES,
        cells=cells,
        cells_before=lambda before: [least_and_median(before["seconds"]), _captures(before)],
    )


if __name__ == "__main__":
    main()

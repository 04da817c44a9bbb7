"""Top-k selection against reading the data once, torch.topk and the paper's bisection.

    python -m benchmarks.selection        # about 3 minutes; one thread

Float32 from N(0, 1). Rounds are interleaved: in each, every method runs once on the same data. Figures are medians over the
rounds with the lowest and highest round, and ratios of the medians.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.common import RESULTS, machine
from lightning_topt.communication import feedback_top_k, top_k
from lightning_topt.communication.selection import warm_up

READ = "x.sum(): one read"
OURS, FEEDBACK = "top_k", "feedback_top_k (accumulate, select, zero)"
BISECTION, TORCH = "MSTopK, 30 bisections (torch)", "torch.topk of x.abs()"


def methods(x: Tensor, residual: Tensor, k: int) -> dict[str, Callable[[], object]]:
    """What is timed. The feedback adds so little that the residual stays as it is over the rounds."""
    return {
        READ: x.sum,
        OURS: lambda: top_k(x, k),
        FEEDBACK: lambda: feedback_top_k(x, residual, k, scale=1e-6),
        "top_k, plain torch": lambda: top_k(x, k, method="sampled"),
        "eager feedback: add_, torch.topk, zero": lambda: _eager_feedback(x, residual, k),
        BISECTION: lambda: top_k(x, k, method="mstopk"),
        TORCH: lambda: torch.topk(x.abs(), k, sorted=False),
    }


def _eager_feedback(gradient: Tensor, residual: Tensor, k: int) -> None:
    residual.add_(gradient, alpha=1e-6)
    indices = torch.topk(residual.abs(), k, sorted=False).indices
    values = residual[indices]
    residual[indices] = 0
    residual[indices] = values  # so that every round finds the same


def measure(numel: int, density: float, rounds: int) -> dict[str, list[float]]:
    """Seconds by method and round."""
    x, k = torch.randn(numel), round(density * numel)
    residual = torch.randn(numel)
    timed = methods(x, residual, k)
    seconds: dict[str, list[float]] = {name: [] for name in timed}
    for number in range(rounds + 1):
        for name, run in timed.items():
            kept = residual.clone() if name == FEEDBACK else None
            start = time.perf_counter()
            run()
            if number:  # the first round warms up
                seconds[name].append(time.perf_counter() - start)
            if kept is not None:
                residual.copy_(kept)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--sizes", type=int, nargs="+", default=[10**7, 10**8])
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    warm_up()
    lines = ["# Selection of the largest entries", "", machine(), "- one thread, float32 from N(0, 1)"]
    for numel in options.sizes:
        for density in (0.001, 0.01):
            seconds = measure(numel, density, options.rounds)
            median = {name: statistics.median(values) for name, values in seconds.items()}
            lines += ["", f"## {numel:.0e} elements, {100 * density:g} % of them", ""]
            lines += ["| method | ms, median (lowest to highest) | reads of the data |", "|---|---|---|"]
            for name, values in seconds.items():
                low, high = 1e3 * min(values), 1e3 * max(values)
                reads = median[name] / median[READ]
                lines.append(f"| {name} | {1e3 * median[name]:.2f} ({low:.2f} to {high:.2f}) | {reads:.2f} |")
            bisection, torch_topk = median[BISECTION] / median[OURS], median[TORCH] / median[OURS]
            lines += [
                "",
                f"`top_k`: {bisection:.0f} times as fast as the bisection, {torch_topk:.0f} times as torch.topk.",
            ]
            print("\n".join(lines[-14:]), flush=True)
    (RESULTS / "selection.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()

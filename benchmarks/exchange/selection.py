"""Top-k selection against reading the data once, torch.topk and the paper's bisection.

    python -m benchmarks.exchange.selection        # about 3 minutes; one thread

Float32 from N(0, 1). Rounds are interleaved: in each, every method runs once on the same data,
after an untimed read that leaves the caches alike for all. Figures are medians over rounds, times
with the lowest and highest round. A ratio is taken within each round, so that a machine that is
slower for a while slows both sides.
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
    """Return what is timed.

    The feedback adds so little that the residual stays as it is over the rounds.
    """
    return {
        READ: x.sum,
        OURS: lambda: top_k(x, k),
        FEEDBACK: lambda: feedback_top_k(x, residual, k, scale=1e-6),
        "eager feedback: add_, torch.topk, zero": lambda: _eager_feedback(x, residual, k),
        BISECTION: lambda: bisected(x, k),
        TORCH: lambda: torch.topk(x.abs(), k, sorted=False),
    }


def bisected(x: Tensor, k: int, *, rounds: int = 30) -> Tensor:
    """Return the indices (k,) of about the k largest magnitudes of the flat `x` (d,), ascending.

    MSTopK, algorithm 1 of arXiv 2010.10458 as in the authors' code: bisection of a threshold by
    counting. All that reach the final threshold, and a contiguous run of those between it and the
    next lower one.
    """
    magnitudes = x.abs()
    base, top = magnitudes.mean().item(), magnitudes.max().item()
    # bisect between the mean and the largest magnitude
    low, high = 0.0, 1.0
    enough, too_low = (0, float("inf")), (x.numel(), 0.0)
    reached = torch.empty_like(magnitudes, dtype=torch.bool)
    for _ in range(rounds):
        ratio = (low + high) / 2
        threshold = base + ratio * (top - base)
        count = int(torch.count_nonzero(torch.ge(magnitudes, threshold, out=reached)))
        if count <= k:
            high = ratio
            enough = max(enough, (count, threshold), key=lambda found: found[0])
        else:
            low = ratio
            too_low = min(too_low, (count, threshold), key=lambda found: found[0])
    # all above, then enough of those between the two thresholds
    chosen = (magnitudes >= enough[1]).nonzero().view(-1)
    between = ((magnitudes >= too_low[1]) & (magnitudes < enough[1])).nonzero().view(-1)
    missing = k - chosen.numel()
    first = int(torch.randint(0, between.numel() - missing + 1, ()))
    return torch.cat([chosen, between[first : first + missing]]).sort().values


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
            (x.sum() + residual.sum()).item()
            start = time.perf_counter()
            run()
            if number:  # the first round warms up
                seconds[name].append(time.perf_counter() - start)
            if kept is not None:
                residual.copy_(kept)
    return seconds


def ratio(seconds: dict[str, list[float]], one: str, other: str) -> float:
    """Median over the rounds of the time of `one` in units of the `other`'s."""
    return statistics.median(a / b for a, b in zip(seconds[one], seconds[other], strict=True))


def section(numel: int, density: float, seconds: dict[str, list[float]]) -> list[str]:
    """Markdown lines of one table."""
    lines = ["", f"## {numel:.0e} elements, {100 * density:g} % of them", ""]
    lines += ["| method | ms, median (lowest to highest) | reads of the data |", "|---|---|---|"]
    for name, values in seconds.items():
        median, low, high = (1e3 * f(values) for f in (statistics.median, min, max))
        lines.append(
            f"| {name} | {median:.2f} ({low:.2f} to {high:.2f}) | {ratio(seconds, name, READ):.2f} "
            "|"
        )
    bisection, torch_topk = (ratio(seconds, name, OURS) for name in (BISECTION, TORCH))
    times = (
        f"`top_k`: {bisection:.0f} times as fast as the bisection, {torch_topk:.0f} times as "
        "torch.topk."
    )
    return [*lines, "", times]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--sizes", type=int, nargs="+", default=[10**7, 10**8])
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    warm_up()
    rounds = f"- {options.rounds} interleaved rounds; ratios are medians of those within a round"
    lines = [
        "# Selection of the largest entries",
        "",
        machine(),
        "- one thread, float32 from N(0, 1)",
        rounds,
    ]
    for numel in options.sizes:
        for density in (0.001, 0.01):
            lines += section(numel, density, measure(numel, density, options.rounds))
            print("\n".join(lines[-12:]), flush=True)
            (RESULTS / "selection.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()

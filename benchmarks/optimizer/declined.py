r"""What a step costs that `AdaptiveStep` has decided not to share, against the plain step.

    OMP_NUM_THREADS=1 python -m torch.distributed.run --standalone --nproc-per-node 2 \
        -m benchmarks.optimizer.declined

Two copies of one optimizer in each of two processes alternate, step by step; who begins alternates
too. The one that decides is given a gather of ten seconds, so that it declines. A round's figure is
the median over its pairs of steps, on the slower rank.
"""

from __future__ import annotations

import statistics
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from benchmarks.common import RESULTS, machine
from benchmarks.optimizer.decision import SIZES, blocks, make, slowest
from benchmarks.optimizer.shared import SETTLING_STEPS, Adaptive, count
from lightning_topt.optim import adaptive_step

ROUNDS, ROUND_SECONDS, MOST_PAIRS = 5, 2.0, 400
OPTIMIZERS = ("SGD", "AdamW, fused", "AdamW")


def seconds(optimizer: Optimizer) -> float:
    start = time.perf_counter()
    optimizer.step()
    return time.perf_counter() - start


def ratios(plain: Optimizer, declined: Optimizer) -> tuple[list[float], float]:
    """Declined / plain of every round, and milliseconds of a plain step."""
    once = slowest(statistics.median(seconds(plain) for _ in range(5)))
    pairs = max(10, min(MOST_PAIRS, round(ROUND_SECONDS / once / 2)))
    found, times = [], []
    for _ in range(ROUNDS):
        dist.barrier()
        of_pairs = []
        for pair in range(pairs):
            if pair % 2:
                first, second = seconds(plain), seconds(declined)
            else:
                second, first = seconds(declined), seconds(plain)
            of_pairs.append(second / first)
            times.append(first)
        found.append(slowest(statistics.median(of_pairs)))
    return found, 1e3 * statistics.median(times)


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    adaptive_step.measure_gather = lambda *_, **__: 10.0  # type: ignore[assignment]
    lines = [
        "| optimizer | parameters, M | plain step, ms | declined / plain |",
        "|---|---|---|---|",
    ]
    for name in OPTIMIZERS:
        for size in list(SIZES)[:4]:
            plain, declined = (make(name, blocks(size)) for _ in range(2))
            adaptive = Adaptive(declined, always=False)
            for optimizer in (plain, declined):
                for _ in range(SETTLING_STEPS):
                    optimizer.step()
            assert not adaptive.pays, adaptive.said
            found, milliseconds = ratios(plain, declined)
            found.sort()
            spread = f"{statistics.median(found):.3f} ({found[0]:.3f} to {found[-1]:.3f})"
            lines.append(
                f"| {name} | {count(blocks(size)) / 1e6:.1f} | {milliseconds:.2f} | {spread} |"
            )
    if dist.get_rank() == 0:
        text = "\n".join(
            [
                "# Steps that are not shared",
                "",
                machine(),
                "",
                "2 ranks, one thread each.",
                "",
                *lines,
            ]
        )
        (RESULTS / "optimizer_declined.md").write_text(text + "\n")
        print(text)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

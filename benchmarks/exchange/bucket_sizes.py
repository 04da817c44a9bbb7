"""Steps under DDP by the size of its buckets, on one node and over links.

    sudo python -m benchmarks.exchange.bucket_sizes             # about ten minutes on 2 quiet cores

Sizes are torch's own, that of our plans, half and twice that. Two or four ranks train a GPT of 14 M
parameters; every rank has one copy of it for each size, and the copies alternate.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.common import RESULTS, machine
from benchmarks.lab import Lab, LabError, end_on_signals
from lightning_topt.demo import ByteGPT

# nodes, ranks on each, and the link between them
SETTINGS: dict[str, tuple[int, int, str | None]] = {
    "2 ranks of one node": (1, 2, None),
    "4 ranks of one node": (1, 4, None),
    "2 nodes, no limit": (2, 1, None),
    "2 nodes, 1 Gb/s": (2, 1, "1gbit"),
    "2 nodes of 2, 1 Gb/s": (2, 2, "1gbit"),
}
ROUNDS, STEPS = 5, 5


class Contender:
    """A GPT under DDP with buckets of `size` MiB; None: torch's own."""

    def __init__(self, size: float | None) -> None:
        torch.manual_seed(0)
        module: nn.Module = ByteGPT(8, 384, 6, 128)
        arguments: dict[str, Any] = {"gradient_as_bucket_view": True, "init_sync": False}
        self.ddp = DistributedDataParallel(module, bucket_cap_mb=size, **arguments)
        self.optimizer = torch.optim.AdamW(module.parameters(), fused=True)

    def step(self, tokens: Tensor) -> None:
        self.optimizer.zero_grad(set_to_none=False)
        loss: Any = F.cross_entropy(self.ddp(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        self.optimizer.step()


def sizes() -> dict[str, float | None]:
    """The sizes in MiB by what they are called."""
    total = sum(p.nbytes for p in ByteGPT(8, 384, 6, 128).parameters())
    parts = {"an eighth": 8, "a sixteenth (ours)": 16, "a thirty-second": 32}
    return {"torch's 25 MiB": None, **{name: total / part / 2**20 for name, part in parts.items()}}


def measure() -> dict[str, list[float]]:
    """Median seconds of a step in each round, on the slowest rank."""
    tokens = torch.randint(
        0, 256, (4, 129), generator=torch.Generator().manual_seed(dist.get_rank())
    )
    contenders = {name: Contender(size) for name, size in sizes().items()}
    for contender in contenders.values():
        for _ in range(3):  # the first lays buckets anew
            contender.step(tokens)
    found: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(ROUNDS):
        for name, contender in contenders.items():
            taken = torch.tensor([_seconds(contender, tokens) for _ in range(STEPS)])
            dist.all_reduce(taken, dist.ReduceOp.MAX)
            found[name].append(float(taken.median()))
    return found


def _seconds(contender: Contender, tokens: Tensor) -> float:
    dist.barrier()
    start = time.perf_counter()
    contender.step(tokens)
    return time.perf_counter() - start


def as_rank(out: Path) -> None:
    """Run as one rank of a job."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found = measure()
    if dist.get_rank() == 0:
        out.write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def report(found: dict[str, dict[str, list[float]]]) -> str:
    """The table."""
    names = [*next(iter(found.values()))]
    lines = [
        "# Sizes of DDP's buckets",
        "",
        "`sudo python -m benchmarks.exchange.bucket_sizes`",
        "",
        machine(),
        "",
        "A GPT of 14 M parameters (58 MB of gradients), 4 sequences of 128 bytes per rank, gloo, a "
        f"thread per rank. Seconds of a step: median (range) of {ROUNDS} interleaved rounds of "
        f"{STEPS} steps. Plans on several nodes have sixteenths.",
        "",
        "| | " + " | ".join(names) + " | torch's / ours |",
        "|---" * (len(names) + 2) + "|",
    ]
    for setting, rounds in found.items():
        cells = [
            f"{statistics.median(each):.3f} ({min(each):.3f} to {max(each):.3f})"
            for each in rounds.values()
        ]
        ratios = [a / b for a, b in zip(rounds[names[0]], rounds[names[2]], strict=True)]
        ratio = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        lines.append(f"| {setting} | " + " | ".join(cells) + f" | {ratio} |")
    return "\n".join([*lines, ""])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="of one rank of a job")
    options = parser.parse_args()
    if "RANK" in os.environ and options.out is not None:
        as_rank(options.out)
        return
    end_on_signals()
    found: dict[str, dict[str, list[float]]] = {}
    for setting, (nodes, ranks, link) in SETTINGS.items():
        with Lab(nodes, rate=link) as lab:
            found[setting] = lab.run_module(
                "benchmarks.exchange.bucket_sizes", ranks_per_node=ranks
            )
        print(
            setting,
            {name: round(statistics.median(each), 3) for name, each in found[setting].items()},
            flush=True,
        )
    (RESULTS / "bucket_sizes.md").write_text(report(found))


if __name__ == "__main__":
    try:
        main()
    except LabError as error:
        sys.exit(str(error))

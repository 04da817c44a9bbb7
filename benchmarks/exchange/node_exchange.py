"""Reduce-scatter and all-gather within a node: through memory against gloo on loopback.

    python -m benchmarks.exchange.node_exchange        # about 2 minutes on 2 cores

Rounds are interleaved: in each, every method runs once per size, until the slowest of the CPU ranks
is done.
"""

from __future__ import annotations

import argparse
import multiprocessing as mp
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.common import RESULTS, machine
from lightning_topt.communication.collectives import all_gather_into, reduce_scatter_into
from lightning_topt.communication.node.node_exchange import NodeExchange, SharedMemoryNodeExchange

MEGABYTES = (1, 10, 100)
TORCH, SLICES, DIRECT = ("torch on gloo", "slices on gloo", "memory, read directly")
METHODS = (TORCH, SLICES, DIRECT)


def scatter_by(node: NodeExchange) -> Callable[[Tensor], Tensor]:
    def run(flat: Tensor) -> Tensor:
        pending = node.reduce_scatter(flat)
        pending.wait()
        return pending.result()

    return run


def gather_by(node: NodeExchange) -> Callable[[Tensor], Tensor]:
    def run(flat: Tensor) -> Tensor:
        node.gather_shards(flat).wait()
        return flat

    return run


def torch_scatter(flat: Tensor, *, into: Tensor) -> Tensor:
    dist.reduce_scatter_tensor(into, flat)
    return into


def slices_scatter(flat: Tensor, *, into: Tensor) -> Tensor:
    reduce_scatter_into(into, flat)
    return into


def torch_gather(flat: Tensor, *, own: slice) -> Tensor:
    dist.all_gather_into_tensor(flat, flat[own])
    return flat


def slices_gather(flat: Tensor, *, own: slice) -> Tensor:
    all_gather_into(flat, flat[own])
    return flat


def measure(rank: int, ranks: int, store: str, rounds: int, queue: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    world = dist.group.WORLD
    assert world is not None
    nodes: dict[str, NodeExchange] = {DIRECT: SharedMemoryNodeExchange(world, timeout_seconds=60)}
    seconds: dict[tuple[str, int, str], list[float]] = {}
    for megabytes in MEGABYTES:
        n = megabytes * 250_000
        flat, into = torch.full((n,), float(rank)), torch.empty(n // ranks)
        own = slice(rank * (n // ranks), (rank + 1) * (n // ranks))
        calls = {
            ("reduce-scatter", TORCH): lambda flat=flat, into=into: torch_scatter(flat, into=into),
            ("reduce-scatter", SLICES): lambda flat=flat, into=into: slices_scatter(
                flat, into=into
            ),
            ("all-gather", TORCH): lambda flat=flat, own=own: torch_gather(flat, own=own),
            ("all-gather", SLICES): lambda flat=flat, own=own: slices_gather(flat, own=own),
        }
        for name, node in nodes.items():
            calls["reduce-scatter", name] = lambda flat=flat, node=node: scatter_by(node)(flat)
            calls["all-gather", name] = lambda flat=flat, node=node: gather_by(node)(flat)
        for number in range(rounds + 2):
            for (kind, name), call in calls.items():
                flat.fill_(float(rank))
                taken, result = timed(call, repeats=max(1, 20 // megabytes))
                check(kind, result, ranks)
                if number >= 2:
                    seconds.setdefault((kind, megabytes, name), []).append(taken)
    if rank == 0:
        queue.put(seconds)
    dist.barrier()
    dist.destroy_process_group()


def check(kind: str, result: Tensor, ranks: int) -> None:
    if kind == "reduce-scatter":
        assert result[0] == result[-1] == ranks * (ranks - 1) / 2
    else:
        assert torch.equal(result.view(ranks, -1)[:, -1], torch.arange(float(ranks)))


def timed(call: Callable[[], Tensor], *, repeats: int) -> tuple[float, Tensor]:
    """Seconds per call on the slowest rank, and the last result."""
    dist.barrier()
    start = time.perf_counter()
    for _ in range(repeats):
        result = call()
    taken = torch.tensor([(time.perf_counter() - start) / repeats], dtype=torch.float64)
    dist.all_reduce(taken, op=dist.ReduceOp.MAX)
    return taken.item(), result


def run(ranks: int, *, rounds: int) -> dict[tuple[str, int, str], list[float]]:
    context = mp.get_context("spawn")
    queue = context.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        arguments = (ranks, str(Path(folder) / "store"), rounds, queue)
        processes = [
            context.Process(target=measure, args=(rank, *arguments)) for rank in range(ranks)
        ]
        for process in processes:
            process.start()
        while not queue._reader.poll(1):  # type: ignore[attr-defined]
            if any(process.exitcode for process in processes):
                raise SystemExit(
                    f"a rank failed: exit codes {[process.exitcode for process in processes]}"
                )
        seconds: dict[tuple[str, int, str], list[float]] = queue.get()
        for process in processes:
            process.join()
    return seconds


def table(seconds: dict[tuple[str, int, str], list[float]]) -> list[str]:
    lines = [
        "| | MB | " + " | ".join(METHODS) + f" | {SLICES} / {DIRECT} |",
        "|---|---|" + "---|" * (len(METHODS) + 1),
    ]
    for kind in ("reduce-scatter", "all-gather"):
        for megabytes in MEGABYTES:
            taken = {name: seconds[kind, megabytes, name] for name in METHODS}
            cells = [
                f"{1e3 * statistics.median(taken[n]):.2f} ({1e3 * min(taken[n]):.2f})"
                for n in METHODS
            ]
            ratios = sorted(a / b for a, b in zip(taken[SLICES], taken[DIRECT], strict=True))
            cells.append(f"{statistics.median(ratios):.1f} ({ratios[0]:.1f} to {ratios[-1]:.1f})")
            lines.append(f"| {kind} | {megabytes} | " + " | ".join(cells) + " |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--dry", action="store_true", help="print only")
    options = parser.parse_args()
    lines = [
        "# Exchange inside a node: memory against gloo on loopback",
        "",
        machine(),
        "",
        "Milliseconds per call on the slowest rank, float32, one thread per rank: median (minimum) "
        f"of {options.rounds} interleaved rounds. MB is the size of the whole bucket. The last "
        "column: ratio of the two, median (range) over rounds.",
    ]
    for ranks in options.ranks:
        lines += ["", f"## {ranks} ranks", "", *table(run(ranks, rounds=options.rounds))]
    print("\n".join(lines))
    if not options.dry:
        (RESULTS / "node_exchange.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()

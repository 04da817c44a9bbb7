"""How long the frontier search takes, how many plans it finds, and how exact they are.

    python -m benchmarks.search.frontier                       # a minute on one core

Figures are CPU seconds, plans, and the error bound where the search had to give some plans up.
Costs of chains and meshes are invented (`invented_gpt`).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import matplotlib
import numpy as np

from benchmarks.common import RESULTS, machine
from lightning_topt.costs.chain_table import BlockCosts, ChainTable
from lightning_topt.frontier import search_chain, search_meshes

matplotlib.use("Agg")
import matplotlib.pyplot as plt


def growth() -> list[str]:
    """Chains and meshes: seconds by layers and by distinct blocks, as a table and a picture."""
    layers, distinct = (12, 24, 48, 96, 192), (1, 2, 4, 8, 12)
    search_meshes(invented_meshes(64, 48, distinct=4))  # loads what is compiled
    lines = [
        "| chain of blocks x 8 | distinct blocks | plans | error bound | CPU seconds |",
        "|---|---|---|---|---|",
    ]
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.5))
    for count in distinct:
        times = []
        for depth in layers:
            start = time.process_time()
            found = search_chain(invented_gpt(depth, distinct=count))
            times.append(time.process_time() - start)
            error = "0 (exact)" if found.exact else f"{100 * found.error_bound:.2g} %"
            lines.append(f"| {depth} | {count} | {len(found.points)} | {error} | {times[-1]:.2g} |")
            print(lines[-1], flush=True)
        axes[0].plot(layers, times, "o-", label=f"{count} distinct")
    axes[0].set(
        xlabel="layers", ylabel="CPU seconds", title="search_chain, 8 configurations per block"
    )
    axes[0].legend()
    lines += [
        "",
        "| meshes | layers | distinct blocks | plans | error bound | CPU seconds |",
        "|---|---|---|---|---|---|",
    ]
    for depth in (24, 48, 96):
        times = []
        for count in distinct[:4]:
            meshes = invented_meshes(64, depth, distinct=count)
            start = time.process_time()
            union = search_meshes(meshes)
            times.append(time.process_time() - start)
            error = "0 (exact)" if union.exact else f"{100 * union.error_bound:.2g} %"
            lines.append(
                f"| {len(meshes)} | {depth} | {count} | {len(union.points)} | {error} | "
                f"{times[-1]:.2g} |"
            )
            print(lines[-1], flush=True)
        axes[1].plot(distinct[:4], times, "o-", label=f"{depth} layers")
    axes[1].set(xlabel="distinct blocks", title="search_meshes, 64 devices as 7 meshes")
    axes[1].legend()
    figure.tight_layout()
    figure.savefig(RESULTS / "frontier_growth.png", dpi=120)
    return lines


def main() -> None:
    lines = [
        "# Frontier search",
        "",
        "`python -m benchmarks.search.frontier`",
        "",
        machine(),
        f"- load average before the run: {os.getloadavg()[0]:.1f}",
        f"- NumPy {np.__version__}; default limits",
        "",
        *growth(),
        "",
        "![growth](frontier_growth.png)",
    ]
    (RESULTS / "frontier_search.md").write_text("\n".join(lines) + "\n")


# ---- cost tables that are shaped like real models ----------------------------------------------


def invented_gpt(layers: int, *, distinct: int, replicas: int = 8, shards: int = 8) -> Any:
    """Return a `ChainTable` with blocks of about 100 MB, in `distinct` sizes.

    Configurations are ZeRO 0 to 3 over `shards` ranks, each recomputed or not. Gradients are
    exchanged inside a node of 8 at 100 GB/s, between nodes at 10 GB/s.
    """
    blocks = []
    for index in range(distinct):
        size = 1 + 0.2 * index
        rows = []
        for level in range(4):
            for again in (0, 1):
                parameters, shard = 100e6 * size, shards if level else 1
                inside, between = (
                    2 * parameters / 1e11,
                    (2 * parameters / shard / 1e10 if replicas > 1 else 0.0),
                )
                gather = (level == 3) * 2 * parameters * (shards - 1) / shards / 1e11
                forward, backward = 1e-2 * size, 2e-2 * size + again * 1e-2 * size
                state = parameters * (
                    3 if level == 0 else 1 + 2 / shard if level < 3 else 3 / shard
                )
                kept = (10e6 if again else 200e6) * size
                late = parameters * (1 if level < 2 else 1 / shard)
                hump = 250e6 * size + parameters * (level > 1) + parameters * (level == 3)
                rows.append(
                    (
                        forward + backward + gather,
                        backward,
                        inside + between,
                        state,
                        kept,
                        late,
                        hump,
                    )
                )
        blocks.append(BlockCosts(tuple(range(8)), *np.array(rows).T))
    order = tuple(sorted(n % distinct for n in range(layers)))
    return ChainTable(tuple(blocks), order, 1e-2, 1e9, 1e7)


def invented_meshes(
    devices: int, layers: int, *, distinct: int
) -> list[tuple[str, Callable[[], Any]]]:
    """All divisions of `devices` into replicas and shards."""
    sizes = [2**i for i in range(devices.bit_length()) if devices % 2**i == 0]
    return [
        (
            f"{devices // s} x {s}",
            lambda s=s: invented_gpt(layers, distinct=distinct, replicas=devices // s, shards=s),
        )
        for s in sizes
    ]


if __name__ == "__main__":
    main()

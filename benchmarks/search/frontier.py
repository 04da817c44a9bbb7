"""How long the frontier search takes, how many plans it finds, and how exact they are.

    python -m benchmarks.search.frontier                       # a few minutes on one core
    python -m benchmarks.search.frontier --against ../before   # also by another checkout's search

Figures are CPU seconds, plans, and the error bound where the search had to give some plans up.
Every table is searched in a process of its own, after a small one that loads compiled code;
checkouts take turns. Costs of chains and meshes are invented (`invented_gpt`).

`measure` runs this file with older packages as well, so it imports recent modules only where they
are needed.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import RESULTS, ROOT, JobFailed, machine, measure_at
from lightning_topt.costs.cost_table import CostTable, EdgeCosts, OperatorCosts

PATIENCE = 60  # seconds for one table


def measure(name: str, seed: int) -> dict[str, Any]:
    """Search one table, here."""
    # where this checkout has it, and where earlier ones have it
    homes = (
        "tests.frontier.graph_search",
        "lightning_topt.frontier.frontier_search",
        "lightning_topt.frontier.search",
    )
    found_at = next(home for home in homes if importlib.util.find_spec(home) is not None)
    search_frontier = importlib.import_module(found_at).search_frontier

    for edges, columns in ((True, 1), (False, 3)):  # loads what is compiled
        search_frontier(
            random_costs(20, 12, columns, columns, edges=edges)(np.random.default_rng(0))
        )
    table = TABLES[name](np.random.default_rng(seed))
    start = time.process_time()
    found = search_frontier(table)
    seconds = time.process_time() - start
    return {"seconds": seconds, "points": len(found), "error": found.error_bound}


def measured(checkout: Path, table: str, seed: int) -> dict[str, Any] | None:
    """The same with the package of `checkout`; None when it takes longer than `PATIENCE`."""
    try:
        return measure_at(checkout, "search.frontier", (table, seed), timeout=PATIENCE)
    except subprocess.TimeoutExpired:
        return None
    except JobFailed as failed:
        return {
            "seconds": float("nan"),
            "points": 0,
            "error": float("nan"),
            "failed": failed.output[-300:],
        }


def tables(against: Path | None, seeds: int) -> list[str]:

    checkouts = [ROOT] + ([against] if against else [])
    lines = [
        "| operators x configurations | paths + moments | plans | error bound | CPU seconds |"
        + (" before: plans | error bound | CPU seconds |" if against else ""),
        "|---|---|---|---|---|" + ("---|---|---|" if against else ""),
    ]
    for name, make in TABLES.items():
        found: dict[Path, list[dict[str, Any] | None]] = {checkout: [] for checkout in checkouts}
        for seed in range(seeds):
            for checkout, results in found.items():
                results.append(measured(checkout, name, seed) if None not in results else None)
        shape = make(np.random.default_rng(0))
        mine = cells(found[ROOT])
        row = [name, f"{len(shape.fixed_seconds)} + {len(shape.fixed_bytes)}", *mine]
        lines.append("| " + " | ".join(row + (cells(found[against]) if against else [])) + " |")
        print(lines[-1], flush=True)
    return lines


def cells(results: list[dict[str, Any] | None]) -> list[str]:
    """Plans, error bound and seconds of the runs; one that was stopped counts as such."""
    done = [result for result in results if result]
    if len(done) < len(results):
        return ["-", "-", f"more than {PATIENCE}"]
    if any("failed" in result for result in done):
        return ["-", "-", "raises"]
    errors = [100 * result["error"] for result in done]
    error = "0 (exact)" if not any(errors) else in_form(errors, "{:.2g}") + " %"
    return [
        in_form([result["points"] for result in done], "{:.0f}"),
        error,
        in_form([result["seconds"] for result in done], "{:.2g}"),
    ]


def growth() -> list[str]:
    """Chains and meshes: seconds by layers and by distinct blocks, as a table and a picture."""
    import matplotlib  # noqa: PLC0415

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt  # noqa: PLC0415

    from lightning_topt.frontier import search_chain, search_meshes  # noqa: PLC0415

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
            lines.append(f"| {depth} | {count} | {len(found)} | {error} | {times[-1]:.2g} |")
            print(lines[-1], flush=True)
        axes[0].plot(layers, times, "o-", label=f"{count} distinct")
    axes[0].set(
        xlabel="layers", ylabel="CPU seconds", title="search_chain, 8 configurations per block"
    )
    axes[0].legend()
    lines += [
        "",
        "| meshes | layers | distinct blocks | searched | plans | error bound | CPU seconds |",
        "|---|---|---|---|---|---|---|",
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
                f"| {len(meshes)} | {depth} | {count} | {len(union.searched)} | "
                f"{len(union.points)} | {error} | {times[-1]:.2g} |"
            )
            print(lines[-1], flush=True)
        axes[1].plot(distinct[:4], times, "o-", label=f"{depth} layers")
    axes[1].set(xlabel="distinct blocks", title="search_meshes, 64 devices as 7 meshes")
    axes[1].legend()
    figure.tight_layout()
    figure.savefig(RESULTS / "frontier_growth.png", dpi=120)
    return lines


def in_form(values: list[float], form: str) -> str:
    """Median and range, or the one value that all have."""
    low, middle, high = (
        form.format(value) for value in (min(values), statistics.median(values), max(values))
    )
    return middle if low == high else f"{middle} ({low} to {high})"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--against", type=Path)
    parser.add_argument("--seeds", type=int, default=3)
    arguments = parser.parse_args()
    against = arguments.against
    against = against.resolve() if against else None
    lines = [
        "# Frontier search",
        "",
        "`python -m benchmarks.search.frontier" + (" --against <checkout>`" if against else "`"),
        "",
        machine(),
        f"- load average before the run: {os.getloadavg()[0]:.1f}",
        f"- NumPy {np.__version__}; {arguments.seeds} seed(s) per row: median (least to most); "
        "default limits",
    ]
    if against:
        head = subprocess.run(
            ["git", "log", "-1", "--format=%h %s"],
            cwd=against,
            capture_output=True,
            text=True,
            check=True,
        )
        lines.append(f"- before: {head.stdout.strip()}")
    lines += [
        "",
        *tables(against, arguments.seeds),
        "",
        *growth(),
        "",
        "![growth](frontier_growth.png)",
    ]
    (RESULTS / "frontier_search.md").write_text("\n".join(lines) + "\n")


# ---- cost tables: random ones (seeded), and invented ones that are shaped like real models -------

Arrays = list[tuple[np.ndarray, np.ndarray]]
Make = Callable[[np.random.Generator], Any]


def table(
    costs: Arrays, *, chain: np.random.Generator | None = None, edge_bytes: float = 0.0
) -> CostTable:
    """Make a table of operators with these (seconds, bytes).

    With `chain`, neighbours are connected by random costs on edges.
    """
    operators = tuple(
        OperatorCosts(f"op{i}", tuple(range(len(s))), s, b) for i, (s, b) in enumerate(costs)
    )
    edges = []
    for i in range(len(costs) - 1 if chain else 0):
        shape = len(costs[i][0]), len(costs[i + 1][0])
        seconds = 1e-3 * chain.random((*shape, costs[i][0].shape[1]))
        size = np.floor(edge_bytes * chain.random((*shape, costs[i][1].shape[1])))
        edges.append(EdgeCosts(f"op{i}", f"op{i + 1}", seconds, size))
    return CostTable(
        operators, tuple(edges), np.zeros(costs[0][0].shape[1]), np.zeros(costs[0][1].shape[1])
    )


def random_costs(
    count: int, configs: int, paths: int, moments: int, *, same: bool = False,
    opposed: bool = False, edges: bool = False, unit: float = 1.0, edge_bytes: float = 0.0,
) -> Make:  # fmt: skip
    """Return a maker of uniform costs, bytes in multiples of `unit`.

    `opposed`: what is fast needs memory, so most configurations matter.
    """

    def make(rng: np.random.Generator) -> CostTable:
        def one() -> tuple[np.ndarray, np.ndarray]:
            seconds, size = rng.random((configs, paths)), rng.random((configs, moments))
            size = 1 - seconds.mean(axis=1, keepdims=True) + 0.02 * size if opposed else size
            return 1e-2 * seconds, unit * np.floor(1e8 / unit * size)

        first = one()
        costs = [first if same else one() for _ in range(count)]
        return table(costs, chain=rng if edges else None, edge_bytes=edge_bytes)

    return make


def blocks_in_time(count: int, *, same: bool, edges: bool = False) -> Make:
    """Return a maker of blocks with a moment each in the forward and the backward pass.

    There are 2 paths (compute, network) and 4 configurations.
    """

    def make(rng: np.random.Generator) -> CostTable:
        costs = []
        for block in range(count):
            size = 1.0 if same else rng.uniform(0.5, 2)
            weights, activations, output = 10e6 * size, 40e6 * size, 2e6 * size
            seconds, memory = np.zeros((4, 2)), np.zeros((4, 2 * count))
            for config in range(4):
                sharded, recompute = divmod(config, 2)
                seconds[config] = (
                    size * (1.33e-2 if recompute else 1e-2) + 3e-4 * sharded,
                    4e-3 * size * (1 + 0.3 * sharded),
                )
                memory[config] = 2 * weights + 2 * weights / (1 + sharded)
                kept = output if recompute else activations
                memory[config, block:count] += kept  # forward moments from its own on
                memory[config, count + block + 1 :] += (
                    kept  # backward passes of later blocks, which come before its own
                )
                memory[config, [block, count + block]] += 1.2 * activations
            costs.append((seconds, np.floor(memory)))
        return table(costs, chain=rng if edges else None)

    return make


ONE_COLUMN_EACH = {
    "48 x 24, random": random_costs(48, 24, 1, 1),
    "48 x 32, random": random_costs(48, 32, 1, 1),
    "48 x 32, random, opposed": random_costs(48, 32, 1, 1, opposed=True),
    "48 x 24, chain with edges, whole megabytes": random_costs(48, 24, 1, 1, edges=True, unit=1e6),
    "48 x 24, chain with edges": random_costs(48, 24, 1, 1, edges=True),
    "48 x 24, chain with edges, random bytes on edges": random_costs(
        48, 24, 1, 1, edges=True, edge_bytes=1e7
    ),
    "48 x 32, chain with edges, opposed": random_costs(48, 32, 1, 1, edges=True, opposed=True),
}
SEVERAL_COLUMNS = {
    "12 x 6, chain with edges, two of each": random_costs(12, 6, 2, 2, edges=True),
    "12 x 6, chain with edges, random bytes on edges": random_costs(
        12, 6, 2, 5, edges=True, edge_bytes=1e8
    ),
    "12 x 6, chain with edges": random_costs(12, 6, 2, 5, edges=True),
    "12 x 4, chain with edges, blocks in time": blocks_in_time(12, same=False, edges=True),
    "14 x 8, equal, random": random_costs(14, 8, 2, 6, same=True),
    "14 x 8, random": random_costs(14, 8, 2, 6),
    "50 x 8, equal, random": random_costs(50, 8, 2, 6, same=True),
    "50 x 8, random": random_costs(50, 8, 2, 6),
    "12 x 4, equal blocks in time": blocks_in_time(12, same=True),
    "48 x 4, equal blocks in time": blocks_in_time(48, same=True),
    "24 x 4, blocks of different size in time": blocks_in_time(24, same=False),
    "48 x 4, blocks of different size in time": blocks_in_time(48, same=False),
}
TABLES = ONE_COLUMN_EACH | SEVERAL_COLUMNS


def invented_gpt(layers: int, *, distinct: int, replicas: int = 8, shards: int = 8) -> Any:
    """Return a `ChainTable` with blocks of about 100 MB, in `distinct` sizes.

    Configurations are ZeRO 0 to 3 over `shards` ranks, each recomputed or not. Gradients are
    exchanged inside a node of 8 at 100 GB/s, between nodes at 10 GB/s.
    """
    from lightning_topt.costs.chain_table import BlockCosts, ChainTable  # noqa: PLC0415

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
    return ChainTable(tuple(blocks), order, (), 1e-2, 1e9, 1e7)


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

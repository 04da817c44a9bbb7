"""How long the search takes (CPU seconds), how many plans it finds, and its error bound when it has
to give some up.

    python -m benchmarks.frontier_search                       # a few minutes on one core
    python -m benchmarks.frontier_search --against ../before   # also by another checkout's search

Every table is searched in a process of its own, after a small one that loads compiled code;
checkouts take turns. Chains and meshes are those of `frontier_cases.invented_gpt`, whose costs are
invented.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
import statistics
import subprocess
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import RESULTS, ROOT, JobFailed, machine, measure_at

PATIENCE = 60  # seconds for one table


def measure(name: str, seed: int) -> dict[str, Any]:
    """Search one table, here."""
    from benchmarks.frontier_cases import TABLES, random_costs  # noqa: PLC0415

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
        return measure_at(checkout, "frontier_search", (table, seed), timeout=PATIENCE)
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
    from benchmarks.frontier_cases import TABLES  # noqa: PLC0415

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

    from benchmarks.frontier_cases import invented_gpt, invented_meshes  # noqa: PLC0415
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
    parser = argparse.ArgumentParser()
    parser.add_argument("--against", type=Path)
    parser.add_argument("--seeds", type=int, default=3)
    arguments = parser.parse_args()
    against = arguments.against
    against = against.resolve() if against else None
    lines = [
        "# Frontier search",
        "",
        "`python -m benchmarks.frontier_search" + (" --against <checkout>`" if against else "`"),
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


if __name__ == "__main__":
    main()

"""How long `search_frontier` takes, how many plans it finds, and what its error bound is when it has to give some up.

    python -m benchmarks.frontier_search        # about 1 minute on 2 cores

Costs are random (seeded). "Blocks in time" are shaped like real models: each has its own moment of the forward and of
the backward pass, 2 paths (compute, network), 4 configurations (shard the optimizer state or not, recompute or not).
"""

from __future__ import annotations

import statistics
from collections.abc import Callable

import numpy as np

from benchmarks.common import RESULTS, machine
from lightning_topt.costs.cost_table import CostTable, EdgeCosts, OperatorCosts
from lightning_topt.frontier.search import search_frontier

Arrays = list[tuple[np.ndarray, np.ndarray]]
SEEDS = (0, 1, 2)


def table(costs: Arrays, *, chain: np.random.Generator | None = None) -> CostTable:
    """Operators with these (seconds, bytes); with `chain`, neighbours are joined by random costs on edges."""
    operators = tuple(OperatorCosts(f"op{i}", tuple(range(len(s))), s, b) for i, (s, b) in enumerate(costs))
    edges = []
    for i in range(len(costs) - 1 if chain else 0):
        shape = len(costs[i][0]), len(costs[i + 1][0])
        seconds = 1e-3 * chain.random((*shape, costs[i][0].shape[1]))
        edges.append(EdgeCosts(f"op{i}", f"op{i + 1}", seconds, np.zeros((*shape, costs[i][1].shape[1]))))
    return CostTable(operators, tuple(edges), np.zeros(costs[0][0].shape[1]), np.zeros(costs[0][1].shape[1]))


def random_costs(count: int, configs: int, paths: int, moments: int, *, same: bool, opposed: bool = False) -> Callable:
    """Uniform costs; `opposed`: what is fast needs memory, so that most configurations are worth considering."""

    def make(rng: np.random.Generator) -> CostTable:
        def one() -> tuple[np.ndarray, np.ndarray]:
            seconds, size = rng.random((configs, paths)), rng.random((configs, moments))
            size = 1 - seconds.mean(axis=1, keepdims=True) + 0.02 * size if opposed else size
            return 1e-2 * seconds, np.floor(1e8 * size)

        first = one()
        return table([first if same else one() for _ in range(count)])

    return make


def chain_with_edges(count: int, configs: int) -> Callable:
    def make(rng: np.random.Generator) -> CostTable:
        costs = [(1e-2 * rng.random((configs, 1)), np.floor(1e8 * rng.random((configs, 1)))) for _ in range(count)]
        return table(costs, chain=rng)

    return make


def blocks_in_time(count: int, *, same: bool) -> Callable:
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
        return table(costs)

    return make


CASES = {
    "48 x 24, random": random_costs(48, 24, 1, 1, same=False),
    "48 x 32, random": random_costs(48, 32, 1, 1, same=False),
    "48 x 32, random, opposed": random_costs(48, 32, 1, 1, same=False, opposed=True),
    "24 x 24 in a chain with costs on edges": chain_with_edges(24, 24),
    "14 x 8, equal, random": random_costs(14, 8, 2, 6, same=True),
    "14 x 8, random": random_costs(14, 8, 2, 6, same=False),
    "50 x 8, equal, random": random_costs(50, 8, 2, 6, same=True),
    "50 x 8, random": random_costs(50, 8, 2, 6, same=False),
    "12 x 4, equal blocks in time": blocks_in_time(12, same=True),
    "48 x 4, equal blocks in time": blocks_in_time(48, same=True),
    "24 x 4, blocks of different size in time": blocks_in_time(24, same=False),
    "48 x 4, blocks of different size in time": blocks_in_time(48, same=False),
}


def main() -> None:
    lines = [
        "# Frontier search",
        "",
        "`python -m benchmarks.frontier_search`",
        "",
        machine(),
        f"- NumPy {np.__version__}; {len(SEEDS)} seeds per row: median (least to most); default `max_points`",
        "",
        "| operators x configurations | paths + moments | plans on the frontier | error bound | seconds |",
        "|---|---|---|---|---|",
    ]
    for name, make in CASES.items():
        tables = [make(np.random.default_rng(seed)) for seed in SEEDS]
        found = [search_frontier(one) for one in tables]
        columns = f"{len(tables[0].fixed_seconds)} + {len(tables[0].fixed_bytes)}"
        bounds = [frontier.error_bound for frontier in found]
        error = (
            "0 (exact)"
            if all(frontier.exact for frontier in found)
            else spread([100 * b for b in bounds], "{:.2g}") + " %"
        )
        plans = spread([len(frontier) for frontier in found], "{:.0f}")
        lines.append(
            f"| {name} | {columns} | {plans} | {error} | {spread([f.search_seconds for f in found], '{:.2g}')} |"
        )
        print(lines[-1], flush=True)
    (RESULTS / "frontier_search.md").write_text("\n".join(lines) + "\n")


def spread(values: list[float], form: str) -> str:
    low, middle, high = (form.format(value) for value in (min(values), statistics.median(values), max(values)))
    return f"{middle} ({low} to {high})"


if __name__ == "__main__":
    main()

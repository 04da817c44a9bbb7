"""Small random cost tables for comparing searches with brute force."""

import numpy as np

from lightning_topt.costs.cost_table import CostTable, EdgeCosts, OperatorCosts

SHAPES = {
    "isolated": lambda rng, n: [],
    "chain": lambda rng, n: [(i, i + 1) for i in range(n - 1)],
    "tree": lambda rng, n: [(int(rng.integers(i)), i) for i in range(1, n)],
    "parallel edges": lambda rng, n: [(i, i + 1) for i in range(n - 1)] + [(i + 1, i) for i in range(n - 1)],
    "ring": lambda rng, n: [(i, (i + 1) % n) for i in range(n)],
    "skips": lambda rng, n: [(i, i + 1) for i in range(n - 1)] + [(i, i + 2) for i in range(n - 2)],
    "complete": lambda rng, n: [(i, j) for j in range(n) for i in range(j)],
    "forest": lambda rng, n: [(i, i + 1) for i in range(n - 1) if i % 2],
}


def random_table(
    rng, *, shape, operators=5, configs=3, paths=2, moments=3, ties=False, forbidden=0.0, same=False, grid=1024.0
):
    """Costs are multiples of 1 / 1024, so that sums in any order are equal, or of 1 / `grid`, or with `ties` small integers.

    `same` makes all operators equal; some edges are zero.
    """

    def costs(*size):
        values = rng.integers(-1, 4, size).astype(float) if ties else rng.integers(0, 1024, size) / grid
        values[rng.random(size[:-1]) < forbidden] = np.inf
        return values

    counts = [configs if same else int(rng.integers(1, configs + 1)) for _ in range(operators)]
    first = costs(configs, paths), costs(configs, moments)
    nodes = []
    for i, count in enumerate(counts):
        seconds, size = first if same else (costs(count, paths), costs(count, moments))
        nodes.append(OperatorCosts(f"op{i}", tuple(range(count)), seconds, size))
    edges = []
    for i, j in SHAPES[shape](rng, operators):
        size = (counts[i], counts[j])
        zero = rng.random() < 0.2
        values = costs(*size, paths), costs(*size, moments)
        values = tuple(np.zeros_like(value) for value in values) if zero else values
        edges.append(EdgeCosts(f"op{i}", f"op{j}", *values))
    fixed = rng.integers(0, 3, paths).astype(float), rng.integers(0, 3, moments).astype(float)
    return CostTable(tuple(nodes), tuple(edges), *fixed)

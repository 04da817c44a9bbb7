"""Cost tables for `frontier_search`: random ones (seeded), and invented ones that are shaped like
real models.

This file runs against older checkouts as well, so it imports what is new only where that is asked
for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from lightning_topt.costs.cost_table import CostTable, EdgeCosts, OperatorCosts

Arrays = list[tuple[np.ndarray, np.ndarray]]
Make = Callable[[np.random.Generator], Any]


def table(
    costs: Arrays, *, chain: np.random.Generator | None = None, edge_bytes: float = 0.0
) -> CostTable:
    """Operators with these (seconds, bytes); with `chain`, neighbours are joined by random costs on
    edges.
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
    """Uniform costs, bytes in multiples of `unit`; `opposed`: what is fast needs memory, so most
    configurations matter.
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
    """Each block has a moment of the forward and one of the backward pass, 2 paths (compute,
    network), 4 configurations.
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
    """A `ChainTable` with blocks of about 100 MB (`distinct` sizes), ZeRO 0 to 3 over `shards`
    ranks, each recomputed or not.

    Gradients are exchanged inside a node of 8 at 100 GB/s, between nodes at 10 GB/s.
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

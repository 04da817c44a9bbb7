"""Small random tables for comparing searches with brute force, and slow twins of the chain."""

import itertools

import numpy as np

from lightning_topt.costs.chain_table import BlockCosts, BlockEdge, ChainTable
from lightning_topt.costs.cost_table import CostTable, EdgeCosts, OperatorCosts
from tests.frontier.brute_force import brute_force_frontier

SHAPES = {
    "isolated": lambda rng, n: [],
    "chain": lambda rng, n: [(i, i + 1) for i in range(n - 1)],
    "tree": lambda rng, n: [(int(rng.integers(i)), i) for i in range(1, n)],
    "parallel edges": lambda rng, n: (
        [(i, i + 1) for i in range(n - 1)] + [(i + 1, i) for i in range(n - 1)]
    ),
    "ring": lambda rng, n: [(i, (i + 1) % n) for i in range(n)],
    "skips": lambda rng, n: [(i, i + 1) for i in range(n - 1)] + [(i, i + 2) for i in range(n - 2)],
    "complete": lambda rng, n: [(i, j) for j in range(n) for i in range(j)],
    "forest": lambda rng, n: [(i, i + 1) for i in range(n - 1) if i % 2],
}


def random_table(
    rng,
    *,
    shape,
    operators=5,
    configs=3,
    paths=2,
    moments=3,
    ties=False,
    forbidden=0.0,
    same=False,
    grid=1024.0,
):
    """Costs are multiples of 1 / 1024, so that sums in any order are equal, or of 1 / `grid`, or
    with `ties` small integers.

    `same` makes all operators equal; some edges are zero.
    """

    def costs(*size):
        values = (
            rng.integers(-1, 4, size).astype(float) if ties else rng.integers(0, 1024, size) / grid
        )
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


def assert_equals_brute_force(table, frontier):
    """Point for point, and every point's plan costs what it says."""
    expected = brute_force_frontier(table)
    assert frontier.exact and frontier.error_bound == 0 and len(frontier) == len(expected)
    found = np.array([(p.step_seconds, p.peak_bytes) for p in frontier.points]).reshape(-1, 2)
    wanted = np.array([(p.step_seconds, p.peak_bytes) for p in expected]).reshape(-1, 2)
    np.testing.assert_array_equal(found, wanted)
    assert_costs_are_evaluated(table, frontier)
    assert all(
        a.peak_bytes < b.peak_bytes
        for a, b in zip(frontier.points, frontier.points[1:], strict=False)
    )


def assert_costs_are_evaluated(table, frontier):
    for point in frontier.points:
        if isinstance(table, CostTable):
            assert table.evaluate(point.choice) == (point.step_seconds, point.peak_bytes)
        else:
            seconds, size = table.evaluate(np.array([list(point.choice.values())]))
            assert (seconds[0], size[0]) == (point.step_seconds, point.peak_bytes)


def random_chain(
    rng,
    *,
    blocks,
    configs,
    distinct=None,
    edges=0.0,
    ties=False,
    forbidden=0.0,
    layouts=None,
    late=True,
    forward=False,
):
    """Blocks with costs on a grid, `edges` the share of neighbours that are joined; `layouts` fewer
    than configurations.

    With `forward` about half of them take other bytes in forward than in backward.
    """

    def costs(*size):
        return (
            rng.integers(0, 4, size).astype(float) if ties else rng.integers(0, 1024, size) / 1024
        )

    made = []
    for _ in range(distinct or blocks):
        count = int(rng.integers(1, configs + 1))
        seconds, static = costs(count) + 1.0, costs(count)
        seconds[rng.random(count) < forbidden] = np.inf
        sides = (
            [None, None] if layouts is None else [rng.integers(0, layouts, count) for _ in range(2)]
        )
        parts = (
            costs(count) * (rng.random() < 0.8),
            costs(count),
            costs(count) * late,
            costs(count),
        )
        backward = np.minimum(costs(count), seconds)
        own = [costs(count) if forward and rng.random() < 0.5 else None for _ in range(2)]
        made.append(
            BlockCosts(
                tuple(range(count)), seconds, backward, parts[0], static, *parts[1:], *sides, *own
            )
        )
    order = (
        [int(rng.integers(len(made))) for _ in range(blocks)] if distinct else list(range(blocks))
    )
    joins = []
    for a, b in itertools.pairwise(order):
        size = (layouts, layouts) if layouts else (len(made[a].configs), len(made[b].configs))
        values = costs(*size), costs(*size)
        values[0][rng.random(size) < forbidden] = np.inf
        joins.append(BlockEdge(*values) if rng.random() < edges else None)
    fixed = [float(value) for value in rng.integers(0, 3, 3)]
    return ChainTable(tuple(made), tuple(order), tuple(joins), *fixed)


def simulate(table, plan):
    """(step_seconds, peak_bytes) of one plan of a chain, event by event."""
    blocks = [table.block(n) for n in range(len(table.order))]
    names = (
        "seconds",
        "backward",
        "exchange",
        "static",
        "kept",
        "late",
        "hump",
        "held",
        "forward_hump",
    )
    chosen = [
        {name: block.cost(name)[c] for name in names} for block, c in zip(blocks, plan, strict=True)
    ]
    edges = [
        (
            table.edge(n),
            blocks[n].layouts("outputs")[plan[n]],
            blocks[n + 1].layouts("inputs")[plan[n + 1]],
        )
        for n in range(len(blocks) - 1)
    ]
    edges = [(edge.seconds[i, j], edge.bytes[i, j]) for edge, i, j in edges if edge is not None]
    always = (
        table.fixed_bytes
        + sum(block["static"] for block in chosen)
        + sum(size for _, size in edges)
    )
    clock = sum(b["seconds"] - b["backward"] for b in chosen) + sum(seconds for seconds, _ in edges)
    held, old, peak, network = 0.0, sum(block["late"] for block in chosen), always, 0.0
    for block in chosen:  # forward
        old -= block["late"]
        peak = max(peak, always + held + block["forward_hump"] + old)
        held += block["held"]
    kept, late = sum(block["kept"] for block in chosen), 0.0
    peak = max(peak, always + held, always + kept)
    for block in reversed(chosen):
        kept -= block["kept"]
        peak = max(peak, always + kept + late + block["hump"])
        clock += block["backward"]
        late += block["late"]
        network = max(network, clock) + block["exchange"]
    return max(clock, network) + table.fixed_seconds, max(peak, always + late + table.update_bytes)


def one_column_per_point_in_time(table):
    """The same chain as a `CostTable`: a path for each block that the network may wait for, a
    moment for each block.
    """
    count = len(table.order)
    operators = []
    for n in range(count):
        b = table.block(n)
        paths = [b.seconds]  # computation alone
        for wait in range(count):  # the network is idle until the backward of block `wait` is over
            before, after = b.seconds - b.backward, b.exchange
            paths.append(
                b.seconds if n > wait else b.seconds + after if n == wait else before + after
            )
        moments = [b.static + b.kept, b.static + b.late, b.static + b.cost("held")]
        for before, at_it in ("kept", "hump"), ("held", "forward_hump"):
            names = [before if n < at else "late" if n > at else at_it for at in range(count)]
            moments += [b.static + b.cost(name) for name in names]
        operators.append(
            OperatorCosts(str(n), b.configs, np.stack(paths, axis=1), np.stack(moments, axis=1))
        )
    edges = []
    for n in range(count - 1):
        if (edge := table.edge(n)) is not None:
            pairs = np.ix_(table.block(n).layouts("outputs"), table.block(n + 1).layouts("inputs"))
            size = (count + 1, 2 * count + 3)
            values = [
                np.repeat(v[pairs][..., None], k, axis=2)
                for v, k in zip((edge.seconds, edge.bytes), size, strict=True)
            ]
            edges.append(EdgeCosts(str(n), str(n + 1), *values))
    fixed_bytes = np.full(2 * count + 3, table.fixed_bytes)
    fixed_bytes[1] += table.update_bytes
    return CostTable(
        tuple(operators), tuple(edges), np.full(count + 1, table.fixed_seconds), fixed_bytes
    )

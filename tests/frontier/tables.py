"""Small random chains, a simulated step, and every plan of a chain: what searches must find."""

import itertools

import numpy as np

from lightning_topt.costs.chain_table import BlockCosts, ChainTable
from lightning_topt.frontier.pareto import pareto_rows_2

NAMES = (
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


def evaluate(table, plans):
    """Return (step_seconds, peak_bytes) (n,) of `plans` (n, block), which are configurations."""
    # by name of the cost: (block, n)
    shape = len(table.order), len(plans)
    chosen = {
        name: np.array(
            [block_of(table, n).cost(name)[plans[:, n]] for n in range(shape[0])]
        ).reshape(shape)
        for name in NAMES
    }
    # sums over blocks (n,)
    seconds, static = chosen["seconds"].sum(axis=0), chosen["static"].sum(axis=0)
    # the step is over when computation and network are
    step = np.maximum(seconds, network_seconds(seconds, chosen["backward"], chosen["exchange"]))
    moving = [  # backward, forward, the ends of both, the update
        moving_bytes(chosen["kept"], chosen["late"], chosen["hump"]),
        moving_bytes(chosen["held"], chosen["late"], chosen["forward_hump"]),
        chosen["kept"].sum(axis=0),
        chosen["held"].sum(axis=0),
        chosen["late"].sum(axis=0) + table.update_bytes,
    ]
    return step + table.fixed_seconds, static + np.max(moving, axis=0) + table.fixed_bytes


def network_seconds(seconds, backward, exchange):
    """Return the seconds (n,) when the last exchange is over."""
    finished = np.full_like(seconds, -np.inf)
    for n in range(len(backward) - 1, -1, -1):  # in the order of backward
        # backward passes of blocks before n are still to come then
        ready = seconds - backward[:n].sum(axis=0)
        finished = np.maximum(finished, ready) + exchange[n]
    return finished


def moving_bytes(kept, late, hump):
    """Return the most bytes (n,) while a block runs, above what is static."""
    # while block n runs: blocks before it keep, blocks behind it are late
    peaks = [kept[:n].sum(axis=0) + hump[n] + late[n + 1 :].sum(axis=0) for n in range(len(hump))]
    return np.max(peaks, axis=0) if peaks else np.zeros(hump.shape[1])


def block_of(table, n):
    """Return the costs of block `n` of a chain."""
    return table.blocks[table.order[n]]


def every_plan(table):
    """Return (seconds, bytes) of the plans of a chain that no other one beats, by bytes."""
    counts = [len(block_of(table, n).configs) for n in range(len(table.order))]
    plans = np.array([*itertools.product(*map(range, counts))], np.intp)
    plans = plans.reshape(-1 if counts else 1, len(counts))
    seconds, size = evaluate(table, plans)
    allowed = np.isfinite(seconds) & np.isfinite(size)
    seconds, size = seconds[allowed], size[allowed]
    rows = pareto_rows_2(size, seconds)
    return [*zip(seconds[rows].tolist(), size[rows].tolist(), strict=True)]


def assert_equals_every_plan(table, frontier):
    """Point for point, and every point's plan costs what it says."""
    assert frontier.exact and frontier.error_bound == 0
    assert [(p.step_seconds, p.peak_bytes) for p in frontier.points] == every_plan(table)
    assert_costs_are_evaluated(table, frontier)


def assert_costs_are_evaluated(table, frontier):
    for point in frontier.points:
        seconds, size = evaluate(table, np.array([list(point.choice.values())], np.intp))
        assert (seconds[0], size[0]) == (point.step_seconds, point.peak_bytes)


def random_chain(
    rng, *, blocks, configs, distinct=None, ties=False, forbidden=0.0, late=True, forward=False
):
    """Blocks with costs on a grid.

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
        parts = (
            costs(count) * (rng.random() < 0.8),
            costs(count),
            costs(count) * late,
            costs(count),
        )
        backward = np.minimum(costs(count), seconds)
        own = [costs(count) if forward and rng.random() < 0.5 else None for _ in range(2)]
        made.append(
            BlockCosts(tuple(range(count)), seconds, backward, parts[0], static, *parts[1:], *own)
        )
    order = (
        [int(rng.integers(len(made))) for _ in range(blocks)] if distinct else list(range(blocks))
    )
    fixed = [float(value) for value in rng.integers(0, 3, 3)]
    return ChainTable(tuple(made), tuple(order), *fixed)


def simulate(table, plan):
    """(step_seconds, peak_bytes) of one plan of a chain, event by event."""
    blocks = [block_of(table, n) for n in range(len(table.order))]
    chosen = [
        {name: block.cost(name)[c] for name in NAMES} for block, c in zip(blocks, plan, strict=True)
    ]
    always = table.fixed_bytes + sum(block["static"] for block in chosen)
    clock = sum(b["seconds"] - b["backward"] for b in chosen)
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

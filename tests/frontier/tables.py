"""Small random chains, a simulated step, and every plan of a chain: what searches must find."""

import itertools

import numpy as np

from lightning_topt.costs.chain_table import BlockCosts, ChainTable
from lightning_topt.frontier.pareto import pareto_rows_2


def every_plan(table):
    """Return (seconds, bytes) of the plans of a chain that no other one beats, by bytes."""
    counts = [len(table.block(n).configs) for n in range(len(table.order))]
    plans = np.array([*itertools.product(*map(range, counts))], np.intp)
    plans = plans.reshape(-1 if counts else 1, len(counts))
    seconds, size = table.evaluate(plans)
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
        seconds, size = table.evaluate(np.array([list(point.choice.values())], np.intp))
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

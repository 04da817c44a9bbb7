"""The algebra in thirty lines: no model, no training. Three operators with two configurations each,
written by hand.

    python examples/show_frontier.py

"keep" stores the activations, "recompute" computes them again: slower and smaller. Costs of a plan
add up over its operators; the slowest path (here: computing, network) is its step time, the worst
moment (forward, backward) its peak.
"""

import numpy as np
from rich.console import Console
from rich.table import Table

from lightning_topt.basics.units import format_bytes, format_seconds
from lightning_topt.costs.cost_table import CostTable, OperatorCosts
from lightning_topt.frontier.frontier_search import search_frontier

MIB = 2**20


def operator(name: str, milliseconds: float, mebibytes: float) -> OperatorCosts:
    """One that keeps `mebibytes` from forward to backward, or takes a third longer and keeps a
    tenth of that.
    """
    seconds = 1e-3 * milliseconds * np.array([[1.0, 0.5], [4 / 3, 0.5]])  # (config, path)
    size = MIB * mebibytes * np.array([[1.0, 1.0], [0.1, 0.4]])  # (config, moment)
    return OperatorCosts(name, ("keep", "recompute"), seconds, size)


operators = (operator("attention", 9, 600), operator("mlp", 12, 400), operator("head", 3, 900))
table = CostTable(
    operators, (), fixed_seconds=np.array([1e-3, 8e-3]), fixed_bytes=MIB * np.array([500.0, 500.0])
)
frontier = search_frontier(table)

shown = Table(
    title=f"{len(frontier)} of {2 ** len(operators)} plans are worth knowing", title_justify="left"
)
for column in ("step time", "peak memory", *(op.name for op in operators)):
    shown.add_column(column, justify="right")
for point in frontier.points:
    choices = (op.configs[point.choice[op.name]] for op in operators)
    shown.add_row(format_seconds(point.step_seconds), format_bytes(point.peak_bytes), *choices)
Console().print(shown)

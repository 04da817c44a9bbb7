"""The search in thirty lines: no model, no training.

Three blocks with two configurations each, written by hand.

    python examples/show_frontier.py

"keep" stores the activations, "recompute" computes them again: slower and smaller. The step takes
computation and what the network has left to do after it; the worst moment is its peak memory.
"""

import numpy as np
from rich.console import Console
from rich.table import Table

from lightning_topt.basics.units import format_bytes, format_seconds
from lightning_topt.costs.chain_table import BlockCosts, ChainTable
from lightning_topt.frontier import search_chain

MIB = 2**20


def block(milliseconds: float, mebibytes: float) -> BlockCosts:
    """Return the costs of a block that keeps `mebibytes` from forward to backward.

    Or takes a third longer, and keeps a tenth of that.
    """
    seconds = 1e-3 * milliseconds * np.array([1.0, 4 / 3])  # keep, recompute
    return BlockCosts(
        ("keep", "recompute"),
        seconds=seconds,
        backward=seconds - 1e-3 * milliseconds / 3,
        exchange=np.full(2, 1e-3 * milliseconds / 2),
        static=np.zeros(2),
        kept=MIB * mebibytes * np.array([1.0, 0.1]),
        late=np.zeros(2),
        hump=MIB * mebibytes * np.array([0.0, 0.9]),
    )


names = ("attention", "mlp", "head")
blocks = (block(9, 600), block(12, 400), block(3, 900))
table = ChainTable(blocks, (0, 1, 2), fixed_seconds=1e-3, fixed_bytes=500.0 * MIB, names=names)
frontier = search_chain(table)

shown = Table(
    title=f"{len(frontier.points)} of {2 ** len(blocks)} plans are worth knowing",
    title_justify="left",
)
for column in ("step time", "peak memory", *names):
    shown.add_column(column, justify="right")
for point in frontier.points:
    choices = (block.configs[point.choice[name]] for name, block in zip(names, blocks, strict=True))
    shown.add_row(format_seconds(point.step_seconds), format_bytes(point.peak_bytes), *choices)
Console().print(shown)

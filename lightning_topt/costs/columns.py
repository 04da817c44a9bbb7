"""Leave out columns of a cost table that can never be the largest, so that the search carries fewer."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from lightning_topt.costs.cost_table import Array

_ROUNDING = 1e-12  # relative: differences of equal sums


def needed_columns(costs: Sequence[Array], *, fixed: Array) -> NDArray[np.intp]:
    """Indices of columns, ascending, whose maximum is that of all columns for every choice of rows.

    `costs` are arrays (config, column), one per operator; `fixed` (column,) is added to every choice. Column t can go
    when some t' that stays is at least as large under every choice:

        fixed[t] - fixed[t'] + sum over operators of max over configs of (cost[c, t] - cost[c, t']) <= 0
    """
    alive = np.arange(len(fixed))
    # First against a few columns that are the largest for some choice, which removes nearly all; then all against all.
    for rivals in (_largest_somewhere(costs, fixed), None):
        alive = _drop(costs, fixed, alive, alive if rivals is None else np.intersect1d(alive, rivals))
    return alive


def _drop(
    costs: Sequence[Array], fixed: Array, columns: NDArray[np.intp], rivals: NDArray[np.intp]
) -> NDArray[np.intp]:
    excess = fixed[columns, None] - fixed[None, rivals]
    for cost in costs:
        excess = excess + (cost[:, columns, None] - cost[:, None, rivals]).max(axis=0)
    scale = max(np.abs(fixed).max(), *(np.abs(cost).max() for cost in costs)) if costs else np.abs(fixed).max()
    beaten = excess <= _ROUNDING * scale
    gone: set[int] = set()
    for row, column in enumerate(columns):
        winners = {int(rival) for rival in rivals[beaten[row]]} - {int(column)} - gone
        if winners:
            gone.add(int(column))
    return np.array([column for column in columns if int(column) not in gone], dtype=np.intp)


def _largest_somewhere(costs: Sequence[Array], fixed: Array) -> NDArray[np.intp]:
    """The largest column of each choice that gives all operators their first row, their second row, and so on."""
    rows = max((len(cost) for cost in costs), default=1)
    totals = [fixed + sum(cost[min(row, len(cost) - 1)] for cost in costs) for row in range(rows)]
    return np.unique([int(np.argmax(total)) for total in totals])

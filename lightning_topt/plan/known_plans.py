"""`KnownPlans` say, before a chain is searched, whether any of its plans can beat known plans.

A plan that none of the known ones beats takes less time than some known plan, and fewer bytes than
the next larger one: it lies below a corner (T, M). Take any price l of a byte, and any lower bounds
t, m of its seconds and bytes. Then t + l m < T + l M. Both are sums over blocks, so the least of
t + l m over all plans is found block by block. Where it is not below T + l M for one l, no plan
lies below that corner.

    seconds >= fixed + sum of seconds
               or with + exchange - backward of each block, the network's time
    bytes   >= fixed + sum of static + what moves (see `ChainTable`) while
               a block runs backward or forward, the first and the last of each distinct one;
               forward is over; the optimizer steps
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from lightning_topt.costs.chain_table import Array, BlockCosts, ChainTable
from lightning_topt.techniques.plan_costs import PlanBatch

_PRICES = 96
_FIRST = 12  # every so many-th price is tried first
_FAR = 1e300  # stands for infinite costs of what is forbidden
_SIZES = ("kept", "hump", "held", "forward_hump", "late")  # of a block, see `ChainTable`


@dataclass(eq=False)
class KnownPlans:
    """Costs of plans (n, [seconds, bytes]) that no other one of them beats.

    Seconds ascend, bytes descend.
    """

    costs: Array
    # what was worked out before: by share, and by the identity of an array of prices
    _scaled: dict[float, KnownPlans] = field(default_factory=dict, init=False, repr=False)
    _known_corners: dict[int, tuple[Array, Array, Array]] = field(
        default_factory=dict, init=False, repr=False
    )

    @classmethod
    def of(cls, batches: Iterable[PlanBatch]) -> KnownPlans:
        """Return the best plans of `batches`."""
        return cls.best(np.stack([batch.seconds, batch.peak_bytes], axis=1) for batch in batches)

    @classmethod
    def best(cls, parts: Iterable[Array]) -> KnownPlans:
        """Return the best plans of several (n, [seconds, bytes])."""
        costs = np.concatenate([np.zeros((0, 2)), *parts])
        costs = costs[np.lexsort((costs[:, 1], costs[:, 0]))]
        least = np.minimum.accumulate(costs[:, 1])
        return cls(costs[np.concatenate([[True], least[1:] < least[:-1]])] if len(costs) else costs)

    def scaled(self, share: float) -> KnownPlans:
        """Return these with `share` of their costs.

        A share below 1 leaves out what is better by less than that.
        """
        if share == 1:
            return self
        if share not in self._scaled:
            self._scaled[share] = KnownPlans(self.costs * share)
        return self._scaled[share]

    def may_gain(self, table: ChainTable) -> bool:
        """Return whether some plan of the chain may beat all known plans; False is certain."""
        if not table.order:
            return True
        bound = _Bound(table)
        return all(
            self.may_gain_above(bound.fewest_bytes, p, bound.least(p))
            for p in (self.few_prices, self.prices)
        )

    def may_gain_above(self, fewest_bytes: float, prices: Array, least: Array) -> bool:
        """Return whether a plan above these bounds may beat all known plans; False is certain.

        No plan has fewer than `fewest_bytes`. At `prices`, the first of which is 0, none has less
        than `least` (price,) of seconds + price * bytes.
        """
        # cheap: faster or smaller than all known plans
        if not len(self.costs) or fewest_bytes < self.costs[-1, 1] or least[0] < self.costs[0, 0]:
            return True
        # Costs of the corners (corner, price) at all prices but the first, and at every so many-th.
        if id(prices) not in self._known_corners:
            seconds, sizes = self.costs.T
            corners = seconds[1:, None] + prices[1:] * sizes[:-1, None]
            self._known_corners[id(prices)] = (
                prices,
                corners,
                np.ascontiguousarray(corners[:, ::_FIRST]),
            )
        corners, some = self._known_corners[id(prices)][1:]
        # Few prices rule out nearly all corners.
        rows = np.flatnonzero((some > least[1::_FIRST]).all(axis=1))
        return bool((corners[rows] > least[1:]).all(axis=1).any())

    @cached_property
    def few_prices(self) -> Array:
        """Some of `prices`, which rule out nearly all that these do."""
        return self.prices[::_FIRST]

    @cached_property
    def prices(self) -> Array:
        """Prices of a byte: none, then those between the slopes of the known plans and beyond."""
        steps = np.diff(self.costs, axis=0)
        slopes = -steps[:, 0] / steps[:, 1] if len(steps) else np.ones(1)
        return np.concatenate(
            [np.zeros(1), np.geomspace(slopes.min() / 4, slopes.max() * 4, _PRICES)]
        )


class _Bound:
    """Bounds of the plans of a chain in W ways.

    They are: while a block runs, the first and the last of each distinct one; when forward is over;
    in the update. There are B distinct blocks with C configurations each.
    """

    def __init__(self, table: ChainTable) -> None:
        self.table, self._counts = table, _counts(table)
        self._more = np.zeros(len(self._counts))
        self._more[-1] = table.update_bytes
        sizes, seconds = zip(*map(_costs_of, table.blocks), strict=True)
        most = max(len(block.configs) for block in table.blocks)
        self._sizes, self._seconds = (
            np.stack([filled(each, most) for each in some]) for some in (sizes, seconds)
        )

    def least(self, prices: Array) -> Array:
        """Return (price,), a lower bound of seconds + price * bytes of all plans."""
        # (B, size, network or not, price), of whatever configuration
        priced = (
            self._seconds[:, None, :, None] + prices[:, None] * self._sizes[:, :, None, None]
        ).min(axis=-1)
        # summed over the blocks of the chain in each way (W, network or not, price)
        priced = np.minimum(priced, _FAR).reshape(self._counts.shape[1], -1)
        total = (self._counts @ priced).reshape(len(self._counts), 2, len(prices))
        fixed = self.table.fixed_seconds + prices * (
            self.table.fixed_bytes + self._more[:, None, None]
        )
        return np.asarray((total + fixed).max(axis=(0, 1)))

    @property
    def fewest_bytes(self) -> float:
        """The bytes that no plan has fewer than."""
        least = self._sizes.min(axis=-1).ravel()
        return self.table.fixed_bytes + float((self._more + self._counts @ least).max())


def _counts(table: ChainTable) -> Array:
    """Return how many blocks of each kind count with each of `_SIZES` (W, B * size).

    The last way is the update.
    """
    order, kinds = np.array(table.order), len(table.blocks)
    places = (np.flatnonzero(order == index) for index in set(table.order))
    positions = sorted({int(end) for of_block in places for end in (of_block[0], of_block[-1])})
    # while the block at a position runs backward, then forward; last: forward is over, the update
    found = np.zeros((2 * len(positions) + 2, kinds, len(_SIZES)))
    for n, position in enumerate(positions):
        earlier, later = (
            np.bincount(part, minlength=kinds) for part in (order[:position], order[position + 1 :])
        )
        for row, (before, peak) in zip(
            (2 * n, 2 * n + 1), (("kept", "hump"), ("held", "forward_hump")), strict=True
        ):
            found[row, :, _SIZES.index(before)] += earlier
            found[row, order[position], _SIZES.index(peak)] += 1
            found[row, :, _SIZES.index("late")] += later
    every = np.bincount(order, minlength=kinds)
    found[-2, :, _SIZES.index("held")] = found[-1, :, _SIZES.index("late")] = every
    return found.reshape(len(found), -1)


def _costs_of(block: BlockCosts) -> tuple[Array, Array]:
    """Return the bytes of a block (size, C), and its seconds without and with the network's (2, C).

    The bytes include what is static.
    """
    sizes = np.stack([block.static + block.cost(name) for name in _SIZES])
    sizes[~np.isfinite(sizes)] = 0.0  # forbidden: any bound will do
    return sizes, np.stack([block.seconds, block.seconds + (block.exchange - block.backward)])


def filled(costs: Array, count: int) -> Array:
    """Return costs of a block's configurations (..., C), the last one repeated up to `count`."""
    return costs[..., np.minimum(np.arange(count), costs.shape[-1] - 1)]

"""Prices: what shows that a partial plan cannot become better than known plans.

Branch and bound in dynamic programming (Morin & Marsten 1976), with Lagrangian bounds (Geoffrion
1974). Share a weight r of seconds and s of bytes over the ways through the columns in any
proportion: then for every plan

    r * step_seconds + s * peak_bytes  >=  the sum of its values, each times the share of its entry

and the least of the right side over all completions of a partial plan is found backwards, layer by
layer (`potentials`). The plans already known leave a staircase of corners (T, M): a plan that none
of them beats or equals has ``step_seconds < T`` and ``peak_bytes < M`` at some corner. A partial
plan is hopeless when at every corner one of L prices shows that it cannot get there.

Shares maximise the bound for L ratios r : s, by multiplicative weights over all ways at once
(Arora, Hazan & Kale 2012, section 3): shares are a Gibbs distribution, whose marginals two passes
give. The plans met on the way are the first known.
"""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_topt.frontier.layers import Layer
from lightning_topt.frontier.pareto import Array, Rows, pareto_rows_2

_RATIOS = 30  # of seconds to bytes, beside seconds alone and bytes alone
_STEPS = 100  # of multiplicative weights, at most
_WORK = 3 * 10**8  # multiply-adds that finding prices may take
_CORNERS = 192  # of the staircase of known plans
# how far corners at the ends lie out; larger gains are not distinguished
_FAR = 2.0**20
# of the sum of all values: above the rounding of prices, which must not drop a plan
_TOLERANCE = 2.0**-40


def layer_kernels() -> Any:
    """Return the compiled loops.

    Importing Numba takes 0.4 s, so they are loaded where work is large.
    """
    return importlib.import_module("lightning_topt.frontier.layer_kernels")


@dataclass(frozen=True, eq=False)
class Known:
    """Plans that are known.

    `costs` (n, 2) has seconds ascending and bytes descending; `plans` (n, N) are their transitions.
    """

    costs: Array
    plans: NDArray[Any]

    def merged(self, costs: Array, plans: NDArray[Any]) -> Known:
        """Return the best of these and other plans."""
        costs, plans = np.concatenate([self.costs, costs]), np.concatenate([self.plans, plans])
        rows = pareto_rows_2(costs[:, 0], costs[:, 1])
        return Known(costs[rows], plans[rows])


@dataclass(frozen=True, eq=False)
class Prices:
    """L prices, of a second and a byte, by boundary.

    `weights` (L, 2) are those of a second and a byte, `masses` (c, L) those of columns. Of groups
    `potentials` (G, L) are the least prices from them to the end. `most` (2,) is above the seconds
    and bytes of every plan, `slack` (L,) above the rounding of any priced plan.
    """

    weights: Array
    masses: tuple[Array, ...]
    potentials: tuple[Array, ...]
    most: Array
    slack: Array

    def limits(self, known: Known) -> Array:
        """Return prices (Q, L) of the corners that the known plans leave.

        Those of a hopeful state are lower at one of them.
        """
        seconds = np.append(known.costs[:, 0], self.most[0])
        size = np.append(self.most[1], known.costs[:, 1])
        return np.ascontiguousarray(_corners(seconds, size).T @ self.weights.T + self.slack)

    def gain(self, known: Known) -> float:
        """Return by how much any plan could still beat the known ones, at most.

        See `Bounds.gains`.
        """
        return float(Bounds(self, known, 0.0).gains(0, np.zeros((1, 2)), np.zeros(1, np.int64))[0])


class Bounds:
    """Which partial plans may become better than `known` ones, by more than the share `epsilon`."""

    def __init__(self, prices: Prices, known: Known, epsilon: float) -> None:
        limits = prices.limits(known)
        self.limits = np.where(limits > 0, limits / (1 + epsilon), limits)
        self._masses = prices.masses
        self._potentials = prices.potentials

    def at(self, n: int) -> tuple[Array, Array, Array]:
        """Return masses (c, L), potentials (G, L) and limits (Q, L) of boundary `n`."""
        return self._masses[n], self._potentials[n], self.limits

    def gains(self, n: int, states: Array, group: Rows) -> Array:
        """Return (n,) by how much states of boundary `n` could still beat the known plans, at most.

        Gain g: a known plan that counts as (1 + g) times better beats or equals whatever completes
        the state. It counts as (1 + epsilon) times better already.
        """
        found = np.empty(len(states))
        layer_kernels().gains(states, group, *self.at(n), found)
        return np.where(found < _FAR / 2, found, np.inf)


def make_prices(layers: Sequence[Layer], *, steps: int | None = None) -> tuple[Prices, Known]:
    """Return prices for `layers`, and the plans met while seeking them.

    Each layer has at least one transition. Fewer `steps` give prices that exclude less.
    """
    net = Network(layers)
    # ratios of seconds to bytes, and each of both alone, in units in which plans differ
    ratios = np.stack(
        [np.append(np.geomspace(1 / 64, 64, _RATIOS), [1, 0]), np.append(np.ones(_RATIOS), [0, 1])],
        axis=1,
    )
    weights = ratios / net.units
    rates = 16 / ratios.sum(axis=1, keepdims=True) * weights
    work = len(ratios) * sum(layer.values.size + len(layer.start) * 16 for layer in layers)
    # more steps give better prices; few enough that finding them stays within its work
    steps = int(np.clip(_WORK / work, 10, _STEPS)) if steps is None else steps
    # filled by the kernel: prices by ratio (L, ..), and all plans met
    masses = np.zeros((len(ratios), net.pointers[0][-1]))
    potentials = np.zeros((len(ratios), net.pointers[1][-1]))
    plans = np.zeros((len(ratios) * steps, len(layers)), np.int32)
    costs = np.zeros((len(ratios) * steps, 2))
    layer_kernels().maximise(net.flat, weights, rates, steps, masses, potentials, plans, costs)
    # from flat arrays to one per boundary
    columns, groups = (
        [slice(*ends) for ends in itertools.pairwise(where)] for where in net.pointers
    )
    prices = Prices(
        weights,
        tuple(np.ascontiguousarray(masses[:, where].T) for where in columns),
        tuple(np.ascontiguousarray(potentials[:, where].T) for where in groups),
        _FAR * (net.sums + 1),
        _TOLERANCE * (weights * net.sums).sum(axis=1),
    )
    known = Known(np.zeros((0, 2)), np.zeros((0, len(layers)), np.int32)).merged(costs, plans)
    return prices, known


class Network:
    """Layers flattened for the kernels.

    `kinds` (c,) by boundary are the kinds of its columns: 0 seconds, 1 bytes.
    """

    def __init__(self, layers: Sequence[Layer]) -> None:
        self.layers = tuple(layers)
        # a column is of seconds or of bytes, and entries hand that on
        self.kinds = [np.array([0, 1])]
        for layer in self.layers:
            kind = np.zeros(layer.columns, np.int64)
            kind[layer.end] = self.kinds[-1][layer.start]
            self.kinds.append(kind)

    @property
    def pointers(self) -> tuple[Rows, Rows]:
        """The places where the columns and the groups of every boundary begin."""
        return _pointers(map(len, self.kinds)), _pointers(
            [1, *(layer.groups for layer in self.layers)]
        )

    @property
    def units(self) -> Array:
        """The amounts (2,) by which seconds and bytes of plans may differ, about."""
        spreads = self._sums(lambda values: np.ptp(values, axis=0))
        return np.where(spreads > 0, spreads, 1.0)

    @property
    def sums(self) -> Array:
        """Two numbers (2,), no less than the seconds and bytes of any plan."""
        return self._sums(lambda values: np.abs(values).max(axis=0))

    def _sums(self, function: Any) -> Array:
        total = np.zeros(2)
        for layer, kind in zip(self.layers, self.kinds[1:], strict=True):
            # the largest amount of an entry, over all that end in seconds or in bytes
            per_entry = function(layer.values)
            total += [per_entry[kind[layer.end] == which].max(initial=0.0) for which in (0, 1)]
        return total

    @property
    def flat(self) -> tuple[Rows | Array, ...]:
        """Everything in a few arrays, see `layer_kernels`."""
        layers = self.layers
        return (
            _pointers(len(layer.source) for layer in layers),
            _join([layer.source for layer in layers]),
            _join([layer.target for layer in layers]),
            _pointers(layer.values.size for layer in layers),
            np.concatenate([layer.values.ravel() for layer in layers]),
            _pointers(len(layer.start) for layer in layers),
            _join([layer.start for layer in layers]),
            _join([layer.end for layer in layers]),
            self.pointers[0],
            _join(self.kinds),
            self.pointers[1],
        )


def _pointers(counts: Iterable[int]) -> Rows:
    return np.cumsum([0, *counts]).astype(np.int64)


def _join(parts: Sequence[Rows]) -> Rows:
    return np.concatenate(parts).astype(np.int64)


def _corners(seconds: Array, size: Array) -> Array:
    """Return the staircase of corners (2, at most `_CORNERS`).

    Of a run of corners that are put together, the one above them all.
    """
    if len(seconds) <= _CORNERS:
        return np.stack([seconds, size])
    inner = np.diff(seconds[:-1]) / np.ptp(seconds[:-1]), -np.diff(size[1:]) / np.ptp(size[1:])
    length = np.concatenate([[0], np.cumsum(inner[0] + inner[1])])  # along the known plans
    ends = np.searchsorted(length, np.linspace(0, length[-1], _CORNERS - 1), side="right")
    ends = np.unique(np.concatenate([[0, 1], ends, [len(seconds)]]))
    return np.stack([seconds[ends[1:] - 1], size[ends[:-1]]])

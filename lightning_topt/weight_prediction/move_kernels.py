"""Moves of weights on one core of a CPU, compiled by Numba.

Each number is read and written once, where torch takes six passes. Rows (n,) are float32, and
share no memory. Loaded by `weights` where there is much to move.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_topt.basics.jit import kernel

Row = NDArray[np.float32]

BLOCK = 1024  # numbers, of which three rows fit the first-level cache


def keep_and_move(
    weights: Row,
    first: Row,
    second: Row,
    kept: Row,
    *,
    move: Sequence[float] | Sequence[Sequence[float]],
) -> None:
    """Copy `weights` into `kept` and move them by an `SGDMove` (2,) or `AdamStep`s (steps, 6)."""
    steps = np.array(move, weights.dtype)
    if steps.ndim == 1:
        _sgd(weights, first, kept, steps)
    else:
        _adam(weights, first, second, kept, steps)


@kernel
def _sgd(weights: Row, first: Row, kept: Row, factors: NDArray[Any]) -> None:
    of_weight, of_buffer = factors[0], factors[1]
    for i in range(weights.size):
        kept[i] = weights[i]
        weights[i] = of_weight * weights[i] + of_buffer * first[i]


@kernel
def _read(weights: Row, first: Row, second: Row, kept: Row, mean: Row, root: Row) -> None:
    for i in range(weights.size):
        kept[i] = weights[i]
        mean[i] = first[i]
        root[i] = np.sqrt(second[i])


@kernel
def _step(weights: Row, mean: Row, root: Row, step: Row) -> None:
    # in the order of the fields of `AdamStep`
    shrink, keep, pull, rate, correction, eps = step[0], step[1], step[2], step[3], step[4], step[5]
    for i in range(weights.size):
        weight = shrink * weights[i]
        mean[i] = keep * mean[i] + pull * weight
        weights[i] = weight - rate * mean[i] / (root[i] / correction + eps)


@kernel
def _adam(weights: Row, first: Row, second: Row, kept: Row, steps: NDArray[Any]) -> None:
    # the mean and the root of the variance of a block, for all steps of the move
    mean, root = np.empty(BLOCK, weights.dtype), np.empty(BLOCK, weights.dtype)
    for start in range(0, weights.size, BLOCK):
        block = slice(start, min(start + BLOCK, weights.size))
        _read(weights[block], first[block], second[block], kept[block], mean, root)
        for step in steps:
            _step(weights[block], mean, root, step)

"""Fit the few physical constants of a cluster to measured steps.

These are rates, latencies and launch times, never a step itself.

    minimize over x    sum of rho((log(predicted(c exp x) / measured)) / s) + sum of (x_k / w_k)^2

c are the cluster's own constants, from its data sheet or measured, x logarithms of factors, s the
error that a right model has, w_k how far a constant of this kind strays from where it is
(CONSTANTS), rho Huber's loss. What the steps say nothing about stays where it is (`fit_constants`).
`least_factors` minimizes it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from benchmarks.prediction.error_figures import figure_of
from lightning_topt.costs.accuracy import ErrorFigure
from lightning_topt.costs.chain_table import Array
from lightning_topt.costs.cluster import Cluster

Predict = Callable[[Cluster], Sequence[float]]  # seconds of each step

# of `least_factors`
EXPECTED_ERROR = 0.05  # s
HUBER = 1.5  # of s: larger residuals count by their size, not its square
_STEPS = 40  # of Gauss-Newton
_DIFFERENCE = 1e-4  # of a factor's logarithm
_FAR = 4.0  # no factor is above e^4


@dataclass(frozen=True)
class Constant:
    """One constant of a cluster.

    Attributes:
        part: of the cluster.
        entry: of the part.
        width: w, how far it strays.
        usual: the value where a file has none.
    """

    part: str
    entry: str
    width: float
    usual: float = 0.0

    def of(self, cluster: Cluster) -> float:
        """Return its value, of rates by dtype the highest.

        NaN where the cluster has no such part.
        """
        part = getattr(cluster, self.part)
        if part is None:
            return math.nan
        value = getattr(part, self.entry)
        return float(max(value.values()) if isinstance(value, Mapping) else value)

    def scaled(self, cluster: Cluster, factor: float) -> Cluster:
        """Return the cluster with `factor` times the constant, all dtypes alike.

        With the usual value for 0.
        """
        part: Any = getattr(cluster, self.part)
        value = getattr(part, self.entry)
        if isinstance(value, Mapping):
            new: Any = {dtype: rate * factor for dtype, rate in value.items()}
        else:
            new = (value or self.usual) * factor
        return replace(cluster, **{self.part: replace(part, **{self.entry: new})})


CONSTANTS = (
    Constant("device", "flops", 0.2),
    Constant("device", "memory_bandwidth", 0.25),
    Constant("device", "half_rate_flops", 1.5, 1e9),
    Constant("device", "attention_flops", 0.3),
    Constant("device", "op_overhead_seconds", 0.7, 3e-6),
    Constant("device", "launch_seconds", 1.5, 1e-5),
    Constant("intra", "latency_seconds", 0.7, 5e-6),
    Constant("intra", "bandwidth", 0.25),
    Constant("inter", "latency_seconds", 0.7, 1e-5),
    Constant("inter", "bandwidth", 0.25),
)


@dataclass(frozen=True)
class FittedConstants:
    """A cluster with fitted constants.

    By what `factors` each has changed, and the `error` on the steps they were fitted to.
    """

    cluster: Cluster
    factors: Mapping[str, float]
    error: ErrorFigure


def fit_constants(
    cluster: Cluster,
    predict: Predict,
    measured: Sequence[float],
    *,
    constants: Sequence[Constant] = CONSTANTS,
) -> FittedConstants:
    """Return `cluster` with the constants that predict the seconds `measured` best.

    Raises ValueError for fewer than two steps.
    """
    if len(measured) < 2:
        raise ValueError("constants are fitted to at least two measured steps")
    if cluster.device.launch_seconds == 0 and cluster.backend == "gloo":  # the host is the device
        constants = [
            each for each in constants if each.entry not in ("launch_seconds", "half_rate_flops")
        ]
    used = [each for each in constants if not math.isnan(each.of(cluster))]

    def at(factors: Array) -> Cluster:
        found = cluster
        for constant, factor in zip(used, factors, strict=True):
            found = constant.scaled(found, float(factor))
        return found

    found = least_factors(
        lambda factors: predict(at(factors)), measured, widths=[each.width for each in used]
    )
    fitted = at(found)
    factors = {f"{c.part}.{c.entry}": float(factor) for c, factor in zip(used, found, strict=True)}
    moved = int((np.abs(np.log(found)) > 0.01).sum())
    return FittedConstants(fitted, factors, figure_of(predict(fitted), measured, fitted=moved))


def least_factors(
    predict: Callable[[Array], Sequence[float] | Array],
    measured: Sequence[float],
    *,
    widths: Sequence[float],
) -> Array:
    """Return the factors a (constant,) with which `predict` comes closest to `measured`.

        minimize over x = log a     sum of rho(log(predict(a) / measured) / s) + sum of (x / w)^2

    w are the `widths`, s is EXPECTED_ERROR. rho is Huber's loss, so that a few odd steps do not
    decide. Gauss-Newton with Levenberg's damping; derivatives are differences.
    """
    target, scale = np.log(np.asarray(measured, float)), np.asarray(widths, float)

    def residuals(x: Array) -> Array:
        found: Array = (np.log(np.asarray(predict(np.exp(x)), float)) - target) / EXPECTED_ERROR
        return found

    factors: Array = np.exp(_minimum(residuals, scale))
    return factors


def _minimum(residuals: Callable[[Array], Array], widths: Array) -> Array:
    """Return the logarithms of factors at the least loss, from 0 on."""
    x, damping = np.zeros(len(widths)), 1e-2
    known = residuals(x)
    loss = _loss(known, x, widths)
    for _ in range(_STEPS):
        slopes = np.stack(
            [(residuals(x + step) - known) / _DIFFERENCE for step in _DIFFERENCE * np.eye(len(x))],
            axis=1,
        )
        weights = 1 / np.maximum(np.abs(known) / HUBER, 1.0)
        curvature = (slopes.T * weights) @ slopes + np.diag(widths**-2)
        gradient = (slopes.T * weights) @ known + x / widths**2
        before = loss
        while damping < 1e6:
            step = np.linalg.solve(curvature + damping * np.diag(np.diag(curvature)), -gradient)
            there = np.clip(x + step, -_FAR, _FAR)
            found = residuals(there)
            if (new := _loss(found, there, widths)) < loss:
                x, known, loss, damping = there, found, new, damping / 5
                break
            damping *= 5
        if before - loss < 1e-4 * before:
            break
    return x


def _loss(residuals: Array, x: Array, widths: Array) -> float:
    size = np.abs(residuals)
    huber = np.where(size <= HUBER, size**2, 2 * HUBER * size - HUBER**2)
    return float(huber.sum() + ((x / widths) ** 2).sum())

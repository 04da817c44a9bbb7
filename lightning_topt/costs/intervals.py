"""How far a prediction may be from the truth: an interval at a stated level.

Predictions of runs that were measured are off by some factor. Nine of ten of them were within a
range of factors, and so are predictions of runs like them (split conformal prediction: Lei et al.,
JASA 113(523), 2018, algorithm 2):

    e_i       |log(measured_i / predicted_i)| of a run that nothing was fitted to
    q         the k-th smallest of n errors, k = ceil((n + 1) 0.9); the largest where k > n
    interval  predicted / w to predicted w,    log w = q + W d

Runs come in groups, such as those of one table, whose errors are alike. So q is the larger of two:
each run counts as much as any other, or each group does, whatever the number of its runs. d is how
far outside of the measured runs a new one is: doublings beyond the least or the most of each size,
and 1 for each technique that none had.

Other levels than 0.9 have a w whose logarithm is in proportion, as that of normal errors is: at 0
nothing is left of it, at 0.99 it is 1.57 times as large.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import NormalDist

import numpy as np

LEVEL = 0.9
WIDER = 0.1  # W, of a doubling outside
_NOTHING: Mapping[str, float] = {}


@dataclass(frozen=True)
class Domain:
    """What measured runs were like.

    Args:
        sizes: the least and the most of each size by name, all above 0.
        techniques: those that some of them used.
    """

    sizes: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    techniques: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name, (least, most) in self.sizes.items():
            if not 0 < least <= most < math.inf:
                raise ValueError(
                    f"the domain of {name} is from a number above 0 to one at least as large, got "
                    f"{least} to {most}"
                )

    @classmethod
    def of(
        cls, sizes: Sequence[Mapping[str, float]], techniques: Sequence[Sequence[str]] = ()
    ) -> Domain:
        """Return the domain of runs with these sizes and techniques, a run each."""
        known = {name for each in sizes for name in each}
        ranges = {
            name: (
                min(each[name] for each in sizes if name in each),
                max(each[name] for each in sizes if name in each),
            )
            for name in sorted(known)
        }
        return cls(ranges, tuple(sorted({each for several in techniques for each in several})))

    def outside(
        self, sizes: Mapping[str, float], techniques: Sequence[str] = ()
    ) -> dict[str, float]:
        """Return what of a run no measured run had, and how far it is outside."""
        found = {}
        for name, value in sizes.items():
            least, most = self.sizes.get(name, (value, value))
            doublings = max(math.log2(value / most), math.log2(least / value), 0.0)
            if doublings > 0.01:
                found[name] = doublings
        return found | {name: 1.0 for name in techniques if name not in self.techniques}


@dataclass(frozen=True)
class Interval:
    """From `low` to `high`, with the truth inside for a share `level` of runs.

    `outside` names what of the run no measured one had.
    """

    low: float
    high: float
    outside: tuple[str, ...] = ()
    level: float = LEVEL

    def __contains__(self, value: float) -> bool:
        """Return whether `value` is inside."""
        return self.low <= value <= self.high


def interval_of(
    value: float,
    *,
    error: float,
    outside: Mapping[str, float] = _NOTHING,
    level: float = LEVEL,
) -> Interval:
    """Return the interval of a prediction.

    Args:
        value: what is predicted.
        error: nine of ten predictions of measured runs were off by at most this factor, less 1.
        outside: see `Domain.outside`.
        level: the share of runs that are inside.
    """
    width = (math.log1p(error) + WIDER * sum(outside.values())) * _widths_of(level)
    return Interval(value * math.exp(-width), value * math.exp(width), tuple(outside), level)


def share_at(share: float, level: float) -> float:
    """Return what the share by which nine of ten runs are off is at another level."""
    return math.expm1(math.log1p(share) * _widths_of(level))


def check_level(level: float) -> None:
    """Raise ValueError unless `level` is a share below 1."""
    if not 0 <= level < 1:
        raise ValueError(
            f"confidence is the share of runs that an interval is for, from 0 to below 1 such as "
            f"0.9, got {level}"
        )


def _widths_of(level: float) -> float:
    """Return the width of normal intervals at this level, in widths at `LEVEL`."""
    if level == LEVEL:
        return 1.0
    at, usual = (NormalDist().inv_cdf((1 + each) / 2) for each in (level, LEVEL))
    return at / usual


def quantile_of_groups(
    errors: Sequence[float], groups: Sequence[Hashable] = (), *, level: float = LEVEL
) -> float:
    """Return the error that a new run stays below at this level.

    Of so few runs that the level asks for more, the largest.

    Args:
        errors: of runs, at least one, not negative.
        groups: of each run; without them runs alone count.
        level: as above.
    """
    counts = Counter(groups)
    of_groups = [1 / counts[group] for group in groups]
    return max(
        _quantile(errors, weights, level) for weights in ([1.0] * len(errors), of_groups) if weights
    )


def _quantile(errors: Sequence[float], weights: Sequence[float], level: float) -> float:
    order, count = np.argsort(errors), len(errors)
    # of n runs, with the new one: the share of n + 1 that has at most this error
    shares = np.cumsum(np.array(weights)[order]) / sum(weights) * count / (count + 1)
    place = min(int(np.searchsorted(shares, level - 1e-9)), count - 1)
    return float(np.asarray(errors, float)[order[place]])

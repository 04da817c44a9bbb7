"""How far a prediction may be from the truth: an interval at a stated level.

Predictions of runs that were measured are off by some factor. Nine of ten of them were within a
range of factors, and so are predictions of runs like them (split conformal prediction: Lei et al.,
JASA 113(523), 2018, algorithm 2):

    e_i       |log(measured_i / predicted_i)| of a run that nothing was fitted to
    q         the k-th smallest of n errors, k = ceil((n + 1) 0.9); the largest where k > n
    interval  predicted / w to predicted w,    log w = q + W d

d is how far outside of the measured runs a new one is: doublings beyond the least or the most of
each size, and 1 for each technique that none had.

Other levels than 0.9 have a w whose logarithm is in proportion, as that of normal errors is: at 0
nothing is left of it, at 0.99 it is 1.57 times as large.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import NormalDist

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
    # The width of normal intervals at this level, in widths at `LEVEL`
    if level == LEVEL:
        return 1.0
    at, usual = (NormalDist().inv_cdf((1 + each) / 2) for each in (level, LEVEL))
    return at / usual


def quantile_of(errors: Sequence[float], *, level: float = LEVEL) -> float:
    """Return the error that a new run stays below at this level.

    Of so few runs, at least one, that the level asks for more, the largest.
    """
    place = math.ceil((len(errors) + 1) * (level - 1e-9))
    return float(sorted(errors)[min(max(place, 1), len(errors)) - 1])

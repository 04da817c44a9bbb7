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

    error of a run    |predicted / measured - 1|
    median, p90       the error that half of the runs, and nine of ten, stay below
    fitted runs       residuals of a fit are too small: of n runs and k constants times
                      sqrt(n / (n - k))
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import NormalDist
from typing import Any

import numpy as np

from lightning_topt.costs.plain_values import list_of, number, record, shown, text, whole

LEVEL = 0.9
WIDER = 0.1  # W, of a doubling outside
UNKNOWN = (
    "How far predictions for this cluster are from the truth is not known: no run on it was "
    "compared (`topt predict runs=FOLDER` compares those of run.json files)."
)
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
    value: float, *, error: float, outside: Mapping[str, float] = _NOTHING, level: float = LEVEL
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


# ---- errors of measured runs


@dataclass(frozen=True)
class ErrorFigure:
    """Shares of what was measured: `median` and `p90` of the errors of `runs` predictions.

    `above`: nine of ten measured values were above what was predicted by at most this share.
    """

    median: float
    p90: float
    runs: int
    above: float | None = None

    def __post_init__(self) -> None:
        if self.above is not None and self.above < 0:
            raise ValueError(f"above is a share of at least 0, got {self.above}")
        if not (0 <= self.median <= self.p90 and self.runs >= 1):
            raise ValueError(
                f"an error figure has 0 <= median <= p90 of at least 1 run, got {self.median}, "
                f"{self.p90}, {self.runs}"
            )

    @classmethod
    def of(
        cls, predicted: Sequence[float], measured: Sequence[float], *, above: bool = False
    ) -> ErrorFigure:
        """Return the figure of predictions; with `above` it has that share too."""
        ratios = np.log(np.asarray(predicted, float) / np.asarray(measured, float))
        errors = np.expm1(np.abs(ratios))
        p90 = quantile_of(errors.tolist())
        over = quantile_of(np.expm1(np.maximum(-ratios, 0.0)).tolist()) if above else None
        return cls(min(float(np.median(errors)), p90), p90, len(errors), over)

    def to_dict(self) -> dict[str, float]:
        """Return plain values, without what is not known."""
        return {name: value for name, value in vars(self).items() if value is not None}

    def __str__(self) -> str:
        return (
            f"half of {self.runs} runs within {_percent(self.median)}, nine of ten within "
            f"{_percent(self.p90)}"
        )


@dataclass(frozen=True)
class Accuracy:
    """Errors of predictions with the constants of a cluster.

    `seconds` of a step, `bytes` at its peak (None: not known), the `source` of the runs, and their
    `domain` (None: not known, so that nothing is outside); `bytes_domain` is that of the peaks.
    `difference`: errors of the ratio of two times, of pairs of plans for one job; what both have in
    common is not in it (None: not known).
    """

    seconds: ErrorFigure
    bytes: ErrorFigure | None = None
    source: str = ""
    domain: Domain | None = None
    difference: ErrorFigure | None = None
    bytes_domain: Domain | None = None

    def interval(
        self,
        seconds: float,
        sizes: Mapping[str, float] = _NOTHING,
        techniques: Sequence[str] = (),
        *,
        level: float = LEVEL,
    ) -> Interval:
        """Return the interval of predicted seconds of a run with these sizes and techniques."""
        outside = {} if self.domain is None else self.domain.outside(sizes, techniques)
        return interval_of(seconds, error=self.seconds.p90, outside=outside, level=level)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, as a cluster file has them."""
        data: dict[str, Any] = {
            "seconds": self.seconds.to_dict(),
            "bytes": None if self.bytes is None else self.bytes.to_dict(),
            "source": self.source,
        }
        if self.difference is not None:
            data["difference"] = self.difference.to_dict()
        for name, domain in (("domain", self.domain), ("bytes_domain", self.bytes_domain)):
            if domain is not None:
                sizes = {size: [*ends] for size, ends in domain.sizes.items()}
                data[name] = {"sizes": sizes, "techniques": [*domain.techniques]}
        return data

    def sentence(self) -> str:
        """Return a line for people."""
        memory = "" if self.bytes is None else f"; peak memory: {self.bytes}"
        return (
            "Measured before: step times "
            f"{self.seconds}{memory}{f' ({self.source})' if self.source else ''}."
        )


# Of CPU ranks, of which no own file says more: 47 plans on 2 and 4 ranks
# (benchmarks/results/uncertainty.md). The margin keeps their limits at the usual level.
CPU_BYTES = ErrorFigure(median=0.010, p90=0.075, runs=47, above=0.024)
USUAL_MARGIN = 0.05


def sentence_of(accuracy: Accuracy | None) -> str:
    """Return what is known about the error of predictions, as a line for people."""
    return UNKNOWN if accuracy is None else accuracy.sentence()


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %" if share < 0.0995 else f"{100 * share:.0f} %"


# ---- the entries of a YAML file


def _ranges(data: Any, *, name: str) -> dict[str, tuple[float, float]]:
    # The least and the most of each size
    if not isinstance(data, Mapping):
        raise ValueError(f"{name} maps sizes to the least and the most, got {shown(data)}")
    found = {}
    for key, value in data.items():
        ends = list_of(number)(value, name=f"{name}.{key}")
        if len(ends) != 2:
            raise ValueError(f"{name}.{key} is the least and the most, got {shown(value)}")
        found[text(key, name=name)] = (ends[0], ends[1])
    return found


_domain = record(Domain, sizes=_ranges, techniques=list_of(text))
_error_figure = record(ErrorFigure, median=number, p90=number, runs=whole, above=number)
read_accuracy = record(
    Accuracy,
    seconds=_error_figure,
    bytes=_error_figure,
    source=text,
    domain=_domain,
    difference=_error_figure,
    bytes_domain=_domain,
)

"""Errors of predictions against what was measured are the figure that stands beside new
predictions.

error of a run       |predicted / measured - 1|
median, p90          the error that half of the runs, and nine of ten, stay below; of runs that
                     constants were fitted to, times sqrt(n / (n - k)) for n runs and k constants
                     (the residuals of a fit are that much too small)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class ErrorFigure:
    """Shares of what was measured: `median` and `p90` of the errors of `runs` predictions."""

    median: float
    p90: float
    runs: int

    def __post_init__(self) -> None:
        if not (0 <= self.median <= self.p90 and self.runs >= 1):
            raise ValueError(
                f"an error figure has 0 <= median <= p90 of at least 1 run, got {self.median}, "
                f"{self.p90}, {self.runs}"
            )

    @classmethod
    def of(
        cls, predicted: Sequence[float], measured: Sequence[float], *, fitted: int = 0
    ) -> ErrorFigure:
        """Return the figure of predictions by a model of which `fitted` constants are from the same
        runs.
        """
        errors = np.abs(np.asarray(predicted, float) / np.asarray(measured, float) - 1)
        left = max(len(errors) - fitted, 1)
        median, p90 = np.quantile(errors, (0.5, 0.9)) * math.sqrt(len(errors) / left)
        return cls(float(median), float(p90), len(errors))

    def __str__(self) -> str:
        return (
            f"half of {self.runs} runs within {_percent(self.median)}, nine of ten within "
            f"{_percent(self.p90)}"
        )


@dataclass(frozen=True)
class Accuracy:
    """Errors of predictions with the constants of a cluster: of seconds of a step, of bytes at its
    peak (None: not known), and where the runs are from.
    """

    seconds: ErrorFigure
    bytes: ErrorFigure | None = None
    source: str = ""

    def sentence(self) -> str:
        """Return a line for people."""
        memory = "" if self.bytes is None else f"; peak memory: {self.bytes}"
        return (
            "Measured before: step times "
            f"{self.seconds}{memory}{f' ({self.source})' if self.source else ''}."
        )


UNKNOWN = (
    "How far predictions for this cluster are from the truth is not known: no run on it was "
    "compared (`topt predict runs=...` "
    "with calibrate_on=... or a folder of run.json files does)."
)


def sentence_of(accuracy: Accuracy | None) -> str:
    """Return what is known about the error of predictions, as a line for people."""
    return UNKNOWN if accuracy is None else accuracy.sentence()


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %" if share < 0.0995 else f"{100 * share:.0f} %"

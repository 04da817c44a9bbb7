"""Figures of errors of runs that come in groups, or that constants were fitted to.

    figure_of(predicted, measured, groups=sources)    an `ErrorFigure` of the package
    domain_of(runs)                                   what the runs were like

Runs come in groups, such as those of one table, whose errors are alike. So q of `costs.accuracy`
is the larger of two: each run counts as much as any other, or each group does, whatever the number
of its runs. Of n runs to which f constants were fitted, errors count sqrt(n / (n - f)) times.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Sequence

import numpy as np

from benchmarks.prediction.training_runs import TrainingRun
from lightning_topt.costs.accuracy import LEVEL, Domain, ErrorFigure, quantile_of


def figure_of(
    predicted: Sequence[float],
    measured: Sequence[float],
    *,
    fitted: int = 0,
    groups: Sequence[Hashable] = (),
    above: bool = False,
) -> ErrorFigure:
    """Return the figure of predictions by a model.

    Args:
        predicted: seconds or bytes of each run.
        measured: the same.
        fitted: so many of the model's constants are from the same runs.
        groups: see `quantile_of_groups`.
        above: the figure has that share too.
    """
    ratios = np.log(np.asarray(predicted, float) / np.asarray(measured, float))
    errors = np.expm1(np.abs(ratios))
    larger = math.sqrt(len(errors) / max(len(errors) - fitted, 1))
    p90 = quantile_of_groups(errors.tolist(), groups)
    over = quantile_of_groups(np.expm1(np.maximum(-ratios, 0.0)).tolist(), groups)
    return ErrorFigure(
        min(float(np.median(errors)), p90) * larger,
        p90 * larger,
        len(errors),
        over * larger if above else None,
    )


def quantile_of_groups(
    errors: Sequence[float], groups: Sequence[Hashable] = (), *, level: float = LEVEL
) -> float:
    """Return the error that a new run stays below at this level.

    Args:
        errors: of runs, at least one, not negative.
        groups: of each run; without them runs alone count.
        level: as above.
    """
    of_runs = quantile_of(errors, level=level)
    if not groups:
        return of_runs
    counts, order = Counter(groups), np.argsort(errors)
    weights = np.array([1 / counts[group] for group in groups])[order]
    # of n runs, with the new one: the share of n + 1 that has at most this error
    shares = np.cumsum(weights) / weights.sum() * len(errors) / (len(errors) + 1)
    place = min(int(np.searchsorted(shares, level - 1e-9)), len(errors) - 1)
    return max(of_runs, float(errors[order[place]]))


def domain_of(runs: Sequence[TrainingRun]) -> Domain:
    """Return what runs were like: the least and the most of each size, and techniques."""
    sizes = [run.sizes for run in runs]
    ranges = {
        name: (min(each[name] for each in sizes), max(each[name] for each in sizes))
        for name in sorted(sizes[0])
    }
    return Domain(ranges, tuple(sorted({each for run in runs for each in run.techniques})))

"""Plans predicted and measured: rows of a table, and figures of all of them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from benchmarks.common import mib
from benchmarks.machine_speed import seconds_at_full_speed

WARMUP = 3  # steps that are not measured
SEARCHED = "searched"  # what is chosen under a limit


@dataclass(frozen=True)
class Row:
    """One plan: seconds and bytes, predicted and measured; seconds of the clock until `at_full_speed`.

    `limit` is what it was chosen under, `speeds` those of each step (`MachineSpeed.of_ranks`). Plans of another program want
    other batches or change gradients.
    """

    setting: str
    technique: str
    plan: str
    predicted: tuple[float, float]
    measured: tuple[float, float]
    speeds: Sequence[Sequence[Sequence[float]]] = field(repr=False)
    limit: float = math.inf
    is_same_program: bool = True
    clock_seconds: float = math.nan

    def at_full_speed(self, products: float) -> Row:
        """The row with seconds as if the machine had always been as fast as when products take so long."""
        seconds = seconds_at_full_speed(self.speeds, products=products, warmup=WARMUP)
        return replace(self, measured=(seconds, self.measured[1]), clock_seconds=self.measured[0])

    @property
    def errors(self) -> tuple[float, float]:
        """Shares by which predictions of seconds and bytes are off."""
        seconds, size = (a / b - 1 for a, b in zip(self.predicted, self.measured, strict=True))
        return seconds, size

    def line(self) -> str:
        """The row of the table."""
        of_time, of_bytes = (f"{100 * error:+.1f} %" for error in self.errors)
        clock = "" if math.isnan(self.clock_seconds) else f" | {self.clock_seconds:.3f}"
        seconds = f"{self.predicted[0]:.3f} | {self.measured[0]:.3f} | {of_time}{clock}"
        sizes = f"{mib(self.predicted[1])} | {mib(self.measured[1])} | {of_bytes}"
        return f"| {self.setting} | {self.technique} | {self.plan} | {seconds} | {sizes} |"


def regrets(rows: Sequence[Row]) -> list[float]:
    """How much slower what is chosen within each limit of a setting was than the fastest executed plan that is predicted to fit
    and computes the same in the same program: plans of a given mesh want one batch for several ranks.
    """
    same = [row for row in rows if row.is_same_program]
    found = []
    for own in (row for row in rows if row.limit < math.inf):
        fitting = [row.measured[0] for row in same if 1.05 * row.predicted[1] <= own.limit]
        found.append(own.measured[0] / min(fitting) - 1)
    return found


def spearman(first: Sequence[float], second: Sequence[float]) -> float:
    """Rank correlation; ties get their mean rank."""
    return float(np.corrcoef(_ranks(first), _ranks(second))[0, 1])


def _ranks(values: Sequence[float]) -> list[float]:
    given = [*values]
    return [sum(other < value for other in given) + (given.count(value) - 1) / 2 for value in given]


def summary(rows: Sequence[Row], products: float) -> list[str]:
    """Lines with the figures of all rows, at full speed, with so many seconds for the products."""
    by_setting: dict[str, list[Row]] = {}
    for row in rows:
        by_setting.setdefault(row.setting, []).append(row)
    lines = [
        f"- {len(rows)} plans, {len({row.technique for row in rows} - {SEARCHED})} techniques beside what is chosen"
    ]
    for index, what in enumerate(("time", "bytes")):
        errors = [abs(row.errors[index]) for row in rows]
        median, p90 = np.quantile(errors, (0.5, 0.9))
        lines.append(f"- |error| of {what}: median {100 * median:.1f} %, 90th percentile {100 * p90:.1f} %")
    by_clock = [abs(row.predicted[0] / row.clock_seconds - 1) for row in rows]
    median, p90 = np.quantile(by_clock, (0.5, 0.9))
    slower = np.concatenate([np.asarray(row.speeds)[:, WARMUP:, 1].ravel() for row in rows]) / products
    low, middle, high = np.quantile(slower, (0.1, 0.5, 0.9))
    lines.append(
        f"- against the clock: median {100 * median:.1f} %, 90th percentile {100 * p90:.1f} %; products between steps took "
        f"{middle:.2f} times as long as at full speed (10th and 90th percentile {low:.2f} and {high:.2f})"
    )
    ranks = {
        name: spearman([r.predicted[0] for r in own], [r.measured[0] for r in own])
        for name, own in by_setting.items()
        if len(own) > 2
    }
    lines.append("- Spearman of times: " + ", ".join(f"{name}: {value:.2f}" for name, value in ranks.items()))
    found_regrets = [regret for own in by_setting.values() for regret in regrets(own)]
    lines.append(
        f"- regret at {len(found_regrets)} limits: median {100 * statistics.median(found_regrets):.1f} %, largest "
        f"{100 * max(found_regrets):.1f} %"
    )
    return lines

"""Advice on data, from what `topt stalls` measured: whether training waits for them, and the least
cache worth having.

    equation                                                function      source
    step of a job = max(T, B / rate of the loader)          advise_data   the slower of the two
    x* = (D / S - N / R) / (D / S - D / C), R = min(P, G)   least_share   DS-Analyzer, derived from
                                                                          arXiv 2007.06775

D bytes of all samples, S bytes/s of their source, C those of the cache, N samples, P and G samples
per second of preparation and of the device. The advice itself plays the loader through
(`data/stalls/model.py`), as its stages share cores.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lightning_topt.basics.units import format_bytes
from lightning_topt.data.stalls.model import NEARLY, SetUp, StallCosts, batch_seconds, least_cache
from lightning_topt.plan.advice_page import Advice
from lightning_topt.plan.scenarios import Estimate

_SOURCE = (
    "Mohan et al., Analyzing and Mitigating Data Stalls in DNN Training, arXiv 2007.06775, "
    "section 3"
)
_RUN = "run `topt stalls` with the same model and data, and give its stalls.json as stalls="


@dataclass(frozen=True)
class MeasuredStalls:
    """`MeasuredStalls` are what `stalls.json` holds of a loader: costs and set-up, of one
    process.
    """

    costs: StallCosts
    setup: SetUp

    @classmethod
    def read(cls, data: Any) -> MeasuredStalls:
        """Read the values of a ``stalls.json``. Raises ValueError for others."""
        try:
            costs: dict[str, Any] = {
                k: math.inf if v is None else v for k, v in dict(data["costs"]).items()
            }
            return cls(StallCosts(**costs), SetUp(**data["set_up"]))
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"stalls is a stalls.json that `topt stalls` wrote, and this is none: {error}"
            ) from error

    @property
    def samples_per_second(self) -> float:
        """Samples per second that the loader delivers to a device that takes no time."""
        fast = dataclasses.replace(self.setup, step_speedup=1e6)
        return self.costs.batch_size / batch_seconds(self.costs, fast)


def least_share(
    data_bytes: float, *, source: float, cache: float, samples: int, rate: float
) -> float:
    """Return x*, the least share of the samples in a cache at which fetching is not slower than
    `rate` samples per second.
    """
    fetch, hit, goal = data_bytes / source, data_bytes / cache, samples / rate
    return min(max((fetch - goal) / (fetch - hit), 0.0), 1.0) if fetch > hit else 0.0


def advise_data(at: Estimate, stalls: MeasuredStalls | None) -> list[Advice]:
    """Return whether the plan `at` would wait for its data, and what cache is worth having."""
    if stalls is None:
        return [
            Advice(
                "data", f"Whether training waits for data is not known: {_RUN}.", source=_SOURCE
            ),
            Advice("cache", f"The least useful cache is not known: {_RUN}.", source=_SOURCE),
        ]
    return [_loader(at, stalls), _cache(at, stalls)]


def _per_process(at: Estimate) -> float:
    """Samples per second that one data rank takes."""
    return at.samples_per_second / at.point.plan.data_parallel_size


def _loader(at: Estimate, stalls: MeasuredStalls) -> Advice:
    taken, given = _per_process(at), stalls.samples_per_second
    ratio = taken / given
    says = "is fast enough" if ratio <= 1 else f"is too slow: steps take {ratio:.2f} times as long"
    return Advice(
        "data",
        f"A loader as measured {says}; it delivers {given:.4g} samples per second, a rank of the "
        f"plan takes {taken:.4g}.",
        max(ratio, 1.0),
        "times the step",
        "max(T, b / rate) / T",
        {"T": at.step_seconds, "b": taken * at.step_seconds, "rate": given},
        f"{_SOURCE}; rate: the simulation of docs/stalls.md",
    )


def _cache(at: Estimate, stalls: MeasuredStalls) -> Advice:
    costs, taken = stalls.costs, _per_process(at)
    speedup = costs.step_seconds / (costs.batch_size / taken)
    setup = dataclasses.replace(stalls.setup, step_speedup=max(speedup, 1e-6))
    share = least_cache(costs, setup)
    size = share * costs.entry_bytes * costs.num_items
    data = costs.source_bytes * costs.num_items
    preparing = setup.cores / costs.miss_seconds if costs.miss_seconds > 0 else math.inf
    inputs: Mapping[str, Any] = {
        "D": data,
        "S": costs.link_bytes_per_second,
        "C": costs.entry_bytes / costs.hit_seconds if costs.hit_seconds > 0 else math.inf,
        "N": costs.num_items,
        "R": min(preparing, taken),
    }
    by_formula = None
    if math.isfinite(costs.link_bytes_per_second) and data > 0:
        by_formula = least_share(
            data, source=inputs["S"], cache=inputs["C"], samples=inputs["N"], rate=inputs["R"]
        )
    says = (
        "No cache is worth having"
        if share == 0
        else f"A cache of {100 * share:.0f} % of the samples, {format_bytes(size)},"
    )
    rest = (
        "the loader is as fast without."
        if share == 0
        else f"is the least within {100 * NEARLY:.0f} % of one with all of them."
    )
    return Advice(
        "cache",
        f"{says}{': ' if share == 0 else ' '}{rest}",
        size,
        "bytes",
        "x* = (D / S - N / R) / (D / S - D / C), here by playing the loader",
        {**inputs, "x* by the formula": by_formula, "share": share},
        _SOURCE,
    )

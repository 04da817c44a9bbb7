"""Every cost the search may ask for, as arrays: the narrow waist before the search.

It knows neither models nor clusters. `chain_table` and `stage_table` are the forms for a chain of
blocks and for a pipeline.

A plan gives every operator one of its configurations. Its costs are vectors that add up over
operators and edges:

    step_seconds(plan) = max over paths   p of  sum of seconds[.][config, p]
    peak_bytes(plan)   = max over moments m of  sum of bytes[.][config, m]

A path is one chain of work that may be the slowest (compute, or the network). A moment is one point
of the step's memory timeline.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


@dataclass(frozen=True)
class OperatorCosts:
    """Costs of one operator: `seconds` (config, path) and `bytes` (config, moment).

    `configs` name the rows.
    """

    name: str
    configs: tuple[Any, ...]
    seconds: Array
    bytes: Array


@dataclass(frozen=True)
class EdgeCosts:
    """Costs between two operators; inf forbids.

    `seconds` (source config, target config, path), `bytes` (source config, target config, moment).
    """

    source: str
    target: str
    seconds: Array
    bytes: Array


@dataclass(frozen=True)
class CostTable:
    """All operators and edges, plus what every plan pays.

    That is `fixed_seconds` (path,) and `fixed_bytes` (moment,).
    """

    operators: tuple[OperatorCosts, ...]
    edges: tuple[EdgeCosts, ...]
    fixed_seconds: Array
    fixed_bytes: Array

    def __post_init__(self) -> None:
        names = [operator.name for operator in self.operators]
        if len(set(names)) != len(names):
            raise ValueError("two operators have the same name")
        rows = {operator.name: len(operator.configs) for operator in self.operators}
        for operator in self.operators:
            _check(
                operator.name, operator.seconds, (rows[operator.name], *self.fixed_seconds.shape)
            )
            _check(operator.name, operator.bytes, (rows[operator.name], *self.fixed_bytes.shape))
        for edge in self.edges:
            if edge.source not in rows or edge.target not in rows or edge.source == edge.target:
                raise ValueError(
                    f"edge {edge.source!r} -> {edge.target!r} does not join two operators of the "
                    "table"
                )
            between = (rows[edge.source], rows[edge.target])
            _check(
                f"{edge.source} -> {edge.target}",
                edge.seconds,
                (*between, *self.fixed_seconds.shape),
            )
            _check(
                f"{edge.source} -> {edge.target}", edge.bytes, (*between, *self.fixed_bytes.shape)
            )

    def evaluate(self, choice: Mapping[str, int] | Sequence[int]) -> tuple[float, float]:
        """Return (step_seconds, peak_bytes) of one plan.

        `choice` gives each operator the index of its configuration.
        """
        if not isinstance(choice, Mapping):
            choice = {
                operator.name: index for operator, index in zip(self.operators, choice, strict=True)
            }
        seconds, size = self.fixed_seconds.copy(), self.fixed_bytes.copy()
        for operator in self.operators:
            seconds += operator.seconds[choice[operator.name]]
            size += operator.bytes[choice[operator.name]]
        for edge in self.edges:
            seconds += edge.seconds[choice[edge.source], choice[edge.target]]
            size += edge.bytes[choice[edge.source], choice[edge.target]]
        return float(seconds.max()), float(size.max())


def _check(name: str, array: Array, shape: tuple[int, ...]) -> None:
    if array.shape != shape:
        raise ValueError(f"costs of {name} have shape {array.shape}, expected {shape}")
    if np.isnan(array).any():
        raise ValueError(f"costs of {name} hold NaN")

"""The functions of a split step that run on whole tensors, the same on every rank of a tensor axis:
what they take, and why.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from lightning_topt.graph.op_config import Shard
from lightning_topt.techniques.tensor_parallel.kind_table import KINDS
from lightning_topt.techniques.tensor_parallel.split_walk import PricedCall

Why = Literal["not in the table of kinds", "its slices are gathered first", "its tensors are whole"]


@dataclass(frozen=True)
class WholeOperator:
    """A function that is not split, in `module` and others: calls of a step, its shares of the
    seconds of the calls of a step (with what brings split arguments together for it) and of the
    bytes that they keep for backward.
    """

    function: str
    module: str
    why: Why
    calls: int
    share_of_seconds: float
    share_of_bytes: float


def whole_operators(calls: Iterable[tuple[PricedCall, int]]) -> list[WholeOperator]:
    """Return the functions that run whole, those whose tensors are whole anyway last, then by their
    share of the seconds.

    `calls` are those of a step with how often each runs (`SplitModel.priced_calls`). Views are left
    out.
    """
    calls = [*calls]
    seconds = sum(times * call.seconds for call, times in calls) or 1.0
    kept = sum(times * call.activation_bytes for call, times in calls) or 1.0
    found: dict[tuple[str, Why], list[tuple[PricedCall, int]]] = {}
    for call, times in calls:
        if not call.is_split and (call.seconds or call.activation_bytes):
            found.setdefault((_name(call), _why(call)), []).append((call, times))
    operators = [
        WholeOperator(
            name,
            several[0][0].call.stack[-1] if several[0][0].call.stack else "",
            why,
            sum(times for _, times in several),
            sum(times * call.seconds for call, times in several) / seconds,
            sum(times * call.activation_bytes for call, times in several) / kept,
        )
        for (name, why), several in found.items()
    ]
    return sorted(
        operators, key=lambda each: (each.why == "its tensors are whole", -each.share_of_seconds)
    )


def _name(call: PricedCall) -> str:
    func = call.call.func
    return str(getattr(func, "__name__", func))


def _why(call: PricedCall) -> Why:
    if call.call.inputs and call.call.func not in KINDS:
        return "not in the table of kinds"
    is_given_slices = any(isinstance(placement, Shard) for placement in call.placements)
    return "its slices are gathered first" if is_given_slices else "its tensors are whole"

"""Repeat measurements until they agree: a busy moment of the machine must not decide about a plan."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, TypeVar

_AGREE = 1.2  # two times are the same within this factor
_MAX_ROUNDS = 5

Part = TypeVar("Part", bound=Hashable)
Times = Mapping[Any, float]  # seconds by what was measured; less is better


def repeat_parts(
    parts: Mapping[Part, Callable[[], Times]], *, seconds_left: Callable[[], float]
) -> dict[Part, dict[Hashable, float]]:
    """Measure every part in two halves, one after all others; repeat those whose two fastest rounds differ; keep the fastest.

    Two rounds differ when a time in one is more than 20 % above the same time in the other. There are at most five rounds,
    and no more when `seconds_left` returns less than 0. Of each time the least is kept: other programs can only make a
    measurement slower.

    All ranks must get the same times and seconds (`ranks.average`), as they then repeat the same parts.
    """
    rounds: dict[Part, list[Times]] = {name: [] for name in parts}
    for _ in range(2):
        for name, measure in parts.items():
            rounds[name].append(measure())
    for _ in range(_MAX_ROUNDS - 2):
        again = [name for name, times in rounds.items() if not agree(times)]
        if not again or seconds_left() < 0:
            break
        for name in again:
            rounds[name].append(parts[name]())
    return {name: fastest(times) for name, times in rounds.items()}


def agree(rounds: Sequence[Times]) -> bool:
    """Return whether of every time the two least are within 20 %."""
    by_key = (sorted(times[key] for times in rounds if key in times) for key in fastest(rounds))
    return all(len(times) > 1 and times[1] <= _AGREE * times[0] for times in by_key)


def fastest(rounds: Sequence[Times]) -> dict[Hashable, float]:
    """Return the least of every time."""
    found: dict[Hashable, float] = {}
    for times in rounds:
        for key, seconds in times.items():
            found[key] = min(seconds, found.get(key, seconds))
    return found

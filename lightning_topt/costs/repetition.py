"""Repeat measurements until they agree: a busy moment of the machine must not decide about a
plan.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, TypeVar

_AGREE = 1.2  # two times are the same within this factor
_MAX_ROUNDS = 5

Part = TypeVar("Part", bound=Hashable)
Times = Mapping[Any, float]  # seconds by what was measured


def repeat_parts(
    parts: Mapping[Part, Callable[[], Times]], *, seconds_left: Callable[[], float]
) -> dict[Part, list[Times]]:
    """Return the rounds of every part: measured in two halves, one after all others, and again
    while the two fastest differ.

    Two rounds differ when a time in one is more than 20 % above the same time in the other. There
    are at most five rounds, and no more when `seconds_left` returns less than 0. `fastest` and
    `usual` make one time of them.

    All ranks must get the same times and seconds (`ranks.average`), as they then repeat the same
    parts.
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
    return rounds


def agree(rounds: Sequence[Times]) -> bool:
    """Return whether of every time the two least are within 20 %."""
    by_key = (sorted(times[key] for times in rounds if key in times) for key in fastest(rounds))
    return all(len(times) > 1 and times[1] <= _AGREE * times[0] for times in by_key)


def fastest(rounds: Sequence[Times]) -> dict[Hashable, float]:
    """Return the least of every time: for work on one device, which other programs can only make
    slower.
    """
    return _of_each(rounds, min)


def usual(rounds: Sequence[Times]) -> dict[Hashable, float]:
    """Return the median of every time: for what varies by itself, such as how long ranks wait for
    one another.
    """
    return _of_each(rounds, statistics.median)


def _of_each(
    rounds: Sequence[Times], choose: Callable[[list[float]], float]
) -> dict[Hashable, float]:
    found: dict[Hashable, list[float]] = {}
    for times in rounds:
        for key, seconds in times.items():
            found.setdefault(key, []).append(seconds)
    return {key: choose(seconds) for key, seconds in found.items()}

"""Measurements are repeated until the two fastest rounds agree; the fastest counts, or the
median.
"""

from __future__ import annotations

from lightning_topt.costs.repetition import fastest, repeat_parts, usual


def part(*rounds, order=None, name=""):
    """A measurement that returns one after the other of `rounds`."""
    left = [times if isinstance(times, dict) else {"t": times} for times in rounds]

    def measure():
        if order is not None:
            order.append(name)
        return left.pop(0)

    return measure


def test_halves_that_agree_are_enough_and_have_all_other_parts_between_them():
    order = []
    parts = {name: part(1.0, 1.1, order=order, name=name) for name in "ab"}
    found = repeat_parts(parts, seconds_left=lambda: 1.0)
    assert {name: fastest(rounds) for name, rounds in found.items()} == {
        "a": {"t": 1.0},
        "b": {"t": 1.0},
    }
    assert usual(found["a"]) == {"t": 1.05}
    assert order == ["a", "b", "a", "b"]


def test_a_part_is_repeated_until_its_two_fastest_rounds_agree():
    order = []
    parts = {
        "quiet": part(1.0, 1.0, order=order, name="quiet"),
        "noisy": part(9.0, 3.0, 1.1, 1.0, order=order, name="noisy"),
    }
    noisy = repeat_parts(parts, seconds_left=lambda: 1.0)["noisy"]
    assert fastest(noisy) == {"t": 1.0} and usual(noisy) == {"t": 2.05}
    assert order == ["quiet", "noisy", "quiet", "noisy", "noisy", "noisy"]


def test_times_of_a_curve_agree_one_by_one():
    curve = part({1: 1.0, 2: 9.0}, {1: 1.1, 2: 5.0}, {1: 7.0, 2: 5.0})
    rounds = repeat_parts({"curve": curve}, seconds_left=lambda: 1.0)["curve"]
    assert fastest(rounds) == {1: 1.0, 2: 5.0} and usual(rounds) == {1: 1.1, 2: 5.0}


def test_repeating_is_bounded_by_rounds_and_by_time():
    count = []
    never = [2.0**-i for i in range(9)]
    parts = {"a": part(*never, order=count)}
    assert (
        fastest(repeat_parts(parts, seconds_left=lambda: 1.0)["a"]) == {"t": 2.0**-4}
        and len(count) == 5
    )
    assert fastest(repeat_parts({"a": part(*never)}, seconds_left=lambda: -1.0)["a"]) == {"t": 0.5}

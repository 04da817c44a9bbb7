"""Races of runs whose factors are known, and the table of the user."""

from __future__ import annotations

import itertools
import math
import os
import random

import pytest

from benchmarks.exchange.paired_runs import (
    BEHIND,
    DIVERGED,
    REACHED,
    Pairing,
    RunKey,
    Target,
    Way,
    WayFailedError,
    keep_row,
    race,
    row_of,
    steps_to,
    write_whole,
)
from lightning_topt.plan.step_factors import StepTable, model_words

PAIRING = Pairing(steps=100, seeds=(3, 4))
EVERY = 5


def dense_loss(step: float) -> float:
    return 3.0 - 0.02 * step


def curve_of(factor: float, target: Target | None, pairing: Pairing = PAIRING):
    """What a run leaves that needs `factor` times the steps, checked once in `EVERY`."""
    curve = []
    last = pairing.steps if target is None else pairing.most_steps
    for step in range(EVERY, last + 1, EVERY):
        curve.append((step, dense_loss(step / factor)))
        if target is not None and target.verdict(curve):
            break
    return curve


class Runs:
    """Makes runs with given factors by way and seed, and remembers them."""

    def __init__(self, factors) -> None:
        self.factors, self.made = factors, []

    def __call__(self, key: RunKey, target: Target | None):
        self.made.append((key.way.words, key.seed))
        factor = self.factors.get(key.way.words, 1.0)
        factor = factor.get(key.seed, 1.0) if isinstance(factor, dict) else factor
        if isinstance(factor, str):
            raise WayFailedError(factor)
        if math.isinf(factor):
            return [(5, 2.9), (10, math.inf)]
        return curve_of(factor, target)


def test_factors_are_those_of_the_runs():
    factors = {
        "near": {3: 1.25, 4: 0.8},
        "slow": 1.9,
        "far": 4.0,
        "lost": math.inf,
        "broken": "no gradients",
    }
    ways = [Way(name, method="bf16", ranks=2) for name in factors]
    runs, said, kept = Runs(factors), [], {}
    found = race(
        ways, runs, pairing=PAIRING, say=said.append, keep=lambda w, f: kept.update({w: f})
    )
    of = {way.words: list(values) for way, values in found.factors.items()}
    assert of["near"] == pytest.approx([1.25, 0.8]) and of["slow"] == pytest.approx([1.9, 1.9])
    assert of["far"] == of["lost"] == [None]
    assert {way.words for way in found.dropped} == {"far", "lost"}
    assert {way.words: why for way, why in found.failed.items()} == {"broken": "no gradients"}
    assert kept == found.factors
    # all ways with the first seed, then those that are left
    assert runs.made == [
        ("dense", 3),
        ("dense", 4),
        *((name, 3) for name in factors),
        ("near", 4),
        ("slow", 4),
    ]
    far = next(line for line in said if line.startswith("far"))
    assert "ends after 25 steps: its lowest loss is 2.875, and the dense run was lower" in far


def test_what_is_behind_ends_at_the_first_look_and_no_sooner():
    target = Target(tuple(curve_of(1.0, None)), PAIRING)
    for factor in (0.5, 1.0, 1.5, 1.99, 2.2, 3.0, 8.0):
        curve = curve_of(factor, target)
        verdict = target.verdict(curve)
        if factor < 2:
            assert verdict == REACHED and target.factor(curve) == pytest.approx(factor, abs=1e-3)
        else:
            # 2.2 is not clear at the first look
            assert verdict == BEHIND and curve[-1][0] == (50 if factor == 2.2 else 25)
            assert target.factor(curve) is None
    assert target.verdict([(5, math.nan)]) == DIVERGED
    # one that was behind early, between two looks, goes on
    assert target.verdict([(20, 2.95)]) is None


def test_a_run_as_good_as_the_dense_one_is_never_behind():
    """However noisy the curves are: a low value early does not count against it."""
    draw = random.Random(0)
    for _ in range(300):
        noise = [draw.gauss(0, 0.3) for _ in range(EVERY, 101, EVERY)]
        dense = [
            (step, dense_loss(step) + e)
            for step, e in zip(range(EVERY, 101, EVERY), noise, strict=True)
        ]
        target = Target(tuple(dense), PAIRING)
        for end in range(1, len(dense) + 1):
            assert not target.is_behind(dense[:end])
    # on a plateau, a little above is not behind either
    target = Target(((5, 3.0), (10, 2.0), (20, 2.0), (25, 2.0), (100, 1.0)), PAIRING)
    assert not target.is_behind([(5, 3.0), (10, 2.01), (25, 2.01)])
    assert target.is_behind([(5, 3.0), (10, 2.2), (25, 2.2)])


def test_the_step_of_a_loss_is_that_of_a_look_at_a_fine_line():
    curve = [(10, 3.0), (20, 2.0), (40, 2.5), (60, 1.0)]
    for loss in (3.1, 3.0, 2.7, 2.0, 1.9, 1.0, 0.5):
        fine = [
            a + (b - a) * i / 1000
            for (a, x), (b, y) in itertools.pairwise(curve)
            for i in range(1001)
            if x + (y - x) * i / 1000 <= loss + 1e-12
        ]
        found = steps_to(curve, loss)
        assert (found is None) == (not fine)
        assert found is None or found == pytest.approx(fine[0], abs=0.05)
    assert steps_to([(10, math.inf), (20, 1.0)], 2.0) == 20


# ---- the table

ROW = {"optimizer": "AdamW", "steps": 1000, "source": "mine"}
NET = model_words("Net", 1234)
WAY = Way("16 bits", method="bf16", ranks=2)


def test_a_row_replaces_that_of_an_earlier_measurement(tmp_path):
    path = tmp_path / "of_mine" / "table.json"
    keep_row(path, row_of(WAY, [1.5, None], model=NET, **ROW))
    keep_row(path, row_of(WAY, [3.0], model=model_words("Net", 1235), **ROW))
    keep_row(path, row_of(WAY, [1.25], model=NET, **ROW))
    found = StepTable.read(path).rows
    assert [(row.model, row.factors) for row in found] == [
        ("Net of 1,235 parameters", (3.0,)),
        ("Net of 1,234 parameters", (1.25,)),
    ]
    assert [each.name for each in path.parent.iterdir()] == ["table.json"]


def test_a_write_that_fails_leaves_what_was_there(tmp_path, monkeypatch):
    path = tmp_path / "table.json"
    write_whole(path, "before")

    def fails(*_: object) -> None:
        raise OSError("no space")

    monkeypatch.setattr(os, "replace", fails)
    with pytest.raises(OSError, match="no space"):
        write_whole(path, "after")
    assert path.read_text() == "before" and [*tmp_path.iterdir()] == [path]

"""The rules that are taken where none is named, against the committed runs that they rest on."""

from __future__ import annotations

import json
import math
import statistics
from collections import defaultdict
from collections.abc import Mapping
from functools import cache
from typing import Any, NamedTuple

import pytest

from benchmarks.pipelines import weight_prediction as harness
from lightning_topt.weight_prediction import DEFAULTS, Default, Prediction, make_prediction

ROWS = [pytest.param(row, id=f"{row.optimizer}-{row.is_cut}-{row.missing}") for row in DEFAULTS]


class Cell(NamedTuple):
    """What runs are alike in, but for their rule. `missing`: of the first stage, in updates."""

    optimizer: str
    is_cut: bool
    missing: int
    model: str
    is_tuned: bool


@cache
def evidence() -> dict[Cell, dict[Prediction, list[float]]]:
    """Held-out losses of the seeds, by cell and rule; infinite where training diverged.

    Where learning rates were searched for, those of the rate with the least median of two or more.
    """
    done = json.loads(harness.FILE.read_text())
    found: dict[tuple[Cell, Prediction, str], list[float]] = defaultdict(list)
    for key, run in done["runs"].items():
        model, rule, stages, _ = key.split("/")
        if rule in ("pipemare", "pipeoptim"):  # which the package no longer has
            continue
        optimizer = "NAdam" if rule == "nesterov" else harness.MODELS[model]
        if rule != harness.SYNCHRONOUS:
            cell = cell_of(optimizer, rule, int(stages), model, is_tuned=False)
            found[cell, make_prediction(rule), ""].append(loss_of(run))
    for key, run in done["tuned"].items():
        model, optimizer, rule, stages, rate, _, *cut = key.split("/")
        if rule not in (harness.SYNCHRONOUS, *harness.STARTS):
            cell = cell_of(
                optimizer.split()[0], rule, int(stages), model, *map(int, cut), is_tuned=True
            )
            feedback = {"rule": "two_versions", "error_feedback": True}
            made = make_prediction(feedback if rule == harness.FEEDBACK else rule)
            found[cell, made, f"{optimizer} {rate}"].append(loss_of(run))
    best: dict[Cell, dict[Prediction, list[float]]] = defaultdict(dict)
    # more than one seed first
    for (cell, made, _), losses in sorted(
        found.items(), key=lambda each: (len(each[1]) < 2, statistics.median(each[1]))
    ):
        best[cell].setdefault(made, losses)
    return best


def cell_of(
    optimizer: str, rule: str, stages: int, model: str, cut: int = 1, *, is_tuned: bool
) -> Cell:
    is_cut = cut > 1 or "two_versions" in rule
    return Cell(optimizer, is_cut, 1 if is_cut else stages - 1, model, is_tuned)


def loss_of(run: Mapping[str, Any]) -> float:
    return math.inf if run["held_out_loss"] is None else run["held_out_loss"]


def cells_of(row: Default) -> list[Cell]:
    """Cells that a row decides: those with more missing updates than the row before it has."""
    alike = [each for each in DEFAULTS if each[:2] == row[:2]]
    before = max((each.missing for each in alike if each.missing < row.missing), default=0)
    return [c for c in evidence() if c[:2] == row[:2] and before < c.missing <= row.missing]


def scores(row: Default) -> dict[Prediction, tuple[float, float]]:
    """Mean logarithms of the medians and of the worst seeds, in cells that all the rules have."""
    cells = [evidence()[cell] for cell in cells_of(row)]
    most = max(map(len, cells))
    common = [cell for cell in cells if len(cell) == most]
    return {
        rule: (
            statistics.mean(math.log(statistics.median(cell[rule])) for cell in common),
            statistics.mean(math.log(max(cell[rule])) for cell in common),
        )
        for rule in common[0]
    }


@pytest.mark.parametrize("row", ROWS)
def test_no_rule_is_better_than_the_default_by_more_than_its_seeds(row):
    found = scores(row)
    default, best = make_prediction(row.rule), min(found, key=lambda rule: found[rule][0])
    assert found[default][0] <= found[best][1]


@pytest.mark.parametrize("row", ROWS)
def test_the_domain_of_a_row_was_measured(row):
    """The most missing updates."""
    rule = make_prediction(row.rule)
    cells = [cell for cell in cells_of(row) if rule in evidence()[cell]]
    assert max(cell.missing for cell in cells) == row.missing

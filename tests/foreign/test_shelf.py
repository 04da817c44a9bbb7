"""Every program of the shelf trains under our strategy as under Lightning's ddp: losses of three steps, and its whole state."""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing is downloaded

from types import ModuleType
from typing import Any

import pytest

from tests.foreign import awkward, classics, transformers_models, vision
from tests.foreign.run import Outcome, compare, topt_strategy
from tests.foreign.shelf import PROGRAMS, Program

SHELVES = [classics, awkward, vision, transformers_models]


def names_of(shelf: ModuleType) -> list[str]:
    return [name for name, program in PROGRAMS.items() if program.make.__module__ == shelf.__name__]


def plain(program: Program) -> Any:
    return topt_strategy(program, plan="ddp")


def check(outcomes: list[list[Outcome]]) -> None:
    wrong = [f"{o.name}: {'; '.join(o.differences)}" for rank in outcomes for o in rank if o.differences]
    assert not wrong, "\n".join(wrong)
    assert all(len(outcome.ddp.losses) >= 3 for rank in outcomes for outcome in rank), "a program that took no steps"


@pytest.mark.parametrize("shelf", SHELVES, ids=lambda shelf: shelf.__name__.rpartition(".")[2])
def test_programs_under_the_plan_ddp(shelf: ModuleType) -> None:
    check(compare(names_of(shelf), plain))

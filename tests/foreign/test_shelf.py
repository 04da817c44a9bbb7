"""Every program of the shelf trains under our strategy as under Lightning's ddp: losses of seven
steps, and its whole state.
"""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing is downloaded

from types import ModuleType
from typing import Any

import pytest

from tests.foreign import awkward, classics, transformers_models, vision
from tests.foreign.run import STEPS, Outcome, compare, least_memory_strategy, topt_strategy
from tests.foreign.shelf import PROGRAMS, Program

SHELVES = [classics, awkward, vision, transformers_models]


def names_of(shelf: ModuleType) -> list[str]:
    return [name for name, program in PROGRAMS.items() if program.make.__module__ == shelf.__name__]


# Programs for which a plan of least memory cannot be chosen, or has other gradients as it says.
NOT_LEAST_MEMORY = {
    "gan_with_manual_optimization": "steps by hand cannot be planned",
    "optimizer_that_keeps_gradients": "plans of least memory make gradients views of buckets",
}


def searched(program: Program) -> Any:
    kept = program.name in NOT_LEAST_MEMORY
    return topt_strategy(program) if kept else least_memory_strategy(program)


def in_shards(program: Program) -> Any:
    return topt_strategy(program, plan="zero3+recompute")


# What cannot run with sharded parameters, and what the error says: each names what it found.
NOT_IN_SHARDS = {
    "gan_with_manual_optimization": "manual optimization",
    "byol_with_momentum_encoder": "Byol.on_train_batch_end reads parameters",
    "reinforcement_learning_dqn": "Dqn.training_step reads parameters",
    "stored_list_for_l2": "attribute 'decayed' of StoredList holds parameter 'net.",
    "average_by_hand": "attribute 'averages' of AveragesInDict holds parameter 'net.",
    "logged_gradient_norms": "LogsNorms.on_before_optimizer_step reads gradients",
    "histograms_of_weights": "HistogramsOfWeights.on_train_batch_end reads parameters",
    "sparse_embeddings": "'table' has sparse gradients; leave out sparse=True",
    "unused_parameters": "options of DistributedDataParallel were given",
    "scalar_parameter": "parameter 'scale' has no dimension to shard; give it the shape (1,)",
    "own_backward_and_parameter_hook": "a hook on parameter 'net.2.weight'",
    "clip": "parameter 'model.logit_scale' has no dimension to shard; give it the shape (1,)",
}


@pytest.mark.parametrize("shelf", SHELVES, ids=lambda shelf: shelf.__name__.rpartition(".")[2])
def test_programs_train_as_under_ddp(shelf: ModuleType) -> None:
    """Every program under a plan that was searched; under the plan "zero3+recompute" those that
    can, the others are refused with the reason.
    """
    chosen, sharded = compare(names_of(shelf), [searched, in_shards])
    check(chosen)
    assert all(len(outcome.ddp.losses) >= STEPS for outcome in chosen), (
        "a program that took no steps"
    )
    for outcome in chosen:
        if outcome.name not in NOT_LEAST_MEMORY:
            assert outcome.topt.planned_by == "search", outcome.name
    check([outcome for outcome in sharded if outcome.name not in NOT_IN_SHARDS])
    for outcome in sharded:
        if outcome.name in NOT_IN_SHARDS:
            assert NOT_IN_SHARDS[outcome.name] in outcome.topt.error, outcome.name
            assert outcome.topt.error.startswith(("PlanError", "RemotePlanningError")), (
                outcome.topt.error
            )


def check(outcomes: list[Outcome]) -> None:
    wrong = [
        f"{outcome.name}: {'; '.join(outcome.differences)}"
        for outcome in outcomes
        if outcome.differences
    ]
    assert not wrong, "\n".join(wrong)

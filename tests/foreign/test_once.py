"""User code runs exactly as often as under Lightning's ddp: counts, traces, losses and state of
programs that count.

Each test takes all programs; the environment variable ONCE takes some, by their names.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from typing import Any

import pytest
from torch import Tensor

from lightning_topt.plugins.watched_steps import WATCHED_STEPS
from tests.foreign import (  # noqa: F401  (fill the shelf)
    once,
    once_collectives,
    once_modes,
    once_optimizers,
    once_python,
    once_training,
)
from tests.foreign.once_run import compare_counts, first_difference
from tests.foreign.once_shelf import COUNTED, Built, Counted, Net, traced
from tests.foreign.run import Outcome, ddp_strategy, least_memory_strategy, topt_strategy


def zero1(program: Any) -> Any:
    return topt_strategy(program, plan="zero1")


def default(program: Any) -> Any:
    return topt_strategy(program)


def memory(program: Any) -> Any:
    return least_memory_strategy(program)


SHARED_ALREADY = "shared between ranks already"
ASKS_AGAIN = "evaluates the model several times per step"
# What is known to differ from ddp, or to be refused: a part of what is told.
KNOWN: dict[Any, dict[str, str]] = {
    zero1: {
        "muon_over_ranks": SHARED_ALREADY,
        "step_that_ranks_agree_on": SHARED_ALREADY,
        "closure_asked_twice": ASKS_AGAIN,
        "closure_asked_by_lbfgs": ASKS_AGAIN,
        "schedule_free": "moves parameters in train() and eval()",
        "two_optimizers_by_hand": "manual optimization runs under the plan 'ddp' only",
        "steps_that_return_nothing": "manual optimization runs under the plan 'ddp' only",
    },
    memory: {
        # plans of least memory make gradients views of buckets
        "gradients_kept_by_the_optimizer": "False against True",
        "gradients_kept_by_the_module": "False against True",
        # than those that DDP was made for
        "body_unfrozen_at_step_5": "other parameters are trained",
        "weights_averaged_by_torch": "other parameters are trained",
        # storages inside of torch.func cannot be told
        "gradients_per_sample": "watching the step failed",
        "two_optimizers_by_hand": "manual optimization cannot be planned",
        "steps_that_return_nothing": "manual optimization cannot be planned",
    },
}
# Programs that keep the plan of ddp where least memory is asked for, and why.
KEPT_WHOLE = {
    "muon_over_ranks": "the optimizer has collectives of its own",
    "step_that_ranks_agree_on": "the optimizer has collectives of its own",
    "schedule_free": "parameters are read and written by other methods of the optimizer",
    "closure_asked_twice": "the optimizer needs the gradients of all parameters",
    "closure_asked_by_lbfgs": "the optimizer needs the gradients of all parameters",
    "steps_skipped_by_the_optimizer": "the optimizer decides by the loss",
    "sparse_table": "gradients are sparse",
}


# Of those that have to do with Python alone, these are called by Lightning's loop.
HOOKED = (
    *("bound_loggers", "hooks_of_a_callback", "hooks_of_the_module", "overridden_optimizer_hooks"),
    *("metric_that_counts", "epoch_ended_by_a_count", "checkpoints_in_the_middle"),
)


def chosen() -> list[str]:
    asked = os.environ.get("ONCE", "all").split()
    return list(COUNTED) if asked == ["all"] else asked


def programs_of(strategy: Any) -> list[str]:
    """Plans of least memory are met by all programs: steps are watched, a plan takes over.

    The default watches less, and DDP goes on: every third program, and those that least memory
    refuses or changes. No step is watched of a plan by its name: programs with optimizers,
    parameters, hooks, modes and collectives of their own.
    """
    if strategy is memory:
        return chosen()
    if strategy is default:
        met = {*list(COUNTED)[::3], *KNOWN[memory]}
    else:
        of_python = (once.__name__, once_python.__name__)
        met = {n for n, each in COUNTED.items() if each.make.__module__ not in of_python}
        met |= {*HOOKED}
    return [name for name in chosen() if name in met]


def shortened(text: str, *, first: int = 12, last: int = 10) -> str:
    """`text` without the middle of its lines: traces of Lightning are long."""
    lines = text.splitlines()
    return (
        text if len(lines) <= first + last else "\n".join([*lines[:first], "...", *lines[-last:]])
    )


def wrong(outcomes: Sequence[Outcome], known: dict[str, str]) -> list[str]:
    """What `outcomes` tell beside what is known; what is known, and not told, is wrong too."""
    told: dict[str, list[str]] = {}
    for outcome in outcomes:
        told.setdefault(outcome.name, []).extend(outcome.differences)
    found = []
    for name, differences in told.items():
        text = "\n".join(dict.fromkeys(differences))
        if name not in known and text:
            found.append(f"{name}: {shortened(text)}")
        if name in known and known[name] not in text:
            found.append(
                f"{name}: {known[name]!r} was expected, not {text or 'what is equal to ddp'!r}"
            )
    return found


@pytest.mark.timeout(600)
@pytest.mark.parametrize("strategy", [zero1, default, memory])
def test_user_code_runs_as_often_as_under_ddp(strategy: Any) -> None:
    names = programs_of(strategy)
    outcomes = compare_counts(names, strategy, among=chosen())
    if found := wrong(outcomes, KNOWN.get(strategy, {})):
        pytest.fail("\n\n".join(found), pytrace=False)
    assert {outcome.name for outcome in outcomes} == set(names)
    ran = [outcome for outcome in outcomes if not outcome.differences]
    assert all(len(outcome.ddp.losses) >= 9 for outcome in ran), "a program that took no steps"
    if strategy is memory:
        for outcome in ran:  # as long as steps are watched it is DDP, to the last bit
            watched = outcome.topt.losses[:WATCHED_STEPS]
            assert watched == outcome.ddp.losses[:WATCHED_STEPS], outcome.name
        planned = [outcome for outcome in ran if outcome.topt.planned_by == "search"]
        assert {outcome.name for outcome in planned if outcome.topt.is_plain} == set(
            KEPT_WHOLE
        ) & set(chosen())
        assert len(planned) > 0.9 * len(ran), "a plan came too late for most programs"


# ---- what runs the programs

STUCK = threading.Event()


class EndsBadly(Net):
    """Under the second strategy rank 0 waits for what never comes, or ends its process."""

    def __init__(self, *, dies: bool) -> None:
        super().__init__()
        self.dies = dies

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if STUCK.is_set() and self.global_rank == 0:
            os._exit(3) if self.dies else threading.Event().wait()
        return super().training_step(batch, batch_idx)


def hangs() -> Built:
    return traced(EndsBadly(dies=False))


def dies() -> Built:
    return traced(EndsBadly(dies=True))


def stuck(program: Any) -> Any:
    STUCK.set()
    return ddp_strategy(program)


def test_what_hangs_or_dies_is_named_and_the_others_run(monkeypatch: pytest.MonkeyPatch) -> None:
    for make in (hangs, dies):
        monkeypatch.setitem(COUNTED, make.__name__, Counted(make.__name__, "", make))
    names = ["dies", "hangs", "counter_of_the_class"]
    died, hung, *others = compare_counts(names, stuck, limit_seconds=8)
    assert [outcome.name for outcome in (died, hung, *others)] == [*names, "counter_of_the_class"]
    assert "dies under stuck, ended with 3" in died.differences[0]
    assert "no end within 8 s; rank 0 runs hangs under stuck" in hung.differences[0]
    assert "in training_step" in hung.differences[0]
    assert not any(outcome.differences for outcome in others)


@pytest.mark.parametrize(
    ("one", "two", "told"),
    [
        ([1, 2], [1, 2], ""),
        ([1, 2], [1, 3], "evidence[1]: 2 against 3"),
        (([0], {"a": [1]}), ([0], {"a": [2]}), "evidence[1]['a'][0]: 1 against 2"),
        ([1], [1, 2], "evidence has 1 entries against 2: [1] against [1, 2]"),
        ({"a": 1}, {"b": 1}, "evidence: {'a': 1} against {'b': 1}"),
        (1, True, "evidence: 1 against True"),
        (12, None, "evidence: 12 against None"),
    ],
)
def test_differences_of_evidence(one: Any, two: Any, told: str) -> None:
    assert first_difference(one, two) == told

"""Searches in several processes: all of them work, and nothing is lost with one that dies."""

from __future__ import annotations

import os
from functools import partial
from multiprocessing import get_context
from typing import Any

import pytest

from lightning_topt.cli.local_ranks import start_method
from lightning_topt.cli.parallel_search import most_processes, outcomes_of

CONTEXT: Any = get_context(start_method("cpu"))
SECONDS = 60.0  # for the other process to come


def meet(barrier: Any, item: int) -> tuple[int, int]:
    """Wait for another process that does an item."""
    barrier.wait(SECONDS)
    return item * item, os.getpid()


def refuse_odd(item: int) -> int:
    if item % 2:
        raise ValueError(f"{item} is odd")
    return item * item


def fail(parent: int, taken: Any, how: str, item: int) -> Any:
    """Do not return from a helper, or what cannot be sent; in this process, once a helper has taken
    an item.
    """
    if os.getpid() == parent:
        assert taken.wait(SECONDS)
        return item * item
    taken.set()
    if how == "dies":
        os._exit(3)
    if how == "raises":
        raise RuntimeError("a defect")
    return lambda: item


def test_several_processes_do_the_items() -> None:
    found = dict(outcomes_of(partial(meet, CONTEXT.Barrier(2)), range(6), processes=2))
    assert [found[k][0] for k in range(6)] == [k * k for k in range(6)]
    assert len({process for _, process in found.values()}) == 2 and os.getpid() in {
        p for _, p in found.values()
    }


@pytest.mark.parametrize("processes", [1, 3])
def test_errors_are_outcomes(processes: int) -> None:
    found = dict(outcomes_of(refuse_odd, range(7), processes=processes))
    assert sorted(found) == [*range(7)]
    assert all(str(found[k]) == f"{k} is odd" if k % 2 else found[k] == k * k for k in found)


@pytest.mark.parametrize("how", ["dies", "raises", "cannot be sent"])
def test_what_a_helper_does_not_finish_is_done_here(how: str) -> None:
    found = dict(
        outcomes_of(partial(fail, os.getpid(), CONTEXT.Event(), how), range(4), processes=2)
    )
    assert found == {k: k * k for k in range(4)}


def test_no_more_processes_than_searches_or_cores() -> None:
    assert most_processes(1) == 1 and 1 <= most_processes(100) <= min(os.cpu_count() or 1, 8)

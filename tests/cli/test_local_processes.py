"""Work in other processes: ranks without a Trainer, and searches of which nothing is lost."""

from __future__ import annotations

import os
from functools import partial
from multiprocessing import get_context
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_topt.cli.local_processes import (
    most_processes,
    outcomes_of,
    run_on_ranks,
    start_method,
)

CONTEXT: Any = get_context(start_method("cpu"))
SECONDS = 60.0  # for the other process to come


def sum_of_ranks(device, num_nodes, offset):
    total = torch.tensor([dist.get_rank() + offset], device=device)
    dist.all_reduce(total)
    return total.item(), dist.get_world_size(), num_nodes


def fails_on_rank_1(device, num_nodes):
    dist.barrier()  # else rank 0 may still be connecting, and fail of that first
    if dist.get_rank() == 1:
        raise RuntimeError("rank 1 has a problem")
    return "fine"


def test_ranks_work_together_and_rank_0_answers():
    assert run_on_ranks(sum_of_ranks, 10, accelerator="cpu", devices=3) == (33, 3, 1)
    assert not dist.is_initialized()


def test_an_error_on_any_rank_is_an_error_here():
    with pytest.raises(Exception, match="rank 1 has a problem"):
        run_on_ranks(fails_on_rank_1, accelerator="cpu", devices=2)


def test_more_devices_than_there_are_is_refused():
    with pytest.raises(
        ValueError, match=f"devices=99, but this machine has {torch.cuda.device_count()} CUDA"
    ):
        run_on_ranks(sum_of_ranks, 0, accelerator="cuda", devices=99)


# ---- helpers


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

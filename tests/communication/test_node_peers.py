"""Ranks that die, come late or leave while others of their node wait for them."""

from __future__ import annotations

import multiprocessing as mp
import os
import signal
import time
from multiprocessing.queues import SimpleQueue
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from lightning_topt.communication.node.node_channel import LocalPeerLost
from lightning_topt.communication.node.node_exchange import SharedMemoryNodeExchange
from lightning_topt.communication.rank_watch import process_start
from tests.launch import run_ranks
from tests.shared_memory import shared_files


def survive(rank: int, store: str, polls: bool, publishes: bool, queue: SimpleQueue) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=3)
    node = SharedMemoryNodeExchange(dist.group.WORLD, timeout_seconds=60)
    node.gather_shards(torch.ones(300_000)).wait()
    if rank == 1:
        if publishes:
            node.reduce_scatter(torch.ones(300_000))
        os.kill(os.getpid(), signal.SIGKILL)
    if publishes:
        while node.page.get(1, 0) < 1 or process_start(node.page.ranks[1].process):
            time.sleep(1e-3)
    pending = node.reduce_scatter(torch.ones(300_000))
    while polls and not pending.is_completed():
        time.sleep(1e-3)
    try:
        pending.wait()
    except LocalPeerLost as lost:
        queue.put((lost.local_rank, str(lost)))


@pytest.mark.parametrize("publishes", [False, True])
@pytest.mark.parametrize("polls", [False, True])
def test_a_killed_rank_is_named_and_leaves_nothing(
    tmp_path: Path, polls: bool, publishes: bool
) -> None:
    """Whether it dies before the others can read what it sent, or before it sends."""
    before = shared_files()
    context = mp.get_context("fork")
    queue = context.SimpleQueue()
    arguments = (str(tmp_path / "store"), polls, publishes, queue)
    ranks = [
        context.Process(target=survive, args=(rank, *arguments), daemon=True) for rank in range(3)
    ]
    for process in ranks:
        process.start()
    messages = []
    for _ in range(2):
        # Rank 1 stays a zombie until the others have seen that it is dead.
        assert queue._reader.poll(60), "the others still wait"
        lost, message = queue.get()
        assert lost == 1
        messages.append(message)
    # The second may find that out itself, or hear it from the first.
    news = [
        message for message in messages if "local rank 1 was given up by local rank" not in message
    ]
    assert news and all(f"process {ranks[1].pid}) has ended" in message for message in news)
    for process in ranks:
        process.join()
    assert ranks[1].exitcode == -signal.SIGKILL
    assert shared_files() <= before


def late(rank: int) -> tuple[int, str]:
    node = SharedMemoryNodeExchange(dist.group.WORLD, timeout_seconds=2 if rank == 0 else 20)
    if rank == 2:
        dist.barrier()
    pending = node.reduce_scatter(torch.ones(10))
    with pytest.raises(LocalPeerLost) as caught:
        pending.wait()
    assert pending.is_completed()
    with pytest.raises(LocalPeerLost):
        node.reduce_scatter(torch.ones(10)).wait()
    if rank != 2:
        dist.barrier()
    return caught.value.local_rank, str(caught.value)


def test_a_rank_that_does_not_come_is_named_after_the_timeout() -> None:
    given_up = (2, "local rank 2 was given up by local rank 0")
    first = (2, "local rank 2 is alive but did not come within 2 s")
    assert run_ranks(late, 3) == [first, given_up, given_up]


def closed(rank: int) -> None:
    node = SharedMemoryNodeExchange(dist.group.WORLD, timeout_seconds=20)
    if rank == 0:
        node.close()
    else:
        with pytest.raises(LocalPeerLost, match=r"local rank 0 .* has left"):
            node.gather_shards(torch.ones(10)).wait()
    dist.barrier()


def test_a_rank_that_closed_is_not_waited_for() -> None:
    run_ranks(closed, 2)

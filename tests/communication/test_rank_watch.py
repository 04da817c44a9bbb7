"""The watch over the ranks: who is named when a collective call fails, and what is left behind."""

from __future__ import annotations

import multiprocessing as mp
import os
import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from lightning_topt.communication import rank_watch
from lightning_topt.communication.collectives import values_of_group
from lightning_topt.communication.rank_watch import (
    fate_of,
    is_of_collective,
    own_identity,
    time_limit,
    watch_ranks,
    within_limit,
)
from tests.launch import free_port

ERROR = RuntimeError("Connection closed by peer")
LIMIT = timedelta(seconds=60)


def on_tcp(
    function: Callable[..., str], world_size: int, *, reporters: list[int]
) -> dict[int, str]:
    """Run ``function(rank, pids)`` on ranks with rank 0's store; what the `reporters` return."""
    context = mp.get_context("fork")
    queue = context.SimpleQueue()
    port = free_port()
    ranks = [
        context.Process(target=_rank, args=(function, rank, world_size, port, queue))
        for rank in range(world_size)
    ]
    for process in ranks:
        process.start()
    try:
        found = {}
        for _ in reporters:
            assert queue._reader.poll(60), "a rank still waits"  # type: ignore[attr-defined]
            rank, text = queue.get()
            found[rank] = text
        assert sorted(found) == reporters
        return found
    finally:
        for process in ranks:
            process.kill()
            process.join()


def _rank(function: Any, rank: int, world_size: int, port: int, queue: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=world_size,
        timeout=LIMIT,
    )
    queue.put((rank, function(rank)))
    time.sleep(60)  # until the test has read everything


class Busy:
    def long_step(self) -> None:
        time.sleep(1.0)


def loses_rank_1(rank: int) -> str:
    rank_watch.POLL_SECONDS = 0.2
    watch = watch_ranks()
    assert watch is not None
    dist.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 2:
        Busy().long_step()
        return "lives"
    return str(watch.diagnose(ERROR))


def test_a_rank_in_a_long_step_is_not_taken_for_the_lost_one() -> None:
    message = on_tcp(loses_rank_1, 3, reporters=[0, 2])[0]
    assert message.startswith("rank 1 did not answer in a collective call (rank 1: process ")
    assert (
        "has ended" in message
        and "rank 2" not in message
        and message.endswith("Connection closed by peer")
    )


def loses_rank_1_and_the_store(rank: int) -> str:
    rank_watch.POLL_SECONDS = 0.2
    watch = watch_ranks()
    assert watch is not None
    identities = values_of_group(own_identity())
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if rank > 1:  # what it waits for fails because rank 0 has left
        while not fate_of(identities[0]):
            time.sleep(0.05)
    message = str(watch.diagnose(ERROR))
    if rank == 0:
        os._exit(1)
    return message


def test_rank_0_does_not_take_the_store_along_before_all_know_who_is_lost() -> None:
    for message in on_tcp(loses_rank_1_and_the_store, 4, reporters=[2, 3]).values():
        assert message.startswith("rank 1 did not answer in a collective call (rank 1: process ")


def alive_or_ended(rank: int) -> str:
    rank_watch.POLL_SECONDS = 0.2
    first, second = watch_ranks(), watch_ranks()
    assert first is not None and second is not None
    dist.barrier()
    if rank == 1:
        second.tell(ValueError("a user's mistake\nmore"))
        Busy().long_step()
        return ""
    return f"{first.diagnose(ERROR)}|{second.diagnose(ERROR)}"


def test_ranks_that_are_alive_or_ended_with_an_error_of_their_own() -> None:
    alive, ended = on_tcp(alive_or_ended, 2, reporters=[0, 1])[0].split("|")
    assert "all ranks are alive" in alive
    assert ended.startswith(
        "rank 1 ended with ValueError: a user's mistake; seen by rank 0: Connection"
    )


def loses_the_host(rank: int) -> str:
    rank_watch.STORE_SECONDS = rank_watch.GRACE_SECONDS = 0.5
    watch = watch_ranks()
    assert watch is not None
    identities = values_of_group(own_identity())
    if rank == 0:
        os.kill(os.getpid(), signal.SIGSTOP)
    while not fate_of(identities[0]):
        time.sleep(0.01)
    message = str(watch.diagnose(ERROR))
    watch.stop()
    return message


def test_a_stopped_host_of_the_store_is_named_and_keeps_nobody_waiting() -> None:
    message = on_tcp(loses_the_host, 2, reporters=[1])[1]
    assert message.startswith("rank 0 did not answer: the job's store, which it hosts, is gone")


def left_behind(rank: int) -> str:
    def counted() -> tuple[list[str], int, int]:
        keys, files = _get_default_store().num_keys(), len(os.listdir("/proc/self/fd"))
        return sorted(thread.name for thread in threading.enumerate()), keys, files

    def what_is_there() -> tuple[list[str], int, int]:
        dist.barrier()
        found = counted()
        dist.barrier()
        return found

    before = what_is_there()
    watch = watch_ranks()
    assert watch is not None
    while counted()[1] < before[1] + 2:  # which process each rank is
        time.sleep(0.01)
    during = what_is_there()
    watch.stop()
    del watch
    dist.barrier()
    deadline = time.monotonic() + 20
    while (after := counted()) != before and time.monotonic() < deadline:
        # the other rank's thread, and on a busy machine this one's, ends a little later
        time.sleep(0.01)
    return f"{during != before} {after == before or (before, during, after)}"


def test_nothing_is_left_behind() -> None:
    assert on_tcp(left_behind, 2, reporters=[0, 1]) == {0: "True True", 1: "True True"}


def outlives_the_host(rank: int) -> str:
    """Rank 1 has not stopped its watch when rank 0, which hosts the store, is done."""
    dist.barrier()
    before = _get_default_store().num_keys()
    dist.barrier()
    watch = watch_ranks()
    assert watch is not None
    while _get_default_store().num_keys() < before + 2:  # which process each rank is
        time.sleep(0.01)
    dist.barrier()
    if rank == 0:
        watch.stop()
        return ""
    watch._thread.join(10)
    return "asks" if watch._thread.is_alive() else "ended"


def test_a_watch_asks_no_store_whose_host_is_done() -> None:
    assert on_tcp(outlives_the_host, 2, reporters=[0, 1])[1] == "ended"


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (
            RuntimeError("[/gloo/transport/tcp/pair.cc:537] Read error: Connection reset by peer"),
            True,
        ),
        (dist.DistStoreError("wait timeout after 2000ms"), True),
        (dist.DistBackendError("NCCL communicator was aborted on rank 0"), True),
        (dist.DistBackendError("NCCL error: Cuda failure 2 'out of memory'"), False),
        (RuntimeError("DataLoader timed out after 5 seconds"), False),
        (ConnectionResetError("Connection reset by peer"), False),
    ],
)
def test_errors_of_collective_calls_are_known(error: BaseException, expected: bool) -> None:
    assert is_of_collective(error) is expected


def test_alone_there_is_nothing_to_watch() -> None:
    assert watch_ranks() is None and time_limit() is None and within_limit(7.0) == 7.0


def test_fates() -> None:
    own = own_identity()
    assert fate_of(own) == ""
    boot, space, process, _ = own.split()
    # its number is another's now
    assert fate_of(f"{boot} {space} {process} 1") == f"process {process} has ended"
    assert (
        fate_of(f"other {space} {process} 1")
        == fate_of(f"{boot} other {process} 1")
        == fate_of("")
        == ""
    )

"""Overlap, stragglers, the choice of dense, counted bytes, debugging, bad input, dead peers."""

from __future__ import annotations

import multiprocessing as mp
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from lightning_topt.communication import BF16, BoundedLoss, GradientMethod, TopK, hook, rank_watch
from lightning_topt.communication.hook import CompressedExchange
from lightning_topt.communication.rank_watch import PeerLostError
from lightning_topt.communication.topology import Topology
from lightning_topt.communication.wire import SparseMessage
from tests.communication.exchange_ranks import FakeStreams, batch, loss_of, train, wrap
from tests.launch import _rank, load_kernels, run_on_pool

SHAPES = [(2, 1), (2, 2)]


def overlapped(rank: int) -> bool:
    """The backward of the first layer waits until the exchange of the first bucket is over."""
    ddp, exchange = wrap(TopK(density=0.05))
    list(train(ddp, rank=rank, steps=range(2)))
    seen = []

    def wait(gradient: Tensor) -> None:
        current = exchange.current
        assert current is not None and not current.ended
        deadline = time.monotonic() + 30
        while not current.futures[0].done() and time.monotonic() < deadline:
            time.sleep(0.001)
        seen.append(current.futures[0].done())

    x, y = batch(rank, 2)
    ddp.module[0].register_forward_hook(lambda module, args, out: out.register_hook(wait) and None)
    nn.functional.mse_loss(ddp(x), y).backward()
    exchange.close()
    return seen == [True]


def test_exchange_during_backward():
    assert run_on_pool(overlapped, 2) == [True, True]


def delayed(rank: int, shape: tuple[int, int], seconds: float) -> list[Tensor]:
    """Rank 1 is late with every gradient of the middle layer."""
    ddp, exchange = wrap(TopK(density=0.05), topology=Topology(*shape, rank))
    if rank == 1:
        ddp.module[3].register_full_backward_hook(lambda *args: time.sleep(seconds))
    list(train(ddp, rank=rank, steps=range(4)))
    exchange.close()
    return [p.detach() for p in ddp.parameters()]


@pytest.mark.parametrize("shape", SHAPES)
def test_straggler_changes_nothing(shape):
    punctual, late = (
        run_on_pool(delayed, shape[0] * shape[1], shape, seconds) for seconds in (0.0, 0.05)
    )
    for rank in range(1, len(late)):
        assert all(torch.equal(a, b) for a, b in zip(late[0], late[rank], strict=True))
    assert all(torch.equal(a, b) for a, b in zip(punctual[0], late[0], strict=True))


def first_buckets_that_stay(rank: int, method: GradientMethod) -> int:
    """DDP makes other buckets before the second forward pass."""
    ddp, exchange = wrap(method, gradient_as_bucket_view=True)
    loss_of(ddp, rank, 0).backward()
    first = [StorageWeakRef(p.grad.untyped_storage()) for p in ddp.parameters()]
    loss_of(ddp, rank, 1)
    exchange.close()
    return sum(not each.expired() for each in first)


@pytest.mark.parametrize("method", [BF16(), TopK(density=0.05)], ids=lambda method: method.name)
def test_no_bucket_outlives_its_step(method):
    assert run_on_pool(first_buckets_that_stay, 2, method) == [0, 0]


def bytes_of_a_step(rank: int, shape: tuple[int, int]) -> tuple[int, list[Any]]:
    ddp, exchange = wrap(TopK(density=0.05, exempt=()), topology=Topology(*shape, rank))
    list(train(ddp, rank=rank, steps=range(2)))
    exchange.statistics()
    list(train(ddp, rank=rank, steps=range(2, 3)))
    layouts = exchange.layouts
    exchange.close()
    return exchange.statistics().bytes_sent, [
        sum(layouts[index][1].numels) for index in sorted(layouts)
    ]


@pytest.mark.parametrize("shape", SHAPES)
def test_bytes_of_a_step(shape):
    """Each rank's message to each other node (flat: around the ring)."""
    for sent, numels in run_on_pool(bytes_of_a_step, shape[0] * shape[1], shape):
        shards = [
            n
            for numel in numels
            for n in ([numel] if shape[1] == 1 else [numel // 2, numel - numel // 2])
        ]
        expected = sum(SparseMessage(n, round(0.05 * n)).nbytes for n in shards)
        # equal sizes for shards that differ by an element
        assert abs(sent - expected) <= 8 * len(numels)


def refuses_synced_norms(rank: int) -> None:
    module = nn.Sequential(nn.Linear(3, 3), nn.SyncBatchNorm(3))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hook, "Streams", FakeStreams)
        with pytest.raises(ValueError, match="another order than those of SyncBatchNorm"):
            CompressedExchange(module, BoundedLoss())
        CompressedExchange(module, BF16()).close()


def test_a_thread_beside_synced_norms_is_refused_on_a_gpu():
    run_on_pool(refuses_synced_norms, 2)


def dies(rank: int, method: GradientMethod, shape: tuple[int, int], dead: int, folder: str) -> None:
    rank_watch.GRACE_SECONDS, rank_watch.POLL_SECONDS = 2.0, 0.1
    ddp, exchange = wrap(method, topology=Topology(*shape, rank), settings={"timeout_seconds": 20})
    for step, _ in enumerate(train(ddp, rank=rank, steps=range(3))):
        if step == 1 and rank == dead:
            os._exit(1)
        if step == 1:
            break
    started = time.monotonic()
    with pytest.raises(PeerLostError) as caught:
        loss_of(ddp, rank, 2).backward()
    assert isinstance(exchange.error, PeerLostError) and time.monotonic() - started < 20
    Path(folder, str(rank)).write_text(str(caught.value))
    alive = set(range(shape[0] * shape[1])) - {dead}
    while not all(Path(folder, str(other)).exists() for other in alive):
        assert time.monotonic() - started < 40
        time.sleep(0.05)  # a rank that has ended here would be named as lost by the others
    os._exit(0)


@pytest.mark.parametrize(
    ("method", "shape", "dead"),
    [(TopK(density=0.05), (2, 2), 3), (BoundedLoss(), (3, 1), 1)],
    ids=["top-k by nodes", "datagrams"],
)
def test_dead_peer_is_named(method, shape, dead, tmp_path):
    load_kernels()
    context = mp.get_context("fork")
    world_size = shape[0] * shape[1]
    queue = context.SimpleQueue()
    shared = (str(tmp_path / "store"), queue, context.Barrier(world_size))
    args = (world_size, *shared, 60, (method, shape, dead, str(tmp_path)))
    ranks = [
        context.Process(target=_rank, args=(dies, rank, *args), daemon=True)
        for rank in range(world_size)
    ]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(timeout=120)
        process.kill()
    problems = []  # of ranks that ended otherwise
    while not queue.empty():
        problems.append(queue.get())
    for rank in set(range(world_size)) - {dead}:
        assert (tmp_path / str(rank)).exists(), (rank, problems)
        message = (tmp_path / str(rank)).read_text()
        assert message.startswith(f"rank {dead} did not answer"), message

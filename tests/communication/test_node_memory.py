"""The exchange through memory against sums and copies by torch, and in places that forbid it."""

from __future__ import annotations

import errno
import gc
import os
import re
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_topt.communication.node import node_channel
from lightning_topt.communication.node.node_channel import NodeMemoryUnavailable
from lightning_topt.communication.node.node_exchange import SharedMemoryNodeExchange, shard_bounds
from tests.launch import run_on_pool, run_ranks


def exchange() -> SharedMemoryNodeExchange:
    return SharedMemoryNodeExchange(dist.group.WORLD, timeout_seconds=20)


def bucket_of(rank: int, n: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(100 * n + rank)).to(dtype)


def sum_in_rank_order(n: int, dtype: torch.dtype) -> Tensor:
    total = bucket_of(0, n, dtype).float()
    for rank in range(1, dist.get_world_size()):
        total += bucket_of(rank, n, dtype).float()
    return total


def all_methods(rank: int, sizes: list[int]) -> None:
    node = exchange()
    all_methods_of(node, rank, sizes)
    node.close()
    node.close()


def all_methods_of(node: SharedMemoryNodeExchange, rank: int, sizes: list[int]) -> None:
    ranks = dist.get_world_size()
    for n in sizes:
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            flat = bucket_of(rank, n, dtype)
            before = flat.clone()
            pending = node.reduce_scatter(flat)
            pending.wait()
            start, stop = shard_bounds(n, local_size=ranks)[rank]
            assert torch.equal(pending.result(), sum_in_rank_order(n, dtype)[start:stop])
            assert torch.equal(flat, before)

            shards = torch.zeros(n, dtype=dtype)
            shards[start:stop] = bucket_of(7, n, dtype)[start:stop]
            node.gather_shards(shards).wait()
            assert torch.equal(shards, bucket_of(7, n, dtype))
        gathering = node.all_gather(torch.full((n,), rank + 1, dtype=torch.uint8))
        gathering.wait()
        assert torch.equal(
            gathering.result(),
            torch.arange(1, ranks + 1, dtype=torch.uint8)[:, None].expand(ranks, n),
        )


@pytest.mark.parametrize("ranks", [2, 3])
def test_equal_to_torch(ranks: int) -> None:
    block = node_channel.BLOCK_BYTES // 4 * ranks
    run_on_pool(
        all_methods, ranks, [1, 0, 2, 5, 1001, 2 * block, block - 1, 3, 2 * block + 7, 400_000]
    )


def special_values(rank: int) -> None:
    node = exchange()
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    for dtype in (torch.bfloat16, torch.float16):
        flat = torch.cat([bits, bits]).view(dtype)
        flat = flat if rank == 0 else torch.full_like(flat, -0.0)
        pending = node.reduce_scatter(flat)
        pending.wait()
        torch.testing.assert_close(
            pending.result(), bits.view(dtype).float() + -0.0, rtol=0, atol=0, equal_nan=True
        )
    flat = torch.tensor([float("inf"), float("nan"), -0.0, 1e-45] * 2)
    pending = node.reduce_scatter(flat)
    pending.wait()
    torch.testing.assert_close(pending.result(), 2 * flat[:4], rtol=0, atol=0, equal_nan=True)


def test_every_sixteen_bit_value_infinities_and_nan() -> None:
    run_on_pool(special_values, 2)


def many_in_flight(rank: int) -> None:
    """More buckets than fit, methods interleaved differently per rank, results asked for late."""
    node, ranks = exchange(), dist.get_world_size()
    sizes = [3000 + 997 * (i % 5) for i in range(2 * node_channel.MOST_IN_FLIGHT)]
    flats = [bucket_of(rank, n, torch.float32) for n in sizes]
    messages = [torch.full((i,), 10 * i + rank, dtype=torch.uint8) for i in range(8)]
    if rank == 0:
        sums = [node.reduce_scatter(flat) for flat in flats]
        gathers = [node.all_gather(message) for message in messages]
        for pending in [*gathers, *sums]:
            pending.wait()
    else:
        gathers = [node.all_gather(message) for message in messages]
        sums = [node.reduce_scatter(flat) for flat in flats]
        while not all([pending.is_completed() for pending in [*sums, *gathers]]):
            time.sleep(1e-3)
    for n, pending in zip(sizes, sums, strict=True):
        start, stop = shard_bounds(n, local_size=ranks)[rank]
        assert torch.equal(pending.result(), sum_in_rank_order(n, torch.float32)[start:stop])
    for i, pending in enumerate(gathers):
        assert pending.result().tolist() == [[10 * i + other] * i for other in range(ranks)]


def test_many_operations_in_flight() -> None:
    run_on_pool(many_in_flight, 3)


def not_completed_before_all_have_read(rank: int) -> None:
    node = exchange()
    flat = torch.ones(64)
    if rank == 0:
        pending = node.reduce_scatter(flat)
        for _ in range(3):
            assert not pending.is_completed()
            time.sleep(5e-3)
        dist.barrier()
        deadline = time.monotonic() + 10
        while not pending.has_read and time.monotonic() < deadline:
            assert not pending.is_completed()
        dist.barrier()
        pending.wait()
        flat.fill_(9)
        assert pending.result().tolist() == [2] * 32
    else:
        dist.barrier()
        pending = node.reduce_scatter(flat)
        dist.barrier()  # rank 0 has read, this rank has not
        pending.wait()
        assert pending.result().tolist() == [2] * 32


def test_a_bucket_is_released_only_when_all_have_read_it() -> None:
    run_on_pool(not_completed_before_all_have_read, 2)


def other_sizes(rank: int) -> None:
    node = exchange()
    with pytest.raises(RuntimeError, match=r"same buckets in the same order|has left"):
        node.reduce_scatter(torch.ones(10 + rank)).wait()


def test_differing_sizes_are_an_error() -> None:
    run_on_pool(other_sizes, 2)


def memory_held() -> list[str]:
    """Descriptors and mappings of shared memory that this process has."""
    links = [
        os.readlink(entry.path)
        for entry in os.scandir("/proc/self/fd")
        if os.path.islink(entry.path)
    ]
    return [
        line
        for line in links + Path("/proc/self/maps").read_text().splitlines()
        if "memfd:lightning_topt" in line
    ]


def held_after_close(rank: int) -> tuple[int, list[str]]:
    node = exchange()
    all_methods_of(node, rank, [100_000])
    held = len(memory_held())
    node.close()
    del node
    gc.collect()
    return held, memory_held()


def test_close_releases_all_memory() -> None:
    for held, afterwards in run_ranks(held_after_close, 2):
        assert held > 0 and not afterwards


def unavailable(rank: int, case: str) -> str:
    if case == "full" and rank == 0:

        def full(descriptor: int, start: int, size: int) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        os.posix_fallocate = full
    elif case == "machines":
        node_channel.BOOT = Path(__file__).parent / (
            "test_collectives.py" if rank else "__init__.py"
        )
    elif case == "forbidden" and rank == 1:
        node_channel.fetch = lambda process, *arguments: errno.EPERM
    elif case == "namespaces" and rank == 1:
        node_channel.map_of = lambda process, descriptor, size: node_channel.map_shared(
            node_channel.reserve(size), size=size
        )
    with pytest.raises(NodeMemoryUnavailable) as caught:
        SharedMemoryNodeExchange(dist.group.WORLD, timeout_seconds=5)
    message = str(caught.value)
    del caught
    gc.collect()
    assert case == "namespaces" or not memory_held()
    return message


@pytest.mark.parametrize(
    ("case", "message"),
    [
        (
            "full",
            r"local rank 0 .*cannot reserve \d+ bytes of shared memory: No space left on device",
        ),
        ("machines", "local rank 1 .*not on the machine of local rank 0"),
        ("namespaces", "local rank 1 .*another process namespace"),
        ("forbidden", "local rank 1 .*reading the memory of local rank 0"),
    ],
)
def test_all_ranks_learn_why_memory_cannot_be_shared(case: str, message: str) -> None:
    messages = run_ranks(unavailable, 2, case)
    assert messages[0] == messages[1]
    assert re.search(message, messages[0])

"""Our collectives against torch's own, on every rank, for sizes around the chunk size."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from lightning_topt.communication import collectives
from lightning_topt.communication.collectives import (
    AllGather,
    ReduceScatter,
    all_gather_into,
    backend_of,
    reduce_scatter_into,
    travel_device,
)
from tests.launch import run_on_pool, run_ranks


def compare(rank: int, n: int, dtype: torch.dtype, in_place: bool) -> None:
    world_size = dist.get_world_size()
    collectives.CHUNK_ELEMENTS = 8
    data = torch.randn(n, generator=torch.Generator().manual_seed(rank)).to(dtype)
    ours, theirs = (
        torch.zeros(world_size * n, dtype=dtype),
        torch.zeros(world_size * n, dtype=dtype),
    )
    if in_place:
        ours.view(world_size, n)[rank].copy_(data)
        all_gather_into(ours, ours.view(world_size, n)[rank])
    else:
        all_gather_into(ours, data, async_op=True).wait()
    dist.all_gather_into_tensor(theirs, data)
    assert torch.equal(ours, theirs)
    whole = torch.randn(world_size * n, generator=torch.Generator().manual_seed(rank)).to(dtype)
    for op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
        shard, expected = torch.zeros(n, dtype=dtype), torch.zeros(n, dtype=dtype)
        reduce_scatter_into(shard, whole.clone(), op=op)
        dist.reduce_scatter_tensor(expected, whole.clone(), op=op)
        # The order of additions may differ with more than two ranks.
        tolerance = 1e-6 if dtype == torch.float32 else 2e-2
        torch.testing.assert_close(shard, expected, rtol=tolerance, atol=tolerance)
    with pytest.raises(ValueError, match="sums or averages"):
        reduce_scatter_into(shard, whole, op=dist.ReduceOp.MAX)


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("n", [1, 8, 21])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equal_to_torch(world_size: int, n: int, dtype: torch.dtype) -> None:
    run_on_pool(compare, world_size, n, dtype, n == 8)


def compare_in_groups(rank: int) -> None:
    """Neighbours, and ranks a stride apart: FSDP2's groups on a mesh of 2 x 2, at once."""
    collectives.CHUNK_ELEMENTS = 8
    groups = [
        [dist.new_group(part) for part in parts] for parts in ([[0, 1], [2, 3]], [[0, 2], [1, 3]])
    ]
    inner, across = groups[0][rank // 2], groups[1][rank % 2]
    data = torch.randn(21, generator=torch.Generator().manual_seed(rank))
    whole = torch.randn(42, generator=torch.Generator().manual_seed(rank))
    for group in (inner, across):
        ours, theirs = torch.zeros(42), torch.zeros(42)
        pending = AllGather()(ours, data, group, async_op=True)
        shard, expected = torch.zeros(21), torch.zeros(21)
        ReduceScatter()(shard, whole.clone(), group, op=dist.ReduceOp.AVG)
        pending.wait()
        dist.all_gather_into_tensor(theirs, data, group=group)
        dist.reduce_scatter_tensor(expected, whole.clone(), op=dist.ReduceOp.AVG, group=group)
        assert torch.equal(ours, theirs)
        torch.testing.assert_close(shard, expected)
    # Scattered inside, summed across: every rank has its slice of the mean over all of them.
    shard = torch.zeros(21)
    ReduceScatter()(shard, whole.clone(), inner, op=dist.ReduceOp.SUM)
    dist.all_reduce(shard, group=across)
    dist.all_reduce(whole)
    torch.testing.assert_close(shard, whole.chunk(2)[rank % 2], rtol=1e-5, atol=1e-6)


def test_equal_to_torch_in_the_groups_of_a_mesh() -> None:
    run_ranks(compare_in_groups, 4)


@pytest.mark.parametrize(
    ("config", "host", "device", "travels"),
    [
        ("cpu:gloo,cuda:gloo", "gloo", "gloo", "cpu"),
        ("cuda:nccl", "", "nccl", "cuda"),
        ("cpu:gloo,cuda:nccl", "gloo", "nccl", "cpu"),
    ],
)
def test_a_group_has_a_backend_for_each_device(
    config: str, host: str, device: str, travels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dist, "get_backend_config", lambda group: config)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert backend_of(torch.device("cpu")) == host
    assert backend_of(torch.device("cuda", 1)) == device
    assert travel_device() == torch.device(travels, *([1] if travels == "cuda" else []))

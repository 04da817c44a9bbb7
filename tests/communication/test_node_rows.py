"""Slices averaged and rows gathered through memory, against means and copies by torch; ranks that
die or disagree.
"""

from __future__ import annotations

import os
import re
import signal

import pytest
import torch
import torch.distributed as dist

from lightning_topt.communication.node.node_channel import BLOCK_BYTES, LocalPeerLost
from lightning_topt.communication.node.rows import NodeRows, node_rows
from tests.launch import run_ranks


def values(rank: int, n: int) -> torch.Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(31 * n + rank))


def filled(rank: int, shape: tuple[int, ...]) -> torch.Tensor:
    numel = torch.Size(shape).numel()
    return values(rank, max(1, numel))[:numel].view(shape)


def average(rank: int, sizes: list[int]) -> None:
    ranks = dist.get_world_size()
    node = NodeRows(dist.group.WORLD, timeout_seconds=20)
    pending = []
    for n in sizes:  # several under way at once, with an empty slice and unequal ones
        bounds = [0, *sorted((n * 7 * r // (9 * ranks)) for r in range(1, ranks)), n]
        flat = values(rank, n)
        pending.append((n, bounds, flat, node.average_slices(flat, bounds)))
    for n, bounds, flat, work in pending:
        work.wait()
        begin, end = bounds[rank], bounds[rank + 1]
        expected = sum(values(r, n).double() for r in range(ranks))[begin:end] / ranks
        torch.testing.assert_close(flat[begin:end].double(), expected, rtol=1e-6, atol=1e-6)
        if ranks == 2:  # halves are exact and two terms have one order
            assert torch.equal(
                flat[begin:end], (sum(values(r, n) for r in range(2)) / 2)[begin:end]
            )
        mine = values(rank, n)
        assert torch.equal(flat[:begin], mine[:begin]) and torch.equal(flat[end:], mine[end:])
        assert torch.equal(work.result(), flat[begin:end])
    node.close()
    node.close()


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_every_rank_gets_the_mean_of_its_slice(ranks: int) -> None:
    run_ranks(average, ranks, [1, 2, 5, 1000, BLOCK_BYTES // 4 * 3 + 17])


def gather(rank: int) -> None:
    ranks = dist.get_world_size()
    node = NodeRows(dist.group.WORLD, timeout_seconds=20)
    # Rank 1 owns nothing; others own tensors of different types and sizes, one of them empty.
    shapes = {r: [(3, 4), (0,), (100_000,), ()] for r in range(ranks) if r != 1}
    for step in range(3):
        for dtype in (torch.float32, torch.bfloat16, torch.int64):
            true = {r: [filled(r + step, s).mul(9).to(dtype) for s in shapes[r]] for r in shapes}
            parts = {
                r: [t.clone() if r == rank else torch.zeros_like(t) for t in true[r]] for r in true
            }
            node.gather_rows(parts).wait()
            assert all(
                torch.equal(a, b) for r in true for a, b in zip(parts[r], true[r], strict=True)
            )
            for part in parts.get(rank, ()):
                part.fill_(0)  # the others have read it by now
    node.close()


@pytest.mark.parametrize("ranks", [2, 3])
def test_every_rank_gets_the_rows_of_the_others(ranks: int) -> None:
    run_ranks(gather, ranks)


def lost(rank: int) -> str:
    node = NodeRows(dist.group.WORLD, timeout_seconds=20)
    flat = values(rank, 1000)
    node.average_slices(flat, [0, 300, 600, 1000]).wait()
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(LocalPeerLost, match="local rank 2") as info:
        node.gather_rows({2: [flat]}).wait()
    return str(info.value)


def test_a_rank_that_died_is_named() -> None:
    with pytest.raises(RuntimeError, match=re.escape("ranks [2] gave no result")):
        run_ranks(lost, 3, timeout_seconds=5)


def disagree(rank: int) -> str:
    node = NodeRows(dist.group.WORLD, timeout_seconds=2)
    flat = values(rank, 1000 + rank)
    with pytest.raises(RuntimeError) as info:
        node.average_slices(flat, [0, 500, len(flat)]).wait()
    return str(info.value)


def test_buckets_of_different_sizes_are_refused() -> None:
    assert any("exchange the same buckets" in said for said in run_ranks(disagree, 2))


def where(rank: int) -> list[bool]:
    group, cpu = dist.group.WORLD, torch.device("cpu")
    made = [
        node_rows(group, device=cpu, num_nodes=1, timeout_seconds=9),
        # the link between nodes is not to be bypassed
        node_rows(group, device=cpu, num_nodes=2, timeout_seconds=9),
        node_rows(group, device=torch.device("cuda", 0), num_nodes=1, timeout_seconds=9),
    ]
    return [node is not None for node in made]


def test_memory_is_used_inside_a_node_only() -> None:
    assert run_ranks(where, 2) == [[True, False, False]] * 2

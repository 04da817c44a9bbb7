"""Rows gathered through memory, against copies by torch; ranks that die."""

from __future__ import annotations

import os
import re
import signal

import pytest
import torch
import torch.distributed as dist

from lightning_topt.communication.node.node_channel import LocalPeerLost
from lightning_topt.communication.node.rows import NodeRows, node_rows
from tests.launch import run_ranks


def values(rank: int, n: int) -> torch.Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(31 * n + rank))


def filled(rank: int, shape: tuple[int, ...]) -> torch.Tensor:
    numel = torch.Size(shape).numel()
    return values(rank, max(1, numel))[:numel].view(shape)


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
    node.gather_rows({2: [flat]}).wait()
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(LocalPeerLost, match="local rank 2") as info:
        node.gather_rows({2: [flat]}).wait()
    return str(info.value)


def test_a_rank_that_died_is_named() -> None:
    with pytest.raises(RuntimeError, match=re.escape("ranks [2] gave no result")):
        run_ranks(lost, 3, timeout_seconds=5)


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

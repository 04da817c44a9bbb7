"""How tests start ranks: those that stay for the next call begin it as new ones do."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.launch import run_on_pool


def drawn(rank: int, failing: int) -> tuple[int, int, float, float]:
    dist.all_reduce(counted := torch.ones(1))
    assert rank != failing, "as asked"
    return os.getpid(), int(counted), random.random(), torch.rand(1).item()


def test_calls_share_ranks_until_one_fails() -> None:
    first, again = run_on_pool(drawn, 2, 5), run_on_pool(drawn, 2, 5)
    assert first == again and len({process for process, *_ in first}) == 2
    assert first[0][1:] == first[1][1:] and first[0][1] == 2
    with pytest.raises(RuntimeError, match="rank 1 failed"):
        run_on_pool(drawn, 2, 1)
    assert not {process for process, *_ in first} & {p for p, *_ in run_on_pool(drawn, 2, 5)}
    assert run_on_pool(drawn, 3, 5)[2][1] == 3


def sharded(rank: int) -> int:
    """Threads of gloo, after a step of a module in shards on a mesh with groups of its own."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("outer", "inner"))
    model = fully_shard(nn.Linear(4, 4), mesh=mesh)
    model(torch.ones(1, 4)).sum().backward()
    names = [path.read_text() for path in Path("/proc/self/task").glob("*/comm")]
    return sum(name.startswith("gloo") for name in names)


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="threads are listed on Linux")
def test_groups_of_earlier_calls_have_ended() -> None:
    counts = [run_on_pool(sharded, 2) for _ in range(4)]
    assert counts[0][0] > 1
    assert counts[3] == counts[1], counts

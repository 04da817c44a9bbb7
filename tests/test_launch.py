"""How tests start ranks: those that stay for the next call begin it as new ones do."""

from __future__ import annotations

import os
import random

import pytest
import torch
import torch.distributed as dist

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

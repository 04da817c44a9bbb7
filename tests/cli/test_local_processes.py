"""Ranks without a Trainer."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from lightning_topt.cli.local_processes import run_on_ranks


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

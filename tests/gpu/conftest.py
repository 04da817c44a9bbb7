"""A process group of one rank, and the device of these tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


@pytest.fixture
def device() -> torch.device:
    return DEVICE


@pytest.fixture(autouse=True)
def no_group_is_left() -> Iterator[None]:
    """A fit may leave its process group, in which the next test would start."""
    if dist.is_initialized():
        dist.destroy_process_group()
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    """This process is the only rank, of NCCL on CUDA."""
    on_cuda = DEVICE.type == "cuda"
    dist.init_process_group(
        "nccl" if on_cuda else "gloo",
        store=dist.FileStore(str(tmp_path / "store"), 1),
        rank=0,
        world_size=1,
        device_id=DEVICE if on_cuda else None,
    )
    yield
    dist.destroy_process_group()

"""DDP's buckets are those that the plan counts, and a user's own where there are any."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from lightning_topt.communication.topology import Topology
from lightning_topt.techniques.ddp_wrapper import wrap_in_ddp
from lightning_topt.techniques.technique import RunOptions

MIB = 1 << 20
TWO_NODES = Topology(2, 1, 0)


@pytest.fixture
def group() -> Iterator[None]:
    """Two ranks."""
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield
    dist.destroy_process_group()


def layers(count: int, width: int = 512) -> nn.Sequential:
    """So many layers of 1 MiB each."""
    return nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(count)))


def sent(
    module: nn.Module, *, topology: Topology | None = TWO_NODES, **arguments: Any
) -> list[int]:
    """The bytes of the buckets of a step that is not the first."""
    given = {"gradient_as_bucket_view": True, **arguments}
    options = RunOptions(ddp=given, topology=topology)
    ddp = wrap_in_ddp(module, options, device=torch.device("cpu"))
    sizes: list[int] = []

    def note(state: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        sizes.append(bucket.buffer().nbytes)
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    note.__annotations__.update(
        bucket=dist.GradBucket, **{"return": torch.futures.Future[torch.Tensor]}
    )
    ddp.register_comm_hook(None, note)
    for _ in range(2):
        sizes.clear()
        ddp(torch.ones(1, 512)).sum().backward()
    return sizes


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize(
    ("count", "expected"), [(3, [MIB] * 3), (16, [MIB] * 16), (40, [3 * MIB] * 13 + [MIB])]
)
def test_a_sixteenth_and_one_mebibyte_at_least(count: int, expected: list[int]) -> None:
    assert sent(layers(count)) == expected


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("topology", [Topology(1, 2, 0), None])
def test_one_node_has_those_of_torch(topology: Topology | None) -> None:
    assert sent(layers(40), topology=topology) == [MIB, 25 * MIB, 14 * MIB]


@pytest.mark.usefixtures("group")
def test_own_bucket_sizes_stay() -> None:
    assert sent(layers(20), bucket_cap_mb=5) == [5 * MIB] * 4

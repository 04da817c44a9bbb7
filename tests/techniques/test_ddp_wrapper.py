"""DDP's buckets are those that the plan counts, and a user's own where there are any."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import distributed
from torch.testing._internal.distributed.fake_pg import FakeStore

from lightning_topt.communication.topology import Topology
from lightning_topt.techniques.ddp_wrapper import bucket_limits, wrap_in_ddp
from tests.launch import run_ranks

MIB = 1 << 20


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Two ranks on a node each."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield
    dist.destroy_process_group()


def layers(count: int, width: int = 512) -> nn.Sequential:
    """So many layers of 1 MiB each."""
    return nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(count)))


def sent(
    module: nn.Module,
    *,
    ignored: tuple[str, ...] = (),
    topology: Topology | None = None,
    **arguments: Any,
) -> list[int]:
    """The bytes of the buckets of a step that is not the first."""
    given = {"gradient_as_bucket_view": True, **arguments}
    cpu = torch.device("cpu")
    ddp = wrap_in_ddp(module, device=cpu, arguments=given, ignored=ignored, topology=topology)
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
def test_one_node_has_those_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert sent(layers(40)) == [MIB, 25 * MIB, 14 * MIB]
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")  # does not divide the ranks: nodes differ
    assert sent(layers(40))[0] == 3 * MIB


@pytest.mark.usefixtures("group")
def test_own_bucket_sizes_stay() -> None:
    assert sent(layers(20), bucket_cap_mb=5) == [5 * MIB] * 4


@pytest.mark.usefixtures("group")
def test_nodes_that_the_environment_does_not_name_are_given(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Lightning's own launch says WORLD_SIZE and LOCAL_RANK only."""
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    assert bucket_limits(16 * MIB) == [MIB, 25 * MIB]
    assert bucket_limits(16 * MIB, Topology(2, 1, 0)) == [MIB]
    assert sent(layers(3)) == [MIB, 2 * MIB]
    assert sent(layers(3), topology=Topology(2, 1, 0)) == [MIB] * 3


def _start(rank: int, differs: str) -> tuple[bool, list[float]]:
    """Whether rank 0's were sent, and what a rank has then."""
    module = nn.BatchNorm1d(2)
    if rank == 1 and differs == "weight":
        module.weight.data[1] += 1e-7
    if rank == 1 and differs == "buffer":
        assert module.num_batches_tracked is not None
        module.num_batches_tracked += 1
    if rank == 1 and differs == "ignored":
        module.bias.data += 1
    sent: list[object] = []
    synchronize = distributed._sync_module_states

    def note(*args: Any, **kwargs: Any) -> None:
        sent.append(args)
        synchronize(*args, **kwargs)

    distributed._sync_module_states = note  # type: ignore[assignment]
    wrap_in_ddp(module, device=torch.device("cpu"), arguments={}, ignored=("bias",))
    values = torch.cat([each.flatten().double() for each in module.state_dict().values()])
    return bool(sent), values.tolist()


@pytest.mark.parametrize("differs", ["", "weight", "buffer", "ignored"])
def test_equal_parameters_are_not_sent(differs: str) -> None:
    (first_sent, first), (second_sent, second) = run_ranks(_start, 2, differs)
    assert first_sent == second_sent == (differs in ("weight", "buffer"))
    if differs == "ignored":
        assert second == [*first[:2], *(each + 1 for each in first[2:4]), *first[4:]]
    else:
        assert first == second

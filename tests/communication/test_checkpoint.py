"""The state of all ranks on its way to rank 0."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from lightning_topt.communication import checkpoint
from lightning_topt.communication.checkpoint import gather_state
from tests.launch import run_ranks


def sent_from(rank: int) -> list[str]:
    """Return the devices of what is sent where a group takes memory of the device alone."""
    devices: list[str] = []

    def note(tensor: torch.Tensor, **_: Any) -> None:
        devices.append(tensor.device.type)

    # There is no such device here: "meta" stands for it.
    checkpoint.travel_device = lambda group: torch.device("meta")
    dist.send = note
    if rank == 0:
        return devices  # which gathers nothing: "meta" has no values
    everyone = dist.group.WORLD
    assert everyone is not None
    original = dist.all_gather_object
    dist.all_gather_object = lambda everyone, own, **_: everyone.__setitem__(1, own)
    state = {"residual": {"a": torch.ones(3)}, "velocity": {"a": torch.ones(3)}}
    gather_state(state, senders=[1], group=everyone)
    dist.all_gather_object = original
    return devices


def test_what_an_exchange_keeps_in_host_memory_travels_on_the_device() -> None:
    assert run_ranks(sent_from, 2) == [[], ["meta", "meta"]]


def gathered(rank: int) -> list[Any]:
    everyone = dist.group.WORLD
    assert everyone is not None
    own = {"residual": {"a": torch.full((3,), float(rank))}} if rank else {}
    return gather_state(own, senders=[0, 1], group=everyone)


def test_a_first_rank_without_state_gathers_that_of_others() -> None:
    first, second = run_ranks(gathered, 2)
    assert second == []
    assert first[0] == {} and first[1]["residual"]["a"].tolist() == [1.0, 1.0, 1.0]

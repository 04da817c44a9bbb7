"""Checks that all ranks agree, which name who does not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_topt.communication.collectives import ring_all_gather
from lightning_topt.communication.exchange_context import ExchangeSettings
from lightning_topt.communication.exchange_method import GradientMethod
from lightning_topt.communication.topology import Topology


def check_equal_options(
    method: GradientMethod, settings: ExchangeSettings, *, topology: Topology
) -> None:
    """Collective call: raise ValueError, on all ranks, where a rank's options or topology differ
    from rank 0's.
    """
    own: dict[str, Any] = {"method": method.name, **asdict(method), **asdict(settings)}
    own |= {"num_nodes": topology.num_nodes, "ranks_per_node": topology.ranks_per_node}
    everyone: list[dict[str, Any]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, own)
    for rank, theirs in enumerate(everyone):
        for name, value in theirs.items():
            if value != everyone[0].get(name):
                raise ValueError(
                    f"all ranks exchange gradients with the same options: {name} is {value!r} on "
                    f"rank {rank} and "
                    f"{everyone[0].get(name)!r} on rank 0"
                )


def _checksum(tensor: Tensor) -> Tensor:
    """Two int64 sums (2,) over the bits of `tensor`: of all, and of every second element."""
    flat = tensor.detach().contiguous().view(-1)
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    bits = torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat
    bits = bits.view(integers[bits.element_size()])
    return torch.stack([bits.sum(dtype=torch.int64), bits[::2].sum(dtype=torch.int64)])


def check_equal_parameters(
    parameters: Mapping[str, nn.Parameter], *, group: dist.ProcessGroup, step: int
) -> None:
    """Collective call on `group`: raise RuntimeError, on all ranks, naming the first parameter
    whose bits differ.
    """
    own = torch.stack([_checksum(parameter) for parameter in parameters.values()])
    everyone = torch.empty(
        (dist.get_world_size(group), *own.shape), dtype=own.dtype, device=own.device
    )
    ring_all_gather(everyone, own, group=group).wait()
    for index, name in enumerate(parameters):
        for rank, sums in enumerate(everyone[:, index]):
            if not torch.equal(sums, everyone[0, index]):
                raise RuntimeError(
                    f"parameter {name} differs between rank 0 and rank {rank} after {step} "
                    "exchanged steps: "
                    "something other than the averaged gradient changes it, or a rank steps when "
                    "others do not"
                )

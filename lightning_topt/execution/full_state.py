"""Checkpoints in full form: plain tensors under plain keys, whatever plan the run has.

`gather_*` are collective calls that leave the whole state on rank 0 (CPU tensors) and an empty dict elsewhere; `shard_*`
need no communication: every rank has read the whole state and keeps its part.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer

State = dict[str, Any]


@torch.no_grad()
def gather_module_state(state: Mapping[str, Any]) -> State:
    """The full form of a sharded module's `state_dict()`."""
    whole: State = {}
    for name, value in state.items():
        full = value.full_tensor() if isinstance(value, DTensor) else value
        if dist.get_rank() == 0:
            whole[name] = full.cpu() if isinstance(full, Tensor) else full
    return whole


def shard_module_state(state: Mapping[str, Any], module_state: Mapping[str, Any]) -> State:
    """The entries of full `state` placed like those of a module's own `module_state`."""
    return {name: _place_like(value, module_state.get(name)) for name, value in state.items()}


def _place_like(value: Any, target: Any) -> Any:
    if not isinstance(target, DTensor) or not isinstance(value, Tensor) or value.shape != target.shape:
        return value  # a wrong shape is load_state_dict's to report
    value = value.to(target.device_mesh.device_type, target.dtype)
    return distribute_tensor(value, target.device_mesh, target.placements, src_data_rank=None)


@torch.no_grad()
def gather_sharded_optimizer_state(optimizer: Optimizer) -> State:
    """The full form of the state of an optimizer over sharded parameters."""
    state = optimizer.state_dict()
    whole: dict[Any, State] = {}
    for index, values in state["state"].items():
        whole[index] = {}
        for key, value in values.items():
            full = value.full_tensor() if isinstance(value, DTensor) else value
            if dist.get_rank() == 0:
                whole[index][key] = full.cpu() if isinstance(full, Tensor) else full
    return {**state, "state": whole} if dist.get_rank() == 0 else {}


def shard_optimizer_state(optimizer: Optimizer, state: Mapping[str, Any]) -> State:
    """The part of full `state` that an optimizer over sharded parameters keeps."""
    parameters = _indexed(optimizer)
    placed = {
        index: {key: _place_like(value, parameters[index]) for key, value in values.items()}
        for index, values in state["state"].items()
    }
    return {**state, "state": placed}


@torch.no_grad()
def gather_owned_optimizer_state(optimizer: Optimizer, owners: Mapping[Tensor, int], device: torch.device) -> State:
    """The full form of the state of an optimizer whose parameters are updated by their owners (`owned_step`).

    Tensors travel one by one from their owner to rank 0 (over `device`'s backend), so that no rank holds more than one
    extra tensor.
    """
    rank, state = dist.get_rank(), optimizer.state_dict()
    owner_of = {index: owners.get(parameter, 0) for index, parameter in _indexed(optimizer).items()}
    mine = {index: values for index, values in state["state"].items() if owner_of[index] == rank}
    outlines: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(outlines, {index: _outline(values) for index, values in mine.items()})
    whole: dict[int, State] = {}
    for owner, outline in enumerate(outlines):
        for index, entries in outline.items():
            whole[index] = _move_to_rank_0(entries, mine.get(index, {}), owner, device)
    if rank != 0:
        return {}
    return {**state, "state": {index: whole[index] for index in sorted(whole)}}


def own_optimizer_state(
    optimizer: Optimizer, state: Mapping[str, Any], owners: Mapping[Tensor, int], rank: int
) -> State:
    """The part of full `state` that belongs to parameters this rank updates."""
    parameters = _indexed(optimizer)
    mine = {i: values for i, values in state["state"].items() if owners.get(parameters[i], rank) == rank}
    return {**state, "state": mine}


def _indexed(optimizer: Optimizer) -> dict[int, Tensor]:
    """Parameters by the index that `Optimizer.state_dict` gives them."""
    return dict(enumerate(p for group in optimizer.param_groups for p in group["params"]))


class _TensorOutline:
    def __init__(self, tensor: Tensor) -> None:
        self.shape, self.dtype = tuple(tensor.shape), tensor.dtype


def _outline(values: State) -> State:
    return {key: _TensorOutline(value) if isinstance(value, Tensor) else value for key, value in values.items()}


def _move_to_rank_0(outline: State, values: State, owner: int, device: torch.device) -> State:
    rank, moved = dist.get_rank(), {}
    for key, entry in outline.items():
        if not isinstance(entry, _TensorOutline):
            moved[key] = entry
        elif owner == 0:
            moved[key] = values[key].cpu() if rank == 0 else None
        elif rank == owner:
            dist.send(values[key].to(device).contiguous(), 0)
        elif rank == 0:
            buffer = torch.empty(entry.shape, dtype=entry.dtype, device=device)
            dist.recv(buffer, owner)
            moved[key] = buffer.cpu()
    return moved

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
def gather_sharded_optimizer_state(state: Mapping[str, Any], *, everywhere: bool = False) -> State:
    """The full form of the `state_dict()` of an optimizer over sharded parameters, on rank 0 or `everywhere`."""
    wanted = everywhere or dist.get_rank() == 0
    whole: dict[Any, State] = {}
    for index, values in state["state"].items():
        whole[index] = {}
        for key, value in values.items():
            full = value.full_tensor() if isinstance(value, DTensor) else value
            if wanted:
                whole[index][key] = full.cpu() if isinstance(full, Tensor) else full
    return {**state, "state": whole} if wanted else {}


def shard_optimizer_state(optimizer: Optimizer, state: Mapping[str, Any]) -> State:
    """The part of full `state` that an optimizer over sharded parameters keeps."""
    parameters = _indexed(optimizer)
    placed = {
        index: {key: _place_like(value, parameters[index]) for key, value in values.items()}
        for index, values in state["state"].items()
    }
    return {**state, "state": placed}


def follow_parameters(optimizer: Optimizer, replaced: Mapping[Tensor, Tensor]) -> None:
    """Make an optimizer update the parameters that `replaced` has in place of its own; its state goes with them."""
    for group in optimizer.param_groups:
        group["params"][:] = [replaced.get(parameter, parameter) for parameter in group["params"]]
    state = dict(optimizer.state)
    optimizer.state.clear()
    for parameter, values in state.items():
        target = replaced.get(parameter, parameter)
        optimizer.state[target] = {key: _place_like(value, target) for key, value in values.items()}


def _indexed(optimizer: Optimizer) -> dict[int, Tensor]:
    """Parameters by the index that `Optimizer.state_dict` gives them."""
    return dict(enumerate(p for group in optimizer.param_groups for p in group["params"]))

"""States in full form: plain tensors under plain keys, whatever plan the run has.

`gather_*` are collective calls that leave the whole state on rank 0 (CPU tensors) and an empty dict
elsewhere; `place_*` need no communication: every rank has read the whole state and keeps its part.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer

from lightning_topt.execution.stored_states import StoredModule
from lightning_topt.execution.tensor_chunks import chunks_of
from lightning_topt.optim.full_state import parameters_of
from lightning_topt.techniques.tensor_parallel.split_parameters import SplitTensor

State = dict[str, Any]


def module_state(module: nn.Module, split: Mapping[str, SplitTensor], *, full: bool) -> State:
    """Return the state of a module with DTensors, or tensors that are `split`: whole on rank 0, or,
    not `full`, in shards.
    """
    state = module.state_dict()
    if full:
        return gather_module_state(state, split)
    return {name: chunks_of(value, split.get(name)) for name, value in state.items()}


def load_module_state(
    module: nn.Module,
    state: Mapping[str, Any],
    split: Mapping[str, SplitTensor] | None,
    *,
    strict: bool,
) -> None:
    """Load a whole `state`, or a stored one, of which the part of this rank is read. `split` None:
    the module is whole.
    """
    own = module.state_dict()
    if isinstance(state, StoredModule):
        state = state.read(like=own, split=split)
    module.load_state_dict(
        state if split is None else place_module_state(state, own, split), strict=strict
    )


@torch.no_grad()
def gather_module_state(state: Mapping[str, Any], split: Mapping[str, SplitTensor]) -> State:
    """Return the full form of a module's `state_dict()` that has DTensors, and slices of the
    tensors that are `split`.
    """
    whole: State = {}
    for name, value in state.items():
        full = _full(value, split.get(name))
        if dist.get_rank() == 0:
            whole[name] = full.cpu() if isinstance(full, Tensor) else full
    return whole


def place_module_state(
    state: Mapping[str, Any], module_state: Mapping[str, Any], split: Mapping[str, SplitTensor]
) -> State:
    """Return the entries of full `state` placed like those of a module's own `module_state`, cut
    where they are `split`.
    """
    return {
        name: _place_like(_own(value, split.get(name)), module_state.get(name))
        for name, value in state.items()
    }


@torch.no_grad()
def gather_parameter_states(
    states: Iterable[tuple[int, State]],
    split: Mapping[int, SplitTensor],
    *,
    everywhere: bool = False,
) -> dict[int, State]:
    """Return the full form of an optimizer's states by parameter index, on rank 0 or `everywhere`;
    one by one.
    """
    wanted = everywhere or dist.get_rank() == 0
    whole: dict[int, State] = {}
    for index, values in states:
        of_parameter = {}
        for key, value in values.items():
            full = _full(value, split.get(index))
            if wanted:
                of_parameter[key] = full.cpu() if isinstance(full, Tensor) else full
        if wanted:
            whole[index] = of_parameter
    return whole


def place_optimizer_state(
    optimizer: Optimizer, state: Mapping[str, Any], split: Mapping[int, SplitTensor]
) -> State:
    """Return the part of full `state` that an optimizer, some of whose parameters are DTensors or
    `split`, keeps.
    """
    parameters = dict(enumerate(parameters_of(optimizer)))
    placed = {
        index: {
            key: _place_like(_own(value, split.get(index)), parameters[index])
            for key, value in values.items()
        }
        for index, values in state["state"].items()
    }
    return {**state, "state": placed}


def follow_parameters(
    optimizer: Optimizer, replaced: Mapping[Tensor, Tensor], split: Mapping[Tensor, SplitTensor]
) -> None:
    """Make an optimizer update the parameters that `replaced` has in place of its own; its state
    goes with them.

    Whole state of those that are `split` is cut.
    """
    for group in optimizer.param_groups:
        group["params"][:] = [replaced.get(parameter, parameter) for parameter in group["params"]]
    state = dict(optimizer.state)
    optimizer.state.clear()
    for parameter, values in state.items():
        target = replaced.get(parameter, parameter)
        own = {key: _own(value, split.get(parameter)) for key, value in values.items()}
        optimizer.state[target] = {key: _place_like(value, target) for key, value in own.items()}


def _full(value: Any, split: SplitTensor | None) -> Any:
    full = value.full_tensor() if isinstance(value, DTensor) else value
    if split is None or not isinstance(full, Tensor) or tuple(full.shape) != split.local_shape:
        return full
    return split.whole(full)


def _own(value: Any, split: SplitTensor | None) -> Any:
    whole = (
        isinstance(value, Tensor) and split is not None and tuple(value.shape) == split.layout.shape
    )
    return split.own(value) if whole and split is not None else value


def _place_like(value: Any, target: Any) -> Any:
    if (
        not isinstance(target, DTensor)
        or not isinstance(value, Tensor)
        or value.shape != target.shape
    ):
        return value  # a wrong shape is load_state_dict's to report
    if isinstance(value, DTensor):
        return value
    value = value.to(target.device_mesh.device_type, target.dtype)
    return distribute_tensor(value, target.device_mesh, target.placements, src_data_rank=None)

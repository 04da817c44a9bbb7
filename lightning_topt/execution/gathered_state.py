"""States in full form: plain tensors under plain keys, whatever plan the run has.

    module_state, load_module_state                        a module's
    gather_parameter_states, place_optimizer_state         an optimizer's
    follow_parameters                                      an optimizer over other parameters

`gather_*` are collective calls that leave the full state on rank 0 (CPU tensors) and an empty dict
elsewhere. `place_*` need no communication: every rank has read the full state and keeps its part.
Tensors are in shards (DTensors), in slices along tensor axes (`split`), or in shards of slices.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer

from lightning_topt.execution.stored_states import StoredModule, chunks_of
from lightning_topt.optim.full_state import laid_out, parameters_of
from lightning_topt.techniques.tensor_parallel.split_parameters import SplitTensor

State = dict[str, Any]


# ---- modules -------------------------------------------------------------------------------------


def module_state(module: nn.Module, split: Mapping[str, SplitTensor], *, full: bool) -> State:
    """Return a module's state: `full` on rank 0, or this rank's part of it."""
    state = module.state_dict()
    if full:
        return gather_module_state(state, split)
    return {name: chunks_of(value, split.get(name)) for name, value in state.items()}


def load_module_state(
    module: nn.Module,
    state: Mapping[str, object],
    split: Mapping[str, SplitTensor] | None,
    *,
    strict: bool,
) -> None:
    """Load a full state, or a stored one, of which this rank's part is read.

    `split` None: the module is unsharded.
    """
    # Its DTensors say which shards this rank keeps.
    own = module.state_dict()
    if isinstance(state, StoredModule):
        state = state.read(like=own, split=split)
    module.load_state_dict(
        state if split is None else place_module_state(state, own, split), strict=strict
    )


@torch.no_grad()
def gather_module_state(state: Mapping[str, object], split: Mapping[str, SplitTensor]) -> State:
    """Return the full form of a module's `state_dict()`, on rank 0. A collective call."""
    whole: State = {}
    for name, value in state.items():
        full = _full(value, split.get(name))
        # Every rank takes part in gathering, the first one keeps the result.
        if dist.get_rank() == 0:
            whole[name] = full.cpu() if isinstance(full, Tensor) else full
    return whole


def place_module_state(
    state: Mapping[str, object],
    module_state: Mapping[str, object],
    split: Mapping[str, SplitTensor],
) -> State:
    """Return the entries of full `state`, placed like those of a module's own `module_state`."""
    return {
        name: place_like(_own(value, split.get(name)), module_state.get(name))
        for name, value in state.items()
    }


# ---- optimizers ----------------------------------------------------------------------------------


@torch.no_grad()
def gather_parameter_states(
    states: Iterable[tuple[int, State]],
    split: Mapping[int, SplitTensor],
    *,
    everywhere: bool = False,
) -> dict[int, State]:
    """Return the full form of an optimizer's states by parameter index, gathered one by one.

    On rank 0, or `everywhere`. A collective call.
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
    optimizer: Optimizer,
    state: Mapping[str, Any],
    split: Mapping[int, SplitTensor],
    *,
    replicated: Collection[int] = (),
) -> State:
    """Return the part of full `state` that this rank keeps of an optimizer's state.

    No shards are made of the state of parameters that are `replicated`, by index.
    """
    parameters = dict(enumerate(parameters_of(optimizer)))
    placed = {
        index: {
            key: place_like(
                _own(value, split.get(index)),
                None
                if index in replicated and isinstance(parameters[index], DTensor)
                else parameters[index],
            )
            for key, value in values.items()
        }
        for index, values in state["state"].items()
    }
    return {**state, "state": placed}


def follow_parameters(
    optimizer: Optimizer, replaced: Mapping[Tensor, Tensor], split: Mapping[Tensor, SplitTensor]
) -> None:
    """Make an optimizer update the parameters that `replaced` has in the place of its own.

    Its state follows; full state of parameters that are `split` is cut.
    """
    for group in optimizer.param_groups:
        group["params"][:] = [replaced.get(parameter, parameter) for parameter in group["params"]]
    # Keys of the state are parameters: put it in again under the new ones.
    state = dict(optimizer.state)
    optimizer.state.clear()
    for parameter, values in state.items():
        target = replaced.get(parameter, parameter)
        own = {key: _own(value, split.get(parameter)) for key, value in values.items()}
        optimizer.state[target] = {key: place_like(value, target) for key, value in own.items()}


# ---- one value -----------------------------------------------------------------------------------


def _full(value: object, split: SplitTensor | None) -> Any:
    # A value without shards and slices. A collective call where there are some.
    # Shards first, since slices are cut into shards; then slices.
    full = value.full_tensor() if isinstance(value, DTensor) else value
    if split is None or not isinstance(full, Tensor) or tuple(full.shape) != split.local_shape:
        return full
    return split.whole(full)


def _own(value: Any, split: SplitTensor | None) -> Any:
    # This rank's slice of a full tensor that is `split`; else `value`
    whole = (
        isinstance(value, Tensor) and split is not None and tuple(value.shape) == split.layout.shape
    )
    return split.own(value) if whole and split is not None else value


def place_like(value: object, target: object) -> Any:
    """Return a full value with the placements of `target`, a DTensor, or with its strides."""
    if not isinstance(target, DTensor):
        return laid_out(value, target) if isinstance(target, Tensor) else value
    if not isinstance(value, Tensor) or value.shape != target.shape:
        return value  # a wrong shape is load_state_dict's to report
    if isinstance(value, DTensor):
        return value
    # Fused kernels take equal strides for granted, and shards of parameters are contiguous. The
    # dtype stays: 8-bit optimizers have states of integers, in the shape of the parameter.
    value = value.to(target.device_mesh.device_type).contiguous()
    return distribute_tensor(value, target.device_mesh, target.placements, src_data_rank=None)

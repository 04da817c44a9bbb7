"""The state of all ranks in one checkpoint, and back on another number of ranks.

`gather_state` brings every rank's state to rank 0; `own_state` gives each rank its part of what was
saved. Ranks that have slices of parameters (`Slices`) save the state of full parameters:
`unsharded_state`, and `sharded_state` on the way back.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_topt.communication.collectives import travel_device

State = dict[str, dict[str, Tensor]]  # kind -> parameter name -> tensor


class Slices(Protocol):
    """Parameters of which a rank has a slice, by name.

    What has as many elements as a parameter is cut like it. All methods take and give flat tensors;
    for a parameter that is not cut they give back what they got.
    """

    @property
    def uncut(self) -> Collection[str]:
        """Names of the parameters that are not cut, and so equal on all ranks of the slices."""

    def numel(self, name: str, own: int) -> int:
        """Return the number of elements of the full parameter, of which this rank has `own`."""

    def whole(self, name: str, own: Tensor) -> Tensor:
        """Return the full parameter on every rank. A collective call of the ranks of the slices."""

    def own(self, name: str, whole: Tensor) -> Tensor:
        """Return this rank's slice."""


def unsharded_state(state: State, slices: Slices | None) -> State:
    """Return the state of full parameters. A collective call of the ranks that have the slices."""
    if slices is None:
        return state
    return {
        kind: {name: slices.whole(name, tensors[name]) for name in sorted(tensors)}
        for kind, tensors in state.items()
    }


def sharded_state(state: State, slices: Slices | None) -> State:
    """Return the state of this rank's `slices` from that of full parameters.

    A residual of an uncut parameter is left out: it is sent whole in each step, so that it stays
    equal.
    """
    if slices is None:
        return state
    return {
        kind: {
            name: slices.own(name, tensor)
            for name, tensor in tensors.items()
            if name not in slices.uncut
        }
        for kind, tensors in state.items()
    }


def gather_state(state: State, *, senders: Sequence[int], group: dist.ProcessGroup) -> list[State]:
    """Collective call on `group`: on its rank 0 the state of each of `senders`, on CPU.

    `senders` are ranks of the group; [] is returned elsewhere. One tensor travels at a time: no
    rank but 0 needs memory for it.
    """
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    # everyone says what it will send
    own = [
        (kind, name, tensor.shape, tensor.dtype)
        for kind in state
        for name, tensor in state[kind].items()
    ]
    everyone: list[list[tuple[str, str, torch.Size, torch.dtype]]] = [[] for _ in range(world_size)]
    dist.all_gather_object(everyone, own, group=group)
    gathered: list[State] = []
    device = travel_device(group)  # exchanges keep some state on the device, some in host memory
    # one tensor after another
    for sender in senders:
        received: State = {}
        for kind, name, shape, dtype in everyone[sender]:
            if rank == 0:
                if sender == 0:
                    tensor = state[kind][name]
                else:
                    tensor = torch.empty(shape, dtype=dtype, device=device)
                    dist.recv(tensor, group=group, group_src=sender)
                received.setdefault(kind, {})[name] = tensor.detach().cpu().clone()
            elif rank == sender:
                dist.send(state[kind][name].to(device).contiguous(), group=group, group_dst=0)
        if rank == 0:
            gathered.append(received)
    return gathered


def own_state(
    saved: Sequence[State], *, position: int, holders: int, numels: Mapping[str, int]
) -> State:
    """Return the state of holder `position` of `holders`, from those that were `saved`.

    With another number of holders everyone gets the mean: what the model still has to receive on
    average stays the same.

    Raises:
        ValueError: for unknown parameters or other sizes.
    """
    for state in saved:
        for kind, tensors in state.items():
            _check_known(tensors, numels, sized=kind == "residual")
    if len(saved) == holders:
        return saved[position]
    # another number of ranks: the mean of what was saved
    mean: State = {}
    for state in saved:
        for kind, tensors in state.items():
            into = mean.setdefault(kind, {})
            for name, tensor in tensors.items():
                share = tensor / len(saved)
                into[name] = into[name] + share if name in into else share
    return mean


def _check_known(tensors: Mapping[str, Tensor], numels: Mapping[str, int], *, sized: bool) -> None:
    for name, tensor in tensors.items():
        if name not in numels:
            raise ValueError(
                f"the saved exchange state has a parameter that the model lacks: {name}"
            )
        if sized and tensor.numel() != numels[name]:
            raise ValueError(
                f"the saved exchange state of {name} has {tensor.numel()} elements, the parameter "
                f"{numels[name]}"
            )

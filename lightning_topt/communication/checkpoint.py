"""The state of all ranks in one checkpoint, and back on another number of ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

State = dict[str, dict[str, Tensor]]  # kind -> parameter name -> tensor


def gather_state(state: State, *, senders: Sequence[int], group: dist.ProcessGroup) -> list[State]:
    """Collective call on `group` (all ranks): on rank 0 the state of each of `senders`, on CPU; [] elsewhere.

    One tensor at a time: no rank but 0 needs memory for it.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    own = [(kind, name, tensor.shape, tensor.dtype) for kind in state for name, tensor in state[kind].items()]
    everyone: list[list[tuple[str, str, torch.Size, torch.dtype]]] = [[] for _ in range(world_size)]
    dist.all_gather_object(everyone, own, group=group)
    gathered: list[State] = []
    device = next((tensor.device for tensors in state.values() for tensor in tensors.values()), torch.device("cpu"))
    for sender in senders:
        received: State = {}
        for kind, name, shape, dtype in everyone[sender]:
            if rank == 0:
                tensor = state[kind][name] if sender == 0 else torch.empty(shape, dtype=dtype, device=device)
                if sender:
                    dist.recv(tensor, src=sender, group=group)
                received.setdefault(kind, {})[name] = tensor.detach().cpu().clone()
            elif rank == sender:
                dist.send(state[kind][name].contiguous(), dst=0, group=group)
        if rank == 0:
            gathered.append(received)
    return gathered


def own_state(saved: Sequence[State], *, position: int, holders: int, numels: Mapping[str, int]) -> State:
    """Return the state of holder `position` of `holders`, where `saved` has those of as many or other holders.

    With another number everyone gets the mean: what the model still has to receive on average stays the same. Raises ValueError
    for unknown parameters or other sizes.
    """
    for state in saved:
        for kind, tensors in state.items():
            _check_known(tensors, numels, sized=kind in ("residual", "velocity"))
    if len(saved) == holders:
        return saved[position]
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
            raise ValueError(f"the saved exchange state has a parameter that the model lacks: {name}")
        if sized and tensor.numel() != numels[name]:
            raise ValueError(
                f"the saved exchange state of {name} has {tensor.numel()} elements, the parameter {numels[name]}"
            )

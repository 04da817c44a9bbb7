"""Norms, clipping and overflow of gradients that no rank has in full.

What reads full gradients elsewhere (``clip_grad_norm_``, a GradScaler) works here on local parts:
shards of DTensors on one mesh or several, and slices along axes that DTensors do not know. A norm
is made of partial sums over ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.amp import GradScaler
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim import Optimizer

from lightning_topt.communication.collectives import travel_device
from lightning_topt.optim.full_state import parameters_of

# into how many slices, along axes that DTensors do not know, a parameter is cut
Slices = Callable[[Tensor], int]


def _one_slice(_: Tensor) -> int:
    return 1


def clip_norm_(
    parameters: Iterable[Tensor], max_norm: float, *, slices: Slices = _one_slice
) -> Tensor:
    """Scale the gradients to a norm of at most `max_norm`; return the norm before, without dims.

    A collective call of all ranks, as ``torch.nn.utils.clip_grad_norm_`` of the full gradients, in
    another order of summation.
    """
    given = list(parameters)
    device = next((p.device for p in given if p.device.type != "cpu"), torch.device("cpu"))
    total = squared_norm(given, device=device, slices=slices) ** 0.5
    clip_grads_with_norm_(local_parameters(given), max_norm, total)
    return total


def squared_norm(
    parameters: Iterable[Tensor],
    *,
    device: torch.device,
    slices: Slices,
    group: dist.ProcessGroup | None = None,
) -> Tensor:
    """Return the square of the norm of all gradients together, without dims; 0 without any.

    A collective call of the ranks of `group`, over which parameters are cut; equal on all of them.
    """
    replicated: list[Tensor] = []
    by_copies: dict[int, list[Tensor]] = {}  # sharded ones, by how many ranks hold the same shard
    for parameter in parameters:
        if parameter.grad is None:
            continue
        shards = slices(parameter)
        if isinstance(parameter, DTensor) or shards > 1:
            if isinstance(parameter, DTensor):
                sizes = zip(parameter.device_mesh.shape, parameter.placements, strict=True)
                shards *= math.prod(size for size, placement in sizes if placement.is_shard())
            by_copies.setdefault(dist.get_world_size(group) // shards, []).append(parameter)
        else:
            replicated.append(parameter)
    total = _local_square(replicated, device)
    if by_copies:
        # every copy of a shard is in the sum over ranks
        parts = [_local_square(alike, device) / n for n, alike in sorted(by_copies.items())]
        # what is offloaded is on the host, which may not be where ranks meet
        sharded = torch.stack(parts).sum().to(travel_device() if device.type == "cpu" else device)
        dist.all_reduce(sharded, group=group)
        total = total.to(sharded.device) + sharded
    return total


def clip_value_(parameters: Iterable[Tensor], clip_value: float) -> None:
    """Clamp every gradient to [-`clip_value`, `clip_value`], as torch's ``clip_grad_value_``."""
    torch.nn.utils.clip_grad_value_(local_parameters(parameters), clip_value)


def agree_on_overflow(scaler: GradScaler, device: torch.device) -> Callable[[], None]:
    """Make `scaler` unscale and look at local gradients, and skip a step where any rank overflows.

    On the instance, as torch's own ``ShardedGradScaler`` does it; the result undoes it. Its calls
    are collective from then on.
    """
    unscale = scaler._unscale_grads_

    def unscale_and_agree(
        optimizer: Optimizer, *args: Any, **kwargs: Any
    ) -> dict[torch.device, Tensor]:
        local = local_parameters(parameters_of(optimizer))
        owned: Any = SimpleNamespace(param_groups=[{"params": local}])
        found = unscale(owned, *args, **kwargs)
        flag = found.setdefault(device, torch.zeros((), device=device))
        dist.all_reduce(flag, dist.ReduceOp.MAX)
        return found

    scaler._unscale_grads_ = unscale_and_agree  # type: ignore[method-assign]

    def restore() -> None:
        if vars(scaler).get("_unscale_grads_") is unscale_and_agree:
            del vars(scaler)["_unscale_grads_"]

    return restore


def local_parameters(parameters: Iterable[Tensor]) -> list[Tensor]:
    """Return, for each parameter with a gradient, a tensor in the same memory with the local one.

    That is the parameter itself where it is no DTensor.
    """
    found = []
    for parameter in parameters:
        gradient = parameter.grad
        if isinstance(parameter, DTensor) and gradient is not None:
            local = parameter._local_tensor.detach()
            local.grad = gradient._local_tensor if isinstance(gradient, DTensor) else gradient
            found.append(local)
        elif gradient is not None:
            found.append(parameter)
    return found


def _local_square(parameters: Iterable[Tensor], device: torch.device) -> Tensor:
    # The square of the norm of what this rank has of their gradients: float32, without dims
    local = local_parameters(parameters)
    gradients = [p.grad for p in local if p.grad is not None and p.grad.numel()]
    if not gradients:
        return torch.zeros((), device=device)
    return get_total_norm(gradients).to(device, torch.float32) ** 2

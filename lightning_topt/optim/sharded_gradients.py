"""Norms, clipping and overflow read whole gradients, where some are in shards (DTensors, on one
mesh or several) or slices.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from math import inf
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.amp import GradScaler
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim import Optimizer

from lightning_topt.optim.full_state import parameters_of
from lightning_topt.optim.local_step import local_parameters

# into how many slices, along axes that DTensors do not know, a parameter is cut
Slices = Callable[[Tensor], int]


def _whole(_: Tensor) -> int:
    return 1


def total_norm(
    parameters: Iterable[Tensor], *, norm_type: float = 2.0, slices: Slices = _whole
) -> Tensor:
    """Return the norm of all gradients together, equal on all ranks, without dims; 0 where there
    are none.

    A collective call of all ranks. As ``torch.nn.utils.get_total_norm`` of the whole gradients, in
    another order of summation.
    """
    power, given = (
        float(norm_type),
        [parameter for parameter in parameters if parameter.grad is not None],
    )
    device = given[0].device if given else torch.device("cpu")
    whole = _partial([p for p in given if not _is_cut(p, slices)], power, device)
    by_copies: dict[int, list[Tensor]] = {}
    for parameter in given:
        if _is_cut(parameter, slices):
            by_copies.setdefault(_copies(parameter, slices), []).append(parameter)
    if by_copies:
        parts = [
            _partial(p, power, device) / (1 if power == inf else n)
            for n, p in sorted(by_copies.items())
        ]
        sharded = torch.stack(parts).amax() if power == inf else torch.stack(parts).sum()
        dist.all_reduce(sharded, dist.ReduceOp.MAX if power == inf else dist.ReduceOp.SUM)
        whole = torch.maximum(whole, sharded) if power == inf else whole + sharded
    return whole if power == inf else whole ** (1 / power)


def clip_norm_(
    parameters: Iterable[Tensor],
    max_norm: float,
    *,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    slices: Slices = _whole,
) -> Tensor:
    """Scale the gradients to a norm of at most `max_norm`, as ``torch.nn.utils.clip_grad_norm_``;
    return the norm before.

    A collective call. Raises RuntimeError for a norm that is not finite with `error_if_nonfinite`,
    on all ranks.
    """
    given = list(parameters)
    total = total_norm(given, norm_type=norm_type, slices=slices)
    if error_if_nonfinite and not bool(total.isfinite()):
        raise RuntimeError(
            f"the norm of order {norm_type} of the gradients is {float(total)}, so they cannot be "
            "clipped; to scale them all "
            "the same, set error_if_nonfinite=False"
        )
    clip_grads_with_norm_(local_parameters(given), max_norm, total)
    return total


def clip_value_(parameters: Iterable[Tensor], clip_value: float) -> None:
    """Clamp every gradient to [-`clip_value`, `clip_value`], as
    ``torch.nn.utils.clip_grad_value_``.
    """
    torch.nn.utils.clip_grad_value_(local_parameters(parameters), clip_value)


def agree_on_overflow(scaler: GradScaler, device: torch.device) -> Callable[[], None]:
    """Make `scaler` unscale and look at local gradients, and skip a step where any rank found an
    overflow.

    On the instance; the result undoes it. Its calls are collective from then on.
    """
    unscale = scaler._unscale_grads_

    def unscale_local(
        optimizer: Optimizer, *args: Any, **kwargs: Any
    ) -> dict[torch.device, Tensor]:
        groups = [{"params": local_parameters(parameters_of(optimizer))}]
        found = unscale(SimpleNamespace(param_groups=groups), *args, **kwargs)  # type: ignore[arg-type]
        flag = found.setdefault(device, torch.zeros((), device=device))
        dist.all_reduce(flag, dist.ReduceOp.MAX)
        return found

    scaler._unscale_grads_ = unscale_local  # type: ignore[method-assign]

    def restore() -> None:
        if vars(scaler).get("_unscale_grads_") is unscale_local:
            del vars(scaler)["_unscale_grads_"]

    return restore


def _partial(parameters: Sequence[Tensor], power: float, device: torch.device) -> Tensor:
    """The norm of their local gradients, to that power unless it is infinite: what sums (or maxima)
    are made of.
    """
    gradients = [
        p.grad for p in local_parameters(parameters) if p.grad is not None and p.grad.numel()
    ]
    if not gradients:
        return torch.zeros((), device=device)
    norm = get_total_norm(gradients, power).to(device, torch.float32)
    return norm if power == inf else norm**power


def _is_cut(parameter: Tensor, slices: Slices) -> bool:
    return isinstance(parameter, DTensor) or slices(parameter) > 1


def _copies(parameter: Tensor, slices: Slices) -> int:
    """Return how many ranks hold the same shard."""
    shards = slices(parameter)
    if isinstance(parameter, DTensor):
        sizes = zip(parameter.device_mesh.shape, parameter.placements, strict=True)
        shards *= math.prod(size for size, placement in sizes if placement.is_shard())
    return dist.get_world_size() // shards

"""Norms of gradients that are spread over the ranks of a pipeline: a parameter that several stages share counts once."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from math import inf

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm


@torch.no_grad()
def total_norm(
    parameters: Iterable[Tensor],
    *,
    norm_type: float = 2.0,
    counted_elsewhere: Collection[Tensor],
    group: dist.ProcessGroup,
    device: torch.device,
) -> Tensor:
    """Return the norm of all gradients on the ranks of `group`, without dims, but for those `counted_elsewhere`.

    As ``torch.nn.utils.get_total_norm`` of all of them, in another order of summation. A collective call of the group.
    """
    power, elsewhere = float(norm_type), set(counted_elsewhere)
    gradients = [p.grad for p in parameters if p.grad is not None and p.grad.numel() and p not in elsewhere]
    part = get_total_norm(gradients, power).to(device, torch.float32) if gradients else torch.zeros((), device=device)
    part = part if power == inf else part**power
    dist.all_reduce(part, dist.ReduceOp.MAX if power == inf else dist.ReduceOp.SUM, group=group)
    return part if power == inf else part ** (1 / power)


def clip_norm_(
    parameters: Iterable[Tensor],
    max_norm: float,
    *,
    norm_type: float = 2.0,
    counted_elsewhere: Collection[Tensor],
    group: dist.ProcessGroup,
    device: torch.device,
) -> Tensor:
    """Scale the gradients to a norm of at most `max_norm`, as ``torch.nn.utils.clip_grad_norm_``; return the norm before."""
    given = list(parameters)
    total = total_norm(given, norm_type=norm_type, counted_elsewhere=counted_elsewhere, group=group, device=device)
    clip_grads_with_norm_([parameter for parameter in given if parameter.grad is not None], max_norm, total)
    return total

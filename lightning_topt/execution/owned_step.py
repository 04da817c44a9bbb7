"""ZeRO-1 on whole parameters: every rank updates the parameters it owns and receives the others from their owners.

Rajbhandari et al., arXiv 1910.02054, section 5.1 (P_os). Gradients are already equal on all ranks (DDP), so hiding the
gradients of the other ranks' parameters from `optimizer.step` leaves exactly this rank's share of the work, and the
optimizer makes state for that share alone. Bit-identical to the unsharded step, for every optimizer that treats each
parameter by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

_SMALL_BYTES = 1 << 20  # below this, a broadcast costs latency rather than bandwidth: such parameters travel together


class OwnedStep:
    """Replaces ``optimizer.step`` by one that updates owned parameters and broadcasts them.

    `owners` maps a parameter to the rank that updates it; parameters that are not in it are updated on every rank.
    """

    # What learning-rate schedulers leave on a step that they have wrapped, to see that it is called.
    _wrapped_by_lr_sched = True

    def __init__(self, optimizer: Optimizer, *, owners: Mapping[Tensor, int], rank: int) -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"] if p in owners]
        self.optimizer = optimizer
        self.foreign = [p for p in parameters if owners[p] != rank]
        self.buckets = _buckets(parameters, owners)
        self.step: Callable[..., Any] = optimizer.step

    def __call__(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        """One step. `closure` runs the forward and backward pass (and clipping) on whole gradients first."""
        self.optimizer._opt_called = True  # type: ignore[attr-defined]  # as a scheduler's wrapper would
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        gradients = [parameter.grad for parameter in self.foreign]
        for parameter in self.foreign:
            parameter.grad = None
        try:
            output = self.step(**kwargs)
        finally:
            for parameter, gradient in zip(self.foreign, gradients, strict=True):
                parameter.grad = gradient
        self._exchange()
        return output if closure is None else loss

    @torch.no_grad()
    def _exchange(self) -> None:
        pending = []
        for owner, tensors in self.buckets:
            flat = tensors[0] if len(tensors) == 1 else torch.cat([tensor.reshape(-1) for tensor in tensors])
            # A contiguous copy where needed: a broadcast writes into the memory it is given.
            buffer = flat.contiguous()
            pending.append((dist.broadcast(buffer, owner, async_op=True), buffer, tensors))
        for work, buffer, tensors in pending:
            work.wait()
            if len(tensors) > 1:
                for tensor, part in zip(tensors, torch.split(buffer, [t.numel() for t in tensors]), strict=True):
                    tensor.copy_(part.view_as(tensor))
            elif buffer is not tensors[0]:
                tensors[0].copy_(buffer)


def install_owned_step(optimizer: Optimizer, *, owners: Mapping[Tensor, int], rank: int) -> None:
    """Make ``optimizer.step`` update the parameters that `rank` owns and exchange all of them.

    Nothing changes when no parameter of the optimizer is in `owners`.
    """
    step = OwnedStep(optimizer, owners=owners, rank=rank)
    if step.buckets:
        optimizer.step = step  # type: ignore[method-assign]


def remove_owned_step(optimizer: Optimizer) -> None:
    """Undo `install_owned_step`."""
    if isinstance(step := optimizer.__dict__.get("step"), OwnedStep):
        optimizer.step = step.step  # type: ignore[method-assign]


def _buckets(parameters: list[Tensor], owners: Mapping[Tensor, int]) -> list[tuple[int, list[Tensor]]]:
    """Large parameters one by one, small ones of the same owner and dtype together; the same order on every rank."""
    buckets: list[tuple[int, list[Tensor]]] = []
    small: dict[tuple[int, torch.dtype], list[Tensor]] = {}
    for parameter in parameters:
        tensor = parameter.detach()
        if tensor.numel() * tensor.element_size() >= _SMALL_BYTES:
            buckets.append((owners[parameter], [tensor]))
        else:
            small.setdefault((owners[parameter], tensor.dtype), []).append(tensor)
    return buckets + [(owner, tensors) for (owner, _), tensors in small.items()]

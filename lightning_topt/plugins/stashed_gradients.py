"""Gradients of backward passes that run inside of ``training_step``.

Lightning's automatic optimization runs ``training_step``, ``zero_grad``, ``backward`` in this
order. A pipeline, and a rank that runs the batches of others, are done with backward when
`training_step` returns: ``zero_grad`` would clear what they have computed. So new gradients are
stashed, and come back with the backward pass of the loss that the step returns:

    with stashed_gradients(module) as gradients:  # {parameter: gradient}
        ...  # forward and backward, in any number of passes
    return loss_with_gradients(loss, gradients, factor=1.0, device=device)
"""

from __future__ import annotations

from collections.abc import Collection, Generator
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

Gradients = dict[nn.Parameter, Tensor]


@contextmanager
def stashed_gradients(
    module: nn.Module, *, dropped: Collection[nn.Parameter] = frozenset()
) -> Generator[Gradients, None, None]:
    """Let parameters start without gradients; stash those that they get, and restore the old ones.

    Args:
        module: whose parameters these are.
        dropped: parameters whose old gradients are not restored, since they are cleared anyway
            before anybody reads them (`cleared_before_backward`). That saves their memory.
    """
    # From here on backward writes to empty gradients.
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    before = [None if parameter in dropped else parameter.grad for parameter in parameters]
    found: Gradients = {}
    for parameter in parameters:
        parameter.grad = None
    try:
        yield found
    finally:
        # New gradients go into the stash, the old ones back.
        for parameter, gradient in zip(parameters, before, strict=True):
            if parameter.grad is not None:
                found[parameter] = parameter.grad
            parameter.grad = gradient


def cleared_before_backward(module: pl.LightningModule) -> frozenset[nn.Parameter]:
    """Return the parameters whose gradients Lightning clears between this step and its backward.

    These are the optimizer's, in the first batch of an accumulation, unless the module or the
    optimizer has a ``zero_grad`` of its own.
    """
    # Lightning's hook calls `optimizer.zero_grad()`; both may be the user's.
    trainer, own = module.trainer, getattr(module.optimizer_zero_grad, "__func__", None)
    loop = trainer.fit_loop.epoch_loop
    is_first = loop.batch_idx % trainer.accumulate_grad_batches == 0
    is_kept = not is_first or loop.automatic_optimization._skip_backward
    if is_kept or own is not pl.LightningModule.optimizer_zero_grad:
        return frozenset()
    return frozenset(
        parameter
        for optimizer in trainer.optimizers
        if getattr(optimizer.zero_grad, "__func__", None) is Optimizer.zero_grad
        for group in optimizer.param_groups
        for parameter in group["params"]
    )


def loss_with_gradients(
    value: Tensor,
    gradients: Gradients,
    *,
    factor: float | None,
    device: torch.device,
    graph: Tensor | None = None,
) -> Tensor:
    """Return a loss of this `value`, whose backward adds `gradients` to those of the parameters.

    Args:
        value: of the loss; its graph is not used.
        gradients: emptied by backward, so that each is freed as soon as it is added.
        factor: multiplies them, beside the gradient of the loss (1 / accumulated batches, or a
            scaler's). None: they have their final scale, and replace what parameters have.
        device: of the loss.
        graph: another loss whose graph backward goes on with, times `factor`.
    """
    source = torch.zeros((), device=device, requires_grad=True) if graph is None else graph
    loss: Tensor = _CarriedGradients.apply(  # type: ignore[no-untyped-call]
        source, value.detach(), factor, gradients
    )
    return loss


class _CarriedGradients(torch.autograd.Function):
    # The value of one tensor and the graph of another; see `loss_with_gradients`.

    @staticmethod
    def forward(
        ctx: Any, source: Tensor, value: Tensor, factor: float | None, gradients: Gradients
    ) -> Tensor:
        ctx.shape, ctx.factor, ctx.gradients = source.shape, factor, gradients
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        # One after the other: gradients are not in memory twice.
        scaled = gradient.reshape(()) * (1.0 if ctx.factor is None else ctx.factor)
        while ctx.gradients:
            parameter, found = ctx.gradients.popitem()
            if ctx.factor is None:
                parameter.grad = found
                continue
            found.mul_(scaled.to(found.dtype))
            parameter.grad = found if parameter.grad is None else parameter.grad.add_(found)
        return scaled.reshape(ctx.shape), None, None, None

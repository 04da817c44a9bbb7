"""Gradients of the step before, where backward runs inside of `training_step`: Lightning clears
them after that and before it calls backward, so what is new waits aside until then.
"""

from __future__ import annotations

from collections.abc import Collection, Generator
from contextlib import contextmanager

import lightning.pytorch as pl
from torch import Tensor, nn
from torch.optim import Optimizer

Gradients = dict[nn.Parameter, Tensor]


@contextmanager
def gradients_aside(
    module: nn.Module, *, dropped: Collection[nn.Parameter] = frozenset()
) -> Generator[Gradients, None, None]:
    """Let parameters have no gradients; those that they get go into what is yielded, and they have
    the former ones again, but for those that are `dropped`.
    """
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    before = [None if parameter in dropped else parameter.grad for parameter in parameters]
    found: Gradients = {}
    for parameter in parameters:
        parameter.grad = None
    try:
        yield found
    finally:
        for parameter, gradient in zip(parameters, before, strict=True):
            if parameter.grad is not None:
                found[parameter] = parameter.grad
            parameter.grad = gradient


def cleared_before_backward(module: pl.LightningModule) -> frozenset[nn.Parameter]:
    """Return the parameters whose gradients Lightning's loop sets to None between the present
    `training_step` and its backward: those of the optimizer, in the first batch of an accumulation,
    unless the module or the optimizer has a way of its own.
    """
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

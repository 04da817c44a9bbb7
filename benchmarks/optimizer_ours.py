"""The ways of this package to share an optimizer step, put together as the Lightning callback does."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lightning_topt.optim.parallel_step import install_parallel_step
from lightning_topt.optim.reduce_scatter import ReduceScatterExchange
from lightning_topt.optim.update_rule import update_rule
from lightning_topt.plugins.optimizer_decision import MEASURED_STEPS, WARMUP_STEPS, AdaptiveStep, Sharing

SETTLING_STEPS = WARMUP_STEPS + len(MEASURED_STEPS) + 1  # then an adaptive step has decided and shared once


class Adaptive:
    """`AdaptiveStep` of one optimizer: `always` shared, or where it pays."""

    def __init__(self, optimizer: Optimizer, *, always: bool) -> None:
        reduced = {parameter for group in optimizer.param_groups for parameter in group["params"]}
        self.said: list[str] = []
        group = dist.group.WORLD
        assert group is not None
        sharing = Sharing(group, reduced, always=always)
        self.step = AdaptiveStep(optimizer, rule=update_rule(optimizer), sharing=sharing, say=self.said.append)
        self.step.start()

    @property
    def pays(self) -> list[bool]:
        """The decision for each parameter group."""
        return [decision.pays for decision in self.step.decisions]


def scatter(net: nn.Module, optimizers: Sequence[Optimizer], step: Callable[[], object]) -> None:
    """Gradients reduce-scattered, and updated rows gathered; calls `step` until DDP's buckets are final."""
    assert isinstance(net, DistributedDataParallel)
    whole = [optimizer for optimizer in optimizers if update_rule(optimizer) == "parameters"]
    uncut = [parameter for optimizer in whole for group in optimizer.param_groups for parameter in group["params"]]
    exchange = ReduceScatterExchange(net, uncut=uncut, timeout_seconds=300)
    for _ in range(SETTLING_STEPS):
        if not exchange.ready:
            step()
    for optimizer in optimizers:
        install_parallel_step(optimizer, pieces=exchange.pieces_of(optimizer))
    exchange.begin(optimizers)

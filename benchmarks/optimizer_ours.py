"""The ways of this package to share an optimizer step, put together as the Lightning callback
does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lightning_topt.communication.node.rows import NodeRows, node_rows
from lightning_topt.optim.adaptive_step import TRIAL_STEPS, AdaptiveStep, Sharing
from lightning_topt.optim.reduce_scatter import ScatteredStep
from lightning_topt.optim.step_costs import MEASURED_STEPS, WARMUP_STEPS
from lightning_topt.optim.update_rule import update_rule

# then an adaptive step has decided
SETTLING_STEPS = WARMUP_STEPS + len(MEASURED_STEPS) + TRIAL_STEPS + 1


@cache
def rows(num_nodes: int) -> NodeRows | None:
    """The memory of the node, for all optimizers of a process."""
    assert dist.group.WORLD is not None
    return node_rows(
        dist.group.WORLD, device=torch.device("cpu"), num_nodes=num_nodes, timeout_seconds=300
    )


class Adaptive:
    """`AdaptiveStep` of one optimizer: `always` shared, or where it pays."""

    def __init__(self, optimizer: Optimizer, *, always: bool, num_nodes: int = 1) -> None:
        reduced = frozenset(
            parameter for group in optimizer.param_groups for parameter in group["params"]
        )
        self.said: list[str] = []
        group = dist.group.WORLD
        assert group is not None
        sharing = Sharing(group, reduced, always=always, node=rows(num_nodes))
        self.step = AdaptiveStep(
            optimizer, rule=update_rule(optimizer), sharing=sharing, say=self.said.append
        )
        self.step.start()

    @property
    def pays(self) -> list[bool]:
        """The decision for each parameter group."""
        return [decision.pays for decision in self.step.decisions]


def scatter(net: nn.Module, optimizers: Sequence[Optimizer], step: Callable[[], object]) -> None:
    """Gradients reduce-scattered, and updated rows gathered; calls `step` until DDP's buckets are
    final.
    """
    assert isinstance(net, DistributedDataParallel)
    rules = [update_rule(optimizer) for optimizer in optimizers]
    shared = ScatteredStep(
        net, optimizers=optimizers, rules=rules, timeout_seconds=300, node=rows(1)
    )
    for _ in range(SETTLING_STEPS):
        if not shared.begin_when_ready():
            step()

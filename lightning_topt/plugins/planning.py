"""This is what the strategy and `topt plan` take from a Trainer for the search, and what they keep
of its result.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import lightning.pytorch as pl
import torch
from lightning.pytorch.core.optimizer import _configure_optimizers
from torch import nn
from torch.optim import Optimizer

from lightning_topt.graph.module_copy import fake_copy
from lightning_topt.graph.op_graph import OpGraph
from lightning_topt.plan.plan_frontier import PlanFrontier, PlanPoint


@dataclass(frozen=True)
class Planning:
    """A frontier and the point chosen from it (its plan says why); `graph` is what was planned.

    `left_out` says which kinds of plans were not searched or not found, and why, by the sentence
    that a clause completes.
    """

    frontier: PlanFrontier
    chosen: PlanPoint
    graph: OpGraph
    left_out: Mapping[str, str] = field(default_factory=dict)


# and the parameters of their module, by name
Optimizers = tuple[list[Optimizer], list[tuple[str, nn.Parameter]]]


def optimizers_of(trainer: pl.Trainer) -> Optimizers:
    """Return the optimizers of a fit; where they do not exist yet, what the module would make, on a
    fake copy of it.
    """
    module, strategy = trainer.lightning_module, trainer.strategy
    if not strategy.optimizers:
        return make_fake_optimizers(module, device=strategy.root_device)
    return list(strategy.optimizers), list(module.named_parameters())


def make_fake_optimizers(module: pl.LightningModule, *, device: torch.device) -> Optimizers:
    """Return what the module's own `configure_optimizers` makes, run on a fake copy."""
    copied, mode = fake_copy(module, device=device.type)
    with mode:
        optimizers, _, _ = _configure_optimizers(copied.configure_optimizers())  # type: ignore[arg-type]
    # Modules may ask their trainer for the parameters (`self.trainer.model.parameters()`), which
    # are the original ones.
    return optimizers, [*copied.named_parameters(), *module.named_parameters()]

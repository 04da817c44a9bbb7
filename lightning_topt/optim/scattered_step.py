"""All optimizers of a module on gradients that are reduce-scattered: gradient exchange and update
are one (ZeRO 1, fused).

Reduce-scatter, update of the own rows, gather of the parameters: the gather stands in for the
second half of an all-reduce, so sharing the update sends nothing more (Rajbhandari et al., arXiv
1910.02054, section 7.1).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lightning_topt.communication.node.rows import NodeRows
from lightning_topt.optim.full_state import parameters_of
from lightning_topt.optim.parallel_step import ParallelStep, install_parallel_step
from lightning_topt.optim.reduce_scatter import ReduceScatterExchange
from lightning_topt.optim.scattered_gradients import ScatteredGradients
from lightning_topt.optim.update_rule import UpdateRule


class ScatteredStep:
    """Shares the steps of `optimizers`, which update all trained parameters of `ddp`, from its
    third backward pass or so on.

    Made on all ranks before the first backward pass (a collective call); `begin_when_ready` between
    steps. Arguments are as for `ReduceScatterExchange` and `install_parallel_step`; `rules` has the
    `update_rule` of every optimizer.
    """

    def __init__(
        self,
        ddp: DistributedDataParallel,
        *,
        optimizers: Sequence[Optimizer],
        rules: Sequence[UpdateRule],
        timeout_seconds: float,
        gather_dtype: torch.dtype | None = None,
        node: NodeRows | None = None,
    ) -> None:
        by_parameter = [
            o for o, rule in zip(optimizers, rules, strict=True) if rule == "parameters"
        ]
        uncut = [parameter for optimizer in by_parameter for parameter in parameters_of(optimizer)]
        self.optimizers, self.gather_dtype, self.node = list(optimizers), gather_dtype, node
        self.exchange = ReduceScatterExchange(
            ddp, uncut=uncut, timeout_seconds=timeout_seconds, node=node
        )
        self.steps: list[ParallelStep] = []

    def gradients(self, optimizer: Optimizer) -> ScatteredGradients:
        """Return the gradients of one of the optimizers, to clip them or for their norm."""
        return ScatteredGradients(self.exchange, optimizers=[optimizer])

    def begin_when_ready(self) -> bool:
        """Share what comes, once DDP's buckets are final (a collective call then); return whether
        that was now.

        Not inside of a step, whose closure runs the backward pass: state is cut to pieces here.
        """
        if self.steps or not self.exchange.ready:
            return False
        self.exchange.begin(self.optimizers)
        self.steps = [
            install_parallel_step(
                optimizer,
                pieces=self.exchange.pieces_of(optimizer),
                group=self.exchange.group,
                gather_dtype=self.gather_dtype,
                node=self.node,
            )
            for optimizer in self.optimizers
        ]
        return True

    def finish(self) -> None:
        """Collective call: gradients are all-reduced again, every rank has the whole state,
        optimizers are as they were.
        """
        self.exchange.end()
        for step in self.steps:
            step.remove()
        self.steps = []
        dist.barrier(group=self.exchange.group)

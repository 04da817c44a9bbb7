"""Compressed exchanges between replicas of a pipeline that never flushes: each stage's data ranks
exchange its gradients.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from lightning_topt.communication.hook import CompressedExchange
from lightning_topt.communication.topology import Topology
from lightning_topt.execution.pipeline.pipeline_run import PipelineRun
from lightning_topt.execution.pipeline.shared_values import share_value
from lightning_topt.techniques.technique import RunOptions

State = dict[str, dict[str, Any]]


def compress_gradients(run: PipelineRun, options: RunOptions) -> CompressedExchange | None:
    """Let the gradients of each stage be exchanged as the plan says; None where it says nothing. A
    collective call.
    """
    given, mesh, groups = run.plan.gradient_exchange, run.plan.mesh, run.groups
    if given is None:
        return None
    everyone = options.topology or Topology.from_environment(
        rank=dist.get_rank(), world_size=dist.get_world_size()
    )

    def merge(ranks: list[State]) -> list[State]:
        if not groups.saves:
            return []
        found: list[State] = [{} for _ in ranks]
        for place in range(len(groups.pipeline)):
            states = share_value(
                ranks if place == groups.rank else None,
                group=groups.row,
                source=place,
                device=run.device,
            )
            for into, state in zip(found, states, strict=True):
                for kind, tensors in state.items():
                    into.setdefault(kind, {}).update(tensors)
        return found if groups.rank == 0 else []

    exchange = CompressedExchange(
        given,
        topology=everyone.of_part(mesh.groups_along(mesh.data_axes)),
        device=run.device,
        nonfinite=options.nonfinite,
        merge=merge,
    )
    kept = run.updated_parameters()
    ignored = [name for name, parameter in run.module.named_parameters() if parameter not in kept]
    exchange.take_over(run.module, ignored=ignored)
    run.exchanges.instead = exchange.average
    return exchange

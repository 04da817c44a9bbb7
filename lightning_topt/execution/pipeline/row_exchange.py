"""Gradients of rows of pipelines that are exchanged in another way than by averaging them.

    applied = exchange_between_rows(run, options)    # None: gradients are averaged as they are
    applied.exchange                                 # what strategies and checkpoints ask

The ranks that run the same stage, one of each row, form a group, which exchanges a stage's
gradients once it has all of an update.
"""

from __future__ import annotations

import torch.distributed as dist
from torch import nn

from lightning_topt.communication.checkpoint import State
from lightning_topt.communication.hook import CompressedExchange
from lightning_topt.communication.topology import Topology
from lightning_topt.communication.value_exchange import value_of_rank
from lightning_topt.execution.pipeline.pipeline_run import PipelineRun
from lightning_topt.techniques.run_options import RunOptions
from lightning_topt.techniques.technique import Applied


def exchange_between_rows(run: PipelineRun, options: RunOptions) -> Applied | None:
    """Let data ranks exchange the gradients of their stages by the plan's method; None without one.

    A collective call.
    """
    method = run.plan.gradient_exchange
    if method is None:
        return None
    # among the data ranks of each stage: a part of the topology
    everyone = options.topology or Topology.from_environment(
        rank=dist.get_rank(), world_size=dist.get_world_size()
    )
    mesh = run.plan.mesh
    exchange = CompressedExchange(
        method,
        topology=everyone.of_part(mesh.groups_along(mesh.data_axes)),
        device=run.device,
        nonfinite=options.nonfinite,
        merge=lambda ranks: _merged(run, ranks),
    )
    # Parameters that this rank shares with other ranks of the pipeline are summed with these, as
    # they are.
    kept = run.updated_parameters() - run.exchanges.shared
    exchange.take_over(run.module, ignored=_names_of_others(run, kept))
    run.exchanges.instead = exchange.average
    return Applied(undo=lambda: None, exchange=exchange)


def _names_of_others(run: PipelineRun, kept: frozenset[nn.Parameter]) -> list[str]:
    """Return the names of all parameters but those that are `kept`.

    All names: of parameters that are tied, and of the module's own as DDP calls them.
    """
    named = run.module.named_parameters(remove_duplicate=False)
    names = [name for name, parameter in named if parameter not in kept]
    return [*names, *(f".{name}" for name in names if "." not in name)]


def _merged(run: PipelineRun, ranks: list[State]) -> list[State]:
    # Join the states of a pipeline's stages, for each data rank, on rank 0
    groups, found = run.groups, [State() for _ in ranks]
    with groups.at_any_time() as group:
        for place in range(len(groups.pipeline)) if groups.saves else ():
            # Place after place of the pipeline gives the states of its data ranks.
            own = ranks if place == groups.rank else None
            states = value_of_rank(own, group, place=place, device=run.device)
            for into, state in zip(found, states, strict=True):
                for kind, tensors in state.items():
                    into.setdefault(kind, {}).update(tensors)
    return found if groups.saves and groups.rank == 0 else []

"""What rows of pipelines exchange in another way than by averaging gradients as they are.

    applied = exchange_between_rows(run, options)    # None: gradients are averaged as they are
    applied.exchange                                 # what strategies and checkpoints ask

The ranks that run the same stage, one of each row, form a group:

    plan                 what is exchanged                      when
    gradient_exchange    a stage's gradients, compressed        the stage has all of an update
    local_steps          how far its parameters have gone       after so many updates of the stage

[Note: outer steps of stages] Rows that train alone average no gradients. Each stage counts its own
updates, and all stages meet after the same one. In an asynchronous run whoever feeds it drains it
there (`ContinuousRun.drain`): then nothing that is in flight has seen the weights of before. Stages
do not wait for one another, so that they meet one after the other as the drain reaches them.
"""

from __future__ import annotations

import torch.distributed as dist
from torch import nn

from lightning_topt.communication.checkpoint import State
from lightning_topt.communication.exchange_method import GradientMethod, LocalMethod
from lightning_topt.communication.hook import CompressedExchange
from lightning_topt.communication.topology import Topology
from lightning_topt.execution.pipeline.pipeline_run import PipelineRun, share_value
from lightning_topt.plan.parallel_plan import PlanError
from lightning_topt.techniques.run_options import RunOptions
from lightning_topt.techniques.technique import Applied


def exchange_between_rows(run: PipelineRun, options: RunOptions) -> Applied | None:
    """Let data ranks exchange what their stages have by the plan's method. A collective call.

    None where the plan has no such method.

    Raises:
        PlanError: for stages that cannot meet.
    """
    if run.plan.gradient_exchange is not None:
        return _compressed(run, run.plan.gradient_exchange, options)
    if run.plan.local_steps is not None:
        return _training_alone(run, run.plan.local_steps)
    return None


def _compressed(run: PipelineRun, method: GradientMethod, options: RunOptions) -> Applied:
    """Exchange gradients compressed."""
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


def _training_alone(run: PipelineRun, method: LocalMethod) -> Applied:
    """Train rows alone, whose stages meet in outer steps. See [Note: outer steps of stages]."""
    _check_stages(run)
    # importing it takes what only such plans need
    from lightning_topt.communication.local_exchange import LocalExchange  # noqa: PLC0415

    exchange = LocalExchange(
        method,
        run.module,
        ignored=_names_of_others(run, run.updated_parameters()),
        group=run.groups.data_group,
        merge=lambda ranks: _merged(run, ranks),
    )
    run.exchanges.instead = lambda: None  # no gradient is averaged
    if run.lag_per_hop is None:
        return Applied(undo=exchange.leave, attach=exchange.follow, exchange=exchange)
    # After the update with all that a rule of weights does to it; its run follows one optimizer.
    run.after_update = exchange.after_step
    return Applied(undo=exchange.leave, exchange=exchange)


def _check_stages(run: PipelineRun) -> None:
    """Raise PlanError, on all ranks, for stages that cannot meet."""
    trained = {name for name, p in run.module.named_parameters() if p.requires_grad}
    holders = {name: run.layout.holders(name) for name in trained}
    shared = sorted(name for name, ranks in holders.items() if len(ranks) > 1)
    if shared and run.lag_per_hop is None:
        raise PlanError(
            f"local_steps: {shared[0]} is a parameter of several stages, whose outer steps would "
            "differ: choose an asynchronous schedule, in which one stage updates it, or a cut that "
            "leaves it to one stage"
        )
    owners = {ranks[0] for ranks in holders.values() if ranks}
    if idle := sorted(set(run.layout.rank_of_stage) - owners):
        raise PlanError(
            f"local_steps: rank {idle[0]} of the pipeline trains no parameter, so that it has no "
            "outer step: choose another cut into stages"
        )


def _names_of_others(run: PipelineRun, kept: frozenset[nn.Parameter]) -> list[str]:
    """Return the names of all parameters but those that are `kept`.

    All names: of parameters that are tied, and of the module's own as DDP calls them.
    """
    named = run.module.named_parameters(remove_duplicate=False)
    names = [name for name, parameter in named if parameter not in kept]
    return [*names, *(f".{name}" for name in names if "." not in name)]


def _merged(run: PipelineRun, ranks: list[State]) -> list[State]:
    """Join the states of a pipeline's stages, for each data rank, on rank 0."""
    groups, found = run.groups, [State() for _ in ranks]
    with groups.at_any_time() as group:
        for place in range(len(groups.pipeline)) if groups.saves else ():
            # Place after place of the pipeline gives the states of its data ranks.
            own = ranks if place == groups.rank else None
            states = share_value(own, group=group, source=place, device=run.device)
            for into, state in zip(found, states, strict=True):
                for kind, tensors in state.items():
                    into.setdefault(kind, {}).update(tensors)
    return found if groups.saves and groups.rank == 0 else []

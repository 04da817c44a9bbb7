"""A run gets one plan: given or searched, on rank 0, and the same on every rank or an error on
every rank.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch.distributed as dist
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

from lightning_topt.communication.rank_watch import is_of_collective
from lightning_topt.execution.plan_problems import check_world_size
from lightning_topt.graph.blocks import block_of
from lightning_topt.graph.errors import may_need_values, one_line
from lightning_topt.graph.mesh_axes import data_mesh
from lightning_topt.graph.op_graph import OpGraph, model_fingerprint
from lightning_topt.plan.parallel_plan import ParallelPlan, PlanError, preset_plan, uniform_plan
from lightning_topt.plan.pipeline_search import StaleWeights
from lightning_topt.plan.plan_search import local_graphs
from lightning_topt.plan.plan_values import PRESETS
from lightning_topt.plugins.allowed_exchanges import check_exchange_of_run
from lightning_topt.plugins.allowed_staleness import check_flight, why_not_continuous, with_rule
from lightning_topt.plugins.batch_parts import count_samples
from lightning_topt.plugins.given_plans import MeshPlan, PipelinePlan, UniformPlan
from lightning_topt.plugins.own_batches import why_no_members, why_no_pipeline, why_no_turns
from lightning_topt.plugins.pipeline_plan import (
    choose_pipeline,
    microbatch_of,
    pipeline_request,
    with_blocks_for,
)
from lightning_topt.plugins.plan_request import PlanRequest
from lightning_topt.plugins.planning import Planning, optimizers_of
from lightning_topt.plugins.planning_ranks import on_every_rank, on_rank_0
from lightning_topt.plugins.searched_plan import (
    capture_on_ranks,
    choose_for,
    needs_whole_parameters,
    read_costs,
    say,
    say_what_stays,
    search_mesh,
    search_request,
    split_model,
)
from lightning_topt.plugins.tensor_look import search_default
from lightning_topt.schedules.schedules import CONTINUOUS_SCHEDULES
from lightning_topt.techniques.tensor_parallel.function_trace import FunctionTrace

Decision = tuple[ParallelPlan, Planning | None, str]
UNTIL_WATCHED = "ddp until a plan is made of its first steps"


def decide_plan(request: PlanRequest, trainer: pl.Trainer, batch: Any) -> Decision:
    """Return the plan for this fit, equal on every rank, what was searched (on rank 0), and where
    the plan comes from.

    A collective call. `batch` is the one that will be trained on; it is only looked at. Optimizers
    that the strategy has set up are read; without any, the module's own are made on a fake copy. A
    step that fake tensors cannot follow is to be watched, under plain DDP (`UNTIL_WATCHED`), or
    with the whole module as the one block of the uniform plan that was given. What cannot be
    planned runs as ``ddp`` does, with a warning, unless the request insists.
    """
    module = trainer.lightning_module
    world_size = dist.get_world_size()
    plain = uniform_plan(0, data_parallel_size=world_size)
    if request.stale.allowed and request.plan is None:
        raise ValueError(
            "allow_staleness is for pipelines whose ranks get the same batches, and without a plan "
            "each rank has its own, as "
            'under ddp: give a mesh, plan={"mesh": {"pipeline": 2}}, or use '
            'PipelineStrategy(schedule="continuous")'
        )
    if not module.automatic_optimization:
        _check_manual(request, plain)
        return plain, None, "ddp: manual optimization"
    given = request.plan
    mesh = data_mesh(world_size)
    if isinstance(given, PipelinePlan):
        _say_traced()
        return _pipeline(request, trainer, batch, given), None, "given"
    if isinstance(given, MeshPlan):
        _say_traced()
        return *search_mesh(request, trainer, batch, given), "given"
    if isinstance(given, UniformPlan):
        mesh = given.mesh(world_size, num_nodes=trainer.num_nodes)
        is_known = not request.needs_batch(module) or request.refines(
            module, trainer.strategy.root_device
        )
        given = preset_plan(given.preset, mesh=mesh) if is_known else given
    if isinstance(given, ParallelPlan):
        check_world_size(given, world_size)
        _check_model(given, module)
        return _given(given, request, trainer), None, "given"
    _say_traced()
    try:
        try:
            graph = capture_on_ranks(trainer, batch)
        except Exception as error:
            if not may_need_values(error) or not request.may_begin_whole(
                module, trainer.strategy.root_device
            ):
                raise
            rank_zero_warn(
                "topt: this step cannot be followed before it runs, so that the plan is made of "
                "the first real steps, in which parameters and gradients are whole and may take "
                f"more than memory_limit. The reason: {one_line(error)}"
            )
            if isinstance(given, UniformPlan):
                return preset_plan(given.preset, mesh=mesh), None, "given"
            return plain, None, UNTIL_WATCHED
        if isinstance(given, UniformPlan):
            plan = given.of(graph, mesh)
            on_every_rank(lambda: _check_features(plan, request, trainer, graph))
            if given.recompute:
                say_what_stays(graph)
            return plan, None, "given"
        return *search_default(request, trainer, batch, graph), "search"
    except Exception as error:
        if request.insists or is_of_collective(error):
            raise
        reason = one_line(error)
        rank_zero_warn(
            "topt: this training step cannot be planned, so it runs as strategy='ddp' does: "
            f"nothing is lost but what a plan could have saved. The reason: {reason}"
        )
        return plain, None, f"ddp: {reason}"


def _say_traced() -> None:
    rank_zero_info(
        "topt: this plan is made before the first step, for which training_step runs some more "
        "times, on copies without memory. Code in it that counts, writes files or takes from an "
        "iterator may notice; a search without memory_limit, and plans on data axes by name, watch "
        "real steps instead (docs/auto_parallel.md)"
    )


def _given(plan: ParallelPlan, request: PlanRequest, trainer: pl.Trainer) -> ParallelPlan:
    on_every_rank(lambda: _check_features(plan, request, trainer))
    if plan.schedule not in CONTINUOUS_SCHEDULES:
        return plan
    return ParallelPlan.from_dict(
        on_rank_0(lambda: with_rule(plan, optimizers_of(trainer)[0], request.stale).to_dict())
    )


def _pipeline(
    request: PlanRequest, trainer: pl.Trainer, batch: Any, given: PipelinePlan
) -> ParallelPlan:
    """A plan with stages for the captured microbatch, which rank 0 searches. A collective call."""
    ranks = dist.get_world_size()
    mesh = on_every_rank(lambda: given.mesh(ranks, num_nodes=trainer.num_nodes))
    part, count = on_every_rank(lambda: microbatch_of(batch, given, mesh))
    samples = count_samples(batch)
    if samples < count:
        rank_zero_warn(
            f"topt: {count} microbatches were asked for, and the first batch of a rank has "
            f"{samples} sample(s): batches run in as many microbatches as they have samples"
        )
    scales = given.sizes is not None and given.microbatches is None and samples > 1
    trace = FunctionTrace() if mesh.tensor_axes else None
    graph = with_blocks_for(
        capture_on_ranks(trainer, part, trace=trace, scales=scales, may_run=True), given, mesh
    )
    costs = read_costs(request, trainer, graph)
    search = search_request(request, trainer, graph, costs)
    search = pipeline_request(given, mesh, search, count=count, samples=samples)
    search = replace(search, stale=on_every_rank(lambda: _stale_weights(request, trainer, given)))
    if trace is not None:
        search = replace(search, split=split_model(trainer, part, graph, trace))
        kernels = costs.measured(on_rank_0(lambda: local_graphs(search)))
        search = replace(search, kernel_seconds={**costs.kernel_seconds, **kernels})
    choose = partial(choose_for, request, cluster=search.cluster)
    found = on_rank_0(lambda: choose_pipeline(given, mesh, search, choose=choose).to_dict())
    plan = ParallelPlan.from_dict(found)
    on_every_rank(lambda: _check_features(plan, request, trainer, graph))
    say(plan)
    if given.recompute:
        say_what_stays(graph)
    return plan


def _stale_weights(
    request: PlanRequest, trainer: pl.Trainer, given: PipelinePlan
) -> StaleWeights | None:
    """The rule and lags of pipelines that never flush which a search for `given` may choose."""
    if not request.stale.allowed:
        return None
    if given.schedule is None and why_not_continuous(trainer):
        return None
    (optimizer,), _ = optimizers_of(trainer)
    return replace(request.stale, prediction=given.prediction or request.stale.prediction).weights(
        optimizer
    )


def _check_features(
    plan: ParallelPlan, request: PlanRequest, trainer: pl.Trainer, graph: OpGraph | None = None
) -> None:
    """Raise PlanError where something in this fit does not go together with `plan`, as far as that
    is seen before it runs.
    """
    levels = {block.block: block.config.storage.sharded_axes("gradients") for block in plan.blocks}
    split = {
        f"{b.block}.{name}".lstrip(".") for b in plan.blocks for name, _ in b.config.parameters
    }

    if plan.schedule is not None and (reason := why_no_pipeline(trainer)):
        raise PlanError(f"this plan is a pipeline, but {reason}; choose a plan without stages")
    if plan.schedule in CONTINUOUS_SCHEDULES and (reason := why_not_continuous(trainer)):
        raise PlanError(
            f"this plan's stages never wait for an update, but {reason}; choose another schedule"
        )
    if plan.schedule in CONTINUOUS_SCHEDULES:
        check_flight(plan, trainer)
    if plan.own_batches and (reason := why_no_members(trainer)):
        raise PlanError(
            f"under this plan ranks run the batches of one another, but {reason}; leave out "
            "own_batches, or choose a plan without stages"
        )

    def would_shard(parameter: str) -> bool:
        return bool(levels[block_of(parameter, levels)]) or parameter in split

    shards = not plan.keeps_gradients_whole
    if shards and (
        reason := needs_whole_parameters(request, trainer, graph, would_shard=would_shard)
    ):
        way_out = "choose a plan without tensor axes" if split else "choose ZeRO level 0 or 1"
        if plan.schedule is not None:
            raise PlanError(
                f"this plan keeps only a stage's parameters on a rank, but {reason}; choose a plan "
                "without stages"
            )
        raise PlanError(f"this plan shards parameters, but {reason}; {way_out}")
    if plan.brings_batches and plan.schedule is None and (reason := why_no_turns(trainer)):
        raise PlanError(
            f"under this plan ranks run the batches of one another, but {reason}; leave out "
            "num_microbatches and joint, or choose a plan without tensor axes"
        )
    check_exchange_of_run(plan, trainer)


def _check_model(plan: ParallelPlan, module: pl.LightningModule) -> None:
    name = type(module).__name__
    parameters = [
        (n, tuple(p.shape), str(p.dtype).removeprefix("torch."))
        for n, p in module.named_parameters()
    ]
    if plan.fingerprint is not None and plan.fingerprint != model_fingerprint(name, parameters):
        raise PlanError(
            f"the plan was made for another model ({plan.model or 'of another kind'}): class name, "
            f"parameter names, shapes or dtypes of this {name} differ. Make a new plan, or remove "
            "'fingerprint' from the plan to run it all the same"
        )


def _check_manual(request: PlanRequest, plain: ParallelPlan) -> None:
    if request.plan not in (None, plain, UniformPlan(PRESETS["ddp"])):
        raise PlanError(
            "manual optimization runs under the plan 'ddp' only: its steps cannot be seen in "
            "advance"
        )
    if request.memory_limit is not None or request.objective != "time":
        raise ValueError(
            "manual optimization cannot be planned (its steps cannot be seen in advance), so "
            "memory_limit and objective='memory' cannot be honoured; remove them, or use automatic "
            "optimization"
        )
    if request.allowed.candidates:
        raise ValueError(
            "manual optimization is not planned, so allow_compression chooses nothing; remove it, "
            "or use "
            'strategy="topt_compressed"'
        )

"""One plan before the first step: given, or searched with a step traced on fake tensors.

`decide_plan` is called by all ranks and returns the same plan on each, or raises on each. Rank 0
captures and searches; all ranks measure.

    manual optimization      ddp
    a complete plan          checked, and run as it is
    a plan by name           for the module as one block, until a watched step shows the others;
                             or for the blocks of the captured step, where an unsharded one might
                             not fit (`PlanRequest.begins_as_one_block`)
    a mesh, stages           searched on that mesh (`search_mesh`, `_pipeline`)
    no plan                  searched (`default_search`), where DDP might break the memory limit (on
                             accelerators: any), or need more than the device has
                             (`PlanRequest.may_shard_for_memory`)

Every other fit without a plan is planned from its first real steps: see `watched_planning`. Which
fit is planned when is the table in `plan_request`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch.distributed as dist
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

from lightning_topt.communication.rank_watch import is_of_collective
from lightning_topt.execution.plan_problems import check_world_size
from lightning_topt.graph.blocks import block_of, choose_blocks
from lightning_topt.graph.errors import may_need_values, one_line
from lightning_topt.graph.mesh_axes import Mesh, data_mesh
from lightning_topt.graph.op_graph import OpGraph, model_fingerprint
from lightning_topt.plan.explanation import price_plan
from lightning_topt.plan.parallel_plan import (
    BlockPlan,
    ParallelPlan,
    PlanError,
    StagePlan,
    preset_plan,
    uniform_plan,
)
from lightning_topt.plan.pipeline_search import PipelineRequest, StaleWeights
from lightning_topt.plan.plan_frontier import PlanFrontier, PlanPoint
from lightning_topt.plan.plan_search import SearchRequest, local_graphs, search_plans
from lightning_topt.plan.plan_values import PRESETS
from lightning_topt.plugins.default_search import search_default
from lightning_topt.plugins.microbatches import count_samples, split_batch
from lightning_topt.plugins.plan_options import MeshPlan, PipelinePlan, UniformPlan
from lightning_topt.plugins.plan_request import (
    PlanRequest,
    check_exchange_of_run,
    check_flight,
    check_gathers_of_run,
    rule_for,
    say_if_not_measured,
    with_rule,
)
from lightning_topt.plugins.planning import (
    UNTIL_WATCHED,
    PlanDecision,
    on_every_rank,
    on_rank_0,
    optimizers_of,
)
from lightning_topt.plugins.requirements import (
    CONTINUOUS,
    OWN_BATCHES,
    SEQUENTIAL,
    SHARDED,
    SLICES,
    STAGES,
    Fit,
    is_compiled,
    why_not,
)
from lightning_topt.plugins.searched_plan import (
    capture_on_ranks,
    choose_for,
    read_costs,
    say,
    say_what_stays,
    search_mesh,
    search_request,
    split_model,
)
from lightning_topt.schedules.schedules import CONTINUOUS_SCHEDULES
from lightning_topt.techniques.tensor_parallel.function_trace import FunctionTrace

_EAGER = "Predicted as eager: the module is compiled, and what runs inside is not seen."
MICROBATCHES_PER_RANK = 4  # at most; the bubble of 1F1B is then a fifth of the step, or less


def decide_plan(request: PlanRequest, trainer: pl.Trainer, batch: Any) -> PlanDecision:
    """Return the plan for this fit, what was searched, and where the plan comes from.

    The plan is equal on every rank; rank 0 has what was searched. A collective call. `batch` is the
    one that will be trained on; it is only read. Optimizers that the strategy has set up are read;
    without any, the module's own are made on a fake copy. A step that fake tensors cannot follow is
    to be watched. It runs under plain DDP (`UNTIL_WATCHED`), or under the uniform plan that was
    given, with the module as its one block. What cannot be planned runs as ``ddp`` does, with a
    warning, unless it `must_be_planned`.
    """
    # What can be said without a look at the step.
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
        return PlanDecision(plain, None, "ddp: manual optimization")
    given = request.plan
    mesh = data_mesh(world_size)
    if isinstance(given, PipelinePlan):
        _say_traced()
        return _of_eager_step(_pipeline(request, trainer, batch, given), module)
    if isinstance(given, MeshPlan):
        _say_traced()
        return _of_eager_step(search_mesh(request, trainer, batch, given), module)
    # Where blocks do not matter, or come with the first step, no batch is needed.
    if isinstance(given, UniformPlan):
        mesh = given.mesh(world_size, num_nodes=trainer.num_nodes)
        is_known = not request.needs_batch(module) or request.begins_as_one_block(
            module, trainer.strategy.root_device
        )
        given = preset_plan(given.preset, mesh=mesh) if is_known else given
    if isinstance(given, ParallelPlan):
        check_world_size(given, world_size)
        _check_model(given, module)
        return PlanDecision(_given(given, request, trainer), None, "given")
    _say_traced()
    try:
        try:
            # The step on fake tensors, on rank 0.
            graph = capture_on_ranks(trainer, batch)
        except Exception as error:
            # A step that depends on values is watched instead, if it fits unsharded.
            if not may_need_values(error) or not request.unsharded_step_fits(
                module, trainer.strategy.root_device
            ):
                raise
            rank_zero_warn(
                "topt: this step cannot be followed before it runs, so that the plan is made of "
                "the first real steps, in which parameters and gradients are whole and may take "
                f"more than memory_limit. The reason: {one_line(error)}"
            )
            if isinstance(given, UniformPlan):
                return PlanDecision(preset_plan(given.preset, mesh=mesh), None, "given")
            return PlanDecision(plain, None, UNTIL_WATCHED)
        if isinstance(given, UniformPlan):
            plan = given.of(graph, mesh)
            on_every_rank(lambda: _check_features(plan, request, trainer, graph))
            if given.recompute:
                say_what_stays(graph)
            return PlanDecision(plan, None, "given")
        return _of_eager_step(search_default(request, trainer, batch, graph), module)
    except Exception as error:
        # A lost rank is no reason to go on as DDP: nobody would answer.
        if request.must_be_planned or is_of_collective(error):
            raise
        reason = one_line(error)
        rank_zero_warn(
            "topt: this training step cannot be planned, so it runs as strategy='ddp' does: "
            f"nothing is lost but what a plan could have saved. The reason: {reason}"
        )
        return PlanDecision(plain, None, f"ddp: {reason}")


def _of_eager_step(decision: PlanDecision, module: pl.LightningModule) -> PlanDecision:
    """Return the decision; a plan for a compiled module says that its prediction is of eager code.

    Captures run without compilation, and no real step was timed.
    """
    plan = decision.plan
    if plan.predicted is None or not any(map(is_compiled, module.modules())):
        return decision
    rank_zero_info(f"topt: {_EAGER}")
    plan, planning = replace(plan, reason=f"{plan.reason} {_EAGER}".strip()), decision.planning
    if planning is not None:
        planning = replace(planning, chosen=replace(planning.chosen, plan=plan))
    return decision._replace(plan=plan, planning=planning)


def _say_traced() -> None:
    rank_zero_info(
        "topt: this plan is made before the first step, for which training_step runs some more "
        "times, on copies without memory. Code in it that counts, writes files or takes from an "
        "iterator may notice; plans on data axes by name, and a search where DDP is sure to fit, "
        "watch real steps instead (docs/concepts/first_steps.md)"
    )


def _given(plan: ParallelPlan, request: PlanRequest, trainer: pl.Trainer) -> ParallelPlan:
    on_every_rank(lambda: _check_features(plan, request, trainer))
    if plan.schedule not in CONTINUOUS_SCHEDULES:
        return plan

    def complete() -> dict[str, Any]:
        optimizers, _ = optimizers_of(trainer)
        each = trainer.accumulate_grad_batches
        found = with_rule(plan, optimizers, request.stale, accumulate=each)
        if plan.weight_prediction is None and request.stale.prediction is None:
            say_if_not_measured(found, optimizers[0], trainer)
        return found.to_dict()

    return ParallelPlan.from_dict(on_rank_0(complete))


def _check_features(
    plan: ParallelPlan, request: PlanRequest, trainer: pl.Trainer, graph: OpGraph | None = None
) -> None:
    """Raise PlanError where something in this fit does not go together with `plan`.

    That is what can be seen before it runs.
    """
    # Which parameters the plan shards, and which it splits.
    levels = {block.block: block.config.storage.sharded_axes("gradients") for block in plan.blocks}
    split = {
        f"{b.block}.{name}".lstrip(".") for b in plan.blocks for name, _ in b.config.parameters
    }

    def would_shard(parameter: str) -> bool:
        return bool(levels[block_of(parameter, levels)]) or parameter in split

    fit = Fit(trainer, None, graph, request.only_replicated, would_shard)
    # Stages.
    if plan.schedule is not None and (reason := why_not(fit, STAGES)):
        raise PlanError(f"this plan is a pipeline, but {reason}; choose a plan without stages")
    if plan.schedule in CONTINUOUS_SCHEDULES and (reason := why_not(fit, CONTINUOUS)):
        raise PlanError(
            f"this plan's stages never wait for an update, but {reason}; choose another schedule"
        )
    if plan.schedule in CONTINUOUS_SCHEDULES:
        check_flight(plan, trainer)
    # A batch from each rank of a pipeline.
    if plan.own_batches and (reason := why_not(fit, OWN_BATCHES)):
        raise PlanError(
            f"under this plan ranks run the batches of one another, but {reason}; leave out "
            "own_batches, or choose a plan without stages"
        )

    # Sharded parameters and gradients.
    shards = not plan.keeps_gradients_whole
    kinds = (SHARDED, SLICES) if split else (SHARDED,)
    if shards and (reason := why_not(fit, *kinds)):
        way_out = "choose a plan without tensor axes" if split else "choose ZeRO level 0 or 1"
        if plan.schedule is not None:
            raise PlanError(
                f"this plan keeps only a stage's parameters on a rank, but {reason}; choose a plan "
                "without stages"
            )
        raise PlanError(f"this plan shards parameters, but {reason}; {way_out}")
    if plan.brings_batches and plan.schedule is None and (reason := why_not(fit, SEQUENTIAL)):
        raise PlanError(
            f"under this plan ranks run the batches of one another, but {reason}; leave out "
            "num_microbatches, or choose a plan without tensor axes"
        )
    check_exchange_of_run(plan, trainer, request)
    check_gathers_of_run(plan, trainer)


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
    if request.allowed.candidates or request.allowed.local_steps:
        raise ValueError(
            "manual optimization is not planned, so allow_compression chooses nothing; remove it, "
            "or use "
            'strategy="topt_compressed"'
        )


# ---- stages --------------------------------------------------------------------------------------


def _pipeline(
    request: PlanRequest, trainer: pl.Trainer, batch: Any, given: PipelinePlan
) -> PlanDecision:
    """Return a plan with stages for the captured microbatch, which rank 0 searches.

    A collective call.
    """
    # The mesh, and the batch that one pass of a stage has.
    ranks = dist.get_world_size()
    mesh = on_every_rank(lambda: given.mesh(ranks, num_nodes=trainer.num_nodes))
    part, count = on_every_rank(lambda: microbatch_of(batch, given, mesh))
    # Batches of fewer samples have fewer microbatches.
    samples = count_samples(batch)
    if samples < count:
        rank_zero_warn(
            f"topt: {count} microbatches were asked for, and the first batch of a rank has "
            f"{samples} sample(s): batches run in as many microbatches as they have samples"
        )
    # For other numbers of microbatches the graph has to know other batch sizes.
    scales = given.sizes is not None and given.microbatches is None and samples > 1
    # With tensor axes, the step's torch functions say how it can be split.
    trace = FunctionTrace() if mesh.tensor_axes else None
    graph = with_blocks_for(
        capture_on_ranks(trainer, part, trace=trace, scales=scales, may_run=True), given, mesh
    )
    # The search: on rank 0, with kernels that all ranks measure.
    costs = read_costs(request, trainer, graph)
    search = search_request(request, trainer, graph, costs)
    search = pipeline_request(given, mesh, search, count=count, samples=samples)
    search = replace(search, stale=on_every_rank(lambda: _stale_weights(request, trainer, given)))
    # Kernels on slices of tensors, which the whole step does not have.
    if trace is not None:
        search = replace(search, split=split_model(trainer, part, graph, trace))
        kernels = costs.measured(on_rank_0(lambda: local_graphs(search)))
        search = replace(search, kernel_seconds={**costs.kernel_seconds, **kernels})
    choose = partial(
        choose_for, request, cluster=search.cluster, trainer=trainer, optimizer=search.optimizer
    )
    found = on_rank_0(lambda: choose_pipeline(given, mesh, search, choose=choose).to_dict())
    plan = ParallelPlan.from_dict(found)
    on_every_rank(lambda: _check_features(plan, request, trainer, graph))
    say(plan)
    named = given.prediction or request.stale.prediction
    if plan.schedule in CONTINUOUS_SCHEDULES and named is None:
        say_if_not_measured(plan, optimizers_of(trainer)[0][0], trainer)
    if given.recompute:
        say_what_stays(graph)
    return PlanDecision(plan, None, "given", costs.measurements)


def _stale_weights(
    request: PlanRequest, trainer: pl.Trainer, given: PipelinePlan
) -> StaleWeights | None:
    """Return what a search for `given` may choose of continuous pipelines."""
    if not request.stale.allowed:
        return None
    if given.schedule is None and why_not(Fit(trainer), CONTINUOUS):
        return None
    (optimizer,), _ = optimizers_of(trainer)
    rule = partial(
        rule_for,
        optimizer,
        given.prediction or request.stale.prediction,
        accumulate=trainer.accumulate_grad_batches,
    )
    rule()  # one that does not know the optimizer is refused before the search
    return StaleWeights(lambda flight: rule(flight=flight), trainer.accumulate_grad_batches)


def microbatch_of(batch: Any, given: PipelinePlan, mesh: Mesh) -> tuple[Any, int]:
    """Return the first microbatch of `batch`, and how many a batch is to have.

    Raises ValueError as `split_batch`.
    """
    if given.schedule in CONTINUOUS_SCHEDULES:
        return batch, 1
    count = given.microbatches or choose_microbatches(count_samples(batch), mesh.pipeline_size)
    return split_batch(batch, count).batches[0], count


def pipeline_request(
    given: PipelinePlan, mesh: Mesh, search: SearchRequest, *, count: int, samples: int
) -> SearchRequest:
    """Return what to search for `count` microbatches like the captured one.

    Where the graph is known for other sizes too: for any number that divides a batch of `samples`.
    `search` has the graph of one microbatch, with blocks for the stages.
    """
    # Free: the search may choose how many microbatches there are.
    is_free = search.graph.batch_scaling and given.microbatches is None
    return replace(
        search,
        global_batch_size=(samples if is_free else search.graph.batch_size * count)
        * mesh.data_parallel_size,
        pipelines=pipelines_on(mesh, given, microbatches=None if is_free else count),
        exchanges=() if given.gradient_exchange is None else (given.gradient_exchange,),
        local_steps=() if given.local_steps is None else (given.local_steps,),
    )


def pipelines_on(mesh: Mesh, given: PipelinePlan, *, microbatches: int | None) -> PipelineRequest:
    """Return the pipelines to search for on the mesh of `given`."""
    stages = given.stages if given.sizes is not None else mesh.pipeline_size * given.per_rank
    return PipelineRequest(
        stages,
        given.schedule,
        microbatches,
        ranks=mesh.pipeline_size,
        tensor=mesh.ranks_along(mesh.tensor_axes),
        by_exchange=given.exchange is not None,
    )


def choose_pipeline(
    given: PipelinePlan,
    mesh: Mesh,
    search: SearchRequest,
    *,
    choose: Callable[[PlanFrontier], PlanPoint],
) -> ParallelPlan:
    """Return the plan that `choose` takes of those of a `pipeline_request`.

    Raises PlanError where there are fewer blocks than stages, NoPlanFitsError.
    """
    num_stages, graph = mesh.pipeline_size * given.per_rank, search.graph
    # Blocks in the order of their first operator.
    names = [*dict.fromkeys(op.block for op in graph.ops if op.block)]
    if len(names) < num_stages:
        raise PlanError(
            f"{graph.model} has {len(names)} block(s) that can be stages of a pipeline "
            f"({', '.join(names) or 'none'}), and {num_stages} stages are wanted: choose fewer "
            "stages, or let the model consist of more submodules that are called one after the "
            "other"
        )
    found = search_plans(search)
    if given.recompute:
        # Compared as they will run: limits are for plans that recompute.
        again = [_recomputed(point, search) for point in found.candidates]
        found = replace(found, points=tuple(again), uniform=())
    return choose(found).plan


def _recomputed(point: PlanPoint, search: SearchRequest) -> PlanPoint:
    """Return the plan of `point` with all blocks recomputed that can be, and what it takes."""
    again = {block.name for block in search.graph.blocks if block.recomputable}

    def with_it(block: BlockPlan) -> BlockPlan:
        config = replace(block.config, recompute=block.config.recompute or block.block in again)
        return replace(block, config=config)

    stages = tuple(StagePlan(tuple(map(with_it, stage.blocks))) for stage in point.plan.stages)
    priced = price_plan(search, replace(point.plan, stages=stages))
    predicted = priced.predicted
    return PlanPoint(predicted.step_seconds, predicted.peak_bytes, point.devices, priced.plan)


def with_blocks_for(graph: OpGraph, given: PipelinePlan, mesh: Mesh) -> OpGraph:
    """Return `graph` with blocks enough for the stages.

    They are smaller modules where too few are of the size worth a decision.
    """
    count = mesh.pipeline_size * given.per_rank
    if len(graph.blocks) > count:
        return graph
    # Two blocks per stage at least, so that cuts can balance.
    finer = choose_blocks(graph, min_parameter_share=0.0, min_kept_share=0.0, max_share=0.5 / count)
    return graph.with_blocks(finer) if len(finer) > len(graph.blocks) else graph


def choose_microbatches(samples: int, ranks: int) -> int:
    """Return into how many parts a batch of `samples` is split for `ranks` stages at once.

    A multiple of the ranks, up to four times as many, that divides the batch if there is one.
    """
    multiples = [
        ranks * times for times in range(MICROBATCHES_PER_RANK, 0, -1) if ranks * times <= samples
    ]
    # Even parts have equal shapes, and no stage waits for a larger one.
    even = [count for count in multiples if samples % count == 0]
    return (even or multiples or [samples])[0]

"""The plan of a fit that asks for one: given, or made of a step that is traced at setup.

`decide_plan` is called by all ranks and returns the same plan on each, or raises on each.

    manual optimization      a plan that is given and keeps gradients whole: ddp, zero1
    a complete plan          checked, and run as it is
    a plan by name           for the blocks of the traced step, where these matter
    a mesh, stages           searched on that mesh (`search_mesh`, `_pipeline`)
    anything else            all plans are searched (`search_all`)

The step is traced, and plans are searched, in a copy of rank 0's process (`ForkedTalk`). There user
code may do what it likes. The copy asks for what all ranks have to measure (`answer`). On
accelerators, whose work no copy can do, the same runs in rank 0's process.
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import lightning.pytorch as pl
import torch.distributed as dist
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

from lightning_topt.basics.forked_call import ForkedCall, ForkedTalk, Said
from lightning_topt.communication.rank_watch import is_of_collective
from lightning_topt.costs.compute import KernelKey
from lightning_topt.costs.measurements import Measurements
from lightning_topt.costs.optimizer import UpdateTime, time_updates
from lightning_topt.execution.plan_checks import check_world_size
from lightning_topt.graph.blocks import block_of, choose_blocks
from lightning_topt.graph.errors import CaptureError, one_line, with_user_lines
from lightning_topt.graph.mesh_axes import Mesh
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
from lightning_topt.plugins.microbatches import count_samples, split_batch
from lightning_topt.plugins.plan_options import MeshPlan, PipelinePlan, UniformPlan
from lightning_topt.plugins.plan_request import (
    PlanRequest,
    check_exchange_of_run,
    check_flight,
    rule_for,
    with_rule,
)
from lightning_topt.plugins.planning import (
    PlanDecision,
    Planning,
    example_batch,
    make_fake_optimizers,
    on_every_rank,
    on_rank_0,
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
    NeedsCosts,
    NeedsKernels,
    Questions,
    RankCosts,
    TracedStep,
    choose_for,
    read_costs,
    say,
    say_what_stays,
    search_all,
    search_mesh,
    search_request,
)
from lightning_topt.schedules.schedules import CONTINUOUS_SCHEDULES

_EAGER = "Predicted as eager: the module is compiled, and what runs inside is not seen."
_PATIENCE_SECONDS = 300.0  # with a step that is traced, and a search, between two questions
MICROBATCHES_PER_RANK = 4  # at most; the bubble of 1F1B is then a fifth of the step, or less
T = TypeVar("T")


def decide_plan(request: PlanRequest, trainer: pl.Trainer) -> PlanDecision:
    """Return the plan for this fit, what was searched, and where the plan comes from.

    The plan is equal on every rank; rank 0 has what was searched. A collective call, before there
    are optimizers. What cannot be planned runs as ``ddp`` does, with a warning, unless it
    `must_be_planned`.
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
    given = request.plan
    is_unseen = any(map(is_compiled, module.modules()))
    if isinstance(given, UniformPlan) and is_unseen and not given.recompute:
        rank_zero_warn(
            "topt: what runs inside of compiled code is not seen, so the plan stores the whole "
            "module as one block"
        )
    if isinstance(given, UniformPlan) and (
        not request.is_by_block or (is_unseen and not given.recompute)
    ):
        given = preset_plan(given.preset, mesh=given.mesh(world_size, num_nodes=trainer.num_nodes))
    if not module.automatic_optimization:
        _check_manual(request, given)
        if given is None:
            return PlanDecision(plain, None, "ddp: manual optimization")
    if isinstance(given, ParallelPlan):
        check_world_size(given, world_size)
        _check_model(given, module)
        return PlanDecision(_given(given, request, trainer), None, "given")
    # On every rank, before anything is traced.
    on_every_rank(lambda: _check_given(given, request, trainer))
    try:
        decision = _traced(request, trainer)
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
    return decision._replace(plan=_with_rule_checked(decision.plan, request, trainer))


# ---- a traced step -------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Found:
    """What a copy of rank 0's process has made: a plan, and what was searched for it."""

    plan: ParallelPlan
    planning: Planning | None = None
    messages: tuple[tuple[int, str], ...] = ()  # levels of logging, and what to say


def _traced(request: PlanRequest, trainer: pl.Trainer) -> PlanDecision:
    # The plan that is made of a traced step. A collective call.
    talk: ForkedTalk | _TalkHere | None = None
    planning: Planning | None = None
    measurements: Measurements | None = None
    answer: Any = None

    def next_question() -> Any:
        nonlocal talk, planning
        if talk is None:
            batch = example_batch(trainer)
            begins = ForkedTalk if runs_in_copies(trainer) else _TalkHere
            talk = begins(partial(_plan_of, request, trainer, batch), isolated=True)
        said = talk.next(answer, timeout_seconds=_PATIENCE_SECONDS)
        if not said.is_over:
            return said.value
        found: _Found = said.value
        planning = found.planning
        for level, text in found.messages:
            (rank_zero_warn if level >= logging.WARNING else rank_zero_info)(text)
        return found.plan.to_dict()

    # Rank 0 asks until it has a plan; all ranks measure what it asks for.
    try:
        while not isinstance(said := on_rank_0(next_question), dict):
            measurements = measurements or _open_measurements(request, trainer)
            answer = _answer(said, request, trainer, measurements)
    finally:
        if talk is not None:
            talk.kill()
    plan = ParallelPlan.from_dict(said)
    decided_by = "search" if request.plan is None else "given"
    if planning is not None or isinstance(request.plan, MeshPlan | PipelinePlan):
        say(plan)
    return PlanDecision(plan, planning, decided_by)


def _plan_of(request: PlanRequest, trainer: pl.Trainer, batch: Any) -> Questions[_Found]:
    # Make the plan of rank 0's step on `batch`; runs in a copy of its process
    given = request.plan
    with with_user_lines(), _messages() as messages:
        if isinstance(given, UniformPlan):
            mesh = given.mesh(dist.get_world_size(), num_nodes=trainer.num_nodes)
            found = _Found(_of_blocks(given, mesh, request, trainer, batch))
        elif isinstance(given, PipelinePlan):
            found = _Found((yield from _pipeline(request, trainer, batch, given)))
        else:
            search = (
                search_mesh(request, trainer, batch, given)
                if isinstance(given, MeshPlan)
                else search_all(request, trainer, batch)
            )
            planning = yield from search
            found = _Found(planning.chosen.plan, planning)
    return replace(_as_eager(found, trainer.lightning_module), messages=tuple(messages))


def _of_blocks(
    given: UniformPlan, mesh: Mesh, request: PlanRequest, trainer: pl.Trainer, batch: Any
) -> ParallelPlan:
    # A plan by name for the blocks of the step, or for one block where none are seen
    try:
        step = TracedStep.of(trainer, batch, splits=False)
    except CaptureError as error:
        if given.recompute:
            raise CaptureError(
                f"{error} Or leave '+recompute' out of the plan, whose blocks have to be seen."
            ) from error
        rank_zero_warn(
            "topt: the blocks were not seen, so the plan stores the whole module as one: "
            f"{one_line(error)}"
        )
        return preset_plan(given.preset, mesh=mesh)
    plan = given.of(step.graph, mesh)
    _check_features(plan, request, trainer, step)
    if given.recompute:
        say_what_stays(step.graph)
    return plan


def _as_eager(found: _Found, module: pl.LightningModule) -> _Found:
    # Say in the reason of a plan for a compiled module that its prediction is of eager code
    plan, planning = found.plan, found.planning
    if plan.predicted is None or not any(map(is_compiled, module.modules())):
        return found
    plan = replace(plan, reason=f"{plan.reason} {_EAGER}".strip())
    if planning is not None:
        planning = replace(planning, chosen=replace(planning.chosen, plan=plan))
    return replace(found, plan=plan, planning=planning)


def runs_in_copies(trainer: pl.Trainer) -> bool:
    """Return whether user code can run in a copy of this process, for the device of the fit."""
    return hasattr(os, "fork") and trainer.strategy.root_device.type == "cpu"


def in_copy(trainer: pl.Trainer, function: Callable[[], T]) -> T:
    """Return what `function` does in a copy of this process, or here where no copy can run it."""
    function = with_user_lines()(function)
    if not runs_in_copies(trainer):
        return function()
    return ForkedCall(function, isolated=True).result(timeout_seconds=_PATIENCE_SECONDS)


class _TalkHere:
    """A `ForkedTalk` in this process."""

    def __init__(self, function: Callable[[], Generator[Any, Any, Any]], *, isolated: bool) -> None:
        self._questions = function()

    def next(self, answer: object = None, *, timeout_seconds: float) -> Said:
        try:
            return Said(False, self._questions.send(answer))
        except StopIteration as end:
            return Said(True, end.value)

    def kill(self) -> None:
        self._questions.close()


@contextmanager
def _messages() -> Iterator[list[tuple[int, str]]]:
    # Keep what is said to users within: a copy has no screen
    kept: list[tuple[int, str]] = []

    class Keeper(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.getMessage().startswith("topt: "):
                kept.append((record.levelno, record.getMessage()))

    logger, keeper = logging.getLogger("lightning.pytorch"), Keeper()
    propagates, logger.propagate = logger.propagate, False
    handlers, logger.handlers = logger.handlers, [keeper]
    try:
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            yield kept
        texts = (str(each.message) for each in warned)
        kept += [(logging.WARNING, text) for text in texts if text.startswith("topt: ")]
    finally:
        logger.handlers, logger.propagate = handlers, propagates


# ---- what all ranks measure ----------------------------------------------------------------------


def _open_measurements(request: PlanRequest, trainer: pl.Trainer) -> Measurements | None:
    # What measures this run, and says what it does; None for a given cluster
    if request.cluster is not None:
        return None
    return Measurements.open(
        device=trainer.strategy.root_device,
        num_nodes=trainer.num_nodes,
        progress=lambda line: rank_zero_info(f"topt: {line}"),
    )


def _answer(
    question: NeedsCosts | NeedsKernels,
    request: PlanRequest,
    trainer: pl.Trainer,
    measurements: Measurements | None,
) -> Any:
    # What `question` asks for. A collective call.
    if measurements is None:
        assert request.cluster is not None
        return RankCosts(request.cluster) if isinstance(question, NeedsCosts) else {}
    graphs = question.graphs if isinstance(question, NeedsKernels) else [question.graph]
    kernels: dict[KernelKey, float] = {}
    for graph in graphs:
        kernels |= on_every_rank(partial(measurements.kernel_seconds, graph))
    if isinstance(question, NeedsKernels):
        return kernels
    times = on_every_rank(
        lambda: in_copy(trainer, partial(_time_updates, trainer, measurements.known_updates))
    )
    updates = on_every_rank(lambda: measurements.agree_on_updates(times))
    cluster = on_every_rank(measurements.cluster)
    return RankCosts(cluster, kernels, updates, measures=True)


def _time_updates(trainer: pl.Trainer, known: Callable[[str], float | None]) -> list[UpdateTime]:
    # What the updates of the optimizers take that the module would make
    device = trainer.strategy.root_device
    optimizers, named = make_fake_optimizers(trainer.lightning_module, device=device)
    return time_updates(optimizers, named_parameters=named, device=device, known=known)


# ---- a given plan --------------------------------------------------------------------------------


def _given(plan: ParallelPlan, request: PlanRequest, trainer: pl.Trainer) -> ParallelPlan:
    # A complete plan, checked, with its rule of weights where it needs one
    if plan.schedule is not None or plan.brings_batches:

        def check_step() -> None:
            step = TracedStep.of(trainer, example_batch(trainer), splits=False)
            _check_features(plan, request, trainer, step)

        on_rank_0(lambda: in_copy(trainer, check_step))
    return _with_rule_checked(plan, request, trainer)


def _with_rule_checked(
    plan: ParallelPlan, request: PlanRequest, trainer: pl.Trainer
) -> ParallelPlan:
    # The plan, checked, with its rule of weights where it needs one
    on_every_rank(lambda: _check_features(plan, request, trainer))
    if plan.schedule not in CONTINUOUS_SCHEDULES:
        return plan

    def complete() -> Any:
        optimizers, _ = make_fake_optimizers(
            trainer.lightning_module, device=trainer.strategy.root_device
        )
        each = trainer.accumulate_grad_batches
        return with_rule(plan, optimizers, request.stale, accumulate=each).to_dict()

    return ParallelPlan.from_dict(on_rank_0(lambda: in_copy(trainer, complete)))


def _check_features(
    plan: ParallelPlan,
    request: PlanRequest,
    trainer: pl.Trainer,
    step: TracedStep | None = None,
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

    fit = (
        Fit(trainer, only_replicated=request.only_replicated, would_shard=would_shard)
        if step is None
        else step.fit(request, would_shard=would_shard)
    )
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


def _check_given(given: Any, request: PlanRequest, trainer: pl.Trainer) -> None:
    # Raise PlanError where it is known without a step that nothing runs what is asked for
    if given is None:
        return
    mesh = given.mesh(dist.get_world_size(), num_nodes=trainer.num_nodes)
    fit = Fit(trainer, only_replicated=request.only_replicated)
    if isinstance(given, UniformPlan):
        _check_features(preset_plan(given.preset, mesh=mesh), request, trainer)
    elif isinstance(given, PipelinePlan):
        kinds = (STAGES, CONTINUOUS) if given.schedule in CONTINUOUS_SCHEDULES else (STAGES,)
        if reason := why_not(fit, *kinds):
            raise PlanError(f"this plan is a pipeline, but {reason}; choose a plan without stages")
    elif mesh.tensor_axes and (reason := why_not(fit, SHARDED, SLICES)):
        raise PlanError(
            f"a mesh with tensor axes splits parameters, but {reason}; choose one without"
        )


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


def _check_manual(request: PlanRequest, given: Any) -> None:
    # Raise an error for what was asked of a step that decides itself when it updates
    keeps = isinstance(given, ParallelPlan) and given.keeps_gradients_whole
    if given is not None and not (keeps and given.schedule is None):
        raise PlanError(
            "manual optimization runs under the plans 'ddp' and 'zero1' only: its steps cannot be "
            "seen in advance"
        )
    if given is None:
        raise ValueError(
            "manual optimization cannot be planned (its steps cannot be seen in advance): leave "
            "out memory_limit, objective, cluster, allow_compression and plan='search', or use "
            "automatic optimization"
        )


# ---- stages --------------------------------------------------------------------------------------


def _pipeline(
    request: PlanRequest, trainer: pl.Trainer, batch: Any, given: PipelinePlan
) -> Questions[ParallelPlan]:
    # A plan with stages for the traced microbatch
    # The mesh, and the batch that one pass of a stage has.
    mesh = given.mesh(dist.get_world_size(), num_nodes=trainer.num_nodes)
    part, count = microbatch_of(batch, given, mesh)
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
    step = TracedStep.of(trainer, part, splits=bool(mesh.tensor_axes), scales=scales)
    graph = with_blocks_for(step.graph, given, mesh)
    # The search, with kernels that all ranks measure.
    costs = yield from read_costs(trainer, graph)
    search = search_request(request, trainer, graph, costs)
    search = pipeline_request(given, mesh, search, count=count, samples=samples)
    search = replace(search, stale=_stale_weights(request, trainer, given))
    # Kernels on slices of tensors, which the whole step does not have.
    if mesh.tensor_axes:
        search = replace(search, split=replace(step, graph=graph).split())
        if costs.measured.measures:
            kernels = yield NeedsKernels(local_graphs(search))
            search = replace(search, kernel_seconds={**search.kernel_seconds, **kernels})
    choose = partial(
        choose_for, request, cluster=search.cluster, trainer=trainer, optimizer=search.optimizer
    )
    plan = choose_pipeline(given, mesh, search, choose=choose)
    _check_features(plan, request, trainer, step)
    if given.recompute:
        say_what_stays(graph)
    return plan


def _stale_weights(
    request: PlanRequest, trainer: pl.Trainer, given: PipelinePlan
) -> StaleWeights | None:
    # What a search for `given` may choose of continuous pipelines
    if not request.stale.allowed:
        return None
    if given.schedule is None and why_not(Fit(trainer), CONTINUOUS):
        return None
    module, device = trainer.lightning_module, trainer.strategy.root_device
    (optimizer,), _ = make_fake_optimizers(module, device=device)
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
        by_exchange=given.gradient_exchange is not None,
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
    # The plan of `point` with all blocks recomputed that can be, and what it takes
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

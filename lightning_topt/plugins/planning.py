"""The plan of a fit that asks for one: given, or made of a step that is traced at setup.

`decide_plan` is called by all ranks and returns the same plan on each, or raises on each.

    a complete plan          checked, and run as it is
    a plan by name           for the blocks of the traced step, where these matter
    a mesh, stages           searched on that mesh (`search_mesh`, `search_stages`)
    anything else            all plans are searched (`search_all`)

The step is traced (`trace_step`), and plans are searched, in a copy of rank 0's process
(`ForkedTalk`). There user code may do what it likes. The copy asks for what all ranks have to
measure (`_answer`). On accelerators, whose work no copy can do, the same runs in rank 0's process.
"""

from __future__ import annotations

import io
import itertools
import logging
import os
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, TypeVar

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor
from torch.utils._pytree import tree_map, tree_unflatten
from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data._utils import worker

from lightning_topt.basics.forked_call import ForkedCall, ForkedTalk, Said
from lightning_topt.communication.rank_watch import is_of_collective
from lightning_topt.costs.compute import KernelKey
from lightning_topt.costs.measurements import Measurements
from lightning_topt.costs.measuring import on_every_rank, on_rank_0
from lightning_topt.costs.optimizer import UpdateTime, time_updates
from lightning_topt.execution.memory import release_free_memory, return_freed_memory
from lightning_topt.graph.blocks import block_of, child_blocks, layers_of
from lightning_topt.graph.capture import capture, observe_step
from lightning_topt.graph.errors import (
    WAY_OUT,
    CaptureError,
    StepError,
    may_need_values,
    one_line,
    with_user_lines,
)
from lightning_topt.graph.manual_steps import optimizes_manually
from lightning_topt.graph.mesh_axes import Mesh
from lightning_topt.graph.module_copy import is_on_meta
from lightning_topt.graph.op_graph import OpGraph, module_fingerprint
from lightning_topt.plan.choose import NoPlanFitsError
from lightning_topt.plan.parallel_plan import ParallelPlan, PlanError, preset_plan, uniform_plan
from lightning_topt.plugins.microbatches import count_samples, split_batch
from lightning_topt.plugins.plan_options import GivenPlan, MeshPlan, PipelinePlan, UniformPlan
from lightning_topt.plugins.plan_request import (
    MIXED,
    PlanRequest,
    check_exchange_of_run,
    check_flight,
    with_rule,
)
from lightning_topt.plugins.requirements import (
    CONTINUOUS,
    OWN_BATCHES,
    SEQUENTIAL,
    SHARDED,
    SLICES,
    STAGES,
    Fit,
    noted_reads,
    why_not,
)
from lightning_topt.plugins.searched_plan import (
    NeedsCosts,
    NeedsKernels,
    Planning,
    Questions,
    RankCosts,
    make_fake_optimizers,
    say_what_stays,
    search_all,
    search_mesh,
    search_stages,
)
from lightning_topt.schedules.schedules import CONTINUOUS_SCHEDULES
from lightning_topt.techniques.compilation import compiler_of
from lightning_topt.techniques.tensor_parallel.function_trace import FunctionTrace

_NOTHING_FITS = f"{NoPlanFitsError.__name__}: "
_EAGER = "Predicted as eager code, without your torch.compile."
_PATIENCE_SECONDS = 300.0  # with a step that is traced, and a search, between two questions
_READ_SECONDS = 20.0  # for a batch
_MICROBATCHES_PER_RANK = 4  # at most; the bubble of 1F1B is then a fifth of the step, or less
T = TypeVar("T")


class PlanDecision(NamedTuple):
    """The plan of a fit, what was searched, and where the plan comes from.

    `planning` is None without a search, and on ranks but 0. `planned_by` is ``"search"``,
    ``"given"``, or says why the plan is ``ddp``. `messages` of a copy of this process: levels and
    texts.
    """

    plan: ParallelPlan
    planned_by: str = "given"
    planning: Planning | None = None
    messages: tuple[tuple[int, str], ...] = ()


def decide_plan(request: PlanRequest, trainer: pl.Trainer) -> PlanDecision:
    """Return the plan for this fit, what was searched, and where the plan comes from.

    The plan is equal on every rank; rank 0 has what was searched. A collective call, before there
    are optimizers. What cannot be planned runs as ``ddp`` does, with a warning, unless it
    `must_be_planned`.
    """
    if request.needs_batch:
        trainer.fit_loop.setup_data()  # draws as it does under ddp
    # Planning draws random numbers, and training goes on as if it had not.
    with isolate_rng():
        decision = _decide(request, trainer)
    # Give back what planning has used, before memory is measured.
    if request.saves_memory or decision.plan.saves_memory:
        release_free_memory()
        return_freed_memory(trainer.strategy.root_device)
    return decision


def _decide(request: PlanRequest, trainer: pl.Trainer) -> PlanDecision:
    # What can be said without a look at the step.
    module, world_size = trainer.lightning_module, dist.get_world_size()
    plain = uniform_plan(0, data_parallel_size=world_size)
    given: GivenPlan | None = request.plan
    if request.allowed.staleness and given is None:
        raise ValueError(
            "allow='staleness' is for pipelines whose ranks get the same batches: give a mesh, "
            'plan={"mesh": {"pipeline": 2}}, or use PipelineStrategy(schedule="continuous")'
        )
    if isinstance(given, UniformPlan):
        if given.compile and any(map(compiler_of, module.modules())):
            raise PlanError(
                "modules of this model are compiled already: leave out '+compile', or compile none"
            )
        if not request.is_by_block:
            given = _unseen(given, given.mesh(world_size, num_nodes=trainer.num_nodes), module)
    if not module.automatic_optimization:
        _check_manual(given, request)
    # A complete plan.
    if isinstance(given, ParallelPlan):
        given.check_world_size(world_size)
        given.check_model(type(module).__name__, module_fingerprint(module))
        asks = given.leaves_gathers and trainer.precision in MIXED
        if given.schedule is not None or given.brings_batches or asks:
            given = ParallelPlan.from_dict(on_rank_0(partial(_as_seen, given, request, trainer)))
        return PlanDecision(_checked_on_every_rank(given, request, trainer))
    # One that is made of the step.
    if given is not None:  # what can be refused on every rank, before it is traced
        mesh = given.mesh(world_size, num_nodes=trainer.num_nodes)
        if isinstance(given, UniformPlan):
            preset = _unseen(given, mesh, module)
            fit = Fit(trainer, only_replicated=request.only_replicated)
            on_every_rank(partial(_check_features, preset, request, fit))
    try:
        decision = _traced(request, trainer)
    except Exception as error:
        # A lost rank is no reason to go on as DDP: nobody would answer. Nor is that nothing fits.
        said = f"{type(error).__name__}: {error}"  # of another rank it has the same words
        if request.must_be_planned or is_of_collective(error) or _NOTHING_FITS in said:
            raise
        reason = one_line(error)
        rank_zero_warn(
            "topt: this training step cannot be planned, so it runs as strategy='ddp' does: "
            f"nothing is lost but what a plan could have saved. The reason: {reason}"
        )
        return PlanDecision(plain, planned_by=f"ddp: {reason}")
    return decision._replace(plan=_checked_on_every_rank(decision.plan, request, trainer))


# ---- a traced step -------------------------------------------------------------------------------


def _traced(request: PlanRequest, trainer: pl.Trainer) -> PlanDecision:
    # The plan that is made of a traced step. A collective call.
    talk: ForkedTalk | _TalkHere | None = None
    made: PlanDecision | None = None  # on rank 0
    measurements: Measurements | None = None
    answer: Any = None

    def next_question() -> Any:
        nonlocal talk, made
        if talk is None:
            batch = example_batch(trainer)
            begins = ForkedTalk if _runs_in_copies(trainer) else _TalkHere
            talk = begins(partial(_plan_of, request, trainer, batch), isolated=True)
        said = talk.next(answer, timeout_seconds=_PATIENCE_SECONDS)
        if not said.is_over:
            return said.value
        made = said.value
        for level, text in made.messages:
            (rank_zero_warn if level >= logging.WARNING else rank_zero_info)(text)
        return made.plan.to_dict()

    # Rank 0 asks until it has a plan; all ranks measure what it asks for.
    try:
        while not isinstance(said := on_rank_0(next_question), dict):
            if measurements is None and request.cluster is None:
                measurements = Measurements.open(
                    device=trainer.strategy.root_device,
                    num_nodes=trainer.num_nodes,
                    progress=lambda line: rank_zero_info(f"topt: {line}"),
                )
            answer = _answer(said, request, trainer, measurements)
    finally:
        if talk is not None:
            talk.kill()
    decision = PlanDecision(
        ParallelPlan.from_dict(said),
        "search" if request.plan is None else "given",
        None if made is None else made.planning,
    )
    if decision.planning is not None or isinstance(request.plan, MeshPlan | PipelinePlan):
        rank_zero_info(f"topt: {decision.plan.summary()}. {decision.plan.reason}".strip())
    return decision


def _plan_of(request: PlanRequest, trainer: pl.Trainer, batch: Any) -> Questions[PlanDecision]:
    # Make the plan of rank 0's step on `batch`; runs in a copy of its process
    given, planning = request.plan, None
    with with_user_lines(), _messages() as messages:
        if isinstance(given, UniformPlan):
            mesh = given.mesh(dist.get_world_size(), num_nodes=trainer.num_nodes)
            plan = _of_blocks(given, mesh, request, trainer, batch)
        elif isinstance(given, PipelinePlan):
            plan = yield from _of_stages(given, request, trainer, batch)
        else:
            is_automatic = trainer.lightning_module.automatic_optimization
            splits = given is not None or (is_automatic and not request.keeps_parameters_whole)
            step = trace_step(request, trainer, batch, splits=splits)
            planning = yield from (
                search_mesh(request, step, given)
                if isinstance(given, MeshPlan)
                else search_all(request, step)
            )
            plan = planning.chosen.plan.gathering(planning.graph)
            if any(map(compiler_of, trainer.lightning_module.modules())):
                plan = replace(plan, reason=f"{plan.reason} {_EAGER}")
    return PlanDecision(plan, planning=planning, messages=tuple(messages))


def _of_blocks(
    given: UniformPlan, mesh: Mesh, request: PlanRequest, trainer: pl.Trainer, batch: Any
) -> ParallelPlan:
    # A plan by name for the blocks of the step, or for one block where none are seen
    try:
        step = trace_step(request, trainer, batch, repeats=given.recompute)
    except CaptureError as error:
        if given.recompute or given.compile:
            raise CaptureError(
                f"{error} Or leave '+recompute' and '+compile' out of the plan, whose blocks have "
                "to be seen."
            ) from error
        rank_zero_warn(
            "topt: the blocks were not seen, so the plan stores the whole module as one (its "
            f"children, under manual optimization): {one_line(error)}"
        )
        return _unseen(given, mesh, trainer.lightning_module)
    plan = given.of(step.traced, mesh)
    if step.traced.is_manual and given.preset.level > 1 and plan.keeps_gradients_whole:
        rank_zero_warn(
            "topt: nothing is sharded but states of the optimizers: the step reads or writes "
            "parameters of all modules itself, or calls none of them"
        )
    _check_features(plan, request, step)
    if given.recompute:
        say_what_stays(step.traced)
    return plan


def _unseen(given: UniformPlan, mesh: Mesh, module: pl.LightningModule) -> ParallelPlan:
    # A plan by name for a step that was not seen: the module is one block. Under manual
    # optimization its children are blocks, since what is in none stays whole.
    is_manual = optimizes_manually(module)
    blocks = child_blocks(module) if is_manual else ()
    return preset_plan(given.preset, mesh=mesh, blocks=blocks, is_manual=is_manual)


def plan_of_evaluation(request: PlanRequest, trainer: pl.Trainer) -> ParallelPlan:
    """Return the plan of an evaluation outside of a fit, whose step nobody has traced.

    That is ZeRO-3 of the layers that the module shows, gathered in float32. Raises PlanError where
    it cannot be sharded.
    """
    module = trainer.lightning_module
    layers = layers_of(module) or child_blocks(module)
    plan = uniform_plan(3, data_parallel_size=dist.get_world_size(), blocks=layers)
    plan = replace(plan, float32_gathers=True)
    _check_features(plan, request, Fit(trainer, only_replicated=request.only_replicated))
    return plan


def _of_stages(
    given: PipelinePlan, request: PlanRequest, trainer: pl.Trainer, batch: Any
) -> Questions[ParallelPlan]:
    # A plan with stages, for a microbatch of `batch`. Raises PlanError, NoPlanFitsError
    fit = Fit(trainer, only_replicated=request.only_replicated)
    kinds = (STAGES, CONTINUOUS) if given.schedule in CONTINUOUS_SCHEDULES else (STAGES,)
    if reason := why_not(fit, *kinds):
        raise PlanError(f"this plan is a pipeline, but {reason}; choose a plan without stages")
    # The batch that one pass of a stage has.
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
    splits = bool(mesh.tensor_axes)
    step = trace_step(request, trainer, part, splits=splits, scales=scales)
    plan = yield from search_stages(request, step, given, samples=samples, count=count)
    _check_features(plan, request, step)
    return plan


def microbatch_of(batch: Any, given: PipelinePlan, mesh: Mesh) -> tuple[Any, int]:
    """Return the first microbatch of `batch`, and how many a batch is to have.

    Raises ValueError as `split_batch`.
    """
    if given.schedule in CONTINUOUS_SCHEDULES:
        return batch, 1
    count = given.microbatches or choose_microbatches(count_samples(batch), mesh.pipeline_size)
    return split_batch(batch, count).batches[0], count


def choose_microbatches(samples: int, ranks: int) -> int:
    """Return into how many parts a batch of `samples` is split for `ranks` stages at once.

    A multiple of the ranks, up to four times as many, that divides the batch if there is one.
    """
    multiples = [
        ranks * times for times in range(_MICROBATCHES_PER_RANK, 0, -1) if ranks * times <= samples
    ]
    # Even parts have equal shapes, and no stage waits for a larger one.
    even = [count for count in multiples if samples % count == 0]
    return (even or multiples or [samples])[0]


# ---- the traced step -----------------------------------------------------------------------------


def trace_step(
    request: PlanRequest,
    trainer: pl.Trainer,
    batch: Any,
    *,
    splits: bool = False,
    scales: bool = False,
    repeats: bool = True,
) -> Fit:
    """Trace the step on fake tensors, or run it once on real ones where it reads values.

    With `splits` the calls are traced too; with `scales` the graph says how the step grows with the
    batch, where that can be found; `repeats` as of `capture`. Raises what the last attempt did.
    """
    trace, alone = FunctionTrace() if splits else None, request.only_replicated
    try:
        with noted_reads() as reads:
            graph = _capture(trainer, batch, trace, scales=scales, repeats=repeats)
        return Fit(trainer, batch, graph, alone, frozenset(reads), trace)
    except Exception as error:
        # In this process, which is a copy, a real step leaves nothing behind. One of a module on
        # the meta device would need memory that no rank may have.
        if not may_need_values(error) or trainer.strategy.root_device.type != "cpu":
            raise
        if is_on_meta(trainer.lightning_module):
            raise
        try:
            with noted_reads() as reads:
                graph = observe_step(
                    trainer.lightning_module,
                    batch,
                    forward_context=trainer.precision_plugin.forward_context,
                )
        except StepError:  # which says more than what fake tensors made of it
            raise
        except Exception as failure:
            why = f"{str(error).removesuffix(WAY_OUT)}Nor did it run on real tensors: {failure}"
            raise CaptureError(why, needs_values=True) from failure
        return Fit(trainer, batch, graph, alone, frozenset(reads), why_not_split=str(error))


def _capture(
    trainer: pl.Trainer, batch: Any, trace: FunctionTrace | None, *, scales: bool, repeats: bool
) -> OpGraph:
    # The graph of this rank's step on fake tensors, whose calls `trace` gets
    captured = partial(
        capture,
        trainer.lightning_module,
        batch,
        forward_context=trainer.precision_plugin.forward_context,
        device=trainer.strategy.root_device.type,
        adapt=None if trace is None else trace.of,
        repeats=repeats,
    )
    with warnings.catch_warnings(), redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")  # all of it comes again in the step itself
        if scales:
            with suppress(Exception):
                return captured()
        return captured(batch_scaling=False)


def _runs_in_copies(trainer: pl.Trainer) -> bool:
    # Whether user code can run in a copy of this process, for the device of the fit
    return hasattr(os, "fork") and trainer.strategy.root_device.type == "cpu"


def in_copy(trainer: pl.Trainer, function: Callable[[], T]) -> T:
    """Return what `function` does in a copy of this process, or here where no copy can run it."""
    function = with_user_lines()(function)
    if not _runs_in_copies(trainer):
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


def _answer(
    question: NeedsCosts | NeedsKernels,
    request: PlanRequest,
    trainer: pl.Trainer,
    measurements: Measurements | None,
) -> Any:
    # What `question` asks for. A collective call.
    if measurements is None:
        assert request.cluster is not None
        return RankCosts(request.cluster)
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
    return RankCosts(on_every_rank(measurements.cluster), kernels, updates)


def _time_updates(trainer: pl.Trainer, known: Callable[[str], float | None]) -> list[UpdateTime]:
    # What the updates of the optimizers take that the module would make
    device = trainer.strategy.root_device
    optimizers, named = make_fake_optimizers(trainer.lightning_module, device=device)
    return time_updates(optimizers, named_parameters=named, device=device, known=known)


# ---- what a plan needs of the fit ----------------------------------------------------------------


def _checked_on_every_rank(
    plan: ParallelPlan, request: PlanRequest, trainer: pl.Trainer
) -> ParallelPlan:
    # The plan, checked, with its rule of weights where it needs one
    fit = Fit(trainer, only_replicated=request.only_replicated)
    on_every_rank(lambda: _check_features(plan, request, fit))
    if plan.schedule not in CONTINUOUS_SCHEDULES:
        return plan

    def complete() -> Any:
        optimizers, _ = make_fake_optimizers(
            trainer.lightning_module, device=trainer.strategy.root_device
        )
        each = trainer.accumulate_grad_batches
        return with_rule(plan, optimizers, request.allowed, accumulate=each).to_dict()

    return ParallelPlan.from_dict(on_rank_0(lambda: in_copy(trainer, complete)))


def _as_seen(plan: ParallelPlan, request: PlanRequest, trainer: pl.Trainer) -> Any:
    # The complete `plan`, which is checked with a traced step, and gathers as that needs it
    is_checked = plan.schedule is not None or plan.brings_batches

    def of_step(batch: Any) -> Any:
        step = trace_step(request, trainer, batch, repeats=False)
        if is_checked:
            _check_features(plan, request, step)
        return plan.gathering(step.traced).to_dict()

    try:
        return in_copy(trainer, partial(of_step, example_batch(trainer)))
    except Exception as error:
        if is_checked:
            raise
        rank_zero_warn(f"topt: no step was seen, so gathers are in float32: {one_line(error)}")
        return plan.to_dict()


def _check_features(plan: ParallelPlan, request: PlanRequest, fit: Fit) -> None:
    # Raise PlanError where something in this fit does not go together with `plan`. That is what can
    # be seen before it runs
    # Which parameters the plan shards, and which it splits.
    levels = {block.block: block.config.storage.sharded_axes("gradients") for block in plan.blocks}
    split = {
        f"{b.block}.{name}".lstrip(".") for b in plan.blocks for name, _ in b.config.parameters
    }

    def would_shard(parameter: str) -> bool:
        return bool(levels[block_of(parameter, levels)]) or parameter in split

    fit = replace(fit, would_shard=would_shard)
    stages, shards = plan.schedule is not None, not plan.keeps_gradients_whole
    sharded = (SHARDED, SLICES) if split else (SHARDED,)
    together = "under this plan ranks run the batches of one another"
    # Whether a row is about this plan, what it needs, what it does, and the way out.
    for applies, kinds, does, way_out in (
        (stages, (STAGES,), "this plan is a pipeline", "choose a plan without stages"),
        (
            plan.schedule in CONTINUOUS_SCHEDULES,
            (CONTINUOUS,),
            "this plan's stages never wait for an update",
            "choose another schedule",
        ),
        (
            plan.own_batches,
            (OWN_BATCHES,),
            together,
            "leave out own_batches, or choose a plan without stages",
        ),
        (
            shards and stages,
            sharded,
            "this plan keeps only a stage's parameters on a rank",
            "choose a plan without stages",
        ),
        (
            shards,
            sharded,
            "this plan shards parameters",
            "choose a plan without tensor axes" if split else "choose ZeRO level 0 or 1",
        ),
        (
            plan.brings_batches and not stages,
            (SEQUENTIAL,),
            together,
            "leave out num_microbatches, or choose a plan without tensor axes",
        ),
    ):
        if applies and (reason := why_not(fit, *kinds)):
            raise PlanError(f"{does}, but {reason}; {way_out}")
    if plan.schedule in CONTINUOUS_SCHEDULES:
        check_flight(plan, fit.trainer)
    check_exchange_of_run(plan, fit.trainer, request)


def _check_manual(given: GivenPlan | None, request: PlanRequest) -> None:
    # Raise an error for what was asked of a step that decides itself when it updates
    if request.changes_exchange or request.allowed.staleness:
        raise PlanError(
            "plans with compressed or stale gradients need automatic optimization: leave them "
            "out of allow (strategy='topt_compressed' compresses here)"
        )
    blocks = given.blocks if isinstance(given, ParallelPlan) else ()
    levels = [(block.block, block.config.storage.level) for block in blocks]
    if any(level == 2 or (level == 3 and not name) for name, level in levels):
        raise PlanError(
            "under manual optimization what is in no block of a plan stays whole, and blocks have "
            "no level 2: give the block '' level 0 or 1 and the others 0, 1 or 3, or name a plan "
            "(plan='zero3')"
        )


# ---- example batches -----------------------------------------------------------------------------


def example_batch(trainer: pl.Trainer) -> Any:
    """Return a training batch of this rank as `training_step` will get it, on the CPU.

    A copy of this process reads it, so that data sets, iterators and generators stay as they are.
    What a copy cannot read (an open file, a queue that a thread fills) is read here. A batch of an
    iterator that cannot begin again is then put back before its first. The loaders are those of the
    fit, which `trainer.fit_loop.setup_data()` has made. Raises ValueError when the training data
    are empty.
    """
    combined = trainer.fit_loop._combined_loader
    if combined is None:
        raise ValueError(
            "planning needs a training batch, but there are no training data "
            "(limit_train_batches=0?)"
        )
    if hasattr(os, "fork"):
        with suppress(Exception):
            read = ForkedCall(partial(_read_in_copy, combined, trainer), isolated=True)
            return read.result(timeout_seconds=_READ_SECONDS)
    if any(isinstance(loader, Iterator) for loader in combined.flattened):
        combined.flattened = [
            _ReadAhead(loader) if isinstance(loader, Iterator) else loader
            for loader in combined.flattened
        ]
    return first_batch(combined, trainer)


def _read_in_copy(loaders: CombinedLoader, trainer: pl.Trainer) -> Any:
    for loader in loaders.flattened:
        if getattr(loader, "num_workers", 0) and loader.worker_init_fn is not None:
            loader.worker_init_fn(0)
    return first_batch(loaders, trainer)


def first_batch(loaders: CombinedLoader, trainer: pl.Trainer) -> Any:
    """Return a batch of these training loaders, on the CPU.

    `trainer` has the module and the data module whose transfer hooks run.
    """
    with isolate_rng():  # transforms may draw
        batch = tree_unflatten([_first(loader) for loader in loaders.flattened], loaders._spec)
    # Hooks may change tensors in place; the loader's own stay as they are.
    batch = tree_map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, batch)
    batch = trainer.lightning_module._on_before_batch_transfer(batch)
    return trainer.strategy.batch_to_device(batch, device=torch.device("cpu"))


def _first(loader: Any) -> Any:
    # A batch of `loader`: of the first samples where its size is known, whatever their order
    if isinstance(loader, _ReadAhead):
        return loader.first
    samples: list[Any] = []
    if not isinstance(loader, DataLoader):
        for batch in loader:
            return batch
    elif isinstance(loader.dataset, IterableDataset):
        if not loader.num_workers:
            for batch in loader:
                return batch
        with _as_worker(loader):  # workers would outlive this
            samples = [*itertools.islice(iter(loader.dataset), loader.batch_size or 1)]
    else:
        dataset: Any = loader.dataset
        size = getattr(loader.batch_sampler, "batch_size", None)
        if isinstance(size, int) and size:
            indices: Iterable[Any] = range(min(size, len(dataset)))
        else:
            first = next(iter(loader.batch_sampler or loader.sampler), None)
            indices = [] if first is None else first if loader.batch_sampler else [first]
        with _as_worker(loader):
            samples = [dataset[index] for index in indices]
    if not samples:
        raise ValueError("planning needs a training batch, but the training data are empty")
    is_batched = loader.batch_size is not None or loader.batch_sampler is not None
    return loader.collate_fn(samples if is_batched else samples[0])


@contextmanager
def _as_worker(loader: Any) -> Iterator[None]:
    # Let the data set of `loader` be read as by its first worker, where it has workers
    count = getattr(loader, "num_workers", 0)
    before = worker._worker_info
    if count:
        worker._worker_info = worker.WorkerInfo(
            id=0, num_workers=count, seed=torch.initial_seed(), dataset=loader.dataset
        )
    try:
        yield
    finally:
        worker._worker_info = before


class _ReadAhead:
    """An iterator of which one item was read; it comes again, in its turn."""

    def __init__(self, iterator: Iterator[Any]) -> None:
        self._iterator, self._ahead = iterator, [*itertools.islice(iterator, 1)]
        self.first = self._ahead[0] if self._ahead else None

    def __iter__(self) -> Iterator[Any]:
        while self._ahead:
            yield self._ahead.pop()
        yield from self._iterator

    def __getattr__(self, name: str) -> Any:
        return getattr(self._iterator, name)

"""Verify a plan before its ranks exist: would it run, and what would each rank hold?

Nothing is started and nothing allocated: the model may be on the meta device, and the number of
ranks is that of the plan.

    plan = ParallelPlan.load("plan.yaml")
    with torch.device("meta"):
        module = MyModel()
    verification = verify_plan(
        plan, module, optimizers_of=lambda module: [torch.optim.AdamW(module.parameters())]
    )
    verification.problems                         # sentences; none: it would run
    verification.held[""]                         # bytes of the block "" on each rank, by KINDS

The bytes that a rank holds between steps follow, block by block, from the placements alone:

    a tensor of R rows sharded over N ranks   rank i has rows [i c, min((i + 1) c, R)),
                                              c = ceil(R / N): torch.chunk
    optimizer state at ZeRO level 1           rows of the pieces that the rank updates
                                              (`optim.pieces`)

Shards are numbered along their axes, the last axis fastest. FSDP2 allocates c rows on every rank:
those of them that are no rows of the tensor are `padding`. Of a plan with stages a step is traced
on shapes: the trace says which parameters each stage needs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_topt.basics.units import format_bytes
from lightning_topt.costs.cluster import Cluster
from lightning_topt.costs.communication import check_exchange, check_world_size
from lightning_topt.costs.optimizer import OptimizerError, OptimizerProfile, read_optimizer
from lightning_topt.execution.pipeline.pipeline_run import Example
from lightning_topt.execution.pipeline.stage_layout import StageLayout
from lightning_topt.graph.errors import one_line
from lightning_topt.graph.flow_trace import trace_flow
from lightning_topt.graph.mesh_axes import Mesh
from lightning_topt.graph.module_copy import fake_copy
from lightning_topt.graph.op_config import OpConfig
from lightning_topt.graph.op_graph import OpGraph, module_fingerprint
from lightning_topt.graph.step_flow import assign_calls
from lightning_topt.optim.full_state import parameters_of
from lightning_topt.optim.pieces import Piece
from lightning_topt.optim.update_rule import (
    BY_PARAMETER,
    UnsplittableOptimizer,
    check_runs_on_shards,
    is_one_of,
    pieces_of,
    update_rule,
    updates_whole,
)
from lightning_topt.plan.parallel_plan import ParallelPlan
from lightning_topt.schedules.check import check_schedule
from lightning_topt.schedules.schedules import make_schedule
from lightning_topt.techniques.optimizer_sharding import is_shared
from lightning_topt.techniques.registry import (
    check_blocks,
    check_runs,
    check_tied,
    parameters_by_block,
)
from lightning_topt.techniques.technique import shard_axes
from lightning_topt.techniques.tensor_parallel.layout import TensorAxes
from lightning_topt.techniques.tensor_parallel.split_parameters import check_split, split_parameters
from lightning_topt.techniques.tensor_parallelism import split_placements

KINDS = ("parameters", "gradients", "optimizer_state", "padding")
_PARAMETERS, _GRADIENTS, _STATE, _PADDING = range(len(KINDS))
Integers = NDArray[np.int64]
# parameters by block and name, under all names of a tied one
Blocks = Mapping[str, Mapping[str, nn.Parameter]]
OptimizersOf = Callable[[Any], Sequence[Optimizer]]  # the optimizers of a module


def verify_plan(
    plan: ParallelPlan,
    module: nn.Module,
    *,
    optimizers_of: OptimizersOf | None = None,
    graph: OpGraph | None = None,
    cluster: Cluster | None = None,
    global_batch_size: int | None = None,
    batch_size: int | None = None,
    example: Example | None = None,
) -> Verification:
    """Return whether `plan` would run on `module`, and what ranks would hold.

    Never raises for a plan that does not run: the reason is among `Verification.problems`.

    Args:
        plan: for any number of ranks.
        module: on any device, ``meta`` included; it is only looked at.
        optimizers_of: makes the optimizers of a module (of a copy of this one with fake tensors).
        graph: the captured step (`capture`), which says which parameters get no gradient.
        cluster: the machines; None: nothing is asked of them.
        global_batch_size: samples of a step on all ranks together.
        batch_size: samples of the batches that a rank gets.
        example: a step and a microbatch of a plan with stages, which is traced on shapes.
    """
    problems = [*_batch_problems(plan, global_batch_size, batch_size)]
    if cluster is not None:
        problems += _raised(lambda: check_world_size(cluster, world_size=plan.mesh.size))
    # A plan that does not belong to the module holds nothing of it.
    if of_module := [*_module_problems(plan, module)]:
        return Verification(plan, (*of_module, *problems))
    # Parameters as a rank of the tensor axes has them, with fake tensors. Slices of one rank stand
    # for those of all: they are equally large.
    local, mode = fake_copy(module)
    with mode:
        split_parameters(
            local, split_placements(plan.configs, plan.mesh), TensorAxes.of_mesh(plan.mesh, rank=0)
        )
        blocks = parameters_by_block(local, plan.configs)
        # Optimizers over slices, as in the run, so that their states have these sizes.
        optimizers = [] if optimizers_of is None else list(optimizers_of(local))
    profile, notes = None, list[str]()
    try:
        if optimizers_of is not None:
            profile = read_optimizer(optimizers, named_parameters=local.named_parameters())
    except OptimizerError as error:
        notes.append(f"the optimizer state is not known: {error}")
    problems += _shard_problems(plan, blocks, optimizers)
    if graph is not None:
        problems += _unused_problems(plan, graph, blocks)
    if cluster is not None:
        problems += _exchange_problems(plan, cluster)
    # What ranks hold, and whether that has room.
    of_blocks = partial(
        held_bytes, configs=plan.configs, mesh=plan.mesh, optimizers=optimizers, profile=profile
    )
    try:
        if plan.schedule is None:
            held = of_blocks(blocks)
        else:
            held = _held_by_stages(plan, blocks, _layout(plan, module, example), of_blocks)
    except ValueError as error:  # a schedule that does not fit, or a step that cannot be cut
        return Verification(plan, (*problems, one_line(error)), tuple(notes))
    verification = Verification(plan, tuple(problems), tuple(notes), held)
    if cluster is not None:
        problems += _memory_problems(cluster, float(verification.held_by_rank.sum(axis=1).max()))
    return Verification(plan, tuple(problems), tuple(notes), held)


@dataclass(frozen=True)
class Verification:
    """What `verify_plan` found out.

    Attributes:
        plan: that was verified.
        problems: why the plan would not run, and what to do, a sentence each; none: it would.
        notes: what could not be found out.
        held: bytes of each block on each rank, (rank, kind) by `KINDS`. Empty where the plan does
            not belong to the model. There is no state without optimizers.
    """

    plan: ParallelPlan
    problems: tuple[str, ...]
    notes: tuple[str, ...] = ()
    held: Mapping[str, Integers] = field(default_factory=dict)

    @property
    def would_run(self) -> bool:
        """Whether there is no problem."""
        return not self.problems

    @property
    def held_by_rank(self) -> Integers:
        """Bytes of all blocks together (rank, kind)."""
        zero = np.zeros((self.plan.mesh.size, len(KINDS)), np.int64)
        return zero + sum(self.held.values())

    def equal_ranks(self) -> list[tuple[list[int], int]]:
        """Return groups of ranks that hold equally much of every block, the fullest first.

        Each comes with one rank that stands for it.
        """
        if not self.held:
            return []
        # One row for each rank, (rank, block x kind): equal rows are a group.
        blocks = np.concatenate([*self.held.values()], axis=1)
        _, first, group = np.unique(blocks, axis=0, return_index=True, return_inverse=True)
        totals = self.held_by_rank.sum(axis=1)
        order = sorted(range(len(first)), key=lambda index: (-totals[first[index]], first[index]))
        return [
            (np.flatnonzero(group.ravel() == index).tolist(), int(first[index])) for index in order
        ]

    def to_dict(self) -> dict[str, Any]:
        """Return plain values. Ranks that hold equally much of every block are one entry."""
        return {
            "schema_version": 3,
            "would_run": self.would_run,
            "problems": list(self.problems),
            "notes": list(self.notes),
            "plan": self.plan.summary(),
            "world_size": self.plan.mesh.size,
            "held": [
                {
                    "ranks": ranks,
                    **dict(zip(KINDS, self.held_by_rank[one].tolist(), strict=True)),
                    "blocks": {
                        block: dict(zip(KINDS, sizes[one].tolist(), strict=True))
                        for block, sizes in self.held.items()
                    },
                }
                for ranks, one in self.equal_ranks()
            ],
        }


# ---- problems ------------------------------------------------------------------------------------


def _raised(check: Callable[[], object]) -> Iterator[str]:
    # Yield the message of what `check` raises
    try:
        check()
    except ValueError as error:
        yield one_line(error)


# why `plan` is none for `module`, or none that anything runs
def _module_problems(plan: ParallelPlan, module: nn.Module) -> Iterator[str]:
    configs, name = plan.configs, type(module).__name__
    parameters = dict(module.named_parameters(remove_duplicate=False))
    yield from _raised(lambda: plan.check_model(name, module_fingerprint(module)))
    if not any(parameter.requires_grad for parameter in parameters.values()):
        yield f"{name} has no trainable parameters, so there is nothing to train"
    yield from _raised(lambda: check_blocks(configs, module, made_for=plan.model))
    yield from _raised(lambda: check_runs(plan.mesh, configs, plan.gradient_exchange))
    yield from _raised(lambda: check_tied(parameters_by_block(module, configs), configs))
    # Slices along tensor axes.
    axes = TensorAxes.of_mesh(plan.mesh, rank=0)
    for of_split, placements in split_placements(configs, plan.mesh).items():
        if of_split in parameters:
            shape = tuple(parameters[of_split].shape)
            yield from _raised(partial(check_split, of_split, shape, placements, axes))
        else:
            yield (
                f"the plan places a parameter {of_split!r}, and {name} has none of that name: "
                "correct the name"
            )


# what torch's FSDP2, or one of `optimizers`, cannot do with the shards of a plan
def _shard_problems(
    plan: ParallelPlan, blocks: Blocks, optimizers: Sequence[Optimizer]
) -> Iterator[str]:
    configs = plan.configs
    sharded = [
        block for block, config in configs.items() if config.storage.sharded_axes("gradients")
    ]
    # FSDP2 shards rows, which a scalar has none of, and one dtype together.
    for block in sharded:
        parts = [
            (name, parameter)
            for name, parameter in _once(blocks[block])
            if shard_axes(configs[block], is_trained=parameter.requires_grad)
        ]
        scalars = [name for name, parameter in parts if not parameter.dim()]
        if scalars:
            yield (
                f"the parameter {scalars[0]!r} is a single number, which has no rows to shard: "
                f"give it one dim, or choose ZeRO level 0 or 1 for block {block!r}"
            )
        dtypes = sorted({str(parameter.dtype) for _, parameter in parts if parameter.requires_grad})
        if len(dtypes) > 1:
            yield (
                f"block {block!r} trains parameters of {' and '.join(dtypes)}, and torch's FSDP2 "
                "shards one dtype together: name the modules of each as blocks of their own, or "
                "choose ZeRO level 0 or 1"
            )
    # Nothing is shared with one data rank.
    shared = [block for block, config in configs.items() if _shares_updates(config)]
    if plan.mesh.data_parallel_size == 1 or not (blocks_of := [*sharded, *shared]):
        return
    for optimizer in optimizers:
        # torch's own update each parameter by itself; of others a copy is tried.
        if not is_one_of(optimizer, BY_PARAMETER):
            try:
                update_rule(optimizer)
                if sharded:
                    check_runs_on_shards(optimizer)
            except UnsplittableOptimizer as error:
                yield (
                    f"ranks cannot share the updates of {type(optimizer).__name__}: "
                    f"{error.reason}; choose ZeRO level 0 for block {blocks_of[0]!r}"
                )


def _exchange_problems(plan: ParallelPlan, cluster: Cluster) -> Iterator[str]:
    method, mesh = plan.gradient_exchange, plan.mesh
    if method is not None and mesh.size <= cluster.num_devices:
        sizes = {"world_size": mesh.data_parallel_size, "stride": mesh.stride(mesh.data_axes)}
        yield from _raised(lambda: check_exchange(method, cluster=cluster, **sizes))


# why a step's samples cannot be divided among the ranks
def _batch_problems(
    plan: ParallelPlan, global_batch_size: int | None, batch_size: int | None
) -> Iterator[str]:
    if global_batch_size is None:
        return
    # ranks with samples of their own, which a pipeline divides among its microbatches
    parts = plan.data_parallel_size
    # Each rank of a tensor group brings batches of its own, or stages one for each microbatch.
    if plan.brings_batches:
        parts *= plan.num_microbatches
    samples, rest = divmod(global_batch_size, parts)
    if rest:
        low, high = samples * parts, (samples + 1) * parts
        choose = f"{low} or {high}" if low else f"{high}"
        yield (
            f"a batch of {global_batch_size} samples cannot be divided evenly over {parts} "
            f"data-parallel ranks: choose {choose} samples, or a plan for another number of ranks"
        )
    elif batch_size not in (None, samples):
        yield (
            f"a step of {global_batch_size} samples takes {samples} on each of {parts} ranks, and "
            f"the data have batches of {batch_size}: set the batch size of the data to {samples}"
        )


# All ranks reduce gradients of the same parameters, unless they were told to look
def _unused_problems(plan: ParallelPlan, graph: OpGraph, blocks: Blocks) -> Iterator[str]:
    unused = set(graph.unused)
    for parameters in blocks.values():
        without = [name for name, _ in _once(parameters) if name in unused]
        if without and plan.mesh.data_parallel_size > 1 and plan.schedule is None:
            yield (
                f"the step gives {without[0]!r} no gradient, which ranks see only if asked: use "
                "strategy=topt_find_unused_parameters_true, or leave it out of the model"
            )


def _memory_problems(cluster: Cluster, needed: float) -> Iterator[str]:
    if needed > cluster.device.memory_bytes:
        yield (
            f"the fullest rank holds {format_bytes(needed)} of parameters, gradients and optimizer "
            f"state, and {cluster.device.name} of the cluster {cluster.name!r} has "
            f"{format_bytes(cluster.device.memory_bytes)}: shard more, or use more ranks"
        )


# ---- what ranks hold -----------------------------------------------------------------------------


def held_bytes(
    blocks: Blocks,
    configs: Mapping[str, OpConfig],
    mesh: Mesh,
    *,
    optimizers: Sequence[Optimizer] = (),
    profile: OptimizerProfile | None = None,
) -> dict[str, Integers]:
    """Return the bytes that each rank of `mesh` holds of each block, (rank, kind) as in `KINDS`.

    `optimizers` are built over the parameters of `blocks`, and `profile` says what they keep;
    without them there is no state.
    """
    held = {block: np.zeros((mesh.size, len(KINDS)), np.int64) for block in blocks}
    number, count = _numbers_along(mesh, mesh.data_axes)
    shared = [
        (parameters_of(optimizer)[piece.index], piece)
        for optimizer in optimizers
        for piece in _shared_pieces(optimizer, blocks, configs, ranks=count)
    ]
    owned = {tensor for tensor, _ in shared}
    for block, parameters in blocks.items():
        for name, parameter in _once(parameters):
            # Rows of the parameter on each rank, (rank,); the gradient has as many.
            axes = shard_axes(configs[block], is_trained=parameter.requires_grad)
            rows = _chunk_rows(parameter, *_numbers_along(mesh, axes))
            row_bytes = parameter.nbytes // max(parameter.shape[0] if parameter.dim() else 1, 1)
            for kind in (_PARAMETERS, _GRADIENTS) if parameter.requires_grad else (_PARAMETERS,):
                held[block][:, kind] += rows * row_bytes
                held[block][:, _PADDING] += (rows.max() - rows) * row_bytes
            if profile is not None and parameter not in owned:
                # Shards of equally many rows have equal states: ask once for each number of rows.
                counts, which = np.unique(rows, return_inverse=True)
                sizes = [
                    profile.state_bytes_of(name, _with_rows(parameter, int(each)))
                    for each in counts
                ]
                held[block][:, _STATE] += np.array(sizes, np.int64)[which]
    # A shared step: each rank has the state of the pieces which it updates.
    if profile is not None:
        # Optimizers count parameters over all blocks: find the block of each.
        home = {
            parameter: (block, name) for block in blocks for name, parameter in _once(blocks[block])
        }
        for tensor, piece in shared:
            block, name = home[tensor]  # type: ignore[index]
            shape = _with_rows(tensor, piece.stop - piece.start)
            held[block][number == piece.owner, _STATE] += profile.state_bytes_of(name, shape)
    return held


# each parameter with the first of its names
def _once(parameters: Mapping[str, nn.Parameter]) -> Iterator[tuple[str, nn.Parameter]]:
    seen: set[nn.Parameter] = set()
    for name, parameter in parameters.items():
        if parameter not in seen:
            seen.add(parameter)
            yield name, parameter


# whether ranks share the update of parameters with full gradients (ZeRO level 1)
def _shares_updates(config: OpConfig) -> bool:
    return bool(config.storage.sharded_axes("optimizer_state")) and not config.storage.sharded_axes(
        "gradients"
    )


# The pieces in which ranks share the update of one optimizer; none where every rank updates all
# that it holds. Shards of updates that read full parameters have owners too.
def _shared_pieces(
    optimizer: Optimizer, blocks: Blocks, configs: Mapping[str, OpConfig], *, ranks: int
) -> list[Piece]:
    in_shards = any(config.storage.sharded_axes("gradients") for config in configs.values())
    reads_full = in_shards and updates_whole(optimizer)
    shared: Collection[Tensor] = {
        parameter
        for block, parameters in blocks.items()
        if _shares_updates(configs[block])
        or (reads_full and configs[block].storage.sharded_axes("gradients"))
        for parameter in parameters.values()
        if is_shared(parameter)
    }
    return pieces_of(optimizer, shared, ranks=ranks)


# each rank's position along `axes` together, (rank,), and the number of positions
def _numbers_along(mesh: Mesh, axes: Sequence[int]) -> tuple[Integers, int]:
    # The last axis fastest, as shards are numbered.
    ranks, number, count = np.arange(mesh.size), np.zeros(mesh.size, np.int64), 1
    for axis in axes:
        size = mesh.shape[axis]
        number, count = number * size + ranks // mesh.stride([axis]) % size, count * size
    return number, count


# the rows of the shards `index` of a parameter that is cut into `count`; a scalar has one row
def _chunk_rows(parameter: Tensor, index: Integers, count: int) -> Integers:
    rows = parameter.shape[0] if parameter.dim() else 1
    # torch.chunk: all shards but the last ones have this many rows.
    chunk = -(-rows // count)
    return np.clip(rows - index * chunk, 0, chunk)


def _with_rows(parameter: Tensor, rows: int) -> tuple[int, ...]:
    return (rows, *parameter.shape[1:]) if parameter.dim() else ()


# ---- plans with stages ---------------------------------------------------------------------------


# what `of_blocks` returns, each rank with the parameters that its stages need
def _held_by_stages(
    plan: ParallelPlan,
    blocks: Blocks,
    layout: StageLayout,
    of_blocks: Callable[[Blocks], dict[str, Integers]],
) -> dict[str, Integers]:
    # A tied parameter is where any of its names is needed.
    names_of = defaultdict[nn.Parameter, list[str]](list)
    for parameters in blocks.values():
        for name, parameter in parameters.items():
            names_of[parameter].append(name)
    # (rank, kind) for each block, place after place of the pipeline.
    mesh = plan.mesh
    held = {block: np.zeros((mesh.size, len(KINDS)), np.int64) for block in blocks}
    places = np.array([mesh.pipeline_rank(rank) for rank in range(mesh.size)])  # (rank,)
    for place in range(mesh.pipeline_size):
        kept = set()
        for parameter, names in names_of.items():
            holders = {rank for name in names for rank in layout.holders(name)}
            if not holders or place in holders:
                kept.add(parameter)
        here = {
            block: {name: p for name, p in parameters.items() if p in kept}
            for block, parameters in blocks.items()
        }
        for block, sizes in of_blocks(here).items():
            held[block][places == place] = sizes[places == place]
    return held


def _layout(plan: ParallelPlan, module: nn.Module, example: Example | None) -> StageLayout:
    # Return which parameters each stage of `plan` needs in a step like that of `example`.
    # Raises:
    #     ValueError: without an example; for a schedule that these ranks cannot have, or that would
    #         hang with what stages need of one another; for a step that cannot be cut like this.
    if example is None:
        raise ValueError(
            "a plan with stages is verified with an example of its steps: "
            "verify_plan(example=Example(step, microbatch))"
        )
    assert plan.schedule is not None, "a plan without stages"
    schedule = make_schedule(
        plan.schedule,
        num_ranks=plan.mesh.pipeline_size,
        num_microbatches=plan.num_microbatches,
        stages_per_rank=plan.stages_per_rank,
    )
    # The step on shapes, cut where the plan cuts it.
    blocks = [tuple(each.block for each in stage.blocks if each.block) for stage in plan.stages]
    units = [name for names in blocks for name in names]
    flow = trace_flow(module, example.step, example.microbatch, units=units)
    stage_of_call = assign_calls(flow, blocks)
    # For each stage the earlier ones that it receives from: the schedule must not hang.
    sources = defaultdict[int, set[int]](set)
    for ref, needed_by in flow.crossings(stage_of_call).items():
        for stage in needed_by:
            sources[stage].add(stage_of_call[ref.call])
    check_schedule(schedule, needs={stage: sorted(found) for stage, found in sources.items()})
    ranks = schedule.rank_of_stage
    return StageLayout.of_flow(flow, stage_of_call, module, rank_of_stage=ranks)

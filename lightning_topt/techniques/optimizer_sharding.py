"""Sharded optimizer state (ZeRO level 1): gradients as in data parallelism, updates shared.

Each rank's step updates its pieces of the parameters and sends them to the others
(`optim.ParallelStep`). If the update treats elements one by one, pieces are rows, and every rank
has an even share. Else parameters are not cut (`optim.pieces`). A block counts an even share of its
state and update; what the busiest rank of a plan has above that is the plan's.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence

import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_topt.basics import once_per_object
from lightning_topt.communication.exchange_method import equal_parameters
from lightning_topt.costs.lifetimes import Lifetime
from lightning_topt.costs.sizes import parameter_bytes
from lightning_topt.costs.training_step import TrainingStep, temporaries_seconds
from lightning_topt.graph.mesh_axes import Mesh
from lightning_topt.graph.op_config import OpConfig, Storage
from lightning_topt.graph.op_graph import Block, OpGraph, Parameter
from lightning_topt.optim.full_state import parameters_of
from lightning_topt.optim.parallel_step import (
    SMALL_BYTES,
    ParallelStep,
    check_can_be_split,
    install_parallel_step,
    share_bytes,
)
from lightning_topt.optim.pieces import Share, assign_pieces, update_work
from lightning_topt.optim.update_rule import (
    UnsplittableOptimizer,
    pieces_of,
    update_rule,
    updates_whole,
)
from lightning_topt.techniques.data_parallel import add_reduction, unsharded_lifetimes
from lightning_topt.techniques.ddp_wrapper import names_to_ignore
from lightning_topt.techniques.technique import (
    Applied,
    BlockSeconds,
    Neighbours,
    ParallelModel,
    Technique,
    has_data_axes,
)


class OptimizerSharding(Technique):
    """The optimizer state is sharded along all data axes."""

    name = "sharded optimizer state"

    @override
    def claims(self, config: OpConfig, mesh: Mesh) -> frozenset[str]:
        sharded = Storage.zero(1, axes=len(mesh.axes), over=mesh.data_axes)
        return (
            frozenset({"storage"})
            if has_data_axes(mesh) and config.storage == sharded
            else frozenset()
        )

    # ---- what is legal ---------------------------------------------------------------------------

    @override
    def configs(
        self, step: TrainingStep, block: Block, so_far: Sequence[OpConfig]
    ) -> list[OpConfig]:
        mesh = step.mesh
        alone = mesh.data_parallel_size == 1 or step.local_steps is not None
        if alone or not step.optimizer.by_parameter:
            return []
        return [OpConfig.zero(1, axes=len(mesh.axes), over=mesh.data_axes)]

    # ---- what it costs ---------------------------------------------------------------------------

    @override
    def lifetimes(
        self, step: TrainingStep, block: str, config: OpConfig, beside: Neighbours
    ) -> Iterator[Lifetime]:
        yield from unsharded_lifetimes(step, block, owners=step.mesh.data_parallel_size)

    @override
    def plan_lifetimes(self, step: TrainingStep, blocks: Collection[str]) -> Iterator[Lifetime]:
        # how much more the busiest rank has than an even share, which blocks count
        states = excess(step, blocks, names=step.optimizer.whole)
        yield step.phases.always("optimizer state", states)

    @override
    def add_seconds(
        self, seconds: BlockSeconds, step: TrainingStep, block: str, config: OpConfig
    ) -> None:
        # gradients as in data parallelism, then an even share of the update
        add_reduction(seconds, step, block)
        ranks, parameters = step.mesh.data_parallel_size, step.parameters(block)
        seconds.update += sum(step.update_seconds(p) for p in parameters) / ranks
        seconds.update += temporaries_seconds(step, {p: 1 / ranks for p in parameters})
        seconds.update += step.taken_seconds(
            sum(self.result_bytes(step, p, config) for p in parameters)
        )
        # Updated parameters from their owners to all ranks, as `PieceGather` sends them: large ones
        # alone and small ones together, by NCCL all of them in flat buckets. The exchanges follow
        # one another: nobody computes in between, so nobody waits.
        sizes = [parameter_bytes(p) for p in parameters if p.trainable]
        large = [size for size in sizes if size >= SMALL_BYTES]
        op, parts = "all_gather", [sum(sizes)]
        if step.on_gloo:
            op, parts = "broadcast", [*large, sum(sizes) - sum(large)]
        exchanges = [
            step.collective("update", op, size, axes=step.mesh.data_axes) for size in parts
        ]
        seconds.broadcast += step.seconds_of(exchanges) - step.waits_of(exchanges)

    @override
    def plan_seconds(self, step: TrainingStep, blocks: Collection[str]) -> float:
        return excess(step, blocks, step.update_seconds, names=step.optimizer.whole)

    @override
    def result_bytes(self, step: TrainingStep, parameter: Parameter, config: OpConfig) -> float:
        size = float(parameter_bytes(parameter)) if parameter.trainable else 0.0
        if step.on_gloo:
            return size if size < SMALL_BYTES else 0.0
        # its part of the two flat buckets that live at once
        ranks, trained = step.mesh.data_parallel_size, _trained_bytes(step.graph)
        return size * min(1.0, 2 * ranks * share_bytes(ranks) / max(trained, 1))

    # ---- how it is applied -----------------------------------------------------------------------

    @override
    def apply(self, model: ParallelModel) -> Applied | None:
        names = [
            parameter
            for block in model.blocks_of(self)
            for parameter in model.parameters[block].values()
        ]
        # parameters that differ between ranks have other updates there
        equal = {*equal_parameters(model.module, names_to_ignore(model.module)).values()}
        shared = {parameter for parameter in names if is_shared(parameter) and parameter in equal}
        if not shared:
            return None
        ranks, group = model.mesh.data_parallel_size, model.data_group
        return Applied(
            attach=lambda optimizer: share_step(optimizer, shared, ranks=ranks, group=group)
        )


@once_per_object
def _trained_bytes(graph: OpGraph) -> int:
    return sum(parameter_bytes(p) for p in graph.parameters if p.trainable)


def share_step(
    optimizer: Optimizer,
    shared: Collection[Tensor] = (),
    *,
    ranks: int,
    group: dist.ProcessGroup | None,
) -> ParallelStep | None:
    """Share the updates of `shared` parameters, and of shards that need an owner, in `group`.

    Returns None where the optimizer has none, or where another technique has shared its step: that
    step takes them too.
    """
    installed = optimizer.__dict__.get("step")
    parameters, known = parameters_of(optimizer), set[int]()
    if isinstance(installed, ParallelStep):
        known = {piece.index for piece in installed.current_pieces()}
    if any(isinstance(p, DTensor) for p in parameters) and updates_whole(optimizer):
        shared = {*shared, *(p for p in parameters if isinstance(p, DTensor) and is_shared(p))}
    pieces = pieces_of(optimizer, {*shared, *(parameters[i] for i in known)}, ranks=ranks)
    if {piece.index for piece in pieces} == known:
        return None
    if isinstance(installed, ParallelStep):
        installed.update_pieces(pieces)
        return None
    check_can_be_split(optimizer)
    try:
        update_rule(optimizer)
    except UnsplittableOptimizer as error:
        raise UnsplittableOptimizer(
            f"this plan shares the optimizer step between ranks (ZeRO level 1), but {error.reason}",
            "Choose plan='ddp'",
        ) from error
    return install_parallel_step(optimizer, pieces=pieces, group=group)


def is_shared(parameter: Tensor) -> bool:
    """Return whether a parameter has an update to share."""
    return parameter.requires_grad and parameter.numel() > 0


def excess(
    step: TrainingStep,
    blocks: Collection[str],
    load: Callable[[Parameter], float] | None = None,
    *,
    names: Collection[str],
) -> float:
    """Return the load of the busiest rank of `blocks` above the average.

    `load`, None: bytes of state, is summed over the parameters `names`, each of which one rank
    updates. Ranks cut all others into pieces as small as a row: shares of these are even.
    """
    if not names:
        return 0.0
    # parameters are assigned to ranks as `pieces_of` does, and loads summed by owner
    found = step.graph.parameters
    whole = [p for p in found if p.block in blocks and p.name in names and p.numel]
    shares = [
        Share(index, 1, update_work(p.shape), splittable=False) for index, p in enumerate(whole)
    ]
    totals = [0.0] * step.mesh.data_parallel_size
    for piece in assign_pieces(shares, world_size=len(totals)):
        p = whole[piece.index]
        totals[piece.owner] += step.optimizer.state_bytes(p.name) if load is None else load(p)
    return max(totals) - sum(totals) / len(totals)

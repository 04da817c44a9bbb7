"""Sharded optimizer state (ZeRO level 1): each parameter is updated by one rank, which then sends it to the others.

Parameters go whole to ranks by longest processing time first (`optim.assign`), through `optim.ParallelStep`. A block counts
an even share of its state and update; what the busiest rank of a plan has above that is the plan's.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

from typing_extensions import override

from lightning_topt.costs.lifetimes import Lifetime
from lightning_topt.costs.sizes import parameter_bytes
from lightning_topt.costs.training_step import TrainingStep
from lightning_topt.costs.update import temporaries_seconds
from lightning_topt.graph.mesh_axes import Mesh
from lightning_topt.graph.op_config import OpConfig
from lightning_topt.graph.op_graph import Block, Parameter
from lightning_topt.graph.ownership import assign_owners
from lightning_topt.techniques.data_parallel import add_reduction, whole_gradient_lifetimes
from lightning_topt.techniques.technique import BlockSeconds, Neighbours, Technique

_SMALL_BYTES = 1 << 20  # parameters below it are broadcast together (optim.gather)


class OptimizerSharding(Technique):
    """Whole parameters and gradients, optimizer state sharded over all data axes."""

    @override
    def places(self, config: OpConfig, mesh: Mesh) -> bool:
        return config.storage.level == 1 and config.storage.sharded_axes("optimizer_state") == mesh.data_axes

    # ---- what is legal ----------------------------------------------------------------------------------------------

    @override
    def configs(self, step: TrainingStep, block: Block, so_far: Sequence[OpConfig]) -> list[OpConfig]:
        mesh = step.mesh
        if mesh.data_parallel_size == 1 or not step.optimizer.by_parameter:
            return []
        return [OpConfig.zero(1, axes=len(mesh.axes), over=mesh.data_axes)]

    # ---- what it costs ----------------------------------------------------------------------------------------------

    @override
    def lifetimes(self, step: TrainingStep, block: str, config: OpConfig, beside: Neighbours) -> Iterator[Lifetime]:
        yield from whole_gradient_lifetimes(step, block)
        state = sum(step.optimizer.state_bytes(p.name) for p in step.parameters(block))
        yield step.phases.always("optimizer state", state / step.mesh.data_parallel_size)

    @override
    def plan_lifetimes(self, step: TrainingStep, blocks: Collection[str]) -> Iterator[Lifetime]:
        states = {p.name: float(step.optimizer.state_bytes(p.name)) for p in step.graph.parameters}
        yield step.phases.always("optimizer state", _excess(step, blocks, states))

    @override
    def add_seconds(self, seconds: BlockSeconds, step: TrainingStep, block: str, config: OpConfig) -> None:
        add_reduction(seconds, step, block)
        ranks, parameters = step.mesh.data_parallel_size, step.parameters(block)
        seconds.update += sum(step.update_seconds(p) for p in parameters) / ranks
        seconds.update += temporaries_seconds(step, {p: 1 / ranks for p in parameters})
        sizes = [parameter_bytes(p) for p in parameters if p.trainable]
        parts = [size for size in sizes if size >= _SMALL_BYTES] + [sum(size for size in sizes if size < _SMALL_BYTES)]
        seconds.broadcast += sum(step.collective_seconds("broadcast", size, axes=step.mesh.data_axes) for size in parts)

    @override
    def plan_seconds(self, step: TrainingStep, blocks: Collection[str]) -> float:
        return _excess(step, blocks, {p.name: step.update_seconds(p) for p in step.graph.parameters})

    @override
    def update_share(self, step: TrainingStep, parameter: Parameter, config: OpConfig) -> float:
        return 1.0


def _excess(step: TrainingStep, blocks: Collection[str], loads: Mapping[str, float]) -> float:
    """The largest sum of `loads` (by parameter name) over what one rank updates of `blocks`, above the average."""
    totals = [0.0] * step.mesh.data_parallel_size
    parameters = [p for block in blocks for p in step.parameters(block)]
    for name, rank in assign_owners({p.name: p.numel for p in parameters if p.trainable}, len(totals)).items():
        totals[rank] += loads[name]
    return max(totals) - sum(loads[p.name] for p in parameters) / len(totals)

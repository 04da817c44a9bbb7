"""Data parallelism: parameters, gradients and optimizer state whole on every rank, through DistributedDataParallel.

    what                                         source
    P + G + S all the time                       Rajbhandari et al., arXiv 1910.02054, section 5
    gradients twice while buckets are rebuilt    torch 2.13 `reducer.cpp`: once, before the second forward, in the order in
                                                 which gradients became ready
    gradients outside the buckets                autograd makes a gradient as a tensor of its own, which is then copied

Gradients are views of DDP's buckets (gradient_as_bucket_view), which stay.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from typing_extensions import override

from lightning_topt.costs.lifetimes import REBUILD, REDUCE_LAST, UPDATE, Lifetime
from lightning_topt.costs.sizes import gradient_bytes, parameter_bytes
from lightning_topt.costs.training_step import TrainingStep
from lightning_topt.costs.update import temporaries_seconds
from lightning_topt.graph.mesh_axes import Mesh
from lightning_topt.graph.op_config import OpConfig
from lightning_topt.graph.op_graph import Block, Parameter
from lightning_topt.techniques.technique import BlockSeconds, Neighbours, Technique


class DataParallel(Technique):
    """Everything whole on every rank (ZeRO level 0)."""

    @override
    def places(self, config: OpConfig, mesh: Mesh) -> bool:
        return config.storage.level == 0

    # ---- what is legal ----------------------------------------------------------------------------------------------

    @override
    def configs(self, step: TrainingStep, block: Block, so_far: Sequence[OpConfig]) -> list[OpConfig]:
        return [OpConfig.zero(0, axes=len(step.mesh.axes))]

    # ---- what it costs ----------------------------------------------------------------------------------------------

    @override
    def lifetimes(self, step: TrainingStep, block: str, config: OpConfig, beside: Neighbours) -> Iterator[Lifetime]:
        yield from whole_gradient_lifetimes(step, block)
        state = sum(step.optimizer.state_bytes(p.name) for p in step.parameters(block))
        yield step.phases.always("optimizer state", state)

    @override
    def plan_lifetimes(self, step: TrainingStep, blocks: Collection[str]) -> Iterator[Lifetime]:
        return iter(())

    @override
    def add_seconds(self, seconds: BlockSeconds, step: TrainingStep, block: str, config: OpConfig) -> None:
        add_reduction(seconds, step, block)
        parameters = step.parameters(block)
        seconds.update += sum(step.update_seconds(p) for p in parameters)
        seconds.update += temporaries_seconds(step, {p: 1.0 for p in parameters})

    @override
    def plan_seconds(self, step: TrainingStep, blocks: Collection[str]) -> float:
        return 0.0

    @override
    def update_share(self, step: TrainingStep, parameter: Parameter, config: OpConfig) -> float:
        return 1.0


def whole_gradient_lifetimes(step: TrainingStep, block: str) -> Iterator[Lifetime]:
    """Yield whole parameters and gradients, and what a compressed exchange of these keeps."""
    parameters, phases = step.parameters(block), step.phases
    gradients = sum(map(gradient_bytes, parameters))
    yield phases.always("parameters", sum(map(parameter_bytes, parameters)))
    yield phases.always("gradients", gradients)
    yield Lifetime("gradients", gradients, REBUILD, REBUILD)
    if step.exchange_model is not None and step.segments.count:
        work = step.exchange_model.work[block]
        yield Lifetime("held-back gradients", work.kept_bytes, phases.after(REBUILD), UPDATE)
        # On a slow network all its buffers are in flight to the end.
        yield Lifetime("exchange buffers", work.buffer_bytes, ("backward", ready(step, block)), REDUCE_LAST)
    yield from _loose_gradient_lifetimes(step, parameters)


def _loose_gradient_lifetimes(step: TrainingStep, parameters: Sequence[Parameter]) -> Iterator[Lifetime]:
    """Gradients outside DDP's buckets: the largest of a segment.

    That of a parameter used in several segments waits from the first of their backwards to the last, where the second part
    is added.
    """
    spans = step.segments.of_parameter
    done: dict[int, int] = {}
    for parameter in parameters:
        first, last = spans[parameter.name]
        done[first] = max(done.get(first, 0), gradient_bytes(parameter))
        if first < last:
            yield Lifetime("gradients", gradient_bytes(parameter), ("backward", last), ("backward", first))
    for k, size in done.items():
        yield Lifetime("gradients", size, ("backward", k), ("backward", k))


def add_reduction(seconds: BlockSeconds, step: TrainingStep, block: str) -> None:
    """Add the exchange of the whole gradients of `block`, and their copy into DDP's bucket."""
    size = sum(map(gradient_bytes, step.parameters(block)))
    if step.exchange_model is None:
        reduce, on_device = step.collective_seconds("all_reduce", size, axes=step.mesh.data_axes), 0.0
    else:
        reduce = step.exchange_model.worker_seconds(block)
        on_device = step.exchange_model.device_seconds(block)
    beside = 0.0 if step.mesh.data_parallel_size == 1 else step.cluster.overlap
    seconds.reduce_foreground += (1 - beside) * reduce + on_device + step.copy_seconds(size)
    seconds.reduce_background += beside * reduce


def ready(step: TrainingStep, block: str) -> int:
    """Return the segment after whose backward the gradients of `block` are complete."""
    parameters = step.parameters(block)
    return min((step.segments.of_parameter[p.name][0] for p in parameters if p.trainable), default=0)

"""Data parallelism (ZeRO level 0): torch's DistributedDataParallel (DDP) averages the gradients.

Every rank holds all parameters and unsharded gradients.

    what                                         source
    P + G + S all the time, G those of buckets   Rajbhandari et al., arXiv 1910.02054, section 5
    gradients beside the buckets                 torch 2.13 `reducer.cpp`: autograd makes a gradient
                                                 as a tensor of its own, which is copied into a
                                                 bucket, and back once the bucket is averaged
    views: gradients twice while buckets are     same file: once, before the second forward, in the
    rebuilt                                      order in which gradients became ready; old buckets
                                                 go first, but where gradients are views of them

P are the bytes of parameters, G of gradients, S of the optimizer's state. Under torch's defaults,
gradients are tensors of their own. If the step says so they are views of DDP's buckets: then what
autograd makes is freed once it is copied. Zero_grad frees gradients, not buckets, between forward
and backward.

DDP also averages the unsharded gradients of blocks whose optimizer state is sharded (ZeRO level 1).
It ignores parameters of the same model whose gradients are sharded.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import nn
from typing_extensions import override

from lightning_topt.costs.lifetimes import FORWARD_OVER, REBUILD, UPDATE, Lifetime
from lightning_topt.costs.sizes import gradient_bytes, parameter_bytes
from lightning_topt.costs.training_step import TrainingStep, temporaries_seconds
from lightning_topt.graph.mesh_axes import Mesh
from lightning_topt.graph.op_config import OpConfig, Storage
from lightning_topt.graph.op_graph import Block, Parameter
from lightning_topt.techniques.ddp_wrapper import wrap_in_ddp
from lightning_topt.techniques.technique import (
    Applied,
    BlockSeconds,
    Neighbours,
    ParallelModel,
    Technique,
    has_known_axes,
    has_unsharded_gradients,
)


class DataParallel(Technique):
    """The technique of blocks of which nothing is sharded."""

    name = "data parallelism"

    @override
    def claims(self, config: OpConfig, mesh: Mesh) -> frozenset[str]:
        whole = config.storage == Storage.zero(0, axes=len(mesh.axes))
        return frozenset({"storage"}) if whole and has_known_axes(mesh) else frozenset()

    # ---- what is legal ---------------------------------------------------------------------------

    @override
    def configs(
        self, step: TrainingStep, block: Block, so_far: Sequence[OpConfig]
    ) -> list[OpConfig]:
        return [OpConfig.zero(0, axes=len(step.mesh.axes))]

    # ---- what it costs ---------------------------------------------------------------------------

    @override
    def lifetimes(
        self, step: TrainingStep, block: str, config: OpConfig, beside: Neighbours
    ) -> Iterator[Lifetime]:
        yield from unsharded_lifetimes(step, block)

    @override
    def add_seconds(
        self, seconds: BlockSeconds, step: TrainingStep, block: str, config: OpConfig
    ) -> None:
        add_reduction(seconds, step, block)
        parameters = step.parameters(block)
        seconds.update += sum(step.update_seconds(p) for p in parameters)
        seconds.update += temporaries_seconds(step, {p: 1.0 for p in parameters})

    # ---- how it is applied -----------------------------------------------------------------------

    @override
    def apply(self, model: ParallelModel) -> Applied | None:
        """Wrap the module in DDP.

        With stages there is no DDP: their gradients are exchanged when a stage ends. Nor where
        ranks train alone.
        """
        if model.mesh.pipeline_axes:
            return None
        # FSDP2 does what is sharded, DDP the rest
        whole = model.parameters_where(has_unsharded_gradients)
        if model.local_steps is not None:
            _move(model, whole)
            return None
        sharded = model.parameters_where(lambda config: not has_unsharded_gradients(config))
        if sharded and not any(parameter.requires_grad for parameter in whole.values()):
            return None  # DDP takes no module in which it has nothing to average
        _move(model, whole)
        if model.mesh.data_parallel_size == 1 and model.mesh.tensor_axes:
            return None
        # along the data axes only, if there are others
        arguments = dict(model.options.ddp)
        if model.data_group is not None:
            arguments["process_group"] = model.data_group
        if model.num_microbatches > 1:
            # the caller sends buffers, and stashes gradients from batch to batch
            arguments |= {"broadcast_buffers": False, "gradient_as_bucket_view": False}
        model.root = wrap_in_ddp(
            model.module,
            replace(model.options, ddp=arguments),
            device=model.device,
            ignored=_names_for_ddp(sharded),
        )
        return Applied(no_sync=model.root.no_sync)


def unsharded_lifetimes(step: TrainingStep, block: str, *, owners: int = 1) -> Iterator[Lifetime]:
    """Yield unsharded parameters, gradients, the buckets of DDP, and state that `owners` share."""
    parameters, phases = step.parameters(block), step.phases
    gradients = sum(map(gradient_bytes, parameters))
    yield phases.always("parameters", sum(map(parameter_bytes, parameters)))
    if has_buckets(step):
        yield phases.always("gradient buckets", gradients)
    if step.num_microbatches > 1:  # those of the microbatches so far
        yield phases.always("gradients", gradients)
        yield from _loose_gradient_lifetimes(step, parameters)
    elif step.gradient_views and has_buckets(step):
        yield Lifetime("gradients", gradients, REBUILD, REBUILD)
        yield from _loose_gradient_lifetimes(step, parameters)
    else:
        yield from _own_gradient_lifetimes(step, parameters)
    state = sum(step.optimizer.state_bytes(p.name) for p in parameters)
    yield phases.always("optimizer state", state / owners)


def has_buckets(step: TrainingStep) -> bool:
    """Return whether unsharded gradients travel in DDP's buckets.

    They do not if each slice is on one rank only, nor if ranks train alone.
    """
    if step.local_steps is not None:
        return False
    return step.mesh.data_parallel_size > 1 or not step.mesh.tensor_axes


def _own_gradient_lifetimes(
    step: TrainingStep, parameters: Sequence[Parameter]
) -> Iterator[Lifetime]:
    # Yield gradients that are tensors of their own.
    # Those of the last step live until zero_grad, which comes after forward. New ones live from the
    # backward of the last segment that uses the parameter.
    spans = step.segments.of_parameter
    yield Lifetime("gradients", sum(map(gradient_bytes, parameters)), REBUILD, FORWARD_OVER)
    # by segment: gradients that begin there, and the largest second part
    begun: dict[int, float] = {}
    second: dict[int, float] = {}
    for parameter in parameters:
        (first, last), size = spans[parameter.name], float(gradient_bytes(parameter))
        begun[last] = begun.get(last, 0.0) + size
        if first < last:  # the second part, before it is added
            second[first] = max(second.get(first, 0.0), size)
    for k, size in begun.items():
        yield Lifetime("gradients", size, ("backward", k), UPDATE)
    for k, size in second.items():
        yield Lifetime("gradients", size, ("backward", k), ("backward", k))


def _loose_gradient_lifetimes(
    step: TrainingStep, parameters: Sequence[Parameter]
) -> Iterator[Lifetime]:
    # Yield gradients outside DDP's buckets: the largest of a segment.
    # That of a parameter used in several segments waits from the first of their backwards to the
    # last, where the second part is added.
    spans = step.segments.of_parameter
    done: dict[int, int] = {}
    for parameter in parameters:
        first, last = spans[parameter.name]
        done[first] = max(done.get(first, 0), gradient_bytes(parameter))
        if first < last:
            yield Lifetime(
                "gradients", gradient_bytes(parameter), ("backward", last), ("backward", first)
            )
    for k, size in done.items():
        yield Lifetime("gradients", size, ("backward", k), ("backward", k))


def add_reduction(seconds: BlockSeconds, step: TrainingStep, block: str) -> None:
    """Add copies of unsharded gradients into DDP's buckets and out of them, and their all-reduce.

    They are copied out once all are averaged. The all-reduce is left out if something else
    exchanges them.
    """
    copy = (
        step.copy_seconds(sum(map(gradient_bytes, step.parameters(block))))
        if has_buckets(step)
        else 0.0
    )
    # each backward pass of manual optimization averages all buckets
    passes = step.graph.manual_passes or 1
    copied = step.copied_seconds(block) if has_buckets(step) else 0.0
    seconds.reduce_foreground += passes * (copy + copied)
    seconds.reduce_last += 0.0 if step.gradient_views else passes * copy
    if step.exchange is None and step.local_steps is None:
        size = sum(map(gradient_bytes, step.parameters(block)))
        all_reduce = [step.collective("backward", "all_reduce", size, axes=step.mesh.data_axes)]
        all_reduce *= passes
        add_exchange(seconds, step, step.seconds_of(all_reduce), waits=step.waits_of(all_reduce))


def add_exchange(
    seconds: BlockSeconds, step: TrainingStep, exchange: float, *, waits: float
) -> None:
    """Add an exchange of gradients that takes `exchange` seconds.

    The cluster's `overlap` of it runs beside backward, and so do all `waits` in it for other ranks.
    """
    beside = 0.0 if step.mesh.data_parallel_size == 1 else step.cluster.overlap
    seconds.reduce_foreground += (1 - beside) * (exchange - waits)
    seconds.reduce_background += beside * (exchange - waits) + waits


def _names_for_ddp(names: Collection[str]) -> list[str]:
    # DDP looks a parameter of the root up as "scale" in one place and as ".scale" in another.
    return [*names, *(f".{name}" for name in names if "." not in name)]


@torch.no_grad()
def _move(model: ParallelModel, whole: Mapping[str, nn.Parameter]) -> None:
    # Move the module to its device, except for parameters that are to be sharded.
    # Those may be too large to be there unsharded.
    for tensor in (*whole.values(), *model.module.buffers()):
        tensor.data = tensor.data.to(model.device)

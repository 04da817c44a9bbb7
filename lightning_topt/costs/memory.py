"""Bytes of one rank over the moments of a training step; the peak of a plan is the largest sum over its blocks.

Lightning's automatic optimization runs forward, zero_grad, backward, step, so that the last step's gradients are alive
in forward. Everything is a lifetime: some bytes from one moment to another. Contributions of blocks add, so a block's
lifetimes under each configuration are all that the search needs.

    what                                    function                source
    activations, recomputation              activation_lifetimes    captured timeline; Chen et al., arXiv 1604.06174
    whole parameters and gradients (DDP)    replicated_lifetimes    Rajbhandari et al., arXiv 1910.02054, section 5
    shards of them (FSDP2)                  sharded_lifetimes       same
    whole gradients before reduce_scatter   gradient_lifetimes      torch 2.13 `_fsdp_param_group.py`, `post_backward`
    compressed exchange of gradients        exchange_lifetimes      `exchange_work`
    gathered parameters and flat buffers    gathered_lifetimes      same file, `wait_for_unshard`, `_backward_prefetch`

Symbols: k segment of the forward pass, N ranks, P parameter bytes, G gradient bytes, S optimizer state bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from lightning_topt.costs.cost_table import Array
from lightning_topt.costs.exchange import ExchangeModel
from lightning_topt.costs.optimizer import OptimizerProfile
from lightning_topt.costs.segments import Segments, blocks_reduced_last, locate
from lightning_topt.costs.sizes import (
    ROOT,
    gloo_workspace,
    gradient_bytes,
    padded_bytes,
    parameter_bytes,
    shard_bytes,
    shard_share,
)
from lightning_topt.graph.op_graph import OpGraph, Segment

FAMILIES = ("replicated", "sharded")

# What sharded plans took on gloo above everything listed here, on ranks of 12 model families: up to 14 MiB, mostly 2 to 6
# (benchmarks/strangers.py): work objects, small blocks between large ones. A reserve, not a model.
_SHARDED_RESERVE_BYTES = 8 << 20

Moment = tuple[str, int]  # what happens, in which segment
STEP: Moment = ("step", 0)
REDUCE_ROOT: Moment = ("reduce_root", 0)
REBUILD: Moment = ("rebuild_buckets", 0)  # DDP, once: before the second forward, in the order gradients became ready


@dataclass(frozen=True)
class Lifetime:
    """`bytes` of `kind`, alive from the moment `first` to `last`, both included; never when `last` is earlier."""

    kind: str
    bytes: float
    first: Moment
    last: Moment


@dataclass(frozen=True)
class StepMemory:
    """What the memory of every block depends on: `family` is ``"replicated"`` (ZeRO 0, 1) or ``"sharded"`` (2, 3),
    `backend` and `process_bytes` as in `Cluster`, `batch_size` samples per rank, `exchange` as in `StepTime`.
    """

    graph: OpGraph
    optimizer: OptimizerProfile
    family: str
    batch_size: float
    world_size: int
    backend: str = "nccl"
    process_bytes: int = 0
    exchange: ExchangeModel | None = None

    @cached_property
    def segments(self) -> Segments:
        """Where parameters are used."""
        return locate(self.graph)

    @cached_property
    def reduced_last(self) -> frozenset[str]:
        """Sharded blocks that FSDP2 reduces when all backwards are over, beside the root."""
        return blocks_reduced_last(self.graph) - {ROOT}

    @cached_property
    def moments(self) -> tuple[Moment, ...]:
        """The moments of a step in the order of time."""
        forward, backward = range(self.segments.count), range(self.segments.count - 1, -1, -1)
        if self.family == "replicated":
            return (REBUILD, *(("forward", k) for k in forward), *(("backward", k) for k in backward), STEP)
        kinds = ("gather_backward", "prefetch_backward", "backward", "reduce")
        return (
            *((kind, k) for k in forward for kind in ("gather_forward", "forward")),
            *((kind, k) for k in backward for kind in kinds),
            REDUCE_ROOT,
            STEP,
        )

    @cached_property
    def position(self) -> dict[Moment, int]:
        """Index of each moment."""
        return {moment: index for index, moment in enumerate(self.moments)}

    def before(self, moment: Moment) -> Moment:
        """The moment before; `moment` must not be the first."""
        return self.moments[self.position[moment] - 1]

    def after(self, moment: Moment) -> Moment:
        """The moment after; `moment` must not be the last."""
        return self.moments[self.position[moment] + 1]

    def reduce_workspace(self, flat: float) -> float:
        """Bytes that a reduce_scatter of a buffer of `flat` bytes takes inside; on NCCL, which is not torch's, 0."""
        return gloo_workspace(flat, world_size=self.world_size) if self.backend == "gloo" else 0.0

    def add_up(self, lifetimes: Iterable[Lifetime]) -> Array:
        """Live bytes at each moment (moment,)."""
        total = np.zeros(len(self.moments))
        for lifetime in lifetimes:
            total[self.position[lifetime.first] : self.position[lifetime.last] + 1] += lifetime.bytes
        return total


def block_lifetimes(step: StepMemory, *, block: str, stage: int, recompute: bool, state_bytes: float) -> list[Lifetime]:
    """Everything that `block` keeps in memory under one configuration.

    `state_bytes` is this rank's share of the optimizer state of a replicated block; sharded blocks know their own.
    """
    lifetimes = [*activation_lifetimes(step, block=block, recompute=recompute)]
    if step.family == "replicated":
        lifetimes += replicated_lifetimes(step, block=block, state_bytes=state_bytes)
        lifetimes += exchange_lifetimes(step, block=block)
    else:
        lifetimes += sharded_lifetimes(step, block=block)
        lifetimes += gathered_lifetimes(step, block=block, stage=stage)
        lifetimes += gradient_lifetimes(step, block=block)
    return lifetimes


def fixed_lifetimes(step: StepMemory) -> list[Lifetime]:
    """Everything that every plan of the family keeps in memory."""
    size = step.graph.buffer_bytes + step.graph.input_bytes.at(step.batch_size)
    lifetimes = [Lifetime("buffers and batch", size, step.moments[0], STEP), *update_lifetimes(step)]
    lifetimes.append(Lifetime("process", step.process_bytes, step.moments[0], STEP))
    if step.family == "sharded" and step.backend == "gloo":
        lifetimes.append(Lifetime("reserve", _SHARDED_RESERVE_BYTES, step.moments[0], STEP))
    if step.family == "sharded":
        workspace = max((_last_workspace(step, block) for block in step.reduced_last), default=0.0)  # one after another
        lifetimes.append(Lifetime("gradients", workspace, REDUCE_ROOT, REDUCE_ROOT))
    if step.family == "replicated":
        lifetimes += loose_gradient_lifetimes(step)
    return lifetimes


# ---- all plans -----------------------------------------------------------------------------------------------------


def activation_lifetimes(step: StepMemory, *, block: str, recompute: bool) -> Iterator[Lifetime]:
    """Activations of every segment of `block`; recomputed ones keep their output only and come back in backward."""
    for k, segment in enumerate(step.graph.timeline):
        if segment.block == block:
            between, backward = _segment_bytes(segment, recompute=recompute, batch_size=step.batch_size)
            yield Lifetime(
                "activations", segment.forward_peak_bytes.at(step.batch_size), ("forward", k), ("forward", k)
            )
            yield Lifetime("activations", between, step.after(("forward", k)), step.before(("backward", k)))
            yield Lifetime("activations", backward, ("backward", k), ("backward", k))


def _segment_bytes(segment: Segment, *, recompute: bool, batch_size: float) -> tuple[float, float]:
    """(bytes between forward and backward, bytes during backward)."""
    kept, output = segment.kept_bytes.at(batch_size), segment.output_bytes.at(batch_size)
    backward = kept + segment.backward_peak_bytes.at(batch_size)
    if not recompute:
        return kept, backward
    # While it recomputes, the gradient of its output is alive, which is as large as the output.
    return output, max(backward, output + segment.forward_peak_bytes.at(batch_size))


def update_lifetimes(step: StepMemory) -> Iterator[Lifetime]:
    """Temporaries of the optimizer step: of the largest parameter for a for-loop, of all for foreach.

    Under ZeRO 1 a rank updates its own parameters only, and less is alive; the bound holds.
    """
    largest, together = 0.0, 0.0
    for parameter in step.graph.parameters:
        update = step.optimizer.updates.get(parameter.name)
        if update is not None:
            share = 1.0 if step.family == "replicated" else shard_share(parameter, step.world_size)
            largest = max(largest, 0.0 if update.temporaries_add else update.temporary_bytes * share)
            together += update.temporary_bytes * share if update.temporaries_add else 0.0
    yield Lifetime("temporaries", max(largest, together), STEP, STEP)


# ---- whole parameters on every rank --------------------------------------------------------------------------------


def replicated_lifetimes(step: StepMemory, *, block: str, state_bytes: float) -> Iterator[Lifetime]:
    """P + G + S all the time: DDP's buckets are the gradients (gradient_as_bucket_view) and stay; twice while rebuilt."""
    parameters = step.graph.block_parameters(block)
    sizes = {
        "parameters": sum(map(parameter_bytes, parameters)),
        "gradients": sum(map(gradient_bytes, parameters)),
        "optimizer state": state_bytes,
    }
    for kind, size in sizes.items():
        yield Lifetime(kind, size, step.moments[0], STEP)
    yield Lifetime("gradients", sizes["gradients"], REBUILD, REBUILD)


def exchange_lifetimes(step: StepMemory, *, block: str) -> Iterator[Lifetime]:
    """What it holds back from the second backward on; its buffers, all in flight to the end on a slow network."""
    if step.exchange is not None and step.segments.count:
        work = step.exchange.work[block]
        yield Lifetime("held-back gradients", work.kept_bytes, step.after(REBUILD), STEP)
        spans = [step.segments.of_parameter[p.name][0] for p in step.graph.block_parameters(block) if p.trainable]
        yield Lifetime("exchange buffers", work.buffer_bytes, ("backward", min(spans, default=0)), ("backward", 0))


def loose_gradient_lifetimes(step: StepMemory) -> Iterator[Lifetime]:
    """Gradients outside DDP's buckets.

    Autograd makes a gradient as a tensor of its own, which is then copied into the bucket. That of a parameter used in
    several segments waits from the first of their backwards to the last, where the second part is added.
    """
    spans = step.segments.of_parameter
    for k in range(step.segments.count):
        done = [gradient_bytes(p) for p in step.graph.parameters if spans[p.name][0] == k]
        yield Lifetime("gradients", max(done, default=0), ("backward", k), ("backward", k))
    for parameter in step.graph.parameters:
        first, last = spans[parameter.name]
        if first < last:
            yield Lifetime("gradients", gradient_bytes(parameter), ("backward", last), ("backward", first))


# ---- shards on every rank ------------------------------------------------------------------------------------------


def sharded_lifetimes(step: StepMemory, *, block: str) -> Iterator[Lifetime]:
    """Shards of P, G and S: those of the last step's gradients until forward is over, new ones once reduced."""
    parameters, size = step.graph.block_parameters(block), step.world_size
    states = sum(step.optimizer.state_bytes(p.name) * shard_share(p, size) for p in parameters)
    gradients = sum(shard_bytes(p, size) for p in parameters if p.trainable)
    start = step.moments[0]
    yield Lifetime("parameters", sum(shard_bytes(p, size) for p in parameters), start, STEP)
    yield Lifetime("optimizer state", states, start, STEP)
    yield Lifetime("gradients", gradients, start, _last_forward(step))
    yield Lifetime("gradients", gradients, step.after(_reduce(step, block)), STEP)


def gradient_lifetimes(step: StepMemory, *, block: str) -> Iterator[Lifetime]:
    """Whole gradients until they are reduced, and the flat buffer that they are reduced from.

    FSDP2 copies whole gradients into the buffer, frees them, and keeps the buffer until the next block reduces.
    """
    trainable = [p for p in step.graph.block_parameters(block) if p.trainable]
    reduce = _reduce(step, block)
    for parameter in trainable:
        first, last = step.segments.of_parameter[parameter.name]
        yield Lifetime("gradients", gradient_bytes(parameter), ("backward", last), step.before(reduce))
        if first < last:  # the second part, before it is added
            yield Lifetime("gradients", gradient_bytes(parameter), ("backward", first), ("backward", first))
    whole, flat = sum(map(gradient_bytes, trainable)), _flat_bytes(step, block)
    if block in step.reduced_last:
        yield Lifetime("gradients", whole, reduce, reduce)
        return
    shards = sum(shard_bytes(p, step.world_size) for p in trainable)
    yield Lifetime("gradients", max(whole, shards + step.reduce_workspace(flat)), reduce, reduce)
    order = [*(name for name in reversed(_gather_order(step)[1:]) if name not in step.reduced_last), ROOT]
    following = order[order.index(block) + 1 :] if block in order else []
    yield Lifetime("gradients", flat, reduce, step.before(_reduce(step, following[0]) if following else STEP))


def gathered_lifetimes(step: StepMemory, *, block: str, stage: int) -> Iterator[Lifetime]:
    """Whole parameters of a block and the flat buffers that they are gathered through.

    Stage 3 holds them during the block's forward and backward, stage 2 from its forward to its backward, the root
    (which encloses all other blocks) until all backwards are over. In forward a flat buffer lives until the next block
    has copied its parameters out of its own. In backward FSDP2 gathers a stage-3 block while the one after it computes.
    """
    order, parameters = _gather_order(step), step.graph.block_parameters(block)
    if not parameters or not step.segments.count:
        return
    whole, flat = sum(map(parameter_bytes, parameters)), sum(padded_bytes(p, step.world_size) for p in parameters)
    first, last = (0, step.segments.count - 1) if block == ROOT else step.segments.of_block[block]
    following = order[order.index(block) + 1 :][:1]
    until = ("gather_forward", step.segments.of_block[following[0]][0]) if following else _last_forward(step)
    yield Lifetime("gathered parameters", flat, ("gather_forward", first), until)
    if block == ROOT:
        yield Lifetime("gathered parameters", whole, ("gather_forward", 0), step.before(REDUCE_ROOT))
        if stage == 3:  # released at the end of forward and gathered again at once
            yield Lifetime("gathered parameters", flat, ("gather_backward", last), ("gather_backward", last))
        return
    released = REDUCE_ROOT if block in step.reduced_last else ("backward", first)
    if stage == 2:
        yield Lifetime("gathered parameters", whole, ("gather_forward", first), released)
        return
    yield Lifetime("gathered parameters", whole, ("gather_forward", first), ("forward", last))
    yield Lifetime("gathered parameters", whole, ("gather_backward", last), released)
    # The block after this one in forward order asks for it, for the last block the root at the start of backward.
    asked = step.segments.of_block[following[0]][1] if following else step.segments.count - 1
    if asked > last:
        yield Lifetime("gathered parameters", flat, ("prefetch_backward", asked), ("gather_backward", last))
    else:
        yield Lifetime("gathered parameters", flat, ("gather_backward", last), ("gather_backward", last))


def _gather_order(step: StepMemory) -> list[str]:
    """The root, then the blocks that have parameters in the order of their forward."""
    spans = step.segments.of_block
    blocks = {p.block for p in step.graph.parameters if p.block != ROOT and p.block in spans}
    return [ROOT, *sorted(blocks, key=lambda block: spans[block])]


def _reduce(step: StepMemory, block: str) -> Moment:
    """The moment in which the gradients of `block` are reduced."""
    if block in step.reduced_last:
        return REDUCE_ROOT
    return REDUCE_ROOT if block not in _gather_order(step)[1:] else ("reduce", step.segments.of_block[block][0])


def _flat_bytes(step: StepMemory, block: str) -> float:
    return sum(padded_bytes(p, step.world_size) for p in step.graph.block_parameters(block) if p.trainable)


def _last_workspace(step: StepMemory, block: str) -> float:
    """Bytes that reducing a block of `reduced_last` takes, less its whole parameters and gradients, which go first."""
    parameters = step.graph.block_parameters(block)
    flat = _flat_bytes(step, block)
    released = sum(parameter_bytes(p) + gradient_bytes(p) for p in parameters)
    return max(flat + flat / step.world_size + step.reduce_workspace(flat) - released, 0.0)


def _last_forward(step: StepMemory) -> Moment:
    return ("forward", step.segments.count - 1)

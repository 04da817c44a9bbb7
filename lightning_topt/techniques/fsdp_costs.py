"""Memory and time of torch's FSDP2, for shards over some of the axes of a mesh.

A cost model that is a subject of its own; `fsdp` uses it for both of its techniques.

    what                                   function             source
    shards of P, G and S                   shard_lifetimes      Rajbhandari et al., arXiv
                                                                1910.02054, section 5
    gradients before reduce_scatter        gradient_lifetimes   torch 2.13 `_fsdp_param_group.py`,
                                                                `post_backward`
    gathered parameters and flat buffers   gathered_lifetimes   same file, `wait_for_unshard`,
                                                                `_backward_prefetch`
    exchanges                              fsdp_collectives     `_fsdp_collectives.py`
    exchanges with owners of parameters    owner_collectives    `optim.shard_step`

Symbols: k segment of the forward pass, N ranks that share one tensor, P parameter bytes, G gradient
bytes, S optimizer state. Under gloo its exchanges block: nothing of them runs beside computation.
Level 2 leaves frozen parameters whole on each rank. Level 3 shards them, and gathers blocks to
which no gradient comes in forward alone.

Shards that are offloaded are in the memory of the host. On accelerators each gather copies them to
the device, gradients are copied back, and the host updates them: as fast as it moves their bytes.
CPU ranks copy gradients to files; what is in files is counted as no memory of a rank.

Under autocast some parameters are gathered in 16 bits (`OpGraph.narrow_parameters`): until they are
reduced, in float32, their gradients have 16 bits, too.

A parameter whose update reads all of it has an owner among all data ranks, which keeps its state
and updates it. A block counts an even share of both; what the busiest rank has above that is the
plan's.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from lightning_topt.basics import once_per_object
from lightning_topt.costs.communication import Collective
from lightning_topt.costs.lifetimes import (
    FORWARD_OVER,
    REBUILD,
    REDUCE_LAST,
    UPDATE,
    Lifetime,
    Phase,
)
from lightning_topt.costs.sizes import (
    ROOT,
    gathered_bytes,
    gloo_workspace,
    gradient_bytes,
    padded_bytes,
    parameter_bytes,
    reduced_bytes,
    shard_bytes,
    shard_share,
)
from lightning_topt.costs.training_step import TrainingStep, temporaries_seconds
from lightning_topt.graph.op_graph import OpGraph, Parameter
from lightning_topt.techniques.technique import ALONE, BlockSeconds, Neighbours

# A reserve, not a model: what sharded plans took on gloo beyond everything listed here. Measured on
# 12 model families: up to 14 MiB, mostly 2 to 6 (benchmarks/foreign/model_families.py). It is work
# objects, and small blocks between large ones.
RESERVE_BYTES = 8 << 20
# Time of FSDP2's hooks and copies of views beside a gather or reduction: per block and per
# parameter, where nothing hides it. Read from steps of tiny blocks on two ranks: 0.5 to 0.9 ms, 11
# to 32 us. It is not measured in each calibration: that takes up to a second. And with as many
# ranks as cores it shows how long ranks wait for one another.
HOOK_SECONDS, HOOK_PARAMETER_SECONDS = 7.5e-4, 2.5e-5


class _Sizes(NamedTuple):
    # Bytes of a block that some ranks share, as `ShardedBlock` has them.

    flat: float
    flat_gradients: float
    whole: float
    gradient_shards: float


@once_per_object
def _known_sizes(graph: OpGraph) -> dict[tuple[str, int, int, bool], _Sizes]:
    # The sizes of blocks so far, by name, ranks, level, and whether all is gathered in float32
    return {}


@dataclass(frozen=True)
class ShardedBlock:
    """One block whose tensors are sharded along `axes` (indices): its sizes and phases.

    Level 3 releases gathered parameters after forward, level 2 after backward.
    """

    step: TrainingStep
    name: str
    level: int
    axes: tuple[int, ...]
    beside: Neighbours = ALONE
    offload: bool = False

    @cached_property
    def ranks(self) -> int:
        """N, the ranks that share one tensor."""
        return self.step.mesh.ranks_along(self.axes)

    @cached_property
    def parameters(self) -> list[Parameter]:
        """All its parameters."""
        return self.step.parameters(self.name)

    @cached_property
    def trainable(self) -> list[Parameter]:
        """The parameters with gradients."""
        return [parameter for parameter in self.parameters if parameter.trainable]

    @cached_property
    def sharded(self) -> list[Parameter]:
        """The parameters that are in shards, and gathered."""
        return self.parameters if self.level == 3 else self.trainable

    @cached_property
    def kept(self) -> float:
        """Bytes of the parameters that every rank keeps whole."""
        whole = [] if self.level == 3 else [p for p in self.parameters if not p.trainable]
        return float(sum(map(parameter_bytes, whole)))

    @cached_property
    def shards(self) -> float:
        """Bytes of the largest shards of its parameters."""
        return sum(shard_bytes(p, self.ranks) for p in self.sharded)

    @cached_property
    def owned(self) -> list[Parameter]:
        """The parameters that have owners."""
        return [p for p in self.parameters if p.name in self.step.optimizer.owned]

    @cached_property
    def update_shares(self) -> dict[Parameter, float]:
        """The share of each parameter that a rank updates, and has the state of."""
        even = 1 / self.step.mesh.data_parallel_size
        shares = {p: shard_share(p, self.ranks) for p in self.parameters}
        return shares | dict.fromkeys(self.owned, even)

    @cached_property
    def is_gathered_again(self) -> bool:
        """Whether FSDP2 gathers it in backward, if level 3 has released it."""
        return self.name == ROOT or self.name not in self.step.gathered_once

    @cached_property
    def _sizes(self) -> _Sizes:
        known = _known_sizes(self.step.graph)
        key = self.name, self.ranks, self.level, self.step.float32_gathers
        if key not in known:
            flat = sum(self.part(p) * padded_bytes(p, self.ranks) for p in self.sharded)
            gradients = sum(padded_bytes(p, self.ranks) for p in self.trainable)
            whole = float(sum(self.part(p) * parameter_bytes(p) for p in self.sharded))
            shards = sum(shard_bytes(p, self.ranks) for p in self.trainable)
            known[key] = _Sizes(flat, gradients, whole, shards)
        return known[key]

    def part(self, parameter: Parameter) -> float:
        """Return the part of its bytes that a gathered parameter has: half of them in 16 bits."""
        return 0.5 if parameter.name in self.step.narrow else 1.0

    @property
    def flat(self) -> float:
        """Bytes of the flat buffer that its parameters are gathered through."""
        return self._sizes.flat

    @property
    def flat_gradients(self) -> float:
        """Bytes of the flat buffer that its gradients are reduced from."""
        return self._sizes.flat_gradients

    @cached_property
    def workspace(self) -> float:
        """Bytes that reduce_scatter takes inside; 0 on NCCL, whose memory is not torch's."""
        return (
            gloo_workspace(self.flat_gradients, world_size=self.ranks) if self.step.on_gloo else 0.0
        )

    @property
    def whole(self) -> float:
        """Bytes of its parameters that are gathered."""
        return self._sizes.whole

    @property
    def gradient_shards(self) -> float:
        """Bytes of the largest shards of its gradients."""
        return self._sizes.gradient_shards

    def host_seconds(self, size: float) -> float:
        """Return the seconds to move `size` bytes between device and host; 0 if none are there."""
        return size / self.step.cluster.device.host_bandwidth if self.is_on_host else 0.0

    @property
    def is_on_host(self) -> bool:
        """Whether its shards are in the memory of the host of an accelerator."""
        return self.offload and not self.step.on_gloo

    @cached_property
    def is_reduced_last(self) -> bool:
        """True if FSDP2 reduces it when all backwards are over.

        That is the root, and blocks whose inputs need no gradient.
        """
        spans = self.step.segments.of_block
        return self.name == ROOT or self.name not in spans or self.name in self.step.reduced_last

    @cached_property
    def reduce(self) -> Phase:
        """The phase in which its gradients are reduced."""
        return (
            REDUCE_LAST
            if self.is_reduced_last
            else ("reduce", self.step.segments.of_block[self.name][0])
        )


# ---- memory --------------------------------------------------------------------------------------


def shard_lifetimes(block: ShardedBlock) -> Iterator[Lifetime]:
    """Yield shards of P, G and S.

    Shards of the last step's gradients live until forward is over, new ones from their reduction
    on.
    """
    step = block.step
    states = sum(
        step.optimizer.state_bytes(p.name) * share for p, share in block.update_shares.items()
    )
    if block.offload:
        yield step.phases.always("parameters", block.kept)
        return
    yield step.phases.always("parameters", block.kept + block.shards)
    yield step.phases.always("optimizer state", states)
    yield Lifetime("gradients", block.gradient_shards, REBUILD, FORWARD_OVER)
    yield Lifetime("gradients", block.gradient_shards, step.phases.after(block.reduce), UPDATE)
    # gradients of what a rank owns, and its new values or their updates
    owned = 2 * sum(map(gradient_bytes, block.owned)) / step.mesh.data_parallel_size
    yield Lifetime("gradients", owned, UPDATE, UPDATE)


def gradient_lifetimes(block: ShardedBlock) -> Iterator[Lifetime]:
    """Yield unsharded gradients until they are reduced, and the flat buffer they are reduced from.

    FSDP2 copies unsharded gradients into the buffer, frees them, and keeps the buffer until the
    next block reduces. Before, those in 16 bits become float32, one by one, beside the parameters
    and the buffer of the block that reduced last.
    """
    step, reduce = block.step, block.reduce
    for parameter in block.trainable:
        first, last = step.segments.of_parameter[parameter.name]
        size = block.part(parameter) * gradient_bytes(parameter)
        yield Lifetime("gradients", size, ("backward", last), step.phases.before(reduce))
        if first < last:  # the second part, before it is added
            yield Lifetime("gradients", size, ("backward", first), ("backward", first))
    whole = sum(map(gradient_bytes, block.trainable))
    # their workspace is counted once for all, in `plan_lifetimes`
    if block.is_reduced_last and block.name != ROOT:
        yield Lifetime("gradients", whole, reduce, reduce)
        return
    reducing = max(whole, block.gradient_shards + block.workspace)
    if sizes := [gradient_bytes(p) / 2 for p in block.trainable if p.name in step.narrow]:
        before = block.beside.following
        buffer = 0.0 if before is None else replace(block, name=before).flat_gradients
        wide = whole + max(sizes) + block.whole + buffer
        reducing = max(reducing, wide - block.flat_gradients)
    yield Lifetime("gradients", reducing, reduce, reduce)
    yield Lifetime(
        "gradients", block.flat_gradients, reduce, step.phases.before(_next_reduce(block))
    )


def _next_reduce(block: ShardedBlock) -> Phase:
    # The phase in which the next block in backward reduces; the root is the last
    if block.name == ROOT:
        return UPDATE
    previous = block.beside.previous
    return (
        REDUCE_LAST if previous is None else ("reduce", block.step.segments.of_block[previous][0])
    )


def gathered_lifetimes(block: ShardedBlock) -> Iterator[Lifetime]:
    """Yield unsharded parameters of a block, and the flat buffers they are gathered through.

    Level 3 holds them during the block's forward and backward, level 2 from its forward to its
    backward. The root, which encloses all other blocks, holds them until all backwards are over. In
    forward a flat buffer lives until the next block has copied its parameters out of its own. In
    backward FSDP2 gathers a block of level 3 while the one after it computes.
    """
    # forward: gathered through a flat buffer
    step, following = block.step, block.beside.following
    spans, count = step.segments.of_block, step.segments.count
    if not block.sharded or not count:
        return
    first, last = (0, count - 1) if block.name == ROOT else spans[block.name]
    until = FORWARD_OVER if following is None else ("gather_forward", spans[following][0])
    yield Lifetime("gathered parameters", block.flat, ("gather_forward", first), until)
    if block.name == ROOT:
        yield Lifetime(
            "gathered parameters",
            block.whole,
            ("gather_forward", 0),
            step.phases.before(REDUCE_LAST),
        )
        return
    # backward: level 2 still has them, level 3 gathers them again
    released = REDUCE_LAST if block.is_reduced_last else ("backward", first)
    if block.level == 2:
        yield Lifetime("gathered parameters", block.whole, ("gather_forward", first), released)
        return
    yield Lifetime("gathered parameters", block.whole, ("gather_forward", first), ("forward", last))
    if not block.is_gathered_again:
        return
    yield Lifetime("gathered parameters", block.whole, ("gather_backward", last), released)
    # The block after this one in forward order prefetches it; for the last block the root does, at
    # the start of backward.
    asked = count - 1 if following is None else spans[following][1]
    begin: Phase = ("prefetch_backward", asked) if asked > last else ("gather_backward", last)
    yield Lifetime("gathered parameters", block.flat, begin, ("gather_backward", last))


def plan_lifetimes(
    step: TrainingStep, blocks: Collection[str], *, axes: tuple[int, ...]
) -> Iterator[Lifetime]:
    """Yield the workspace of blocks that are reduced after all backwards; and the reserve on gloo.

    These blocks are reduced one after another, so the largest counts.
    """
    names = step.reduced_last.intersection(blocks)
    last = [ShardedBlock(step, name, 2, axes) for name in names if name in step.segments.of_block]
    yield Lifetime(
        "gradients", max(map(_last_workspace, last), default=0.0), REDUCE_LAST, REDUCE_LAST
    )
    if step.on_gloo:
        yield step.phases.always("reserve", RESERVE_BYTES)


def _last_workspace(block: ShardedBlock) -> float:
    # The bytes that reducing takes, less the parameters that are freed before it, and the gradients
    # once they are in the flat buffer
    flat, gradients = block.flat_gradients, sum(map(gradient_bytes, block.trainable))
    after = max(flat / block.ranks + block.workspace - gradients, 0.0)
    return max(flat - block.whole + after, 0.0)


# ---- seconds -------------------------------------------------------------------------------------


def fsdp_collectives(block: ShardedBlock) -> Iterator[Collective]:
    """Yield the gathers and the reduction of a block.

    Its shards of gradients are also summed along the other data axes.
    """
    step = block.step
    if not block.sharded:
        return
    # level 2 still has them in backward
    again = block.level == 3 and block.is_gathered_again
    for during in ("forward", "backward") if again else ("forward",):
        yield step.collective(during, "all_gather", block.flat, axes=block.axes)
    if block.trainable:
        yield step.collective("backward", "reduce_scatter", block.flat_gradients, axes=block.axes)
        if replicated := [axis for axis in step.mesh.data_axes if axis not in block.axes]:
            yield step.collective("backward", "all_reduce", block.gradient_shards, axes=replicated)


def owner_collectives(block: ShardedBlock) -> Iterator[Collective]:
    """Yield the exchanges of a block's shards with the owners of its parameters.

    Those of all blocks travel in one call. Gradients, and parameters where the rule reads them, go
    to the owner from the ranks that have all rows together. From it all data ranks get their rows.
    Of G bytes, with N ranks and R replicas, a rank sends G / (R N^2) to each of N, and then to each
    of R N.
    """
    step, replicas = block.step, block.step.mesh.data_parallel_size / block.ranks
    for count in (2, 3):
        owned = [p for p in block.owned if step.optimizer.whole[p.name] == count]
        size = sum(map(gradient_bytes, owned))
        legs = [(size / replicas, block.axes)] * (count - 1)
        for nbytes, axes in [*legs, (size * replicas, step.mesh.data_axes)] if size else []:
            yield step.collective("update", "all_to_all", nbytes, axes=axes)


def add_fsdp_seconds(seconds: BlockSeconds, block: ShardedBlock) -> None:
    """Add gathers, the reduction and the update of a block."""
    # gathers: the exchange may hide behind computation, copies and hooks do not
    step = block.step
    beside = 0.0 if step.on_gloo or step.mesh.size == 1 else step.cluster.overlap
    collectives = [*fsdp_collectives(block)]
    out = step.copy_seconds(block.flat) + step.taken_seconds(
        gathered_bytes(flat=block.flat, whole=block.whole)
    )
    hooks = HOOK_SECONDS + HOOK_PARAMETER_SECONDS * len(block.sharded) if step.on_gloo else 0.0
    out += hooks
    gathers = [each for each in collectives if each.op == "all_gather"]
    passes = step.graph.calls_of(block.name)
    calls = passes[1]
    for when, (each, count) in enumerate(zip(gathers, passes, strict=False)):
        gather = step.seconds_of([each] * count) + count * block.host_seconds(block.shards)
        # nothing runs beside the root's, which comes first
        hidden = beside if block.name != ROOT or when else 0.0
        seconds.gather_foreground[when] += (1 - hidden) * gather + (count * out if gather else 0)
        seconds.gather_background[when] += hidden * gather
    # reduction
    reduce = step.seconds_of([each for each in collectives if each.op != "all_gather"] * calls)
    taken = reduced_bytes(
        flat=block.flat_gradients, shards=block.gradient_shards, workspace=block.workspace
    )
    reduce += calls * (step.taken_seconds(taken) + block.host_seconds(block.gradient_shards))
    # into the flat buffer
    copied = calls * step.copy_seconds(sum(map(gradient_bytes, block.parameters)))
    if block.offload and step.on_gloo:  # and from it to files
        copied += calls * step.copy_seconds(block.gradient_shards)
    seconds.reduce_foreground += (
        (1 - beside) * reduce + copied + (calls * hooks if block.trainable else 0.0)
    )
    seconds.reduce_background += beside * reduce
    # update of shards, and of what a rank owns
    shares = block.update_shares
    if block.is_on_host:
        moved = (share * step.optimizer.moved_bytes(p.name) for p, share in shares.items())
        seconds.update += block.host_seconds(sum(moved))
        return
    for p, share in shares.items():
        is_owned = p.name in step.optimizer.owned
        seconds.update += (
            share * step.update_seconds(p) if is_owned else step.update_seconds(p, share=share)
        )
    seconds.update += temporaries_seconds(step, shares)
    # exchanges follow one another: nobody computes in between, so nobody waits
    exchanges = [*owner_collectives(block)]
    seconds.broadcast += step.seconds_of(exchanges) - step.waits_of(exchanges)
    # each through a buffer on either side, to new tensors
    sent = sum(each.size / each.group.size for each in exchanges)
    seconds.broadcast += step.copy_seconds(2 * sent) + step.taken_seconds(3 * sent)

"""What torch's caching allocator of CUDA reserves for a step, beside what tensors of it take.

Allocated are the bytes of tensors, reserved those of the segments that the allocator has taken
from the device, and that nobody else has. `CachingAllocator` is a twin of it in Python with its
default settings, `unused_bytes` what it reserves in vain for the tensors of some steps:

    rule                                                    source: torch 2.11 to 2.13,
    sizes are multiples of 512 bytes                        `CUDACachingAllocator.cpp`, round_size
    up to 1 MiB: from segments of 2 MiB (small pool)        get_allocation_size
    below 10 MiB: from segments of 20 MiB                   the same
    above: a segment of its own, a multiple of 2 MiB        the same
    the smallest free block that is large enough is taken   get_free_block
    and cut, where 512 bytes (small pool) or more than      should_split
      1 MiB are left
    free neighbours in a segment become one block           free_block
    pools belong to a stream                                get_pool, BlockComparatorSize
    at a limit, segments that are all free go back first    malloc, release_cached_blocks

So memory is lost where sizes alternate: a tensor of 1.5 GiB that finds only what is left of a
segment of 1.5 GiB, of which another one has taken a part, needs a new segment.
"""

from __future__ import annotations

import math
import random
from bisect import bisect_left, insort
from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import cached_property

from lightning_topt.costs.lifetimes import (
    FORWARD_OVER,
    REBUILD,
    REDUCE_LAST,
    UPDATE,
    Lifetime,
    Phase,
)
from lightning_topt.costs.training_step import TrainingStep
from lightning_topt.graph.mesh_axes import Mesh
from lightning_topt.graph.op_graph import Parameter, StepMemory, backward_owners, stretches_of

_SMALLEST, _SMALL = 512, 1 << 20
_SMALL_SEGMENT, _LARGE_SEGMENT = 2 << 20, 20 << 20
_OWN_SEGMENT, _SEGMENT_STEP = 10 << 20, 2 << 20

Span = tuple[float, float, float, int]  # begin, end, bytes, stream

# Of matrix products, in torch's allocator: 32 MiB on Hopper, 8 MiB before, for each thread that
# computes: those of forward and of backward.
CUBLAS_BYTES = 2 * (32 << 20)
# Of the card, not of torch; an H100 with NCCL 2.28.9 (benchmarks/results/gpu_report.md).
COMMUNICATOR_BYTES = 389 << 20

_ORDERS, _UNSURE = 4, 0.01  # other replays; in kernels, and as a share of bytes
_STEPS = 2  # the second has new buckets and the gradients of the first; a third changes nothing
_FIRST_BUCKET_BYTES, _BUCKET_BYTES = 1 << 20, 25 << 20  # of DDP
_BY_PARAMETER = ("parameters", "optimizer state", "temporaries")
_OLD_GRADIENTS = "gradients", REBUILD, FORWARD_OVER
# In kernels: when phases begin before the backward of their segment, or before the end of all.
_BEFORE_BACKWARD = {"gather_backward": 0.35, "prefetch_backward": 0.3}
_ENDS = {REDUCE_LAST: 0.2, UPDATE: 0.0}


class CachingAllocator:
    """Blocks in segments, as torch's CUDA allocator keeps them.

    `at_limit`: it may take no more from the device than it needs, so that free segments go back
    before it takes another.
    """

    def __init__(self, *, at_limit: bool = False) -> None:
        self.at_limit = at_limit
        self.allocated = self.reserved = 0
        self.peak_allocated = self.peak_reserved = 0
        self._free: dict[_Pool, list[tuple[int, int, _Block]]] = {}  # by size, then address
        self._next_address = 0

    def allocate(self, size: float, *, stream: int = 0) -> _Block:
        """Return a block of at least `size` bytes."""
        wanted = max(math.ceil(size / _SMALLEST), 1) * _SMALLEST
        pool = stream, wanted <= _SMALL
        block = self._best_fit(pool, wanted) or self._new_segment(pool, wanted)
        left = block.size - wanted
        if left >= _SMALLEST if pool[1] else left > _SMALL:
            rest = _Block(pool, block.address + wanted, left, before=block, after=block.after)
            if rest.after is not None:
                rest.after.before = rest
            block.size, block.after = wanted, rest
            self._keep(rest)
        block.is_free = False
        self.allocated += block.size
        self.peak_allocated = max(self.peak_allocated, self.allocated)
        return block

    def free(self, block: _Block) -> None:
        """Give `block` back, and join it with free neighbours."""
        self.allocated -= block.size
        before, after = block.before, block.after
        if after is not None and after.is_free:
            self._take(after)
            block.size, block.after = block.size + after.size, after.after
        if before is not None and before.is_free:
            self._take(before)
            block.address, block.size = before.address, block.size + before.size
            block.before = before.before
        # neighbours of what was joined
        if block.before is not None:
            block.before.after = block
        if block.after is not None:
            block.after.before = block
        self._keep(block)

    def _best_fit(self, pool: _Pool, size: int) -> _Block | None:
        free = self._free.setdefault(pool, [])
        place = bisect_left(free, (size, -1))
        return free.pop(place)[2] if place < len(free) else None

    def _new_segment(self, pool: _Pool, size: int) -> _Block:
        if pool[1]:
            nbytes = _SMALL_SEGMENT
        elif size < _OWN_SEGMENT:
            nbytes = _LARGE_SEGMENT
        else:
            nbytes = math.ceil(size / _SEGMENT_STEP) * _SEGMENT_STEP
        if self.at_limit:
            self._release_segments()
        self.reserved += nbytes
        self.peak_reserved = max(self.peak_reserved, self.reserved)
        self._next_address += nbytes
        return _Block(pool, self._next_address - nbytes, nbytes)

    def _release_segments(self) -> None:
        # Give segments of which nothing is in use back to the device
        for free in self._free.values():
            whole = [each for each in free if each[2].before is None and each[2].after is None]
            for each in whole:
                free.remove(each)
                self.reserved -= each[0]

    def _keep(self, block: _Block) -> None:
        block.is_free = True
        insort(self._free[block.pool], (block.size, block.address, block))

    def _take(self, block: _Block) -> None:
        free = self._free[block.pool]
        free.pop(bisect_left(free, (block.size, block.address)))


_Pool = tuple[int, bool]  # stream, whether blocks are small


class _Block:
    """A piece of a segment between the pieces `before` and `after` it."""

    __slots__ = ("address", "after", "before", "is_free", "pool", "size")

    def __init__(
        self,
        pool: _Pool,
        address: int,
        size: int,
        before: _Block | None = None,
        after: _Block | None = None,
    ) -> None:
        self.pool, self.address, self.size = pool, address, size
        self.before, self.after = before, after
        self.is_free = False


def communicator_bytes(mesh: Mesh) -> float:
    """Return what NCCL takes for groups along the axes of `mesh`, beside that of all ranks.

    That one is there before plans are made.
    """
    return float(len(mesh.axes) * COMMUNICATOR_BYTES) if len(mesh.axes) > 1 else 0.0


def replay(spans: Iterable[Span], allocator: CachingAllocator) -> None:
    """Make and free tensors in the order of time; at one time, freed ones go first."""
    tensors = [span for span in spans if span[2] > 0 and span[0] < span[1]]
    events = [(begin, True, index) for index, (begin, _, _, _) in enumerate(tensors)]
    ends = ((end, index) for index, (_, end, _, _) in enumerate(tensors))
    events += [(end, False, index) for end, index in ends if end < math.inf]
    blocks: dict[int, _Block] = {}
    for _, begins, index in sorted(events):
        if begins:
            _, _, size, stream = tensors[index]
            blocks[index] = allocator.allocate(size, stream=stream)
        else:
            allocator.free(blocks.pop(index))


# ---- the tensors of some steps of a rank ---------------------------------------------------------


def unused_bytes(
    step: TrainingStep, lifetimes: Iterable[tuple[str, Lifetime]], *, recomputed: Collection[str]
) -> int:
    """Return what a limit has to leave beside tensors, for steps of a plan to run in it.

    That is what is reserved above what is allocated, each at its peak, where free segments go back
    before new ones are taken; small tensors are left out. Which tensor takes a part of a large free
    segment depends on chance: the most of some replays counts, in which times and sizes differ by
    up to 1 %.

    Args:
        step: the step; tensors of one microbatch are replayed.
        lifetimes: what blocks keep besides activations, with the block's name; of the whole plan
            with ``""``.
        recomputed: blocks that run forward again in backward.
    """
    spans = [s for s in StepSpans(step, recomputed).spans([*lifetimes]) if s[2] > _SMALL]
    unused = [_unused(spans)]
    for seed in range(_ORDERS):
        draw = random.Random(seed).random
        unused.append(
            _unused(
                (begin + _UNSURE * draw(), end + _UNSURE * draw(), size * (1 + _UNSURE * draw()), k)
                for begin, end, size, k in spans
            )
        )
    return max(unused)


def _unused(spans: Iterable[Span]) -> int:
    allocator = CachingAllocator(at_limit=True)
    replay(spans, allocator)
    return allocator.peak_reserved - allocator.peak_allocated


class StepSpans:
    """Tensors of `_STEPS` steps. Time is counted in kernels; the last one of a step is its update.

    Activations are those of the graph, at the kernels that make and free them. What techniques
    keep is known by phases: it is cut into the tensors that parameters have, gradients at the
    kernels that make them.
    """

    def __init__(self, step: TrainingStep, recomputed: Collection[str]) -> None:
        self.step, self.recorded = step, step.graph.step
        self.memory = StepMemory(self.recorded, step.batch_size)
        self.kernels = len(self.recorded.order)
        self.length = self.kernels + 3.0
        # the kernels of each segment: (block, first, end, call), and where its backward begins
        self.stretches = stretches_of(self.recorded, [b.name for b in step.graph.blocks])
        self.backwards = self._backwards()
        self.recomputed = [k for k, each in enumerate(self.stretches) if each[0] in recomputed]
        # begin of each phase, and of the one after the last
        self.begins = [*self._phase_begins(), self.kernels + 1.0]

    def spans(self, lifetimes: Sequence[tuple[str, Lifetime]]) -> Iterator[Span]:
        """Yield the tensors of all steps, with those that stay."""
        activations = [*self._activations()]
        kept = [each for pair in lifetimes for each in self._kept(*pair)]
        yield from self._buckets(lifetimes)
        for number in range(_STEPS):
            offset = number * self.length
            for begin, end, size in activations:
                yield offset + begin, offset + end, size, 0
            for begin, end, size, stream, first, last in kept:
                if first <= number <= last:
                    yield offset + begin, offset + end, size, stream

    # ---- activations

    def _activations(self) -> Iterator[tuple[float, float, float]]:
        # Yield (begin, end, bytes) of the tensors of forward and backward in one step
        again, until = self._recomputations()
        for index, (tensor, size) in enumerate(
            zip(self.recorded.tensors, self.memory.bytes.tolist(), strict=True)
        ):
            if tensor.gradient_of is not None:
                continue
            end = min(float(tensor.end), self.kernels + 0.5)
            k = again.get(tensor.first)
            if k is None:
                yield tensor.first, max(end, until.get(index, 0.0)), size
                continue
            # made twice: until the forward of its block is over, and again before its backward
            _, _, over, call = self.stretches[k]
            begin = self._again(k, tensor.first)
            stays = call is not None and index in call.outputs
            kept = self.recorded.is_kept(tensor)
            yield tensor.first, end if stays or not kept else float(over), size
            if stays or not kept:
                yield begin, self._again(k, min(tensor.end, over)), size
            else:
                yield begin, end, size
        for position, amount in self.recorded.workspaces:
            yield position + 0.2, position + 0.4, amount.at(self.step.batch_size)

    def _recomputations(self) -> tuple[dict[int, int], dict[int, float]]:
        # The segment of each kernel that runs again, and until when inputs are kept
        again: dict[int, int] = {}
        until: dict[int, float] = {}
        for k in self.recomputed:
            _, first, end, call = self.stretches[k]
            again |= dict.fromkeys(range(first, end), k)
            for index in call.inputs if call is not None else ():
                if not self.recorded.is_kept(self.recorded.tensors[index]):
                    until[index] = self.backwards[k]
        return again, until

    def _again(self, k: int, position: int) -> float:
        # When the kernel at `position` of segment `k` runs again: just before backward
        _, first, end, _ = self.stretches[k]
        return self.backwards[k] - 0.25 + 0.2 * (position - first) / (end - first)

    # ---- what techniques keep

    def _kept(
        self, block: str, lifetime: Lifetime
    ) -> Iterator[tuple[float, float, float, int, int, int]]:
        # Yield (begin, end, bytes, stream, first step, last step) of the tensors of a lifetime
        kind, first, last = lifetime.kind, lifetime.first, lifetime.last
        begin, end = self._begin(first), self._end(last)
        if kind == "gradient buckets" or (kind, first, last) == _OLD_GRADIENTS:
            return  # the latter are those of the step before, below
        stream = int(kind == "gathered parameters")
        steps = 0, _STEPS - 1
        if first == REBUILD:
            steps = (1, 1) if last == REBUILD else (0, 0) if last == UPDATE else steps
            end = math.inf if last == UPDATE else end
        if kind == "optimizer state":
            begin = self._begin(UPDATE)
        if kind == "gradients" and last == UPDATE and first != REBUILD:
            end = self.length + self._end(FORWARD_OVER)  # zero_grad of the next step
        for name, size in self._pieces(block, lifetime):
            made = self._gradients.get(name, begin) if kind == "gradients" else begin
            yield max(begin, made), end, size, stream, *steps

    def _pieces(self, block: str, lifetime: Lifetime) -> Iterator[tuple[str, float]]:
        # Yield names and bytes of tensors that make up `lifetime`: one, or those of parameters
        kind, total = lifetime.kind, lifetime.bytes
        by_parameter = kind in _BY_PARAMETER or (kind == "gradients" and lifetime.last == UPDATE)
        some: Sequence[Parameter] = self.step.parameters(block)
        if kind == "temporaries":  # of all parameters together, or of the largest
            updates = self.step.optimizer.updates.values()
            by_parameter = any(update.temporaries_add for update in updates)
            some = self.step.graph.parameters
        some = [p for p in some if p.trainable or kind == "parameters"]
        whole = float(sum(p.nbytes for p in some))
        if not by_parameter or not whole:
            yield "", total
            return
        # an optimizer's state is of several tensors per parameter
        count = max(round(total / whole), 1) if kind == "optimizer state" else 1
        for parameter in some:
            for _ in range(count):
                yield parameter.name, total * parameter.nbytes / whole / count

    def _buckets(self, lifetimes: Sequence[tuple[str, Lifetime]]) -> Iterator[Span]:
        # Yield DDP's buckets, which take gradients of several blocks. The one of the first step is
        # given back before the second, which makes new ones: of 1 MiB, then of 25, in the order of
        # gradients (torch 2.13 `reducer.cpp`, `rebuild_buckets`).
        blocks = {block for block, each in lifetimes if each.kind == "gradient buckets"}
        some = [p for block in blocks for p in self.step.parameters(block) if p.trainable]
        some.sort(key=lambda p: (self._gradients.get(p.name, math.inf), p.name))
        rebuilt = self.length + self._begin(REBUILD)
        yield self._begin(REBUILD), rebuilt, float(sum(p.nbytes for p in some)), 0
        size, limit = 0.0, float(_FIRST_BUCKET_BYTES)
        for place, parameter in enumerate(some):
            size += parameter.nbytes
            if size >= limit or place == len(some) - 1:
                yield rebuilt, math.inf, size, 0
                size, limit = 0.0, float(_BUCKET_BYTES)

    @cached_property
    def _gradients(self) -> dict[str, float]:
        # When the last part of each parameter's gradient is made
        return {
            tensor.gradient_of: float(tensor.first)
            for tensor in self.recorded.tensors
            if tensor.gradient_of is not None
        }

    # ---- phases

    def _begin(self, phase: Phase) -> float:
        return self.begins[self.step.phases.position[phase]]

    def _end(self, phase: Phase) -> float:
        return self.begins[self.step.phases.position[phase] + 1]

    def _backwards(self) -> list[float]:
        # The first kernel of each segment's backward
        start = self.recorded.backward_start
        owners = backward_owners(self.recorded, self.stretches)
        found = [float(self.kernels)] * len(self.stretches)
        for offset in range(len(owners) - 1, -1, -1):
            found[owners[offset]] = float(start + offset)
        # a segment without kernels there goes with the one before it in backward
        latest = float(start)
        for k in range(len(found) - 1, -1, -1):
            found[k] = latest = max(latest, found[k]) if found[k] < self.kernels else latest
        return found

    def _phase_begins(self) -> Iterator[float]:
        # Yield when each phase begins, in their order
        latest = -1.0
        for kind, k in self.step.phases.order:
            if (kind, k) == REBUILD:
                begin = -1.0
            elif kind in ("forward", "gather_forward"):
                begin = self.stretches[k][1] - 0.1 * (kind == "gather_forward")
            elif (kind, k) == FORWARD_OVER:
                begin = self.recorded.backward_start - 0.5
            elif kind == "reduce":
                begin = (self.backwards[k - 1] if k else self.kernels) - 0.45
            elif (kind, k) in _ENDS:
                begin = self.kernels - _ENDS[kind, k]
            else:
                begin = self.backwards[k] - _BEFORE_BACKWARD.get(kind, 0.0)
            latest = max(latest, begin)
            yield latest

"""Reduce-scatter and all-gather among the ranks of one node.

A bucket of n elements has one *shard* per local rank. Shards are contiguous, shard i belongs to
local rank i, and sizes differ by at most one element (`shard_bounds`); nothing is padded.
`make_node_exchange` chooses between two forms:

- `CollectiveNodeExchange`: collectives of any backend;
- `SharedMemoryNodeExchange`: CPU ranks read straight from each other's memory (`process_vm_readv`,
  as MPI libraries do), without sockets. A reduce-scatter reads (ranks - 1) / ranks of a bucket in
  blocks that stay in the cache and adds them up there; an all-gather is one copy per message. Where
  the kernel forbids reading (`ptrace` rights), collectives do it.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_topt.communication.bucket import ExchangeContext
from lightning_topt.communication.collectives import (
    Pending,
    PendingResult,
    Waitable,
    all_gather_into,
)
from lightning_topt.communication.node.node_channel import (
    BLOCK_BYTES,
    CHANNEL_WORDS,
    NodeChannel,
    NodeMemoryUnavailable,
    NodePage,
    Operation,
)
from lightning_topt.communication.node.node_kernels import Array, gather_ranks, sum_ranks

log = logging.getLogger(__name__)

# Types that Numba lacks are summed as integers of their size.
SUMMABLE = {torch.float32: torch.float32, torch.bfloat16: torch.uint16, torch.float16: torch.int16}


def make_node_exchange(context: ExchangeContext) -> NodeExchange:
    """Collective call: through memory where CPU ranks share one machine, else by collectives."""
    topology, groups = context.topology, context.groups
    assert groups.node_scatter is not None and groups.node_gather is not None
    if context.device.type == "cpu" and topology.ranks_per_node > 1:
        try:
            return SharedMemoryNodeExchange(
                groups.node_gather, timeout_seconds=context.timeout_seconds
            )
        except NodeMemoryUnavailable as error:
            log.warning("%s; gradients are exchanged inside the node by collectives", error)
    return CollectiveNodeExchange(
        local_rank=topology.local_rank,
        local_size=topology.ranks_per_node,
        scatter_group=groups.node_scatter,
        gather_group=groups.node_gather,
    )


def shard_bounds(numel: int, *, local_size: int) -> list[tuple[int, int]]:
    """Return the first and last-plus-one element of every local rank's shard."""
    cuts = [numel * index // local_size for index in range(local_size + 1)]
    return list(pairwise(cuts))


def gather_shards(flat: Tensor, group: dist.ProcessGroup) -> Waitable:
    """Begin to fill in the other ranks' shards of `flat` (n,), by one broadcast per shard."""
    bounds = shard_bounds(flat.numel(), local_size=dist.get_world_size(group))
    return Pending(
        [
            dist.broadcast(flat[start:stop], group=group, group_src=owner, async_op=True)
            for owner, (start, stop) in enumerate(bounds)
            if stop > start
        ]
    )


class NodeExchange(ABC):
    """Reduce-scatter and all-gather among the ranks of one node, asynchronous.

    Every local rank calls each method for the same buckets in the same order. Calls of *different*
    methods may interleave differently on different ranks: bucket i+1's `reduce_scatter` may come
    before or after bucket i's `all_gather`. So each method keeps its own sequence; several of its
    calls may be in flight.

    One thread makes all calls and waits for all results. `flat` may be written again once
    ``wait()`` has returned. A dead peer never hangs the job: either `is_completed` stays False
    until the worker's deadline, or `wait` raises.
    """

    def __init__(self, *, local_rank: int, local_size: int) -> None:
        self.local_rank, self.local_size = local_rank, local_size

    @abstractmethod
    def reduce_scatter(self, flat: Tensor) -> PendingResult[Tensor]:
        """Return the float32 sum over the node of this rank's shard of `flat` (n,).

        Terms are added in rank order; `flat` is only read.
        """

    @abstractmethod
    def gather_shards(self, flat: Tensor) -> Waitable:
        """Fill in the other ranks' shards of `flat` (n,); every local rank has written its own."""

    @abstractmethod
    def all_gather(self, message: Tensor) -> PendingResult[Tensor]:
        """Return every local rank's uint8 `message` (size,), in rank order: (local size, size).

        Sizes are equal on all local ranks.
        """

    @abstractmethod
    def close(self) -> None:
        """Release what outlives the process (shared memory); process groups are not destroyed."""


class CollectiveNodeExchange(NodeExchange):
    """A `NodeExchange` by collectives, on every backend.

    One process group per direction keeps the order of calls equal on all ranks.
    """

    def __init__(
        self,
        *,
        local_rank: int,
        local_size: int,
        scatter_group: dist.ProcessGroup,
        gather_group: dist.ProcessGroup,
    ) -> None:
        super().__init__(local_rank=local_rank, local_size=local_size)
        self.scatter_group, self.gather_group = scatter_group, gather_group

    def reduce_scatter(self, flat: Tensor) -> PendingResult[Tensor]:
        """Exchange shards by an all-to-all and add: half the bytes of gloo's own."""
        bounds = shard_bounds(flat.numel(), local_size=self.local_size)
        sizes = [stop - start for start, stop in bounds]
        own = sizes[self.local_rank]
        # (local size, own): this rank's shard of every local rank's bucket
        terms = torch.empty((self.local_size, own), dtype=flat.dtype, device=flat.device)
        work = dist.all_to_all_single(
            terms.view(-1),
            flat,
            [own] * self.local_size,
            sizes,
            group=self.scatter_group,
            async_op=True,
        )
        assert work is not None
        return _Sum(work, terms)

    def gather_shards(self, flat: Tensor) -> Waitable:
        """Gather by one broadcast per shard."""
        return gather_shards(flat, self.gather_group)

    def all_gather(self, message: Tensor) -> PendingResult[Tensor]:
        """All-gather the messages."""
        rows = torch.empty(
            (self.local_size, message.numel()), dtype=torch.uint8, device=message.device
        )
        return _Rows(
            all_gather_into(rows.view(-1), message, group=self.gather_group, async_op=True), rows
        )

    def close(self) -> None:
        """Nothing outlives the process."""


class _Rows(Pending, PendingResult[Tensor]):
    """Rows of all ranks on their way."""

    def __init__(self, work: Any, rows: Tensor) -> None:
        super().__init__([work])
        self.rows = rows

    def result(self) -> Tensor:
        return self.rows


class _Sum(_Rows):
    """The shards of a reduce-scatter, added up when asked for."""

    def result(self) -> Tensor:
        total = self.rows[0].float()
        for term in self.rows[1:]:
            total = total.add_(term)
        return total


class SharedMemoryNodeExchange(NodeExchange):
    """A `NodeExchange` of CPU tensors through memory. Making one is a collective call.

    Args:
        group: the ranks of the node.
        timeout_seconds: how long `wait` waits for a rank that is alive.

    Raises:
        NodeMemoryUnavailable: on all ranks, where they are on several machines, in containers that
            do not see each other, or may not read each other's memory.
        ValueError: for a node of one rank.
    """

    def __init__(self, group: dist.ProcessGroup, *, timeout_seconds: float) -> None:
        super().__init__(local_rank=dist.get_rank(group), local_size=dist.get_world_size(group))
        if self.local_size < 2:
            raise ValueError(
                "a node of one rank has nothing to exchange: use CollectiveNodeExchange, which "
                "does nothing then"
            )
        self.page = NodePage(group, words=3 * CHANNEL_WORDS, timeout_seconds=timeout_seconds)
        # one channel per method: each keeps its own sequence
        self.scatters, self.shards, self.messages = (
            NodeChannel(self.page, base=index * CHANNEL_WORDS) for index in range(3)
        )
        self.sums, self.rows = Buffers(), Buffers()
        # (ranks, bytes): blocks of the others' memory
        self.received = np.empty((self.local_size, BLOCK_BYTES), dtype=np.uint8)

    def reduce_scatter(self, flat: Tensor) -> PendingResult[Tensor]:
        """Add up this rank's shard; see `NodeExchange`.

        Raises:
            ValueError: for what is not a flat contiguous CPU tensor of float32, bfloat16 or
                float16.
        """
        if flat.dtype not in SUMMABLE:
            raise ValueError(
                f"sums inside a node are of float32, bfloat16 or float16; got {flat.dtype}"
            )
        # (n,) as integers where Numba lacks the type; the sum (shard,) in memory used again
        elements = _checked(flat).view(SUMMABLE[flat.dtype]).numpy()
        start, stop = shard_bounds(flat.numel(), local_size=self.local_size)[self.local_rank]
        buffer = self.sums.take(4 * (stop - start))
        total = buffer[: 4 * (stop - start)].view(torch.float32)  # (shard,)

        def read(processes: Array, sources: Array) -> tuple[int, int]:
            sources += start * elements.itemsize
            received = self.received.view(elements.dtype)
            vector = self.page.vector_address
            return sum_ranks(
                total.numpy(),
                elements[start:stop],
                processes,
                sources,
                self.local_rank,
                received,
                vector,
            )

        def outcome() -> Tensor:
            self.sums.give(buffer)
            return total

        expected = [elements.nbytes] * self.local_size
        return Operation(self.scatters, sent=flat, expected=expected, read=read, outcome=outcome)

    def gather_shards(self, flat: Tensor) -> PendingResult[Tensor]:
        """Copy the others' shards; see `NodeExchange`. The result is `flat`."""
        shards = [
            _checked(flat)[start:stop]
            for start, stop in shard_bounds(flat.numel(), local_size=self.local_size)
        ]
        return self._gather(self.shards, shards, lambda: flat)

    def all_gather(self, message: Tensor) -> PendingResult[Tensor]:
        """Copy the others' messages; see `NodeExchange`."""
        size = _checked(message).numel()
        buffer = self.rows.take(self.local_size * size)
        rows = buffer[: self.local_size * size].view(self.local_size, size)
        rows[self.local_rank] = message

        def outcome() -> Tensor:
            self.rows.give(buffer)
            return rows

        return self._gather(self.messages, list(rows), outcome)

    def _gather(
        self, channel: NodeChannel, parts: list[Tensor], outcome: Callable[[], Tensor]
    ) -> Operation:
        # Copy every other rank's part into its place among `parts`, one per local rank
        sizes = np.array([part.numel() * part.element_size() for part in parts], dtype=np.int64)
        targets = np.array([part.data_ptr() for part in parts], dtype=np.int64)

        def read(processes: Array, sources: Array) -> tuple[int, int]:
            return gather_ranks(
                processes, sources, targets, sizes, self.local_rank, self.page.vector_address
            )

        return Operation(
            channel,
            sent=parts[self.local_rank],
            expected=sizes.tolist(),
            read=read,
            outcome=outcome,
        )

    def close(self) -> None:
        """Leave: other ranks' waits for this one end with an error. May be called twice."""
        self.page.leave()


def _checked(flat: Tensor) -> Tensor:
    if flat.device.type != "cpu" or flat.dim() != 1 or not flat.is_contiguous():
        raise ValueError(
            f"a flat contiguous CPU tensor is exchanged; got {tuple(flat.shape)} on {flat.device}"
        )
    return flat.detach()


class Buffers:
    """Memory of results, used again.

    Fresh memory costs a page fault per 4 kB, more than the exchange itself.
    """

    def __init__(self) -> None:
        self.free: list[Tensor] = []

    def take(self, size: int) -> Tensor:
        """Return a buffer of at least `size` bytes."""
        fitting = [buffer for buffer in self.free if buffer.numel() >= size]
        # Where none fits, the smallest makes room: there are never more than were in use at once.
        chosen = min(fitting or self.free, key=Tensor.numel, default=None)
        self.free = [buffer for buffer in self.free if buffer is not chosen]
        return chosen if fitting and chosen is not None else torch.empty(size, dtype=torch.uint8)

    def give(self, buffer: Tensor) -> None:
        """Take back what `take` gave."""
        self.free.append(buffer)

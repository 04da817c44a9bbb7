"""Exchange among the CPU ranks of one node through memory, without sockets.

Each rank reads what it needs straight from the others' memory (`process_vm_readv`, as MPI libraries
do): a reduce-scatter reads (ranks - 1) / ranks of a bucket in blocks that stay in the cache and
adds them up there; an all-gather is one copy per message. Nothing is packed, copied out or
allocated. Where the kernel forbids reading (`ptrace` rights), ranks copy what they send into shared
segments and read from there: one more copy.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_topt.communication.node.node_channel import CHANNEL_WORDS, Channel, Operation
from lightning_topt.communication.node.node_exchange import (
    NodeExchange,
    PendingResult,
    shard_bounds,
)
from lightning_topt.communication.node.node_kernels import Array, gather_ranks, sum_ranks
from lightning_topt.communication.node.page import NodePage

log = logging.getLogger(__name__)

# read at a time from each rank: large enough for the system call, small enough for the cache
BLOCK_BYTES = 1 << 17

# Types that Numba lacks travel as integers of their size.
SUMMABLE = {torch.float32: torch.float32, torch.bfloat16: torch.uint16, torch.float16: torch.int16}


class Buffers:
    """Results' memory, used again: fresh memory costs a page fault per 4 kB, more than the exchange
    itself.
    """

    def __init__(self) -> None:
        self.free: list[Tensor] = []

    def take(self, size: int) -> Tensor:
        """Return at least `size` bytes."""
        fitting = [buffer for buffer in self.free if buffer.numel() >= size]
        # Where none fits, the smallest makes room: there are never more than were in use at once.
        chosen = min(fitting or self.free, key=Tensor.numel, default=None)
        self.free = [buffer for buffer in self.free if buffer is not chosen]
        return chosen if fitting and chosen is not None else torch.empty(size, dtype=torch.uint8)

    def give(self, buffer: Tensor) -> None:
        """Take back what `take` gave."""
        self.free.append(buffer)


class SharedMemoryNodeExchange(NodeExchange):
    """This `NodeExchange` passes CPU tensors through memory. Making one is a collective call on
    `group`, the node's ranks.

    `timeout_seconds`: how long `wait` waits for a rank that is alive; `direct`: read the others'
    memory where that is allowed, False: always copy through segments. Raises NodeMemoryUnavailable,
    on all ranks, where they are on several machines or in containers that do not see each other;
    ValueError for a node of one rank.
    """

    def __init__(
        self, group: dist.ProcessGroup, *, timeout_seconds: float, direct: bool = True
    ) -> None:
        super().__init__(local_rank=dist.get_rank(group), local_size=dist.get_world_size(group))
        if self.local_size < 2:
            raise ValueError(
                "a node of one rank has nothing to exchange: use CollectiveNodeExchange, which "
                "does nothing then"
            )
        self.page = NodePage(group, words=3 * CHANNEL_WORDS, timeout_seconds=timeout_seconds)
        if direct and self.page.unreadable:
            log.warning("ranks of this node copy through shared segments: %s", self.page.unreadable)
        self.direct = direct and not self.page.unreadable
        self.scatters, self.shards, self.messages = (
            Channel(self.page, base=index * CHANNEL_WORDS, direct=self.direct) for index in range(3)
        )
        self.sums, self.rows = Buffers(), Buffers()
        self.received = np.empty((self.local_size, BLOCK_BYTES), dtype=np.uint8)

    def reduce_scatter(self, flat: Tensor) -> PendingResult[Tensor]:
        """See `NodeExchange`. Raises ValueError for what is not a contiguous CPU tensor of a 16 or
        32 bit floating type.
        """
        if flat.dtype not in SUMMABLE:
            raise ValueError(
                f"sums inside a node are of float32, bfloat16 or float16; got {flat.dtype}"
            )
        elements = _checked(flat).view(SUMMABLE[flat.dtype]).numpy()
        start, stop = shard_bounds(flat.numel(), local_size=self.local_size)[self.local_rank]
        buffer = self.sums.take(4 * (stop - start))
        total = buffer[: 4 * (stop - start)].view(torch.float32)

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
        """See `NodeExchange`; the result is `flat`."""
        shards = [
            _checked(flat)[start:stop]
            for start, stop in shard_bounds(flat.numel(), local_size=self.local_size)
        ]
        return self._gather(self.shards, shards, lambda: flat)

    def all_gather(self, message: Tensor) -> PendingResult[Tensor]:
        """See `NodeExchange`."""
        size = _checked(message).numel()
        buffer = self.rows.take(self.local_size * size)
        rows = buffer[: self.local_size * size].view(self.local_size, size)
        rows[self.local_rank] = message

        def outcome() -> Tensor:
            self.rows.give(buffer)
            return rows

        return self._gather(self.messages, list(rows), outcome)

    def _gather(
        self, channel: Channel, parts: list[Tensor], outcome: Callable[[], Tensor]
    ) -> Operation:
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
        """Leave: the others' waits for this rank end with an error. May be called twice."""
        self.page.leave()
        for channel in (self.scatters, self.shards, self.messages):
            channel.close()


def _checked(flat: Tensor) -> Tensor:
    if flat.device.type != "cpu" or flat.dim() != 1 or not flat.is_contiguous():
        raise ValueError(
            f"a flat contiguous CPU tensor is exchanged; got {tuple(flat.shape)} on {flat.device}"
        )
    return flat.detach()

"""Exchange between the ranks of one node: the interface, and its form on any process group.

A bucket of n elements has one *shard* per local rank: contiguous, shard i belongs to local rank i,
sizes differ by at most one element (`shard_bounds`); nothing is padded.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from itertools import pairwise
from typing import Generic, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_topt.communication.collectives import Pending, all_gather_into

T = TypeVar("T")


class Waitable(Protocol):
    """Something in flight; ``torch.distributed.Work`` is one."""

    def is_completed(self) -> bool:
        """Return whether `wait` would return at once. True also after a failure, which `wait` then
        raises.
        """

    def wait(self) -> object:
        """Block until done; raises where it failed."""


class PendingResult(ABC, Generic[T]):
    """A `Waitable` with a result, to be asked for once, after `wait`."""

    @abstractmethod
    def is_completed(self) -> bool:
        """Return whether `wait` would return at once."""

    @abstractmethod
    def wait(self) -> None:
        """Block until done; raises where it failed."""

    @abstractmethod
    def result(self) -> T:
        """Return the result; valid until its reader yields to the worker again."""


def shard_bounds(numel: int, *, local_size: int) -> list[tuple[int, int]]:
    """Return the first and last-plus-one element of every local rank's shard."""
    cuts = [numel * index // local_size for index in range(local_size + 1)]
    return list(pairwise(cuts))


class NodeExchange(ABC):
    """Reduce-scatter and all-gather among the ranks of one node, asynchronous.

    Every local rank calls each method for the same buckets in the same order; calls of *different*
    methods may be interleaved differently on different ranks (bucket i+1's `reduce_scatter` may
    come before or after bucket i's `all_gather`), so each method keeps its own sequence. Several
    calls of one method may be in flight. All methods are called, and all results waited for, from
    one thread. `flat` may be written again once ``wait()`` has returned. A failed or dead peer must
    not hang for ever: `is_completed` stays False and the worker's deadline ends the job, or `wait`
    raises.
    """

    def __init__(self, *, local_rank: int, local_size: int) -> None:
        self.local_rank, self.local_size = local_rank, local_size

    @abstractmethod
    def reduce_scatter(self, flat: Tensor) -> PendingResult[Tensor]:
        """Return the float32 sum over the node of this rank's shard of `flat` (n,), added in rank
        order; `flat` is only read.
        """

    @abstractmethod
    def gather_shards(self, flat: Tensor) -> Waitable:
        """Fill in the others' shards of `flat` (n,), of which every local rank has written its
        own.
        """

    @abstractmethod
    def all_gather(self, message: Tensor) -> PendingResult[Tensor]:
        """Return every local rank's uint8 `message` (size,), in order: (local size, size). Equal
        sizes on all local ranks.
        """

    @abstractmethod
    def close(self) -> None:
        """Release what outlives the process (shared memory); process groups are not destroyed."""


class _Sum(PendingResult[Tensor]):
    def __init__(self, work: dist.Work, terms: Tensor) -> None:
        self.work, self.terms = work, terms

    def is_completed(self) -> bool:
        return self.work.is_completed()

    def wait(self) -> None:
        self.work.wait()

    def result(self) -> Tensor:
        total = self.terms[0].float()
        for term in self.terms[1:]:
            total = total.add_(term)
        return total


class _Rows(PendingResult[Tensor]):
    def __init__(self, work: Waitable, rows: Tensor) -> None:
        self.work, self.rows = work, rows

    def is_completed(self) -> bool:
        return self.work.is_completed()

    def wait(self) -> None:
        self.work.wait()

    def result(self) -> Tensor:
        return self.rows


class CollectiveNodeExchange(NodeExchange):
    """A `NodeExchange` by collectives, on every backend; one process group per direction keeps the
    order of calls equal.
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
        """Exchange the shards by an all-to-all, then sum locally: half the bytes of gloo's own
        reduce-scatter.
        """
        sizes = [
            stop - start for start, stop in shard_bounds(flat.numel(), local_size=self.local_size)
        ]
        own = sizes[self.local_rank]
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
        bounds = shard_bounds(flat.numel(), local_size=self.local_size)
        return Pending(
            [
                dist.broadcast(
                    flat[start:stop], group=self.gather_group, group_src=owner, async_op=True
                )
                for owner, (start, stop) in enumerate(bounds)
                if stop > start
            ]
        )

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

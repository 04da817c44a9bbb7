"""Parts of `OuterSteps`: means over ranks, and the outer optimizer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_topt.communication.collectives import ring_all_gather
from lightning_topt.communication.level_message import LevelMessage
from lightning_topt.communication.named_tensors import NamedTensors
from lightning_topt.communication.node.node_exchange import Waitable
from lightning_topt.communication.outer_gradient import OuterGradient
from lightning_topt.communication.selection import Selection
from lightning_topt.communication.wire import MessageFormat, Unpacked

Wait = Callable[[Waitable | None], None]


class OuterMean(Protocol):
    """The mean over ranks of what each sent."""

    def add_to(self, *targets: tuple[Tensor, float]) -> None:
        """Add it to each target (n,), float32, times the factor beside it."""


@dataclass(frozen=True)
class WholeMean:
    """The mean (n,) of all elements."""

    mean: Tensor

    def add_to(self, *targets: tuple[Tensor, float]) -> None:
        """Add it to each target (n,), times the factor beside it."""
        for target, factor in targets:
            target.add_(self.mean, alpha=factor)


@dataclass(frozen=True)
class EntriesMean:
    """The mean of some entries of each rank, in consecutive parts of (n,).

    A part is its number of elements, all ranks' messages (ranks, bytes) and what reads one of them,
    when entries are added, in rank order.
    """

    parts: Sequence[tuple[int, Tensor, Callable[[Tensor], Unpacked]]]

    def add_to(self, *targets: tuple[Tensor, float]) -> None:
        """Add it to each target (n,), times the factor beside it."""
        start = 0
        for size, messages, unpack in self.parts:
            for message in messages:
                _, values, indices = unpack(message)
                for target, factor in targets:
                    target[start : start + size].index_add_(
                        0, indices, values, alpha=factor / len(messages)
                    )
            start += size


class MeanOverRanks(ABC):
    """The mean of one outer gradient per rank, the same bits on every rank. `bytes_sent`: payload
    that this rank sent in rings.

    `residual` (n,), float32, is what this rank has not sent yet, saved with the state of the ranks;
    None where it sends all.
    """

    residual: Tensor | None = None

    def __init__(self, *, group: dist.ProcessGroup | None) -> None:
        self.group = group
        self.world_size = dist.get_world_size(group)
        self.bytes_sent = 0

    @abstractmethod
    def mean(self, gradient: OuterGradient, *, wait: Wait) -> OuterMean:
        """Return the mean of what the ranks send of their finite `gradient` (n,)."""

    def send_entries(
        self, chosen: Selection, form: MessageFormat | LevelMessage, *, residual: Tensor
    ) -> tuple[Tensor, Waitable | None]:
        """Return all ranks' messages (ranks, bytes) of what they chose, in rank order, and what to
        wait for.

        What rounding takes away from `chosen` goes back to `residual`, out of which it was taken.
        """
        message = torch.empty(form.nbytes, dtype=torch.uint8, device=residual.device)
        form.pack(chosen.values, chosen.indices, out=message)
        messages = message.new_empty((self.world_size, message.numel()))
        self.count_ring(messages.nbytes, passes=1)
        work = ring_all_gather(messages, message, group=self.group)
        residual.index_add_(0, chosen.indices, chosen.values - form.values(message))
        return messages, work

    def count_ring(self, nbytes: int, *, passes: int) -> None:
        """Count a gather of `nbytes` in all (`passes` 1) or an all-reduce of `nbytes` (2)."""
        self.bytes_sent += passes * (self.world_size - 1) * nbytes // self.world_size


class DenseMean(MeanOverRanks):
    """One all-reduce in `value_dtype`; what rounding takes away is lost."""

    def __init__(self, *, value_dtype: torch.dtype, group: dist.ProcessGroup | None) -> None:
        super().__init__(group=group)
        self.value_dtype = value_dtype

    def mean(self, gradient: OuterGradient, *, wait: Wait) -> OuterMean:
        """Return the mean of all of it."""
        message = gradient.whole().div_(self.world_size).to(self.value_dtype)
        self.count_ring(message.nbytes, passes=2)
        wait(dist.all_reduce(message, group=self.group, async_op=True))
        return WholeMean(message)


def outer_update(
    anchor: Tensor, mean: OuterMean, *, momentum: Tensor | None, coefficient: float, rate: float
) -> None:
    """Take one step of SGD on `anchor` (n,) with `mean` as gradient, with Nesterov momentum where
    there is `momentum` (n,).
    """
    if momentum is None:
        mean.add_to((anchor, -rate))
        return
    momentum.mul_(coefficient)
    mean.add_to((momentum, 1.0), (anchor, -rate))
    anchor.sub_(momentum, alpha=rate * coefficient)


def mean_of_buffers(buffers: NamedTensors, *, group: dist.ProcessGroup | None, wait: Wait) -> int:
    """Buffers of floating point, such as running statistics, become their mean over ranks, all
    others those of rank 0.

    Returns the payload bytes that this rank sent.
    """
    floating = NamedTensors([(n, t) for n, t in buffers.tensors.items() if t.is_floating_point()])
    others = [tensor for tensor in buffers.tensors.values() if not tensor.is_floating_point()]
    world_size, sent = dist.get_world_size(group), 0
    if floating.numel:
        values = floating.read().div_(world_size)
        wait(dist.all_reduce(values, group=group, async_op=True))
        floating.write(values)
        sent += 2 * values.nbytes
    for tensor in others:
        take_from_first(tensor, group=group, wait=wait)
        sent += tensor.nbytes
    return sent * (world_size - 1) // world_size


def take_from_first(tensor: Tensor, *, group: dist.ProcessGroup | None, wait: Wait) -> None:
    """Every rank's `tensor` becomes that of rank 0 of the group."""
    values = tensor.detach().contiguous()
    wait(dist.broadcast(values, group=group, group_src=0, async_op=True))
    tensor.detach().copy_(values)

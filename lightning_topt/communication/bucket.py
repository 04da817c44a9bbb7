"""A bucket of gradients, and the interface of everything that can average one over all ranks.

A method (`exchange_method.GradientMethod`) makes a subclass of `BucketExchange` with `stages`. The
rules that keep the ranks in step (see `exchange_worker.ExchangeWorker`):

- `stages` issues collectives asynchronously and yields what it waits for; what follows a yield runs
  when that is done;
- stage s (what runs before the s-th yield) uses only groups of that stage, for example
  ``groups.world[s]``; the packed exempt parameters have ``groups.exempt``, in stage 0; a method
  with several stages on ``groups.world`` says so in `num_stages`;
- what follows depends only on what all ranks know: if one rank raises `NonFiniteGradient`, all do,
  at the same place;
- ranks decode in rank order, so that the result is the same bit for bit everywhere.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_topt.communication.collectives import Pending
from lightning_topt.communication.exchange_context import ExchangeContext
from lightning_topt.communication.node.node_exchange import Waitable

Stages = Generator[Waitable, None, Tensor]


class NonFiniteGradient(ArithmeticError):
    """A bucket's gradient has NaN or infinities on some rank; raised by `stages` on all ranks.
    `own`: on this one.
    """

    def __init__(self, own: bool) -> None:
        super().__init__("non-finite gradient")
        self.own = own


@dataclass(frozen=True)
class BucketLayout:
    """The parameters of a bucket: names, first elements in the buffer, sizes, shapes, and which are
    always sent whole.
    """

    names: tuple[str, ...]
    offsets: tuple[int, ...]
    numels: tuple[int, ...]
    shapes: tuple[torch.Size, ...]
    exempt: tuple[bool, ...]

    @property
    def slices(self) -> list[slice]:
        """The slices of the buffer where each parameter is."""
        return [
            slice(start, start + numel)
            for start, numel in zip(self.offsets, self.numels, strict=True)
        ]

    @property
    def exempt_slices(self) -> list[slice]:
        """The slices of the buffer where the exempt parameters are."""
        return [part for part, exempt in zip(self.slices, self.exempt, strict=True) if exempt]

    def compressible(self, start: int, stop: int) -> int:
        """Return the number of elements of parameters that are not exempt, from element `start` up
        to `stop`.
        """
        parts = [part for part, exempt in zip(self.slices, self.exempt, strict=True) if not exempt]
        return sum(max(0, min(part.stop, stop) - max(part.start, start)) for part in parts)


@dataclass(frozen=True)
class Bucket:
    """One bucket of one step.

    `buffer` (n,) holds this rank's gradients, multiplied by `loss_scale`, and takes the mean over
    all ranks, multiplied alike; `step` counts exchanged steps from 0.
    """

    index: int
    buffer: Tensor
    layout: BucketLayout
    is_last: bool
    step: int
    loss_scale: float = 1.0

    def views(self) -> list[Tensor]:
        """Return each parameter's part of the buffer, in the parameter's shape."""
        layout = self.layout
        return [
            self.buffer[part].view(shape)
            for part, shape in zip(layout.slices, layout.shapes, strict=True)
        ]


class ExemptMean:
    """The exempt parameters of a bucket on their way: packed, summed over all ranks, apart from the
    rest.
    """

    def __init__(self, bucket: Bucket, *, group: dist.ProcessGroup) -> None:
        self.parts = [bucket.buffer[part] for part in bucket.layout.exempt_slices]
        self.packed = torch.cat(self.parts)
        self.own_finite = is_finite(self.packed)
        self.world_size = dist.get_world_size(group)
        self.work = dist.all_reduce(self.packed, group=group, async_op=True)
        # The method then sees zeros: they are never selected and add nothing to a residual.
        torch._foreach_zero_(self.parts)

    def is_completed(self) -> bool:
        """Return whether `wait` would return at once."""
        return bool(self.work.is_completed())

    def wait(self) -> None:
        """Block until summed."""
        self.work.wait()

    def mean(self) -> Tensor:
        """Return the mean over ranks, packed (e,). Raises `NonFiniteGradient`."""
        if not is_finite(self.packed):
            raise NonFiniteGradient(not self.own_finite)
        return self.packed.div_(self.world_size)

    def write(self, mean: Tensor, *, add: bool = False) -> None:
        """Put the packed `mean` (e,) where the parameters are in the buffer, or add it to what is
        there.
        """
        parts = list(mean.split_with_sizes([part.numel() for part in self.parts]))
        if add:
            torch._foreach_add_(self.parts, parts)
        else:
            torch._foreach_copy_(self.parts, parts)


class BucketExchange(ABC):
    """Averages buckets over all ranks. `bytes_sent` counts payload bytes since the last reset (see
    `count_ring`).
    """

    def __init__(self, context: ExchangeContext) -> None:
        self.topology, self.groups, self.device = context.topology, context.groups, context.device
        self.bytes_sent = 0

    @abstractmethod
    def stages(self, bucket: Bucket) -> Stages:
        """Exchange `bucket`; returns its own buffer with the mean over all ranks, the same bits on
        every rank.
        """

    def dense_stages(self, bucket: Bucket) -> Stages:
        """Take the mean by one all-reduce on ``groups.world[0]``; a method does so where
        `is_dense_step`.
        """
        own_finite = is_finite(bucket.buffer)
        bucket.buffer.div_(self.topology.world_size)
        self.count_ring(bucket.buffer.nbytes, passes=2)
        work = dist.all_reduce(bucket.buffer, group=self.groups.world[0], async_op=True)
        assert work is not None
        yield work
        if not is_finite(bucket.buffer):
            raise NonFiniteGradient(not own_finite)
        return bucket.buffer

    def start_exempt(self, bucket: Bucket) -> ExemptMean | None:
        """Send the exempt parameters of `bucket`, if there are any, and zero their part of the
        buffer. Stage 0 only.
        """
        if not any(bucket.layout.exempt):
            return None
        exempt = ExemptMean(bucket, group=self.groups.exempt)
        self.count_ring(exempt.packed.nbytes, passes=2)
        return exempt

    def count_ring(self, nbytes: int, *, passes: int) -> None:
        """Count a ring over all ranks: a gather (`passes` 1, `nbytes` the whole) or an all-reduce
        (2).

        `bytes_sent` is what the network counter of a node sees leave: in a ring in rank order one
        rank of each node sends to another node. With one node it is what a rank sends.
        """
        world_size = self.topology.world_size
        self.bytes_sent += passes * (world_size - 1) * nbytes // world_size

    def count_across(self, nbytes: int, *, passes: int) -> None:
        """Count a ring over nodes, `nbytes` for all local ranks together: what the network counter
        of this node sees leave.
        """
        self.bytes_sent += (
            passes * (self.topology.num_nodes - 1) * nbytes // self.topology.num_nodes
        )

    def warm_up(self) -> None:  # noqa: B027
        """Compile what `stages` needs, rather than in the first step."""

    def put_back(self) -> None:  # noqa: B027
        """Put back into the residual what the last step sent: it is thrown away. Do nothing where
        there is no residual.
        """

    def residual_norm(self) -> float:
        """Return the L2 norm of what this rank holds back, in units of the unscaled gradient; 0
        where there is no residual.
        """
        return 0.0

    def telemetry(self, *, steps: int, reset: bool) -> Mapping[str, float]:
        """Return what the exchange has to say beside `ExchangeStatistics`, by name, of the `steps`
        since the last reset.
        """
        return {}

    def prepare(self, bucket: Bucket) -> bool:
        """Return whether `stages` may start while earlier buckets are in flight; if not, `relayout`
        is called first.
        """
        return True

    def relayout(self) -> None:  # noqa: B027
        """Make ready for buckets laid out anew. May use ``groups.state``; nothing is in flight."""

    def state_dict(self) -> dict[str, dict[str, Tensor]]:
        """Return this rank's state: kind ("residual", "velocity", ...) -> parameter name -> tensor;
        {} where there is none.

        Collective where the state of one rank is spread over its node (it then is the node's, the
        same on its ranks).
        """
        return {}

    def load_state_dict(self, state: dict[str, dict[str, Tensor]]) -> None:
        """Take over what `state_dict` gave, or the mean of several."""
        assert not state, f"{type(self).__name__} has no state"

    def close(self) -> None:  # noqa: B027
        """Release what outlives the process."""


def together(*works: Waitable | None) -> Pending:
    """Return several works as one, without those that are None."""
    return Pending([work for work in works if work is not None])


def is_finite(tensor: Tensor) -> bool:
    """Return whether all entries are finite, in one pass where they are and without a copy."""
    if tensor.dtype == torch.float16 and tensor.numel():  # whose sum soon is not
        return all(bool(torch.isfinite(extreme)) for extreme in torch.aminmax(tensor))
    return bool(torch.isfinite(tensor.sum())) or bool(torch.isfinite(tensor).all())


def named_parts(layout: BucketLayout, flat: Tensor, *, start: int = 0) -> dict[str, Any]:
    """Return, per parameter touched, (first element in the parameter, values) of `flat`, which
    holds elements from `start` of a bucket.
    """
    parts: dict[str, Any] = {}
    for name, offset, numel in zip(layout.names, layout.offsets, layout.numels, strict=True):
        first, last = max(offset, start), min(offset + numel, start + flat.numel())
        if first < last:
            parts[name] = (first - offset, flat[first - start : last - start])
    return parts

"""Gradients of `DistributedDataParallel` reduce-scattered: each rank has the average of its slice
of every bucket only.

A rank that updates a share of the parameters needs no other gradients. Per rank, P ranks and n
bytes of gradient, an all-reduce sends 2 n (P - 1) / P and this half of it; the other half are the
updated parameters, which a parallel step sends anyway (Rajbhandari et al., arXiv 1910.02054,
section 7.1; Xu et al., arXiv 2004.13336). Slices are cut between rows (`bucket_slices`), so that
they are `Piece`s of a parallel step whose rule treats every element by itself.

[Note: foreign gradients] Outside of this rank's slices a gradient is of no use after the backward
pass: this rank's own, with a NaN in every piece, so that what reads whole gradients (torch's
``clip_grad_norm_``, an optimizer without `ParallelStep`, a second backward pass on top of an
exchanged gradient) does not go on with one rank's part of the sum unseen. Clip with
`ScatteredGradients`, use a GradScaler with `install_overflow_agreement`, accumulate under
``DistributedDataParallel.no_sync``.
"""

# No `from __future__ import annotations`: DDP compares the annotations of a hook with classes.
import itertools
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from math import nan
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.distributed_c10d import PrefixStore, _get_default_store
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lightning_topt.communication.exchange_worker import make_streams
from lightning_topt.communication.node.rows import NodeRows
from lightning_topt.communication.rank_watch import PeerMonitor
from lightning_topt.optim.bucket_slices import (
    Segment,
    cut_buckets,
    offsets_of,
    pieces_of_segment,
    segment_of,
)
from lightning_topt.optim.pieces import Piece, num_rows
from lightning_topt.optim.slice_terms import average_into, exchange_parts

# buckets that are received at a time: bounds the extra memory to about that many buckets
IN_FLIGHT = 4

_made = itertools.count()  # exchanges are made in the same order on all ranks


@dataclass(frozen=True)
class _Layout:
    """A `_Layout` says what a bucket holds."""

    identities: tuple[int, ...]
    segments: tuple[Segment, ...]


@dataclass
class _Flight:
    """A bucket under way; `received` are the other ranks' terms of this rank's slice, in the order
    of ranks.

    `foreign` has the first element of every piece of another rank. Through memory nothing is
    received: the works average.
    """

    buffer: Tensor
    cuts: tuple[int, ...]
    foreign: Tensor
    received: list[Tensor]
    scratch: Tensor | None
    works: list[Any]
    future: torch.futures.Future[Tensor]


class ReduceScatterExchange:
    """Takes over the gradients of `ddp`; made alike on all ranks, before the first backward pass. A
    collective call.

    Gradients are all-reduced, as without it, until `begin`, which needs `ready`: DDP arranges its
    buckets anew after the first backward pass. Parameters in `uncut` get one owner each (rules that
    read whole parameters). Errors of the exchange are `PeerLostError`, within `timeout_seconds`.
    `node`: all ranks through the memory of their one machine, for float32 gradients on the CPU.
    Raises TypeError for a wrapper that is not DistributedDataParallel.
    """

    def __init__(
        self,
        ddp: DistributedDataParallel,
        *,
        uncut: Iterable[Tensor] = (),
        timeout_seconds: float = 1800.0,
        node: NodeRows | None = None,
    ) -> None:
        if not isinstance(ddp, DistributedDataParallel):
            raise TypeError(
                f"gradients of a {type(ddp).__name__} cannot be reduce-scattered here: this needs "
                "torch.nn.parallel.DistributedDataParallel; wrap the module in it"
            )
        self.node = node
        self.timeout = timedelta(seconds=timeout_seconds)
        # A group of its own: its tags and its order of works are nobody else's.
        self.group = dist.new_group(
            dist.get_process_group_ranks(ddp.process_group), timeout=self.timeout
        )
        self.rank, self.world_size = dist.get_rank(self.group), dist.get_world_size(self.group)
        store = PrefixStore(f"lightning_topt/reduce_scatter/{next(_made)}", _get_default_store())
        self.monitor = PeerMonitor(store, rank=self.rank, world_size=self.world_size)
        self.device = next(ddp.parameters()).device
        self.scattered = False  # the gradients of the last backward pass
        self._uncut = {id(parameter) for parameter in uncut}
        self._begun, self._passes = False, 0
        self._layouts: list[_Layout] = []  # of the pass before
        self._seen: list[_Layout] = []  # of this pass, so far
        self._parameters: dict[int, Tensor] = {}
        self._cuts: list[tuple[int, ...]] = []
        self._foreign: list[Tensor] = []
        # by id of the parameter, once the layout is final
        self._pieces: dict[int, list[Piece]] = {}
        self._flights: list[_Flight] = []
        self._scratch: list[Tensor] = []
        self._error: Exception | None = None  # why the exchange ended
        ddp.register_comm_hook(state=self, hook=_hook)

    @property
    def ready(self) -> bool:
        """Whether the buckets are final: two exchanged backward passes in a row have had the same
        ones. Alike on all ranks.
        """
        return bool(self._pieces)

    def pieces_of(self, optimizer: Optimizer) -> list[Piece]:
        """Return which rank owns which rows of the parameters of `optimizer`, for `ParallelStep`.

        Parameters that DDP does not exchange (frozen ones) have no piece. Raises ValueError unless
        `ready`.
        """
        self._check_ready()
        return [
            replace(piece, index=index)
            for index, parameter in enumerate(_parameters_of([optimizer]))
            for piece in self._pieces.get(id(parameter), ())
        ]

    def begin(self, optimizers: Sequence[Optimizer]) -> None:
        """Collective call: from the next backward pass on gradients are scattered.

        `optimizers` update only their own pieces from then on (a `ParallelStep` with `pieces_of` is
        installed). Raises ValueError unless `ready`, where an exchanged parameter is in none of
        them (nobody would have its whole gradient), and when ranks begin after different backward
        passes.
        """
        self._check_ready()
        updated = {id(parameter) for parameter in _parameters_of(optimizers)}
        missing = [tuple(p.shape) for key, p in self._parameters.items() if key not in updated]
        if missing:
            raise ValueError(
                f"{len(missing)} parameters whose gradients DDP exchanges are in none of the "
                f"{len(optimizers)} optimizers, "
                f"the first of shape {missing[0]}: give all optimizers of the module to `begin`, "
                "and freeze "
                "(requires_grad_(False), before DDP wraps the module) what none of them updates"
            )
        passes = torch.tensor([self._passes, -self._passes], device=self.device)
        dist.all_reduce(passes, dist.ReduceOp.MAX, group=self.group)
        if passes[0] != -passes[1]:
            raise ValueError(
                f"ranks call `begin` after {-int(passes[1])} to {int(passes[0])} exchanged "
                "backward passes: call it on all "
                "ranks after the same one"
            )
        self._begun = True

    def end(self) -> None:
        """From the next backward pass on gradients are all-reduced again; on all ranks after the
        same step.
        """
        self._begun = False

    def own_pieces(self, parameter: Tensor) -> list[Piece] | None:
        """Return this rank's pieces of `parameter` (`index` is the bucket's); None if its gradient
        is whole on every rank.
        """
        if not self.scattered or id(parameter) not in self._pieces:
            return None
        return [piece for piece in self._pieces[id(parameter)] if piece.owner == self.rank]

    def _check_ready(self) -> None:
        if not self.ready:
            raise ValueError(
                "the buckets are not final: DDP arranges them after the first backward pass; ask "
                "for `ready` after each "
                "exchanged backward pass (it comes with the second or third) and go on when it is "
                "true"
            )

    def _take(self, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        """Start the exchange of one bucket; the last one of a pass waits for all."""
        if self._error:
            raise self._error
        if bucket.index() == 0:
            assert not self._flights
            self._seen, self.scattered = [], self._begun
        layout = self._layout(bucket)
        self._seen.append(layout)
        if not self.scattered:
            future = allreduce_hook(self.group, bucket)
        else:
            if bucket.index() >= len(self._layouts) or layout != self._layouts[bucket.index()]:
                raise RuntimeError(
                    f"DDP changed its bucket {bucket.index()} after the slices were published; "
                    "reduce-scattered gradients "
                    "need buckets that stay: make a new ReduceScatterExchange with a new "
                    "DistributedDataParallel"
                )
            future = self._scatter(bucket)
        if bucket.is_last():
            self._passes += 1
            while self._flights:
                self._land()
            if not self.ready:
                self._settle()
        return future

    def _settle(self) -> None:
        """Cut the buckets once they are the same twice."""
        if self._seen != self._layouts:
            self._layouts = self._seen
            return
        self._cuts = cut_buckets(
            [layout.segments for layout in self._layouts], world_size=self.world_size
        )
        for index, (layout, cuts) in enumerate(zip(self._layouts, self._cuts, strict=True)):
            firsts = {segment.offset for segment in layout.segments if segment.numel} | {*cuts} - {
                cuts[-1]
            }
            foreign = sorted(
                first for first in firsts if not cuts[self.rank] <= first < cuts[self.rank + 1]
            )
            self._foreign.append(torch.tensor(foreign, dtype=torch.int64, device=self.device))
            for identity, segment in zip(layout.identities, layout.segments, strict=True):
                rows = num_rows(self._parameters[identity])
                self._pieces[identity] = pieces_of_segment(segment, cuts, rows=rows, index=index)

    def _layout(self, bucket: GradBucket) -> _Layout:
        if bucket.buffer().is_sparse:
            raise ValueError(
                "sparse gradients cannot be reduce-scattered by rows: use dense ones (sparse=False)"
            )
        parameters, gradients = bucket.parameters(), bucket.gradients()
        identities = tuple(map(id, parameters))
        offsets = offsets_of([gradient.numel() for gradient in gradients])
        segments = (
            segment_of(gradient, offset=offset, splittable=identity not in self._uncut)
            for identity, gradient, offset in zip(identities, gradients, offsets, strict=True)
        )
        self._parameters.update(zip(identities, parameters, strict=True))
        return _Layout(identities, tuple(segments))

    def _scatter(self, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        """Send every rank its slice and receive the terms of one's own."""
        while len(self._flights) >= IN_FLIGHT:
            self._land()
        buffer, cuts = bucket.buffer(), self._cuts[bucket.index()]
        if self.node is not None and buffer.dtype == torch.float32:
            with self._diagnosed():
                works: list[Any] = [self.node.average_slices(buffer, cuts)]
            self._flights.append(
                _Flight(buffer, cuts, self._foreign[bucket.index()], [], None, works, Future())
            )
            return self._flights[-1].future
        numel = cuts[self.rank + 1] - cuts[self.rank]
        others = [(self.rank + k) % self.world_size for k in range(1, self.world_size)]
        scratch = self._take_scratch(buffer, len(others) * numel)
        received = (
            dict(zip(others, torch.split(scratch, max(1, numel)), strict=False))
            if numel and others
            else {}
        )
        sent = {other: buffer[cuts[other] : cuts[other + 1]] for other in others}
        with self._diagnosed():
            works = exchange_parts(
                received, {k: v for k, v in sent.items() if v.numel()}, group=self.group
            )
        in_order = [received[other] for other in sorted(received)]
        future = make_streams(buffer.device).future()
        self._flights.append(
            _Flight(buffer, cuts, self._foreign[bucket.index()], in_order, scratch, works, future)
        )
        return self._flights[-1].future

    def _land(self) -> None:
        """Wait for the oldest bucket under way and make its slice the average over ranks."""
        flight = self._flights.pop(0)
        with self._diagnosed():
            for work in flight.works:
                work.wait() if flight.scratch is None else work.wait(self.timeout)
        if flight.scratch is not None:
            begin, end = flight.cuts[self.rank], flight.cuts[self.rank + 1]
            average_into(flight.buffer[begin:end], flight.received)
            self._scratch.append(flight.scratch)
        flight.buffer.index_fill_(0, flight.foreign, nan)  # [Note: foreign gradients]
        flight.future.set_result(flight.buffer)

    def _take_scratch(self, buffer: Tensor, numel: int) -> Tensor:
        """Memory for received terms, used again where it is large enough."""
        for index, known in enumerate(self._scratch):
            if (
                known.numel() >= numel
                and known.dtype == buffer.dtype
                and known.device == buffer.device
            ):
                return self._scratch.pop(index)
        if len(self._scratch) >= IN_FLIGHT:
            del self._scratch[0]
        return torch.empty(numel, dtype=buffer.dtype, device=buffer.device)

    @contextmanager
    def _diagnosed(self) -> Iterator[None]:
        """Errors of collectives name the ranks that are gone."""
        try:
            yield
        except RuntimeError as error:
            self._error = self.monitor.diagnose(error)
            raise self._error from error


def _parameters_of(optimizers: Iterable[Optimizer]) -> list[Tensor]:
    return [
        parameter
        for optimizer in optimizers
        for group in optimizer.param_groups
        for parameter in group["params"]
    ]


def _hook(exchange: ReduceScatterExchange, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    return exchange._take(bucket)

"""Gradients of `DistributedDataParallel` reduce-scattered, and the steps on them: ZeRO 1, fused.

Each rank gets the average of its slice of every bucket only, updates the parameters of that slice,
and gathers the others:

    ScatteredStep           reduce-scatter, update of the own rows, gather of the parameters
    ReduceScatterExchange   the reduce-scatter: DDP's communication hook
    ScatteredGradients      norms, clipping and overflow of the own rows

Per rank, P ranks and n bytes of gradient, an all-reduce sends 2 n (P - 1) / P and a reduce-scatter
half of it. The other half are the updated parameters, which a parallel step sends anyway: sharing
the update sends nothing more (Rajbhandari et al., arXiv 1910.02054, section 7.1; Xu et al., arXiv
2004.13336). Slices are cut between rows (`cut_buckets`), so that they are `Piece`s of a parallel
step whose rule treats every element by itself.

[Note: slices of other ranks] Outside of this rank's slices a gradient is of no use after the
backward pass: it is this rank's own, with a NaN in every piece. What reads full gradients (torch's
``clip_grad_norm_``, an optimizer without `ParallelStep`, a second backward pass on top of an
exchanged gradient) then does not go on with one rank's part of the sum unseen. Clip with
`ScatteredGradients`, use a GradScaler with `install_overflow_agreement`, accumulate under
``DistributedDataParallel.no_sync``.
"""

import itertools
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from itertools import pairwise
from math import inf, nan
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch.amp import GradScaler
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.distributed_c10d import PrefixStore, _get_default_store
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grads_with_norm_
from torch.optim import Optimizer

from lightning_topt.communication.collectives import backend_of
from lightning_topt.communication.exchange_worker import make_streams
from lightning_topt.communication.rank_watch import PeerMonitor
from lightning_topt.optim.clipping import check_finite, partial_norm, unscale_local
from lightning_topt.optim.full_state import parameters_of
from lightning_topt.optim.parallel_step import ParallelStep, install_parallel_step
from lightning_topt.optim.pieces import Piece, num_rows, rows_of
from lightning_topt.optim.update_rule import UpdateRule

if TYPE_CHECKING:
    from lightning_topt.communication.node.rows import NodeRows

# No `from __future__ import annotations`: DDP compares the annotations of a hook with classes.


# buckets that are received at a time: bounds the extra memory to about that many buckets
IN_FLIGHT = 4
_made = itertools.count()  # exchanges are made in the same order on all ranks


class ScatteredStep:
    """Shares the steps of `optimizers`, which update all trained parameters of `ddp`.

    From its third backward pass or so on. Made on all ranks before the first backward pass (a
    collective call); `begin_when_ready` between steps. Arguments are as for `ReduceScatterExchange`
    and `install_parallel_step`; `rules` has the `update_rule` of every optimizer.
    """

    def __init__(
        self,
        ddp: DistributedDataParallel,
        *,
        optimizers: Sequence[Optimizer],
        rules: Sequence[UpdateRule],
        timeout_seconds: float,
        gather_dtype: torch.dtype | None = None,
        node: "NodeRows | None" = None,
    ) -> None:
        by_parameter = [
            o for o, rule in zip(optimizers, rules, strict=True) if rule == "parameters"
        ]
        uncut = [parameter for optimizer in by_parameter for parameter in parameters_of(optimizer)]
        self.optimizers, self.gather_dtype, self.node = list(optimizers), gather_dtype, node
        self.exchange = ReduceScatterExchange(
            ddp, uncut=uncut, timeout_seconds=timeout_seconds, node=node
        )
        self.steps: list[ParallelStep] = []

    def gradients(self, optimizer: Optimizer) -> "ScatteredGradients":
        """Return the gradients of one of the optimizers, to clip them or for their norm."""
        return ScatteredGradients(self.exchange, optimizers=[optimizer])

    def begin_when_ready(self) -> bool:
        """Share what comes, once DDP's buckets are final; return whether that was now.

        A collective call then. Not inside of a step, whose closure runs the backward pass: state is
        cut to pieces here.
        """
        if self.steps or not self.exchange.ready:
            return False
        self.exchange.begin(self.optimizers)
        self.steps = [
            install_parallel_step(
                optimizer,
                pieces=self.exchange.pieces_of(optimizer),
                group=self.exchange.group,
                gather_dtype=self.gather_dtype,
                node=self.node,
            )
            for optimizer in self.optimizers
        ]
        return True

    def finish(self) -> None:
        """End the sharing: gradients are all-reduced again, and every rank has the full state.

        Collective call. The optimizers have their own steps again.
        """
        self.exchange.end()
        for step in self.steps:
            step.remove()
        self.steps = []
        dist.barrier(group=self.exchange.group)


# ---- The exchange


class ReduceScatterExchange:
    """Takes over the gradients of `ddp`; made on all ranks before the first backward pass.

    A collective call. Gradients are all-reduced, as without it, until `begin`, which needs `ready`:
    DDP arranges its buckets anew after the first backward pass. Errors of the exchange are
    `PeerLostError`, within `timeout_seconds`.

    Args:
        ddp: the wrapped module. Raises TypeError for another wrapper.
        uncut: parameters that get one owner each (rules that read whole parameters).
        timeout_seconds: of every wait.
        node: all ranks through the memory of their one machine, for float32 gradients on the CPU.
    """

    def __init__(
        self,
        ddp: DistributedDataParallel,
        *,
        uncut: Iterable[Tensor] = (),
        timeout_seconds: float = 1800.0,
        node: "NodeRows | None" = None,
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
        self._begun, self._passes = False, 0  # exchanged backward passes
        self._layouts: list[_Layout] = []  # of the pass before
        self._seen: list[_Layout] = []  # of this pass, so far
        self._parameters: dict[int, Tensor] = {}
        self._cuts: list[tuple[int, ...]] = []
        self._unowned: list[Tensor] = []
        # by id of the parameter, once the layout is final
        self._pieces: dict[int, list[Piece]] = {}
        self._flights: list[_Flight] = []
        self._scratch: list[Tensor] = []
        self._error: Exception | None = None  # why the exchange ended
        ddp.register_comm_hook(state=self, hook=_hook)

    @property
    def ready(self) -> bool:
        """Whether the buckets are final; alike on all ranks.

        They are when two exchanged backward passes in a row have had the same ones.
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
            for index, parameter in enumerate(parameters_of(optimizer))
            for piece in self._pieces.get(id(parameter), ())
        ]

    def begin(self, optimizers: Sequence[Optimizer]) -> None:
        """Scatter gradients from the next backward pass on.

        Collective call. `optimizers` update only their own pieces from then on (a `ParallelStep`
        with `pieces_of` is installed).

        Raises:
            ValueError: unless `ready`; where an exchanged parameter is in none of the optimizers
                (nobody would have its full gradient); and when ranks begin after different
                backward passes.
        """
        self._check_ready()
        updated = {id(p) for optimizer in optimizers for p in parameters_of(optimizer)}
        missing = [tuple(p.shape) for key, p in self._parameters.items() if key not in updated]
        if missing:
            raise ValueError(
                f"{len(missing)} parameters whose gradients DDP exchanges are in none of the "
                f"{len(optimizers)} optimizers, the first of shape {missing[0]}: give all "
                "optimizers of the module to `begin`, and freeze (requires_grad_(False), before "
                "DDP wraps the module) what none of them updates"
            )
        # the largest and the smallest number of passes of any rank
        passes = torch.tensor([self._passes, -self._passes], device=self.device)
        dist.all_reduce(passes, dist.ReduceOp.MAX, group=self.group)
        if passes[0] != -passes[1]:
            raise ValueError(
                f"ranks call `begin` after {-int(passes[1])} to {int(passes[0])} exchanged "
                "backward passes: call it on all ranks after the same one"
            )
        self._begun = True

    def end(self) -> None:
        """All-reduce gradients again from the next backward pass on.

        On all ranks after the same step.
        """
        self._begun = False

    def own_pieces(self, parameter: Tensor) -> list[Piece] | None:
        """Return this rank's pieces of `parameter`; `index` is the bucket's.

        None if its gradient is full on every rank.
        """
        if not self.scattered or id(parameter) not in self._pieces:
            return None
        return [piece for piece in self._pieces[id(parameter)] if piece.owner == self.rank]

    def _check_ready(self) -> None:
        if not self.ready:
            raise ValueError(
                "the buckets are not final: DDP arranges them after the first backward pass; ask "
                "for `ready` after each exchanged backward pass (it comes with the second or "
                "third) and go on when it is true"
            )

    def _exchange_bucket(self, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        """Start the exchange of one bucket; the last one of a pass waits for all."""
        if self._error:
            raise self._error
        if bucket.index() == 0:
            assert not self._flights
            self._seen, self.scattered = [], self._begun
        layout = self._layout_of(bucket)
        self._seen.append(layout)
        if not self.scattered:  # before `begin`, or after `end`
            future = allreduce_hook(self.group, bucket)
        else:
            if bucket.index() >= len(self._layouts) or layout != self._layouts[bucket.index()]:
                raise RuntimeError(
                    f"DDP changed its bucket {bucket.index()} after the slices were published; "
                    "reduce-scattered gradients need buckets that stay: make a new "
                    "ReduceScatterExchange with a new DistributedDataParallel"
                )
            future = self._start_scatter(bucket)
        if bucket.is_last():
            self._passes += 1
            while self._flights:
                self._finish_oldest()
            if not self.ready:
                self._cut_when_final()
        return future

    def _cut_when_final(self) -> None:
        """Cut the buckets once they are the same twice."""
        if self._seen != self._layouts:
            self._layouts = self._seen
            return
        self._cuts = cut_buckets(
            [layout.segments for layout in self._layouts], world_size=self.world_size
        )
        for index, (layout, cuts) in enumerate(zip(self._layouts, self._cuts, strict=True)):
            # the first element of every piece that others own gets a NaN after each pass
            firsts = {segment.offset for segment in layout.segments if segment.numel} | {*cuts} - {
                cuts[-1]
            }
            unowned = sorted(
                first for first in firsts if not cuts[self.rank] <= first < cuts[self.rank + 1]
            )
            self._unowned.append(torch.tensor(unowned, dtype=torch.int64, device=self.device))
            for identity, segment in zip(layout.identities, layout.segments, strict=True):
                rows = num_rows(self._parameters[identity])
                self._pieces[identity] = pieces_of_segment(segment, cuts, rows=rows, index=index)

    def _layout_of(self, bucket: GradBucket) -> "_Layout":
        if bucket.buffer().is_sparse:
            raise ValueError(
                "sparse gradients cannot be reduce-scattered by rows: use dense ones (sparse=False)"
            )
        parameters, gradients = bucket.parameters(), bucket.gradients()
        identities = tuple(map(id, parameters))
        # the first element of each gradient in the bucket
        offsets = itertools.accumulate([0, *(gradient.numel() for gradient in gradients[:-1])])
        segments = (
            segment_of(gradient, offset=offset, splittable=identity not in self._uncut)
            for identity, gradient, offset in zip(identities, gradients, offsets, strict=True)
        )
        self._parameters.update(zip(identities, parameters, strict=True))
        return _Layout(identities, tuple(segments))

    def _start_scatter(self, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        """Send every rank its slice and receive the terms of one's own."""
        while len(self._flights) >= IN_FLIGHT:
            self._finish_oldest()
        buffer, cuts = bucket.buffer(), self._cuts[bucket.index()]
        if self.node is not None and buffer.dtype == torch.float32:
            # all ranks share a machine: the works average in memory
            with self._diagnosed():
                works: list[Any] = [self.node.average_slices(buffer, cuts)]
            self._flights.append(
                _Flight(buffer, cuts, self._unowned[bucket.index()], [], None, works, Future())
            )
            return self._flights[-1].future
        # messages: receive the own slice from each other rank, send it theirs
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
            _Flight(buffer, cuts, self._unowned[bucket.index()], in_order, scratch, works, future)
        )
        return self._flights[-1].future

    def _finish_oldest(self) -> None:
        """Wait for the oldest bucket under way and average its slice over ranks."""
        flight = self._flights.pop(0)  # in the order in which they were started
        with self._diagnosed():
            for work in flight.works:
                # NCCL takes a wait with a time as one of the host; else its stream waits
                in_time = flight.scratch is not None and flight.buffer.device.type == "cpu"
                work.wait(self.timeout) if in_time else work.wait()
        if flight.scratch is not None:
            # received terms are averaged into the own slice, in place
            begin, end = flight.cuts[self.rank], flight.cuts[self.rank + 1]
            average_into(flight.buffer[begin:end], flight.received)
            self._scratch.append(flight.scratch)
        flight.buffer.index_fill_(0, flight.unowned, nan)  # [Note: slices of other ranks]
        flight.future.set_result(flight.buffer)

    def _take_scratch(self, buffer: Tensor, numel: int) -> Tensor:
        """Return memory for received terms, used again where it is large enough."""
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
        """Make errors of collectives name the ranks that are gone."""
        try:
            yield
        except RuntimeError as error:
            self._error = self.monitor.diagnose(error)
            raise self._error from error


@dataclass(frozen=True)
class _Layout:
    """What a bucket holds: ids of parameters and where their gradients lie."""

    identities: tuple[int, ...]
    segments: "tuple[ParameterSlice, ...]"


@dataclass
class _Flight:
    """A bucket under way.

    Attributes:
        buffer: the bucket's memory.
        cuts: offsets of the ranks' slices.
        unowned: the first element of every piece of another rank.
        received: the other ranks' terms of this rank's slice, in the order of ranks; none through
            memory, where the works average.
        scratch: the memory of `received`.
        works: what is waited for.
        future: DDP waits for it.
    """

    buffer: Tensor
    cuts: tuple[int, ...]
    unowned: Tensor
    received: list[Tensor]
    scratch: Tensor | None
    works: list[Any]
    future: torch.futures.Future[Tensor]


def _hook(exchange: ReduceScatterExchange, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    return exchange._exchange_bucket(bucket)


def exchange_parts(
    received: dict[int, Tensor], sent: dict[int, Tensor], *, group: dist.ProcessGroup
) -> list[Any]:
    """Start to receive one tensor from, and to send one to, each rank of `group` that is a key.

    Returns works to `wait` for. Medians for 40 MB of gradient on gloo, one machine, with the
    averaging: two ranks 22 ms, four 46 ms; an all-reduce 31 and 76, `dist.reduce` per slice 21 and
    74, gloo's all-to-all 60 and 94.
    """
    device = next((part.device for part in (*received.values(), *sent.values())), None)
    if device is None:
        return []
    if backend_of(device, group) == "gloo":
        works: list[Any] = [
            dist.irecv(part, group=group, group_src=rank) for rank, part in received.items()
        ]
        return works + [
            dist.isend(part, group=group, group_dst=rank) for rank, part in sent.items()
        ]
    operations = [
        dist.P2POp(dist.irecv, part, group=group, group_peer=rank)
        for rank, part in received.items()
    ]
    operations += [
        dist.P2POp(dist.isend, part, group=group, group_peer=rank) for rank, part in sent.items()
    ]
    return dist.batch_isend_irecv(operations)


def average_into(own: Tensor, others: Sequence[Tensor]) -> None:
    """Make `own` (n,) the average of itself and `others` (n,), added up in this order.

    Scaled before it is summed, as DDP does, so that sums of half-precision gradients do not
    overflow.
    """
    scale = 1 / (len(others) + 1)
    own.mul_(scale)
    for other in others:
        own.add_(other, alpha=scale)


# ---- Slices of buckets


@dataclass(frozen=True)
class ParameterSlice:
    """A parameter in a bucket: `numel` elements from `offset` on, cut every `row_numel` at most."""

    offset: int
    numel: int
    row_numel: int


def segment_of(gradient: Tensor, *, offset: int, splittable: bool) -> ParameterSlice:
    """Return the segment of a parameter whose `gradient` lies in its bucket from `offset` on.

    Cuts are allowed between rows where these are contiguous in memory (also channels-last; not in a
    transposed matrix).
    """
    rows, numel = num_rows(gradient), gradient.numel()
    by_rows = splittable and rows > 1 and numel > 0 and gradient.stride(0) * rows == numel
    return ParameterSlice(offset, numel, numel // rows if by_rows else max(1, numel))


def cut_buckets(
    buckets: Sequence[Sequence[ParameterSlice]], *, world_size: int
) -> list[tuple[int, ...]]:
    """Return the `world_size` + 1 offsets of every bucket between which the ranks' slices lie.

    Ranks' sums over all buckets are equal to within a row (of the last bucket); a slice may be
    empty.
    """
    given = [0] * (world_size + 1)  # elements of earlier buckets that belong to the first k ranks
    cuts = []
    for segments in buckets:
        size = segments[-1].offset + segments[-1].numel
        offsets = [0]
        for k in range(1, world_size):
            # what the first k ranks should have of all buckets so far, less what they have
            wanted = (given[-1] + size) * k // world_size - given[k]
            offsets.append(min(size, max(offsets[-1], _nearest_cut(segments, wanted))))
        offsets.append(size)
        cuts.append(tuple(offsets))
        given = [before + offset for before, offset in zip(given, offsets, strict=True)]
    return cuts


def _nearest_cut(segments: Sequence[ParameterSlice], wanted: int) -> int:
    index = bisect_right(segments, wanted, key=lambda segment: segment.offset) - 1
    if index < 0:
        return 0
    segment = segments[index]
    row = min(
        round((wanted - segment.offset) / segment.row_numel), segment.numel // segment.row_numel
    )
    return segment.offset + row * segment.row_numel


def pieces_of_segment(
    segment: ParameterSlice, cuts: Sequence[int], *, rows: int, index: int
) -> list[Piece]:
    """Return the pieces of a parameter with `rows` rows in a bucket with `cuts`, in order.

    None for one without elements.
    """
    pieces = []
    for owner, cut in enumerate(pairwise(cuts)):
        begin, end = max(cut[0], segment.offset), min(cut[1], segment.offset + segment.numel)
        if begin < end:
            whole = end - begin == segment.numel
            start, stop = ((at - segment.offset) // segment.row_numel for at in (begin, end))
            pieces.append(
                Piece(index, 0, rows, owner) if whole else Piece(index, start, stop, owner)
            )
    return pieces


# ---- Norms, clipping and overflow on slices


class ScatteredGradients:
    """The gradients of `optimizers` after a backward pass with `exchange`.

    Also while that still all-reduces. All methods are called on all ranks, on the gradients as the
    last backward pass left them.
    """

    def __init__(self, exchange: ReduceScatterExchange, *, optimizers: Sequence[Optimizer]) -> None:
        self.exchange, self.optimizers = exchange, optimizers

    def own(self) -> list[Tensor]:
        """Return the parameters that alias this rank's rows, each with its gradient.

        Full parameters where the gradient is full.
        """
        return [*self._split(), *self._full()]

    def norm(self, *, norm_type: float = 2.0) -> Tensor:
        """Return the norm of all gradients together, equal on all ranks; 0 without any.

        Without dims. A collective call. As ``torch.nn.utils.get_total_norm`` of the full
        gradients, in another order of summation.
        """
        power = float(norm_type)
        split = partial_norm(self._split(), power, device=self.exchange.device)
        if self.exchange.scattered:
            dist.all_reduce(
                split,
                dist.ReduceOp.MAX if power == inf else dist.ReduceOp.SUM,
                group=self.exchange.group,
            )
        full = partial_norm(self._full(), power, device=self.exchange.device)
        return torch.maximum(split, full) if power == inf else (split + full) ** (1 / power)

    def clip_norm_(
        self, max_norm: float, *, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> Tensor:
        """Scale the gradients to a norm of at most `max_norm`; return the norm before.

        A collective call, as ``torch.nn.utils.clip_grad_norm_``. Raises RuntimeError, on all ranks,
        for a norm that is not finite with `error_if_nonfinite`.
        """
        total = self.norm(norm_type=norm_type)
        if error_if_nonfinite:
            check_finite(total, norm_type=norm_type)
        clip_grads_with_norm_(self.own(), max_norm, total)
        return total

    def clip_value_(self, clip_value: float) -> None:
        """Clamp every gradient to [-`clip_value`, `clip_value`], as ``clip_grad_value_``."""
        torch.nn.utils.clip_grad_value_(self.own(), clip_value)

    def _parameters(self) -> Iterator[Tensor]:
        for optimizer in self.optimizers:
            yield from (p for p in parameters_of(optimizer) if p.grad is not None)

    def _split(self) -> list[Tensor]:
        views = []
        for parameter in self._parameters():
            for piece in self.exchange.own_pieces(parameter) or ():
                view = rows_of(parameter, piece)
                assert parameter.grad is not None
                view.grad = rows_of(parameter.grad, piece)
                views.append(view)
        return views

    def _full(self) -> list[Tensor]:
        return [
            parameter
            for parameter in self._parameters()
            if self.exchange.own_pieces(parameter) is None
        ]


def install_overflow_agreement(scaler: GradScaler, exchange: ReduceScatterExchange) -> None:
    """Make `scaler` unscale this rank's rows only, and skip a step where any rank overflows.

    It then works as with full gradients, for every optimizer.
    """

    def own_rows(optimizer: Optimizer) -> list[Tensor] | None:
        if not exchange.scattered:
            return None
        return ScatteredGradients(exchange, optimizers=[optimizer]).own()

    unscale_local(scaler, own_rows, device=exchange.device, group=exchange.group)

"""Bounded loss: gradients by datagrams, a stated share of which need not arrive.

After DLCP (arXiv 2008.08445) and MLT (NSDI 2024). Every rank owns a part of each bucket:
contributions to it travel with bounded loss, its sum comes back complete, so that all ranks hold
the same bits. What the owner did not get in time stays in the sender's residual:

    pending = gradient + residual;  residual = pending where it was not delivered, else 0

By nodes, ranks with equal positions in their nodes do the same with the sums of their nodes.

    bytes moved on the device               exchanged                                 function
    (3 s + 24) n                            bounded_loss(4 n)                         work
    2 s n + 24 n / l                        node reduce_scatter(s n),
                                            across bounded_loss(4 n / l),
                                            node all_gather(s n)

The transport is `communication.bounded_loss`, which works on arrays in host memory. So residuals
are there too.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore
from typing_extensions import override

from lightning_topt.basics.argument_checks import check_real
from lightning_topt.communication import exchange_method
from lightning_topt.communication.bounded_loss.delivery import Handle, Outcome
from lightning_topt.communication.bounded_loss.exchange import connect_over_store
from lightning_topt.communication.bucket import (
    Bucket,
    BucketExchange,
    BucketLayout,
    BucketResidual,
    ExchangeContext,
    ResidualStore,
    Stages,
    is_finite,
    together,
)
from lightning_topt.communication.collectives import State, Waitable
from lightning_topt.communication.exchange_method import ENCODE_CALLS, BucketGradients, Work
from lightning_topt.communication.node.node_exchange import make_node_exchange, shard_bounds
from lightning_topt.communication.topology import Topology

MOST_LOSS = 0.5
# of a bucket, that the transport keeps: what others contribute, and what is sent
TRANSPORT_COPIES = 2


@dataclass(frozen=True, kw_only=True)
class BoundedLoss(exchange_method.ByNodes, exchange_method.FeedbackMethod):
    """Gradients by datagrams, some of which need not arrive.

    Options, beside those of all methods with error feedback and by nodes:

    - ``tolerance``: the share of each parameter's gradient that may be lost, at least 0 and at most
      0.5;
    - ``error_feedback``: what was lost is added to the next gradient; without, it counts as 0;
    - ``exempt``: parameters of which nothing may be lost;
    - ``bits`` of a value on its way: 32, or 16 (bfloat16). Sums are made in float32 and rounded
      again; what rounding takes away is not added to later gradients.
    """

    name: ClassVar[str] = "bounded_loss"
    process_bytes: ClassVar[int] = exchange_method.COMPILED_BYTES
    in_stream_order: ClassVar[bool] = False  # the host waits for datagrams

    tolerance: float = 0.01
    bits: int = 32

    @override
    def check(self) -> None:
        super().check()
        check_real(self.tolerance, name="tolerance")
        if not 0 <= self.tolerance <= MOST_LOSS:
            raise ValueError(
                f"tolerance is the share that may be lost, at least 0 and at most {MOST_LOSS}; got "
                f"{self.tolerance}"
            )
        if self.bits not in (16, 32):
            raise ValueError(f"bits of a value on its way are 16 or 32; got {self.bits}")

    @property
    @override
    def words(self) -> str:
        nodes = " between nodes" if self.hierarchical else ""
        nodes += ", in 16 bits" if self.bits == 16 else ""
        share = f"{100 * self.tolerance:g} % may be lost"
        return f"by datagrams{nodes}, {share}{self.feedback_words}"

    @override
    def make_exchange(self, context: ExchangeContext) -> LossyBuckets:
        return LossyBuckets(self, context)

    @override
    def work(self, gradients: BucketGradients, topology: Topology) -> Work:
        by_nodes = self.sums_in_nodes(topology)
        local = topology.ranks_per_node if by_nodes else 1
        size, numel = gradients.nbytes, gradients.numel / local
        sent = self.bits / 8 * numel  # bytes
        exchanged = [("across" if by_nodes else "world", "bounded_loss", sent)]
        if by_nodes:
            exchanged = [("node", "reduce_scatter", size), *exchanged, ("node", "all_gather", size)]
        moved = (2 if by_nodes else 3) * size + 24 * numel
        if self.bits < 32:
            moved += 2 * (sent + 4 * numel)  # rounded, and read again
        return Work(
            moved,
            ENCODE_CALLS,
            tuple(exchanged),
            kept_bytes=(4 * numel if self.error_feedback else 0.0) + TRANSPORT_COPIES * sent,
            buffer_bytes=4 * numel if by_nodes else 0.0,
            tolerance=self.tolerance,
        )


class LossyBuckets(BucketExchange):
    """Buckets over the datagrams of one transport. State: "residual" of this rank, or of its node.

    Right after a step the residual still has all that was pending. What was delivered is subtracted
    from it in the bucket's next step. Until then the step can be taken back, by forgetting its
    outcome.
    """

    def __init__(self, method: BoundedLoss, context: ExchangeContext) -> None:
        super().__init__(context)
        self.method, topology = method, self.topology
        self.by_nodes = method.sums_in_nodes(topology)
        self.node = make_node_exchange(context) if self.by_nodes else None
        assert context.store is not None
        name, rank, ranks = "", topology.rank, topology.world_size
        if self.by_nodes:
            name, rank, ranks = f"across/{topology.local_rank}", topology.node, topology.num_nodes
        self.holders = ranks  # of residuals: ranks, or nodes
        self.transport = connect_over_store(
            PrefixStore(f"bounded_loss/{name}", context.store),
            rank=rank,
            world_size=ranks,
            timeout_seconds=context.timeout_seconds,
            bits=method.bits,
        )
        self.store = ResidualStore()
        # by bucket index: its layout, the transport's number of its first part, its parts
        self._parts: dict[int, tuple[BucketLayout, int, list[LossyPart]]] = {}
        self._next_number = self._counted_bytes = 0
        # by bucket index, of the last step
        self._delivered: dict[int, tuple[BucketResidual, Outcome]] = {}

    # ---- one step of a bucket

    def stages(self, bucket: Bucket) -> Stages:
        """Exchange `bucket`: among all ranks in one stage, by nodes in three."""
        dense = self.method.is_dense_step(bucket.step)
        if self.node is None:
            if dense:
                return (yield from self.dense_stages(bucket))
            own, own_finite = bucket.buffer, is_finite(bucket.buffer)
            yield from self._exchange(
                bucket, own, own, start=0, weight=1 / bucket.loss_scale, finite=own_finite
            )
        else:
            # sum this rank's shard in the node
            pending, own_finite = self.node.reduce_scatter(bucket.buffer), is_finite(bucket.buffer)
            yield pending
            local = self.topology.ranks_per_node
            start, stop = shard_bounds(bucket.buffer.numel(), local_size=local)[
                self.topology.local_rank
            ]
            own, shard = bucket.buffer[start:stop], pending.result()
            # exchange the shard between nodes
            if dense:  # a step that loses nothing
                own.copy_(torch.div(shard, self.topology.world_size))
                self.count_across(local * own.nbytes, passes=2)
                yield together(dist.all_reduce(own, group=self.groups.across, async_op=True))
            else:
                weight = 1 / (bucket.loss_scale * local)
                yield from self._exchange(
                    bucket, own, shard, start=start, weight=weight, finite=is_finite(shard)
                )
            # gather all shards in the node
            yield self.node.gather_shards(bucket.buffer)
        bucket.check_finite(bucket.buffer, own=torch.tensor(own_finite))
        return bucket.buffer

    def _exchange(
        self,
        bucket: Bucket,
        own: Tensor,
        gradient: Tensor,
        *,
        start: int,
        weight: float,
        finite: bool,
    ) -> Generator[Waitable]:
        """Set `own` to the mean of what is pending on the holders, times the loss scale.

        Args:
            bucket: whose elements from `start` on are exchanged.
            own: (n,), written.
            gradient: (n,), what is new; pending is ``weight * gradient`` and the residual.
            start: the first element.
            weight: of the gradient.
            finite: whether `gradient` is.
        """
        entry = self.store.open(bucket, start=start, stop=start + own.numel())
        in_place = own.dtype == torch.float32 and own.device.type == "cpu"
        out = own if in_place else torch.empty(own.numel())
        # what is pending, (n,)
        if finite and self.method.error_feedback:
            values = self._accumulate(bucket.index, entry, gradient.cpu(), weight=weight)
        else:
            self._subtract_delivered(bucket.index)
            values = torch.empty(own.numel()).copy_(gradient).mul_(weight)
        if not finite:
            values.fill_(torch.nan)  # whatever is lost of it, all ranks see it
        parts, handles = self._start_datagrams(bucket, values, out, start=start)
        yield together(*handles)
        outcome = _merge_outcomes([handle.wait() for handle in handles], parts)
        if finite and self.method.error_feedback:
            self._delivered[bucket.index] = entry, outcome
        if not in_place:
            own.copy_(out)
        self._count_sent()

    def _accumulate(
        self, index: int, entry: BucketResidual, gradient: Tensor, *, weight: float
    ) -> Tensor:
        # The residual (n,) with the gradient added, in host memory
        entry.residual = (
            torch.zeros(gradient.numel()) if entry.residual is None else entry.residual.cpu()
        )
        delivered = self._delivered.pop(index, None)
        if delivered is None:
            entry.residual.add_(gradient, alpha=weight)
        else:  # little was lost: write the gradient, and add only that
            torch.mul(gradient, weight, out=entry.residual)
            delivered[1].add_to(entry.residual.numpy())
        return entry.residual

    def _start_datagrams(
        self, bucket: Bucket, values: Tensor, out: Tensor, *, start: int
    ) -> tuple[list[LossyPart], list[Handle]]:
        # Start to sum `values` (n,) into `out` (n,), one handle for each part
        # the parts, as the bucket is laid out now, and the transport's number of the first
        split = self._parts.get(bucket.index)
        if split is None or split[0] is not bucket.layout:
            least = self.transport.options.values / max(self.method.tolerance, 1e-9)
            stop = start + values.numel()
            made = split_into_parts(bucket.layout, start=start, stop=stop, least=least)
            split = self._parts[bucket.index] = bucket.layout, self._next_number, made
            self._next_number += len(made)
        _, first, parts = split
        pending, mean = values.numpy(), out.numpy()
        handles = [
            self.transport.start(
                number,
                pending[part.start : part.stop],
                out=mean[part.start : part.stop],
                tolerance=self.method.tolerance,
                exact=part.exact,
                scale=bucket.loss_scale / self.holders,
            )
            for number, part in enumerate(parts, start=first)
        ]
        return parts, handles

    def _count_sent(self) -> None:
        """Count the bytes that left this node.

        That is all where each rank is a node, else the share that ranks of other nodes get.
        """
        topology, sent = self.topology, self.transport.bytes_sent - self._counted_bytes
        self._counted_bytes += sent
        if topology.num_nodes > 1 and self.by_nodes:
            sent *= topology.ranks_per_node
        elif topology.num_nodes > 1:
            others = topology.world_size - topology.ranks_per_node
            sent = sent * topology.ranks_per_node * others // (topology.world_size - 1)
        self.bytes_sent += sent

    # ---- residuals

    def _subtract_delivered(self, index: int) -> None:
        # Subtract what the last step delivered of a bucket from its residual
        delivered = self._delivered.pop(index, None)
        if delivered is not None:
            entry, outcome = delivered
            assert entry.residual is not None
            outcome.keep_only(entry.residual.numpy())

    def put_back(self) -> None:
        """Keep all of the last step in the residuals: its result is thrown away."""
        self._delivered.clear()
        self.store.put_back()

    def residual_norm(self) -> float:
        """Return the L2 norm of all residuals."""
        norms = []
        for index, entry in self.store.buckets.items():
            if entry.residual is not None and index in self._delivered:
                norms.append(torch.from_numpy(self._delivered[index][1].values).norm())
            elif entry.residual is not None:
                norms.append(entry.residual.norm())
        return float(torch.stack(norms).norm()) if norms else 0.0

    def prepare(self, bucket: Bucket) -> bool:
        """Return whether the bucket is laid out as it was."""
        return self.store.fits(bucket)

    def relayout(self) -> None:
        """Move residuals by name to the new buckets; nothing is lost."""
        self.store.replace(self.state_dict())
        self._delivered.clear()

    def state_dict(self) -> State:
        """Return the residual of this rank, or of its node, by name, without what was delivered."""
        outcomes = {id(entry): outcome for entry, outcome in self._delivered.values()}

        def unsharded(entry: BucketResidual, flat: Tensor) -> Tensor:
            residual = flat
            if id(entry) in outcomes:
                residual = torch.zeros_like(flat)
                outcomes[id(entry)].add_to(residual.numpy())
            if self.node is None:
                return residual
            bucket = torch.zeros(sum(entry.layout.numels), device=self.device)
            bucket[entry.start : entry.stop] = residual
            self.node.gather_shards(bucket).wait()
            return bucket.cpu()

        return self.store.collect(unsharded)

    def load_state_dict(self, state: State) -> None:
        """Take over residuals by name."""
        self._delivered.clear()
        self.store.replace(
            {kind: {name: value.cpu() for name, value in of.items()} for kind, of in state.items()}
        )

    # ---- the transport

    def telemetry(self, *, steps: int, reset: bool) -> Mapping[str, float]:
        """Return what happened on the network.

        These are shares of contributions and of datagrams that were lost or sent again, the rate
        now, stalls and rejected datagrams per step.
        """
        found = self.transport.statistics(reset=reset)
        if found is None:  # a single rank
            return {}
        return {
            "lost_share": found.lost_share,
            "path_loss": found.path_loss,
            "resent_share": found.datagrams_resent / max(1, found.datagrams_sent),
            "bytes_per_second": found.bytes_per_second,
            "round_trip_seconds": found.round_trip_seconds,
            "stalled_seconds": found.stalled_seconds / steps,
            "rejected_datagrams": found.rejected / steps,
        }

    def close(self) -> None:
        """End the transport and release shared memory."""
        self.transport.close()
        if self.node is not None:
            self.node.close()


# ---- parts: the share that may be lost holds for each parameter


class LossyPart(NamedTuple):
    """Elements of a shard that are exchanged as one bucket of the transport.

    They are `start` to `stop`; nothing of the ranges `exact`, counted from `start`, is lost.
    """

    start: int
    stop: int
    exact: list[tuple[int, int]]


def split_into_parts(
    layout: BucketLayout, *, start: int, stop: int, least: float
) -> list[LossyPart]:
    """Return the parts of elements `start` to `stop` of a bucket, counted from `start`.

    There is one for each parameter of at least `least` elements that is not exempt, with what lies
    between it and the next, which is not lost. So what is lost of a parameter never exceeds the
    tolerance; the smaller ones cannot lose a datagram without exceeding it.
    """
    parts: list[LossyPart] = []
    has_lossy = True  # so that the first range begins a part
    for part, exempt in zip(layout.slices, layout.exempt, strict=True):
        low, high = max(part.start, start) - start, min(part.stop, stop) - start
        if low >= high:
            continue
        lossy = not exempt and part.stop - part.start >= least
        if not parts or (lossy and has_lossy):
            parts.append(LossyPart(low, high, []))
            has_lossy = False
        last = parts[-1]
        parts[-1] = last._replace(stop=high)
        has_lossy = has_lossy or lossy
        if not lossy:
            last.exact.append((low - last.start, high - last.start))
    return parts


def _merge_outcomes(outcomes: Sequence[Outcome], parts: Sequence[LossyPart]) -> Outcome:
    ranges = [outcome.ranges + part.start for outcome, part in zip(outcomes, parts, strict=True)]
    values = [outcome.values for outcome in outcomes]
    return Outcome(
        np.concatenate(ranges), np.concatenate(values), sum(outcome.numel for outcome in outcomes)
    )

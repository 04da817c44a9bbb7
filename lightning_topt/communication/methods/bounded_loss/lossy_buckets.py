"""Buckets by datagrams, a stated share of which may be lost; what was lost is held back for the
next step.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore

from lightning_topt.communication.bounded_loss import Handle, Outcome
from lightning_topt.communication.bounded_loss.over_store import connect_over_store
from lightning_topt.communication.bucket import (
    Bucket,
    BucketExchange,
    BucketLayout,
    ExchangeContext,
    NonFiniteGradient,
    Stages,
    is_finite,
    together,
)
from lightning_topt.communication.collectives import Waitable, ring_all_gather
from lightning_topt.communication.methods.bounded_loss.bounded_loss_options import (
    BoundedLossOptions,
)
from lightning_topt.communication.methods.bounded_loss.lossy_parts import (
    LossyPart,
    joined,
    lossy_parts,
)
from lightning_topt.communication.node.node_exchange import make_node_exchange, shard_bounds
from lightning_topt.communication.residual import BucketResidual, FeedbackRule, ResidualStore, State
from lightning_topt.communication.selection import Selection, top_k
from lightning_topt.communication.wire import MessageFormat

FIRST_PRIORITY = 3  # of datagrams; 0 is the last

Steps = Generator[Waitable, None, None]


class LossyBuckets(BucketExchange):
    """Buckets over the datagrams of one transport. State: "residual" of this rank, or of its node.

    What a step delivered of a bucket is subtracted in the next one: until then it can be put back
    by forgetting the outcome.
    """

    def __init__(self, method: BoundedLossOptions, context: ExchangeContext) -> None:
        super().__init__(context)
        self.method, topology = method, self.topology
        self.by_nodes = method.sums_in_nodes(topology)
        self.node = make_node_exchange(context) if self.by_nodes else None
        assert context.store is not None
        name, rank, ranks = "", topology.rank, topology.world_size
        if self.by_nodes:
            name, rank, ranks = f"across/{topology.local_rank}", topology.node, topology.num_nodes
        self.holders = ranks
        self.transport = connect_over_store(
            PrefixStore(f"bounded_loss/{name}", context.store),
            rank=rank,
            world_size=ranks,
            timeout_seconds=context.timeout_seconds,
            bits=method.bits,
        )
        self.store = ResidualStore(FeedbackRule(method.error_feedback))
        self._parts: dict[
            int, tuple[BucketLayout, int, list[LossyPart]]
        ] = {}  # by bucket index, with the first's number
        self._last_index = self._made = self._counted = 0
        # of the last step, by bucket index
        self._delivered: dict[int, tuple[BucketResidual, Outcome]] = {}

    def stages(self, bucket: Bucket) -> Stages:
        """Exchange `bucket`: among all ranks in one stage, by nodes in three."""
        dense = self.method.is_dense_step(bucket.step)
        if self.node is None:
            if dense:
                return (yield from self.dense_stages(bucket))
            own, own_finite = bucket.buffer, is_finite(bucket.buffer)
            yield from self._send(
                bucket, own, own, start=0, weight=1 / bucket.loss_scale, finite=own_finite
            )
        else:
            pending, own_finite = self.node.reduce_scatter(bucket.buffer), is_finite(bucket.buffer)
            yield pending
            local = self.topology.ranks_per_node
            start, stop = shard_bounds(bucket.buffer.numel(), local_size=local)[
                self.topology.local_rank
            ]
            own, shard = bucket.buffer[start:stop], pending.result()
            if dense:
                yield self._start_mean(own, shard)
            else:
                weight = 1 / (bucket.loss_scale * local)
                yield from self._send(
                    bucket, own, shard, start=start, weight=weight, finite=is_finite(shard)
                )
            yield self.node.gather_shards(bucket.buffer)
        if not is_finite(bucket.buffer):
            raise NonFiniteGradient(own=not own_finite)
        return bucket.buffer

    def _start_mean(self, own: Tensor, shard: Tensor) -> dist.Work:
        """Everything, between nodes, in a step that loses nothing."""
        own.copy_(torch.div(shard, self.topology.world_size))
        self.count_across(self.topology.ranks_per_node * own.nbytes, passes=2)
        work: dist.Work | None = dist.all_reduce(own, group=self.groups.across, async_op=True)
        assert work is not None
        return work

    def _send(
        self,
        bucket: Bucket,
        own: Tensor,
        gradient: Tensor,
        *,
        start: int,
        weight: float,
        finite: bool,
    ) -> Steps:
        """Set `own` (n,) to the mean over holders of ``weight * gradient`` and what they hold back,
        times the loss scale.
        """
        entry = self.store.open(bucket, start=start, stop=start + own.numel())
        in_place = own.dtype == torch.float32 and own.device.type == "cpu"
        out = own if in_place else torch.empty(own.numel())
        form = self._protected(bucket, start=start, stop=start + own.numel())
        chosen, values = None, out
        if not finite:
            self._settle(bucket.index)
            out.fill_(torch.nan)  # whatever is lost of it, all ranks see it
        elif self.method.error_feedback:
            chosen, values = self._pending(
                bucket.index, entry, gradient.cpu(), form.k, weight=weight
            )
        else:
            out.copy_(gradient).mul_(weight)
            chosen = top_k(out, form.k) if form.k else None
            if chosen is not None:
                out[chosen.indices] = 0
        rows, gathered = self._gather(form, chosen)
        parts, handles = self._start(bucket, values, out, start=start)
        yield together(gathered, *handles)
        outcome = joined([handle.wait() for handle in handles], parts)
        if finite and self.method.error_feedback:
            self._delivered[bucket.index] = entry, outcome
        for row in rows.cpu():
            _, sent, indices = form.unpack(row)
            out.index_add_(0, indices, sent.mul_(bucket.loss_scale / self.holders))
        if not in_place:
            own.copy_(out)
        self._count()

    def _protected(self, bucket: Bucket, *, start: int, stop: int) -> MessageFormat:
        """The message about elements `start` to `stop` that travels beside the datagrams; of no
        entries where there is none.
        """
        share = self.method.protected * bucket.layout.compressible(start, stop)
        return MessageFormat(stop - start, max(1, round(share)) if share else 0)

    def _pending(
        self, index: int, entry: BucketResidual, gradient: Tensor, k: int, *, weight: float
    ) -> tuple[Selection | None, Tensor]:
        """Add the gradient to what is held back, in host memory; the `k` largest are taken out."""
        entry.residual = (
            torch.zeros(gradient.numel()) if entry.residual is None else entry.residual.cpu()
        )
        if k:
            self._settle(index)
            return entry.select(gradient, k, scale=weight), entry.residual
        delivered = self._delivered.pop(index, None)
        if delivered is None:
            entry.residual.add_(gradient, alpha=weight)
        else:  # little is held back: the rest is only written
            torch.mul(gradient, weight, out=entry.residual)
            delivered[1].add_to(entry.residual.numpy())
        return None, entry.residual

    def _gather(
        self, form: MessageFormat, chosen: Selection | None
    ) -> tuple[Tensor, Waitable | None]:
        """Start to gather the messages of all holders; without entries there are none."""
        if not form.k:
            return torch.empty(0, 0, dtype=torch.uint8), None
        message = torch.empty(form.nbytes, dtype=torch.uint8)
        if chosen is None:
            form.pack_nonfinite(out=message)
        else:
            form.pack(chosen.values, chosen.indices, out=message)
        group = self.groups.across if self.by_nodes else self.groups.world[0]
        rows = torch.empty((self.holders, form.nbytes), dtype=torch.uint8, device=self.device)
        if self.by_nodes:
            self.count_across(self.topology.ranks_per_node * rows.nbytes, passes=1)
        else:
            self.count_ring(rows.nbytes, passes=1)
        return rows, ring_all_gather(rows, message.to(self.device), group=group)

    def _start(
        self, bucket: Bucket, values: Tensor, out: Tensor, *, start: int
    ) -> tuple[list[LossyPart], list[Handle]]:
        self._last_index = bucket.index if bucket.is_last else max(self._last_index, bucket.index)
        # Buckets come in the order of the backward pass; the next forward pass needs the last one
        # first.
        priority = round(FIRST_PRIORITY * bucket.index / max(1, self._last_index))
        first, parts = self._numbered(bucket, start=start, stop=start + values.numel())
        given, taken = values.numpy(), None if out is values else out.numpy()
        handles = [
            self.transport.start(
                number,
                given[part.start : part.stop],
                out=None if taken is None else taken[part.start : part.stop],
                tolerance=self.method.tolerance,
                exact=part.exact,
                scale=bucket.loss_scale / self.holders,
                rescale=self.method.rescale,
                priority=priority,
            )
            for number, part in enumerate(parts, start=first)
        ]
        return parts, handles

    def _numbered(self, bucket: Bucket, *, start: int, stop: int) -> tuple[int, list[LossyPart]]:
        """All parts of elements `start` to `stop` as the bucket is laid out now, and the
        transport's number of the first.
        """
        known = self._parts.get(bucket.index)
        if known is None or known[0] is not bucket.layout:
            least = self.transport.options.values / max(self.method.tolerance, 1e-9)
            known = (
                bucket.layout,
                self._made,
                lossy_parts(bucket.layout, start=start, stop=stop, least=least),
            )
            self._parts[bucket.index] = known
            self._made += len(known[2])
        return known[1:]

    def _count(self) -> None:
        """Count what left this node: all of it where each rank is one, else what the ranks of other
        nodes get.
        """
        topology, sent = self.topology, self.transport.bytes_sent - self._counted
        self._counted += sent
        if topology.num_nodes > 1 and self.by_nodes:
            sent *= topology.ranks_per_node
        elif topology.num_nodes > 1:
            others = topology.world_size - topology.ranks_per_node
            sent = sent * topology.ranks_per_node * others // (topology.world_size - 1)
        self.bytes_sent += sent

    # ---- what is held back -----------------------------------------------------------------------

    def _settle(self, index: int) -> None:
        """Subtract what the last step delivered of a bucket."""
        delivered = self._delivered.pop(index, None)
        if delivered is not None:
            entry, outcome = delivered
            assert entry.residual is not None
            outcome.keep_only(entry.residual.numpy())

    def put_back(self) -> None:
        """Hold back what the last step delivered: it is thrown away."""
        self._delivered.clear()
        self.store.put_back()

    def residual_norm(self) -> float:
        """Return the L2 norm of what is held back."""
        entries = self.store.buckets.items()
        norms = [
            self._held(entry, index).norm()
            for index, entry in entries
            if entry.residual is not None
        ]
        return float(torch.stack(norms).norm()) if norms else 0.0

    def _held(self, entry: BucketResidual, index: int) -> Tensor:
        """All values that are not zero."""
        assert entry.residual is not None
        return (
            torch.from_numpy(self._delivered[index][1].values)
            if index in self._delivered
            else entry.residual
        )

    def prepare(self, bucket: Bucket) -> bool:
        """Return whether the bucket is laid out as it was."""
        return self.store.fits(bucket)

    def relayout(self) -> None:
        """Residuals go by name to the new buckets, nothing is lost."""
        self.store.replace(self.state_dict())
        self._delivered.clear()

    def state_dict(self) -> State:
        """Return the residual of this rank, or of its node, by name; what was delivered is not in
        it.
        """
        outcomes = {id(entry): outcome for entry, outcome in self._delivered.values()}

        def whole(entry: BucketResidual, flat: Tensor) -> Tensor:
            held = flat
            if id(entry) in outcomes:
                held = torch.zeros_like(flat)
                outcomes[id(entry)].add_to(held.numpy())
            if self.node is None:
                return held
            bucket = torch.zeros(sum(entry.layout.numels))
            bucket[entry.start : entry.stop] = held
            self.node.gather_shards(bucket).wait()
            return bucket

        return self.store.collect(whole)

    def load_state_dict(self, state: State) -> None:
        """Take over residuals by name."""
        self._delivered.clear()
        self.store.replace(
            {kind: {name: value.cpu() for name, value in of.items()} for kind, of in state.items()}
        )

    def telemetry(self, *, steps: int, reset: bool) -> Mapping[str, float]:
        """Return what happened on the network: shares of contributions and of datagrams that were
        lost or sent again, the rate now, stalls and rejected datagrams per step.
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

"""TopK: the largest entries of the gradient travel, the rest stays in the residual.

Flat: every rank sends its largest entries to every other, by one all-gather (`SparseExchange`). By
nodes (`HierarchicalExchange`), HiTopKComm, arXiv 2010.10458, section 3.2:

    1  dense reduce-scatter in the node: each local rank has the sum of its shard
    2  error feedback and selection on the shard
    3  all-gather among the ranks with the same local rank, all local ranks at once
    4  sum in node order
    5  all-gather in the node: of the received messages where they are smaller than the shards,
       else of the summed shards

What it takes, with k entries and b bytes of a message (`wire.SparseMessage`):

                   bytes moved on the device                collectives                 function
    flat           (s + 8) n + pack(k) + s n + decode(W k)  all_gather(W b)             _flat
    by nodes       12 n / l + pack(k) + s n + decode(W k)   node reduce_scatter(s n),   _by_nodes
                                                            across all_gather(m b),
                                                            node all_gather(W b)
      W b > s n    the same, + s n, decode(m k)             the last is all_gather(s n)
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Generator
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import Self, override

from lightning_topt.basics.argument_checks import check_real
from lightning_topt.communication import selection, wire
from lightning_topt.communication.bucket import (
    Bucket,
    BucketExchange,
    BucketResidual,
    ExchangeContext,
    ExemptMean,
    ResidualStore,
    Stages,
    finite_flag,
    is_on_host,
    together,
)
from lightning_topt.communication.collectives import State, Waitable, ring_all_gather
from lightning_topt.communication.exchange_method import (
    COMPILED_BYTES,
    DECODE_BYTES_PER_ENTRY,
    DECODE_CALLS,
    ENCODE_CALLS,
    EXEMPT_PASSES,
    PACK_BYTES_PER_ENTRY,
    BucketGradients,
    ByNodes,
    FeedbackMethod,
    Work,
)
from lightning_topt.communication.node.node_exchange import make_node_exchange, shard_bounds
from lightning_topt.communication.selection import NonFiniteError, start_feedback, start_top_k
from lightning_topt.communication.topology import Topology
from lightning_topt.communication.wire import ScatterMean, SparseMessage, check_bits

Steps = Generator[Waitable]

# of all who send; less ends worse under AdamW (benchmarks/results/adam_compression.md)
DENSITY_TOGETHER = 0.16
# of a training; those of 6000 end 2 % worse with so much (the same benchmark)
STEPS_UNDER_ADAM = 12000


@dataclass(frozen=True, kw_only=True)
class TopK(ByNodes, FeedbackMethod):
    """The largest entries of the gradient; what is left over is sent later.

    Options beside those of all methods with error feedback and by nodes:

    - ``density``: the fraction of a bucket's entries that each node (by itself, each rank) sends,
      in (0, 1]; None: 0.16 divided by their number, as many as training with AdamW needs;
    - ``bits``: of the values sent, by levels: 2, 4 or 8 (`wire`); None: float32. What rounding
      takes away stays in the residual.
    """

    name: ClassVar[str] = "topk"
    process_bytes: ClassVar[int] = COMPILED_BYTES
    density: float | None = 0.01
    bits: int | None = None

    @override
    def check(self) -> None:
        super().check()
        if self.density is not None and not 0 < check_real(self.density, name="density") <= 1:
            raise ValueError(
                f"density is the fraction sent, above 0 and at most 1; got {self.density}"
            )
        if self.bits is not None:
            check_bits(self.bits)

    @override
    def density_at(self, step: int) -> float:
        """Return the density of step `step` (from 0): 1 if dense, else `density`.

        Raises ValueError where the density depends on who sends (`on`).
        """
        if self.density is None:
            raise ValueError("this density depends on the number of ranks: ask TopK.on(topology)")
        return 1.0 if step < self.dense_steps else self.density

    @override
    def on(self, topology: Topology) -> Self:
        if self.density is not None:
            return self
        senders = topology.num_nodes if self.sums_in_nodes(topology) else topology.world_size
        return replace(self, density=DENSITY_TOGETHER / senders)

    @property
    @override
    def steps_under_adam(self) -> int | None:
        # With fewer, rare and large entries dominate its mean squares, and its steps get small.
        return (
            STEPS_UNDER_ADAM if self.density is None or self.density >= DENSITY_TOGETHER else None
        )

    @property
    @override
    def needs_under_adam(self) -> str:
        return (
            "a learning rate that rises for 100 steps or more"
            if self.steps_under_adam is not None
            else ""
        )

    @property
    @override
    def words(self) -> str:
        share = (
            f"{100 * DENSITY_TOGETHER:g} % / senders"
            if self.density is None
            else f"{100 * self.density:g} %"
        )
        values = "" if self.bits is None else f" in {self.bits} bits"
        nodes = " between nodes" if self.hierarchical else ""
        return f"top-k {share}{values}{nodes}{self.feedback_words}"

    @override
    def make_exchange(self, context: ExchangeContext) -> FeedbackExchange:
        method = self.on(context.topology)
        if self.sums_in_nodes(context.topology):
            return HierarchicalExchange(method, context)
        return SparseExchange(method, context)

    @override
    def work(self, gradients: BucketGradients, topology: Topology) -> Work:
        if self.sums_in_nodes(topology):
            return _by_nodes(gradients, self.on(topology), topology)
        return _flat(gradients, self.on(topology), topology)


# ---- the exchanges


class FeedbackExchange(BucketExchange):
    """Sends the largest entries and keeps the rest; what both forms share."""

    def __init__(self, options: TopK, context: ExchangeContext) -> None:
        super().__init__(context)
        self.options, self.store = options, ResidualStore()
        assert options.density is not None
        self.density = options.density

    def message(self, bucket: Bucket, *, start: int, stop: int) -> SparseMessage:
        """Return the form of the message for elements `start` to `stop`."""
        return SparseMessage.of_share(
            stop - start,
            compressible=bucket.layout.compressible(start, stop),
            density=self.density,
            bits=self.options.bits,
        )

    def select_into(
        self,
        message: Tensor,
        gradient: Tensor,
        *,
        entry: BucketResidual,
        form: SparseMessage,
        scale: float,
    ) -> Steps:
        """Add ``scale * gradient`` to the residual, and move the largest entries to `message`.

        `gradient` is (n,), `message` (bytes,). Where the sum is not finite, the message says so. On
        CUDA this yields the counts that the host needs, as other buckets have work meanwhile.
        """
        if not form.k:
            if not is_on_host(gradient):  # as many stages as on ranks that have something to select
                yield together()
            form.pack(gradient[:0], gradient[:0].long(), out=message)
            return
        try:
            if self.options.error_feedback:
                residual = entry.allocated(gradient)
                started = start_feedback(gradient, residual, form.k, scale=scale)
            else:
                started = start_top_k(gradient, form.k)
            if not is_on_host(gradient):
                yield started.counts or together()
            values, indices = started.result()
            if self.options.error_feedback:
                entry.sent = values, indices
            else:
                values = values.float() * scale
        except NonFiniteError:
            form.pack_nonfinite(out=message)
            return
        form.pack(values, indices, out=message)
        # what rounding takes away stays in the residual
        if self.options.bits is not None and self.options.error_feedback:
            arrived = form.values(message)
            residual.index_add_(0, indices, values - arrived)
            entry.sent = arrived, indices

    def warm_up(self) -> None:
        """Compile the selection and the message."""
        if self.device.type == "cpu":
            selection.warm_up()
            wire.warm_up(self.options.bits)

    def put_back(self) -> None:
        """Put back into the residual what the last step sent."""
        self.store.put_back()

    def residual_norm(self) -> float:
        """Return the L2 norm of this rank's residuals."""
        return self.store.norm()

    def prepare(self, bucket: Bucket) -> bool:
        """Return whether the bucket is laid out as it was."""
        return self.store.fits(bucket)

    def relayout(self) -> None:
        """Let residuals go by name to the new buckets; nothing is lost."""
        self.store.replace(self.state_dict())

    def state_dict(self) -> State:
        """Return the residual of this rank, or of its node, by name."""
        return self.store.collect(self.whole)

    @abstractmethod
    def whole(self, entry: BucketResidual, flat: Tensor) -> Tensor:
        """Return a bucket's residual (n,) from this rank's elements of it."""

    def load_state_dict(self, state: State) -> None:
        """Take over residuals by name."""
        self.store.replace(state)


class SparseExchange(FeedbackExchange):
    """Top-k with error feedback on each rank, by one all-gather of packed messages."""

    def stages(self, bucket: Bucket) -> Stages:
        """Exchange `bucket` by one all-gather, or by one all-reduce of everything pending.

        Beside it, exempt parameters have an all-reduce. Messages are decoded in rank order.
        """
        # exempt parameters go their own way; the rest whole, or its largest entries
        entry = self.store.open(bucket, start=0, stop=bucket.buffer.numel())
        exempt = self.start_exempt(bucket)
        if bucket.step < self.options.dense_steps:
            return (yield from self._send_all(bucket, entry, exempt))
        form = self.message(bucket, start=0, stop=bucket.buffer.numel())
        message = torch.empty(form.nbytes, dtype=torch.uint8, device=bucket.buffer.device)
        yield from self.select_into(
            message, bucket.buffer, entry=entry, form=form, scale=1 / bucket.loss_scale
        )
        rows = torch.empty((self.world_size, form.nbytes), dtype=torch.uint8, device=message.device)
        self.count_ring(rows.nbytes, passes=1)
        work = ring_all_gather(rows, message, group=self.groups.world[0])
        # zeroed while messages are under way
        total = ScatterMean(bucket.buffer, scale=bucket.loss_scale / self.world_size)
        yield together(work, exempt)
        # decode in rank order; headers say who is not finite, whose values are NaN
        for row in rows:
            total.add(row, form=form)
        total.write()
        bucket.checks.add(bucket, (rows[:, 0] == 0).all(), message[0] == 0)
        if exempt is not None:
            exempt.finish()
        return bucket.buffer

    def _send_all(self, bucket: Bucket, entry: BucketResidual, exempt: ExemptMean | None) -> Stages:
        # Send everything pending by one all-reduce
        own_finite = finite_flag(bucket.buffer)
        # What is not finite stays out of a residual; all ranks see it in the sum.
        if entry.residual is None or own_finite:
            bucket.buffer.copy_(entry.everything(bucket.buffer, scale=1 / bucket.loss_scale))
            bucket.buffer.mul_(bucket.loss_scale / self.world_size)
        self.count_ring(bucket.buffer.nbytes, passes=2)
        yield together(
            dist.all_reduce(bucket.buffer, group=self.groups.world[0], async_op=True), exempt
        )
        bucket.check_finite(bucket.buffer, own=own_finite)
        if exempt is not None:
            exempt.finish()
        return bucket.buffer

    def whole(self, entry: BucketResidual, flat: Tensor) -> Tensor:
        """Return it as it is: this rank has it all."""
        return flat


class HierarchicalExchange(FeedbackExchange):
    """Top-k with error feedback on each rank's shard of its node's mean gradient."""

    def __init__(self, options: TopK, context: ExchangeContext) -> None:
        super().__init__(options, context)
        self.node = make_node_exchange(context)

    def stages(self, bucket: Bucket) -> Stages:
        """Exchange `bucket` in three stages: in the node, between nodes, in the node."""
        # stage 0: the node's sum of this rank's shard
        topology = self.topology
        start, stop = self.bounds(bucket)[topology.local_rank]
        entry = self.store.open(bucket, start=start, stop=stop)
        exempt = self.start_exempt(bucket)
        pending = self.node.reduce_scatter(bucket.buffer)
        yield together(pending, exempt)
        shard, scale = pending.result(), 1 / (bucket.loss_scale * topology.ranks_per_node)
        if bucket.step < self.options.dense_steps:
            return (yield from self._send_all(bucket, entry, exempt, shard, scale))
        # stage 1: select from the shard, gather between nodes
        forms = self.forms(bucket)
        # Equal sizes for all local ranks, although their shards may differ by an element.
        nbytes = max(form.nbytes for form in forms)
        message = torch.zeros(nbytes, dtype=torch.uint8, device=shard.device)
        form = forms[topology.local_rank]
        yield from self.select_into(message, shard, entry=entry, form=form, scale=scale)
        rows = torch.empty((topology.num_nodes, nbytes), dtype=torch.uint8, device=shard.device)
        self.count_across(topology.ranks_per_node * rows.nbytes, passes=1)
        yield ring_all_gather(rows, message, group=self.groups.across)
        # stage 2: share with the node
        if shares_sums(nbytes, bucket_bytes=bucket.buffer.nbytes, topology=topology):
            yield from self._share_sums(bucket, entry, rows, form)
        else:
            yield from self._share_messages(bucket, rows, forms)
        if exempt is not None:
            exempt.finish()
        return bucket.buffer

    def _share_messages(self, bucket: Bucket, rows: Tensor, forms: list[SparseMessage]) -> Steps:
        """Do step 5, sparse: decode the messages (nodes, bytes) of all local ranks.

        Every rank does so in node order.
        """
        gathered = self.node.all_gather(rows.view(-1))
        yield gathered
        received = gathered.result().view(len(forms), *rows.shape)  # (local ranks, nodes, bytes)
        finite = own_finite = (received[:, :, 0] == 0).all()
        # whose gradient it is: on a CPU the pass over it is for those that are not finite
        if not is_on_host(bucket.buffer) or not finite:
            own_finite = finite_flag(bucket.buffer)
        total = ScatterMean(bucket.buffer, scale=bucket.loss_scale / self.topology.num_nodes)
        for messages, form, (start, _) in zip(received, forms, self.bounds(bucket), strict=True):
            for message in messages:
                total.add(message, form=form, start=start)
        total.write()
        bucket.checks.add(bucket, finite, own_finite)

    def _share_sums(
        self, bucket: Bucket, entry: BucketResidual, rows: Tensor, form: SparseMessage
    ) -> Steps:
        """Do step 5, dense: decode the messages (nodes, bytes) of the own shard, and share the sum.

        It has NaN where one of them has.
        """
        own_finite = finite_flag(bucket.buffer)
        own = bucket.buffer[entry.start : entry.stop]
        total = ScatterMean(own, scale=bucket.loss_scale / self.topology.num_nodes)
        for message in rows:
            total.add(message, form=form)
        total.write()
        yield self.node.gather_shards(bucket.buffer)
        bucket.check_finite(bucket.buffer, own=own_finite)

    def _send_all(
        self,
        bucket: Bucket,
        entry: BucketResidual,
        exempt: ExemptMean | None,
        shard: Tensor,
        scale: float,
    ) -> Stages:
        # Send everything pending of the shard by one all-reduce between nodes
        own_finite = finite_flag(bucket.buffer)
        own = bucket.buffer[entry.start : entry.stop]
        own.copy_(shard)
        # What is not finite stays out of a residual; all ranks see it in the sum.
        if entry.residual is None or finite_flag(shard):
            own.copy_(entry.everything(shard, scale=scale))
            own.mul_(bucket.loss_scale / self.topology.num_nodes)
        self.count_across(bucket.buffer.nbytes, passes=2)
        yield together(dist.all_reduce(own, group=self.groups.across, async_op=True))
        yield self.node.gather_shards(bucket.buffer)
        bucket.check_finite(bucket.buffer, own=own_finite)
        if exempt is not None:
            exempt.finish()
        return bucket.buffer

    def bounds(self, bucket: Bucket) -> list[tuple[int, int]]:
        """Return the shards of the bucket."""
        return shard_bounds(bucket.buffer.numel(), local_size=self.topology.ranks_per_node)

    def forms(self, bucket: Bucket) -> list[SparseMessage]:
        """Return the message of every local rank."""
        return [self.message(bucket, start=start, stop=stop) for start, stop in self.bounds(bucket)]

    def whole(self, entry: BucketResidual, flat: Tensor) -> Tensor:
        """Gather the full residual from the ranks of the node; nothing else is in flight."""
        numel = sum(entry.layout.numels)
        whole = torch.zeros(numel, device=flat.device)
        whole[entry.start : entry.stop] = flat
        self.node.gather_shards(whole).wait()
        return whole

    def close(self) -> None:
        """Release shared memory."""
        self.node.close()


def shares_sums(message_bytes: int, *, bucket_bytes: int, topology: Topology) -> bool:
    """Return whether step 5 gathers the summed shards: messages of all ranks are larger."""
    return topology.world_size * message_bytes > bucket_bytes


# ---- the work of a step


def _flat(gradients: BucketGradients, options: TopK, topology: Topology) -> Work:
    size, numel, ranks = gradients.nbytes, gradients.numel, topology.world_size
    exempt = gradients.exempt_bytes
    # a message is packed, those of all ranks are decoded
    form = _message(numel, gradients.compressible_numel, options)
    entries = PACK_BYTES_PER_ENTRY * form.k + DECODE_BYTES_PER_ENTRY * ranks * form.k
    return Work(
        _select_bytes(size, numel, options) + size + entries + EXEMPT_PASSES * exempt,
        ENCODE_CALLS + DECODE_CALLS * ranks,
        (("world", "all_gather", ranks * form.nbytes),),
        kept_bytes=_feedback_bytes(numel, form.k, options),
        buffer_bytes=(1 + ranks) * form.nbytes + exempt,
        exempt_bytes=exempt,
    )


def _by_nodes(gradients: BucketGradients, options: TopK, topology: Topology) -> Work:
    size, exempt = gradients.nbytes, gradients.exempt_bytes
    nodes, local = topology.num_nodes, topology.ranks_per_node
    # of this rank's shard; what is shared in the node is messages, or sums
    numel = gradients.numel / local
    form = _message(numel, gradients.compressible_numel / local, options)
    across, everything = nodes * form.nbytes, topology.world_size * form.nbytes
    whole = shares_sums(form.nbytes, bucket_bytes=size, topology=topology)
    decoded = nodes if whole else topology.world_size
    entries = PACK_BYTES_PER_ENTRY * form.k + DECODE_BYTES_PER_ENTRY * decoded * form.k
    return Work(
        _select_bytes(4 * numel, numel, options)
        + (1 + whole) * size
        + entries
        + EXEMPT_PASSES * exempt,
        ENCODE_CALLS + DECODE_CALLS * decoded,
        (
            ("node", "reduce_scatter", size),
            ("across", "all_gather", across),
            ("node", "all_gather", size if whole else everything),
        ),
        kept_bytes=_feedback_bytes(numel, form.k, options),
        buffer_bytes=4 * numel + form.nbytes + across + (0 if whole else everything) + exempt,
        exempt_bytes=exempt,
    )


def _message(numel: float, compressible: float, options: TopK) -> SparseMessage:
    # The message about the share `density` of `compressible` elements
    assert options.density is not None
    return SparseMessage.of_share(
        max(1, round(numel)), compressible=compressible, density=options.density, bits=options.bits
    )


def _select_bytes(size: float, numel: float, options: TopK) -> float:
    # The bytes of one pass: the gradient is read, the residual read and written
    return size + 8 * numel if options.error_feedback else size


def _feedback_bytes(numel: float, k: int, options: TopK) -> float:
    """Return the bytes of the residual, and of the entries that were sent last.

    A step that is thrown away puts those back.
    """
    return 4 * numel + 8 * k if options.error_feedback else 0.0

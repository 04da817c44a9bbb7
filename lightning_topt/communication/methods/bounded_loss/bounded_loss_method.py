"""Bounded loss (DLCP, arXiv 2008.08445; MLT, NSDI 2024): gradients by datagrams, a stated share of
which need not arrive.

Every rank owns a part of each bucket: contributions to it travel with bounded loss, its sum comes
back complete, so that all ranks hold the same bits. What the owner did not get in time stays in the
sender's residual:

    pending = gradient + residual;  residual = pending where it was not delivered, else 0

By nodes the same among the ranks with equal position in their nodes, about the sums of these. With
`protected` the largest entries travel beside it by an all-gather, as top-k's do: only small ones
can be lost.

    bytes moved on the device             exchanged                              function
    (3 s + 24) n                          bounded_loss(4 n)                      BoundedLoss.work
    2 s n + 24 n / l                      node reduce_scatter(s n),
                                          across bounded_loss(4 n / l),
                                          node all_gather(s n)
    protected: + pack(k) + decode(W k)    all_gather(W b), by nodes all_gather(m b)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from typing_extensions import override

from lightning_topt.communication.bucket import ExchangeContext
from lightning_topt.communication.exchange_method import (
    COMPILED_BYTES,
    DECODE_BYTES_PER_ENTRY,
    DECODE_CALLS,
    ENCODE_CALLS,
    PACK_BYTES_PER_ENTRY,
    BucketGradients,
    Work,
)
from lightning_topt.communication.methods.bounded_loss.bounded_loss_options import (
    BoundedLossOptions,
)
from lightning_topt.communication.methods.bounded_loss.lossy_buckets import LossyBuckets
from lightning_topt.communication.topology import Topology
from lightning_topt.communication.wire import MessageFormat

# of a bucket, that the transport keeps: what others contribute, and what is sent
TRANSPORT_COPIES = 2


@dataclass(frozen=True, kw_only=True)
class BoundedLoss(BoundedLossOptions):
    """Gradients by datagrams, some of which need not arrive. Its options are those of
    `BoundedLossOptions`.
    """

    name: ClassVar[str] = "bounded_loss"
    process_bytes: ClassVar[int] = COMPILED_BYTES

    @property
    @override
    def words(self) -> str:
        nodes = " between nodes" if self.hierarchical else ""
        nodes += f", top-k {100 * self.protected:g} % beside them" if self.protected else ""
        nodes += ", in 16 bits" if self.bits == 16 else ""
        rest = ", rescaled" if self.rescale else self.feedback_words
        return f"by datagrams{nodes}, {100 * self.tolerance:g} % may be lost{rest}"

    @override
    def make_exchange(self, context: ExchangeContext) -> LossyBuckets:
        return LossyBuckets(self, context)

    @override
    def work(self, gradients: BucketGradients, topology: Topology) -> Work:
        by_nodes = self.sums_in_nodes(topology)
        local, holders = (
            (topology.ranks_per_node, topology.num_nodes) if by_nodes else (1, topology.world_size)
        )
        size, numel = gradients.nbytes, gradients.numel / local
        sent = self.bits / 8 * numel  # bytes
        k = round(self.protected * gradients.compressible_numel / local)
        messages = holders * MessageFormat(max(1, round(numel)), k).nbytes if k else 0
        where = "across" if by_nodes else "world"
        exchanged = [(where, "bounded_loss", sent)]
        if messages:
            exchanged.append((where, "all_gather", messages))
        if by_nodes:
            exchanged = [("node", "reduce_scatter", size), *exchanged, ("node", "all_gather", size)]
        moved = (2 if by_nodes else 3) * size + 24 * numel
        if self.bits < 32:
            moved += 2 * (sent + 4 * numel)  # rounded, and read again
        return Work(
            moved + k * (PACK_BYTES_PER_ENTRY + holders * DECODE_BYTES_PER_ENTRY),
            ENCODE_CALLS + (DECODE_CALLS * holders if k else 0),
            tuple(exchanged),
            kept_bytes=(4 * numel if self.error_feedback else 0.0) + TRANSPORT_COPIES * sent,
            buffer_bytes=messages + (4 * numel if by_nodes else 0.0),
            tolerance=self.tolerance,
        )

"""Top-k with error feedback: what its options make, and what that takes.

k entries and b bytes of a message (`wire.MessageFormat`, in few bits `LevelMessage`):

                  bytes moved on the device                  collectives, in turn      function
    flat          (s + 8) n + pack(k) + s n + decode(W k)    all_gather(W b)           _flat
    by nodes      12 n / l + pack(k) + s n + decode(W k)     node reduce_scatter(s n)  _by_nodes
                                                             across all_gather(m b)
                                                             node all_gather(W b)
      W b > s n   the same, + s n, decode(m k)               the last is all_gather(s n)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from typing_extensions import override

from lightning_topt.communication.exchange_context import ExchangeContext
from lightning_topt.communication.exchange_method import COMPILED_BYTES
from lightning_topt.communication.exchange_work import (
    DECODE_BYTES_PER_ENTRY,
    DECODE_CALLS,
    ENCODE_CALLS,
    EXEMPT_PASSES,
    PACK_BYTES_PER_ENTRY,
    BucketGradients,
    Work,
)
from lightning_topt.communication.level_message import message_of_share
from lightning_topt.communication.methods.top_k.feedback import FeedbackExchange, Form
from lightning_topt.communication.methods.top_k.hierarchical import (
    HierarchicalExchange,
    shares_sums,
)
from lightning_topt.communication.methods.top_k.sparse import SparseExchange
from lightning_topt.communication.methods.top_k.top_k_options import DENSITY_TOGETHER, TopKOptions
from lightning_topt.communication.topology import Topology


@dataclass(frozen=True, kw_only=True)
class TopK(TopKOptions):
    """The largest entries of the gradient; what is left over is sent later. Its options are those
    of `TopKOptions`.
    """

    name: ClassVar[str] = "topk"
    process_bytes: ClassVar[int] = COMPILED_BYTES

    @property
    @override
    def words(self) -> str:
        share = (
            f"{100 * DENSITY_TOGETHER:g} % / senders"
            if self.density is None
            else f"{100 * self.density:g} %"
        )
        values = f" in {self.value_dtype}" if self.value_dtype != "float32" else ""
        values = values if self.bits is None else f" in {self.bits} bits"
        nodes = " between nodes" if self.hierarchical else ""
        return f"top-k {share}{values}{nodes}{self.feedback_words}"

    @override
    def make_exchange(self, context: ExchangeContext) -> FeedbackExchange:
        by_nodes, method = self.sums_in_nodes(context.topology), self.on(context.topology)
        return (
            HierarchicalExchange(method, context) if by_nodes else SparseExchange(method, context)
        )

    @override
    def work(self, gradients: BucketGradients, topology: Topology) -> Work:
        if self.sums_in_nodes(topology):
            return _by_nodes(gradients, self.on(topology), topology)
        return _flat(gradients, self.on(topology), topology)


def _message(numel: float, compressible: float, options: TopKOptions) -> Form:
    assert options.density is not None
    return message_of_share(
        max(1, round(numel)),
        compressible=compressible,
        density=options.density,
        value_dtype=getattr(torch, options.value_dtype),
        bits=options.bits,
    )


def _select_bytes(size: float, numel: float, options: TopKOptions) -> float:
    """One pass: the gradient is read, the residual read and written."""
    return size + 8 * numel if options.error_feedback else size


def _feedback_bytes(numel: float, k: int, options: TopKOptions) -> float:
    """The residual, and the entries that were sent last: a step that is thrown away puts them
    back.
    """
    return 4 * numel + 8 * k if options.error_feedback else 0.0


def _flat(gradients: BucketGradients, options: TopKOptions, topology: Topology) -> Work:
    size, numel, ranks, exempt = (
        gradients.nbytes,
        gradients.numel,
        topology.world_size,
        gradients.exempt_bytes,
    )
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


def _by_nodes(gradients: BucketGradients, options: TopKOptions, topology: Topology) -> Work:
    size, nodes, local, exempt = (
        gradients.nbytes,
        topology.num_nodes,
        topology.ranks_per_node,
        gradients.exempt_bytes,
    )
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

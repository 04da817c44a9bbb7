"""A compressed exchange of one block's gradients takes passes over memory, collectives, and bytes held.

n gradient elements, s bytes of one; W ranks = m nodes x l; k entries and b bytes of a message (`wire.MessageFormat`); R rank of
PowerSGD's factors P and Q. A block counts as one bucket. The bytes are those that the passes of `communication` move:

    method            bytes moved on the device          collectives, one after another                 function
    dense, by nodes   2 s n + 36 n / l                   node reduce_scatter(s n), across               _dense_by_nodes
                                                         all_reduce(s n / l), node all_gather(s n)
    bf16, fp16        (2 s + 8) n                        all_reduce(2 n)                                _half
    topk              (s + 8) n + pack(k) + s n          all_gather(W b)                                _top_k
                      + decode(W k)
    topk, by nodes    12 n / l + pack(k) + s n           node reduce_scatter(s n), across               _top_k_by_nodes
                      + decode(W k)                      all_gather(m b), node all_gather(W b)
      W b > s n:      the same, + s n, decode(m k)       the last is all_gather(s n)
    powersgd          (3 s + 24) n, and 8 R n flops      all_reduce(P and what is whole),               _low_rank
                      + 4 R^2 per row and column         all_reduce(Q)
    sign              (2 s + 20) n + W (8 n + b)         all_gather(W b)                                _sign

"across" are the ranks with equal position in their nodes, all l groups at once (HiTopKComm, arXiv 2010.10458, section 3.2).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch

from lightning_topt.communication.bucket import BucketLayout
from lightning_topt.communication.compressors.hierarchical import shares_sums
from lightning_topt.communication.compressors.low_rank import plan_factors
from lightning_topt.communication.compressors.sign import SignFormat
from lightning_topt.communication.compressors.wire import MessageFormat, message_of_share
from lightning_topt.communication.options import ExchangeOptions
from lightning_topt.communication.topology import Topology
from lightning_topt.costs.sizes import gradient_bytes
from lightning_topt.graph.op_graph import Parameter

# In bytes of a copy that takes as long, measured on one core at densities of 0.1 to 5 %: passes over the entries (values, and
# indices to bits and back), and the cache lines that scattered additions touch.
_PACK_BYTES_PER_ENTRY, _DECODE_BYTES_PER_ENTRY = 50, 100
_EXEMPT_PASSES = 10  # packed, looked through, divided, written back
_ENCODE_CALLS, _DECODE_CALLS, _MATRIX_CALLS = 16, 10, 8  # kernels for one message, one received message, one matrix


@dataclass(frozen=True)
class Work:
    """`Work` is what exchanging the gradients of one block takes on each rank.

    `moved` bytes are read and written by `calls` kernels that do `flops`. `collectives` run one after another: (where, op,
    bytes of the whole tensor), where is "world", "node" or "across"; the all-reduce of `exempt_bytes` over all ranks runs
    beside the first. `kept_bytes` stay between steps, `buffer_bytes` while the exchange is in flight.
    """

    moved: float
    calls: int
    collectives: tuple[tuple[str, str, float], ...]
    kept_bytes: float = 0.0
    buffer_bytes: float = 0.0
    flops: float = 0.0
    exempt_bytes: float = 0.0


@dataclass(frozen=True)
class BlockGradients:
    """The trainable parameters of one block, and the names of those that are sent whole."""

    parameters: tuple[Parameter, ...]
    exempt: frozenset[str]

    @cached_property
    def numel(self) -> int:
        """Number of elements."""
        return sum(p.numel for p in self.parameters)

    @cached_property
    def nbytes(self) -> int:
        """Bytes of all gradients."""
        return sum(map(gradient_bytes, self.parameters))

    @cached_property
    def compressible(self) -> tuple[Parameter, ...]:
        """Parameters that are not exempt."""
        return tuple(p for p in self.parameters if p.name not in self.exempt)

    @cached_property
    def compressible_numel(self) -> int:
        """Elements of those."""
        return sum(p.numel for p in self.compressible)

    @property
    def exempt_bytes(self) -> int:
        """Bytes of the exempt gradients."""
        return self.nbytes - sum(map(gradient_bytes, self.compressible))

    @property
    def layout(self) -> BucketLayout:
        """All of them as one bucket."""
        numels = tuple(p.numel for p in self.parameters)
        return BucketLayout(
            names=tuple(p.name for p in self.parameters),
            offsets=tuple(accumulate(numels[:-1], initial=0)),
            numels=numels,
            shapes=tuple(torch.Size(p.shape) for p in self.parameters),
            exempt=tuple(p.name in self.exempt for p in self.parameters),
        )


def exchange_work(gradients: BlockGradients, options: ExchangeOptions, *, topology: Topology) -> Work:
    """Return the work of a step in which `options` compress (not of the first, dense ones)."""
    return _WORK[options.method, bool(options.hierarchical)](gradients, options, topology)


def _dense_by_nodes(gradients: BlockGradients, options: ExchangeOptions, topology: Topology) -> Work:
    size, local = gradients.nbytes, topology.ranks_per_node
    shard = 4 * gradients.numel / local
    collectives = (
        ("node", "reduce_scatter", size),
        ("across", "all_reduce", size / local),
        ("node", "all_gather", size),
    )
    return Work(2 * size + 9 * shard, _ENCODE_CALLS, collectives, buffer_bytes=2 * shard)


def _half(gradients: BlockGradients, options: ExchangeOptions, topology: Topology) -> Work:
    """Divided into a 16-bit buffer, looked through for infinities before and after, copied back."""
    half = 2 * gradients.numel
    collectives = (("world", "all_reduce", half),)
    return Work(2 * gradients.nbytes + 4 * half, _ENCODE_CALLS // 2, collectives, buffer_bytes=half)


def _message(numel: float, compressible: float, options: ExchangeOptions) -> MessageFormat:
    return message_of_share(
        max(1, round(numel)),
        compressible=compressible,
        density=options.density,
        value_dtype=getattr(torch, options.value_dtype),
    )


def _select_bytes(size: float, numel: float, options: ExchangeOptions) -> float:
    """One pass: the gradient is read, the residual read and written."""
    return size + 8 * numel if options.error_feedback else size


def _feedback_bytes(numel: float, k: int, options: ExchangeOptions) -> float:
    """The residual, and the entries that were sent last: a step that is thrown away puts them back."""
    return 4 * numel + 8 * k if options.error_feedback else 0.0


def _top_k(gradients: BlockGradients, options: ExchangeOptions, topology: Topology) -> Work:
    size, numel, ranks, exempt = gradients.nbytes, gradients.numel, topology.world_size, gradients.exempt_bytes
    form = _message(numel, gradients.compressible_numel, options)
    entries = _PACK_BYTES_PER_ENTRY * form.k + _DECODE_BYTES_PER_ENTRY * ranks * form.k
    return Work(
        _select_bytes(size, numel, options) + size + entries + _EXEMPT_PASSES * exempt,
        _ENCODE_CALLS + _DECODE_CALLS * ranks,
        (("world", "all_gather", ranks * form.nbytes),),
        kept_bytes=_feedback_bytes(numel, form.k, options),
        buffer_bytes=(1 + ranks) * form.nbytes + exempt,
        exempt_bytes=exempt,
    )


def _top_k_by_nodes(gradients: BlockGradients, options: ExchangeOptions, topology: Topology) -> Work:
    size, nodes, local, exempt = gradients.nbytes, topology.num_nodes, topology.ranks_per_node, gradients.exempt_bytes
    numel = gradients.numel / local
    form = _message(numel, gradients.compressible_numel / local, options)
    across, everything = nodes * form.nbytes, topology.world_size * form.nbytes
    whole = shares_sums(form.nbytes, bucket_bytes=size, topology=topology)
    decoded = nodes if whole else topology.world_size
    entries = _PACK_BYTES_PER_ENTRY * form.k + _DECODE_BYTES_PER_ENTRY * decoded * form.k
    return Work(
        _select_bytes(4 * numel, numel, options) + (1 + whole) * size + entries + _EXEMPT_PASSES * exempt,
        _ENCODE_CALLS + _DECODE_CALLS * decoded,
        (
            ("node", "reduce_scatter", size),
            ("across", "all_gather", across),
            ("node", "all_gather", size if whole else everything),
        ),
        kept_bytes=_feedback_bytes(numel, form.k, options),
        buffer_bytes=4 * numel + form.nbytes + across + (0 if whole else everything) + exempt,
        exempt_bytes=exempt,
    )


def _low_rank(gradients: BlockGradients, options: ExchangeOptions, topology: Topology) -> Work:
    """Every matrix M: added to the residual, P = M Q, Q = M^T P, and P Q^T written and taken from the residual."""
    numel, feedback = gradients.numel, options.error_feedback
    plan = plan_factors(gradients.layout, rank=options.rank)
    matrices, flops = 0, 0.0
    for group in plan.groups:
        count, rank, rows, columns = len(group.slices), group.rank, group.rows, group.columns
        matrices += count
        flops += count * ((8 if feedback else 6) * rank * rows * columns + 4 * rank**2 * (rows + columns))
    messages = 4 * (plan.p_numel + plan.whole_numel), 4 * plan.q_numel
    return Work(
        3 * gradients.nbytes + (24 if feedback else 20) * numel,
        _ENCODE_CALLS + _MATRIX_CALLS * matrices,
        tuple(("world", "all_reduce", size) for size in messages),
        kept_bytes=4 * numel + sum(messages) if feedback else messages[1],
        buffer_bytes=0.0 if feedback else 4 * numel + messages[0],
        flops=flops,
    )


def _sign(gradients: BlockGradients, options: ExchangeOptions, topology: Topology) -> Work:
    parts, ranks, exempt = gradients.compressible, topology.world_size, gradients.exempt_bytes
    nbytes = SignFormat(gradients.layout).nbytes
    state = 4 * gradients.numel + nbytes  # without feedback it is made anew each time
    decoded = ranks * (8 * gradients.compressible_numel + nbytes)
    return Work(
        2 * gradients.nbytes + 20 * gradients.numel + decoded + _EXEMPT_PASSES * exempt,
        _ENCODE_CALLS + len(parts) * (1 + ranks),
        (("world", "all_gather", ranks * nbytes),) if parts else (),
        kept_bytes=state if options.error_feedback else 0.0,
        buffer_bytes=ranks * nbytes + exempt + (0.0 if options.error_feedback else state),
        exempt_bytes=exempt,
    )


_WORK: dict[tuple[str, bool], Callable[[BlockGradients, ExchangeOptions, Topology], Work]] = {
    ("dense", True): _dense_by_nodes,
    ("bf16", False): _half,
    ("fp16", False): _half,
    ("topk", False): _top_k,
    ("topk", True): _top_k_by_nodes,
    ("powersgd", False): _low_rank,
    ("sign", False): _sign,
}

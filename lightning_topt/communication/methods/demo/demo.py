"""DeMo: momentum that each rank keeps for itself, of which only the fast components travel (arXiv
2411.19870, algorithm 1).

    momentum = decay * momentum + gradient
    sent = the largest coefficients of its cosine transform, in each tile
    momentum = momentum - sent;  result = sign(sum of what all ranks sent)

What a tile's coefficients are: `cosine`. b bytes of a message (`LevelMessage`), c its largest
chunk:

               bytes moved on the device               collectives                    function
    flat       (2 s + 28) n + pack(k) + decode(W k),   all_gather(W b)                DeMo.work
               8 c n flops
    by nodes   the same, + 2 s n                       node all_reduce(s n), across
                                                       all_gather(m b), node
                                                       all_gather(W b)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from typing_extensions import override

from lightning_topt.communication.exchange_context import ExchangeContext
from lightning_topt.communication.exchange_method import COMPILED_BYTES
from lightning_topt.communication.exchange_work import (
    DECODE_BYTES_PER_ENTRY,
    DECODE_CALLS,
    ENCODE_CALLS,
    MATRIX_CALLS,
    PACK_BYTES_PER_ENTRY,
    BucketGradients,
    Work,
)
from lightning_topt.communication.level_message import LevelMessage
from lightning_topt.communication.methods.demo.demo_exchange import DecoupledExchange
from lightning_topt.communication.methods.demo.demo_options import DeMoOptions
from lightning_topt.communication.methods.demo.momentum import pieces
from lightning_topt.communication.topology import Topology


@dataclass(frozen=True, kw_only=True)
class DeMo(DeMoOptions):
    """Decoupled momentum: the gradient becomes the sign of what all ranks sent of their momentum.

    The result is the direction of a step: the optimizer is SGD without momentum, with a learning
    rate of its own; its weight decay then is that of AdamW. Its options are those of `DeMoOptions`.
    """

    name: ClassVar[str] = "demo"
    process_bytes: ClassVar[int] = COMPILED_BYTES
    gives_signs: ClassVar[bool] = True

    @override
    def check_in_plan(self) -> None:
        raise ValueError(
            "DeMo takes the place of the optimizer's own rule, which a plan does not decide: use "
            "CompressedDDPStrategy(DeMo())"
        )

    @property
    @override
    def words(self) -> str:
        nodes = " between nodes" if self.hierarchical else ""
        return f"DeMo {100 * self.density:g} % in {self.bits} bits{nodes}"

    @override
    def num_stages(self, topology: Topology) -> int:
        """Return one, by nodes as well: steps that send everything go through a group of all
        ranks.
        """
        return 1

    @property
    @override
    def holds_back(self) -> bool:
        return True

    @property
    @override
    def has_momentum(self) -> bool:
        return True

    @override
    def make_exchange(self, context: ExchangeContext) -> DecoupledExchange:
        return DecoupledExchange(self, context)

    @override
    def work(self, gradients: BucketGradients, topology: Topology) -> Work:
        size, numel = gradients.nbytes, gradients.numel
        parts = pieces(gradients.layout, chunk=self.chunk, density=self.density)
        form = LevelMessage(numel, tuple(chunks.k for _, _, chunks in parts), self.bits)
        k = form.k
        flops = sum(4.0 * chunks.numel * (tiles.height + tiles.width) for _, tiles, chunks in parts)
        ranks, by_nodes = topology.world_size, self.sums_in_nodes(topology)
        senders = topology.num_nodes if by_nodes else ranks
        gathered = senders * form.nbytes
        across = ("across", "all_gather", gathered / topology.ranks_per_node)
        nodes = (("node", "all_reduce", size), across, ("node", "all_gather", gathered))
        return Work(
            2 * size + 28 * numel + PACK_BYTES_PER_ENTRY * k + DECODE_BYTES_PER_ENTRY * senders * k,
            ENCODE_CALLS + 2 * MATRIX_CALLS * len(parts) + DECODE_CALLS * senders,
            nodes if by_nodes else (("world", "all_gather", gathered),),
            kept_bytes=4 * numel + 8 * k,
            buffer_bytes=8 * numel + form.nbytes + gathered,
            flops=flops,
        )

"""The exchange of DeMo: one all-gather of coefficients, flat or between nodes.

By nodes, gradients are summed inside each node first, and all ranks of a node have the node's
momentum. Each of them sends its share of what the node sends; the shares are gathered inside the
node again.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_topt.communication.bucket import (
    Bucket,
    BucketExchange,
    NonFiniteGradient,
    Stages,
    is_finite,
)
from lightning_topt.communication.collectives import ring_all_gather
from lightning_topt.communication.exchange_context import ExchangeContext
from lightning_topt.communication.level_message import HALF_BITS, LevelMessage
from lightning_topt.communication.levels import warm_up_levels
from lightning_topt.communication.methods.demo.demo_options import DeMoOptions
from lightning_topt.communication.methods.demo.momentum import CosineMomentum
from lightning_topt.communication.node.node_exchange import shard_bounds
from lightning_topt.communication.selection.chunk_top_k import warm_up_chunks
from lightning_topt.communication.selection.outcome import NonFiniteError, Selection
from lightning_topt.communication.wire import warm_up_wire

State = dict[str, dict[str, Tensor]]


class DecoupledExchange(BucketExchange):
    """Gives every rank the sign of the sum of what all ranks sent of their momentum.

    State: "momentum_64" (or another chunk): the coefficients of this rank's momentum, or of its
    node's. Ranks agree bit for bit where equal processors run equal libraries: each transforms the
    sum itself.
    """

    def __init__(self, method: DeMoOptions, context: ExchangeContext) -> None:
        super().__init__(context)
        self.method = method
        self.by_nodes = method.sums_in_nodes(context.topology)
        self.momentum = CosineMomentum(
            decay=method.decay, chunk=method.chunk, density=method.density, device=context.device
        )
        self._step = -1
        self._sent: dict[
            int, tuple[Tensor, Selection]
        ] = {}  # by bucket index, of step `_step`: momentum, what was sent

    def stages(self, bucket: Bucket) -> Stages:
        """Exchange `bucket` on ``groups.world[0]``, or by nodes on ``node_scatter``, ``across`` and
        ``node_gather``.
        """
        if bucket.step != self._step:
            self._step, self._sent = bucket.step, {}
        own_finite = is_finite(bucket.buffer)
        if self.method.is_dense_step(bucket.step):
            return (yield from self._send_all(bucket, own_finite))
        scale = 1 / bucket.loss_scale
        if self.by_nodes:
            yield dist.all_reduce(bucket.buffer, group=self.groups.node_scatter, async_op=True)
            scale /= self.topology.ranks_per_node
        forms = self._forms(bucket)
        own = self._message(bucket, forms, scale=scale)
        if self.by_nodes:
            rows = own.new_empty((self.topology.num_nodes, own.numel()))
            self.count_across(self.topology.ranks_per_node * rows.nbytes, passes=1)
            yield ring_all_gather(rows, own, group=self.groups.across)
            received = own.new_empty((self.topology.ranks_per_node, rows.numel()))
            yield ring_all_gather(received, rows.view(-1), group=self.groups.node_gather)
            messages = received.view(len(forms), *rows.shape)
        else:
            rows = own.new_empty((self.topology.world_size, own.numel()))
            self.count_ring(rows.nbytes, passes=1)
            yield ring_all_gather(rows, own, group=self.groups.world[0])
            messages = rows.unsqueeze(0)
        if messages[:, :, 0].any():
            raise NonFiniteGradient(own=not own_finite)
        self._write(bucket, forms, messages)
        return bucket.buffer

    def _forms(self, bucket: Bucket) -> list[LevelMessage]:
        """The message of each local rank: its share of what a node sends."""
        counts = [chunks.k for _, _, chunks in self.momentum.pieces(bucket)]
        bounds = shard_bounds(
            sum(counts), local_size=self.topology.ranks_per_node if self.by_nodes else 1
        )
        return [
            LevelMessage(bucket.buffer.numel(), _cut(counts, *bound), self.method.bits)
            for bound in bounds
        ]

    def _message(self, bucket: Bucket, forms: list[LevelMessage], *, scale: float) -> Tensor:
        """This rank's message; what it sends, and the others of the node send, is taken out of the
        momentum.
        """
        place = self.topology.local_rank if self.by_nodes else 0
        message = torch.zeros(
            max(form.nbytes for form in forms), dtype=torch.uint8, device=self.device
        )
        try:
            if not is_finite(bucket.buffer):
                raise NonFiniteError("gradient that is not finite")
            chosen = self.momentum.take(bucket, scale=scale)
        except NonFiniteError:
            forms[place].pack_nonfinite(out=message)
            return message
        shares = torch.split(chosen.values, [form.k for form in forms])
        values = torch.cat([form.round(share) for form, share in zip(forms, shares, strict=True)])
        momentum = self.momentum.coefficients.flat(bucket)
        momentum.index_add_(0, chosen.indices, chosen.values - values)
        self._sent[bucket.index] = (momentum, Selection(values, chosen.indices))
        start = sum(form.k for form in forms[:place])
        forms[place].pack(
            shares[place], chosen.indices[start : start + forms[place].k], out=message
        )
        return message

    def _write(self, bucket: Bucket, forms: list[LevelMessage], messages: Tensor) -> None:
        """Write the sign of the sum of `messages` (local ranks, nodes or ranks, bytes), added in
        that order.
        """
        total = torch.zeros(bucket.buffer.numel(), device=self.device)
        for form, of_nodes in zip(forms, messages, strict=True):
            for message in of_nodes:
                _, values, indices = form.unpack(message)
                total.index_add_(0, indices, values)
        self.momentum.write_sign(bucket, total, decode=True)

    def _send_all(self, bucket: Bucket, own_finite: bool) -> Stages:
        """Send all momentum: none is left then."""
        total = self.momentum.take_all(
            bucket, scale=1 / (bucket.loss_scale * self.topology.world_size)
        )
        self.count_ring(total.nbytes, passes=2)
        yield dist.all_reduce(total, group=self.groups.world[0], async_op=True)
        if not is_finite(total):
            raise NonFiniteGradient(own=not own_finite)
        self.momentum.coefficients.flat(bucket).zero_()
        self.momentum.write_sign(bucket, total, decode=False)
        return bucket.buffer

    def warm_up(self) -> None:
        """Compile the selection and the packing."""
        if self.device.type == "cpu":
            warm_up_chunks()
            warm_up_wire()
            if self.method.bits < HALF_BITS:
                warm_up_levels(self.method.bits)

    def put_back(self) -> None:
        """Put back into the momentum what the last step sent."""
        for momentum, sent in self._sent.values():
            momentum.index_add_(0, sent.indices, sent.values)
        self._sent.clear()

    def residual_norm(self) -> float:
        """Return the L2 norm of this rank's momentum."""
        return self.momentum.coefficients.norm()

    @property
    def _kind(self) -> str:
        return f"momentum_{self.method.chunk}"

    def state_dict(self) -> State:
        """Return the coefficients by parameter name, (numel,) each."""
        return {self._kind: self.momentum.coefficients.state_dict()}

    def load_state_dict(self, state: State) -> None:
        """Take over momentum by name. Raises ValueError for coefficients of tiles of another
        size.
        """
        other = [kind for kind in state if kind.startswith("momentum_") and kind != self._kind]
        if other:
            raise ValueError(
                f"the saved momentum has chunk={other[0].removeprefix('momentum_')}, this exchange "
                f"has {self.method.chunk}: "
                "its coefficients mean nothing there, so keep the chunk"
            )
        self._sent.clear()
        self.momentum.coefficients.load_state_dict(state.get(self._kind, {}))


def _cut(counts: Sequence[int], start: int, stop: int) -> tuple[int, ...]:
    """Return the numbers of each of `counts` things, one after the other, that lie from `start` to
    `stop`.
    """
    ends = list(itertools.accumulate(counts))
    return tuple(
        max(0, min(end, stop) - max(end - count, start))
        for end, count in zip(ends, counts, strict=True)
    )

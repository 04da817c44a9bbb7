"""DeMo: momentum that each rank keeps for itself; only its fast components travel.

arXiv 2411.19870, algorithm 1 (decoupled momentum):

    momentum = decay * momentum + gradient
    sent = the largest coefficients of its cosine transform, in each tile
    momentum = momentum - sent;  result = sign(sum of what all ranks sent)

The transform is orthonormal, so momentum that is kept as coefficients is the same momentum. A
gradient is transformed once, what is sent is simply taken out, and only the sum of all ranks is
transformed back.

Coefficients travel by one all-gather. By nodes, gradients are summed inside each node first, and
all ranks of a node have the node's momentum; each sends its share of what the node sends, and the
shares are gathered inside the node again. b bytes of a message (`wire.LevelMessage`), c its largest
chunk:

               bytes moved on the device                  collectives                    function
    flat       (2 s + 28) n + pack(k) + decode(W k),      all_gather(W b)                DeMo.work
               8 c n flops
    by nodes   the same, + 2 s n                          node all_reduce(s n),
                                                          across all_gather(m b),
                                                          node all_gather(W b)
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from lightning_topt.basics.argument_checks import check_real, check_whole
from lightning_topt.communication.bucket import (
    Bucket,
    BucketExchange,
    BucketLayout,
    ExchangeContext,
    NonFiniteGradient,
    Stages,
    finite_flag,
    is_finite,
)
from lightning_topt.communication.collectives import ring_all_gather
from lightning_topt.communication.exchange_method import (
    COMPILED_BYTES,
    DECODE_BYTES_PER_ENTRY,
    DECODE_CALLS,
    ENCODE_CALLS,
    MATRIX_CALLS,
    PACK_BYTES_PER_ENTRY,
    BucketGradients,
    ByNodes,
    CompressedMethod,
    Work,
)
from lightning_topt.communication.node.node_exchange import shard_bounds
from lightning_topt.communication.residual import LocalResidual
from lightning_topt.communication.selection.chunk_top_k import (
    Chunks,
    take_chunk_top_k,
    warm_up_chunks,
)
from lightning_topt.communication.selection.vector_top_k import NonFiniteError, Selection
from lightning_topt.communication.topology import Topology
from lightning_topt.communication.wire import (
    HALF_BITS,
    LevelMessage,
    check_bits,
    warm_up_levels,
    warm_up_wire,
)

State = dict[str, dict[str, Tensor]]
# a parameter: where it is in the buffer, its tiles, and what is taken of them
Piece = tuple[slice, "Tiles", Chunks]


@dataclass(frozen=True, kw_only=True)
class DeMo(ByNodes, CompressedMethod):
    """Decoupled momentum: the gradient becomes the sign of what all ranks sent of their momentum.

    The result is the direction of a step. The optimizer is SGD without momentum, with a learning
    rate of its own; its weight decay then is that of AdamW. Options beside those of all methods by
    nodes:

    - ``density``: the share of the coefficients of each tile that is sent, at least one;
    - ``decay``: of the momentum, per step;
    - ``chunk``: tiles of a matrix are at most (chunk, chunk): the largest divisors of its dims;
    - ``bits``: of each coefficient sent: 1, 2, 4 or 8 (`wire`), or 16 (bfloat16); the rest stays in
      the momentum.
    """

    name: ClassVar[str] = "demo"
    process_bytes: ClassVar[int] = COMPILED_BYTES
    gives_signs: ClassVar[bool] = True
    density: float = 0.01
    decay: float = 0.999
    chunk: int = 64
    bits: int = 2

    @override
    def check(self) -> None:
        super().check()
        for name in ("density", "decay"):
            check_real(getattr(self, name), name=name)
        if not 0 < self.density <= 1:
            raise ValueError(
                f"density is the fraction sent, above 0 and at most 1; got {self.density}"
            )
        if not 0 <= self.decay < 1:
            raise ValueError(f"decay is at least 0 and below 1; got {self.decay}")
        check_whole(self.chunk, name="chunk (the longest side of a tile)")
        check_bits(self.bits, others=(HALF_BITS,))

    @override
    def density_at(self, step: int) -> float:
        return 1.0 if self.is_dense_step(step) else self.density

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
        """Return 1, also by nodes: steps that send everything use a group of all ranks."""
        return 1

    @property
    @override
    def has_residual(self) -> bool:
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


class DecoupledExchange(BucketExchange):
    """Gives every rank the sign of the sum of what all ranks sent of their momentum.

    State: "momentum_64" (or another chunk): the coefficients of this rank's momentum, or of its
    node's. Ranks agree bit for bit where equal processors run equal libraries: each transforms the
    sum itself.
    """

    def __init__(self, method: DeMo, context: ExchangeContext) -> None:
        super().__init__(context)
        self.method = method
        self.by_nodes = method.sums_in_nodes(context.topology)
        self.momentum = CosineMomentum(
            decay=method.decay, chunk=method.chunk, density=method.density, device=context.device
        )
        self._step = -1
        # of step `_step`, by bucket index: momentum, what was sent
        self._sent: dict[int, tuple[Tensor, Selection]] = {}

    def stages(self, bucket: Bucket) -> Stages:
        """Exchange `bucket` on ``groups.world[0]``.

        By nodes on ``node_scatter``, ``across`` and ``node_gather``.
        """
        # what was sent is kept until the next step, for `put_back`
        if bucket.step != self._step:
            self._step, self._sent = bucket.step, {}
        own_finite = finite_flag(bucket.buffer)
        if self.method.is_dense_step(bucket.step):
            return (yield from self._send_all(bucket, own_finite))
        # the node's sum
        scale = 1 / bucket.loss_scale
        if self.by_nodes:
            yield dist.all_reduce(bucket.buffer, group=self.groups.node_scatter, async_op=True)
            scale /= self.topology.ranks_per_node
        # what is sent, then gathered: between nodes and in the node, or among all ranks
        forms = self._forms(bucket)
        own = self._message(bucket, forms, scale=scale)
        if self.by_nodes:
            rows = own.new_empty((self.topology.num_nodes, own.numel()))
            self.count_across(self.topology.ranks_per_node * rows.nbytes, passes=1)
            yield ring_all_gather(rows, own, group=self.groups.across)
            received = own.new_empty((self.topology.ranks_per_node, rows.numel()))
            yield ring_all_gather(received, rows.view(-1), group=self.groups.node_gather)
            messages = received.view(len(forms), *rows.shape)  # (local ranks, nodes, bytes)
        else:
            rows = own.new_empty((self.topology.world_size, own.numel()))
            self.count_ring(rows.nbytes, passes=1)
            yield ring_all_gather(rows, own, group=self.groups.world[0])
            messages = rows.unsqueeze(0)  # (1, ranks, bytes)
        if messages[:, :, 0].any():
            raise NonFiniteGradient(own=not own_finite)
        # the sum of all messages, in that order, back from the cosine basis
        total = torch.zeros(bucket.buffer.numel(), device=self.device)
        for form, of_nodes in zip(forms, messages, strict=True):
            for message in of_nodes:
                _, values, indices = form.unpack(message, known_finite=True)
                total.index_add_(0, indices, values)
        self.momentum.write_sign(bucket, total, decode=True)
        return bucket.buffer

    def _forms(self, bucket: Bucket) -> list[LevelMessage]:
        """Return the message of each local rank: its share of what a node sends."""
        counts = [chunks.k for _, _, chunks in self.momentum.pieces(bucket)]
        bounds = shard_bounds(
            sum(counts), local_size=self.topology.ranks_per_node if self.by_nodes else 1
        )
        return [
            LevelMessage(bucket.buffer.numel(), _overlaps(counts, *bound), self.method.bits)
            for bound in bounds
        ]

    def _message(self, bucket: Bucket, forms: list[LevelMessage], *, scale: float) -> Tensor:
        """Return this rank's message.

        What it sends, and the others of the node send, is taken out of the momentum.
        """
        # select from the momentum; the others learn where it cannot be done
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
        # what rounding takes away stays in the momentum
        shares = torch.split(chosen.values, [form.k for form in forms])
        values = torch.cat([form.round(share) for form, share in zip(forms, shares, strict=True)])
        momentum = self.momentum.coefficients.flat(bucket)
        momentum.index_add_(0, chosen.indices, chosen.values - values)
        self._sent[bucket.index] = (momentum, Selection(values, chosen.indices))
        # of what the node sends, this rank packs its share
        start = sum(form.k for form in forms[:place])
        forms[place].pack(
            shares[place], chosen.indices[start : start + forms[place].k], out=message
        )
        return message

    def _send_all(self, bucket: Bucket, own_finite: Tensor) -> Stages:
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
        """Take over momentum by name. Raises ValueError for tiles of another size."""
        other = [kind for kind in state if kind.startswith("momentum_") and kind != self._kind]
        if other:
            raise ValueError(
                f"the saved momentum has chunk={other[0].removeprefix('momentum_')}, this exchange "
                f"has {self.method.chunk}: its coefficients mean nothing there, so keep the chunk"
            )
        self._sent.clear()
        self.momentum.coefficients.load_state_dict(state.get(self._kind, {}))


def _overlaps(counts: Sequence[int], start: int, stop: int) -> tuple[int, ...]:
    """Return how many of each of `counts` things, one after the other, lie in start .. stop."""
    ends = list(itertools.accumulate(counts))
    return tuple(
        max(0, min(end, stop) - max(end - count, start))
        for end, count in zip(ends, counts, strict=True)
    )


class CosineMomentum:
    """Coefficients of momentum, float32, in the layout of the buckets; found by parameter name."""

    def __init__(self, *, decay: float, chunk: int, density: float, device: torch.device) -> None:
        self.decay, self.chunk, self.density = decay, chunk, density
        self.coefficients = LocalResidual(device)

    def pieces(self, bucket: Bucket) -> tuple[Piece, ...]:
        """Return the parameters of `bucket`."""
        return pieces(bucket.layout, chunk=self.chunk, density=self.density)

    def take(self, bucket: Bucket, *, scale: float) -> Selection:
        """Add ``scale`` * the bucket's gradient to the decayed momentum, and take the largest out.

        The gradient is finite.
        """
        momentum = self.coefficients.flat(bucket)
        values, indices = [], []
        for part, tiles, chunks in self.pieces(bucket):
            added = tiles.encode(bucket.buffer[part].float())
            chosen = take_chunk_top_k(added, momentum[part], chunks, decay=self.decay, scale=scale)
            values.append(chosen.values)
            indices.append(chosen.indices + part.start)
        return Selection(torch.cat(values), torch.cat(indices))

    def take_all(self, bucket: Bucket, *, scale: float) -> Tensor:
        """Return the decayed momentum with ``scale`` * the bucket's gradient, (n,).

        It is back in the basis of the parameters.
        """
        momentum = self.coefficients.flat(bucket)
        total = bucket.buffer.float() * scale
        if bool(momentum.any()):
            for part, tiles, _ in self.pieces(bucket):
                total[part].add_(tiles.decode(momentum[part]), alpha=self.decay)
        return total

    def write_sign(self, bucket: Bucket, total: Tensor, *, decode: bool) -> None:
        """Write the sign of `total` (n,), times the loss scale, into the bucket.

        With `decode`, `total` is of coefficients.
        """
        for part, tiles, _ in self.pieces(bucket):
            sums = tiles.decode(total[part]) if decode else total[part]
            bucket.buffer[part].copy_(sums.sign_().mul_(bucket.loss_scale))


@lru_cache(maxsize=1024)
def pieces(layout: BucketLayout, *, chunk: int, density: float) -> tuple[Piece, ...]:
    """Return every parameter of a bucket in tiles of at most (chunk, chunk).

    The share `density` is sent of each.
    """
    found = []
    for part, shape in zip(layout.slices, layout.shapes, strict=True):
        if part.stop > part.start:
            tiles = Tiles.of_shape(shape, limit=chunk)
            chunks = Chunks.of_density(shape.numel(), chunk=tiles.numel, density=density)
            found.append((part, tiles, chunks))
    return tuple(found)


# ---- the cosine transform


@dataclass(frozen=True)
class Tiles:
    """A matrix (rows, columns) as tiles (height, width) side by side, and its cosine transform.

    DeMo, arXiv 2411.19870, section 3, as two matrix products. With D (t, t) the orthonormal DCT-II,
    a tile X (h, w) becomes D_h X D_w^T, and is found again as D_h^T (...) D_w. Coefficients of one
    tile lie together, row by row.
    """

    rows: int
    columns: int
    height: int
    width: int

    @classmethod
    def of_shape(cls, shape: torch.Size, *, limit: int) -> Tiles:
        """Return tiles of at most `limit` in each dim.

        More than two dims are a matrix (first dim, rest), fewer one row.
        """
        columns = shape[1:].numel() if len(shape) > 1 else shape.numel()
        rows = shape[0] if len(shape) > 1 else 1
        return cls(rows, columns, tile_length(rows, limit), tile_length(columns, limit))

    @property
    def numel(self) -> int:
        """Elements of one tile."""
        return self.height * self.width

    def encode(self, flat: Tensor) -> Tensor:
        """Return the coefficients (..., n) of matrices (..., n), float32: tile after tile."""
        lead, down = flat.shape[:-1], self.rows // self.height
        # along the rows, then along the columns of each strip of tiles
        across = flat.reshape(-1, self.width) @ cosine_matrix(self.width, flat.device).t()
        strips = across.view(-1, self.height, self.columns)
        if self.height > 1:
            strips = torch.matmul(cosine_matrix(self.height, flat.device), strips)
        tiles = strips.view(-1, down, self.height, self.columns // self.width, self.width)
        return tiles.transpose(2, 3).reshape(*lead, self.rows * self.columns)

    def decode(self, coefficients: Tensor) -> Tensor:
        """Return matrices (..., n) of coefficients (..., n)."""
        lead, down = coefficients.shape[:-1], self.rows // self.height
        tiles = coefficients.view(-1, down, self.columns // self.width, self.height, self.width)
        # along the rows, then along the columns
        rows = tiles.transpose(2, 3).reshape(-1, self.width)
        across = rows @ cosine_matrix(self.width, coefficients.device)
        strips = across.view(-1, self.height, self.columns)
        if self.height > 1:
            strips = torch.matmul(cosine_matrix(self.height, coefficients.device).t(), strips)
        return strips.reshape(*lead, self.rows * self.columns)


@lru_cache(maxsize=64)
def tile_length(length: int, limit: int) -> int:
    """Return the largest divisor of `length` that is at most `limit`."""
    return next(size for size in range(min(length, limit), 0, -1) if length % size == 0)


@lru_cache(maxsize=64)
def cosine_matrix(size: int, device: torch.device) -> Tensor:
    """Return the orthonormal DCT-II (size, size); a row per frequency.

    ``D[f, i] = sqrt((1 + (f > 0)) / t) * cos(pi * (2 i + 1) * f / (2 t))``, t = size.
    """
    positions = torch.arange(size, dtype=torch.float64)
    angles = torch.outer(positions, 2 * positions + 1) * (math.pi / (2 * size))
    matrix = torch.cos(angles) * math.sqrt(2 / size)
    matrix[0] *= math.sqrt(0.5)
    return matrix.to(device, torch.float32)

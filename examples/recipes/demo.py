"""DeMo: each rank keeps its momentum, of which only the largest cosine coefficients travel.

Copy this file beside your program and hand its method to the strategy. The optimizer is SGD without
momentum; its weight decay is then that of AdamW:

    from demo import DeMo

    strategy = CompressedDDPStrategy(DeMo(density=0.01))

arXiv 2411.19870, algorithm 1 (decoupled momentum):

    momentum = decay * momentum + gradient
    sent = the largest coefficients of its cosine transform, in each tile
    momentum = momentum - sent;  result = sign(sum of what all ranks sent)

The transform is orthonormal, so the momentum is kept as coefficients. The result is a sign: leave
`gradient_clip_val` out. A plan cannot name this method.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_topt.communication.bucket import (
    Bucket,
    BucketExchange,
    ExchangeContext,
    Stages,
    is_finite,
)
from lightning_topt.communication.collectives import ring_all_gather
from lightning_topt.communication.exchange_method import CompressedMethod
from lightning_topt.communication.wire import SparseMessage

State = dict[str, dict[str, Tensor]]


@dataclass(frozen=True, kw_only=True)
class DeMo(CompressedMethod):
    """Decoupled momentum.

    - ``density``: the share of the coefficients of each tile that is sent, at least one;
    - ``decay``: of the momentum, per step;
    - ``chunk``: tiles of a matrix are at most (chunk, chunk): the largest divisors of its dims;
    - ``bits``: of each coefficient sent, 2, 4 or 8; the rest stays in the momentum.
    """

    name: ClassVar[str] = "demo"
    density: float = 0.01
    decay: float = 0.999
    chunk: int = 64
    bits: int = 2

    def check(self) -> None:
        super().check()
        if not (0 < self.density <= 1 and 0 <= self.decay < 1 and self.chunk >= 1):
            raise ValueError(f"density in (0, 1], decay in [0, 1), chunk from 1; got {self}")
        if self.bits not in (2, 4, 8):
            raise ValueError(f"bits is one of 2, 4, 8; got {self.bits!r}")

    @property
    def words(self) -> str:
        return f"DeMo {100 * self.density:g} % in {self.bits} bits"

    def density_at(self, step: int) -> float:
        return 1.0 if self.is_dense_step(step) else self.density

    def make_exchange(self, context: ExchangeContext) -> BucketExchange:
        return DecoupledExchange(self, context)


class DecoupledExchange(BucketExchange):
    """One all-gather of coefficients for each bucket; dense steps send all momentum."""

    def __init__(self, method: DeMo, context: ExchangeContext) -> None:
        super().__init__(context)
        self.method = method
        self.momentum: dict[str, Tensor] = {}  # parameter name -> coefficients (numel,)
        self.step = -1
        # of `step`: coefficients, where and what was sent
        self.sent: list[tuple[Tensor, Tensor, Tensor]] = []

    def stages(self, bucket: Bucket) -> Stages:
        if bucket.step != self.step:
            self.step, self.sent = bucket.step, []
        layout, own_finite = bucket.layout, is_finite(bucket.buffer)
        parts = [
            (name, part, Tiles.of_shape(shape, limit=self.method.chunk))
            for name, part, shape in zip(layout.names, layout.slices, layout.shapes, strict=True)
            if part.stop > part.start
        ]
        if own_finite:
            for name, part, tiles in parts:
                added = tiles.encode(bucket.buffer[part].float() / bucket.loss_scale)
                old = self.momentum.get(name)
                self.momentum[name] = added if old is None else old.mul_(self.method.decay) + added
        if self.method.is_dense_step(bucket.step):
            total = bucket.buffer.float()
            if own_finite:
                for name, part, _ in parts:
                    total[part] = self.momentum[name]
            self.count_ring(total.nbytes, passes=2)
            yield dist.all_reduce(total, group=self.groups.world[0], async_op=True)
            if not is_finite(total):
                return bucket.not_finite(own_finite=own_finite)
            for name, *_ in parts:
                self.momentum[name].zero_()
        else:
            # ---- the largest of each tile, as one message
            counts = [tiles.count(self.method.density) for *_, tiles in parts]
            form = SparseMessage(bucket.buffer.numel(), sum(counts), self.method.bits)
            own = torch.zeros(form.nbytes, dtype=torch.uint8, device=self.device)
            if own_finite:
                self.pack(parts, counts, form, own)
            else:
                form.pack_nonfinite(out=own)
            rows = own.new_empty((self.topology.world_size, own.numel()))  # (ranks, bytes)
            self.count_ring(rows.nbytes, passes=1)
            yield ring_all_gather(rows, own, group=self.groups.world[0])
            if rows[:, 0].any():
                return bucket.not_finite(own_finite=own_finite)
            # ---- the sum of all messages, in the order of ranks
            total = torch.zeros(bucket.buffer.numel(), device=self.device)
            for row in rows:
                values, indices = form.unpack(row)
                total.index_add_(0, indices, values)
        for _, part, tiles in parts:
            bucket.buffer[part].copy_(tiles.decode(total[part]).sign_().mul_(bucket.loss_scale))
        return bucket.buffer

    def pack(
        self,
        parts: list[tuple[str, slice, Tiles]],
        counts: list[int],
        form: SparseMessage,
        out: Tensor,
    ) -> None:
        """Take the largest coefficients out of the momentum, and write them into a message."""
        places, values = [], []
        for (name, part, tiles), count in zip(parts, counts, strict=True):
            rows = self.momentum[name].view(-1, tiles.height * tiles.width)  # (tiles, elements)
            chosen = rows.abs().topk(count // len(rows), dim=1).indices.sort(dim=1).values
            starts = rows.shape[1] * torch.arange(len(rows), device=rows.device)
            flat = (chosen + starts.unsqueeze(1)).view(-1)
            places.append(flat + part.start)
            values.append(self.momentum[name][flat])
        form.pack(torch.cat(values), torch.cat(places).int(), out=out)
        # what rounding takes away stays in the momentum
        arrived = form.values(out).split(counts)
        for (name, part, _), where, what in zip(parts, places, arrived, strict=True):
            self.momentum[name].index_add_(0, where - part.start, what, alpha=-1)
            self.sent.append((self.momentum[name], where - part.start, what))

    def put_back(self) -> None:
        for momentum, where, what in self.sent:
            momentum.index_add_(0, where, what)
        self.sent = []

    def residual_norm(self) -> float:
        return sum(float(each.norm()) ** 2 for each in self.momentum.values()) ** 0.5

    def state_dict(self) -> State:
        kind = f"momentum_{self.method.chunk}"
        return {kind: {name: each.clone() for name, each in self.momentum.items()}}

    def load_state_dict(self, state: State) -> None:
        kind = f"momentum_{self.method.chunk}"
        if set(state) - {kind}:
            raise ValueError(f"the saved momentum is {', '.join(state)}, here it is {kind}")
        self.sent = []
        self.momentum = {
            name: each.to(self.device, torch.float32, copy=True)
            for name, each in state.get(kind, {}).items()
        }


@dataclass(frozen=True)
class Tiles:
    """A matrix (rows, columns) as tiles (height, width), and their cosine transform (section 3).

    With D (t, t) the orthonormal DCT-II a tile X becomes D_h X D_w^T. Coefficients of one tile lie
    together, row by row.
    """

    rows: int
    columns: int
    height: int
    width: int

    @classmethod
    def of_shape(cls, shape: torch.Size, *, limit: int) -> Tiles:
        """Return tiles; more than two dims are a matrix (first dim, rest), fewer one row."""
        rows = shape[0] if len(shape) > 1 else 1
        columns = shape[1:].numel() if len(shape) > 1 else shape.numel()
        height, width = (
            next(size for size in range(min(length, limit), 0, -1) if length % size == 0)
            for length in (rows, columns)
        )
        return cls(rows, columns, height, width)

    def count(self, density: float) -> int:
        """Return how many coefficients are sent."""
        numel = self.height * self.width
        return self.rows * self.columns // numel * max(1, round(density * numel))

    def encode(self, flat: Tensor) -> Tensor:
        """Return the coefficients (..., n) of matrices (..., n), tile after tile."""
        tiles = flat.reshape(
            -1, self.rows // self.height, self.height, self.columns // self.width, self.width
        ).transpose(2, 3)
        down, across = cosines(self.height, flat.device), cosines(self.width, flat.device)
        return (down @ tiles @ across.T).reshape(flat.shape)

    def decode(self, flat: Tensor) -> Tensor:
        """Return the matrices (..., n) of coefficients (..., n)."""
        tiles = flat.view(
            -1, self.rows // self.height, self.columns // self.width, self.height, self.width
        )
        down, across = cosines(self.height, flat.device), cosines(self.width, flat.device)
        return (down.T @ tiles @ across).transpose(2, 3).reshape(flat.shape)


@lru_cache(maxsize=64)
def cosines(size: int, device: torch.device) -> Tensor:
    """Return the orthonormal DCT-II (size, size), float32; a row per frequency."""
    places = torch.arange(size, dtype=torch.float64)
    matrix = torch.cos(torch.outer(places, 2 * places + 1) * (math.pi / (2 * size)))
    matrix *= math.sqrt(2 / size)
    matrix[0] *= math.sqrt(0.5)
    return matrix.to(device, torch.float32)

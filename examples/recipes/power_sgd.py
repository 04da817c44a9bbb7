"""PowerSGD: every gradient matrix travels as two thin factors (arXiv 1905.13727).

Copy this file beside your program and hand its method to the strategy:

    from power_sgd import PowerSGD

    strategy = CompressedDDPStrategy(PowerSGD(rank=2))

One step of subspace iteration per exchange, started from the last factor, with error feedback:

    M = gradient + residual;  P = mean(M Q);  P = orthonormal basis of P;  Q = mean(M^T P)
    result = P Q^T;  residual = M - result

Torch's own hook (`powerSGD_hook`) does the same on NCCL; on gloo it hangs with several buckets.
Residuals and factors are saved in checkpoints. A plan cannot name this method.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
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
from lightning_topt.communication.exchange_method import FeedbackMethod
from lightning_topt.communication.topology import Topology

State = dict[str, dict[str, Tensor]]


@dataclass(frozen=True, kw_only=True)
class PowerSGD(FeedbackMethod):
    """Factors of `rank` columns; `error_feedback`, `exempt` and `dense_steps` as of `TopK`."""

    name: ClassVar[str] = "powersgd"
    rank: int = 2

    def check(self) -> None:
        super().check()
        if not isinstance(self.rank, int) or self.rank < 1:
            raise ValueError(f"rank is a whole number of at least 1; got {self.rank!r}")

    @property
    def words(self) -> str:
        return f"PowerSGD rank {self.rank}{self.feedback_words}"

    def num_stages(self, topology: Topology) -> int:
        return 2  # P on the first group of all ranks, Q on the second

    def make_exchange(self, context: ExchangeContext) -> BucketExchange:
        return LowRankExchange(self, context)


class LowRankExchange(BucketExchange):
    """Two all-reduces for each bucket: all P (and what travels whole), then all Q."""

    def __init__(self, method: PowerSGD, context: ExchangeContext) -> None:
        super().__init__(context)
        self.method = method
        self.residual: dict[str, Tensor] = {}  # parameter name -> (numel,)
        self.factor: dict[str, Tensor] = {}  # parameter name -> the last Q (columns, rank)
        self.step = -1
        self.sent: list[tuple[Tensor, Tensor]] = []  # of `step`: residual, and what was sent of it

    def stages(self, bucket: Bucket) -> Stages:
        if bucket.step != self.step:
            self.step, self.sent = bucket.step, []
        if self.method.is_dense_step(bucket.step):
            return (yield from self.dense_stages(bucket))
        own_finite = is_finite(bucket.buffer)
        pending = self.pending(bucket) if own_finite else {}

        # ---- P = mean(M Q), beside what travels whole
        layout, matrices, whole = bucket.layout, [], []
        for name, part, shape, exempt in zip(
            layout.names, layout.slices, layout.shapes, layout.exempt, strict=True
        ):
            rows, columns = matrix_shape(shape)
            rank = min(self.method.rank, rows, columns)
            is_small = 2 * rank * (rows + columns) >= rows * columns
            (whole if exempt or is_small else matrices).append((name, part, rows, columns, rank))
        values = [
            pending[name].view(rows, columns) @ orthonormal(self.first_factor(name, columns, rank))
            if own_finite
            else bucket.buffer.new_full((rows, rank), torch.nan, dtype=torch.float32)
            for name, _, rows, columns, rank in matrices
        ]
        values += [pending[name] if own_finite else bucket.buffer[part] for name, part, *_ in whole]
        message = self.packed(values)
        yield dist.all_reduce(message, group=self.groups.world[0], async_op=True)
        if not is_finite(message):
            return bucket.not_finite(own_finite=own_finite)
        means = message.split([each.numel() for each in values])

        # ---- Q = mean(M^T P), with an orthonormal basis of the mean P
        bases = [
            orthonormal(mean.view(rows, rank))
            for mean, (_, _, rows, _, rank) in zip(means, matrices, strict=False)
        ]
        products = [
            pending[name].view(rows, columns).T @ basis
            for basis, (name, _, rows, columns, _) in zip(bases, matrices, strict=True)
        ]
        message = self.packed(products)
        yield dist.all_reduce(message, group=self.groups.world[1], async_op=True)
        if not is_finite(message):
            return bucket.not_finite(own_finite=True)

        # ---- result = P Q^T, residual = M - result
        results = []
        factors = message.split([each.numel() for each in products])
        for factor, basis, (name, part, _, columns, rank) in zip(
            factors, bases, matrices, strict=True
        ):
            self.factor[name] = factor.view(columns, rank).clone()
            results.append((name, part, (basis @ self.factor[name].T).flatten()))
        for mean, (name, part, *_) in zip(means[len(matrices) :], whole, strict=True):
            results.append((name, part, mean))
        for name, part, result in results:
            bucket.buffer[part].copy_(result * bucket.loss_scale)
            if self.method.error_feedback:
                self.residual[name] = pending[name].sub_(result)
                self.sent.append((self.residual[name], result))
        return bucket.buffer

    def pending(self, bucket: Bucket) -> dict[str, Tensor]:
        """Return gradient + residual of every parameter, (numel,) float32 each."""
        pending = {}
        for name, part in zip(bucket.layout.names, bucket.layout.slices, strict=True):
            gradient = bucket.buffer[part].float() / bucket.loss_scale
            residual = self.residual.get(name)
            pending[name] = gradient if residual is None else gradient.add_(residual)
        return pending

    def packed(self, tensors: list[Tensor]) -> Tensor:
        """Return all tensors in one message, divided for the mean over ranks."""
        flat = [tensor.flatten().float() for tensor in tensors]
        message = torch.cat(flat) if flat else torch.empty(0, device=self.device)
        self.count_ring(message.nbytes, passes=2)
        return message.div_(self.topology.world_size)

    def first_factor(self, name: str, columns: int, rank: int) -> Tensor:
        """Return the last Q (columns, rank), at first a random one that is equal on all ranks."""
        factor = self.factor.get(name)
        if factor is None or factor.shape != (columns, rank):
            generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            factor = torch.randn(columns, rank, generator=generator).to(self.device)
        return factor

    def put_back(self) -> None:
        for residual, sent in self.sent:
            residual.add_(sent)
        self.sent = []

    def residual_norm(self) -> float:
        return sum(float(each.norm()) ** 2 for each in self.residual.values()) ** 0.5

    def state_dict(self) -> State:
        kinds = {"residual": self.residual, "factor": self.factor}
        return {kind: {n: t.clone() for n, t in of.items()} for kind, of in kinds.items()}

    def load_state_dict(self, state: State) -> None:
        self.sent = []
        self.residual, self.factor = (
            {n: t.to(self.device, torch.float32, copy=True) for n, t in state.get(kind, {}).items()}
            for kind in ("residual", "factor")
        )


def matrix_shape(shape: torch.Size) -> tuple[int, int]:
    """Return (first dim, all others); (numel, 1) of fewer than two dims."""
    return (shape[0], shape[1:].numel()) if len(shape) > 1 else (shape.numel(), 1)


def orthonormal(matrix: Tensor) -> Tensor:
    """Return an orthonormal basis of the columns (n, r); unit vectors where they are zeros."""
    return torch.linalg.qr(matrix).Q

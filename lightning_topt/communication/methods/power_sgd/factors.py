"""Gradient matrices as two thin factors, P and Q: shapes, messages and products. The exchange is in
`power_sgd`.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from lightning_topt.communication.bucket import BucketLayout

# a matrix travels as factors where these are smaller by this factor; torch's min_compression_rate
LEAST_SAVING = 2


@dataclass(frozen=True)
class MatrixGroup:
    """The matrices of one shape in a bucket: where they are in its buffer, and the rank of their
    factors.
    """

    rows: int
    columns: int
    rank: int
    slices: tuple[slice, ...]
    names: tuple[str, ...]

    def matrices(self, flat: Tensor) -> list[Tensor]:
        """Return views (rows, columns) of a flat tensor in bucket layout."""
        return [flat[part].view(self.rows, self.columns) for part in self.slices]


@dataclass(frozen=True)
class FactorPlan:
    """A `FactorPlan` says what of a bucket travels as factors, and what whole."""

    groups: tuple[MatrixGroup, ...]
    whole: tuple[slice, ...]

    @property
    def whole_numel(self) -> int:
        """Elements that travel as they are."""
        return sum(part.stop - part.start for part in self.whole)

    @property
    def p_numel(self) -> int:
        """Elements of all P."""
        return sum(len(group.slices) * group.rows * group.rank for group in self.groups)

    @property
    def q_numel(self) -> int:
        """Elements of all Q."""
        return sum(len(group.slices) * group.columns * group.rank for group in self.groups)


def matrix_shape(shape: torch.Size) -> tuple[int, int]:
    """Return (first dim, all others) of a tensor; (numel, 1) of fewer than two dims."""
    rows = shape[0] if len(shape) > 0 else 1
    return rows, shape.numel() // max(rows, 1)


def saves_enough(shape: torch.Size, *, rank: int) -> bool:
    """Return whether factors of `rank` columns are at most half as large as the tensor."""
    rows, columns = matrix_shape(shape)
    return min(rank, rows, columns) * (rows + columns) * LEAST_SAVING < rows * columns


@lru_cache(maxsize=1024)
def plan_factors(layout: BucketLayout, *, rank: int) -> FactorPlan:
    """Return the matrices grouped by shape, in the order in which shapes first come; the rest
    whole.
    """
    groups: dict[tuple[int, int], list[tuple[slice, str]]] = {}
    whole = []
    for name, part, shape, exempt in zip(
        layout.names, layout.slices, layout.shapes, layout.exempt, strict=True
    ):
        if exempt or not saves_enough(shape, rank=rank):
            whole.append(part)
        else:
            groups.setdefault(matrix_shape(shape), []).append((part, name))
    return FactorPlan(
        tuple(
            MatrixGroup(
                rows, columns, min(rank, rows, columns), *map(tuple, zip(*members, strict=True))
            )
            for (rows, columns), members in groups.items()
        ),
        tuple(whole),
    )


def orthonormal(factors: Tensor) -> Tensor:
    """Return orthonormal bases (b, n, r) of the columns of `factors` (b, n, r), n >= r; also of
    matrices that lack rank.

    Householder QR: zero columns give unit vectors, not NaN as in Gram-Schmidt.
    """
    basis: Tensor = torch.linalg.qr(factors).Q
    return basis


def first_factor(name: str, *, columns: int, rank: int) -> Tensor:
    """Return a random Q^T (rank, columns): the same on all ranks, whatever bucket the parameter
    `name` is in.
    """
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return torch.randn(rank, columns, generator=generator)


class Factors:
    """P and Q^T of all matrices of a bucket, each kind in one message; what travels whole is at the
    end of P's.

    Q is kept transposed: P^T M is four times as fast as M^T P on a CPU.
    """

    def __init__(self, plan: FactorPlan, *, device: torch.device) -> None:
        self.plan = plan
        self.p_message = torch.empty(plan.p_numel + plan.whole_numel, device=device)
        self.q_message = torch.empty(plan.q_numel, device=device)
        self.whole = self.p_message[plan.p_numel :]
        self.p: list[Tensor] = []  # per group (b, rows, rank)
        self.q: list[Tensor] = []  # per group (b, rank, columns)
        p_start = q_start = 0
        for group in plan.groups:
            count = len(group.slices)
            p_stop, q_stop = (
                p_start + count * group.rows * group.rank,
                q_start + count * group.columns * group.rank,
            )
            self.p.append(self.p_message[p_start:p_stop].view(count, group.rows, group.rank))
            self.q.append(self.q_message[q_start:q_stop].view(count, group.rank, group.columns))
            p_start, q_start = p_stop, q_stop

    def multiply(self, flat: Tensor) -> None:
        """Compute P = M Q for every matrix of `flat` (n,), and copy what travels whole."""
        for group, p, q in zip(self.plan.groups, self.p, self.q, strict=True):
            for matrix, p_one, q_one in zip(
                group.matrices(flat), p, orthonormal(q.mT), strict=True
            ):
                torch.mm(matrix, q_one, out=p_one)
        if self.plan.whole:
            torch.cat([flat[part] for part in self.plan.whole], out=self.whole)

    def multiply_transposed(self, flat: Tensor) -> None:
        """Compute P = orthonormal(P); Q^T = P^T M for every matrix of `flat` (n,)."""
        for group, p, q in zip(self.plan.groups, self.p, self.q, strict=True):
            p.copy_(orthonormal(p))
            for matrix, p_one, q_one in zip(group.matrices(flat), p, q, strict=True):
                torch.mm(p_one.t(), matrix, out=q_one)

    def add_to(self, flat: Tensor, *, scale: float, keep: float = 1.0) -> None:
        """Set `flat` (n,) to keep * flat + scale * result: P Q^T of every matrix, and what
        travelled whole.
        """
        for group, p, q in zip(self.plan.groups, self.p, self.q, strict=True):
            for matrix, p_one, q_one in zip(group.matrices(flat), p, q, strict=True):
                matrix.addmm_(p_one, q_one, beta=keep, alpha=scale)
        sizes = [part.stop - part.start for part in self.plan.whole]
        for part, values in zip(self.plan.whole, torch.split(self.whole, sizes), strict=True):
            flat[part].mul_(keep).add_(values, alpha=scale)

"""PowerSGD: every gradient matrix M travels as two thin factors P and Q.

Vogels et al., arXiv 1905.13727, algorithms 1 and 2. One step of subspace iteration per exchange,
started from the factor of the exchange before (warm start), with error feedback:

    M = gradient + residual;  P = mean(M Q);  P = basis of P, orthonormal;  Q = mean(M^T P)
    result = P Q^T;  residual = M - result

`rank` columns of P (rows, rank) and Q (columns, rank) are (rows + columns) * rank values instead of
rows * columns. Tensors of more than two dims are matrices (first dim, rest). Torch's own hook runs
its second all-reduce in a callback and so fails on gloo with more than one bucket; here the two are
stages of `exchange_worker.ExchangeWorker`.

    bytes moved on the device                  collectives                           function
    (3 s + 24) n, and 8 R n flops              all_reduce(P and what is whole),      PowerSGD.work
    + 4 R^2 per row and column                 all_reduce(Q); R is `rank`
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from lightning_topt.basics.argument_checks import check_whole
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
from lightning_topt.communication.exchange_method import (
    ENCODE_CALLS,
    MATRIX_CALLS,
    BucketGradients,
    FeedbackMethod,
    Work,
)
from lightning_topt.communication.residual import LocalResidual
from lightning_topt.communication.topology import Topology

# a matrix travels as factors where these are smaller by this factor; torch's min_compression_rate
LEAST_SAVING = 2


@dataclass(frozen=True, kw_only=True)
class PowerSGD(FeedbackMethod):
    """Low-rank factors of every gradient matrix: `rank` columns each."""

    name: ClassVar[str] = "powersgd"
    rank: int = 2

    @override
    def check(self) -> None:
        super().check()
        check_whole(self.rank, name="rank")

    @property
    @override
    def words(self) -> str:
        return f"PowerSGD rank {self.rank}" + self.feedback_words

    @override
    def make_exchange(self, context: ExchangeContext) -> LowRankExchange:
        return LowRankExchange(self, context)

    @override
    def num_stages(self, topology: Topology) -> int:
        return 2

    @override
    def work(self, gradients: BucketGradients, topology: Topology) -> Work:
        """Return the work of P = M Q, Q = M^T P and P Q^T for every matrix M.

        M is added to the residual, and what was sent is subtracted there.
        """
        numel, feedback = gradients.numel, self.error_feedback
        plan = plan_factors(gradients.layout, rank=self.rank)
        # products M Q, M^T P and P Q^T, the last once more with error feedback; and two bases
        matrices, flops = 0, 0.0
        for group in plan.groups:
            count, rank, rows, columns = len(group.slices), group.rank, group.rows, group.columns
            matrices += count
            flops += count * (
                (8 if feedback else 6) * rank * rows * columns + 4 * rank**2 * (rows + columns)
            )
        messages = 4 * (plan.p_numel + plan.whole_numel), 4 * plan.q_numel
        return Work(
            3 * gradients.nbytes + (24 if feedback else 20) * numel,
            ENCODE_CALLS + MATRIX_CALLS * matrices,
            tuple(("world", "all_reduce", size) for size in messages),
            kept_bytes=4 * numel + sum(messages) if feedback else messages[1],
            buffer_bytes=0.0 if feedback else 4 * numel + messages[0],
            flops=flops,
        )


class LowRankExchange(BucketExchange):
    """PowerSGD. State: "residual" of this rank, and "factor": the last Q of every matrix.

    Factors are equal on all ranks. Ranks agree bit for bit where equal processors run equal
    libraries: as in torch's hook, each makes the basis of P itself.
    """

    def __init__(self, method: PowerSGD, context: ExchangeContext) -> None:
        super().__init__(context)
        self.method = method
        self.residual = LocalResidual(context.device)
        self.last_q: dict[str, Tensor] = {}  # Q^T (rank, columns) each
        self._step = -1
        # of step `_step`, by bucket index: residual and what was sent
        self._sent: dict[int, tuple[Tensor, Factors]] = {}

    def stages(self, bucket: Bucket) -> Stages:
        """Exchange P and what travels whole on ``groups.world[0]``, Q on ``groups.world[1]``."""
        # what was sent is kept until the next step, for `put_back`
        if bucket.step != self._step:
            self._step, self._sent = bucket.step, {}
        if self.method.is_dense_step(bucket.step):
            return (yield from self.dense_stages(bucket))
        # M = gradient + residual, P = M Q
        factors = self._first_factors(bucket)
        if self.method.error_feedback:
            pending = self.residual.flat(bucket)
        else:
            pending = torch.zeros(bucket.buffer.numel(), device=self.device)
        if is_finite(bucket.buffer):
            pending.add_(bucket.buffer, alpha=1 / bucket.loss_scale)
            factors.multiply(pending)
        else:
            factors.p_message.fill_(torch.nan)  # so that all ranks see it
        own_finite = finite_flag(factors.p_message)
        yield self._start_mean(factors.p_message, group=self.groups.world[0])
        if not is_finite(factors.p_message):
            raise NonFiniteGradient(not own_finite)
        # Q = M^T P, with an orthonormal basis of the mean P
        factors.multiply_transposed(pending)
        yield self._start_mean(factors.q_message, group=self.groups.world[1])
        if not is_finite(factors.q_message):
            raise NonFiniteGradient(False)
        # result = P Q^T, residual = M - result
        self._finish(bucket, factors, pending=pending)
        return bucket.buffer

    def _first_factors(self, bucket: Bucket) -> Factors:
        """Return factors with the Q to start from: the last one, warm, or a random one."""
        factors = Factors(plan_factors(bucket.layout, rank=self.method.rank), device=self.device)
        for group, q in zip(factors.plan.groups, factors.q, strict=True):
            for name, q_one in zip(group.names, q, strict=True):
                last = self.last_q.get(name)
                if last is None or last.shape != q_one.shape:
                    last = first_factor(name, columns=group.columns, rank=group.rank)
                q_one.copy_(last)
        return factors

    def _start_mean(self, message: Tensor, *, group: dist.ProcessGroup) -> dist.Work:
        """Start the mean of a message over all ranks."""
        message.div_(self.topology.world_size)
        self.count_ring(message.nbytes, passes=2)
        work: dist.Work | None = dist.all_reduce(message, group=group, async_op=True)
        assert work is not None
        return work

    def _finish(self, bucket: Bucket, factors: Factors, *, pending: Tensor) -> None:
        """Write P Q^T to the bucket, and subtract it from what is pending."""
        # the next step starts from this Q
        for group, q in zip(factors.plan.groups, factors.q, strict=True):
            self.last_q.update(zip(group.names, q, strict=True))
        in_place = bucket.buffer.dtype == torch.float32
        result = bucket.buffer if in_place else torch.zeros_like(pending)
        factors.add_to(result, scale=bucket.loss_scale, keep=0.0)
        if not in_place:
            bucket.buffer.copy_(result)
        if self.method.error_feedback:
            factors.add_to(pending, scale=-1)
            for part in factors.plan.whole:
                pending[part] = 0
            self._sent[bucket.index] = (pending, factors)

    def put_back(self) -> None:
        """Put back into the residual what the last step sent.

        The mean of the ranks' residuals is then exact.
        """
        for residual, factors in self._sent.values():
            factors.add_to(residual, scale=1)
        self._sent.clear()

    def residual_norm(self) -> float:
        """Return the L2 norm of this rank's residual."""
        return self.residual.norm()

    def state_dict(self) -> dict[str, dict[str, Tensor]]:
        """Return "residual": name -> (numel,); "factor": name -> the last Q^T (rank, columns)."""
        factor = {name: value.clone() for name, value in self.last_q.items()}
        return {"residual": self.residual.state_dict(), "factor": factor}

    def load_state_dict(self, state: dict[str, dict[str, Tensor]]) -> None:
        """Take over the state; factors of another rank start at random again."""
        self._sent.clear()
        self.residual.load_state_dict(state.get("residual", {}))
        factor = state.get("factor", {})
        self.last_q = {
            name: value.to(self.device, torch.float32, copy=True) for name, value in factor.items()
        }


class Factors:
    """P and Q^T of all matrices of a bucket, each kind in one message.

    What travels whole is at the end of P's. Q is kept transposed: P^T M is four times as fast as
    M^T P on a CPU.
    """

    def __init__(self, plan: FactorPlan, *, device: torch.device) -> None:
        self.plan = plan
        # all P, then what travels whole; all Q
        self.p_message = torch.empty(plan.p_numel + plan.whole_numel, device=device)
        self.q_message = torch.empty(plan.q_numel, device=device)
        self.whole = self.p_message[plan.p_numel :]
        self.p: list[Tensor] = []  # per group (b, rows, rank)
        self.q: list[Tensor] = []  # per group (b, rank, columns)
        p_start = q_start = 0
        for group in plan.groups:
            count = len(group.slices)
            p_stop = p_start + count * group.rows * group.rank
            q_stop = q_start + count * group.columns * group.rank
            self.p.append(self.p_message[p_start:p_stop].view(count, group.rows, group.rank))
            self.q.append(self.q_message[q_start:q_stop].view(count, group.rank, group.columns))
            p_start, q_start = p_stop, q_stop

    def multiply(self, flat: Tensor) -> None:
        """Compute P = M Q for every matrix of `flat` (n,), and copy what travels whole."""
        for group, p, q in zip(self.plan.groups, self.p, self.q, strict=True):
            bases = orthonormal(q.mT)
            for matrix, p_one, q_one in zip(group.matrices(flat), p, bases, strict=True):
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
        """Set `flat` (n,) to keep * flat + scale * result.

        The result is P Q^T of every matrix, and what travelled whole.
        """
        for group, p, q in zip(self.plan.groups, self.p, self.q, strict=True):
            for matrix, p_one, q_one in zip(group.matrices(flat), p, q, strict=True):
                matrix.addmm_(p_one, q_one, beta=keep, alpha=scale)
        sizes = [part.stop - part.start for part in self.plan.whole]
        for part, values in zip(self.plan.whole, torch.split(self.whole, sizes), strict=True):
            flat[part].mul_(keep).add_(values, alpha=scale)


@dataclass(frozen=True)
class FactorPlan:
    """What of a bucket travels as factors, and what whole."""

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


@lru_cache(maxsize=1024)
def plan_factors(layout: BucketLayout, *, rank: int) -> FactorPlan:
    """Return the matrices grouped by shape, in the order in which shapes first come.

    The rest travels whole.
    """
    groups: dict[tuple[int, int], list[tuple[slice, str]]] = {}
    whole = []
    entries = zip(layout.names, layout.slices, layout.shapes, layout.exempt, strict=True)
    for name, part, shape, exempt in entries:
        if exempt or not saves_enough(shape, rank=rank):
            whole.append(part)
        else:
            groups.setdefault(matrix_shape(shape), []).append((part, name))
    found = []
    for (rows, columns), matrices in groups.items():
        slices, names = zip(*matrices, strict=True)
        found.append(MatrixGroup(rows, columns, min(rank, rows, columns), slices, names))
    return FactorPlan(tuple(found), tuple(whole))


@dataclass(frozen=True)
class MatrixGroup:
    """The matrices of one shape in a bucket: where they are, and the rank of their factors."""

    rows: int
    columns: int
    rank: int
    slices: tuple[slice, ...]
    names: tuple[str, ...]

    def matrices(self, flat: Tensor) -> list[Tensor]:
        """Return views (rows, columns) of a flat tensor in bucket layout."""
        return [flat[part].view(self.rows, self.columns) for part in self.slices]


def saves_enough(shape: torch.Size, *, rank: int) -> bool:
    """Return whether factors of `rank` columns are at most half as large as the tensor."""
    rows, columns = matrix_shape(shape)
    return min(rank, rows, columns) * (rows + columns) * LEAST_SAVING < rows * columns


def matrix_shape(shape: torch.Size) -> tuple[int, int]:
    """Return (first dim, all others) of a tensor; (numel, 1) of fewer than two dims."""
    rows = shape[0] if len(shape) > 0 else 1
    return rows, shape.numel() // max(rows, 1)


def orthonormal(factors: Tensor) -> Tensor:
    """Return orthonormal bases (b, n, r) of the columns of `factors` (b, n, r), n >= r.

    Householder QR: zero columns give unit vectors, not NaN as in Gram-Schmidt; so matrices may lack
    rank.
    """
    basis: Tensor = torch.linalg.qr(factors).Q
    return basis


def first_factor(name: str, *, columns: int, rank: int) -> Tensor:
    """Return a random Q^T (rank, columns) for the parameter `name`.

    The same on all ranks, whatever bucket the parameter is in.
    """
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return torch.randn(rank, columns, generator=generator)

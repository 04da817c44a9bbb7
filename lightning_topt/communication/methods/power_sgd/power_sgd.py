"""PowerSGD: every gradient matrix M travels as two thin factors (Vogels et al., arXiv 1905.13727,
algorithms 1 and 2).

One step of subspace iteration per exchange, started from the factor of the exchange before (warm
start), with error feedback:

    M = gradient + residual;  P = mean(M Q);  P = basis of P, orthonormal;  Q = mean(M^T P)
    result = P Q^T;  residual = M - result

`rank` columns of P (rows, rank) and Q (columns, rank) are (rows + columns) * rank values instead of
rows * columns. Tensors of more than two dims are matrices (first dim, rest). Torch's own hook runs
its second all-reduce in a callback and so fails on gloo with more than one bucket; here the two are
stages of `worker.ExchangeWorker`.

    bytes moved on the device           collectives                        function
    (3 s + 24) n, and 8 R n flops +     all_reduce(P and what is whole),   PowerSGD.work
    4 R^2 per row and column            all_reduce(Q); R is `rank`
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from lightning_topt.basics.argument_checks import check_whole
from lightning_topt.communication.bucket import (
    Bucket,
    BucketExchange,
    NonFiniteGradient,
    Stages,
    is_finite,
)
from lightning_topt.communication.exchange_context import ExchangeContext
from lightning_topt.communication.exchange_method import FeedbackMethod
from lightning_topt.communication.exchange_work import (
    ENCODE_CALLS,
    MATRIX_CALLS,
    BucketGradients,
    Work,
)
from lightning_topt.communication.local_residual import LocalResidual
from lightning_topt.communication.methods.power_sgd.factors import (
    Factors,
    first_factor,
    plan_factors,
)
from lightning_topt.communication.topology import Topology


class LowRankExchange(BucketExchange):
    """PowerSGD. State: "residual" of this rank, and "factor": the last Q of every matrix, equal on
    all ranks.

    Ranks agree bit for bit where equal processors run equal libraries: as in torch's hook, each
    makes the basis of P itself.
    """

    def __init__(self, method: PowerSGD, context: ExchangeContext) -> None:
        super().__init__(context)
        self.method = method
        self.residual = LocalResidual(context.device)
        self.last_q: dict[str, Tensor] = {}  # Q^T (rank, columns) each
        self._step = -1
        self._sent: dict[
            int, tuple[Tensor, Factors]
        ] = {}  # by bucket index, of step `_step`: residual and what was sent

    def stages(self, bucket: Bucket) -> Stages:
        """Exchange P and what travels whole on ``groups.world[0]``, Q on ``groups.world[1]``."""
        if bucket.step != self._step:
            self._step, self._sent = bucket.step, {}
        if self.method.is_dense_step(bucket.step):
            return (yield from self.dense_stages(bucket))
        factors, pending = self._first_factors(bucket), self._pending(bucket)
        own_finite = is_finite(bucket.buffer)
        if own_finite:
            pending.add_(bucket.buffer, alpha=1 / bucket.loss_scale)
            factors.multiply(pending)
            own_finite = is_finite(factors.p_message)
        else:
            factors.p_message.fill_(torch.nan)
        yield self._start_mean(factors.p_message, group=self.groups.world[0])
        if not is_finite(factors.p_message):
            raise NonFiniteGradient(not own_finite)
        factors.multiply_transposed(pending)
        yield self._start_mean(factors.q_message, group=self.groups.world[1])
        if not is_finite(factors.q_message):
            raise NonFiniteGradient(False)
        self._finish(bucket, factors, pending=pending)
        return bucket.buffer

    def _first_factors(self, bucket: Bucket) -> Factors:
        """Factors with the Q to start from: the last one, warm, or a random one."""
        factors = Factors(plan_factors(bucket.layout, rank=self.method.rank), device=self.device)
        for group, q in zip(factors.plan.groups, factors.q, strict=True):
            for name, q_one in zip(group.names, q, strict=True):
                last = self.last_q.get(name)
                if last is None or last.shape != q_one.shape:
                    last = first_factor(name, columns=group.columns, rank=group.rank)
                q_one.copy_(last)
        return factors

    def _pending(self, bucket: Bucket) -> Tensor:
        """Return the vector (n,) in which the gradient is added to what is held back."""
        if self.method.error_feedback:
            return self.residual.flat(bucket)
        return torch.zeros(bucket.buffer.numel(), device=self.device)

    def _start_mean(self, message: Tensor, *, group: dist.ProcessGroup) -> dist.Work:
        message.div_(self.topology.world_size)
        self.count_ring(message.nbytes, passes=2)
        work: dist.Work | None = dist.all_reduce(message, group=group, async_op=True)
        assert work is not None
        return work

    def _finish(self, bucket: Bucket, factors: Factors, *, pending: Tensor) -> None:
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
        """Put back into the residual what the last step sent; the mean of what the ranks hold back
        is then exact.
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
        """Factors of another rank than `PowerSGD.rank` are not taken over: they start at random
        again.
        """
        self._sent.clear()
        self.residual.load_state_dict(state.get("residual", {}))
        factor = state.get("factor", {})
        self.last_q = {
            name: value.to(self.device, torch.float32, copy=True) for name, value in factor.items()
        }


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
        """Return that of every matrix M: added to the residual, P = M Q, Q = M^T P, P Q^T written
        and subtracted there.
        """
        numel, feedback = gradients.numel, self.error_feedback
        plan = plan_factors(gradients.layout, rank=self.rank)
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

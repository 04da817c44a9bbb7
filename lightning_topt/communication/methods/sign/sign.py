"""One bit per gradient element with error feedback (Seide et al., "1-bit SGD", Interspeech 2014;
EF-signSGD, arXiv 1901.09847).

    pending = gradient + residual;  sent = mean|pending| * sign(pending), per parameter
    residual = pending - sent

(Karimireddy et al., algorithm 2, with one scale per parameter.) A message is one float32 scale per
parameter, then the bits; all ranks gather all messages, decode them in rank order and take the
mean. The sign of zero counts as plus.

    bytes moved on the device     collectives          function
    (2 s + 20) n + W (8 n + b)    all_gather(W b)      Sign.work
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from lightning_topt.communication.bucket import (
    Bucket,
    BucketExchange,
    BucketLayout,
    NonFiniteGradient,
    Stages,
    is_finite,
    together,
)
from lightning_topt.communication.collectives import ring_all_gather
from lightning_topt.communication.exchange_context import ExchangeContext
from lightning_topt.communication.exchange_method import COMPILED_BYTES, FeedbackMethod
from lightning_topt.communication.exchange_work import (
    ENCODE_CALLS,
    EXEMPT_PASSES,
    BucketGradients,
    Work,
)
from lightning_topt.communication.local_residual import LocalResidual
from lightning_topt.communication.methods.sign.sign_bits import (
    add_signs,
    mean_abs,
    packed_bytes,
    take_signs,
)
from lightning_topt.communication.topology import Topology

SCALE_BYTES = 4


class SignFormat:
    """Messages about the parameters that are not exempt: one float32 scale each, then bits; each
    parameter from a new byte.
    """

    def __init__(self, layout: BucketLayout) -> None:
        self.slices = [
            part for part, exempt in zip(layout.slices, layout.exempt, strict=True) if not exempt
        ]
        cuts = [SCALE_BYTES * len(self.slices)]
        for part in self.slices:
            cuts.append(cuts[-1] + packed_bytes(part.stop - part.start))
        self.bits = [slice(start, stop) for start, stop in pairwise(cuts)]
        self.nbytes = (
            -(-cuts[-1] // SCALE_BYTES) * SCALE_BYTES
        )  # so that the scales of every row of a gather are aligned

    def encode(self, pending: Tensor) -> Tensor:
        """Return the message (nbytes,), uint8, about `pending` (n,) in bucket layout, which keeps
        what the message leaves out.

        Where `pending` is not finite the message says so (a scale is not finite) and `pending`
        stays.
        """
        message = torch.zeros(self.nbytes, dtype=torch.uint8, device=pending.device)
        parts = [pending[part] for part in self.slices]
        self.scales(message).copy_(mean_abs(parts))
        if is_finite(self.scales(message)):
            for part, bits, step in zip(
                parts, self.bits, self.scales(message).tolist(), strict=True
            ):
                take_signs(part, step=step, packed=message[bits])
        return message

    def nonfinite(self, *, device: torch.device) -> Tensor:
        """Return the message of a rank whose gradient is not finite: its scales are NaN."""
        message = torch.zeros(self.nbytes, dtype=torch.uint8, device=device)
        self.scales(message).fill_(torch.nan)
        return message

    def scales(self, messages: Tensor) -> Tensor:
        """Return the scales (..., parameters) in messages (..., nbytes)."""
        return messages.view(torch.float32)[..., : len(self.slices)]

    def add_decoded(self, message: Tensor, *, to: Tensor, scale: float) -> None:
        """Add scale * what a message says to `to` (n,)."""
        for part, bits, step in zip(
            self.slices, self.bits, self.scales(message).tolist(), strict=True
        ):
            add_signs(message[bits], step=step * scale, values=to[part])


class SignExchange(BucketExchange):
    """One bit per element. State: "residual" of this rank. Exempt parameters travel beside it, by
    an all-reduce.
    """

    def __init__(self, method: Sign, context: ExchangeContext) -> None:
        super().__init__(context)
        self.method = method
        self.residual = LocalResidual(context.device)
        self._step = -1
        # by bucket index, of step `_step`
        self._sent: dict[int, tuple[SignFormat, Tensor, Tensor]] = {}

    def stages(self, bucket: Bucket) -> Stages:
        """Exchange `bucket` by one all-gather on ``groups.world[0]``."""
        if bucket.step != self._step:
            self._step, self._sent = bucket.step, {}
        if self.method.is_dense_step(bucket.step):
            return (yield from self.dense_stages(bucket))
        exempt, form = self.start_exempt(bucket), SignFormat(bucket.layout)
        rows = torch.empty(
            (self.topology.world_size, form.nbytes), dtype=torch.uint8, device=self.device
        )
        if form.slices:
            own = self._encode(bucket, form)
            self.count_ring(rows.nbytes, passes=1)
            yield together(ring_all_gather(rows, own, group=self.groups.world[0]), exempt)
            if not is_finite(form.scales(rows)):
                raise NonFiniteGradient(not is_finite(form.scales(own)))
        else:
            yield together(exempt)
        mean = exempt.mean() if exempt is not None else None
        self._write_mean(bucket, form, rows)
        if exempt is not None and mean is not None:
            exempt.write(mean)
        return bucket.buffer

    def _encode(self, bucket: Bucket, form: SignFormat) -> Tensor:
        """This rank's message; what it leaves out stays in the residual."""
        if not is_finite(bucket.buffer):
            return form.nonfinite(device=self.device)
        if not self.method.error_feedback:
            return form.encode(bucket.buffer / bucket.loss_scale)
        residual = self.residual.flat(bucket)
        residual.add_(bucket.buffer, alpha=1 / bucket.loss_scale)
        message = form.encode(residual)
        if is_finite(form.scales(message)):
            self._sent[bucket.index] = (form, message, residual)
        return message

    def _write_mean(self, bucket: Bucket, form: SignFormat, rows: Tensor) -> None:
        in_place = bucket.buffer.dtype == torch.float32
        total = (
            bucket.buffer.zero_()
            if in_place
            else torch.zeros(bucket.buffer.shape, device=self.device)
        )
        for row in rows:
            form.add_decoded(row, to=total, scale=bucket.loss_scale / self.topology.world_size)
        if not in_place:
            bucket.buffer.copy_(total)

    def put_back(self) -> None:
        """Put back into the residual what the last step sent."""
        for form, message, residual in self._sent.values():
            form.add_decoded(message, to=residual, scale=1)
        self._sent.clear()

    def residual_norm(self) -> float:
        """Return the L2 norm of this rank's residual."""
        return self.residual.norm()

    def state_dict(self) -> dict[str, dict[str, Tensor]]:
        """Return "residual": name -> (numel,)."""
        return {"residual": self.residual.state_dict()}

    def load_state_dict(self, state: dict[str, dict[str, Tensor]]) -> None:
        """Take over residuals by name."""
        self._sent.clear()
        self.residual.load_state_dict(state.get("residual", {}))


@dataclass(frozen=True, kw_only=True)
class Sign(FeedbackMethod):
    """One bit per entry and a scale per parameter."""

    name: ClassVar[str] = "sign"
    process_bytes: ClassVar[int] = COMPILED_BYTES

    @property
    @override
    def words(self) -> str:
        return "1 bit per entry" + self.feedback_words

    @override
    def make_exchange(self, context: ExchangeContext) -> SignExchange:
        return SignExchange(self, context)

    @override
    def work(self, gradients: BucketGradients, topology: Topology) -> Work:
        parts, ranks, exempt = gradients.compressible, topology.world_size, gradients.exempt_bytes
        nbytes = SignFormat(gradients.layout).nbytes
        state = 4 * gradients.numel + nbytes  # without feedback it is made anew each time
        decoded = ranks * (8 * gradients.compressible_numel + nbytes)
        return Work(
            2 * gradients.nbytes + 20 * gradients.numel + decoded + EXEMPT_PASSES * exempt,
            ENCODE_CALLS + parts * (1 + ranks),
            (("world", "all_gather", ranks * nbytes),) if parts else (),
            kept_bytes=state if self.error_feedback else 0.0,
            buffer_bytes=ranks * nbytes + exempt + (0.0 if self.error_feedback else state),
            exempt_bytes=exempt,
        )

"""Sign: one bit per gradient element, with error feedback.

Seide et al., "1-bit SGD", Interspeech 2014; EF-signSGD, Karimireddy et al., arXiv 1901.09847,
algorithm 2, with one scale per parameter:

    pending = gradient + residual
    sent = mean|pending| * sign(pending), per parameter
    residual = pending - sent

A message is one float32 scale per parameter, then the bits. All ranks gather all messages, decode
them in rank order and take the mean. The sign of zero counts as plus. Bits are packed by
`wire_kernels` on a CPU (plain torch takes about five times as long), by torch elsewhere: there
scales stay on the device, and the messages of all ranks are decoded at once.

    bytes moved on the device     collectives          function
    (2 s + 20) n + W (8 n + b)    all_gather(W b)      Sign.work
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from lightning_topt.communication.bucket import (
    Bucket,
    BucketExchange,
    BucketLayout,
    ExchangeContext,
    Stages,
    device_finite_flag,
    finite_flag,
    is_finite,
    together,
)
from lightning_topt.communication.collectives import ring_all_gather
from lightning_topt.communication.exchange_method import (
    COMPILED_BYTES,
    ENCODE_CALLS,
    EXEMPT_PASSES,
    BucketGradients,
    FeedbackMethod,
    Work,
)
from lightning_topt.communication.residual import LocalResidual
from lightning_topt.communication.topology import Topology
from lightning_topt.communication.wire import pack_bits, unpack_codes
from lightning_topt.communication.wire_kernels import add_sign_bits, sum_magnitudes, take_sign_bits

SCALE_BYTES = 4
_SIGNS_AT_ONCE = 1 << 24  # that a device decodes; each takes a few bytes meanwhile


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


class SignExchange(BucketExchange):
    """One bit per element. State: "residual" of this rank.

    Exempt parameters travel beside it, by an all-reduce.
    """

    def __init__(self, method: Sign, context: ExchangeContext) -> None:
        super().__init__(context)
        self.method = method
        self.residual = LocalResidual(context.device)
        self._step = -1
        # of step `_step`, by bucket index: format, message, residual
        self._sent: dict[int, tuple[SignFormat, Tensor, Tensor]] = {}

    def stages(self, bucket: Bucket) -> Stages:
        """Exchange `bucket` by one all-gather on ``groups.world[0]``."""
        # what was sent is kept until the next step, for `put_back`
        if bucket.step != self._step:
            self._step, self._sent = bucket.step, {}
        if self.method.is_dense_step(bucket.step):
            return (yield from self.dense_stages(bucket))
        # exempt parameters go their own way; all others in one message per rank (ranks, bytes)
        exempt = self.start_exempt(bucket)
        form = SignFormat(bucket.layout, on_device=bucket.checks is not None)
        rows = torch.empty(
            (self.topology.world_size, form.nbytes), dtype=torch.uint8, device=self.device
        )
        if form.slices:
            own = self._encode(bucket, form)
            self.count_ring(rows.nbytes, passes=1)
            yield together(ring_all_gather(rows, own, group=self.groups.world[0]), exempt)
            bucket.check_finite(form.scales(rows), own=finite_flag(form.scales(own)))
        else:
            yield together(exempt)
        # decode in rank order, then put the exempt parameters where they are
        mean = exempt.mean(at_once=False) if exempt is not None else None
        self._write_mean(bucket, form, rows)
        if exempt is not None and mean is not None:
            exempt.write(mean)
        return bucket.buffer

    def _encode(self, bucket: Bucket, form: SignFormat) -> Tensor:
        """Return this rank's message; what it leaves out stays in the residual."""
        if form.on_device:
            return self._encode_on_device(bucket, form)
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

    def _encode_on_device(self, bucket: Bucket, form: SignFormat) -> Tensor:
        """Do the same and ask the device nothing: what is not finite adds zeros and sends NaN."""
        finite = device_finite_flag(bucket.buffer)
        gradient = torch.where(finite, bucket.buffer, 0)
        if not self.method.error_feedback:
            return form.encode_on_device(gradient / bucket.loss_scale, finite=finite)
        residual = self.residual.flat(bucket)
        residual.add_(gradient, alpha=1 / bucket.loss_scale)
        message = form.encode_on_device(residual, finite=finite)
        self._sent[bucket.index] = (form, message, residual)
        return message

    def _write_mean(self, bucket: Bucket, form: SignFormat, rows: Tensor) -> None:
        """Write the mean of all messages (ranks, bytes) to the bucket, in its dtype."""
        in_place = bucket.buffer.dtype == torch.float32
        if in_place:
            total = bucket.buffer.zero_()
        else:
            total = torch.zeros(bucket.buffer.shape, device=self.device)
        form.add_decoded(rows, to=total, scale=bucket.loss_scale / self.topology.world_size)
        if not in_place:
            bucket.buffer.copy_(total)

    def put_back(self) -> None:
        """Put back into the residual what the last step sent."""
        for form, message, residual in self._sent.values():
            form.add_decoded(message.unsqueeze(0), to=residual, scale=1)
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


class SignFormat:
    """Messages about the parameters that are not exempt.

    One float32 scale each, then bits; each parameter starts at a new byte. `on_device`: messages
    are made and read without the host, which does not wait for them.
    """

    def __init__(self, layout: BucketLayout, *, on_device: bool = False) -> None:
        self.on_device = on_device
        self.slices = [
            part for part, exempt in zip(layout.slices, layout.exempt, strict=True) if not exempt
        ]
        # scales, then the bits of each parameter
        cuts = [SCALE_BYTES * len(self.slices)]
        for part in self.slices:
            cuts.append(cuts[-1] + packed_bytes(part.stop - part.start))
        self.bits = [slice(start, stop) for start, stop in pairwise(cuts)]
        # padded, so that the scales of every row of a gather are aligned
        self.nbytes = -(-cuts[-1] // SCALE_BYTES) * SCALE_BYTES

    def encode(self, pending: Tensor) -> Tensor:
        """Return the message (nbytes,), uint8, about `pending` (n,) in bucket layout.

        `pending` keeps what the message leaves out. Where it is not finite, the message says so (a
        scale is not finite) and `pending` stays.
        """
        message = torch.zeros(self.nbytes, dtype=torch.uint8, device=pending.device)
        parts = [pending[part] for part in self.slices]
        # NaN and infinities reach the scales, which the message keeps
        self.scales(message).copy_(mean_abs(parts))
        scales = self.scales(message)
        if is_finite(scales):
            for part, bits, step in zip(parts, self.bits, scales, strict=True):
                take_signs(part, step=step, packed=message[bits])
        return message

    def encode_on_device(self, pending: Tensor, *, finite: Tensor) -> Tensor:
        """Do what `encode` does where `finite` () bool; else return what `nonfinite` says."""
        message = torch.zeros(self.nbytes, dtype=torch.uint8, device=pending.device)
        parts = [pending[part] for part in self.slices]
        means = mean_abs(parts)
        finite = finite & means.isfinite().all()
        self.scales(message).copy_(torch.where(finite, means, torch.nan))
        # steps of zero leave everything pending
        steps = torch.where(finite, means, 0).unbind()
        for part, bits, step in zip(parts, self.bits, steps, strict=True):
            take_signs_torch(part, step=step, packed=message[bits])
        return message

    def nonfinite(self, *, device: torch.device) -> Tensor:
        """Return the message of a rank whose gradient is not finite: its scales are NaN."""
        message = torch.zeros(self.nbytes, dtype=torch.uint8, device=device)
        self.scales(message).fill_(torch.nan)
        return message

    def scales(self, messages: Tensor) -> Tensor:
        """Return the scales (..., parameters) in messages (..., nbytes)."""
        return messages.view(torch.float32)[..., : len(self.slices)]

    def add_decoded(self, messages: Tensor, *, to: Tensor, scale: float) -> None:
        """Add scale * what messages (ranks, nbytes) say to `to` (n,), in the order of ranks.

        On the device a message of a gradient that is not finite adds nothing.
        """
        scales = self.scales(messages)  # (ranks, parameters)
        add, steps = add_signs, scales * scale
        if self.on_device:
            add, steps = add_signs_torch, scales.nan_to_num(nan=0.0) * scale
        for index, (part, bits) in enumerate(zip(self.slices, self.bits, strict=True)):
            add(messages[:, bits], steps=steps[:, index], values=to[part])


def mean_abs(parts: Sequence[Tensor]) -> Tensor:
    """Return the mean absolute value of each of several flat tensors, float32 (parts,).

    That of an empty one is 0.
    """
    if parts[0].device.type == "cpu":
        means = [sum_magnitudes(part.numpy()) / max(1, part.numel()) for part in parts]
        return torch.tensor(means, dtype=torch.float32)
    numels = [max(1, part.numel()) for part in parts]
    # numbers travel with the launch; a tensor of them would be a copy that the host waits for
    norms = torch._foreach_norm(list(parts), 1)
    return torch.stack(torch._foreach_div(norms, [float(numel) for numel in numels]))


def take_signs(values: Tensor, *, step: Tensor, packed: Tensor) -> None:
    """Write the signs of `values` (n,) into `packed`, and do ``values -= step * sign``.

    `packed` has packed_bytes(n) bytes. A bit is 1 for a negative value, the first in the lowest
    bit; the last byte is filled with 0. The sign of 0 is plus.
    """
    if values.device.type == "cpu":
        take_sign_bits(values.numpy(), np.float32(step.item()), packed.numpy())
    else:
        take_signs_torch(values, step=step, packed=packed)


def add_signs(packed: Tensor, *, steps: Tensor, values: Tensor) -> None:
    """Do ``values += step * sign`` (n,) for each rank.

    Its signs are in `packed` (ranks, packed_bytes(n)), its step in `steps` (ranks,).
    """
    if values.device.type != "cpu":
        add_signs_torch(packed, steps=steps, values=values)
        return
    for row, step in zip(packed, steps.tolist(), strict=True):
        add_sign_bits(row.numpy(), np.float32(step), values.numpy())


def take_signs_torch(values: Tensor, *, step: Tensor, packed: Tensor) -> None:
    """Do what `take_signs` does, on any device."""
    negative = values < 0
    bits = torch.zeros(8 * packed.numel(), dtype=torch.uint8, device=values.device)
    bits[: values.numel()] = negative
    packed.copy_(pack_bits(bits))
    values.add_(torch.where(negative, step, -step))


def add_signs_torch(packed: Tensor, *, steps: Tensor, values: Tensor) -> None:
    """Do what `add_signs` does, on any device, with room for so many signs at a time."""
    ranks, nbytes = packed.shape
    at_once, steps = max(1, _SIGNS_AT_ONCE // (8 * ranks)), steps.unsqueeze(1)
    for start in range(0, nbytes, at_once):
        part = values[8 * start : 8 * (start + at_once)]
        # (ranks, signs): the bytes of one rank begin where those of the one before end
        bits = unpack_codes(packed[:, start : start + at_once].reshape(-1), 1, 8 * packed.numel())
        negative = bits.view(ranks, -1)[:, : part.numel()].bool()
        part.add_(torch.where(negative, -steps, steps).sum(dim=0))


def packed_bytes(count: int) -> int:
    """Return the bytes of the bits of `count` values."""
    return -(-count // 8)

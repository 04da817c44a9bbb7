"""The flat and the hierarchical sparse exchange share residuals, the sizes of messages and the
choice of dense buckets.
"""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor

from lightning_topt.communication.bucket import Bucket, BucketExchange, ExemptMean
from lightning_topt.communication.exchange_context import ExchangeContext
from lightning_topt.communication.level_message import LevelMessage, message_of_share
from lightning_topt.communication.levels import warm_up_levels
from lightning_topt.communication.methods.top_k.top_k_options import TopKOptions
from lightning_topt.communication.residual import BucketResidual, FeedbackRule, ResidualStore, State
from lightning_topt.communication.selection import NonFiniteError, warm_up
from lightning_topt.communication.wire import MessageFormat, warm_up_wire

Form = MessageFormat | LevelMessage


class FeedbackExchange(BucketExchange):
    """Sends the largest entries and keeps the rest."""

    def __init__(self, options: TopKOptions, context: ExchangeContext) -> None:
        super().__init__(context)
        self.options = options
        self.store = ResidualStore(
            FeedbackRule(options.error_feedback, options.momentum, options.selection)
        )
        self.value_dtype: torch.dtype = getattr(torch, options.value_dtype)

    def message_format(self, bucket: Bucket, *, start: int, stop: int) -> Form:
        """Return the message for elements `start` to `stop`: the share `density` of those that are
        not exempt, at least one.
        """
        return message_of_share(
            stop - start,
            compressible=bucket.layout.compressible(start, stop),
            density=self.options.density_at(bucket.step),
            value_dtype=self.value_dtype,
            bits=self.options.bits,
        )

    @abstractmethod
    def sparse_seconds(self, bucket: Bucket) -> float:
        """Return the predicted seconds on the network of ``options.link`` for a sparse bucket."""

    @abstractmethod
    def dense_seconds(self, bucket: Bucket) -> float:
        """Return the predicted seconds on the network of ``options.link`` for a whole bucket."""

    def is_dense(self, bucket: Bucket) -> bool:
        """Return whether the bucket is sent whole; the same on all ranks."""
        if self.options.is_dense_step(bucket.step):
            return True
        return self.options.link is not None and self.dense_seconds(bucket) <= self.sparse_seconds(
            bucket
        )

    def select_into(
        self, message: Tensor, gradient: Tensor, *, entry: BucketResidual, form: Form, scale: float
    ) -> None:
        """Select from ``scale * gradient`` and what is held back, and write the message; it says so
        where not finite.
        """
        if not form.k:
            form.pack(gradient[:0], gradient[:0].long(), out=message)
            return
        try:
            chosen = entry.select(gradient, form.k, scale=scale)
        except NonFiniteError:
            form.pack_nonfinite(out=message)
        else:
            form.pack(chosen.values, chosen.indices, out=message)
            if self.value_dtype != torch.float32 or self.options.bits is not None:
                entry.hold_back_rounding(form.values(message))

    def finish(self, bucket: Bucket, *, entry: BucketResidual, exempt: ExemptMean | None) -> Tensor:
        """Add the exempt parameters, the last thing in a bucket. Raises `NonFiniteGradient`."""
        if exempt is not None:
            exempt.write(entry.with_momentum(exempt.mean(), loss_scale=bucket.loss_scale), add=True)
        return bucket.buffer

    def warm_up(self) -> None:
        """Compile the selection."""
        if self.device.type == "cpu":
            warm_up()
            warm_up_wire()
            if self.options.bits is not None:
                warm_up_levels(self.options.bits)

    def put_back(self) -> None:
        """Put back into the residual what the last step sent."""
        self.store.put_back()

    def residual_norm(self) -> float:
        """Return the L2 norm of this rank's residuals."""
        return self.store.norm()

    def prepare(self, bucket: Bucket) -> bool:
        """Return whether the bucket is laid out as it was."""
        return self.store.fits(bucket)

    def relayout(self) -> None:
        """Residuals go by name to the new buckets, nothing is lost."""
        self.store.replace(self.state_dict())

    def state_dict(self) -> State:
        """Return the residual and velocity of this rank, or of its node, by name."""
        return self.store.collect(self.whole)

    @abstractmethod
    def whole(self, entry: BucketResidual, flat: Tensor) -> Tensor:
        """Return a bucket's residual (n,) from this rank's elements of it."""

    def load_state_dict(self, state: State) -> None:
        """Take over residuals by name."""
        self.store.replace(state)


class ScatterMean:
    """Adds up unpacked messages in the order of `add` into a bucket's buffer, in float32."""

    def __init__(self, buffer: Tensor, *, scale: float) -> None:
        self.buffer, self.scale = buffer, scale
        self.total = (
            buffer
            if buffer.dtype == torch.float32
            else torch.empty(buffer.shape, device=buffer.device)
        )
        self.total.zero_()

    def add(self, message: Tensor, *, form: Form, start: int = 0) -> None:
        """Add one message about the elements from `start`."""
        _, values, indices = form.unpack(message)
        self.total[start : start + form.numel].index_add_(0, indices, values.mul_(self.scale))

    def write(self) -> None:
        """Write the sum to the buffer, in its dtype."""
        if self.total is not self.buffer:
            self.buffer.copy_(self.total)

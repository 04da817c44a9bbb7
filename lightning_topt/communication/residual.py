"""What was not sent yet, per parameter: residuals, found again by name.

Units: the gradient without loss scale, averaged over the ranks of a node where the exchange sums
them first. The mean over all ranks (or nodes) of their residuals is thus what the model still has
to receive, whoever has it; a change of the world size gives each that mean. Residuals are kept
flat, in the layout of the bucket, and saved by parameter name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lightning_topt.communication.bucket import Bucket, BucketLayout, is_finite
from lightning_topt.communication.selection import NonFiniteError, Selection, feedback_top_k, top_k

RESIDUAL = "residual"
State = dict[str, dict[str, Tensor]]  # kind -> parameter name -> (numel,) in memory order


@dataclass(frozen=True)
class FeedbackRule:
    """How residuals grow and shrink: the options of these names of `TopK`."""

    error_feedback: bool = True
    selection: str = "auto"


class ResidualStore:
    """The residuals of all buckets of this rank.

    When buckets are laid out anew, residuals are found again by parameter name.
    """

    def __init__(self, rule: FeedbackRule) -> None:
        self.rule = rule
        self.buckets: dict[int, BucketResidual] = {}
        self.unplaced: State = {}  # loaded, or of a former layout; waiting for their bucket

    def fits(self, bucket: Bucket) -> bool:
        """Return whether the bucket is laid out as it was."""
        known = self.buckets.get(bucket.index)
        return known is None or known.layout is bucket.layout

    def open(self, bucket: Bucket, *, start: int, stop: int) -> BucketResidual:
        """Start a step: return the residual of elements `start` to `stop` of the bucket."""
        if bucket.index not in self.buckets:
            self.buckets[bucket.index] = self._place(bucket, start, stop)
        entry = self.buckets[bucket.index]
        assert (entry.start, entry.stop) == (start, stop) and entry.layout is bucket.layout
        entry.begin()
        return entry

    def _place(self, bucket: Bucket, start: int, stop: int) -> BucketResidual:
        # A new bucket's residual, with what waits for its parameters by name
        zeros = torch.zeros(stop - start, device=bucket.buffer.device)
        waiting, is_found = self.unplaced.get(RESIDUAL, {}), False
        for name, (first, part) in named_parts(bucket.layout, zeros, start=start).items():
            if name in waiting:
                part.copy_(waiting[name][first : first + part.numel()])
                is_found = True
        # what has found its bucket waits no more
        for name in bucket.layout.names:
            waiting.pop(name, None)
        return BucketResidual(
            self.rule, bucket.layout, start, stop, residual=zeros if is_found else None
        )

    def collect(self, complete: Callable[[BucketResidual, Tensor], Tensor]) -> State:
        """Return everything by name.

        `complete` makes a full bucket (n,) from the elements of this rank.
        """
        # what still waits for its bucket, then what the buckets have
        state: State = {kind: dict(tensors) for kind, tensors in self.unplaced.items()}
        for index in sorted(self.buckets):
            entry = self.buckets[index]
            if (flat := entry.pending()) is not None:
                parts = named_parts(entry.layout, complete(entry, flat))
                state.setdefault(RESIDUAL, {}).update(
                    {name: part.clone() for name, (_, part) in parts.items()}
                )
        return state

    def replace(self, state: State) -> None:
        """Forget all buckets; `state` waits for new ones."""
        self.buckets.clear()
        self.unplaced = {kind: dict(tensors) for kind, tensors in state.items()}

    def put_back(self) -> None:
        """Put back what the last step sent: that step was thrown away."""
        for entry in self.buckets.values():
            entry.put_back()

    def norm(self) -> float:
        """Return the L2 norm of everything that was not sent."""
        pending = [entry.pending() for entry in self.buckets.values()]
        total = sum(float(torch.dot(flat, flat)) for flat in pending if flat is not None)
        return float(total**0.5)


@dataclass
class BucketResidual:
    """Elements `start` to `stop` of one bucket: what this rank has not sent of them."""

    rule: FeedbackRule
    layout: BucketLayout
    start: int
    stop: int
    residual: Tensor | None = None  # (stop - start,) float32; None: zeros
    spent: bool = False  # all of the residual was sent: it reads as zeros
    # of the last step, as the others received it
    sent: Selection | None = field(default=None, repr=False)

    def begin(self) -> None:
        """Begin a new step: what the last one sent has arrived."""
        if self.spent and self.residual is not None:
            self.residual.zero_()
        self.spent, self.sent = False, None

    def select(self, gradient: Tensor, k: int, *, scale: float) -> Selection:
        """Add ``scale * gradient`` (stop - start,) and take the `k` largest out.

        Values are float32, indices ascend. Raises NonFiniteError; the residual is then as before.
        """
        rule = self.rule
        if not rule.error_feedback:
            chosen = top_k(gradient, k, method=rule.selection)
            return Selection(chosen.values.float() * scale, chosen.indices)
        residual = self.allocated(gradient)
        if rule.selection == "auto":  # all in one pass
            chosen = feedback_top_k(gradient, residual, k, scale=scale)
        else:
            if not is_finite(gradient):
                raise NonFiniteError("the gradient has NaN or infinities")
            residual.add_(gradient, alpha=scale)
            chosen = top_k(residual, k, method=rule.selection)
            residual.index_fill_(0, chosen.indices.long(), 0)
        self.sent = chosen
        return chosen

    def keep_rounding(self, arrived: Tensor) -> None:
        """Add to the residual what rounding took from the entries of `select`.

        `arrived` (k,), float32, is what arrives of them.
        """
        if self.rule.error_feedback:
            assert self.residual is not None and self.sent is not None
            values, indices = self.sent
            self.residual.index_add_(0, indices, values - arrived)
            self.sent = Selection(arrived, indices)

    def allocated(self, like: Tensor) -> Tensor:
        """Return the residual (stop - start,), zeros at first."""
        if self.residual is None:
            self.residual = torch.zeros(self.stop - self.start, device=like.device)
        return self.residual

    def everything(self, gradient: Tensor, *, scale: float) -> Tensor:
        """Return all that is pending, to be sent whole: ``scale * gradient`` (stop - start,) too.

        The residual then reads as zeros. Returns `gradient` itself where nothing else is pending
        and `scale` is 1.
        """
        if self.residual is None:
            return gradient if scale == 1 else gradient.float() * scale
        self.spent = True
        return self.residual.add_(gradient, alpha=scale)

    def put_back(self) -> None:
        """Put back what the last step sent, which was thrown away."""
        if self.sent is not None and self.residual is not None:
            self.residual.index_add_(0, self.sent.indices, self.sent.values)
        self.spent, self.sent = False, None

    def pending(self) -> Tensor | None:
        """Return the residual, None where it is zero."""
        return None if self.spent else self.residual


def named_parts(layout: BucketLayout, flat: Tensor, *, start: int = 0) -> dict[str, Any]:
    """Return (first element in the parameter, values) of `flat`, per parameter touched.

    `flat` holds elements from `start` of a bucket.
    """
    parts: dict[str, Any] = {}
    for name, offset, numel in zip(layout.names, layout.offsets, layout.numels, strict=True):
        first, last = max(offset, start), min(offset + numel, start + flat.numel())
        if first < last:
            parts[name] = (first - offset, flat[first - start : last - start])
    return parts

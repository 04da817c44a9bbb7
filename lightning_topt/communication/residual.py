"""Residuals are what was not sent yet, per parameter: error feedback with momentum correction and
factor masking.

Units: the gradient without loss scale, averaged over the ranks of a node where the exchange sums
them first. The mean over all holders of a residual is thus what the model still has to receive,
whoever holds it; a change of the world size gives every holder that mean. It is kept flat, in the
layout of the bucket (or of this rank's shard of it), and saved by parameter name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lightning_topt.communication.bucket import Bucket, BucketLayout, is_finite, named_parts
from lightning_topt.communication.selection import NonFiniteError, Selection, feedback_top_k, top_k

RESIDUAL, VELOCITY = "residual", "velocity"
State = dict[str, dict[str, Tensor]]  # kind -> parameter name -> (numel,) in memory order


@dataclass(frozen=True)
class FeedbackRule:
    """A rule says how residuals grow and shrink: the options of these names of `TopK`."""

    error_feedback: bool = True
    momentum: float = 0.0
    selection: str = "auto"


@dataclass
class BucketResidual:
    """Elements `start` to `stop` of one bucket: what this rank holds back of them."""

    rule: FeedbackRule
    layout: BucketLayout
    start: int
    stop: int
    residual: Tensor | None = None  # (stop - start,) float32; None: zeros
    velocity: Tensor | None = None  # (stop - start,) float32; with momentum correction
    # (exempt elements,) of the whole bucket; equal on all ranks
    exempt_velocity: Tensor | None = None
    spent: bool = False  # all of the residual was sent: it reads as zeros
    # of the last step, as the others received it
    sent: Selection | None = field(default=None, repr=False)

    def begin(self) -> None:
        """Begin a new step: what the last one sent has arrived."""
        if self.spent and self.residual is not None:
            self.residual.zero_()
        self.spent, self.sent = False, None

    def select(self, gradient: Tensor, k: int, *, scale: float) -> Selection:
        """Add ``scale * gradient`` (stop - start,) and take the `k` largest out: float32 values,
        indices ascending.

        Raises NonFiniteError, the residual as before.
        """
        chosen = self._choose(gradient, k, scale=scale)
        if self.rule.error_feedback:
            self.sent = chosen
        return chosen

    def hold_back_rounding(self, arrived: Tensor) -> None:
        """Add to the residual what the entries of `select` lost on their way, where `arrived` (k,),
        float32, of them.
        """
        if self.rule.error_feedback:
            assert self.residual is not None and self.sent is not None
            values, indices = self.sent
            self.residual.index_add_(0, indices, values - arrived)
            self.sent = Selection(arrived, indices)

    def _choose(self, gradient: Tensor, k: int, *, scale: float) -> Selection:
        rule = self.rule
        if not rule.error_feedback:
            chosen = top_k(gradient, k, method=rule.selection)
            return Selection(chosen.values.float() * scale, chosen.indices)
        residual, velocity = self._allocated(gradient)
        if rule.selection == "auto":
            return feedback_top_k(
                gradient, residual, k, scale=scale, velocity=velocity, momentum=rule.momentum
            )
        if not is_finite(gradient):
            raise NonFiniteError("the gradient has NaN or infinities")
        self._accumulate(gradient, scale=scale)
        chosen = top_k(residual, k, method=rule.selection)
        for tensor in (residual, velocity):
            if tensor is not None:
                tensor[chosen.indices] = 0
        return chosen

    def _allocated(self, like: Tensor) -> tuple[Tensor, Tensor | None]:
        def zeros() -> Tensor:
            return torch.zeros(self.stop - self.start, device=like.device)

        if self.residual is None:
            self.residual = zeros()
        if self.rule.momentum and self.velocity is None:
            self.velocity = zeros()
        return self.residual, self.velocity

    def _accumulate(self, gradient: Tensor, *, scale: float) -> None:
        assert self.residual is not None
        if self.velocity is None:
            self.residual.add_(gradient, alpha=scale)
        else:
            self.velocity.mul_(self.rule.momentum).add_(gradient, alpha=scale)
            self.residual.add_(self.velocity)

    def everything(self, gradient: Tensor, *, scale: float) -> Tensor:
        """Return all that is pending, ``scale * gradient`` (stop - start,) included: sent whole, so
        the residual reads as zeros.

        `gradient` itself where nothing else is pending and `scale` is 1. Factor masking would
        forget all momentum here, so the velocity is kept: the mean of the velocities is the
        ordinary momentum of the mean gradient.
        """
        if self.residual is None and not self.rule.momentum:
            return gradient if scale == 1 else gradient.float() * scale
        residual, _ = self._allocated(gradient)
        self._accumulate(gradient, scale=scale)
        self.spent = True
        return residual

    def with_momentum(self, mean: Tensor, *, loss_scale: float) -> Tensor:
        """Return the packed mean of the exempt parameters, with ordinary momentum where the rest
        has it.
        """
        if not self.rule.momentum:
            return mean
        if self.exempt_velocity is None:
            self.exempt_velocity = torch.zeros(mean.numel(), device=mean.device)
        self.exempt_velocity.mul_(self.rule.momentum).add_(mean, alpha=1 / loss_scale)
        return (self.exempt_velocity * loss_scale).to(mean.dtype)

    def put_back(self) -> None:
        """Hold back again what the last step sent, which was thrown away (a velocity that was
        masked stays zero).
        """
        if self.sent is not None and self.residual is not None:
            self.residual.index_add_(0, self.sent.indices, self.sent.values)
        self.spent, self.sent = False, None

    def pending(self) -> Tensor | None:
        """Return the residual, None where it is zero."""
        return None if self.spent else self.residual


class ResidualStore:
    """The residuals of all buckets of this rank, found again by name when buckets are laid out
    anew.
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
        """Return what is held back of elements `start` to `stop` of the bucket, at the beginning of
        a step.
        """
        if bucket.index not in self.buckets:
            self.buckets[bucket.index] = self._place(bucket, start, stop)
        entry = self.buckets[bucket.index]
        assert (entry.start, entry.stop) == (start, stop) and entry.layout is bucket.layout
        entry.begin()
        return entry

    def _place(self, bucket: Bucket, start: int, stop: int) -> BucketResidual:
        layout = bucket.layout
        entry = BucketResidual(self.rule, layout, start, stop)
        zeros = torch.zeros(stop - start, device=bucket.buffer.device)
        entry.residual = self._filled(RESIDUAL, layout, start, zeros, frozenset())
        if self.rule.momentum:
            known = self.unplaced.get(VELOCITY, {})
            exempt = [
                name
                for name, is_exempt in zip(layout.names, layout.exempt, strict=True)
                if is_exempt
            ]
            entry.velocity = self._filled(
                VELOCITY, layout, start, torch.zeros_like(zeros), frozenset(exempt)
            )
            if exempt and all(name in known for name in exempt):
                entry.exempt_velocity = torch.cat([known[name].to(zeros.device) for name in exempt])
        for tensors in self.unplaced.values():
            for name in layout.names:
                tensors.pop(name, None)
        return entry

    def _filled(
        self, kind: str, layout: BucketLayout, start: int, zeros: Tensor, without: frozenset[str]
    ) -> Tensor | None:
        """Return what waits for elements of this bucket, in `zeros`; None if nothing does."""
        tensors, found = self.unplaced.get(kind, {}), False
        for name, (first, part) in named_parts(layout, zeros, start=start).items():
            if name in tensors and name not in without:
                part.copy_(tensors[name][first : first + part.numel()])
                found = True
        return zeros if found else None

    def collect(self, complete: Callable[[BucketResidual, Tensor], Tensor]) -> State:
        """Return everything by name; `complete` makes a whole bucket (n,) from the elements of this
        rank.
        """
        state: State = {kind: dict(tensors) for kind, tensors in self.unplaced.items()}
        for index in sorted(self.buckets):
            entry = self.buckets[index]
            for kind, flat in ((RESIDUAL, entry.pending()), (VELOCITY, entry.velocity)):
                if flat is not None:
                    parts = named_parts(entry.layout, complete(entry, flat))
                    state.setdefault(kind, {}).update(
                        {name: part.clone() for name, (_, part) in parts.items()}
                    )
            if entry.exempt_velocity is not None:
                layout = entry.layout
                exempt = {
                    n: s
                    for n, s, e in zip(layout.names, layout.numels, layout.exempt, strict=True)
                    if e
                }
                parts_of = entry.exempt_velocity.split_with_sizes(list(exempt.values()))
                named = {name: part.clone() for name, part in zip(exempt, parts_of, strict=True)}
                state.setdefault(VELOCITY, {}).update(named)
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
        """Return the L2 norm of all that is held back."""
        pending = [entry.pending() for entry in self.buckets.values()]
        total = sum(float(torch.dot(flat, flat)) for flat in pending if flat is not None)
        return float(total**0.5)

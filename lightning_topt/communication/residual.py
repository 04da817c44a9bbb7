"""What was not sent yet, per parameter: residuals, found again by name.

Units: the gradient without loss scale, averaged over the ranks of a node where the exchange sums
them first. The mean over all ranks (or nodes) of their residuals is thus what the model still has
to receive, whoever has it; a change of the world size gives each that mean. Residuals are kept
flat, in the layout of the bucket, and saved by parameter name. Two kinds:

- `ResidualStore`, of `BucketResidual`: error feedback around a selection, with momentum correction
  and factor masking, of a whole bucket or of this rank's shard of it;
- `LocalResidual`: one value per gradient element of whole buckets; buckets may be laid out anew
  while others are in flight.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lightning_topt.communication.bucket import Bucket, BucketLayout, is_finite
from lightning_topt.communication.selection import NonFiniteError, Selection, feedback_top_k, top_k

RESIDUAL, VELOCITY = "residual", "velocity"
State = dict[str, dict[str, Tensor]]  # kind -> parameter name -> (numel,) in memory order


@dataclass(frozen=True)
class FeedbackRule:
    """How residuals grow and shrink: the options of these names of `TopK`."""

    error_feedback: bool = True
    momentum: float = 0.0
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
        """Return a new bucket's residual, with what waits for its parameters by name."""
        layout = bucket.layout
        entry = BucketResidual(self.rule, layout, start, stop)
        zeros = torch.zeros(stop - start, device=bucket.buffer.device)
        entry.residual = self._filled(RESIDUAL, layout, start, zeros, frozenset())
        if self.rule.momentum:
            known = self.unplaced.get(VELOCITY, {})
            named = zip(layout.names, layout.exempt, strict=True)
            exempt = [name for name, is_exempt in named if is_exempt]
            # exempt parameters have a velocity of the whole bucket, equal on all ranks
            entry.velocity = self._filled(
                VELOCITY, layout, start, torch.zeros_like(zeros), frozenset(exempt)
            )
            if exempt and all(name in known for name in exempt):
                entry.exempt_velocity = torch.cat([known[name].to(zeros.device) for name in exempt])
        # what has found its bucket waits no more
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
        """Return everything by name.

        `complete` makes a full bucket (n,) from the elements of this rank.
        """
        # what still waits for its bucket, then what the buckets have
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
                sizes = zip(layout.names, layout.numels, layout.exempt, strict=True)
                exempt = {name: numel for name, numel, is_exempt in sizes if is_exempt}
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
        """Add ``scale * gradient`` (stop - start,) and take the `k` largest out.

        Values are float32, indices ascend. Raises NonFiniteError; the residual is then as before.
        """
        chosen = self._choose(gradient, k, scale=scale)
        if self.rule.error_feedback:
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

    def _choose(self, gradient: Tensor, k: int, *, scale: float) -> Selection:
        """Accumulate and select; by `feedback_top_k` in one pass, where the selection is "auto"."""
        rule = self.rule
        if not rule.error_feedback:
            chosen = top_k(gradient, k, method=rule.selection)
            return Selection(chosen.values.float() * scale, chosen.indices)
        residual, velocity = self._allocated(gradient)
        # all in one pass, or one step after the other
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
                tensor.index_fill_(0, chosen.indices.long(), 0)
        return chosen

    def _allocated(self, like: Tensor) -> tuple[Tensor, Tensor | None]:
        numel = self.stop - self.start
        if self.residual is None:
            self.residual = torch.zeros(numel, device=like.device)
        if self.rule.momentum and self.velocity is None:
            self.velocity = torch.zeros(numel, device=like.device)
        return self.residual, self.velocity

    def _accumulate(self, gradient: Tensor, *, scale: float) -> None:
        """Do ``residual += scale * gradient``, or the same through the velocity."""
        assert self.residual is not None
        if self.velocity is None:
            self.residual.add_(gradient, alpha=scale)
        else:
            self.velocity.mul_(self.rule.momentum).add_(gradient, alpha=scale)
            self.residual.add_(self.velocity)

    def everything(self, gradient: Tensor, *, scale: float) -> Tensor:
        """Return all that is pending, to be sent whole: ``scale * gradient`` (stop - start,) too.

        The residual then reads as zeros. Returns `gradient` itself where nothing else is pending
        and `scale` is 1. Factor masking would forget all momentum here, so the velocity is kept:
        the mean of the velocities is the ordinary momentum of the mean gradient.
        """
        if self.residual is None and not self.rule.momentum:
            return gradient if scale == 1 else gradient.float() * scale
        residual, _ = self._allocated(gradient)
        self._accumulate(gradient, scale=scale)
        self.spent = True
        return residual

    def with_momentum(self, mean: Tensor, *, loss_scale: float) -> Tensor:
        """Return the packed mean of the exempt parameters, with momentum where the rest has it."""
        if not self.rule.momentum:
            return mean
        if self.exempt_velocity is None:
            self.exempt_velocity = torch.zeros(mean.numel(), device=mean.device)
        self.exempt_velocity.mul_(self.rule.momentum).add_(mean, alpha=1 / loss_scale)
        return (self.exempt_velocity * loss_scale).to(mean.dtype)

    def put_back(self) -> None:
        """Put back what the last step sent, which was thrown away (masked velocity stays zero)."""
        if self.sent is not None and self.residual is not None:
            self.residual.index_add_(0, self.sent.indices, self.sent.values)
        self.spent, self.sent = False, None

    def pending(self) -> Tensor | None:
        """Return the residual, None where it is zero."""
        return None if self.spent else self.residual


class LocalResidual:
    """One float32 value per gradient element, not scaled by the loss.

    Kept flat in the layout of the buckets. When DDP lays out its buckets anew, a bucket takes its
    parameters' values along by name. Each parameter is in one bucket at a time, so other buckets
    may be in flight meanwhile.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._flat: dict[int, tuple[BucketLayout, Tensor]] = {}
        self._by_name: dict[str, Tensor] = {}  # (numel,) each, views of the flat ones

    def flat(self, bucket: Bucket) -> Tensor:
        """Return the residual (n,) of `bucket`, zeros at first; what is written there is kept."""
        layout = bucket.layout
        known = self._flat.get(bucket.index)
        if known is not None and known[0] == layout:
            return known[1]
        # a new layout: values go along by name, which then are views of the new memory
        flat = torch.zeros(bucket.buffer.numel(), device=self.device)
        for name, part in zip(layout.names, layout.slices, strict=True):
            if name in self._by_name:
                flat[part] = self._by_name[name]
            self._by_name[name] = flat[part]
        self._flat[bucket.index] = (layout, flat)
        return flat

    def norm(self) -> float:
        """Return the L2 norm of all of it."""
        if not self._by_name:
            return 0.0
        return float(torch.stack(torch._foreach_norm(list(self._by_name.values()))).norm())

    def state_dict(self) -> dict[str, Tensor]:
        """Return parameter name -> residual (numel,)."""
        return {name: value.clone() for name, value in self._by_name.items()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Take over `state`; parameters that it lacks start at zero."""
        self._flat.clear()
        self._by_name = {
            name: value.to(self.device, torch.float32, copy=True) for name, value in state.items()
        }


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

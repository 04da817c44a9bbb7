"""Buckets of gradients, and the interface of everything that averages one over all ranks.

A method (`exchange_method.GradientMethod`) makes a `BucketExchange`, whose `stages` is a generator:

    def stages(self, bucket):
        work = dist.all_reduce(bucket.buffer, group=self.groups.world[0], async_op=True)
        yield work                # stage 0 ends here; the worker advances other buckets meanwhile
        return bucket.buffer

Rules that keep the ranks in step (a worker of `hook` runs the stages):

- `stages` issues collectives asynchronously and yields what it waits for; what follows a yield runs
  when that is done.
- Stage s is what runs before the s-th yield. It uses only groups of that stage, for example
  ``groups.world[s]``; the packed exempt parameters have ``groups.exempt``, in stage 0. A method
  with several stages on ``groups.world`` says so in `num_stages`.
- What follows depends only on what all ranks know: where one rank returns `Bucket.not_finite`, all
  do, at the same place; `Bucket.check_finite` asks when the step ends, without a wait.
- Ranks decode in rank order, so that the result is the same bit for bit everywhere.

Buckets come from DDP, or from `OwnBuckets` where no DDP wraps the module. What a method does not
send of a bucket waits in its `BucketResidual`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import Store

from lightning_topt.basics.argument_checks import check_choice, check_real
from lightning_topt.communication.collectives import HostCopy, Pending, State, Waitable, ring_bytes
from lightning_topt.communication.topology import Groups, Topology

Stages = Generator[Waitable, None, Tensor]
OWN_BUCKET_BYTES = 25 << 20  # as large as DDP's
HOST_DEVICES = ("cpu",)  # where reading a value takes no wait


@dataclass(frozen=True)
class ExchangeSettings:
    """How a run waits and treats infinities, whatever the method; alike on all ranks.

    - ``nonfinite``: "error" raises FloatingPointError on all ranks; "skip" makes the gradient NaN
      on all ranks, so that a GradScaler skips the step;
    - ``timeout_seconds``: for every wait on another rank.

    Raises ValueError for anything else.
    """

    nonfinite: str = "error"
    timeout_seconds: float = 300.0

    def __post_init__(self) -> None:
        check_choice(self.nonfinite, name="nonfinite", allowed=("error", "skip"))
        check_real(self.timeout_seconds, name="timeout_seconds", positive=True)


@dataclass(frozen=True)
class ExchangeContext:
    """The ranks and the device that an exchange is made for.

    `store` is that of the run, with keys of this exchange's own; None where there is none (in
    tests).
    """

    topology: Topology
    groups: Groups
    device: torch.device
    timeout_seconds: float = ExchangeSettings.timeout_seconds
    store: Store | None = None


class BucketExchange(ABC):
    """Averages buckets over all ranks.

    `bytes_sent` counts payload bytes since the last reset (see `count_ring`).
    """

    def __init__(self, context: ExchangeContext) -> None:
        self.topology, self.groups, self.device = context.topology, context.groups, context.device
        self.world_size = context.topology.world_size
        self.bytes_sent = 0

    @abstractmethod
    def stages(self, bucket: Bucket) -> Stages:
        """Exchange `bucket`; return its own buffer with the mean, the same bits on every rank."""

    def dense_stages(self, bucket: Bucket) -> Stages:
        """Take the mean by one all-reduce on ``groups.world[0]``, where everything is sent."""
        # Infinities of one rank reach all by the sum itself.
        own_finite = finite_flag(bucket.buffer)
        bucket.buffer.div_(self.world_size)
        self.count_ring(bucket.buffer.nbytes, passes=2)
        yield together(dist.all_reduce(bucket.buffer, group=self.groups.world[0], async_op=True))
        bucket.check_finite(bucket.buffer, own=own_finite)
        return bucket.buffer

    def start_exempt(self, bucket: Bucket) -> ExemptMean | None:
        """Send the exempt parameters of `bucket`, if any, and zero their part of the buffer.

        In stage 0 only.
        """
        if not any(bucket.layout.exempt):
            return None
        exempt = ExemptMean(bucket, group=self.groups.exempt)
        self.count_ring(exempt.packed.nbytes, passes=2)
        return exempt

    def count_ring(self, nbytes: int, *, passes: int) -> None:
        """Count a ring over all ranks: a gather of `nbytes` (`passes` 1) or an all-reduce (2).

        `bytes_sent` is what the network counter of a node sees leave: in a ring in rank order one
        rank of each node sends to another node. With one node it is what a rank sends.
        """
        self.bytes_sent += ring_bytes(nbytes, self.world_size, passes=passes)

    def count_across(self, nbytes: int, *, passes: int) -> None:
        """Count a ring over nodes; `nbytes` are of all local ranks together."""
        self.bytes_sent += ring_bytes(nbytes, self.topology.num_nodes, passes=passes)

    def warm_up(self) -> None:  # noqa: B027
        """Compile what `stages` needs, rather than in the first step."""

    def put_back(self) -> None:  # noqa: B027
        """Put back into the residual what the last step sent: that step was thrown away.

        Nothing to do where there is no residual.
        """

    def residual_norm(self) -> float:
        """Return the L2 norm of this rank's residual, unscaled; 0 where there is none."""
        return 0.0

    def telemetry(self, *, steps: int, reset: bool) -> Mapping[str, float]:
        """Return more than `ExchangeStatistics` has, by name, of `steps` since the last reset."""
        return {}

    def prepare(self, bucket: Bucket) -> bool:
        """Return whether `stages` may start while earlier buckets are in flight.

        If not, `relayout` is called first.
        """
        return True

    def relayout(self) -> None:  # noqa: B027
        """Prepare for buckets laid out anew. May use ``groups.state``; nothing is in flight."""

    def state_dict(self) -> dict[str, dict[str, Tensor]]:
        """Return this rank's state: kind ("residual", ...) -> parameter name -> tensor.

        {} where there is none. Collective where the state of one rank is spread over its node; it
        then is the node's, the same on its ranks.
        """
        return {}

    def load_state_dict(self, state: dict[str, dict[str, Tensor]]) -> None:
        """Take over what `state_dict` gave, or the mean of several."""
        assert not state, f"{type(self).__name__} has no state"

    def close(self) -> None:  # noqa: B027
        """Release what outlives the process."""


class StepChecks:
    """What of a step's buckets is finite, asked when the step ends.

    The host waits for the buckets there anyway. On CUDA each answer takes a copy to the host, for
    which that waits: one copy for all.
    """

    def __init__(self) -> None:
        self._added: list[tuple[Bucket, Tensor, Tensor]] = []

    def add(self, bucket: Bucket, finite: Tensor, own_finite: Tensor) -> None:
        """Check that `finite` () bool, equal on all ranks; `own_finite` is of this rank."""
        self._added.append((bucket, finite, own_finite))

    def failed(self, wait: Callable[[HostCopy], None] = HostCopy.wait) -> list[tuple[Bucket, bool]]:
        """Return the buckets that are not finite, in order, and whether that is this rank's doing.

        Nothing is left to be checked then. `wait` waits for the answers.
        """
        added, self._added = sorted(self._added, key=lambda each: each[0].index), []
        if not added:
            return []
        device = added[0][0].buffer.device
        copy = HostCopy(torch.stack([flag.to(device) for _, *both in added for flag in both]))
        wait(copy)
        flags = copy.result()
        failed: dict[int, tuple[Bucket, bool]] = {}
        for (bucket, *_), finite, own in zip(added, flags[::2], flags[1::2], strict=True):
            if not finite:
                is_ours = bucket.index in failed and failed[bucket.index][1]
                failed[bucket.index] = bucket, is_ours or not own
        return list(failed.values())


class ExemptMean:
    """The exempt parameters of a bucket on their way: packed, summed apart from the rest."""

    def __init__(self, bucket: Bucket, *, group: dist.ProcessGroup) -> None:
        self.parts = [bucket.buffer[part] for part in bucket.layout.exempt_slices]
        self.packed = torch.cat(self.parts)
        self._bucket, self._own_finite = bucket, finite_flag(self.packed)
        self.world_size = dist.get_world_size(group)
        self.work = dist.all_reduce(self.packed, group=group, async_op=True)
        # The method then sees zeros: they are never selected and add nothing to a residual.
        torch._foreach_zero_(self.parts)

    def is_completed(self) -> bool:
        """Return whether `wait` would return at once."""
        return bool(self.work.is_completed())

    def wait(self) -> None:
        """Block until summed."""
        self.work.wait()

    def finish(self) -> None:
        """Add the mean over ranks to the buffer, last of all."""
        self._bucket.check_finite(self.packed, own=self._own_finite)
        mean = self.packed.div_(self.world_size)
        sizes = [part.numel() for part in self.parts]
        torch._foreach_add_(self.parts, list(mean.split_with_sizes(sizes)))


@dataclass(frozen=True)
class Bucket:
    """One bucket of one step.

    `buffer` (n,) holds this rank's gradients, multiplied by `loss_scale`, and takes the mean over
    all ranks, multiplied alike. `step` counts exchanged steps from 0; `checks` are of the step.
    """

    index: int
    buffer: Tensor
    layout: BucketLayout
    is_last: bool
    step: int
    loss_scale: float = 1.0
    checks: StepChecks = field(default_factory=StepChecks, repr=False, compare=False)

    def check_finite(self, mean: Tensor, *, own: Tensor) -> None:
        """Check, when the step ends, that `mean`, equal on all ranks, is finite.

        What follows must do no harm where it is not. `own` () bool: this rank's gradient is finite.
        """
        self.checks.add(self, finite_flag(mean), own)

    def not_finite(self, *, own_finite: bool) -> Tensor:
        """Say that some rank's gradient has NaN or infinities; return the buffer.

        `stages` returns it too, on all ranks. `own_finite`: this rank's gradient has none.
        """
        self.checks.add(self, torch.tensor(False), torch.tensor(own_finite))
        return self.buffer


@dataclass(frozen=True)
class BucketLayout:
    """The parameters of a bucket: names, first elements in the buffer, sizes and shapes.

    `exempt` says which are never compressed.
    """

    names: tuple[str, ...]
    offsets: tuple[int, ...]
    numels: tuple[int, ...]
    shapes: tuple[torch.Size, ...]
    exempt: tuple[bool, ...]

    @property
    def slices(self) -> list[slice]:
        """The slices of the buffer where each parameter is."""
        return [
            slice(start, start + numel)
            for start, numel in zip(self.offsets, self.numels, strict=True)
        ]

    @property
    def exempt_slices(self) -> list[slice]:
        """The slices of the buffer where the exempt parameters are."""
        return [part for part, exempt in zip(self.slices, self.exempt, strict=True) if exempt]

    def compressible(self, start: int, stop: int) -> int:
        """Return how many elements from `start` up to `stop` are not exempt."""
        parts = [part for part, exempt in zip(self.slices, self.exempt, strict=True) if not exempt]
        return sum(max(0, min(part.stop, stop) - max(part.start, start)) for part in parts)


class OwnBuckets:
    """Buckets without DDP: filled from ``.grad`` of `parameters`, and written back.

    Each has parameters of one dtype. Their memory is kept.
    """

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        # parameters of each bucket, in the order of the module
        parts: list[list[Tensor]] = []
        for dtype in dict.fromkeys(parameter.dtype for parameter in parameters):
            filled = OWN_BUCKET_BYTES
            for parameter in (each for each in parameters if each.dtype == dtype):
                if filled + parameter.nbytes > OWN_BUCKET_BYTES:
                    parts.append([])
                    filled = 0
                parts[-1].append(parameter)
                filled += parameter.nbytes
        self.buckets = [
            self._allocate(place, part, is_last=place + 1 == len(parts))
            for place, part in enumerate(parts)
        ]

    @staticmethod
    def _allocate(place: int, parameters: list[Tensor], *, is_last: bool) -> GivenBucket:
        numels = [parameter.numel() for parameter in parameters]
        flat = parameters[0].new_zeros(sum(numels), requires_grad=False)
        shapes = [parameter.shape for parameter in parameters]
        views = [v.view(s) for v, s in zip(torch.split(flat, numels), shapes, strict=True)]
        return GivenBucket(place, flat, parameters, lambda: views, is_last)

    @torch.no_grad()
    def filled(self) -> Iterator[GivenBucket]:
        """Yield each bucket, filled with the gradients of now; zeros where there is none."""
        for bucket in self.buckets:
            for parameter, view in zip(bucket.parameters, bucket.gradients(), strict=True):
                if parameter.grad is None:
                    view.zero_()
                else:
                    grad = parameter.grad
                    view.copy_(grad.to_dense() if grad.is_sparse else grad)
            yield bucket

    @torch.no_grad()
    def write_back(self) -> None:
        """Copy the buckets to the parameters' gradients.

        A parameter that had none gets one where its part is not all zeros.
        """
        for bucket in self.buckets:
            for parameter, view in zip(bucket.parameters, bucket.gradients(), strict=True):
                if parameter.grad is not None and not parameter.grad.is_sparse:
                    parameter.grad.copy_(view)
                elif parameter.grad is not None or bool(view.any()):
                    parameter.grad = view.clone()


@dataclass(frozen=True)
class GivenBucket:
    """What torch's `GradBucket` has.

    `gradients` makes views of `buffer` in parameters' shapes: asked for where the layout is new.
    """

    index: int
    buffer: Tensor
    parameters: list[Tensor]
    gradients: Callable[[], list[Tensor]]
    is_last: bool


# ---- what was not sent yet ---------------------------------------------------------------------
#
# Units: the gradient without loss scale, averaged over the ranks of a node where the exchange sums
# them first. The mean over all ranks (or nodes) of their residuals is thus what the model still has
# to receive, whoever has it; a change of the world size gives each that mean. Residuals are flat,
# in the layout of the bucket, and saved by parameter name.

RESIDUAL = "residual"


class ResidualStore:
    """The residuals of all buckets of this rank.

    When buckets are laid out anew, residuals are found again by parameter name.
    """

    def __init__(self) -> None:
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
        return BucketResidual(bucket.layout, start, stop, residual=zeros if is_found else None)

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

    layout: BucketLayout
    start: int
    stop: int
    residual: Tensor | None = None  # (stop - start,) float32; None: zeros
    spent: bool = False  # all of the residual was sent: it reads as zeros
    # values (k,) and indices (k,) of the last step, as the others received them
    sent: tuple[Tensor, Tensor] | None = field(default=None, repr=False)

    def begin(self) -> None:
        """Begin a new step: what the last one sent has arrived."""
        if self.spent and self.residual is not None:
            self.residual.zero_()
        self.spent, self.sent = False, None

    def allocated(self, like: Tensor) -> Tensor:
        """Return the residual (stop - start,), zeros at first."""
        if self.residual is None:
            self.residual = torch.zeros(self.stop - self.start, device=like.device)
        return self.residual

    def everything(self, gradient: Tensor, *, scale: float) -> Tensor:
        """Return all that is pending, to be sent in full: ``scale * gradient`` (stop - start,) too.

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
            values, indices = self.sent
            self.residual.index_add_(0, indices, values)
        self.spent, self.sent = False, None

    def pending(self) -> Tensor | None:
        """Return the residual, None where it is zero."""
        return None if self.spent else self.residual


def named_parts(
    layout: BucketLayout, flat: Tensor, *, start: int = 0
) -> dict[str, tuple[int, Tensor]]:
    """Return (first element in the parameter, values) of `flat`, per parameter touched.

    `flat` holds elements from `start` of a bucket.
    """
    parts: dict[str, tuple[int, Tensor]] = {}
    for name, offset, numel in zip(layout.names, layout.offsets, layout.numels, strict=True):
        first, last = max(offset, start), min(offset + numel, start + flat.numel())
        if first < last:
            parts[name] = (first - offset, flat[first - start : last - start])
    return parts


# ---- small parts --------------------------------------------------------------------------------


def together(*works: Waitable | None) -> Pending:
    """Return several works as one, without those that are None."""
    return Pending([work for work in works if work is not None])


def finite_flag(tensor: Tensor) -> Tensor:
    """Return () bool, on the device, of what `is_finite` says; the host does not wait on CUDA."""
    if is_on_host(tensor):
        return torch.tensor(is_finite(tensor))
    if not tensor.numel():
        return torch.ones((), dtype=torch.bool, device=tensor.device)
    # one pass: the largest magnitude is NaN where any is
    return torch.isfinite(torch.linalg.vector_norm(tensor, torch.inf))


def is_on_host(tensor: Tensor) -> bool:
    """Return whether the host reads values of `tensor` without a wait."""
    return tensor.device.type in HOST_DEVICES


def is_finite(tensor: Tensor) -> bool:
    """Return whether all entries are finite, in one pass where they are and without a copy."""
    if tensor.dtype == torch.float16 and tensor.numel():  # a sum of them overflows early
        return all(bool(torch.isfinite(extreme)) for extreme in torch.aminmax(tensor))
    return bool(torch.isfinite(tensor.sum())) or bool(torch.isfinite(tensor).all())

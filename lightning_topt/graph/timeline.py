"""The memory of a step, block by block: a function of its tensors and of which modules are
blocks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from lightning_topt.basics.once import once_per_object
from lightning_topt.graph.quantities import Amount
from lightning_topt.graph.step_tensors import ModuleCall, Step

Array = NDArray[np.float64]
Indices = NDArray[np.int64]
Stretch = tuple[str, int, int, ModuleCall | None]  # block, first position, end position, its call


@dataclass(frozen=True)
class Segment:
    """A contiguous stretch of the forward pass that belongs to one block, with its memory on one
    device, in bytes.

    Parameters, their gradients, buffers and the batch are not in these numbers.

    kept           allocated in its forward and still live when the backward pass starts (what
                   backward needs, and its output where somebody saved it)
    output         what stays instead of `kept` when the segment is recomputed: its output where it
                   is still live, and its input where recomputing is all that needs it
    forward_peak   highest live memory during its forward, minus the `kept` of those before it
    backward_peak  highest live memory during its backward, minus the `kept` of the segments up to
                   and including it; the gradient of its output is in it

    Live memory is thus a sum: ``sum(kept of earlier segments) + forward_peak`` in the forward pass
    of a segment, ``sum(kept of earlier segments and its own) + backward_peak`` in its backward
    pass. Recomputing an earlier segment replaces that segment's `kept` by its `output`; during its
    own backward a recomputed segment has all of its `kept`.
    """

    block: str
    kept_bytes: Amount
    output_bytes: Amount
    forward_peak_bytes: Amount
    backward_peak_bytes: Amount


@dataclass(frozen=True, eq=False)
class StepPart:
    """A part of the memory of a step: shares of its `tensors` (tensor,), and `workspaces` as of
    `Step`.
    """

    tensors: Array
    workspaces: Sequence[tuple[int, Amount]]


def segments(
    step: Step, blocks: Iterable[str], *, part: StepPart | None = None
) -> tuple[Segment, ...]:
    """Return the forward pass of `step` (or of `part` of it) cut at the calls of the modules
    `blocks`, in forward order; all else is block ``""``.
    """
    stretches = _stretches(step, set(blocks) - {""})
    small, large = (
        _sizes(StepMemory(step, size, part=part), stretches) for size in step.batch_sizes
    )
    return tuple(
        Segment(block, *(Amount.fit(step.batch_sizes, values) for values in zip(a, b, strict=True)))
        for (block, *_), a, b in zip(stretches, small, large, strict=True)
    )


@dataclass(frozen=True, eq=False)
class _Columns:
    """The tensors of a step as arrays (tensor,): their bytes, fixed and per sample, and their
    lives.
    """

    fixed: Array
    per_sample: Array
    first: Indices
    end: Indices
    counted: NDArray[np.bool_]  # no gradient of a parameter


@once_per_object
def _columns(step: Step) -> _Columns:
    tensors = step.tensors
    sizes = np.array(
        [(tensor.bytes.fixed, tensor.bytes.per_sample) for tensor in tensors], float
    ).reshape(-1, 2)
    lives = np.array([(tensor.first, tensor.end) for tensor in tensors], np.int64).reshape(-1, 2)
    counted = np.array([tensor.gradient_of is None for tensor in tensors], bool)
    return _Columns(sizes[:, 0], sizes[:, 1], lives[:, 0], lives[:, 1], counted)


class StepMemory:
    """The bytes of a step's tensors for `batch_size` samples, or of `part` of them."""

    def __init__(self, step: Step, batch_size: float, *, part: StepPart | None = None) -> None:
        self.step, self._tensors, workspaces = step, _columns(step), step.workspaces
        fixed, per_sample = self._tensors.fixed, self._tensors.per_sample
        if part is not None:
            fixed, per_sample, workspaces = (
                fixed * part.tensors,
                per_sample * part.tensors,
                tuple(part.workspaces),
            )
        self.bytes = np.rint(fixed + per_sample * batch_size).astype(np.int64)
        self._workspaces = [
            (position, round(amount.at(batch_size))) for position, amount in workspaces
        ]

    @cached_property
    def live(self) -> Indices:
        """Bytes live at each position (positions,), with workspaces, without gradients of
        parameters.
        """
        positions, tensors = len(self.step.order), self._tensors
        change = np.zeros(positions + 2, dtype=np.int64)
        sizes = np.where(tensors.counted, self.bytes, 0)
        np.add.at(change, tensors.first, sizes)
        np.subtract.at(change, tensors.end, sizes)
        live: Indices = np.cumsum(change)[:positions]
        for position, size in self._workspaces:
            live[position] += size
        return live

    @cached_property
    def _kept_until(self) -> Indices:
        sizes, tensors, start = (
            np.zeros(self.step.backward_start + 1, np.int64),
            self._tensors,
            self.step.backward_start,
        )
        kept = (tensors.first < start) & (start < tensors.end) & tensors.counted  # `Step.is_kept`
        np.add.at(sizes, tensors.first[kept] + 1, self.bytes[kept])
        total: Indices = np.cumsum(sizes)
        return total

    def kept(self, first: int, end: int) -> int:
        """Return the bytes made at ``first <= position < end`` of the forward pass and live when
        the backward pass starts.
        """
        return int(self._kept_until[end] - self._kept_until[first])

    def output(self, call: ModuleCall) -> int:
        """Return the bytes that stay when `call` is recomputed: its kept outputs, and its inputs
        that nothing else keeps.
        """
        tensors = self.step.tensors
        own = [
            i
            for i in call.outputs
            if self.step.is_kept(tensors[i]) and tensors[i].first >= call.first
        ]
        inputs = [i for i in call.inputs if not self.step.is_kept(tensors[i])]
        return int(self.bytes[[*own, *inputs]].sum())


def _sizes(memory: StepMemory, stretches: list[Stretch]) -> list[tuple[int, int, int, int]]:
    """Bytes (kept, output, forward peak, backward peak) of each segment."""
    peaks = _backward_peaks(memory, stretches)
    rows = []
    for index, (_, first, end, call) in enumerate(stretches):
        before, kept = memory.kept(0, first), memory.kept(first, end)
        output = kept if call is None else memory.output(call)
        forward_peak = int(memory.live[first:end].max()) - before
        backward_peak = peaks[index] - before - kept if index in peaks else 0
        rows.append((kept, output, forward_peak, backward_peak))
    return rows


def _backward_peaks(memory: StepMemory, stretches: list[Stretch]) -> dict[int, int]:
    """Highest live bytes in the backward of each stretch that has one."""
    if not stretches:
        return {}
    order, start = np.array(memory.step.order, np.int64), memory.step.backward_start
    stretch_of_op = np.full(order.max(initial=-1) + 1, -1)
    for index, (_, first, end, _) in enumerate(stretches):
        stretch_of_op[order[first:end]] = index
    own = stretch_of_op[order[start:]]
    # An operator that only made views in forward has no position there; its backward is beside that
    # of its neighbour.
    last = np.maximum.accumulate(np.where(own >= 0, np.arange(len(own)), -1))
    current = np.where(last >= 0, own[last], len(stretches) - 1)
    peaks = np.zeros(len(stretches), np.int64)
    np.maximum.at(peaks, current, memory.live[start:])
    return {index: int(peaks[index]) for index in np.unique(current).tolist()}


def _stretches(step: Step, blocks: set[str]) -> list[Stretch]:
    """The forward pass cut at the calls of blocks; stretches without a kernel are left out."""
    stretches: list[Stretch] = []
    position = 0
    for call in step.calls:
        if call.module in blocks and call.first >= position:  # not inside another call of a block
            stretches += [
                ("", position, call.first, None),
                (call.module, call.first, call.end, call),
            ]
            position = call.end
    stretches.append(("", position, step.backward_start, None))
    return [stretch for stretch in stretches if stretch[1] < stretch[2]]

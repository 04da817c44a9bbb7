"""The operator graph of one training step: frozen values, and its memory block by block.

    graph.ops          operators in execution order, with their kernels and parameters
    graph.edges        who feeds whom
    graph.blocks       the modules that a plan decides about; "" is everything outside of them
    graph.step         order of the kernels, lifetimes of all tensors (`Step`)
    graph.timeline     what each block keeps for backward, and the peaks on the way (`segments`)

Quantities are linear in the batch size (`Amount`): a step is recorded at two batch sizes, and all
else lies on the line through both. Lifetimes are counted in kernels:

    position    0   1   2   3 | 4   5   6   7        one kernel each; backward starts at 4
    tensor a    |-----------------------|            kept: made in forward, alive at 4
    tensor b        |---|                            not kept

An interval ``first <= position < end`` includes its first position and not its end. Nothing here
knows how a graph was captured or what it will be used for. Between processes it is pickled.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from lightning_topt.basics import once_per_object

Item = TypeVar("Item", "Op", "Parameter")
Array = NDArray[np.float64]
Indices = NDArray[np.int64]
Stretch = tuple[str, int, int, "ModuleCall | None"]  # block, first position, end, its call


@dataclass(frozen=True)
class Amount:
    """A quantity that is linear in the batch size: ``fixed + per_sample * batch_size``."""

    fixed: float = 0.0
    per_sample: float = 0.0

    def at(self, batch_size: float) -> float:
        """Return the quantity for `batch_size` samples per rank."""
        return self.fixed + self.per_sample * batch_size

    def __add__(self, other: Amount) -> Amount:
        return Amount(self.fixed + other.fixed, self.per_sample + other.per_sample)

    @classmethod
    def fit(cls, batch_sizes: tuple[int, int], values: tuple[float, float]) -> Amount:
        """Return the line through two measurements; a constant when both batch sizes are equal."""
        (b0, b1), (v0, v1) = batch_sizes, values
        per_sample = 0.0 if b0 == b1 else (v1 - v0) / (b1 - b0)
        return cls(v0 - per_sample * b0, per_sample)


NOTHING = Amount()


@dataclass(frozen=True)
class TensorSpec:
    """Shape and dtype (``"float32"``) of a tensor at the captured batch size.

    Dimension `batch_dim` grows with the batch; None for a tensor that does not.
    """

    shape: tuple[int, ...]
    dtype: str
    batch_dim: int | None = None


@dataclass(frozen=True)
class OpGraph:
    """One training step of `model`: its operators, parameters, blocks and tensors.

    Args:
        model: class name of the module.
        batch_size: samples of the batch that was captured; may be 1 for an unknown size.
        ops: in execution order.
        edges: which operator reads what another one made.
        parameters: all of the module, also frozen ones.
        blocks: ``""`` and the modules that a plan decides about.
        step: when the kernels run and how long every tensor lives.
        buffer_bytes: the module's buffers.
        input_bytes: the batch.
        batch_scaling: amounts are known for other batch sizes too; else they are constants.
        unused: trainable parameters that the step gave no gradient.
        whole_model: the step is that of one rank, whose parameters are slices of those of the
            model with this fingerprint.
        manual_passes: backward passes of a step that optimizes manually (`manual_steps`), else 0.
    """

    model: str
    batch_size: int
    ops: tuple[Op, ...]
    edges: tuple[TensorEdge, ...]
    parameters: tuple[Parameter, ...]
    blocks: tuple[Block, ...]
    step: Step
    buffer_bytes: int
    input_bytes: Amount
    batch_scaling: bool = True
    unused: tuple[str, ...] = ()
    whole_model: str | None = None
    manual_passes: int = 0

    @cached_property
    def fingerprint(self) -> str:
        """Identifies the model, not the batch; see `model_fingerprint`."""
        # the slices of one rank stand for the model that they were cut from
        if self.whole_model is not None:
            return self.whole_model
        return model_fingerprint(self.model, [(p.name, p.shape, p.dtype) for p in self.parameters])

    @property
    def is_manual(self) -> bool:
        """Whether the step optimizes manually."""
        return self.manual_passes > 0

    def calls_of(self, module: str) -> tuple[int, int]:
        """Return how often a block is gathered by itself, forward and backward: in each call.

        Once each but in a step that optimizes manually.
        """
        if not self.is_manual:
            return 1, 1
        calls = [call.needs_grad for call in self.step.calls if call.module == module]
        return len(calls), sum(calls)

    @cached_property
    def timeline(self) -> tuple[Segment, ...]:
        """The memory of the step, block by block in forward order.

        The backward pass runs through it in reverse.
        """
        return segments(
            self.step, [block.name for block in self.blocks], casts=self.casts_of_parameters
        )

    @cached_property
    def casts_of_parameters(self) -> tuple[int, ...]:
        """The tensors of the step that are parameters in 16 bits, kept for backward."""
        return self._casts_of(self.parameters)

    @cached_property
    def narrow_parameters(self) -> frozenset[str]:
        """The parameters that are gathered in 16 bits where they are in shards."""
        return frozenset(p.name for p in self.parameters if p.narrow)

    @cached_property
    def gathered_timelines(self) -> dict[int, tuple[Segment, ...]]:
        """`timeline` by the ZeRO level, 2 or 3, of blocks that are gathered in 16 bits.

        Autocast makes no copies of what is: at level 2 trained parameters, at level 3 all.
        """
        found = {}
        for level in (2, 3):
            narrow = [p for p in self.parameters if p.name in self.narrow_parameters]
            tensors = list(self.step.tensors)
            for index in self._casts_of(p for p in narrow if p.trainable or level == 3):
                tensors[index] = replace(tensors[index], bytes=NOTHING)
            step = replace(self.step, tensors=tuple(tensors))
            found[level] = segments(step, [block.name for block in self.blocks])
        return found

    def _casts_of(self, parameters: Iterable[Parameter]) -> tuple[int, ...]:
        shapes = {p.name: p.shape for p in parameters if p.dtype == "float32"}
        of_op = {op.name: {shapes.get(name) for name in op.parameters} for op in self.ops}
        return tuple(
            index
            for index, tensor in enumerate(self.step.tensors)
            if tensor.spec.dtype in ("bfloat16", "float16")
            and tensor.bytes.per_sample == 0.0
            and self.step.is_kept(tensor)
            and tensor.spec.shape in of_op[tensor.producer]
        )

    def with_blocks(self, blocks: Iterable[Block]) -> OpGraph:
        """Return the same step with other `blocks` to decide about.

        Operators and parameters go to the outermost block around them. `blocks` are block ``""``
        and modules that are not inside one another. Raises ValueError where one of them is no
        module of this graph.
        """
        # an operator knows the modules around it, a parameter those in its name; outermost first
        chosen = tuple(blocks)
        names = {block.name for block in chosen}
        if unknown := names - {"", *(module.path for module in self.step.modules)}:
            raise ValueError(
                f"{min(unknown)!r} is not a module of {self.model}; blocks are modules by "
                "their paths"
            )
        return replace(
            self,
            ops=tuple(_moved(op, block_of_op(op.stack, names)) for op in self.ops),
            parameters=tuple(_moved(p, block_of_parameter(p.name, names)) for p in self.parameters),
            blocks=chosen,
        )

    def block_parameters(self, block: str) -> list[Parameter]:
        """Return the parameters that `block` owns."""
        return self._by_block.get(block, [])

    @cached_property
    def _by_block(self) -> dict[str, list[Parameter]]:
        found: dict[str, list[Parameter]] = {}
        for parameter in self.parameters:
            found.setdefault(parameter.block, []).append(parameter)
        return found


def model_fingerprint(model: str, parameters: Iterable[tuple[str, tuple[int, ...], str]]) -> str:
    """Return a short hash of a model.

    Args:
        model: its class name.
        parameters: name, shape and dtype (``"float32"``) of each parameter.
    """
    # sorted, so that the order in which parameters are met does not matter
    text = json.dumps(
        [model, sorted((name, list(shape), dtype) for name, shape, dtype in parameters)]
    )
    # 64 bits, as text
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def module_fingerprint(module: nn.Module) -> str:
    """Return the `model_fingerprint` of a module, which is that of its graph."""
    named = module.named_parameters()
    parameters = ((n, tuple(p.shape), str(p.dtype).removeprefix("torch.")) for n, p in named)
    return model_fingerprint(type(module).__name__, parameters)


def _moved(item: Item, block: str) -> Item:
    # most stay where they are, and need no copy
    return item if item.block == block else replace(item, block=block)


def block_of_op(stack: Iterable[str], blocks: Container[str]) -> str:
    """Return the outermost of `blocks` among the modules around an operator, "" for none."""
    return next((path for path in stack if path in blocks), "")


def block_of_parameter(name: str, blocks: Container[str]) -> str:
    """Return the outermost of `blocks` that parameter `name` is in, "" for none."""
    # the last part is the parameter's own name
    parts = name.split(".")[:-1]
    return block_of_op((".".join(parts[:count]) for count in range(1, len(parts) + 1)), blocks)


# ---- parts ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Op:
    """A leaf module call or a functional operator between modules.

    `kind` is the class name of the leaf module, or ``"aten.add"``. `module` is the innermost module
    that ran it, `block` the block it belongs to, `stack` all the modules around it, outermost
    first; the last one is `module`.
    """

    name: str
    kind: str
    module: str
    block: str
    parameters: tuple[str, ...]
    outputs: tuple[TensorSpec, ...]
    forward: tuple[Kernel, ...]
    backward: tuple[Kernel, ...]
    saved_bytes: Amount
    stack: tuple[str, ...] = ()


@dataclass(frozen=True)
class Kernel:
    """Identical low-level operator calls: `count` calls of `name` with `arguments`.

    `arguments` is a JSON value from which the call can be made again on a device (see
    `kernels.encode_arguments`). `flops`, `bytes` (read and written) and `allocated` (bytes of new
    tensors, and of what it takes inside) are those of one call.
    """

    name: str
    arguments: Any
    flops: Amount
    bytes: Amount
    count: int = 1
    allocated: Amount = NOTHING


@dataclass(frozen=True)
class TensorEdge:
    """Operator `source` produces a tensor that operator `target` reads."""

    source: str
    target: str
    tensor: TensorSpec


@dataclass(frozen=True)
class Parameter:
    """A parameter under the first name it is met by.

    Tied weights list their other names in `aliases`. `narrow`: a float32 matrix whose uses in the
    step are casts to 16 bits by autocast, none of an element twice. With 16 bits it trains alike.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    block: str
    trainable: bool = True
    aliases: tuple[str, ...] = ()
    narrow: bool = False

    @cached_property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the unsharded parameter."""
        return self.numel * int(getattr(torch, self.dtype).itemsize)


@dataclass(frozen=True)
class Block:
    """A module called once per step that a plan decides about, or ``""`` for all that is outside.

    Blocks with equal `group` are repetitions of one structure. `recomputable` says whether its
    forward may run again in the backward pass (see `blocks`).
    """

    name: str
    group: int
    recomputable: bool


# ---- the step: order of kernels, lifetimes of tensors ----------------------------------------


@dataclass(frozen=True)
class Step:
    """The order of kernels in a step, and the tensors they leave in memory.

    Args:
        batch_sizes: the two at which the step ran, where amounts are exact; equal for one run.
        order: index (into ``graph.ops``) of the operator whose kernel runs at each position.
        backward_start: position of the first kernel of the backward pass.
        tensors: all that were allocated, in the order in which they were made.
        calls: forward calls of modules, in the order of their beginnings.
        modules: the submodules, parents before children.
        workspaces: (position, bytes) that kernels take inside and give back.
    """

    batch_sizes: tuple[int, int]
    order: tuple[int, ...] = ()
    backward_start: int = 0
    tensors: tuple[StepTensor, ...] = ()
    calls: tuple[ModuleCall, ...] = ()
    modules: tuple[Module, ...] = ()
    workspaces: tuple[tuple[int, Amount], ...] = ()

    def is_kept(self, tensor: StepTensor) -> bool:
        """Return whether `tensor` is made in forward and alive when backward starts."""
        return tensor.first < self.backward_start < tensor.end and tensor.gradient_of is None


@dataclass(frozen=True)
class StepTensor:
    """A tensor and its views, alive at the positions ``first <= p < end``.

    producer      operator that made it, or wrote to it last
    spec          shape and dtype as it was made; the dimension that follows the batch
    bytes         of its memory, which may be more than its elements take
    end           one more than the number of positions where the step leaves it behind
    saved_by      operator whose backward asked for it first; None where backward does not need it
    gradient_of   parameter whose gradient it is or was added to; None for all else
    """

    producer: str
    spec: TensorSpec
    bytes: Amount
    first: int
    end: int
    saved_by: str | None = None
    gradient_of: str | None = None


@dataclass(frozen=True)
class ModuleCall:
    """One forward call of `module` at the positions ``first <= p < end``.

    `inputs` and `outputs` index the step's tensors; parameters, buffers and the batch are not among
    them. `writes_outside`: it changed a tensor that is older than the call.
    """

    module: str
    first: int
    end: int
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    needs_grad: bool
    writes_outside: bool = False


@dataclass(frozen=True)
class Module:
    """A submodule by its path; a parent comes before its children.

    Modules of equal `structure` have the same tree of classes, parameter shapes and dtypes.
    `repeatable`: a second call with the arguments of the first did the same and left nothing
    behind; False where this was not tried.
    """

    path: str
    structure: int
    repeatable: bool = False


# ---- block by block ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Segment:
    """A piece of the forward pass that belongs to one block, with its memory on one device.

    All in bytes; parameters, their gradients, buffers and the batch are not counted.

    kept           allocated in its forward and still live when the backward pass starts (what
                   backward needs, and its output where somebody saved it)
    output         what stays instead of `kept` when the segment is recomputed: its output where it
                   is still live, and its input where recomputing is all that needs it
    forward_peak   highest live memory during its forward, minus the `kept` of those before it
    backward_peak  highest live memory during its backward, minus the `kept` of the segments up to
                   and including it; the gradient of its output is in it
    cast           of `kept`: parameters in 16 bits, as autocast makes them

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
    cast_bytes: Amount = NOTHING


def segments(
    step: Step, blocks: Iterable[str], *, casts: Sequence[int] = ()
) -> tuple[Segment, ...]:
    """Cut the forward pass of `step` at the calls of the modules `blocks`, in forward order.

    What lies between these calls is block ``""``. `casts` are the tensors that are parameters in 16
    bits.
    """
    stretches = stretches_of(step, blocks)
    # exact bytes at both batch sizes: amounts are the lines through them
    small, large = (_sizes(StepMemory(step, size), stretches, casts) for size in step.batch_sizes)
    return tuple(
        Segment(block, *(Amount.fit(step.batch_sizes, values) for values in zip(a, b, strict=True)))
        for (block, *_), a, b in zip(stretches, small, large, strict=True)
    )


def stretches_of(step: Step, blocks: Iterable[str]) -> list[Stretch]:
    """Cut the forward pass at calls of `blocks`; pieces without a kernel are dropped."""
    # Calls are in the order of their beginnings: an outer block comes before what is inside of it.
    named = set(blocks) - {""}
    stretches: list[Stretch] = []
    position = 0
    for call in step.calls:
        if call.module in named and call.first >= position:  # not inside another call of a block
            stretches += [
                ("", position, call.first, None),
                (call.module, call.first, call.end, call),
            ]
            position = call.end
    stretches.append(("", position, step.backward_start, None))
    return [stretch for stretch in stretches if stretch[1] < stretch[2]]


def _sizes(
    memory: StepMemory, stretches: list[Stretch], casts: Sequence[int]
) -> list[tuple[int, int, int, int, int]]:
    # The bytes (kept, output, forward peak, backward peak, casts) of each stretch
    made = [(memory.step.tensors[i].first, int(memory.bytes[i])) for i in casts]
    # peaks are above what earlier segments keep (in backward: and this one)
    peaks = _backward_peaks(memory, stretches)
    rows = []
    for index, (_, first, end, call) in enumerate(stretches):
        # all of this stretch and of those before it, at the start of the backward pass
        before, kept = memory.kept(0, first), memory.kept(first, end)
        output = kept if call is None else memory.output(call)
        forward_peak = int(memory.live[first:end].max()) - before
        backward_peak = peaks[index] - before - kept if index in peaks else 0
        cast = sum(size for position, size in made if first <= position < end)
        rows.append((kept, output, forward_peak, backward_peak, cast))
    return rows


def _backward_peaks(memory: StepMemory, stretches: list[Stretch]) -> dict[int, int]:
    # The highest live bytes in the backward of each stretch that has one
    if not stretches:
        return {}
    current = backward_owners(memory.step, stretches)
    peaks = np.zeros(len(stretches), np.int64)
    np.maximum.at(peaks, current, memory.live[memory.step.backward_start :])
    return {index: int(peaks[index]) for index in np.unique(current).tolist()}


def backward_owners(step: Step, stretches: Sequence[Stretch]) -> Indices:
    """Return the stretch of the kernel at each position of the backward pass."""
    # which stretch owns the kernel at each position of the backward pass, -1 for none
    order, start = np.array(step.order, np.int64), step.backward_start
    stretch_of_op = np.full(order.max(initial=-1) + 1, -1)
    for index, (_, first, end, _) in enumerate(stretches):
        stretch_of_op[order[first:end]] = index
    own = stretch_of_op[order[start:]]
    # An operator that only made views in forward has no position there; its backward is beside that
    # of its neighbour.
    last = np.maximum.accumulate(np.where(own >= 0, np.arange(len(own)), -1))
    owners: Indices = np.where(last >= 0, own[last], len(stretches) - 1)
    return owners


class StepMemory:
    """The bytes of a step's tensors for `batch_size` samples."""

    def __init__(self, step: Step, batch_size: float) -> None:
        self.step, self._tensors = step, _columns(step)
        fixed, per_sample = self._tensors.fixed, self._tensors.per_sample
        self.bytes = np.rint(fixed + per_sample * batch_size).astype(np.int64)
        self._workspaces = [
            (position, round(amount.at(batch_size))) for position, amount in step.workspaces
        ]

    @cached_property
    def live(self) -> Indices:
        """Bytes live at each position (positions,).

        Workspaces are included, gradients of parameters are not.
        """
        positions, tensors = len(self.step.order), self._tensors
        # + at the first position of each tensor, - at its end: the running sum is what is live
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
        # Bytes kept for backward of what is made before each position (backward_start + 1,)
        tensors, start = self._tensors, self.step.backward_start
        sizes = np.zeros(start + 1, np.int64)
        kept = (tensors.first < start) & (start < tensors.end) & tensors.counted  # `Step.is_kept`
        np.add.at(sizes, tensors.first[kept] + 1, self.bytes[kept])
        total: Indices = np.cumsum(sizes)
        return total

    def kept(self, first: int, end: int) -> int:
        """Return the bytes made at ``first <= position < end`` that are live at backward start."""
        return int(self._kept_until[end] - self._kept_until[first])

    def output(self, call: ModuleCall) -> int:
        """Return the bytes that stay when `call` is recomputed.

        These are its outputs that are kept, and its inputs that nothing else keeps.
        """
        tensors = self.step.tensors
        # kept outputs that the call made itself; inputs that only recomputing keeps alive
        own = [
            i
            for i in call.outputs
            if self.step.is_kept(tensors[i]) and tensors[i].first >= call.first
        ]
        inputs = [i for i in call.inputs if not self.step.is_kept(tensors[i])]
        return int(self.bytes[[*own, *inputs]].sum())


@dataclass(frozen=True, eq=False)
class _Columns:
    """Bytes, fixed and per sample, and lifetimes of the tensors of a step, each (tensors,)."""

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

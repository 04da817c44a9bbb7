"""The operator graph of one training step: frozen values, validated once, with a JSON round trip.

Symbols: B batch size (samples per rank), Amount(B) = fixed + per_sample * B.
Nothing here knows how a graph was captured or what it will be used for.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

VERSION = 1


@dataclass(frozen=True)
class Amount:
    """A quantity that is linear in the batch size: ``fixed + per_sample * batch_size``."""

    fixed: float = 0.0
    per_sample: float = 0.0

    def at(self, batch_size: float) -> float:
        """The quantity for `batch_size` samples per rank."""
        return self.fixed + self.per_sample * batch_size

    def __add__(self, other: Amount) -> Amount:
        return Amount(self.fixed + other.fixed, self.per_sample + other.per_sample)

    @classmethod
    def fit(cls, batch_sizes: tuple[int, int], values: tuple[float, float]) -> Amount:
        """The line through two measurements; a constant when both batch sizes are equal."""
        (b0, b1), (v0, v1) = batch_sizes, values
        per_sample = 0.0 if b0 == b1 else (v1 - v0) / (b1 - b0)
        return cls(v0 - per_sample * b0, per_sample)


@dataclass(frozen=True)
class TensorSpec:
    """Shape and dtype (``"float32"``) of a tensor at the captured batch size; `batch_dim` scales with it."""

    shape: tuple[int, ...]
    dtype: str
    batch_dim: int | None = None


@dataclass(frozen=True)
class Kernel:
    """Identical low-level operator calls: `count` calls of `name` with `arguments`.

    `arguments` is a JSON value from which the call can be made again on a device (see `kernels.encode_arguments`).
    `flops` and `bytes` (read and written) are those of one call.
    """

    name: str
    arguments: Any
    flops: Amount
    bytes: Amount
    count: int = 1


@dataclass(frozen=True)
class Parameter:
    """A parameter under the first name it is met by; tied weights list their other names in `aliases`."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    block: str
    trainable: bool = True
    aliases: tuple[str, ...] = ()

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Op:
    """A leaf module call (`kind` is its class name) or a functional operator between modules (`kind` ``"aten.add"``).

    `module` is the innermost module that ran it, `block` the block (see `Block`) it belongs to.
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

    def _flops(self, kernels: Iterable[Kernel], batch_size: float) -> float:
        return sum(kernel.flops.at(batch_size) * kernel.count for kernel in kernels)

    def forward_flops(self, batch_size: float) -> float:
        """Floating-point operations of the forward pass."""
        return self._flops(self.forward, batch_size)

    def backward_flops(self, batch_size: float) -> float:
        """Floating-point operations of the backward pass."""
        return self._flops(self.backward, batch_size)


@dataclass(frozen=True)
class TensorEdge:
    """Operator `source` produces a tensor that operator `target` reads."""

    source: str
    target: str
    tensor: TensorSpec


@dataclass(frozen=True)
class Block:
    """The unit a plan decides about: a module called once per step, or ``""`` for everything outside such modules.

    Blocks with equal `group` are repetitions of one structure. `recomputable` says whether its forward may run again in
    the backward pass (a module whose call was captured exactly once and whose output needs gradients).
    """

    name: str
    group: int
    recomputable: bool


@dataclass(frozen=True)
class Segment:
    """A contiguous stretch of the forward pass that belongs to one block, with its memory on one device, in bytes.

    Parameters, their gradients, buffers and the batch are not in these numbers.

    kept           allocated in its forward and still live when the backward pass starts (what backward needs, and its
                   output where somebody saved it)
    output         what stays instead of `kept` when the segment is recomputed: its output where it is still live, and
                   its input where recomputing is all that needs it
    forward_peak   highest live memory during its forward, minus the `kept` of the segments before it
    backward_peak  highest live memory during its backward, minus the `kept` of the segments up to and including it; the
                   gradient of its output is in it

    Live memory is thus a sum: ``sum(kept of earlier segments) + forward_peak`` in the forward pass of a segment,
    ``sum(kept of earlier segments and its own) + backward_peak`` in its backward pass. Recomputing an earlier segment
    replaces that segment's `kept` by its `output`; during its own backward a recomputed segment has all of its `kept`.
    """

    block: str
    kept_bytes: Amount
    output_bytes: Amount
    forward_peak_bytes: Amount
    backward_peak_bytes: Amount


@dataclass(frozen=True)
class OpGraph:
    """One training step of `model`: operators, who feeds whom, parameters, blocks and the memory timeline.

    `ops` are in execution order; `timeline` in forward order, the backward pass runs through it in reverse.
    `buffer_bytes` are the module's buffers, `input_bytes` the batch. `batch_scaling` says whether amounts are known for
    other batches than those of `batch_size` samples; without it they are constants, and `batch_size` may be 1 for a batch
    whose size is unknown. `unused` are the trainable parameters that the step gave no gradient. Raises ValueError when
    the parts contradict.
    """

    model: str
    batch_size: int
    ops: tuple[Op, ...]
    edges: tuple[TensorEdge, ...]
    parameters: tuple[Parameter, ...]
    blocks: tuple[Block, ...]
    timeline: tuple[Segment, ...]
    buffer_bytes: int
    input_bytes: Amount
    batch_scaling: bool = True
    unused: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        names = [op.name for op in self.ops]
        blocks = {block.name for block in self.blocks}
        known = set(names)
        if len(known) != len(names):
            raise ValueError("two operators have the same name")
        if self.batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {self.batch_size}")
        for edge in self.edges:
            if edge.source not in known or edge.target not in known:
                raise ValueError(f"edge {edge.source!r} -> {edge.target!r} names an operator that does not exist")
        items: list[Op | Parameter | Segment] = [*self.ops, *self.parameters, *self.timeline]
        for item in items:
            if item.block not in blocks:
                raise ValueError(f"{item} is in block {item.block!r}, which does not exist")

    @property
    def fingerprint(self) -> str:
        """Identifies the model, not the batch; see `model_fingerprint`."""
        return model_fingerprint(self.model, [(p.name, p.shape, p.dtype) for p in self.parameters])

    def block_parameters(self, block: str) -> list[Parameter]:
        """The parameters that `block` owns."""
        return [parameter for parameter in self.parameters if parameter.block == block]

    def block_kernels(self, block: str, direction: str) -> list[Kernel]:
        """All kernels of `block` in `direction`, ``"forward"`` or ``"backward"``."""
        return [k for op in self.ops if op.block == block for k in getattr(op, direction)]

    def to_json(self) -> str:
        """The graph as JSON text; `from_json` reads it back."""
        return json.dumps({"version": VERSION, **dataclasses.asdict(self)})

    @classmethod
    def from_json(cls, text: str) -> OpGraph:
        """Read what `to_json` wrote. Raises ValueError on another version."""
        data = json.loads(text)
        if data.pop("version", None) != VERSION:
            raise ValueError(f"this graph was not written by version {VERSION} of the format; capture it again")
        return cls(
            model=data["model"],
            batch_size=data["batch_size"],
            ops=tuple(_op(op) for op in data["ops"]),
            edges=tuple(TensorEdge(e["source"], e["target"], _tensor(e["tensor"])) for e in data["edges"]),
            parameters=tuple(
                Parameter(**{**p, "shape": tuple(p["shape"]), "aliases": tuple(p["aliases"])})
                for p in data["parameters"]
            ),
            blocks=tuple(Block(**b) for b in data["blocks"]),
            timeline=tuple(
                Segment(s["block"], **{k: Amount(**v) for k, v in s.items() if k != "block"}) for s in data["timeline"]
            ),
            buffer_bytes=data["buffer_bytes"],
            input_bytes=Amount(**data["input_bytes"]),
            batch_scaling=data.get("batch_scaling", True),
            unused=tuple(data.get("unused", ())),
        )


def model_fingerprint(model: str, parameters: Iterable[tuple[str, tuple[int, ...], str]]) -> str:
    """A short hash of a model's class name and its parameters: name, shape and dtype (``"float32"``) of each."""
    text = json.dumps([model, sorted((name, list(shape), dtype) for name, shape, dtype in parameters)])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _tensor(data: Mapping[str, Any]) -> TensorSpec:
    return TensorSpec(tuple(data["shape"]), data["dtype"], data["batch_dim"])


def _kernel(data: Mapping[str, Any]) -> Kernel:
    return Kernel(**{**data, "flops": Amount(**data["flops"]), "bytes": Amount(**data["bytes"])})


def _op(data: Mapping[str, Any]) -> Op:
    return Op(
        **{
            **data,
            "parameters": tuple(data["parameters"]),
            "outputs": tuple(_tensor(t) for t in data["outputs"]),
            "forward": tuple(_kernel(k) for k in data["forward"]),
            "backward": tuple(_kernel(k) for k in data["backward"]),
            "saved_bytes": Amount(**data["saved_bytes"]),
        }
    )

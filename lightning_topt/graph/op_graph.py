"""The operator graph of one training step: frozen values, validated once, with a JSON round trip.

Symbols: B batch size (samples per rank), Amount(B) = fixed + per_sample * B.
Nothing here knows how a graph was captured or what it will be used for.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from lightning_topt.graph.graph_json import decode_parts, encode_parts
from lightning_topt.graph.operators import Block, Kernel, Op, Parameter, TensorEdge
from lightning_topt.graph.quantities import Amount, TensorSpec
from lightning_topt.graph.step_tensors import Module, ModuleCall, Step, StepTensor
from lightning_topt.graph.timeline import Segment, segments

__all__ = [
    "Amount",
    "Block",
    "Kernel",
    "Module",
    "ModuleCall",
    "Op",
    "OpGraph",
    "Parameter",
    "Segment",
    "Step",
    "StepTensor",
    "TensorEdge",
    "TensorSpec",
    "model_fingerprint",
]


@dataclass(frozen=True)
class OpGraph:
    """One training step of `model`: operators, who feeds whom, parameters, blocks and the tensors
    it makes.

    `ops` are in execution order; `step` says when their kernels run and how long every tensor
    lives. `buffer_bytes` are the module's buffers, `input_bytes` the batch. `batch_scaling` says
    whether amounts are known for other batches than those of `batch_size` samples; without it they
    are constants, and `batch_size` may be 1 for a batch whose size is unknown. `unused` are the
    trainable parameters that the step gave no gradient. `whole_model`: the step is that of one
    rank, whose parameters are slices of those of the model with this fingerprint. Raises ValueError
    when the parts contradict.
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
                raise ValueError(
                    f"edge {edge.source!r} -> {edge.target!r} names an operator that does not exist"
                )
        items: list[Op | Parameter] = [*self.ops, *self.parameters]
        for item in items:
            if item.block not in blocks:
                raise ValueError(f"{item} is in block {item.block!r}, which does not exist")
        self.step.check(known, count=len(names))

    @cached_property
    def fingerprint(self) -> str:
        """Identifies the model, not the batch; see `model_fingerprint`."""
        if self.whole_model is not None:
            return self.whole_model
        return model_fingerprint(self.model, [(p.name, p.shape, p.dtype) for p in self.parameters])

    @cached_property
    def timeline(self) -> tuple[Segment, ...]:
        """The memory of the step, block by block in forward order; the backward pass runs through
        it in reverse.
        """
        return segments(self.step, [block.name for block in self.blocks])

    def with_blocks(self, blocks: Iterable[Block]) -> OpGraph:
        """Return the same step with `blocks` to decide about: operators and parameters go to the
        outermost block around them.

        `blocks` are block ``""`` and modules that are not inside one another. Raises ValueError
        where one of them is no module of this graph.
        """
        chosen = tuple(blocks)
        names = {block.name for block in chosen}
        if unknown := names - {"", *(module.path for module in self.step.modules)}:
            raise ValueError(
                f"{sorted(unknown)[0]!r} is not a module of {self.model}; blocks are modules by "
                "their paths"
            )
        return replace(
            self,
            ops=tuple(
                _moved(op, next((path for path in op.stack if path in names), ""))
                for op in self.ops
            ),
            parameters=tuple(_moved(p, next(_around(p.name, names), "")) for p in self.parameters),
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

    def to_json(self) -> str:
        """Return the graph as JSON text; `from_json` reads it back."""
        return json.dumps(encode_parts(vars(self)))

    @classmethod
    def from_json(cls, text: str) -> OpGraph:
        """Read what `to_json` wrote. Raises ValueError on another version."""
        return cls(**decode_parts(json.loads(text)))


def model_fingerprint(model: str, parameters: Iterable[tuple[str, tuple[int, ...], str]]) -> str:
    """Return a short hash of a model's class name and its parameters: name, shape and dtype
    (``"float32"``) of each.
    """
    text = json.dumps(
        [model, sorted((name, list(shape), dtype) for name, shape, dtype in parameters)]
    )
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _moved(item: Any, block: str) -> Any:
    return item if item.block == block else replace(item, block=block)


def _around(name: str, paths: Container[str]) -> Iterator[str]:
    """The modules of `paths` that parameter `name` is in, outermost first."""
    parts = name.split(".")[:-1]
    return (
        path
        for path in (".".join(parts[:count]) for count in range(1, len(parts) + 1))
        if path in paths
    )

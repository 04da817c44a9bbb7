"""The operator graph of one training step: frozen values, validated once.

    graph.ops          operators in execution order, with their kernels and parameters
    graph.edges        who feeds whom
    graph.blocks       the modules that a plan decides about; "" is everything outside of them
    graph.step         order of the kernels, lifetimes of all tensors (`step_memory`)

Nothing here knows how a graph was captured or what it will be used for. Between processes it is
pickled.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Container, Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeVar

import torch

from lightning_topt.graph.step_memory import (
    NOTHING,
    Amount,
    Segment,
    Step,
    TensorSpec,
    segments,
)


@dataclass(frozen=True)
class OpGraph:
    """One training step of `model`: its operators, parameters, blocks and tensors.

    Raises ValueError when the parts contradict one another.

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
        compiled: chains of elementwise operators are one kernel each (`fused_chains`); else each
            operator is its own, as the step runs eagerly.
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
    compiled: bool = False

    def __post_init__(self) -> None:
        # names are unique, and everything that refers to one of them finds it
        names = [op.name for op in self.ops]
        blocks = {block.name for block in self.blocks}
        known = set(names)
        if len(known) != len(names):
            raise ValueError("two operators have the same name")
        if self.batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {self.batch_size}")
        # edges, blocks and the step name what exists
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

    @property
    def predicted_as(self) -> str:
        """What its costs are those of: an "eager" step, or a "compiled" one."""
        return "compiled" if self.compiled else "eager"

    @cached_property
    def fingerprint(self) -> str:
        """Identifies the model, not the batch; see `model_fingerprint`."""
        # the slices of one rank stand for the model that they were cut from
        if self.whole_model is not None:
            return self.whole_model
        return model_fingerprint(self.model, [(p.name, p.shape, p.dtype) for p in self.parameters])

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
        shapes = {p.name: p.shape for p in self.parameters if p.dtype == "float32"}
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
                f"{sorted(unknown)[0]!r} is not a module of {self.model}; blocks are modules by "
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


Item = TypeVar("Item", "Op", "Parameter")


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

    Tied weights list their other names in `aliases`.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    block: str
    trainable: bool = True
    aliases: tuple[str, ...] = ()

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

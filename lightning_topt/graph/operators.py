"""The operators of a training step, what they run and read, and the blocks they are grouped in:
frozen values.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from lightning_topt.graph.quantities import NOTHING, Amount, TensorSpec


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
class Parameter:
    """A parameter under the first name it is met by; tied weights list their other names in
    `aliases`.
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
        """Bytes of the whole parameter."""
        return self.numel * int(getattr(torch, self.dtype).itemsize)


@dataclass(frozen=True)
class Op:
    """A leaf module call (`kind` is its class name) or a functional operator between modules
    (`kind` ``"aten.add"``).

    `module` is the innermost module that ran it, `block` the block (see `Block`) it belongs to,
    `stack` all the modules around it, outermost first; the last one is `module`.
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
class TensorEdge:
    """Operator `source` produces a tensor that operator `target` reads."""

    source: str
    target: str
    tensor: TensorSpec


@dataclass(frozen=True)
class Block:
    """The unit a plan decides about: a module called once per step, or ``""`` for everything
    outside such modules.

    Blocks with equal `group` are repetitions of one structure. `recomputable` says whether its
    forward may run again in the backward pass (a module whose call was captured exactly once and
    whose output needs gradients).
    """

    name: str
    group: int
    recomputable: bool

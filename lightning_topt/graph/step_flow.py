"""`StepFlow`: a training step as a chain of calls of modules, and which tensors each of them needs of the calls before it.

A *unit* is a module whose calls are run whole; between calls of units there are functional operators only. A call *needs* a
tensor that an earlier call returned where that tensor, or what functional operators make of it, is among its arguments.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import TreeSpec


class TensorRef(NamedTuple):
    """A tensor that a call of a unit returns: `call` is its index among the flow's calls, `leaf` the tensor's place among the
    leaves of what it returned.
    """

    call: int
    leaf: int


@dataclass(frozen=True)
class LeafSpec:
    """All about a tensor that a stand-in returns but its elements."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    @property
    def nbytes(self) -> int:
        """Bytes of its elements."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@dataclass(frozen=True)
class Draw:
    """Random numbers that an operator draws: `op` is called again with `arguments`, in which `LeafSpec` stand for tensors."""

    op: Any
    arguments: tuple[Any, ...]
    keywords: tuple[tuple[str, Any], ...]


@dataclass(frozen=True)
class UnitCall:
    """The `index`-th call of the module at path `module` in a step.

    `structure` and `leaves` are what it returned: leaves that are tensors as `LeafSpec`, all others as they are. `needs` are
    tensors of earlier calls. `reads` are the parameters that functional operators on the way to its arguments read. `draws` are
    the random numbers drawn inside of it, and `draws_before` those of functional operators between the last call and it.
    """

    module: str
    index: int
    structure: TreeSpec
    leaves: tuple[Any, ...]
    needs: frozenset[TensorRef]
    reads: frozenset[str] = frozenset()
    draws: tuple[Draw, ...] = ()
    draws_before: tuple[Draw, ...] = ()


@dataclass(frozen=True)
class StepFlow:
    """The calls of a step in order, and what its end needs: the loss, what the step returns and what it logs.

    `end_reads` and `end_draws` are parameters read and random numbers drawn by functional operators after the last call.
    """

    calls: tuple[UnitCall, ...]
    end_needs: frozenset[TensorRef]
    end_reads: frozenset[str] = frozenset()
    end_draws: tuple[Draw, ...] = ()

    def crossings(self, stage_of_call: Sequence[int]) -> dict[TensorRef, tuple[int, ...]]:
        """Return the tensors that one stage makes and later ones need, with these stages in order.

        `stage_of_call` has the stage of each call, not decreasing; the end belongs to the last stage.
        """
        last = max(stage_of_call, default=0)
        readers: dict[TensorRef, set[int]] = {}
        for stage, needs in [
            *zip(stage_of_call, (call.needs for call in self.calls), strict=True),
            (last, self.end_needs),
        ]:
            for ref in needs:
                if stage_of_call[ref.call] < stage:
                    readers.setdefault(ref, set()).add(stage)
        return {ref: tuple(sorted(stages)) for ref, stages in sorted(readers.items())}

"""The readers of a flow are calls of units and the end of the step: while it is recorded, they
collect what they need.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from lightning_topt.graph.errors import CaptureError
from lightning_topt.graph.step_flow import Draw, LeafSpec, TensorRef, UnitCall
from lightning_topt.graph.writes import is_strided

BETWEEN = -1  # the index outside of all calls


@dataclass(eq=False)
class FlowReader:
    """A reader is a call of a unit, or the end of the step, and what it needs.

    `own` are identities of its parameters' origins.
    """

    module: str = ""
    index: int = BETWEEN
    own: set[int] = field(default_factory=set)
    needs: set[TensorRef] = field(default_factory=set)
    reads: set[str] = field(default_factory=set)
    writes: set[str] = field(default_factory=set)
    draws: list[Draw] = field(default_factory=list)
    draws_before: tuple[Draw, ...] = ()
    structure: Any = None
    leaves: list[Any] = field(default_factory=list)

    def unit_call(self, rewritten: Collection[TensorRef]) -> UnitCall:
        """Return the call as the flow has it; `rewritten` are the results, of all calls, that the
        step writes to later.
        """
        leaves = (
            replace(leaf, is_rewritten=True) if TensorRef(self.index, number) in rewritten else leaf
            for number, leaf in enumerate(self.leaves)
        )
        return UnitCall(
            self.module,
            self.index,
            self.structure,
            tuple(leaves),
            needs=frozenset(ref for ref in self.needs if ref.call != self.index),
            reads=frozenset(self.reads),
            draws=tuple(self.draws),
            draws_before=self.draws_before,
            writes=frozenset(self.writes),
        )


def leaf_spec(unit: str, tensor: Tensor, same_as: int | None) -> LeafSpec:
    """Return the shape and kind of a tensor that a call of `unit` returned; `same_as`: the number
    of the same one before it.
    """
    if not is_strided(tensor):
        raise CaptureError(
            f"block {unit!r} returns a tensor with layout {tensor.layout}, which cannot pass from "
            "stage to stage; give a plan without a pipeline, or a block that contains what reads it"
        )
    stride = tensor.stride()
    if not torch._prims_common.is_non_overlapping_and_dense_or_false(tensor):
        stride = torch.empty(tensor.shape, device="meta").stride()
    return LeafSpec(tuple(tensor.shape), tuple(stride), tensor.dtype, tensor.requires_grad, same_as)

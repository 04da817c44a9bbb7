"""Stand-ins: what a call of a unit returns on a stage that does not run it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._pytree import tree_unflatten

from lightning_topt.graph.draws import draw_again, draw_of
from lightning_topt.graph.fake import ShapeMode, empty_fake
from lightning_topt.graph.step_flow import LeafSpec, TensorRef, UnitCall


class StandIns(ShapeMode):  # type: ignore[no-untyped-call]
    """Makes what calls of units return where they are not run: the tensors that were received, and shapes for all others.

    Functional operators on such shapes compute shapes; where they draw random numbers they draw them.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self.device = device
        self._is_drawing = False

    def dispatch(self, func: OpOverload, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Compute the shape of a result, and draw the random numbers that the operator would draw."""
        if self._is_drawing or torch.Tag.nondeterministic_seeded not in func.tags:
            return super().dispatch(func, types, args, kwargs)
        self._is_drawing = True
        try:
            draw = draw_of(func, args, kwargs or {})
            if draw is not None and not draw.problem:
                with torch.utils._python_dispatch._disable_current_modes():
                    draw_again([draw], self.device)
            return super().dispatch(func, types, args, kwargs)
        finally:
            self._is_drawing = False

    def result(self, call: UnitCall, received: Mapping[TensorRef, Tensor]) -> Any:
        """Return what `call` returned, with the tensors that are `received` in their places."""
        leaves: list[Any] = []
        for number, leaf in enumerate(call.leaves):
            if not isinstance(leaf, LeafSpec):
                leaves.append(leaf)
            elif leaf.same_as is not None:
                leaves.append(leaves[leaf.same_as])
            else:
                given = received.get(TensorRef(call.index, number))
                leaves.append(self.absent(leaf) if given is None else given)
        return tree_unflatten(leaves, call.structure)

    def absent(self, spec: LeafSpec) -> Tensor:
        """Return a tensor without elements."""
        return empty_fake(self, like=(spec.shape, spec.stride, spec.dtype, self.device))


class Received(torch.autograd.Function):
    """The identity, so that user code may write to a received tensor in place, which autograd forbids for a leaf."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        """Return another tensor on the same memory."""
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Return the gradient as it came."""
        return gradients[0]

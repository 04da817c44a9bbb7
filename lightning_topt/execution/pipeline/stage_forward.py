"""`StageForward`: what a stage's forward pass of a microbatch has come to, and what its backward
pass starts from.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from lightning_topt.execution.pipeline.split_backward import SplitBackward
from lightning_topt.graph.step_flow import TensorRef


@dataclass(eq=False)
class StageForward:
    """A `StageForward` is a forward pass of a stage that is under way, or waits for its backward
    pass.

    `leaves` are the tensors `received` that require gradients, as they came; `edges` lead to those
    of the tensors `sent`.
    """

    stage_index: int
    received: dict[TensorRef, Tensor] = field(default_factory=dict)
    leaves: dict[TensorRef, Tensor] = field(default_factory=dict)
    sent: dict[TensorRef, Tensor] = field(default_factory=dict)
    edges: dict[TensorRef, GradientEdge] = field(default_factory=dict)
    next_call: int = 0
    is_inside: bool = False
    is_done: bool = False
    is_backward: bool = False
    weights: SplitBackward | None = None

    def roots(
        self, gradients: Mapping[TensorRef, Tensor], loss: Tensor | None
    ) -> tuple[list[GradientEdge], list[Tensor | None]]:
        """Return where the backward pass starts, and the gradient there: at what was sent, and at
        the loss if there is one.
        """
        roots = [self.edges[ref] for ref in self.edges if ref in gradients]
        given: list[Tensor | None] = [gradients[ref] for ref in self.edges if ref in gradients]
        if loss is not None and loss.requires_grad:
            roots.append(get_gradient_edge(loss))
            given.append(torch.ones_like(loss))
        return roots, given

    def gradients(self, found: Mapping[TensorRef, Tensor | None]) -> dict[TensorRef, Tensor]:
        """Return those of the leaves as `found`; zeros where there is none."""
        made = {}
        for ref, leaf in self.leaves.items():
            gradient = found[ref]
            made[ref] = torch.zeros_like(leaf) if gradient is None else gradient
        return made

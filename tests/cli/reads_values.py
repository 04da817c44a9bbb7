"""Models that `topt plan` looks at otherwise than at others: one whose step depends on values, one
that cannot be split, one with chains of elementwise functions.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lightning_topt.demo import ByteGPT


class ReadsValues(ByteGPT):
    """Looks at its loss."""

    def training_step(self, batch: Tensor, *args: Any) -> Tensor:
        loss = super().training_step(batch, *args)
        return loss * 2 if loss.item() > 100 else loss


class Unseen(nn.Linear):
    """Computes where torch functions are not seen."""

    def forward(self, x: Tensor) -> Tensor:
        with torch._C.DisableTorchFunction():
            return super().forward(x)


class Hidden(ByteGPT):
    """Its perceptrons do not run on slices."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        for block in self.blocks:
            block.mlp_out = Unseen(block.mlp_out.in_features, block.mlp_out.out_features)

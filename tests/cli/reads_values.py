"""A model whose step depends on values, for `topt plan`."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lightning_topt.cli.tasks.byte_lm import ByteGPT


class ReadsValues(ByteGPT):
    """Looks at its loss."""

    def training_step(self, batch: Tensor, *args: Any) -> Tensor:
        loss = super().training_step(batch, *args)
        return loss * 2 if loss.item() > 100 else loss

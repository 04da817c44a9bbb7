"""Outer steps of rows that train alone, written out: the slow twin of `OuterSteps` of stages."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from lightning_topt.communication import LocalSteps


class OuterTwin:
    """Outer steps of one stage, whose parameters in each row are `rows`."""

    def __init__(self, method: LocalSteps, rows: Sequence[Sequence[nn.Parameter]]) -> None:
        self.method, self.rows = method, rows
        self.anchor = nn.utils.parameters_to_vector(rows[0]).detach().clone()
        self.momentum = torch.zeros_like(self.anchor)
        self.residuals = [torch.zeros_like(self.anchor) for _ in rows]

    @torch.no_grad()
    def meet(self) -> None:
        method, sent = self.method, []
        for residual, row in zip(self.residuals, self.rows, strict=True):
            gone = self.anchor - nn.utils.parameters_to_vector(row)
            if method.density is not None:
                residual.mul_(method.residual_decay).add_(gone)
                count = max(1, round(method.density * len(residual)))
                largest = residual.abs().topk(count).indices
                gone = torch.zeros_like(residual)
                gone[largest] = residual[largest]
                residual -= gone
            sent.append(gone)
        mean = torch.stack(sent).mean(0)
        self.momentum.mul_(method.outer_momentum).add_(mean)
        step = mean + method.outer_momentum * self.momentum if method.outer_momentum else mean
        self.anchor -= method.outer_learning_rate * step
        for row in self.rows:
            nn.utils.vector_to_parameters(self.anchor.clone(), row)


@torch.no_grad()
def average_buffers(models: Sequence[nn.Module]) -> None:
    for of_rows in zip(*(model.buffers() for model in models), strict=True):
        value = of_rows[0].clone()
        if value.is_floating_point():
            value = torch.stack(of_rows).mean(0)
        for buffer in of_rows:
            buffer.copy_(value)

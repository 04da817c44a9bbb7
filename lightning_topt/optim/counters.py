"""Counters count the calls of an optimizer's step outside of the state of its parameters."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.optim import Optimizer


class Counters:
    """The numbers of an optimizer and its groups before a step, to give each of several calls the
    same start.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self.attributes = {
            k: v
            for k, v in vars(optimizer).items()
            if isinstance(v, int | float) and type(v) is not bool
        }
        self.options = [
            {
                k: v.clone() if isinstance(v, Tensor) else v
                for k, v in group.items()
                if isinstance(v, Tensor | int | float)
            }
            for group in optimizer.param_groups
        ]

    @torch.no_grad()
    def restore(self) -> None:
        """Set them back, tensors in place; what is new since then goes."""
        vars(self.optimizer).update(self.attributes)
        for group, options in zip(self.optimizer.param_groups, self.options, strict=True):
            for key in [
                k
                for k, v in group.items()
                if isinstance(v, Tensor | int | float) and k not in options
            ]:
                del group[key]
            for key, value in options.items():
                if isinstance(value, Tensor) and isinstance(group[key], Tensor):
                    group[key].copy_(value)
                else:
                    group[key] = value

"""The Trainer's gradient clipping and GradScaler on sharded gradients (DTensors), beside whole
ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from lightning.pytorch.plugins.precision import Precision
from torch import Tensor
from torch.optim import Optimizer

from lightning_topt.optim.clipping import agree_on_overflow
from lightning_topt.optim.full_state import parameters_of


class Clips(Protocol):
    """An engine, or what clips for it."""

    @property
    def device(self) -> torch.device:
        """The device of the gradients."""

    def clip_norm(self, parameters: Sequence[Tensor], max_norm: float) -> Any:
        """Scale the gradients to a common norm of at most `max_norm`."""

    def clip_value(self, parameters: Sequence[Tensor], clip_value: float) -> None:
        """Clamp every gradient."""


def clip_sharded(precision: Precision, engine: Clips) -> Callable[[], None]:
    """Make `precision` clip, unscale and look for overflows over all that ranks hold; the result
    undoes it.
    """

    def by_norm(optimizer: Optimizer, clip_val: int | float) -> None:
        engine.clip_norm(parameters_of(optimizer), clip_val)

    def by_value(optimizer: Optimizer, clip_val: int | float) -> None:
        engine.clip_value(parameters_of(optimizer), clip_val)

    replaced = {
        name: own
        for name, own in (("clip_grad_by_norm", by_norm), ("clip_grad_by_value", by_value))
        if getattr(type(precision), name) is getattr(Precision, name)  # not the user's own
    }
    vars(precision).update(replaced)
    scaler = getattr(precision, "scaler", None)
    unscale_whole = agree_on_overflow(scaler, engine.device) if scaler is not None else None

    def restore() -> None:
        for name, own in replaced.items():
            if vars(precision).get(name) is own:
                del vars(precision)[name]
        if unscale_whole is not None:
            unscale_whole()

    return restore

"""The Trainer's gradient clipping and GradScaler where ranks hold parts of the gradients.

Lightning clips in ``precision_plugin.clip_grad_by_norm`` and ``clip_grad_by_value``, of what the
rank holds. Here these are replaced on one precision plugin, so that norms and overflows of
DTensors, and of a pipeline's stages, are those of all ranks together.
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
    """What clips gradients over all ranks: an engine, or the steps of a continuous pipeline."""

    @property
    def device(self) -> torch.device:
        """The device of the gradients."""

    def clip_norm(self, parameters: Sequence[Tensor], max_norm: float) -> Any:
        """Scale the gradients to a common norm of at most `max_norm`."""

    def clip_value(self, parameters: Sequence[Tensor], clip_value: float) -> None:
        """Clamp every gradient."""


def clip_sharded(precision: Precision, engine: Clips) -> Callable[[], None]:
    """Let `precision` clip, and look for overflows, over all ranks; return what undoes that.

    A plugin of the user's with clipping of its own keeps it.
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
    restore_scaler = agree_on_overflow(scaler, engine.device) if scaler is not None else None

    def restore() -> None:
        for name, own in replaced.items():
            if vars(precision).get(name) is own:  # nobody has replaced it since
                del vars(precision)[name]
        if restore_scaler is not None:
            restore_scaler()

    return restore

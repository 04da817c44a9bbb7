"""The Trainer's gradient clipping and GradScaler on gradients of which every rank has its own rows
only.
"""

from __future__ import annotations

from collections.abc import Callable

from lightning.pytorch.plugins.precision import Precision
from torch.optim import Optimizer

from lightning_topt.optim.reduce_scatter import ScatteredStep, install_overflow_agreement


def clip_scattered(precision: Precision, step: ScatteredStep) -> Callable[[], None]:
    """Make `precision` clip, unscale and look for overflows over all ranks' rows; the result undoes
    it.
    """

    def by_norm(optimizer: Optimizer, clip_val: int | float) -> None:
        step.gradients(optimizer).clip_norm_(clip_val)

    def by_value(optimizer: Optimizer, clip_val: int | float) -> None:
        step.gradients(optimizer).clip_value_(clip_val)

    precision.clip_grad_by_norm = by_norm  # type: ignore[method-assign]
    precision.clip_grad_by_value = by_value  # type: ignore[method-assign]
    scaler = getattr(precision, "scaler", None)
    if scaler is not None:
        install_overflow_agreement(scaler, step.exchange)

    def restore() -> None:
        for owner, name in (
            (precision, "clip_grad_by_norm"),
            (precision, "clip_grad_by_value"),
            (scaler, "_unscale_grads_"),
        ):
            if owner is not None:
                vars(owner).pop(name, None)

    return restore

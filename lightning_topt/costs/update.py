"""Temporaries of the optimizer step: their bytes, and the seconds to take it anew."""

from __future__ import annotations

from collections.abc import Mapping

from lightning_topt.costs.page_faults import SMALLEST_BYTES
from lightning_topt.costs.training_step import TrainingStep
from lightning_topt.graph.op_graph import Parameter

Shares = Mapping[Parameter, float]  # of a parameter that one rank updates


def temporary_bytes(step: TrainingStep, shares: Shares) -> tuple[float, float]:
    """Return the bytes of temporaries of the largest of these parameters, for a for-loop; and of
    all, for foreach.
    """
    largest, together = 0.0, 0.0
    for parameter, share in shares.items():
        update = step.optimizer.updates.get(parameter.name)
        if update is not None and update.temporaries_add:
            together += update.temporary_bytes * share
        elif update is not None:
            largest = max(largest, update.temporary_bytes * share)
    return largest, together


def temporaries_seconds(step: TrainingStep, shares: Shares) -> float:
    """Return the seconds to take the temporaries of these parameters anew."""
    updates = (
        (step.optimizer.updates.get(parameter.name), share) for parameter, share in shares.items()
    )
    sizes = [update.temporary_bytes * share for update, share in updates if update is not None]
    return step.taken_seconds(sum(size for size in sizes if size >= SMALLEST_BYTES))

"""How many batches each rank has, where ranks may differ.

Lightning sets loaders up by collective calls, one for each loader that has a length, and refuses
what one rank has. `LoaderLengths` lets each rank read its own loaders; then all of them agree, and
all raise the same error.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch
from lightning.fabric.utilities.data import has_iterable_dataset, sized_len
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.loops import evaluation_loop, fit_loop, prediction_loop

from lightning_topt.plugins.lent_methods import LentMethods
from lightning_topt.plugins.presence import gather_counts

_NEVER = float("inf")
_FINE, _TOO_SMALL, _NO_LENGTH = range(3)


def are_known(combined: Any) -> bool:
    """Return whether the lengths of all loaders can be relied on: they are of no stream.

    A limit of batches is no length: the loader may end before it.
    """
    return all(
        sized_len(loader) is not None and not has_iterable_dataset(loader)
        for loader in combined.flattened
    )


class LoaderLengths:
    """What this rank has found while Lightning set its loaders up."""

    def __init__(self) -> None:
        self._found: list[tuple[float, int]] = []

    @contextmanager
    def alone(self) -> Generator[None, None, None]:
        """Let Lightning set loaders up on this rank without asking others."""
        lent = LentMethods()
        for loop in (fit_loop, evaluation_loop, prediction_loop):
            lent.lend(loop, "has_len_all_ranks", _has_length)
            lent.lend(loop, "_parse_num_batches", self._batches_of)
        try:
            yield
        finally:
            lent.give_back()

    def agree(self, *, limit: str, device: torch.device) -> None:
        """Raise ValueError on all ranks where Lightning would on some. A collective call.

        Args:
            limit: the name of the Trainer's option.
            device: of the ranks' group.
        """
        own = [value for found in self._found for value in found]
        if not own:
            return
        rows = gather_counts(own, device=device)
        for index in range(0, len(own), 2):
            batches, states = ([row[index + at] for row in rows] for at in (0, 1))
            if _NO_LENGTH in states:
                ranks = ", ".join(str(r) for r, state in enumerate(states) if state == _NO_LENGTH)
                raise ValueError(
                    f"loader {index // 2} has no length on ranks {ranks}, so that no fraction of "
                    f"it can be taken: give Trainer({limit}=...) a whole number, or 1.0"
                )
            if _TOO_SMALL in states and not any(batches):
                raise ValueError(
                    f"the fraction that {limit} says of loader {index // 2} is less than one "
                    "batch on every rank: increase it"
                )

    def _batches_of(self, own: Any, stage: Any, length: float, limit: float) -> float:
        state, batches = _FINE, 0.0
        try:
            batches = own(stage, length, limit)
        except MisconfigurationException:
            state = _NO_LENGTH if length == _NEVER else _TOO_SMALL
            batches = 0
        self._found.append((batches, state))
        return batches


def _has_length(own: Any, loader: Any, *_: Any) -> bool:
    return sized_len(loader) is not None

"""The batches of an epoch as every job finds them by itself: from a sampler, a seed and the epoch's
number.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

SAMPLERS_INSIDE = 8  # of samplers around samplers


class SeededBatches:
    """``batches(epoch)`` is what `batch_sampler` gives when nothing but `seed` and `epoch` decides.

    Torch's, NumPy's and Python's global generators are seeded while it draws (and restored), as are
    the generators that it and the samplers inside it hold; ``set_epoch`` is called where they have
    it.
    """

    def __init__(self, batch_sampler: Any, *, seed: int) -> None:
        self.batch_sampler, self.seed = batch_sampler, seed

    def __call__(self, epoch: int) -> list[list[Any]]:
        """The index lists of that epoch's batches."""
        words = np.random.SeedSequence([self.seed, epoch]).generate_state(4)
        torch_seed = int(words[0]) << 32 | int(words[1])
        sampler = self.batch_sampler
        for _ in range(SAMPLERS_INSIDE):
            if hasattr(sampler, "set_epoch"):
                sampler.set_epoch(epoch)
            if isinstance(getattr(sampler, "generator", None), torch.Generator):
                sampler.generator.manual_seed(torch_seed)
            sampler = getattr(sampler, "sampler", None)
        with restored_generators():
            torch.default_generator.manual_seed(torch_seed)
            np.random.seed(words[2])
            random.seed(int(words[3]))
            return [list(indices) for indices in self.batch_sampler]


@contextmanager
def restored_generators() -> Iterator[None]:
    """Leave the global generators (of the CPU) as they were, whatever is drawn inside."""
    states = torch.get_rng_state(), np.random.get_state(), random.getstate()
    try:
        yield
    finally:
        torch.set_rng_state(states[0])
        np.random.set_state(states[1])
        random.setstate(states[2])

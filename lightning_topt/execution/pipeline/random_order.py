"""Random numbers of microbatches as one process would draw them, whatever the order of the passes.

One process runs forward of microbatch 0, then of 1, and so on. A rank runs the stages of a
microbatch with passes of others in between, so generators are put to where the microbatch began
before each of its passes. What all passes of a rank share is one `RandomOrder`.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from lightning_topt.techniques.tensor_parallel.random_states import (
    RandomStates,
    random_states,
    set_random_states,
)


class RandomOrder:
    """Puts the generators to where a microbatch begins, for every stage of a rank.

    The first pass of each microbatch must draw all of its random numbers, and these passes must
    come in order.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._starts: list[Any] = []
        self._seen: set[tuple[int, int]] = set()
        self._given: Sequence[RandomStates] | None = None
        self._ends: dict[int, RandomStates] = {}

    @contextmanager
    def starting_from(self, states: Sequence[RandomStates]) -> Iterator[dict[int, RandomStates]]:
        """Let microbatch m of the step within begin at ``states[m]``.

        Yields the states at the end of each microbatch's passes.
        """
        before = random_states()
        self.begin_step()
        self._given, self._ends = states, {}
        try:
            yield self._ends
        finally:
            self._given = None
            self.begin_step()
            set_random_states(before)

    @contextmanager
    def microbatch(
        self, microbatch_index: int, stage_index: int, *, on_host: bool = False
    ) -> Iterator[None]:
        """Run a pass of a microbatch; the same one again begins another step.

        `on_host`: care for Python's and NumPy's generators too.
        """
        if self._given is not None:
            set_random_states(self._given[microbatch_index])
            yield
            self._ends[microbatch_index] = random_states()
            return
        # The same pass again is that of another step.
        if (stage_index, microbatch_index) in self._seen:
            self.begin_step()
        self._seen.add((stage_index, microbatch_index))
        assert microbatch_index <= len(self._starts), (
            f"microbatch {microbatch_index} runs before those in front of it"
        )
        # The first pass of a microbatch moves the generators on; later ones draw the same again.
        # Bytes, (n,); Python's and NumPy's generators only where the step draws from them.
        on_device = torch.cuda.get_rng_state(self._device) if self._device.type == "cuda" else None
        host = (random.getstate(), np.random.get_state()) if on_host else None
        now = (torch.get_rng_state(), on_device, host)
        if microbatch_index == len(self._starts):
            self._starts.append(now)
            yield
            return
        # A later stage of this rank: the same numbers again, and then on from where it was.
        self._set(self._starts[microbatch_index])
        try:
            yield
        finally:
            self._set(now)

    def begin_step(self) -> None:
        """Forget the microbatches of the last step."""
        self._starts.clear()
        self._seen.clear()

    def _set(self, state: Any) -> None:
        torch.set_rng_state(state[0])
        if state[1] is not None:
            torch.cuda.set_rng_state(state[1], self._device)
        if state[2] is not None:
            random.setstate(state[2][0])
            np.random.set_state(state[2][1])


class OneStageOrder(RandomOrder):
    """The order of a rank with one stage that takes minibatches in order.

    Generators are right as they are, but for given starts.
    """

    @contextmanager
    def microbatch(
        self, microbatch_index: int, stage_index: int, *, on_host: bool = False
    ) -> Iterator[None]:
        """Run a forward pass of a minibatch."""
        if self._given is not None:
            with super().microbatch(microbatch_index, stage_index, on_host=on_host):
                yield
            return
        yield

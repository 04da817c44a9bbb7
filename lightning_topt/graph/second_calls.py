"""Which modules may run their forward again in the backward pass: those whose second call does what the first did.

[Note: second calls] A forward pass runs on a fresh copy. When it is over, as in a backward pass, every candidate is called
again with the arguments of its first call, the last one first. Its forward may be recomputed if this call
- runs the same operators on the same memory: tensors that the call makes count as the same when they are made at the same
  place; a tensor left by the first call, or memory that was written to meanwhile, does not;
- leaves attributes, arguments and the globals of its file as they were, where a new tensor of the same shape counts as the
  same (a loss that each call stores);
- draws no random numbers but those of torch's default generators, which a recomputation sets back;
- talks to no other rank, and raises nothing.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn

from lightning_topt.graph.call_trace import CallTrace, Trace
from lightning_topt.graph.python_state import describe
from lightning_topt.graph.step_run import StepRun, call_training_step
from lightning_topt.graph.structures import tensors_in


def find_recomputable(step: StepRun, batch: Any, *, candidates: Iterable[str], samples: tuple[int, int]) -> set[str]:
    """Return the `candidates`, paths of modules, whose second call does what the first did; see [Note: second calls]."""
    wanted = list(candidates)
    if not wanted:
        return set()
    try:
        with step.prepared(batch, samples=samples) as (copied, inputs, backups):
            trace = Trace([*copied.parameters(), *copied.buffers(), *tensors_in(inputs)], backups=backups)
            calls = {path: _Candidate(copied.get_submodule(path)) for path in wanted}
            order: list[str] = []
            for path, candidate in calls.items():
                candidate.watch(trace, path, order)
            with step.forward_context(), trace:
                call_training_step(copied, inputs)
            with trace:
                return {path for path in reversed(order) if order.count(path) == 1 and calls[path].repeats(trace)}
    except Exception:
        return set()  # a step that runs only once


@dataclass
class _Candidate:
    """A module and its first call."""

    module: nn.Module
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    first: CallTrace | None = None
    surroundings: _Surroundings | None = None
    forward: Any = None

    def watch(self, trace: Trace, path: str, order: list[str]) -> None:
        """Note every call of the module in `order`, and its arguments."""
        self.forward = self.module.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            order.append(path)
            self.args, self.kwargs, self.surroundings = args, kwargs, _Surroundings(real=trace.is_real)
            with trace.call() as self.first:
                return self.forward(*args, **kwargs)

        # As recomputation does: hooks stay outside.
        self.module.forward = forward

    def repeats(self, trace: Trace) -> bool:
        """Whether a call with the same arguments does the same."""
        assert self.first is not None and self.surroundings is not None
        roots = [self.module, self.args, self.kwargs]
        before, drawn = describe(roots), _drawn()
        try:
            with self.surroundings.again(), torch.enable_grad(), trace.call() as second:
                self.forward(*self.args, **self.kwargs)
        except Exception:
            return False
        same_python = describe(roots) == before and _drawn() == drawn
        return same_python and not second.has_effects and second.equals(self.first)


class _Surroundings:
    """What `torch.utils.checkpoint` sets back before it calls again: random states and autocast."""

    def __init__(self, *, real: bool) -> None:
        uses_cuda = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        self.random = torch.get_rng_state() if real else None  # fake tensors are not drawn
        self.cuda = torch.cuda.get_rng_state_all() if real and uses_cuda else []
        kinds = ("cpu", "cuda") if uses_cuda else ("cpu",)
        self.casts = [(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds]

    @contextmanager
    def again(self) -> Iterator[None]:
        with ExitStack() as stack:
            if self.random is not None:
                torch.set_rng_state(self.random)
            if self.cuda:
                torch.cuda.set_rng_state_all(self.cuda)
            for kind, enabled, dtype in self.casts:
                stack.enter_context(torch.autocast(kind, enabled=enabled, dtype=dtype))
            yield


def _drawn() -> tuple[Any, ...]:
    """The states of the generators that a recomputation does not set back."""
    state: Any = np.random.get_state()
    return random.getstate(), state[1].tobytes(), state[2:]

"""Modules whose second call does what the first did may run their forward again in the backward
pass.

[Note: second calls] A forward pass runs on a fresh copy. When it is over, as in a backward pass,
every candidate is called again with the arguments of its first call, the last one first. Its
forward may be recomputed if this call
- runs the same operators on the same memory: tensors that the call makes count as the same when
  they are made at the same place; a tensor left by the first call, or memory that was written to
  meanwhile, does not;
- leaves attributes, arguments and the globals of its file as they were, where a new tensor of the
  same shape counts as the same (a loss that each call stores);
- draws no random numbers but those of torch's default generators, which a recomputation sets back;
- talks to no other rank, and raises nothing.
Candidates inside of a candidate that passes are called by it: of them only what they leave behind
is looked at. Where it does not pass they are called by themselves.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from lightning_topt.graph.call_trace import CallTrace, Trace
from lightning_topt.graph.observed_calls import ObservedCall, rebuild
from lightning_topt.graph.python_state import describe
from lightning_topt.graph.repeated_calls import make_results
from lightning_topt.graph.step_run import StepRun, call_training_step
from lightning_topt.graph.structures import tensors_in


def find_repeatable(
    step: StepRun,
    batch: Any,
    *,
    candidates: Iterable[str],
    samples: tuple[int, int],
    repetitions: Mapping[str, ObservedCall] | None = None,
) -> set[str]:
    """Return the `candidates`, paths of modules, whose second call does what the first did; see
    [Note: second calls].

    `repetitions` are calls that are left out, by the paths of their modules: what is found for
    their models holds for them.
    """
    left_out, wanted = repetitions or {}, list(candidates)
    if not wanted:
        return set()
    try:
        with step.prepared(batch, samples=samples) as prepared:
            copied, inputs = prepared.module, prepared.batch
            outside = [*copied.parameters(), *copied.buffers(), *tensors_in(inputs)]
            trace = Trace(outside)
            for path, model in left_out.items():
                vars(copied.get_submodule(path))["forward"] = _left_out(model, prepared.mode, trace)
            run = _Run()
            calls = {
                path: _Candidate(copied.get_submodule(path))
                for path in wanted
                if not _around(path, left_out)
            }
            for candidate in calls.values():
                candidate.watch(trace, run)
            with step.forward_context(), trace:
                call_training_step(copied, inputs)
            counts = Counter(map(id, run.order))
            run.is_over = True
            with trace:
                _repeat([candidate for candidate in run.order if counts[id(candidate)] == 1], trace)
            found = {path for path, candidate in calls.items() if candidate.passed}
    except Exception:
        return set()  # a step that runs only once
    for path in wanted:
        outer = _around(path, left_out)
        if outer is not None and left_out[outer].path + path[len(outer) :] in found:
            found.add(path)
    return found


def _around(path: str, paths: Mapping[str, Any]) -> str | None:
    """Return `path` or the module around it that is in `paths`."""
    while path and path not in paths:
        path = path.rpartition(".")[0]
    return path or None


def _left_out(model: ObservedCall, mode: FakeTensorMode, trace: Trace) -> Callable[..., Any]:
    def forward(*args: Any, **kwargs: Any) -> Any:
        made = make_results(model, mode)
        for tensor, result in zip(made, model.results, strict=True):
            tensor.requires_grad_(result.requires_grad)
        trace.note_made(made)
        return rebuild(model.structure, made)

    return forward


def _repeat(candidates: list[_Candidate], trace: Trace) -> None:
    """Call the outermost of `candidates` again, the last one first; those inside of one only where
    it does not pass.
    """
    numbers = {*map(id, candidates)}
    nested = {id(inner) for outer in candidates for inner in outer.inside}
    for candidate in reversed(candidates):
        if id(candidate) in nested:
            continue
        inside = [inner for inner in candidate.inside if id(inner) in numbers]
        for inner in inside:
            inner.calls, inner.leaves = 0, False
        if candidate.repeats(trace):
            candidate.passed = True
            for inner in inside:
                inner.passed = inner.calls == 1 and not inner.leaves
        else:
            _repeat(inside, trace)


@dataclass(eq=False)
class _Run:
    """The first calls in the order of time, those under way, and whether the forward pass is
    over.
    """

    order: list[_Candidate] = field(default_factory=list)
    under_way: list[_Candidate] = field(default_factory=list)
    is_over: bool = False


@dataclass(eq=False)
class _Candidate:
    """A module, its first call and the candidates called inside; `calls` by a second call around
    it, what it `leaves`.
    """

    module: nn.Module
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    first: CallTrace | None = None
    surroundings: _Surroundings | None = None
    forward: Any = None
    inside: list[_Candidate] = field(default_factory=list)
    calls: int = 0
    leaves: bool = False
    passed: bool = False

    def watch(self, trace: Trace, run: _Run) -> None:
        """Note every call of the module in `run`, and its arguments."""
        self.forward = self.module.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            if run.is_over:
                return self._again(args, kwargs)
            for outer in run.under_way:
                outer.inside.append(self)
            run.order.append(self)
            run.under_way.append(self)
            self.args, self.kwargs, self.surroundings = args, kwargs, _Surroundings()
            try:
                with trace.call() as self.first:
                    return self.forward(*args, **kwargs)
            finally:
                run.under_way.pop()

        # As recomputation does: hooks stay outside.
        self.module.forward = forward

    def _again(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The call made by the second call of a module around this one."""
        self.calls += 1
        roots = [self.module, args, kwargs]
        before = describe(roots)
        out = self.forward(*args, **kwargs)
        self.leaves |= describe(roots) != before
        return out

    def repeats(self, trace: Trace) -> bool:
        """Return whether a call with the same arguments does the same."""
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
    """The autocast that `torch.utils.checkpoint` sets back before it calls again; fake tensors draw
    no random numbers.
    """

    def __init__(self) -> None:
        uses_cuda = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        kinds = ("cpu", "cuda") if uses_cuda else ("cpu",)
        self.casts = [
            (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
            for kind in kinds
        ]

    @contextmanager
    def again(self) -> Iterator[None]:
        with ExitStack() as stack:
            for kind, enabled, dtype in self.casts:
                stack.enter_context(torch.autocast(kind, enabled=enabled, dtype=dtype))
            yield


def _drawn() -> tuple[Any, ...]:
    """The states of the generators that a recomputation does not set back."""
    state: Any = np.random.get_state()
    return random.getstate(), state[1].tobytes(), state[2:]

"""This looks at what observed calls did after the step: whether the backward pass and the rest are
as copies need them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property

from lightning_topt.graph.observed_calls import (
    CopiedCall,
    ObservedCall,
    Surprise,
    operator_facts,
    strip,
)
from lightning_topt.graph.recording import Recording, Storage


class ObservedBackward:
    """An `ObservedBackward` is what a model did in the backward pass, at the ticks ``start <= t <
    end``: what it `made` and when it let go of what.

    `casts` are the identities of storages that lived on until a context of autocast ended.
    """

    def __init__(self, recording: Recording, model: ObservedCall) -> None:
        self.recording, self.model = recording, model
        ops, first = range(*model.ops), recording.backward_start
        ticks = [
            t for t in range(first, len(recording.kernel_ops)) if recording.kernel_ops[t] in ops
        ]
        self.start, self.end = (ticks[0], ticks[-1] + 1) if ticks else (0, 0)
        self.made = [
            s for s in recording.storages if self.start <= s.made < self.end and s.made >= first
        ]
        self.numbers = {id(s): n for n, s in enumerate(self.made)}
        forward = recording.storages[slice(*model.storages)]
        results = {id(result.storage) for result in model.results}
        alive = [s for s in forward if s.died > model.ticks[1] and id(s) not in results]
        self.casts = {id(s) for s in alive if id(s) in model.casts and s.died <= first}
        self.alive = [s for s in alive if id(s) not in self.casts]
        passed_on = [s for s in self.made if s.gradient_of is None and s.died > self.end]
        self.input_gradient = passed_on[0] if passed_on else None
        if (
            ticks != list(range(self.start, self.end))
            or len(passed_on) > 1
            or not self._is_closed(forward, results)
        ):
            raise Surprise(model.key)

    def _is_closed(self, forward: Sequence[Storage], results: set[int]) -> bool:
        """Whether nothing but the result's gradient and what autograd saved crossed the
        boundary.
        """
        gradient, inside = self.model.gradient, f"{self.model.path}."
        if gradient is None or not self.model.is_like_others:
            return False
        if not gradient.made < self.start < gradient.died <= self.end:
            return False
        held = {
            id(gradient),
            *results,
            *(id(self.model.inputs[number]) for number in self.model.packed),
        }
        own = {*map(id, forward), *self.numbers}
        freed = {id(s) for s in self.recording.storages if self.start < s.died < self.end}
        parts = {id(part) for s in self.made for part in s.parts}
        return (
            freed <= own | held
            and parts <= {*self.numbers, id(gradient)}
            and all(self.start < s.died <= self.end for s in self.alive)
            and all(
                s.gradient_of is None or s.gradient_of.startswith(inside)
                for s in (*self.made, *forward)
            )
        )

    def release(self, storage: Storage) -> int:
        """Return when `storage` was freed, counted from the start. Raises Surprise where somebody
        else still held it.
        """
        if not self.start < storage.died <= self.end:
            raise Surprise(self.model.key)
        return int(storage.died) - self.start

    @cached_property
    def facts(self) -> object:
        """The facts that two models must have in common, free of names and places."""
        path, first_op, start = self.model.path, self.model.ops[0], self.start
        forward = self.recording.storages[slice(*self.model.storages)]
        assert self.model.gradient is not None
        return (
            [
                operator_facts(op, self.model, op.backward)
                for op in self.recording.ops[slice(*self.model.ops)]
            ],
            [op - first_op for op in self.recording.kernel_ops[start : self.end]],
            self.recording.kernels[start : self.end],
            [(s.bytes, s.born - start, s.op - first_op, s.shape, s.is_left) for s in self.made],
            [
                (min(s.died, self.end + 1) - start, strip(s.gradient_of or "", path))
                for s in self.made
            ],
            [[self.numbers.get(id(part)) for part in s.parts] for s in self.made],
            [(number, s.died - start) for number, s in enumerate(forward) if s in self.alive],
            [(number, s.died) for number, s in enumerate(forward) if id(s) in self.casts],
            None if self.input_gradient is None else self.numbers[id(self.input_gradient)],
            self.model.gradient.died - start,
        )


def check_alone(recording: Recording, by_op: Mapping[int, CopiedCall]) -> None:
    """Raise Surprise unless models and copies were called once, and nothing else read their
    parameters or what they made.
    """
    models = [model for pair in recording.models for model in pair]
    keys = {copied.path: copied.model.key for copied in recording.copies} | {
        model.path: model.key for model in models
    }
    for copied in recording.copies:
        if copied.backward_tick is None:
            raise Surprise(copied.model.key)
    ticks = {tick for copied in recording.copies for tick in (copied.tick, copied.backward_tick)}
    for tick, op in enumerate(recording.kernel_ops):
        if op in by_op and tick not in ticks:
            raise Surprise(by_op[op].model.key)
    calls = Counter(call.path for call in recording.calls)
    copies = {copied.path for copied in recording.copies}
    for path, times in calls.items():
        around = [outer for outer in _prefixes(path) if outer in keys]
        if around and ((times > 1 and path in keys) or (path not in keys and around[0] in copies)):
            raise Surprise(keys[around[0]])
    for reader in recording.ops:
        for path in (path for name in reader.parameters for path in _prefixes(name)):
            if path in keys and path not in reader.stack:
                raise Surprise(keys[path])
    for model in models:
        results, inside = {model.ops[0] + result.op for result in model.results}, range(*model.ops)
        if any(
            source in inside and target not in inside and source not in results
            for source, target in recording.edges
        ):
            raise Surprise(model.key)


def _prefixes(name: str) -> Iterator[str]:
    """Yield `name` and the modules around it, innermost first."""
    while name:
        yield name
        name = name.rpartition(".")[0]

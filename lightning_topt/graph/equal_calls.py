"""Calls of equal modules: how two of them are compared, and how skipped ones are put back.

[Note: skipped calls] While a step is recorded on fake tensors, a call is skipped when it must do
what two calls before it did. Its module equals theirs, and its arguments have their shapes, strides
and plain values. Modes of torch, globals of the user's files and the modules around it are the same
as well. Both of the two
- ran the same operators on their arguments, their parameters and tensors of their own;
- wrote to nothing else but buffers of their own;
- drew nothing from Python's or NumPy's generators, and left attributes and globals as they were;
- left no tensor but their results and what autograd saves.
What they did in the backward pass is compared when it is over. Wherever something turns out
otherwise, the step is recorded again without skipping calls of such modules (`CallsDiffer`).

    first   second   third   fourth ...
    run     run      skip    skip            compared: `forward_facts`, `ObservedBackward.facts`

An operator per result and a tick per direction stand for a skipped call. `expand` replaces them by
copies of what the second call, the *model*, did: ticks, operators and storages get new numbers.
`skipped_calls` decides which calls to skip.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from lightning_topt.graph.kernels import Measured
from lightning_topt.graph.recording import (
    SKIPPED,
    CallRecord,
    OpRecord,
    Recording,
    Shape,
    StorageRecord,
    changed,
)

PLAIN = (bool, int, float, str, bytes, type(None), torch.dtype, torch.device)


class CallsDiffer(Exception):
    """Calls of the modules `key` are not alike after all."""

    def __init__(self, key: Hashable) -> None:
        super().__init__(f"calls of equal modules {key!r} differ")
        self.key = key


@dataclass(eq=False)
class ObservedCall:
    """A call that ran, and may be the model of others.

    `ops`, `ticks`, `storages` and `calls` are (first, end) of its part of the recording.

    Args:
        path: of the module.
        key: equal for modules that may be alike.
        depth: how many modules are around it.
        inputs: storages of its arguments.
        given: input by the address of its memory.
        own: addresses of its parameters and buffers.
        buffers: addresses of its buffers.
        reads: (source, operator, shape) in the order of time; a source -1 - k is input k.
        packed: inputs that autograd saved.
        casts: identities of storages that autocast keeps until its context ends.
        claims: for each input the operator that was the first to save it.
        results: tensors that it returned, in `structure`.
        current: operator that ran last.
        gradient: of its result.
        is_like_others: nothing was seen so far that sets it apart.
    """

    path: str
    key: Hashable
    depth: int  # how many modules are around it
    inputs: list[StorageRecord | None]
    given: dict[int, int]  # input by the address of its memory
    own: set[int]  # addresses of its parameters and buffers
    buffers: set[int]
    ops: tuple[int, int]
    ticks: tuple[int, int]
    storages: tuple[int, int]
    calls: tuple[int, int]
    reads: list[tuple[int, int, Shape]] = field(default_factory=list)
    packed: set[int] = field(default_factory=set)
    casts: set[int] = field(default_factory=set)
    claims: dict[int, int | None] = field(default_factory=dict)
    results: list[Result] = field(default_factory=list)
    structure: object = None  # of what it returned
    current: int = 0
    gradient: StorageRecord | None = None  # of its result
    is_like_others: bool = True

    def read(self, tensor: Tensor, storage: StorageRecord | None, op: int) -> None:
        """Note that operator `op` of the recording reads `tensor`."""
        address = tensor.untyped_storage()._cdata
        if storage is not None and storage.born >= self.ticks[0]:
            if storage.op != op:
                self.reads.append((storage.op - self.ops[0], op - self.ops[0], storage.shape))
        elif address in self.given:
            if storage is not None:
                self.reads.append((-1 - self.given[address], op - self.ops[0], storage.shape))
        elif address not in self.own:
            self.is_like_others = False

    def cast(self, tensor: Tensor, storage: StorageRecord | None) -> None:
        """Note that `tensor` was cast; autocast keeps a parameter's cast."""
        if (
            storage is not None
            and tensor.untyped_storage()._cdata in self.own
            and torch.is_autocast_cache_enabled()
        ):
            self.casts.add(id(storage))

    def write(self, tensor: Tensor, storage: StorageRecord | None) -> None:
        """Note a write to `tensor`."""
        is_new = storage is not None and storage.born >= self.ticks[0]
        self.is_like_others &= is_new or tensor.untyped_storage()._cdata in self.buffers

    def save(self, storage: StorageRecord) -> None:
        """Note that autograd saved a tensor for the backward pass."""
        if storage.born < self.ticks[0]:
            found = [number for number, given in enumerate(self.inputs) if given is storage]
            self.packed.update(found)
            self.is_like_others &= bool(found)


@dataclass(frozen=True)
class Result:
    """A tensor that a call returned, and how to make one like it.

    Operators are counted from the first one of the call.
    """

    storage: Any  # the StorageRecord
    op: int  # counted from the first one of the call, as are all numbers of operators here
    shape: Shape
    saved_by: int | None
    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool
    layout: object = None  # where techniques say how it is split


@dataclass(eq=False)
class SkippedCall:
    """A call that was skipped, and did what `model` did.

    `outer` are the modules around it. `first_op`, `tick` and `backward_tick` are what stands for it
    in the recording, an operator per result and a tick per direction; `storage`, `backward_storage`
    and `call` are the places among storages and calls where its own belong.
    """

    path: str
    outer: tuple[str, ...]  # the modules around it
    model: ObservedCall
    inputs: list[StorageRecord | None]
    input_ops: list[int]
    claims: dict[int, int]
    first_op: int
    tick: int
    storage: int  # places among the recording's storages and calls
    call: int
    results: list[StorageRecord] = field(default_factory=list)
    backward_tick: int | None = None
    backward_storage: int = 0
    gradient: StorageRecord | None = None  # of its result
    input_gradient: StorageRecord | None = None


# ---- comparing two calls -------------------------------------------------------------------------


def forward_facts(recording: Recording, call: ObservedCall) -> object:
    """Return what equal calls share in the forward pass, free of names and places."""
    op, tick = call.ops[0], call.ticks[0]
    # storages by their place in the call, those of its inputs by the place among these
    own = {id(s): n for n, s in enumerate(recording.storages[slice(*call.storages)])}
    results = {id(result.storage) for result in call.results}

    def place(storage: StorageRecord) -> object:
        return own.get(
            id(storage), ("input", [number for number, s in enumerate(call.inputs) if s is storage])
        )

    # by line: operators, their order, kernels, storages, inner calls, writes, results
    return (
        [operator_facts(o, call, o.forward) for o in recording.ops[slice(*call.ops)]],
        [index - op for index in recording.kernel_ops[slice(*call.ticks)]],
        recording.kernels[slice(*call.ticks)],
        [
            (s.bytes, s.born - tick) if id(s) in results else _storage_facts(s, call)
            for s in recording.storages[slice(*call.storages)]
        ],
        [
            (
                strip(c.path, call.path),
                c.enter - tick,
                c.exit - tick,
                [*map(place, c.inputs)],
                [*map(place, c.outputs)],
            )
            for c in recording.calls[slice(*call.calls)]
        ],
        [c.needs_grad for c in recording.calls[slice(*call.calls)]],
        [
            (at - tick, born - tick if born >= tick else None)
            for at, born in recording.writes
            if tick <= at < call.ticks[1]
        ],
        [replace(result, storage=own.get(id(result.storage))) for result in call.results],
        (call.reads, call.packed, call.claims, call.structure, call.current),
    )


def operator_facts(op: OpRecord, call: ObservedCall, kernels: list[Measured]) -> object:
    """Return what operators of equal calls share.

    Equal kernels are one object, so they are compared by identity.
    """
    names = [strip(name, call.path) for name in (op.name, *op.stack[call.depth :], *op.parameters)]
    return names, op.kind, op.outputs, [id(kernel) for kernel in kernels], op.saved_bytes


def _storage_facts(storage: StorageRecord, call: ObservedCall) -> object:
    """Return what storages of equal calls share."""
    op, tick = call.ops[0], call.ticks[0]
    died = storage.died - tick if storage.died <= call.ticks[1] else None
    saved_by = None if storage.saved_by is None else storage.saved_by - op
    return (
        storage.bytes,
        storage.born - tick,
        storage.op - op,
        storage.shape,
        storage.saved,
        saved_by,
        died,
    )


# ---- putting skipped calls back ------------------------------------------------------------------


def expand(recording: Recording) -> Recording:
    """Return the recording of the step with skipped calls put back.

    Raises CallsDiffer where these cannot have done what their models did.
    """
    if not recording.skipped:
        return recording
    backwards = {
        id(model): ObservedBackward(recording, model) for pair in recording.models for model in pair
    }
    # two models of each kind: what they did in the backward pass must agree as well
    for first, second in recording.models:
        if backwards[id(first)].facts != backwards[id(second)].facts:
            raise CallsDiffer(second.key)
    return _Expansion(recording, backwards).expanded()


class _Expansion:
    """One expansion of a recording.

    `ticks` and `ops` are new numbers by old ones, `new` the new storages by the identity of the old
    ones; those that a skipped call has of its model are in `inside`.
    """

    def __init__(self, recording: Recording, backwards: dict[int, ObservedBackward]) -> None:
        self.old, self.skipped, self.backwards = recording, recording.skipped, backwards
        self.by_op = {
            skipped.first_op + k: skipped
            for skipped in self.skipped
            for k in range(len(skipped.results))
        }
        check_alone(recording, self.by_op)
        self.ticks, self.ops = self._new_ticks(), self._new_ops()
        self.new = {id(storage): changed(storage, parts=()) for storage in recording.storages}
        self.inside: list[dict[int, StorageRecord]] = [
            self._storages_of(skipped) for skipped in self.skipped
        ]

    def expanded(self) -> Recording:
        """Return the recording with all skipped calls in their places."""
        old = self.old
        for storage in old.storages:
            new = self.new[id(storage)]
            new.born, new.made = self.ticks[storage.born], self.ticks[storage.made]
            new.op = self.ops[storage.op]
            new.died = storage.died if storage.died == math.inf else self.ticks[int(storage.died)]
            new.saved_by = None if storage.saved_by is None else self.ops[storage.saved_by]
            new.parts = tuple(self.new[id(part)] for part in storage.parts)
        for skipped, inside in zip(self.skipped, self.inside, strict=True):
            self._join(skipped, inside)
        return Recording(
            ops=self._operators(),
            edges=self._edges(),
            storages=self._storages(),
            calls=self._calls(),
            kernel_ops=self._order(),
            kernels=self._kernels(),
            writes=self._writes(),
            backward_start=self.ticks[old.backward_start],
            with_gradient=old.with_gradient | self._with_gradient(),
            has_collectives=old.has_collectives,
            repetitions={skipped.path: skipped.model for skipped in self.skipped},
            measured_at=old.measured_at,
        )

    # ---- numbers ---------------------------------------------------------------------------------

    def _new_ticks(self) -> list[int]:
        """Return the new number of every old tick, and of the end."""
        # a skipped call takes one tick forward and one backward here, in the step as many as its
        # model
        length = {
            skipped.tick: skipped.model.ticks[1] - skipped.model.ticks[0]
            for skipped in self.skipped
        }
        for skipped in self.skipped:
            backward = self.backwards[id(skipped.model)]
            assert skipped.backward_tick is not None
            length[skipped.backward_tick] = backward.end - backward.start
        numbers, now = [], 0
        # each old tick begins where the ones before it end
        for tick in range(len(self.old.kernel_ops)):
            numbers.append(now)
            now += length.get(tick, 1)
        return [*numbers, now]

    def _new_ops(self) -> list[int]:
        """Return the new number of every old operator.

        Those that stand for a result get that of the model's operator.
        """
        numbers: list[int] = []
        now = start = 0
        for index in range(len(self.old.ops)):
            skipped = self.by_op.get(index)
            if skipped is None:
                numbers.append(now)
                now += 1
                continue
            # the first operator that stands for the call makes room for all of its model's
            if index == skipped.first_op:
                start = now
                now += skipped.model.ops[1] - skipped.model.ops[0]
            numbers.append(start + skipped.model.results[index - skipped.first_op].op)
        return numbers

    def _shifts(self, skipped: SkippedCall) -> tuple[int, int, int]:
        """Return what is added to the model's operators, forward ticks and backward ticks."""
        first_op = self.ops[skipped.first_op] - skipped.model.results[0].op
        backward = self.backwards[id(skipped.model)]
        assert skipped.backward_tick is not None
        return (
            first_op - skipped.model.ops[0],
            self.ticks[skipped.tick] - skipped.model.ticks[0],
            self.ticks[skipped.backward_tick] - backward.start,
        )

    # ---- storages --------------------------------------------------------------------------------

    def _storages_of(self, skipped: SkippedCall) -> dict[int, StorageRecord]:
        """Return what the skipped call made, by the identity of what the model made.

        Its results are in the recording already.
        """
        model, backward = skipped.model, self.backwards[id(skipped.model)]
        op, forward_shift, backward_shift = self._shifts(skipped)
        inside: dict[int, StorageRecord] = {}
        for storage in (*self.old.storages[slice(*model.storages)], *backward.made):
            # what was freed in the forward pass moves with it, all else with the backward pass
            is_forward = id(storage) not in backward.numbers
            died = storage.died
            if id(storage) in backward.casts:
                if died <= skipped.tick:
                    raise CallsDiffer(model.key)
                died = self.ticks[int(died)]
            elif died != math.inf:
                died += forward_shift if is_forward and died <= model.ticks[1] else backward_shift
            shift = forward_shift if is_forward else backward_shift
            inside[id(storage)] = changed(
                storage,
                born=storage.born + shift,
                made=storage.made + shift,
                op=storage.op + op,
                died=died,
                saved_by=None if storage.saved_by is None else storage.saved_by + op,
                gradient_of=storage.gradient_of
                and rename(storage.gradient_of, model.path, skipped.path),
                parts=(),
            )
        # these are in the recording, in the places of the model's
        for result, storage in zip(model.results, skipped.results, strict=True):
            inside[id(result.storage)] = self.new[id(storage)]
        if backward.input_gradient is not None:
            assert skipped.input_gradient is not None
            inside[id(backward.input_gradient)] = self.new[id(skipped.input_gradient)]
        return inside

    def _join(self, skipped: SkippedCall, inside: dict[int, StorageRecord]) -> None:
        """Set apart what the single ticks of a skipped call hold together.

        These are the moments when its results were made, and when each tensor was freed.
        """
        model, backward = skipped.model, self.backwards[id(skipped.model)]
        op, forward_shift, backward_shift = self._shifts(skipped)
        assert skipped.backward_tick is not None and model.gradient is not None
        # results: made where the model made its own, saved by the operators that saved those
        held = [(skipped.inputs[number], model.inputs[number]) for number in model.packed]
        for result, storage in zip(model.results, skipped.results, strict=True):
            new = self.new[id(storage)]
            new.born = new.made = result.storage.born + forward_shift
            if storage.op in self.by_op:  # nobody has written to it since
                new.op, new.shape = result.op + model.ops[0] + op, result.shape
            if result.saved_by is not None:
                new.saved_by = result.saved_by + model.ops[0] + op
                held.append((storage, result.storage))
        # inputs that the call was the first to save
        for number, claim in skipped.claims.items():
            self.new[id(skipped.inputs[number])].saved_by = claim + model.ops[0] + op
        # what the call's backward pass let go of, at one tick here and one by one in the model
        for mine, theirs in (*held, (skipped.gradient, model.gradient)):
            if (mine is None) != (theirs is None):
                raise CallsDiffer(model.key)
            if mine is not None and theirs is not None and mine.died == skipped.backward_tick + 1:
                self.new[id(mine)].died = self.ticks[skipped.backward_tick] + backward.release(
                    theirs
                )
        # the gradient of the input, which goes on to the modules before
        theirs = backward.input_gradient
        if theirs is not None and skipped.input_gradient is not None:
            new = self.new[id(skipped.input_gradient)]
            new.born, new.made = theirs.born + backward_shift, theirs.made + backward_shift
            new.op, new.shape = theirs.op + op, theirs.shape
            if new.gradient_of is not None:
                raise CallsDiffer(model.key)
        elif theirs is not skipped.input_gradient:
            raise CallsDiffer(model.key)
        # gradients that were added up
        known = {**inside, id(model.gradient): self.new[id(skipped.gradient)]}
        for storage in backward.made:
            inside[id(storage)].parts = tuple(known[id(part)] for part in storage.parts)

    def _storages(self) -> list[StorageRecord]:
        # in the order in which they were made: those of skipped calls go before the given places
        places: dict[int, list[StorageRecord]] = {}
        own: set[int] = set()
        for skipped, inside in zip(self.skipped, self.inside, strict=True):
            model, backward = skipped.model, self.backwards[id(skipped.model)]
            forward = self.old.storages[slice(*model.storages)]
            places.setdefault(skipped.storage, []).extend(inside[id(s)] for s in forward)
            places.setdefault(skipped.backward_storage, []).extend(
                inside[id(s)] for s in backward.made
            )
            own.update(id(s) for s in (*skipped.results, skipped.input_gradient))
        found: list[StorageRecord] = []
        for index in range(len(self.old.storages) + 1):
            found += places.get(index, ())
            if index < len(self.old.storages) and id(self.old.storages[index]) not in own:
                found.append(self.new[id(self.old.storages[index])])
        return found

    # ---- operators, calls, order -----------------------------------------------------------------

    def _operators(self) -> list[OpRecord]:
        found: list[OpRecord] = []
        for index, op in enumerate(self.old.ops):
            skipped = self.by_op.get(index)
            if skipped is None:
                found.append(op)
            elif index == skipped.first_op:
                found += [_renamed(op, skipped) for op in self.old.ops[slice(*skipped.model.ops)]]
        return found

    def _edges(self) -> dict[tuple[int, int], Shape]:
        edges: dict[tuple[int, int], Shape] = {}
        for (source, target), shape in self.old.edges.items():
            if source != SKIPPED:  # both ends are in the recording
                edges.setdefault((self.ops[source], self.ops[target]), shape)
                continue
            skipped = self.skipped[target]
            # inside of a skipped call: from its own operators, or from those that made its inputs
            first = self._shifts(skipped)[0] + skipped.model.ops[0]
            for own, reader, read in skipped.model.reads:
                start = first + own if own >= 0 else self.ops[skipped.input_ops[-1 - own]]
                edges.setdefault((start, first + reader), read)
        return edges

    def _calls(self) -> list[CallRecord]:
        # inner calls of a skipped one come after the call at its place
        by_call = {skipped.call: number for number, skipped in enumerate(self.skipped)}
        found: list[CallRecord] = []
        for index, call in enumerate(self.old.calls):
            found.append(
                changed(
                    call,
                    enter=self.ticks[call.enter],
                    exit=self.ticks[call.exit],
                    inputs=[self.new[id(storage)] for storage in call.inputs],
                    outputs=[self.new[id(storage)] for storage in call.outputs],
                )
            )
            if index in by_call:
                found += self._inner_calls(
                    self.skipped[by_call[index]], self.inside[by_call[index]]
                )
        return found

    def _inner_calls(
        self, skipped: SkippedCall, inside: Mapping[int, StorageRecord]
    ) -> Iterator[CallRecord]:
        model, shift = skipped.model, self._shifts(skipped)[1]
        inputs = zip(model.inputs, skipped.inputs, strict=True)
        known = {
            **inside,
            **{id(a): self.new[id(b)] for a, b in inputs if a is not None and b is not None},
        }
        for call in self.old.calls[slice(*model.calls)]:
            yield changed(
                call,
                path=rename(call.path, model.path, skipped.path),
                enter=call.enter + shift,
                exit=call.exit + shift,
                inputs=[known[id(storage)] for storage in call.inputs],
                outputs=[known[id(storage)] for storage in call.outputs],
            )

    def _order(self) -> list[int]:
        found: list[int] = []
        for tick, op in enumerate(self.old.kernel_ops):
            skipped = self.by_op.get(op)
            if skipped is None:
                found.append(self.ops[op])
            else:
                shift = self._shifts(skipped)[0]
                found += [own + shift for own in self.old.kernel_ops[self._ticks_at(tick)]]
        return found

    def _kernels(self) -> list[Measured | None]:
        # the model's kernels once more: equal calls run equal ones
        places = map(self._ticks_at, range(len(self.old.kernels)))
        return [kernel for place in places for kernel in self.old.kernels[place]]

    def _ticks_at(self, tick: int) -> slice:
        """Return the old ticks for which `tick` stands, those of a model for a skipped call."""
        skipped = self.by_op.get(self.old.kernel_ops[tick])
        if skipped is None:
            return slice(tick, tick + 1)
        backward = self.backwards[id(skipped.model)]
        return (
            slice(*skipped.model.ticks)
            if tick == skipped.tick
            else slice(backward.start, backward.end)
        )

    def _writes(self) -> list[tuple[int, int]]:
        # writes of the recording, then those of models once more for each call that was skipped
        writes = [
            (self.ticks[tick], born if born < 0 else self.ticks[born])
            for tick, born in self.old.writes
        ]
        for skipped in self.skipped:
            start, end = skipped.model.ticks
            shift = self._shifts(skipped)[1]
            own = [(tick, born) for tick, born in self.old.writes if start <= tick < end]
            writes += [(tick + shift, born if born < 0 else born + shift) for tick, born in own]
        return sorted(writes, key=lambda write: write[0])

    def _with_gradient(self) -> set[str]:
        found: set[str] = set()
        for skipped in self.skipped:
            model = skipped.model.path
            own = (name for name in self.old.with_gradient if name.startswith(f"{model}."))
            found |= {rename(name, model, skipped.path) for name in own}
        return found


def _renamed(op: OpRecord, skipped: SkippedCall) -> OpRecord:
    model, own = skipped.model, skipped.path
    return changed(
        op,
        name=rename(op.name, model.path, own),
        stack=(
            *skipped.outer,
            *(rename(path, model.path, own) for path in op.stack[model.depth :]),
        ),
        parameters={rename(name, model.path, own): None for name in op.parameters},
    )


# ---- the backward pass of models -----------------------------------------------------------------


class ObservedBackward:
    """What a model did in the backward pass, at the ticks ``start <= t < end``.

    `made` are the storages that it made, `alive` those of its forward pass that lived until then.
    `casts` are the identities of storages that lived on until a context of autocast ended. Raises
    CallsDiffer where the pass was not in one piece, or more than one gradient left it.
    """

    def __init__(self, recording: Recording, model: ObservedCall) -> None:
        self.recording, self.model = recording, model
        ops, first = range(*model.ops), recording.backward_start
        # all ticks of its operators in the backward pass
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
        # what outlives the pass and is no gradient of a parameter goes on: the input's gradient
        passed_on = [s for s in self.made if s.gradient_of is None and s.died > self.end]
        self.input_gradient = passed_on[0] if passed_on else None
        if (
            ticks != list(range(self.start, self.end))
            or len(passed_on) > 1
            or not self._is_closed(forward, results)
        ):
            raise CallsDiffer(model.key)

    def _is_closed(self, forward: Sequence[StorageRecord], results: set[int]) -> bool:
        """Return whether only the result's gradient and saved tensors crossed the boundary."""
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
        # whatever is freed meanwhile is its own, or was held for it
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

    def release(self, storage: StorageRecord) -> int:
        """Return when `storage` was freed, counted from the start.

        Raises CallsDiffer where somebody else still held it.
        """
        if not self.start < storage.died <= self.end:
            raise CallsDiffer(self.model.key)
        return int(storage.died) - self.start

    @cached_property
    def facts(self) -> object:
        """What two models share in the backward pass, free of names and places."""
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


def check_alone(recording: Recording, by_op: Mapping[int, SkippedCall]) -> None:
    """Raise CallsDiffer unless models and skipped calls have their parameters to themselves.

    They must have been called once, and nothing else may read their parameters, or what they made
    but did not return.
    """
    models = [model for pair in recording.models for model in pair]
    keys = {skipped.path: skipped.model.key for skipped in recording.skipped} | {
        model.path: model.key for model in models
    }
    # every skipped call had one backward pass, and its operators ran at no other tick
    for skipped in recording.skipped:
        if skipped.backward_tick is None:
            raise CallsDiffer(skipped.model.key)
    ticks = {
        tick for skipped in recording.skipped for tick in (skipped.tick, skipped.backward_tick)
    }
    for tick, op in enumerate(recording.kernel_ops):
        if op in by_op and tick not in ticks:
            raise CallsDiffer(by_op[op].model.key)
    # called once, and no module inside of a skipped one was called from elsewhere
    calls = Counter(call.path for call in recording.calls)
    paths = {skipped.path for skipped in recording.skipped}
    for path, times in calls.items():
        around = [outer for outer in _prefixes(path) if outer in keys]
        if around and ((times > 1 and path in keys) or (path not in keys and around[0] in paths)):
            raise CallsDiffer(keys[around[0]])
    # nothing outside reads their parameters
    for reader in recording.ops:
        for path in (path for name in reader.parameters for path in _prefixes(name)):
            if path in keys and path not in reader.stack:
                raise CallsDiffer(keys[path])
    # nothing outside reads what a model made but did not return
    for model in models:
        results, inside = {model.ops[0] + result.op for result in model.results}, range(*model.ops)
        if any(
            source in inside and target not in inside and source not in results
            for source, target in recording.edges
        ):
            raise CallsDiffer(model.key)


def _prefixes(name: str) -> Iterator[str]:
    """Yield `name` and the modules around it, innermost first."""
    while name:
        yield name
        name = name.rpartition(".")[0]


# ---- names and structures ------------------------------------------------------------------------


def strip(name: str, path: str) -> str:
    """Return `name` from the module at `path` on, with ``*`` for the path.

    Names of modules around it stay as they are.
    """
    if name.startswith(path) and name[len(path) : len(path) + 1] in ("", ".", ":"):
        return "*" + name[len(path) :]
    return name


def rename(name: str, model: str, skipped: str) -> str:
    """Return `name` where the module at `skipped` stands for the one at `model`."""
    short = strip(name, model)
    return skipped + short[1:] if short.startswith("*") else name


def flatten(value: object) -> tuple[object, list[Tensor]]:
    """Return the structure of arguments or of a result, and its tensors.

    The structure is None where it is not plain.
    """
    tensors: list[Tensor] = []
    try:
        return _structure(value, tensors), tensors
    except ValueError:
        return None, []


def _structure(value: Any, tensors: list[Tensor]) -> object:
    # a function, and no closure that knows itself: the tensors would live on in a cycle
    if isinstance(value, Tensor):
        tensors.append(value)
        return "tensor", len(tensors) - 1
    if isinstance(value, PLAIN):
        return type(value), value
    if type(value) in (tuple, list):
        return type(value), tuple(_structure(part, tensors) for part in value)
    if type(value) is dict and all(isinstance(key, str) for key in value):
        return dict, tuple((key, _structure(part, tensors)) for key, part in value.items())
    raise ValueError


def rebuild(structure: Any, tensors: list[Tensor]) -> Any:
    """Return what `flatten` took apart, with `tensors`."""
    kind, content = structure
    if kind == "tensor":
        return tensors[content]
    if kind is dict:
        return {key: rebuild(part, tensors) for key, part in content}
    return kind(rebuild(part, tensors) for part in content) if kind in (tuple, list) else content

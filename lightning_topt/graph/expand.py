"""A recording in which calls were left out becomes the recording of the whole step: what models did
is copied under new names.

Ticks and operators get new numbers: where one tick stood for a call, there are as many as the model
took.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from lightning_topt.graph.kernels import Measured
from lightning_topt.graph.observed_backward import ObservedBackward, check_alone
from lightning_topt.graph.observed_calls import CopiedCall, Surprise, rename
from lightning_topt.graph.recording import (
    COPIED,
    Call,
    OpRecord,
    Recording,
    Shape,
    Storage,
    changed,
)


def expand(recording: Recording) -> Recording:
    """Return the whole recording. Raises Surprise where calls that were left out cannot have done
    what their models did.
    """
    if not recording.copies:
        return recording
    backwards = {
        id(model): ObservedBackward(recording, model) for pair in recording.models for model in pair
    }
    for first, second in recording.models:
        if backwards[id(first)].facts != backwards[id(second)].facts:
            raise Surprise(second.key)
    return _Expansion(recording, backwards).whole()


class _Expansion:
    """`new` has the new storages by the identity of the old ones; those that a copy has of its
    model are in `inside`.
    """

    def __init__(self, recording: Recording, backwards: dict[int, ObservedBackward]) -> None:
        self.old, self.copies, self.backwards = recording, recording.copies, backwards
        self.by_op = {
            copied.first_op + k: copied
            for copied in self.copies
            for k in range(len(copied.results))
        }
        check_alone(recording, self.by_op)
        self.ticks, self.ops = self._new_ticks(), self._new_ops()
        self.new = {id(storage): changed(storage, parts=()) for storage in recording.storages}
        self.inside: list[dict[int, Storage]] = [
            self._copies_of_storages(copied) for copied in self.copies
        ]

    def whole(self) -> Recording:
        """Return the recording with all copies in their places."""
        old = self.old
        for storage in old.storages:
            self._move(storage)
        for copied, inside in zip(self.copies, self.inside, strict=True):
            self._join(copied, inside)
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
            repetitions={copied.path: copied.model for copied in self.copies},
            measured_at=old.measured_at,
        )

    # ---- numbers ---------------------------------------------------------------------------------

    def _new_ticks(self) -> list[int]:
        """The new number of every old tick, and of the end."""
        length = {
            copied.tick: copied.model.ticks[1] - copied.model.ticks[0] for copied in self.copies
        }
        for copied in self.copies:
            backward = self.backwards[id(copied.model)]
            assert copied.backward_tick is not None
            length[copied.backward_tick] = backward.end - backward.start
        numbers, now = [], 0
        for tick in range(len(self.old.kernel_ops)):
            numbers.append(now)
            now += length.get(tick, 1)
        return [*numbers, now]

    def _new_ops(self) -> list[int]:
        """The new number of every old operator; those that stand for a result get that of the
        model's operator.
        """
        numbers: list[int] = []
        now = start = 0
        for index in range(len(self.old.ops)):
            copied = self.by_op.get(index)
            if copied is None:
                numbers.append(now)
                now += 1
                continue
            if index == copied.first_op:
                start = now
                now += copied.model.ops[1] - copied.model.ops[0]
            numbers.append(start + copied.model.results[index - copied.first_op].op)
        return numbers

    def _shifts(self, copied: CopiedCall) -> tuple[int, int, int]:
        """Return what is added to the model's operators, forward ticks and backward ticks."""
        first_op = self.ops[copied.first_op] - copied.model.results[0].op
        backward = self.backwards[id(copied.model)]
        assert copied.backward_tick is not None
        return (
            first_op - copied.model.ops[0],
            self.ticks[copied.tick] - copied.model.ticks[0],
            self.ticks[copied.backward_tick] - backward.start,
        )

    # ---- storages --------------------------------------------------------------------------------

    def _copies_of_storages(self, copied: CopiedCall) -> dict[int, Storage]:
        """Return what the copy made, by the identity of what the model made; its results are those
        of the recording.
        """
        model, backward = copied.model, self.backwards[id(copied.model)]
        op, forward_shift, backward_shift = self._shifts(copied)
        inside: dict[int, Storage] = {}
        for storage in (*self.old.storages[slice(*model.storages)], *backward.made):
            is_forward = id(storage) not in backward.numbers
            died = storage.died
            if id(storage) in backward.casts:
                if died <= copied.tick:
                    raise Surprise(model.key)
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
                and rename(storage.gradient_of, model.path, copied.path),
                parts=(),
            )
        for result, storage in zip(model.results, copied.results, strict=True):
            inside[id(result.storage)] = self.new[id(storage)]
        if backward.input_gradient is not None:
            assert copied.input_gradient is not None
            inside[id(backward.input_gradient)] = self.new[id(copied.input_gradient)]
        return inside

    def _move(self, storage: Storage) -> None:
        """New numbers for a storage of the recording."""
        new = self.new[id(storage)]
        new.born, new.made, new.op = (
            self.ticks[storage.born],
            self.ticks[storage.made],
            self.ops[storage.op],
        )
        new.died = storage.died if storage.died == math.inf else self.ticks[int(storage.died)]
        new.saved_by = None if storage.saved_by is None else self.ops[storage.saved_by]
        new.parts = tuple(self.new[id(part)] for part in storage.parts)

    def _join(self, copied: CopiedCall, inside: dict[int, Storage]) -> None:
        """Tell apart what the copy's single ticks hold together: when its results were made, and
        what was let go of when.
        """
        model, backward = copied.model, self.backwards[id(copied.model)]
        op, forward_shift, backward_shift = self._shifts(copied)
        assert copied.backward_tick is not None and model.gradient is not None
        held = [(copied.inputs[number], model.inputs[number]) for number in model.packed]
        for result, storage in zip(model.results, copied.results, strict=True):
            new = self.new[id(storage)]
            new.born = new.made = result.storage.born + forward_shift
            if storage.op in self.by_op:  # nobody has written to it since
                new.op, new.shape = result.op + model.ops[0] + op, result.shape
            if result.saved_by is not None:
                new.saved_by = result.saved_by + model.ops[0] + op
                held.append((storage, result.storage))
        for number, claim in copied.claims.items():
            self.new[id(copied.inputs[number])].saved_by = claim + model.ops[0] + op
        for mine, theirs in (*held, (copied.gradient, model.gradient)):
            if (mine is None) != (theirs is None):
                raise Surprise(model.key)
            if mine is not None and theirs is not None and mine.died == copied.backward_tick + 1:
                self.new[id(mine)].died = self.ticks[copied.backward_tick] + backward.release(
                    theirs
                )
        theirs = backward.input_gradient
        if theirs is not None and copied.input_gradient is not None:
            new = self.new[id(copied.input_gradient)]
            new.born, new.made = theirs.born + backward_shift, theirs.made + backward_shift
            new.op, new.shape = theirs.op + op, theirs.shape
            if new.gradient_of is not None:
                raise Surprise(model.key)
        elif theirs is not copied.input_gradient:
            raise Surprise(model.key)
        known = {**inside, id(model.gradient): self.new[id(copied.gradient)]}
        for storage in backward.made:
            inside[id(storage)].parts = tuple(known[id(part)] for part in storage.parts)

    def _storages(self) -> list[Storage]:
        places: dict[int, list[Storage]] = {}
        own: set[int] = set()
        for copied, inside in zip(self.copies, self.inside, strict=True):
            model, backward = copied.model, self.backwards[id(copied.model)]
            forward = self.old.storages[slice(*model.storages)]
            places.setdefault(copied.storage, []).extend(inside[id(s)] for s in forward)
            places.setdefault(copied.backward_storage, []).extend(
                inside[id(s)] for s in backward.made
            )
            own.update(id(s) for s in (*copied.results, copied.input_gradient))
        found: list[Storage] = []
        for index in range(len(self.old.storages) + 1):
            found += places.get(index, ())
            if index < len(self.old.storages) and id(self.old.storages[index]) not in own:
                found.append(self.new[id(self.old.storages[index])])
        return found

    # ---- the rest --------------------------------------------------------------------------------

    def _operators(self) -> list[OpRecord]:
        found: list[OpRecord] = []
        for index, op in enumerate(self.old.ops):
            copied = self.by_op.get(index)
            if copied is None:
                found.append(op)
            elif index == copied.first_op:
                found += [_renamed(op, copied) for op in self.old.ops[slice(*copied.model.ops)]]
        return found

    def _edges(self) -> dict[tuple[int, int], Shape]:
        edges: dict[tuple[int, int], Shape] = {}
        for (source, target), shape in self.old.edges.items():
            if source != COPIED:
                edges.setdefault((self.ops[source], self.ops[target]), shape)
                continue
            copied = self.copies[target]
            first = self._shifts(copied)[0] + copied.model.ops[0]
            for own, reader, read in copied.model.reads:
                start = first + own if own >= 0 else self.ops[copied.input_ops[-1 - own]]
                edges.setdefault((start, first + reader), read)
        return edges

    def _calls(self) -> list[Call]:
        by_call = {copied.call: number for number, copied in enumerate(self.copies)}
        found: list[Call] = []
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
                found += self._inner_calls(self.copies[by_call[index]], self.inside[by_call[index]])
        return found

    def _inner_calls(self, copied: CopiedCall, inside: Mapping[int, Storage]) -> Iterator[Call]:
        model, shift = copied.model, self._shifts(copied)[1]
        inputs = zip(model.inputs, copied.inputs, strict=True)
        known = {
            **inside,
            **{id(a): self.new[id(b)] for a, b in inputs if a is not None and b is not None},
        }
        for call in self.old.calls[slice(*model.calls)]:
            yield changed(
                call,
                path=rename(call.path, model.path, copied.path),
                enter=call.enter + shift,
                exit=call.exit + shift,
                inputs=[known[id(storage)] for storage in call.inputs],
                outputs=[known[id(storage)] for storage in call.outputs],
            )

    def _order(self) -> list[int]:
        found: list[int] = []
        for tick, op in enumerate(self.old.kernel_ops):
            copied = self.by_op.get(op)
            if copied is None:
                found.append(self.ops[op])
            else:
                shift = self._shifts(copied)[0]
                found += [own + shift for own in self.old.kernel_ops[self._ticks_at(tick)]]
        return found

    def _kernels(self) -> list[Measured | None]:
        places = map(self._ticks_at, range(len(self.old.kernels)))
        return [kernel for place in places for kernel in self.old.kernels[place]]

    def _ticks_at(self, tick: int) -> slice:
        """The old ticks for which `tick` stands: those of a model where a call was left out."""
        copied = self.by_op.get(self.old.kernel_ops[tick])
        if copied is None:
            return slice(tick, tick + 1)
        backward = self.backwards[id(copied.model)]
        return (
            slice(*copied.model.ticks)
            if tick == copied.tick
            else slice(backward.start, backward.end)
        )

    def _writes(self) -> list[tuple[int, int]]:
        writes = [
            (self.ticks[tick], born if born < 0 else self.ticks[born])
            for tick, born in self.old.writes
        ]
        for copied in self.copies:
            start, end = copied.model.ticks
            shift = self._shifts(copied)[1]
            own = [(tick, born) for tick, born in self.old.writes if start <= tick < end]
            writes += [(tick + shift, born if born < 0 else born + shift) for tick, born in own]
        return sorted(writes, key=lambda write: write[0])

    def _with_gradient(self) -> set[str]:
        found: set[str] = set()
        for copied in self.copies:
            model = copied.model.path
            own = (name for name in self.old.with_gradient if name.startswith(f"{model}."))
            found |= {rename(name, model, copied.path) for name in own}
        return found


def _renamed(op: OpRecord, copied: CopiedCall) -> OpRecord:
    model, own = copied.model, copied.path
    return changed(
        op,
        name=rename(op.name, model.path, own),
        stack=(*copied.outer, *(rename(path, model.path, own) for path in op.stack[model.depth :])),
        parameters={rename(name, model.path, own): None for name in op.parameters},
    )

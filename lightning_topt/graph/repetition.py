"""Capture five layers of a deep model, and write the others into its graph.

    stacks = find_stacks(module)                       # runs of equal layers in lists of modules
    copied, mode = short_copy(module, stacks)          # layers 0, 1, 2, N-2, N-1
    graph = ...                                        # of a step of the copy
    graph = with_all_layers(graph, stacks)

[Note: repetition] A layer that was left out does what the third one does. In the graph all of it
is relative: names, and positions in the forward or backward stretch of the layer itself or of those
beside it. What lies outside of all layers is absolute. The third layer, written once more in the
place of the last but one, must be what that one did. Otherwise, or where the model raises an error
without some of its layers, all of it is captured (`NotRepeated`).

The code around layers may treat those that are left out otherwise. So the forward pass of the whole
model runs once with layers that return empty tensors (`outline`): all must be called once,
in a row, with equal arguments, and what runs around them must not depend on their number. Unseen is
code inside of layers that reads a global variable or counts its calls over several layers.
"""

from __future__ import annotations

import itertools
import operator
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from lightning_topt.graph.kernels import QUERIES
from lightning_topt.graph.module_copy import fake_copy
from lightning_topt.graph.op_graph import (
    Block,
    Module,
    ModuleCall,
    Op,
    OpGraph,
    Parameter,
    StepTensor,
    TensorEdge,
)
from lightning_topt.graph.recorder import frozen_call
from lightning_topt.graph.recording import changed

LEAST = 7  # layers of a run of which some are left out
PLAIN = (bool, int, str, bytes, type(None))
CONTAINERS = (list, tuple, set, frozenset, dict)
FORWARD, BACKWARD = "forward", "backward"
Place = tuple[str, int]  # forward or backward, the number of a layer
# of parts of a graph: the fields that are names, and the parts that have a stretch of positions
_NAMES = {
    Op: ("name", "module", "block", "parameters", "stack"),
    TensorEdge: ("source", "target"),
    StepTensor: ("producer", "saved_by", "gradient_of"),
    ModuleCall: ("module",),
    Module: ("path",),
    Parameter: ("name", "block"),
    Block: ("name",),
}
_STRETCHES = (StepTensor, ModuleCall)
Item = TypeVar("Item")


class NotRepeated(Exception):
    """Layers are not alike, or the code around them treats them differently."""


@dataclass(frozen=True)
class Stack:
    """Equal layers: `count` children of the module at `path`, from number `first` on."""

    path: str
    first: int
    count: int

    @property
    def kept(self) -> list[int]:
        """Numbers of the layers that are captured: the first three and the last two."""
        return [number for number in self.numbers if number not in self.left_out]

    @property
    def numbers(self) -> range:
        """Numbers of all."""
        return range(self.first, self.first + self.count)

    @property
    def left_out(self) -> range:
        """Numbers of the others."""
        return range(self.first + 3, self.first + self.count - 2)

    def layer(self, number: int) -> str:
        """Return the path of a layer."""
        return f"{self.path}.{number}"

    def split(self, name: str) -> tuple[int | None, str]:
        """Return the number of the layer that `name` begins with, None for none, and the rest."""
        if not name.startswith(f"{self.path}."):
            return None, name
        rest = name[len(self.path) + 1 :]
        digits = next((n for n, letter in enumerate(rest) if letter in ".:"), len(rest))
        if not rest[:digits].isdigit() or not 0 <= int(rest[:digits]) - self.first < self.count:
            return None, name
        return int(rest[:digits]), rest[digits:]

    def is_alike(self, named: Iterable[tuple[str, object]]) -> bool:
        """Return whether `named` says the same of all layers."""
        found: dict[int, dict[str, object]] = {}
        for name, value in named:
            number, rest = self.split(name)
            if number is not None:
                found.setdefault(number, {})[rest] = value
        values = [*found.values()]
        return not values or (len(values) == self.count and all(v == values[0] for v in values))


# ---- equal layers --------------------------------------------------------------------------------


def find_stacks(root: nn.Module) -> tuple[Stack, ...]:
    """Return the runs of equal layers below `root`, none inside of another one.

    Layers are equal if they differ in nothing but the memory of their parameters and buffers, which
    no other module has.
    """
    if any(map(is_lazy, (*root.parameters(), *root.buffers()))):
        return ()
    keys = _LayerKeys(root)

    def visit(module: nn.Module, path: str) -> Iterator[Stack]:
        children = module._modules
        names = [str(number) for number in range(len(children))]
        stacks: list[Stack] = []
        if path and isinstance(module, nn.ModuleList | nn.Sequential) and [*children] == names:
            place = 0
            for _, run in itertools.groupby(map(keys.of, children.values())):
                count = len([*run])
                if count >= LEAST:
                    stacks.append(Stack(path, place, count))
                place += count
        yield from stacks
        for name, child in children.items() if not stacks else ():
            if child is not None:
                yield from visit(child, f"{path}.{name}" if path else name)

    return tuple(visit(root, ""))


class _LayerKeys:
    """Equal values for modules below `root` that behave alike."""

    def __init__(self, root: nn.Module) -> None:
        # how many names each memory has, and how many places each module
        tensors = (
            *root.named_parameters(remove_duplicate=False),
            *root.named_buffers(remove_duplicate=False),
        )
        self._names = Counter(address_of(tensor) for _, tensor in tensors)
        modules = root.named_modules(remove_duplicate=False)
        self._places = Counter(id(module) for _, module in modules)

    def of(self, module: nn.Module | None) -> Hashable:
        if module is None or self._places[id(module)] > 1:
            return object()  # equal to nothing
        tensors: list[tuple[str, Hashable]] = []
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is None:
                tensors.append((name, None))
            elif self._names[address_of(tensor)] > 1:
                return object()
            else:
                form = tensor.shape, tensor.stride(), tensor.dtype, tensor.requires_grad
                tensors.append((name, form))
        attributes = tuple(
            (name, _token(value))
            for name, value in vars(module).items()
            if name not in ("_parameters", "_buffers", "_modules", "forward")
        )
        children = tuple((name, self.of(child)) for name, child in module._modules.items())
        return type(module), tuple(tensors), attributes, children


def address_of(tensor: Tensor) -> int:
    """Return what tells the memory of a tensor apart; of a sparse one the tensor itself."""
    return int(tensor.untyped_storage()._cdata) if tensor.layout is torch.strided else id(tensor)


def _token(value: Any) -> Hashable:
    # What is equal for equal plain values; other objects are equal to themselves alone
    if isinstance(value, PLAIN):
        return type(value), value
    if isinstance(value, float | complex):
        return type(value), repr(value)  # not-a-number equals itself
    if isinstance(value, CONTAINERS):
        items = value.items() if isinstance(value, dict) else value
        tokens = map(_token, items)
        return type(value), frozenset(tokens) if isinstance(value, set) else tuple(tokens)
    return id(value)


def short_copy(
    root: nn.Module, stacks: Sequence[Stack], *, device: torch.device | str = "cpu"
) -> tuple[Any, FakeTensorMode]:
    """Return what `fake_copy` does, without layers of `stacks`; the others keep their names."""
    containers = [root.get_submodule(stack.path) for stack in stacks]
    whole = [container._modules for container in containers]
    try:
        for stack, container in zip(stacks, containers, strict=True):
            layers = container._modules.items()
            vars(container)["_modules"] = {
                name: child for name, child in layers if int(name) not in stack.left_out
            }
        copied, mode = fake_copy(root, device=device)
    finally:
        for container, modules in reversed([*zip(containers, whole, strict=True)]):
            vars(container)["_modules"] = modules
    for stack in stacks:
        container = copied.get_submodule(stack.path)
        if type(container) is nn.ModuleList:
            container.__class__ = ShortList
    return copied, mode


class ShortList(nn.ModuleList):
    """A list of modules without some of its numbers; ``layers[2]`` is the third that is there."""

    def _get_abs_string_index(self, idx: Any) -> str:
        return [*self._modules][operator.index(idx)]


# ---- the code around layers ----------------------------------------------------------------------


def outline(module: nn.Module, stacks: Sequence[Stack], run: Callable[[], object]) -> list[object]:
    """Return what `run` does around the layers of `module`, a copy that is of no use afterwards.

    Raises NotRepeated where layers are not called once, in a row and alike.
    """
    mode = _LayerOutline(module, stacks)
    with mode:
        run()
    return mode.finished()


class _LayerOutline(TorchDispatchMode):
    """The operators outside of layers. The first layer of each stack runs, others return its like.

    Enter it, run a forward pass of `module`, take what `finished` returns.
    """

    def __init__(self, module: nn.Module, stacks: Sequence[Stack]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._events: list[object] = []
        self._is_inside = False
        self._keys = _LayerKeys(module)
        self._stacks: list[_StackCalls] = []
        for stack in stacks:
            names = map(int, module.get_submodule(stack.path)._modules)
            calls = _StackCalls(stack, [number for number in names if number in stack.numbers])
            self._stacks.append(calls)
            for number in calls.waiting:
                layer = module.get_submodule(stack.layer(number))
                vars(layer)["forward"] = partial(self._call, calls, number, layer, layer.forward)

    def finished(self) -> list[object]:
        """Return what ran; raises NotRepeated where layers did not."""
        if any(calls.waiting for calls in self._stacks):
            raise NotRepeated
        return self._events

    def __torch_dispatch__(
        self, func: OpOverload, types: object, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run `func` and note it, but for what layers run."""
        if not self._is_inside and func._schema.name not in QUERIES:
            self._events.append(frozen_call(func, args, kwargs or {}, []))
        return func(*args, **(kwargs or {}))

    def _call(
        self,
        calls: _StackCalls,
        number: int,
        layer: nn.Module,
        forward: Callable[..., Any],
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        if self._is_inside:
            return forward(*args, **kwargs)
        # in order, each once, with nothing between
        is_first = number == calls.stack.first
        if calls.waiting[:1] != [number] or not (is_first or calls.last == len(self._events)):
            raise NotRepeated
        calls.waiting.pop(0)
        if not is_first:
            calls.check(self._keys.of(layer), (args, kwargs))
        self._is_inside = True
        try:
            if is_first:
                self._events.append((calls.stack, _modes()))
                return calls.first_result(forward(*args, **kwargs))
            return calls.next_result()
        finally:
            self._is_inside, calls.last = False, len(self._events)


def _modes() -> Hashable:
    # what of torch decides how a layer runs
    casts = (
        (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
        for kind in ("cpu", "cuda")
    )
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), tuple(casts)


class _StackCalls:
    """The calls of one stack's layers: what they were given, and what they return.

    `waiting` are the layers to come, `last` counts the events when the last call ended.
    """

    def __init__(self, stack: Stack, waiting: list[int]) -> None:
        self.stack, self.waiting, self.last = stack, waiting, 0
        self._given: object = None  # to the second layer
        self._held: list[Tensor] = []
        self._results: list[Tensor] = []
        self._made: Any = None  # what the first layer returned

    def check(self, key: Hashable, given: object) -> None:
        """Raise NotRepeated unless a layer is called as the second one was.

        `key` says what the layer is like, `given` are its arguments.
        """
        leaves, structure = tree_flatten(given)
        tokens = key, structure, tuple(map(self._token_of, leaves)), _modes()
        if self._given not in (None, tokens):
            raise NotRepeated
        self._given = tokens

    def _token_of(self, leaf: Any) -> Hashable:
        if not isinstance(leaf, Tensor):
            return _token(leaf)
        # which result of the layer before it is, or else the very same tensor
        self._held.append(leaf)
        which = next((n for n, tensor in enumerate(self._results) if tensor is leaf), -1)
        form = tuple(leaf.shape), leaf.stride(), leaf.dtype, leaf.requires_grad
        return which, 0 if which >= 0 else id(leaf), *form

    def first_result(self, result: Any) -> Any:
        """Keep the result of the first layer, and return it."""
        leaves, structure = tree_flatten(result)
        self._made = leaves, structure
        self._results = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        return result

    def next_result(self) -> Any:
        """Return the like of it."""
        leaves, structure = self._made

        def like(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            return torch.empty_like(leaf.detach()).requires_grad_(leaf.requires_grad)

        made = tree_map(like, leaves)
        self._results = [leaf for leaf in made if isinstance(leaf, Tensor)]
        return tree_unflatten(made, structure)


# ---- the graph of all layers ---------------------------------------------------------------------


def with_all_layers(graph: OpGraph, stacks: Iterable[Stack]) -> OpGraph:
    """Return `graph`, of a model that was `shortened`, with the layers that are not there.

    Their buffers are not counted. Raises NotRepeated.
    """
    for stack in stacks:
        graph = _Repetition(graph, stack).graph_of_all()
    return graph


class _Repetition:
    """Layers of `graph` that are written once more; see [Note: repetition].

    An item, such as an operator, belongs to a layer: `own`. It is written for layer `new`, which is
    `own` unless it is a copy.
    """

    def __init__(self, graph: OpGraph, stack: Stack) -> None:
        self.graph, self.stack = graph, stack
        self.ranks = {number: rank for rank, number in enumerate(stack.kept)}
        *_, self.model, self.after, _ = stack.kept
        self._names: dict[tuple[str, int | None, int | None], str] = {}
        self.layer_of_op = [
            next((n for path in op.stack if (n := stack.split(path)[0]) is not None), None)
            for op in graph.ops
        ]
        self.stretches = {**self._forward(), **self._backward()}
        # the place of each position, and the offset in it
        self.places: list[Place | None] = [None] * len(graph.step.order)
        for place, stretch in self.stretches.items():
            self.places[stretch.start : stretch.stop] = [place] * len(stretch)
        self.starts = self._starts()

    def _forward(self) -> dict[Place, range]:
        paths = {self.stack.layer(number): number for number in self.ranks}
        calls = [call for call in self.graph.step.calls if call.module in paths]
        in_order = [self.stack.layer(number) for number in self.stack.kept]
        if [call.module for call in calls] != in_order:
            raise NotRepeated
        found = {(FORWARD, paths[call.module]): range(call.first, call.end) for call in calls}
        _check_adjacent([*found.values()])
        return found

    def _backward(self) -> dict[Place, range]:
        step = self.graph.step
        positions: dict[int, list[int]] = {number: [] for number in self.ranks}
        for position in range(step.backward_start, len(step.order)):
            number = self.layer_of_op[step.order[position]]
            if number is not None:
                positions[number].append(position)
        found = {}
        for number in reversed(self.stack.kept):
            ticks = positions[number]
            if not ticks or ticks[-1] - ticks[0] + 1 != len(ticks):
                raise NotRepeated
            found[BACKWARD, number] = range(ticks[0], ticks[-1] + 1)
        _check_adjacent([*found.values()])
        return found

    def _starts(self) -> dict[Place, int]:
        # where the stretch of each layer begins in the whole step; backward comes in reverse
        found: dict[Place, int] = {}
        numbers = self.stack.numbers
        for kind, order in ((FORWARD, numbers), (BACKWARD, reversed(numbers))):
            start = None
            for number in order:
                own = number if number in self.ranks else self.model
                if start is None:
                    start = self._shifted(self.stretches[kind, own].start)
                found[kind, number] = start
                start += len(self.stretches[kind, own])
        return found

    def _shifted(self, position: int) -> int:
        # Where a position outside of layers comes to lie
        forward, backward = (self.stretches[k, self.model] for k in (FORWARD, BACKWARD))
        count = len(self.stack.left_out)
        position_after = position
        if position >= self.stretches[FORWARD, self.after].start:
            position_after += count * len(forward)
        if position >= backward.start:
            position_after += count * len(backward)
        return position_after

    # ---- references ------------------------------------------------------------------------------

    def layer(self, number: int, own: int | None, new: int | None) -> int:
        """Return the layer that an item refers to, which referred to layer `number`."""
        if own is None or new is None:
            return number
        distance = self.ranks[number] - self.ranks[own]
        return new + distance if abs(distance) <= 1 else number

    def name(self, text: str, own: int | None, new: int | None) -> str:
        key = text, own, new
        if key not in self._names:
            number, rest = self.stack.split(text)
            if number is not None and own is not None:
                text = self.stack.layer(self.layer(number, own, new)) + rest
            self._names[key] = text
        return self._names[key]

    def position(self, position: int, own: int | None, new: int | None) -> int:
        place = self.places[position] if 0 <= position < len(self.places) else None
        if place is None:
            return self._shifted(position)
        kind, number = place
        offset = position - self.stretches[place].start
        return self.starts[kind, self.layer(number, own, new)] + offset

    # ---- parts of the graph ----------------------------------------------------------------------

    def graph_of_all(self) -> OpGraph:
        graph, step = self.graph, self.graph.step
        self.ops = self._spread(graph.ops, [*map(_forward_of, self.layer_of_op)], self._written)
        made = [self.places[t.first] if t.first < len(step.order) else None for t in step.tensors]
        self.tensors = self._spread(step.tensors, made, self._written)
        places = {op.name: place for op, place in zip(graph.ops, self.ops.places, strict=True)}
        for edge in graph.edges:
            # what a layer makes is read by the next one alone
            source = places[edge.source]
            if places[edge.target] is None and source and source[1] in (self.model, self.after):
                raise NotRepeated
        edges = self._spread(graph.edges, [places[e.target] for e in graph.edges], self._written)

        def named(items: Sequence[Any], name: str = "name") -> Any:
            where = [_forward_of(self.stack.split(getattr(item, name))[0]) for item in items]
            return self._spread(items, where, self._written).items

        unused = [_forward_of(self.stack.split(name)[0]) for name in graph.unused]
        ticks = self._spread(step.order, self.places, self._tick)
        spaces = [self.places[position] for position, _ in step.workspaces]
        whole = replace(
            step,
            order=ticks.items,
            backward_start=self._shifted(step.backward_start),
            tensors=self.tensors.items,
            calls=named(step.calls, "module"),
            modules=named(step.modules, "path"),
            workspaces=self._spread(step.workspaces, spaces, self._workspace).items,
        )
        return replace(
            graph,
            ops=self.ops.items,
            edges=edges.items,
            parameters=named(graph.parameters),
            step=whole,
            unused=self._spread(graph.unused, unused, self.name).items,
            blocks=named(graph.blocks),
        )

    def _spread(
        self, items: Sequence[Item], places: Sequence[Place | None], make: Any
    ) -> _Spread[Item]:
        # `items`, with copies of the third layer's in the place of those left out
        spread = _Spread[Item](items, places)
        for kind, layers in (
            (FORWARD, self.stack.left_out),
            (BACKWARD, reversed(self.stack.left_out)),
        ):
            model, after = spread.of(kind, self.model), spread.of(kind, self.after)
            numbers = [*model, *after] if kind == FORWARD else [*after, *model]
            if numbers and [*range(numbers[0], numbers[0] + len(numbers))] != numbers:
                raise NotRepeated
            if len(model) != len(after):
                raise NotRepeated
            if model:
                spread.copies[after[0] if kind == FORWARD else model[0]] = [
                    (index, number) for number in layers for index in model
                ]
        spread.write(make)
        # the last but one is the third once more
        for kind in (FORWARD, BACKWARD):
            pairs = zip(spread.of(kind, self.model), spread.of(kind, self.after), strict=True)
            for index, other in pairs:
                made = spread.items[spread.index(other, self.after)]
                if make(items[index], self.model, self.after) != made:
                    raise NotRepeated
        return spread

    def _written(self, item: Any, own: int | None, new: int | None) -> Any:
        # an item that has names, and maybe a stretch of positions
        kind = type(item)
        if own is None and kind not in _STRETCHES:
            return item
        values: dict[str, Any] = {}
        for field in _NAMES[kind]:
            name = getattr(item, field)
            if isinstance(name, tuple):
                values[field] = tuple(self.name(each, own, new) for each in name)
            elif name:
                values[field] = self.name(name, own, new)
        if kind in _STRETCHES:
            values["first"] = self.position(item.first, own, new)
            values["end"] = self.position(item.end - 1, own, new) + 1
        if kind is ModuleCall:
            for field in ("inputs", "outputs"):
                values[field] = tuple(self._tensor(n, own, new) for n in getattr(item, field))
        return changed(item, **values)

    def _tensor(self, number: int, own: int | None, new: int | None) -> int:
        place = self.tensors.places[number]
        return self.tensors.index(number, place and self.layer(place[1], own, new))

    def _tick(self, op: int, own: int | None, new: int | None) -> int:
        place = self.ops.places[op]
        return self.ops.index(op, place and self.layer(place[1], own, new))

    def _workspace(self, workspace: Any, own: int | None, new: int | None) -> Any:
        position, size = workspace
        return self.position(position, own, new), size


def _forward_of(number: int | None) -> Place | None:
    return None if number is None else (FORWARD, number)


def _check_adjacent(stretches: Sequence[range]) -> None:
    for before, after in itertools.pairwise(stretches):
        if before.stop != after.start:
            raise NotRepeated


class _Spread(Generic[Item]):
    """Items of a graph in order, and those of the layers that are written once more between them.

    `places` says where each belongs, None for outside of layers.
    """

    def __init__(self, items: Sequence[Item], places: Sequence[Place | None]) -> None:
        self.source, self.places = items, places
        self.items: tuple[Item, ...] = ()
        self.copies: dict[int, list[tuple[int, int]]] = {}  # (item, layer), by the item after
        # an item by its layer, and its number among the items there
        self._of: dict[Place, list[int]] = {}
        self._ordinals: list[int] = []
        for index, place in enumerate(places):
            inside = self._of.setdefault(place, []) if place else []
            self._ordinals.append(len(inside))
            inside.append(index)
        self._where: dict[Any, int] = {}

    def of(self, kind: str, number: int) -> list[int]:
        """Return the items of a layer."""
        return self._of.get((kind, number), [])

    def write(self, make: Callable[[Any, int | None, int | None], Item]) -> None:
        """Make all items, ``make(item, own, new)`` each."""
        found: list[tuple[int, int | None]] = []
        for index, place in enumerate(self.places):
            found += [*self.copies.get(index, ()), (index, place[1] if place else None)]
        for position, (index, new) in enumerate(found):
            self._where[self._key(index, new)] = position
        owners = [place[1] if place else None for place in self.places]
        self.items = tuple(make(self.source[index], owners[index], new) for index, new in found)

    def index(self, item: int, new: int | None) -> int:
        """Return where an item is now, or the like of it in layer `new`. Raises NotRepeated."""
        try:
            return self._where[self._key(item, new)]
        except KeyError:
            raise NotRepeated from None

    def _key(self, item: int, new: int | None) -> Any:
        place = self.places[item]
        return item if place is None else (place[0], new, self._ordinals[item])

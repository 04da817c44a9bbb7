"""What a rule is: which placements along one tensor axis a torch function admits.

The search and the run both read the rules. A row of a `Kind` names a placement for every tensor
argument and every result. Linear layers, for example, have a row with a replicated input, a weight
cut by outputs, and a result cut by features. That all arguments are replicated, and so all results,
is always a row and is not listed.

Two rules hold for all kinds:

- An argument that is replicated in a row with a sharded one is used differently by each rank. Its
  gradient is a sum over ranks.
- A Partial result is summed at once, before anything reads it.

With several axes a row is chosen for each; a dim may be cut by several of them, the outer ones
first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_topt.graph.op_config import Placement, Shard
from lightning_topt.techniques.tensor_parallel.layout import (
    PARTIAL,
    REPLICATE,
    Layout,
    TensorAxes,
    divides_along,
    layout_of,
    own_slice,
    pieces,
)
from lightning_topt.techniques.tensor_parallel.moves import all_gather


class Operand(NamedTuple):
    """A tensor argument by its `place` among them; `shape` is that of the full tensor."""

    place: int
    shape: tuple[int, ...]


class Row(NamedTuple):
    """Placements along one axis: of the tensor arguments, in the order of the call, and of results.

    `added` is the argument that is added to the result once that is summed (a bias), not given to
    the function. It has one dim, which is dim `along` of the result, counted from the end.
    """

    inputs: tuple[Placement, ...]
    outputs: tuple[Placement, ...]
    added: int | None = None
    along: int = -1


class Arguments:
    """The arguments of a call, each given by position or by name."""

    __slots__ = ()
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def get(self, position: int, name: str, default: object = None) -> Any:
        """Return the argument given by position or by name."""
        return self.args[position] if position < len(self.args) else self.kwargs.get(name, default)

    def first(self, *names: str) -> tuple[Any, ...]:
        """Return the first arguments, given by position or by these names."""
        return tuple(self.get(position, name) for position, name in enumerate(names))


@dataclass(frozen=True)
class OpCall(Arguments):
    """A call whose tensor arguments are `Operand`s, also those in lists and tuples.

    `parts` are numbers of parts that shards may have, `masks` the places of operands of type bool.
    """

    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    operands: tuple[Operand, ...]
    parts: tuple[int, ...] = (1,)
    masks: frozenset[int] = frozenset()

    def parts_of(self, size: int, ranks: int) -> list[int]:
        """Return the numbers of parts with which a dim of this size can be cut for `ranks`."""
        return [parts for parts in self.parts if divides(size, ranks, parts)]

    def row(
        self,
        placed: Mapping[Any, Placement],
        *outputs: Placement,
        added: Operand | None = None,
        along: int = -1,
    ) -> Row:
        """Return a row with the named operands placed, and all others replicated.

        None is an argument that the call does not have.
        """
        inputs: list[Placement] = [REPLICATE] * len(self.operands)
        for operand, placement in placed.items():
            if operand is not None:
                inputs[operand.place] = placement
        return Row(tuple(inputs), outputs, None if added is None else added.place, along)


@dataclass(slots=True)
class Placed(Arguments):
    """A call on local tensors.

    Args:
        call: with full shapes
        args: with local tensors
        kwargs: with local tensors
        inputs: layouts of the arguments
        outputs: placements of every result on every axis
        axes: the tensor axes
        memo: kept for calls of the same signature
    """

    call: OpCall
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    inputs: tuple[Layout, ...]
    outputs: tuple[tuple[Placement, ...], ...]
    axes: TensorAxes
    memo: dict[str, Any] = field(default_factory=dict)

    def called(self) -> Any:
        """Return what the function makes of the local arguments."""
        return self.call.func(*self.args, **self.kwargs)

    def local_shape(self, shape: Sequence[int], output: int = 0) -> tuple[int, ...]:
        """Return the local shape of a result whose full one is `shape`."""
        if not self.outputs:
            return tuple(shape)
        return Layout(tuple(shape), self.outputs[output]).local_shape(self.axes.sizes)

    def ranks_along(self, operand: int, dim: int) -> int:
        """Return into how many slices the argument is cut along `dim`."""
        return math.prod(self.axes.sizes[axis] for axis in self.axes_along(operand, dim))

    def axes_along(self, operand: int, dim: int) -> list[int]:
        """Return the axes (indices) along which the argument is cut in `dim`."""
        return [
            axis
            for axis, placement in enumerate(self.inputs[operand].placements)
            if isinstance(placement, Shard) and placement.dim == dim
        ]

    def place_along(self, operand: int, dim: int) -> tuple[int, int]:
        """Return first index and length of this rank's slice along `dim`, which has one part."""
        # outer axes first: each takes its place in what those before it leave
        first, length = 0, self.inputs[operand].shape[dim]
        for axis, placement in enumerate(self.inputs[operand].placements):
            if placement == Shard(dim):
                length //= self.axes.sizes[axis]
                first += self.axes.coordinates[axis] * length
        return first, length

    def cut_like(self, whole: Tensor, operand: int) -> Tensor:
        """Return the slice of `whole`, equal on all ranks, that fits the local argument."""
        return own_slice(whole, self.inputs[operand].placements, self.axes)

    def cut_like_dim(self, whole: Tensor, operand: int, dim: int, *, along: int = 0) -> Tensor:
        """Return the slice of `whole` along dim `along` that fits dim `dim` of the argument."""
        placements = [
            Shard(along, each.parts) if isinstance(each, Shard) and each.dim == dim else REPLICATE
            for each in self.inputs[operand].placements
        ]
        return own_slice(whole, placements, self.axes)

    def gathered(self, local: Tensor, axes: Sequence[int], shard: Shard) -> Tensor:
        """Return the full tensor along `axes`, without a gradient. A collective call."""
        # inner axes first
        for axis in reversed(axes):
            local = all_gather(local, shard, self.axes, axis)
        return local


@dataclass(frozen=True)
class Kind:
    """A family of functions: what they admit and how they run on local tensors.

    Args:
        name: of the family, for messages
        rows: yields the rows for an axis of so many ranks
        run: returns what the call on local tensors returns; by default the function is called
        sums_rest: sums may stay scattered, by the rule of the block; others are replicated
        functions: the members of the family
    """

    name: str
    rows: Callable[[OpCall, int], Iterable[Row]]
    run: Callable[[Placed], Any] | None = None
    sums_rest: bool = False
    functions: list[Callable[..., Any]] = field(default_factory=list, compare=False)


# one table for all modules of this package, which fill it when they are imported
KINDS: dict[Callable[..., Any], Kind] = {}


def register(kind: Kind, functions: Iterable[Callable[..., Any] | None]) -> None:
    """Enter `functions` as of `kind`; None stands for one that this release of torch lacks."""
    for function in functions:
        if function is not None:
            assert KINDS.get(function, kind) is kind, f"{function} is of two kinds"
            KINDS[function] = kind
            kind.functions.append(function)


def named(names: str, *places: Any) -> Iterator[Callable[..., Any] | None]:
    """Yield the functions of these names in any of `places`, as function and as method.

    `names` are separated by blanks.
    """
    for name in names.split():
        yield from (getattr(place, name, None) for place in places)


def dim_rows(
    call: OpCall,
    ranks: int,
    dims: Iterable[int] | Mapping[int, int],
    *,
    alike: Iterable[Operand] = (),
) -> Iterator[Row]:
    """Yield the rows that split the first argument along one of `dims`; others are replicated.

    Args:
        call: the call
        ranks: along the axis
        dims: of the argument; a mapping says which dim of the result each becomes
        alike: arguments that are split like the first
    """
    x = call.operands[0]
    results = dims if isinstance(dims, Mapping) else {dim: dim for dim in dims}
    for dim, result in results.items():
        for count in call.parts_of(x.shape[dim], ranks):
            yield call.row(dict.fromkeys((x, *alike), Shard(dim, count)), Shard(result, count))


def positive(dim: int, ndim: int) -> int:
    """Return `dim` counted from the front."""
    return dim + ndim if dim < 0 else dim


def divides(size: int, ranks: int, parts: int = 1) -> bool:
    """Return whether `parts` equal parts of `size` can be cut for `ranks` ranks."""
    return size > 0 and size % (ranks * parts) == 0


def tensors_in(values: Iterable[object]) -> Iterator[Tensor]:
    """Yield the tensors among `values` and in lists and tuples among them, in order."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from tensors_in(value)


def replaced(value: object, new: Sequence[object], *, of: type) -> Any:
    """Return `value` with every instance of `of` replaced by the next of `new`.

    `of` is the type of tensors or of operands; they may be in lists and tuples.
    """
    return _replaced(value, iter(new), of)


def _replaced(value: object, rest: Iterator[object], of: type) -> Any:
    # A function, no closure that calls itself: such a cycle keeps tensors alive until the garbage
    # collector runs.
    if isinstance(value, of):
        return next(rest)
    if isinstance(value, list):
        return [_replaced(item, rest, of) for item in value]
    if isinstance(value, tuple) and not isinstance(value, torch.Size):
        return tuple(_replaced(item, rest, of) for item in value)
    return value


# ---- what a call does ----------------------------------------------------------------------------

# It takes, on each axis, the row that moves the least. Parameters stay where they are while a row
# lets them.


class Argument(NamedTuple):
    """Where an argument is before the call; whether it needs a gradient, is a parameter, a mask."""

    layout: Layout
    needs_grad: bool
    is_parameter: bool
    is_mask: bool = False


class CallDecision(NamedTuple):
    """What a call does: placements by axis, and what is moved or added.

    Args:
        inputs: placements of every argument
        enters: for every argument and axis, whether it is replicated and each rank uses it
            differently
        outputs: placements of every result; empty: all are replicated
        added: the argument that is added at the end
        along: the dim of the result, from the end, that is the only dim of `added`
        writes_back: the call changes its first argument, which moves; the slice of what it becomes
            is copied into it
    """

    inputs: tuple[tuple[Placement, ...], ...]
    enters: tuple[tuple[bool, ...], ...]
    outputs: tuple[tuple[Placement, ...], ...]
    added: int | None
    along: int = -1
    writes_back: bool = False


def decide(
    kind: Kind | None,
    call: OpCall,
    known: Sequence[Argument],
    sizes: Sequence[int],
    *,
    in_place: bool,
    splits: Sequence[Placement | None] = (),
    gathers: Sequence[bool] = (),
) -> CallDecision:
    """Return the rows that the call takes, one for each axis.

    Args:
        kind: of the function; None: it gets unsharded tensors
        call: with full shapes
        known: where its arguments are
        sizes: of the axes
        in_place: whether it changes its first argument
        splits: where each axis splits activations: sums of gradients of replicated parameters are
            then not counted, so activations stay split; of equal rows the one is taken that has its
            results there
        gathers: whether each axis gathers slices of parameters, which then count as replicated
    """
    # one axis at a time
    chosen = [
        _row(
            kind,
            call,
            [_taken_whole(each, axis) for each in known] if gathers and gathers[axis] else known,
            axis=axis,
            sizes=sizes,
            in_place=in_place,
            splits=splits[axis] if splits else None,
        )
        for axis in range(len(sizes))
    ]
    stays = not in_place or all(
        row.inputs[0] == known[0].layout.placements[axis] for axis, row in enumerate(chosen)
    )
    # several axes together may cut a dim into pieces that do not divide: then nothing is split
    if not stays or not _fits(chosen, call, sizes):
        chosen = [_whole(call)] * len(sizes)
    # from rows by axis to placements by tensor
    inputs = tuple(zip(*(row.inputs for row in chosen), strict=True))
    count = max(len(row.outputs) for row in chosen)
    outputs = tuple(
        tuple(
            row.outputs[min(index, len(row.outputs) - 1)] if row.outputs else REPLICATE
            for row in chosen
        )
        for index in range(count)
    )
    added = next((row for row in chosen if row.added is not None), None)
    # used differently by each rank: replicated beside something that is split
    parted = [any(isinstance(placement, Shard) for placement in row.inputs) for row in chosen]
    enters = tuple(
        tuple(
            is_split
            and placement == REPLICATE
            and row.added != place  # what is added to a sum is used alike by all ranks
            for is_split, placement, row in zip(parted, placements, chosen, strict=True)
        )
        for place, placements in enumerate(inputs)
    )
    back = in_place and inputs[0] != known[0].layout.placements
    return CallDecision(
        inputs, enters, outputs, *((added.added, added.along) if added else (None, -1)), back
    )


def _row(
    kind: Kind | None,
    call: OpCall,
    known: Sequence[Argument],
    *,
    axis: int,
    sizes: Sequence[int],
    in_place: bool,
    splits: Placement | None,
) -> Row:
    # The row of `kind` that costs least along one axis
    whole = _whole(call)
    now = [each.layout.placements[axis] for each in known]
    if kind is None or all(placement == REPLICATE for placement in now):
        return whole
    rows: Iterable[Row] = (*kind.rows(call, sizes[axis]), whole)
    # a tensor that is changed in place must stay where it is
    if in_place:
        rows = [row for row in rows if row.inputs[0] == now[0]] or [whole]
    ranks = max(sizes[axis], 2)  # an axis of one rank takes the rows of a longer one
    return min(rows, key=lambda row: _cost(row, now, known, ranks, splits=splits))


def _taken_whole(known: Argument, axis: int) -> Argument:
    # A parameter as if it were replicated along `axis`
    if not known.is_parameter:
        return known
    placements = known.layout.placements
    whole = (*placements[:axis], REPLICATE, *placements[axis + 1 :])
    return known._replace(layout=known.layout._replace(placements=whole))


def _whole(call: OpCall) -> Row:
    return Row((REPLICATE,) * len(call.operands), ())


def _cost(
    row: Row,
    now: Sequence[Placement],
    known: Sequence[Argument],
    ranks: int,
    *,
    splits: Placement | None,
) -> tuple[float, float, bool]:
    # Return the elements that travel per rank, of parameters and of all; and a tie-break.
    # Forward and backward count. Parameters come first, since the plan has placed them.
    is_split = any(isinstance(placement, Shard) for placement in row.inputs)
    parameters = total = 0.0
    for before, after, operand in zip(now, row.inputs, known, strict=True):
        # elements that a gather brings to one rank
        moved = math.prod(operand.layout.shape) * (ranks - 1) / ranks
        if isinstance(before, Shard):
            if before == after:
                continue
            cost = (moved / ranks if isinstance(after, Shard) else moved) * (1 + operand.needs_grad)
            parameters += cost if operand.is_parameter else 0.0
            total += cost
        elif (
            splits and operand.is_parameter and isinstance(after, Shard) and PARTIAL in row.outputs
        ):
            parameters += moved  # a sum over ranks that replicated parameters do not need
        elif (
            operand.needs_grad
            and is_split
            and not (splits and operand.is_parameter and after == REPLICATE)
        ):
            # replicated, used differently by each rank: its gradient is summed, a slice's gathered
            total += moved if isinstance(after, Shard) else 2 * moved
    return parameters, total, splits is not None and splits not in row.outputs


def _fits(rows: Sequence[Row], call: OpCall, sizes: Sequence[int]) -> bool:
    # Whether all axes together cut arguments and results into slices that divide
    if len(sizes) == 1:
        return True
    # arguments, then results
    for operand in call.operands:
        if not divides_along(operand.shape, [row.inputs[operand.place] for row in rows], sizes):
            return False
    count = min((len(row.outputs) for row in rows if row.outputs), default=0)
    cut_by = [size for row, size in zip(rows, sizes, strict=True) if row.outputs]
    return all(
        pieces([row.outputs[i] for row in rows if row.outputs], cut_by) is not None
        for i in range(count)
    )


_CHANGING = (
    "__setitem__ __set__ __iadd__ __isub__ __imul__ __idiv__ __itruediv__ __ifloordiv__ __imod__ "
    "__ipow__ __imatmul__ __iand__ __ior__ __ixor__ __ilshift__ __irshift__"
)
_CHANGES = frozenset(_CHANGING.split())


def known_of(tensor: Tensor, whole: Layout) -> Argument:
    """Return where an argument is; `whole` is the layout of unsharded ones, but for the shape."""
    layout = layout_of(tensor) or whole._replace(shape=tuple(tensor.shape))
    return Argument(
        layout, tensor.requires_grad, isinstance(tensor, nn.Parameter), tensor.dtype == torch.bool
    )


def call_of(
    func: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    known: Sequence[Argument],
    *,
    of: type = Tensor,
) -> OpCall:
    """Return the call with operands for its tensors, the instances of `of`.

    `known` says where they are, in order.
    """
    operands = tuple(Operand(index, each.layout.shape) for index, each in enumerate(known))
    new_args, new_kwargs = replaced((args, tuple(kwargs.values())), operands, of=of)
    # parts that any shard among the arguments has
    placements = (placement for each in known for placement in each.layout.placements)
    parts = {1, *(placement.parts for placement in placements if isinstance(placement, Shard))}
    masks = frozenset(index for index, each in enumerate(known) if each.is_mask)
    return OpCall(
        func,
        new_args,
        dict(zip(kwargs, new_kwargs, strict=True)),
        operands,
        tuple(sorted(parts)),
        masks,
    )


def is_in_place(func: Callable[..., Any], kwargs: dict[str, Any]) -> bool:
    """Return whether a call changes its first tensor."""
    name = getattr(func, "__name__", "")
    changes = (name.endswith("_") and not name.startswith("__")) or name in _CHANGES
    return changes or kwargs.get("inplace") is True

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
from torch import Tensor

from lightning_topt.graph.op_config import Placement, Shard
from lightning_topt.techniques.tensor_parallel.layout import (
    REPLICATE,
    Layout,
    TensorAxes,
    cut,
    own_slice,
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


@dataclass(frozen=True)
class OpCall:
    """A call whose tensor arguments are `Operand`s, also those in lists and tuples.

    `parts` are numbers of parts that shards may have, `masks` the places of operands of type bool.
    """

    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    operands: tuple[Operand, ...]
    parts: tuple[int, ...] = (1,)
    masks: frozenset[int] = frozenset()

    def get(self, position: int, name: str, default: object = None) -> Any:
        """Return the argument given by position or by name."""
        return self.args[position] if position < len(self.args) else self.kwargs.get(name, default)

    def first(self, *names: str) -> tuple[Any, ...]:
        """Return the first arguments, given by position or by these names."""
        return tuple(self.get(position, name) for position, name in enumerate(names))

    def whole(self) -> list[Placement]:
        """Return Replicate for every operand, to be changed."""
        return [REPLICATE] * len(self.operands)

    def row(
        self,
        placed: Mapping[Operand, Placement],
        *outputs: Placement,
        added: Operand | None = None,
        along: int = -1,
    ) -> Row:
        """Return a row with the named operands placed, and all others replicated."""
        inputs = self.whole()
        for operand, placement in placed.items():
            inputs[operand.place] = placement
        return Row(tuple(inputs), outputs, None if added is None else added.place, along)


@dataclass(slots=True)
class Placed:
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

    def get(self, position: int, name: str, default: object = None) -> Any:
        """Return the local argument given by position or by name."""
        return self.args[position] if position < len(self.args) else self.kwargs.get(name, default)

    def first(self, *names: str) -> tuple[Any, ...]:
        """Return the first local arguments, given by position or by these names."""
        return tuple(self.get(position, name) for position, name in enumerate(names))

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
        axes = self.axes
        return own_slice(
            whole, self.inputs[operand].placements, coordinates=axes.coordinates, sizes=axes.sizes
        )

    def cut_like_dim(self, whole: Tensor, operand: int, dim: int, *, along: int = 0) -> Tensor:
        """Return the slice of `whole` along dim `along` that fits dim `dim` of the argument."""
        axes = self.axes
        placements = [
            Shard(along, each.parts) if isinstance(each, Shard) and each.dim == dim else REPLICATE
            for each in self.inputs[operand].placements
        ]
        return own_slice(whole, placements, coordinates=axes.coordinates, sizes=axes.sizes)

    def cut_along(self, whole: Tensor, axes: Iterable[int], shard: Shard) -> Tensor:
        """Return this rank's slice of `whole` along the axes of these indices, outer ones first."""
        for axis in axes:
            whole = cut(
                whole, shard, index=self.axes.coordinates[axis], count=self.axes.sizes[axis]
            )
        return whole

    def gathered(self, local: Tensor, axes: Sequence[int], shard: Shard) -> Tensor:
        """Return the inverse of `cut_along`, without a gradient. A collective call."""
        # inner axes first, the inverse of `cut_along`
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
    parts: Sequence[int] | None = None,
) -> Iterator[Row]:
    """Yield the rows that split the first argument along one of `dims`; others are replicated.

    Args:
        call: the call
        ranks: along the axis
        dims: of the argument; a mapping says which dim of the result each becomes
        parts: that the shards may have; by default those of the call
    """
    x = call.operands[0]
    results = dims if isinstance(dims, Mapping) else {dim: dim for dim in dims}
    for dim, result in results.items():
        for count in call.parts if parts is None else parts:
            if divides(x.shape[dim], ranks, count):
                yield call.row({x: Shard(dim, count)}, Shard(result, count))


def with_argument(
    placed: Placed,
    position: int,
    name: str,
    value: object,
    *,
    args: tuple[Any, ...] | None = None,
    kwargs: dict[str, Any] | None = None,
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return `args` and `kwargs`, by default the call's, with one argument changed.

    It is given by position or by name.
    """
    args = placed.args if args is None else args
    kwargs = placed.kwargs if kwargs is None else kwargs
    if position < len(args):
        return (*args[:position], value, *args[position + 1 :]), kwargs
    return args, {**kwargs, name: value}


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

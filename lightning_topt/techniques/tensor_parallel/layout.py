"""A layout says where a tensor is on the tensor axes of a mesh, and how large it is as a whole."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_topt.graph.op_config import LAYOUT, Partial, Placement, Replicate, Shard

REPLICATE = Replicate()
PARTIAL = Partial()


class _Layout(NamedTuple):
    shape: tuple[int, ...]
    placements: tuple[Placement, ...]
    batch: Shard | None = None


class Layout(_Layout):
    """The `shape` of the whole tensor, and one placement per tensor axis.

    `batch`: the slices that belong to the batches of the ranks of the one axis, where each brings
    its own (`joint_run`). They say nothing of where the tensor is.

    Parts of a shard are those of the whole dim. Where several axes cut one dim, those with fewer
    parts cut first, of equal ones the outer ones: a batch of samples, then the steps of each, in a
    dim that has both.
    """

    def __hash__(self) -> int:
        """Return the hash, kept: a layout is part of the key of every call."""
        if (found := self.__dict__.get("hash")) is None:
            found = self.__dict__["hash"] = tuple.__hash__(self)
        value: int = found
        return value

    def local_shape(self, sizes: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of one rank's part; `sizes` are those of the axes."""
        shape = [*self.shape]
        for placement, size in zip(self.placements, sizes, strict=True):
            if isinstance(placement, Shard):
                shape[placement.dim] //= size
        return tuple(shape)


def layout_of(tensor: Any) -> Layout | None:
    """Return the layout that `tensor` carries; None for what every rank has whole."""
    return getattr(tensor, LAYOUT, None)


def with_layout(tensor: Tensor, layout: Layout) -> Tensor:
    """Make `tensor` carry `layout`, and return it."""
    setattr(tensor, LAYOUT, layout)
    return tensor


def whole_shape(
    placements: Sequence[Placement], local_shape: Sequence[int], sizes: Sequence[int]
) -> tuple[int, ...]:
    """Return the shape of the whole tensor of which ranks have parts of `local_shape`: the way back
    of `Layout.local_shape`.
    """
    shape = [*local_shape]
    for placement, size in zip(placements, sizes, strict=True):
        if isinstance(placement, Shard):
            shape[placement.dim] *= size
    return tuple(shape)


def layout_at(
    placements: Sequence[Placement],
    local_shape: Sequence[int],
    sizes: Sequence[int],
    *,
    batch: Shard | None,
) -> Layout | None:
    """Return where a local tensor at these placements is; None for whole, with nothing of a
    `batch`.
    """
    if batch is None and all(placement == REPLICATE for placement in placements):
        return None
    return Layout(whole_shape(placements, local_shape, sizes), tuple(placements), batch)


def check_divides(size: int, parts: int, ranks: int, *, what: str) -> None:
    """Raise ValueError where `parts` equal parts of a dim of `size` cannot be cut for `ranks`
    ranks.
    """
    if size % (parts * ranks):
        pieces = f"{parts} parts for {ranks} ranks" if parts > 1 else f"{ranks} ranks"
        raise ValueError(
            f"{what} has size {size}, which does not divide into {pieces}; choose a number of "
            "ranks that divides it, or keep it whole"
        )


def pieces(placements: Sequence[Placement], sizes: Sequence[int]) -> dict[int, int] | None:
    """Return what number must divide each dim that is cut; None where the axes that cut one dim do
    not cut pieces of one another, so that ranks would not have one slice each.
    """
    shards = [
        (each, size)
        for each, size in zip(placements, sizes, strict=True)
        if isinstance(each, Shard)
    ]
    # by dim: parts of the last axis, pieces that all of them cut
    found: dict[int, tuple[int, int]] = {}
    for each, size in sorted(shards, key=lambda item: item[0].parts):
        parts, count = found.get(each.dim, (each.parts, each.parts))
        if parts != each.parts:
            if each.parts % count:
                return None
            count = each.parts
        found[each.dim] = each.parts, count * size
    return {dim: count for dim, (_, count) in found.items()}


def local_shard(placements: Sequence[Placement], sizes: Sequence[int], axis: int) -> Shard:
    """Return the shard of `axis` with as many parts as the other axes leave of the dim."""
    own = placements[axis]
    assert isinstance(own, Shard)
    if own.parts == 1:
        return own
    parts = own.parts
    for each, size in zip(placements, sizes, strict=True):
        if isinstance(each, Shard) and each.dim == own.dim and each.parts < own.parts:
            parts //= size
    return Shard(own.dim, parts)


def own_slice(
    whole: Tensor,
    placements: Sequence[Placement],
    *,
    coordinates: Sequence[int],
    sizes: Sequence[int],
) -> Tensor:
    """Return the slice of `whole` that the rank at `coordinates` has; a view where no dim has
    parts.
    """
    now: list[Placement] = [REPLICATE] * len(sizes)
    for axis, placement in enumerate(placements):
        if isinstance(placement, Shard):
            now[axis] = placement
            whole = cut(
                whole, local_shard(now, sizes, axis), index=coordinates[axis], count=sizes[axis]
            )
    return whole


def cut(tensor: Tensor, shard: Shard, *, index: int, count: int) -> Tensor:
    """Return the `index`-th of `count` slices of `tensor` along ``shard.dim``: of each of its parts
    one, joined.

    A view where there is one part.
    """
    size = tensor.shape[shard.dim]
    length = size // (shard.parts * count)
    if shard.parts == 1:
        return tensor.narrow(shard.dim, index * length, length)
    parts = _in_parts(tensor, shard)
    return parts.narrow(shard.dim + 1, index * length, length).flatten(shard.dim, shard.dim + 1)


class Span(NamedTuple):
    """A `Span` is `length` indices of one dim: from `start` on in the whole tensor, from `local` on
    in a part of it.
    """

    start: int
    local: int
    length: int


def cut_spans(spans: Sequence[Span], shard: Shard, *, index: int, count: int) -> tuple[Span, ...]:
    """Return where the slice that `cut` makes along a dim with these `spans` is."""
    part = sum(span.length for span in spans) // shard.parts
    length = part // count
    found: list[Span] = []
    for number in range(shard.parts):
        own = narrowed(spans, number * part + index * length, length)
        found += [span._replace(local=span.local + number * length) for span in own]
    return tuple(found)


def narrowed(spans: Sequence[Span], first: int, length: int) -> tuple[Span, ...]:
    """Return where the `length` indices from `first` on, of a part with these `spans`, are."""
    found = []
    for span in spans:
        start, stop = max(first, span.local), min(first + length, span.local + span.length)
        if start < stop:
            found.append(Span(span.start + start - span.local, start - first, stop - start))
    return tuple(found)


def joined(slices: Sequence[Tensor], shard: Shard) -> Tensor:
    """Return the whole tensor of all `slices` that `cut` makes."""
    if shard.parts == 1:
        return torch.cat(list(slices), shard.dim)
    parts = [_in_parts(piece, shard) for piece in slices]
    return torch.cat(parts, shard.dim + 1).flatten(shard.dim, shard.dim + 1)


def _in_parts(tensor: Tensor, shard: Shard) -> Tensor:
    parts: Tensor = tensor.unflatten(shard.dim, (shard.parts, -1))  # type: ignore[no-untyped-call]
    return parts


def numel(shape: Sequence[int]) -> int:
    """Return the number of elements."""
    return math.prod(shape)

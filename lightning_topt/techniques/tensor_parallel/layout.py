"""Where a tensor is on the tensor axes of a mesh, and this rank's place on them.

`TensorAxes` has the axes with their process groups. A `Layout` has the shape of the
unsharded tensor and how each axis places it. The functions cut slices, join them, and give their
indices.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_topt.communication.topology import own_group
from lightning_topt.graph.kernels import show_collective
from lightning_topt.graph.mesh_axes import Mesh
from lightning_topt.graph.op_config import LAYOUT, Partial, Placement, Replicate, Shard


@dataclass(frozen=True)
class TensorAxes:
    """The tensor axes of a mesh, outermost first, as one rank sees them.

    Args:
        names: of the axes
        sizes: number of ranks along each
        coordinates: the place of this rank
        groups: of which this rank is one, by axis; None for a rank that is looked at, not run: its
            collectives only have shapes
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    coordinates: tuple[int, ...]
    groups: tuple[dist.ProcessGroup | None, ...]

    def __len__(self) -> int:
        return len(self.sizes)

    def note(self, op: str, axis: int, whole: torch.Tensor) -> None:
        """Let a capture record a call on `whole`, the larger of what is given and what is got."""
        if self.groups[axis] is None:
            show_collective(whole, op=op, axis=axis)

    @classmethod
    def of_mesh(cls, mesh: Mesh, *, rank: int) -> TensorAxes:
        """Return the axes as `rank` sees them, without groups."""
        # the rank counts through the mesh in row-major order
        axes = mesh.tensor_axes
        coordinates = tuple(rank // mesh.stride([axis]) % mesh.shape[axis] for axis in axes)
        return cls(
            tuple(mesh.names[axis] for axis in axes),
            tuple(mesh.shape[axis] for axis in axes),
            coordinates,
            (None,) * len(axes),
        )

    @classmethod
    def with_groups(
        cls, mesh: Mesh, *, make: Callable[[Sequence[Sequence[int]]], dist.ProcessGroup] = own_group
    ) -> TensorAxes:
        """Return the axes as this rank sees them, with groups that `make` makes of sets of ranks.

        A collective call: groups are made in the same order on all ranks.
        """
        # one group per axis: the ranks that differ in this coordinate only
        alone = cls.of_mesh(mesh, rank=dist.get_rank())
        groups = tuple(make(mesh.groups_along([axis])) for axis in mesh.tensor_axes)
        return cls(alone.names, alone.sizes, alone.coordinates, groups)


REPLICATE = Replicate()
PARTIAL = Partial()


class _LayoutFields(NamedTuple):
    shape: tuple[int, ...]
    placements: tuple[Placement, ...]


class Layout(_LayoutFields):
    """The `shape` of the unsharded tensor, and one placement per tensor axis.

    Parts of a shard are those of the full dim. If several axes cut one dim, those with fewer parts
    cut first, of equal ones the outer ones. Example: a batch of samples, then the steps of each, in
    a dim that has both.
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


def layout_of(tensor: object) -> Layout | None:
    """Return the layout that `tensor` carries; None for what every rank has in full."""
    return getattr(tensor, LAYOUT, None)


def with_layout(tensor: Tensor, layout: Layout) -> Tensor:
    """Make `tensor` carry `layout`, and return it."""
    setattr(tensor, LAYOUT, layout)
    return tensor


def whole_shape(
    placements: Sequence[Placement], local_shape: Sequence[int], sizes: Sequence[int]
) -> tuple[int, ...]:
    """Return the shape of the unsharded tensor of which ranks have parts of `local_shape`.

    The inverse of `Layout.local_shape`.
    """
    shape = [*local_shape]
    for placement, size in zip(placements, sizes, strict=True):
        if isinstance(placement, Shard):
            shape[placement.dim] *= size
    return tuple(shape)


def layout_at(
    placements: Sequence[Placement], local_shape: Sequence[int], sizes: Sequence[int]
) -> Layout | None:
    """Return the layout of a local tensor; None if replicated."""
    if all(placement == REPLICATE for placement in placements):
        return None
    return Layout(whole_shape(placements, local_shape, sizes), tuple(placements))


def check_divides(size: int, parts: int, ranks: int, *, what: str) -> None:
    """Raise ValueError if `parts` equal parts of `size` cannot be cut for `ranks` ranks."""
    if size % (parts * ranks):
        pieces = f"{parts} parts for {ranks} ranks" if parts > 1 else f"{ranks} ranks"
        raise ValueError(
            f"{what} has size {size}, which does not divide into {pieces}; choose a number of "
            "ranks that divides it, or keep it whole"
        )


def pieces(placements: Sequence[Placement], sizes: Sequence[int]) -> dict[int, int] | None:
    """Return what number must divide each dim that is cut, by dim.

    None if the axes that cut one dim do not cut pieces of one another: ranks would not have one
    slice each.
    """
    # axes with fewer parts cut first
    shards = [
        (each, size)
        for each, size in zip(placements, sizes, strict=True)
        if isinstance(each, Shard)
    ]
    # by dim: (parts of the last axis so far, pieces that all axes so far cut)
    found: dict[int, tuple[int, int]] = {}
    for each, size in sorted(shards, key=lambda item: item[0].parts):
        parts, count = found.get(each.dim, (each.parts, each.parts))
        if parts != each.parts:
            if each.parts % count:
                return None
            count = each.parts
        found[each.dim] = each.parts, count * size
    return {dim: count for dim, (_, count) in found.items()}


def divides_along(
    shape: Sequence[int], placements: Sequence[Placement], sizes: Sequence[int]
) -> bool:
    """Return whether a tensor of this shape can be cut so."""
    found = pieces(placements, sizes)
    return found is not None and all(
        shape[dim] and shape[dim] % count == 0 for dim, count in found.items()
    )


def local_shard(placements: Sequence[Placement], sizes: Sequence[int], axis: int) -> Shard:
    """Return the shard of `axis` with as many parts as the other axes leave of the dim."""
    own = placements[axis]
    assert isinstance(own, Shard)
    if own.parts == 1:
        return own
    # axes that cut earlier have left a share of the parts
    parts = own.parts
    for each, size in zip(placements, sizes, strict=True):
        if isinstance(each, Shard) and each.dim == own.dim and each.parts < own.parts:
            parts //= size
    return Shard(own.dim, parts)


def own_slice(whole: Tensor, placements: Sequence[Placement], axes: TensorAxes) -> Tensor:
    """Return this rank's slice of `whole`; a view if no dim has parts."""
    # outer axes first, each on what those before it leave
    now: list[Placement] = [REPLICATE] * len(axes)
    for axis, placement in enumerate(placements):
        if isinstance(placement, Shard):
            now[axis] = placement
            shard, count = local_shard(now, axes.sizes, axis), axes.sizes[axis]
            whole = cut(whole, shard, index=axes.coordinates[axis], count=count)
    return whole


def cut(tensor: Tensor, shard: Shard, *, index: int, count: int) -> Tensor:
    """Return the `index`-th of `count` slices of `tensor` along ``shard.dim``.

    Of each of the shard's parts it has one slice, joined. A view if there is one part.
    """
    # one part: one range; several: a range of each
    size = tensor.shape[shard.dim]
    length = size // (shard.parts * count)
    if shard.parts == 1:
        return tensor.narrow(shard.dim, index * length, length)
    # (..., part, index in it, ...): the same slice of every part
    parts = _in_parts(tensor, shard)
    return parts.narrow(shard.dim + 1, index * length, length).flatten(shard.dim, shard.dim + 1)


class Span(NamedTuple):
    """`length` indices of one dim: from `start` in the full tensor, from `local` in a part."""

    start: int
    local: int
    length: int


def cut_spans(spans: Sequence[Span], shard: Shard, *, index: int, count: int) -> tuple[Span, ...]:
    """Return where the slice that `cut` makes along a dim with these `spans` is."""
    # of each part of the dim, the `index`-th of `count` slices
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
    """Return the unsharded tensor of all `slices` that `cut` makes."""
    if shard.parts == 1:
        return torch.cat(list(slices), shard.dim)
    parts = [_in_parts(piece, shard) for piece in slices]
    return torch.cat(parts, shard.dim + 1).flatten(shard.dim, shard.dim + 1)


def _in_parts(tensor: Tensor, shard: Shard) -> Tensor:
    parts: Tensor = tensor.unflatten(shard.dim, (shard.parts, -1))
    return parts

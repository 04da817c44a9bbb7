"""Buckets of gradients are cut so that every rank owns one contiguous slice of each, made of whole
rows.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from torch import Tensor

from lightning_topt.optim.pieces import Piece, num_rows


@dataclass(frozen=True)
class Segment:
    """A parameter inside of a bucket: `numel` elements from `offset` on, with cuts allowed every
    `row_numel` elements.
    """

    offset: int
    numel: int
    row_numel: int


def segment_of(gradient: Tensor, *, offset: int, splittable: bool) -> Segment:
    """Return the segment of a parameter whose gradient lies as `gradient` does in its bucket, from
    element `offset` on.

    Cuts are allowed between rows where these are contiguous in memory (also channels-last; not in a
    transposed matrix).
    """
    rows, numel = num_rows(gradient), gradient.numel()
    by_rows = splittable and rows > 1 and numel > 0 and gradient.stride(0) * rows == numel
    return Segment(offset, numel, numel // rows if by_rows else max(1, numel))


def cut_buckets(buckets: Sequence[Sequence[Segment]], *, world_size: int) -> list[tuple[int, ...]]:
    """Return the `world_size` + 1 offsets of every bucket between which the ranks' slices lie.

    Ranks' sums over all buckets are equal to within a row (of the last bucket); a slice may be
    empty.
    """
    given = [0] * (world_size + 1)  # elements of earlier buckets that belong to the first k ranks
    cuts = []
    for segments in buckets:
        size = segments[-1].offset + segments[-1].numel
        offsets = [0]
        for k in range(1, world_size):
            wanted = (given[-1] + size) * k // world_size - given[k]
            offsets.append(min(size, max(offsets[-1], _nearest_cut(segments, wanted))))
        offsets.append(size)
        cuts.append(tuple(offsets))
        given = [before + offset for before, offset in zip(given, offsets, strict=True)]
    return cuts


def _nearest_cut(segments: Sequence[Segment], wanted: int) -> int:
    index = bisect_right(segments, wanted, key=lambda segment: segment.offset) - 1
    if index < 0:
        return 0
    segment = segments[index]
    row = min(
        round((wanted - segment.offset) / segment.row_numel), segment.numel // segment.row_numel
    )
    return segment.offset + row * segment.row_numel


def pieces_of_segment(
    segment: Segment, cuts: Sequence[int], *, rows: int, index: int
) -> list[Piece]:
    """Return the pieces of a parameter with `rows` rows in a bucket with `cuts`, in order; none for
    one without elements.
    """
    pieces = []
    for owner, cut in enumerate(pairwise(cuts)):
        begin, end = max(cut[0], segment.offset), min(cut[1], segment.offset + segment.numel)
        if begin < end:
            whole = end - begin == segment.numel
            start, stop = ((at - segment.offset) // segment.row_numel for at in (begin, end))
            pieces.append(
                Piece(index, 0, rows, owner) if whole else Piece(index, start, stop, owner)
            )
    return pieces


def offsets_of(numels: Sequence[int]) -> list[int]:
    """Return the first element of each of several tensors that lie one after the other."""
    return [0, *accumulate(numels)][: len(numels)]

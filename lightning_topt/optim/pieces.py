"""Pieces of parameters: what one rank updates and the others receive; and who owns which.

A parameter that is updated as a whole is one piece. One whose rule treats every element by itself
may be cut anywhere along its first dim, so that every piece is a contiguous block of rows.

`assign_pieces` balances the work. Uncut parameters go by longest processing time first (Graham,
1969: at most 4/3 - 1/(3P) times the best). Those that may be cut then fill the ranks up to one
level, as runs of neighbouring rows, so that there are few cuts. The result depends on the arguments
alone: ranks with equal arguments get equal pieces.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, order=True)
class Piece:
    """Rows [`start`, `stop`) of one parameter, updated by rank `owner` of the group.

    `index` counts the parameters of one optimizer in the order of its groups, as
    ``Optimizer.state_dict`` does. A parameter without dims is one row.
    """

    index: int
    start: int
    stop: int
    owner: int


def num_rows(parameter: Tensor) -> int:
    """Return the rows that pieces of `parameter` may be cut at: its first dim; 1 without dims."""
    return int(parameter.shape[0]) if parameter.dim() else 1


def has_dense_rows(parameter: Tensor) -> bool:
    """Return whether rows lie one after the other in memory; those of a transposed one do not."""
    return parameter.dim() == 0 or parameter.stride(0) * len(parameter) == parameter.numel()


def is_whole(piece: Piece, parameter: Tensor) -> bool:
    """Return whether `piece` is all of `parameter`."""
    return piece.start == 0 and piece.stop == num_rows(parameter)


def rows_of(tensor: Tensor, piece: Piece) -> Tensor:
    """Return the view of `tensor` that `piece` covers: (stop - start, ...).

    `tensor` is a parameter, or shaped like one.
    """
    tensor = tensor.detach()
    return tensor if is_whole(piece, tensor) else tensor[piece.start : piece.stop]


def check_pieces(pieces: Sequence[Piece], parameters: Sequence[Tensor], *, world_size: int) -> None:
    """Raise ValueError unless the pieces of every split parameter cover it exactly once.

    Parameters without any piece are updated on every rank.
    """
    reached: dict[int, int] = {}
    for piece in sorted(pieces):
        if not 0 <= piece.index < len(parameters) or not 0 <= piece.owner < world_size:
            raise ValueError(
                f"{piece} is not of {len(parameters)} parameters on {world_size} ranks"
            )
        if piece.start != reached.get(piece.index, 0) or piece.stop <= piece.start:
            raise ValueError(f"{piece} overlaps another piece of its parameter, or leaves rows out")
        reached[piece.index] = piece.stop
    for index, stop in reached.items():
        if stop != num_rows(parameters[index]):
            raise ValueError(f"rows from {stop} on of parameter {index} have no owner")


# ---- Assignment: an owner for every row


_SNAP = 0.005  # of an even share: a cut this near to the end of a parameter moves there


@dataclass(frozen=True)
class Share:
    """The work of one parameter's update.

    Attributes:
        index: as in `Piece`.
        rows: how many rows it has.
        work: in elements, or what they cost.
        splittable: its rows may have different owners, and lie one after the other in memory.
    """

    index: int
    rows: int
    work: float
    splittable: bool


def assign_pieces(shares: Sequence[Share], *, world_size: int) -> list[Piece]:
    """Return an owner for every row of every share, sorted by parameter and row.

    The largest load of any rank is kept small: a list scheduling bound for whole shares, and to a
    row for those that may be cut.
    """
    assert world_size >= 1 and len({share.index for share in shares}) == len(shares)
    assert all(share.rows >= 1 and 0 <= share.work < math.inf for share in shares)
    loads, pieces = [0.0] * world_size, list[Piece]()
    # uncut parameters: longest processing time first
    uncut = [share for share in shares if not share.splittable or share.rows == 1]
    for share in sorted(uncut, key=lambda share: (-share.work, share.index)):
        owner = min(range(world_size), key=lambda rank: (loads[rank], rank))
        loads[owner] += share.work
        pieces.append(Piece(share.index, 0, share.rows, owner))
    # the others, in order: the first rows for rank 0 until it is full, the next ones for rank 1
    cut = [share for share in shares if share.splittable and share.rows > 1]
    snap = _SNAP * math.fsum(share.work for share in cut) / world_size
    rooms = _rooms(loads, math.fsum(share.work for share in cut))
    owner = 0
    for share in sorted(cut, key=lambda share: share.index):
        start, per_row = 0, share.work / share.rows
        while start < share.rows:
            left = share.rows - start
            rows = left
            if owner < world_size - 1 and rooms[owner] < left * per_row - snap:
                rows = 0 if rooms[owner] < snap else min(left, round(rooms[owner] / per_row))
            if rows:
                pieces.append(Piece(share.index, start, start + rows, owner))
            start, rooms[owner] = start + rows, rooms[owner] - rows * per_row
            if start < share.rows:  # what the rounding left over is the next one's
                rooms[owner + 1] += rooms[owner]
                owner += 1
    return sorted(pieces)


def _rooms(loads: Sequence[float], work: float) -> list[float]:
    # what each rank takes of `work` until all of them that take some have the same load
    filled, level = sorted(loads), 0.0
    for count in range(1, len(filled) + 1):
        level = (work + math.fsum(filled[:count])) / count
        if count == len(filled) or level <= filled[count]:
            break
    return [max(0.0, level - load) for load in loads]


def update_work(shape: Sequence[int]) -> float:
    """Return the work of an update of whole parameters, in elements.

    A matrix (m, n), from flattening all dims but the first, has max(m, n) min(m, n)^2 more, as an
    orthogonalisation does (Muon).
    """
    numel = math.prod(shape)
    if len(shape) < 2 or not numel:
        return float(numel)
    small, large = sorted((shape[0], numel // shape[0]))
    return float(numel) + float(large) * small**2

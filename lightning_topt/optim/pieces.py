"""Pieces of parameters: what one rank updates and the others receive.

A parameter that is updated whole is one piece; one whose rule treats every element by itself may be
cut anywhere along its first dim, so that every piece is a contiguous block of rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, order=True)
class Piece:
    """Rows [`start`, `stop`) of the parameter with number `index`, updated by rank `owner` of the
    group.

    `index` counts the parameters of one optimizer in the order of its groups, as
    ``Optimizer.state_dict`` does; a parameter without dims is one row.
    """

    index: int
    start: int
    stop: int
    owner: int


def num_rows(parameter: Tensor) -> int:
    """Return the rows that pieces of `parameter` may be cut at: its first dim; 1 without dims."""
    return int(parameter.shape[0]) if parameter.dim() else 1


def is_whole(piece: Piece, parameter: Tensor) -> bool:
    """Return whether `piece` is all of `parameter`."""
    return piece.start == 0 and piece.stop == num_rows(parameter)


def rows_of(tensor: Tensor, piece: Piece) -> Tensor:
    """Return the view of `tensor` (shaped like the parameter, or a parameter) that `piece` covers:
    (stop - start, ...).
    """
    tensor = tensor.detach()
    return tensor if is_whole(piece, tensor) else tensor[piece.start : piece.stop]


def check_pieces(pieces: Sequence[Piece], parameters: Sequence[Tensor], *, world_size: int) -> None:
    """Raise ValueError unless the pieces of every parameter that is split cover it exactly once.

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

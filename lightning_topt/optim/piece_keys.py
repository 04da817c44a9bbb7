"""The tensors that stand for a rank's own pieces in its optimizer: rows of the parameters, or exact
copies of rows.

A copy, the *master* of its piece, is what the optimizer updates where the rows themselves will not
do: where they are gathered rounded, or scattered in memory (transposed weights).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from lightning_topt.optim.full_state import laid_out
from lightning_topt.optim.gather import sent_dtype
from lightning_topt.optim.pieces import Piece, is_whole, rows_of

_COMPARED = 1 << 14  # elements at a time


class PieceKeys:
    """`PieceKeys` are the `keys` of those `pieces` of `parameters` that `rank` owns, by piece.

    `of_parameter` has, for each parameter with pieces, the keys that stand for it on this rank,
    none where others own it all. `masters` has the exact copies. `gather_dtype` is as for
    `PieceGather`.
    """

    def __init__(
        self,
        parameters: Sequence[Tensor],
        pieces: Sequence[Piece],
        *,
        rank: int,
        gather_dtype: torch.dtype | None,
    ) -> None:
        self.parameters, self.gather_dtype = parameters, gather_dtype
        self.keys: dict[Piece, Tensor] = {}
        self.masters: dict[Piece, Tensor] = {}
        self.of_parameter: dict[Tensor, list[Tensor]] = {
            parameters[piece.index]: [] for piece in pieces
        }
        for piece in pieces:
            if piece.owner == rank:
                key = self.keys[piece] = self._key(piece)
                self.of_parameter[parameters[piece.index]].append(key)

    def _key(self, piece: Piece) -> Tensor:
        parameter = self.parameters[piece.index]
        rows = rows_of(parameter, piece)
        scattered = torch.empty_like(rows, device="meta").stride() != rows.stride()
        if scattered or self.is_rounded(piece):
            rows = self.masters[piece] = torch.empty_like(rows).copy_(rows)
        elif is_whole(piece, parameter):
            return parameter
        return nn.Parameter(rows, requires_grad=parameter.requires_grad)

    def is_rounded(self, piece: Piece) -> bool:
        """Return whether the rows of `piece`, of any rank, are rounded as they are gathered."""
        parameter = self.parameters[piece.index]
        return sent_dtype(parameter, self.gather_dtype) != parameter.dtype

    def refresh(self) -> None:
        """Follow what others did to the parameters since the last step: new memory, new values, new
        gradients.

        Raises ValueError for the sparse gradient of a parameter that is cut into rows.
        """
        for piece, key in self.keys.items():
            if key is not self.parameters[piece.index]:
                self._refresh(piece, key)

    def _refresh(self, piece: Piece, key: Tensor) -> None:
        parameter = self.parameters[piece.index]
        rows = rows_of(parameter, piece)
        if piece in self.masters:
            self.follow(piece)
        elif key.data_ptr() != rows.data_ptr():
            key.data = rows
        key.requires_grad_(parameter.requires_grad)
        if (
            parameter.grad is not None
            and parameter.grad.is_sparse
            and not is_whole(piece, parameter)
        ):
            raise ValueError(
                f"parameter {piece.index} is cut into rows and has a sparse gradient; update it "
                "whole"
            )
        key.grad = None if parameter.grad is None else laid_out(rows_of(parameter.grad, piece), key)

    def follow(self, piece: Piece) -> None:
        """Give the master of `piece`, where it has one here, the values of its rows where others
        have changed them.
        """
        if piece not in self.masters:
            return
        parameter, master = self.parameters[piece.index], self.masters[piece]
        rows = rows_of(parameter, piece)
        if not _equal_when_sent(rows, master, sent_dtype(parameter, self.gather_dtype)):
            master.copy_(rows)  # loaded, averaged, swapped: not what was gathered

    def drop_gradients(self) -> None:
        """Let go of the gradients that `refresh` has given the keys."""
        for piece, key in self.keys.items():
            if key is not self.parameters[piece.index]:
                key.grad = None


def _equal_when_sent(rows: Tensor, exact: Tensor, dtype: torch.dtype) -> bool:
    """Whether `rows` hold what `exact` is in `dtype`; on a CPU in parts, whose memory is used
    again.
    """
    if rows.dim() == 0:
        rows, exact = rows.view(1), exact.view(1)
    at_once = (
        max(1, _COMPARED * len(rows) // max(1, rows.numel()))
        if rows.device.type == "cpu"
        else len(rows)
    )
    parts = zip(rows.split(at_once), exact.split(at_once), strict=True)  # type: ignore[no-untyped-call]
    return all(torch.equal(part, own.to(dtype).to(part.dtype)) for part, own in parts)

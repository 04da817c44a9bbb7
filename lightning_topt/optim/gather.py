"""Send updated rows from their owners to all ranks.

A large piece is broadcast in place; small ones of one owner travel together in packs. All messages
are under way at once, and owners alternate, so that links carry both directions. On gloo one
broadcast per owner is faster than its all-gather (`communication.collectives`). CPU ranks of one
node read each other's memory instead (`communication.node.rows`).

    gather = PieceGather(parameters, pieces, group=group)
    gather.start().wait()    # or gather.gather()
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_topt.communication.rank_watch import PeerLostError
from lightning_topt.optim.pieces import Piece, check_pieces, rows_of

if TYPE_CHECKING:
    from lightning_topt.communication.node.rows import NodeRows

# below this, a broadcast costs latency rather than bandwidth: such pieces travel together
SMALL_BYTES = 1 << 20
# small pieces travel in packs of about this size: packing one overlaps with sending another
PACK_BYTES = 8 << 20


class PieceGather:
    """Sends the rows of every piece from its owner to the other ranks of `group`.

    Buffers for what is packed live from `start` to `wait`: kept, they would be as large as all
    small parameters.

    Args:
        parameters: those of one optimizer.
        pieces: of all ranks. Raises ValueError where they do not cover their parameters.
        group: the ranks; None: all.
        sources: what this rank sends where it is not the rows themselves: copies of scattered ones.
        node: the ranks of `group` through memory, for parameters on the CPU.
    """

    def __init__(
        self,
        parameters: Sequence[Tensor],
        pieces: Sequence[Piece],
        *,
        group: dist.ProcessGroup | None = None,
        sources: Mapping[Piece, Tensor] | None = None,
        node: NodeRows | None = None,
    ) -> None:
        check_pieces(pieces, parameters, world_size=dist.get_world_size(group))
        self.parameters, self.pieces = list(parameters), sorted(pieces)
        self.group, self.sources, self.node = group, sources or {}, node
        self.rank = dist.get_rank(group)
        self._planned_for: Any = None
        self._plan: list[list[Piece]] = []

    @torch.no_grad()
    def start(self, indices: Collection[int] | None = None) -> PendingGather:
        """Begin to send the pieces of the parameters `indices` (default: of all).

        The same ones on all ranks.
        """
        messages = [_Message.of(pieces, self.parameters) for pieces in self._planned(indices)]
        # all messages are under way before the first one is waited for
        works = self._read_from_memory(messages) if self.node else map(self._broadcast, messages)
        return PendingGather(
            list(zip(messages, works, strict=True)), rank=self.rank, copied=bool(self.sources)
        )

    def gather(self, indices: Collection[int] | None = None) -> None:
        """Send the pieces and wait until all have arrived."""
        self.start(indices).wait()

    def _broadcast(self, message: _Message) -> Any:
        if message.owner == self.rank:
            message.fill(self.sources)
        try:
            return dist.broadcast(
                message.buffer, group=self.group, group_src=message.owner, async_op=True
            )
        except RuntimeError as error:
            raise PeerLostError(
                f"rank {self.rank} cannot reach the other ranks of its group: {error}"
            ) from error

    def _read_from_memory(self, messages: Sequence[_Message]) -> list[Any]:
        # one operation, which all messages wait for
        assert self.node is not None
        parts: dict[int, list[Tensor]] = {}
        for message in messages:
            if message.owner == self.rank:
                message.fill(self.sources)
            parts.setdefault(message.owner, []).append(message.buffer)
        return [self.node.gather_rows(parts)] * len(messages) if messages else []

    def _planned(self, indices: Collection[int] | None) -> list[list[Piece]]:
        # The pieces of each message. They are planned again when other parameters are sent.
        chosen = None if indices is None else frozenset(indices)
        if not self._plan or self._planned_for != chosen:
            pieces = [piece for piece in self.pieces if chosen is None or piece.index in chosen]
            by_owner: dict[int, list[list[Piece]]] = {}
            for together in packed(pieces, self.parameters):
                by_owner.setdefault(together[0].owner, []).append(together)
            # the owners in alternation, so that links carry both directions
            alternating = zip_longest(*(by_owner[owner] for owner in sorted(by_owner)))
            self._planned_for = chosen
            self._plan = [each for each in chain.from_iterable(alternating) if each is not None]
        return self._plan


class PendingGather:
    """A gather under way; `wait` until the parameters hold the owners' values.

    `copied`: what this rank sends may be others than its rows, which it receives as well then.
    """

    def __init__(
        self, messages: Sequence[tuple[_Message, Any]], *, rank: int, copied: bool
    ) -> None:
        self._messages, self._rank, self._copied = list(messages), rank, copied

    @torch.no_grad()
    def wait(self) -> None:
        """Block until all rows are here; a second call returns at once.

        Raises PeerLostError when a rank is gone or late beyond the timeout of the group.
        """
        while self._messages:
            message, work = self._messages.pop(0)
            try:
                work.wait()
            except RuntimeError as error:
                raise PeerLostError(
                    f"rank {self._rank} did not receive what rank {message.owner} of its group "
                    "updated: a rank is gone, or slower than the timeout of the process group; "
                    f"parameters are half updated, go back to a checkpoint: {error}"
                ) from error
            if message.parts is not None and (self._copied or message.owner != self._rank):
                torch._foreach_copy_(message.rows, message.parts)


def packed(pieces: Sequence[Piece], parameters: Sequence[Tensor]) -> Iterator[list[Piece]]:
    """Yield the pieces of each message: large ones alone, small ones of one owner together.

    Small ones of a message have one dtype and one device.
    """
    packs: dict[tuple[Any, ...], list[list[Piece]]] = {}
    filled: dict[tuple[Any, ...], int] = {}
    for piece in pieces:
        rows = rows_of(parameters[piece.index], piece)
        size, kind = rows.nbytes, (piece.owner, rows.dtype, rows.device)
        if size >= SMALL_BYTES:
            yield [piece]
        elif size:
            if filled.get(kind, PACK_BYTES) + size > PACK_BYTES:
                packs.setdefault(kind, []).append([])
                filled[kind] = 0
            packs[kind][-1].append(piece)
            filled[kind] += size
    for of_kind in packs.values():
        yield from of_kind


@dataclass(frozen=True)
class _Message:
    """One broadcast: `buffer` is the memory of its only piece, or `parts` are views into it."""

    owner: int
    pieces: list[Piece]
    rows: list[Tensor]
    buffer: Tensor
    parts: list[Tensor] | None

    @classmethod
    def of(cls, pieces: list[Piece], parameters: Sequence[Tensor]) -> _Message:
        rows = [rows_of(parameters[piece.index], piece) for piece in pieces]
        # in place: a single contiguous piece
        if len(rows) == 1 and rows[0].is_contiguous():
            return cls(pieces[0].owner, pieces, rows, rows[0].view(-1), None)
        # else through a buffer, of which each piece has a view
        buffer = torch.empty(
            sum(part.numel() for part in rows), dtype=rows[0].dtype, device=rows[0].device
        )
        split = buffer.split([part.numel() for part in rows])
        parts = [part.view(own.shape) for part, own in zip(split, rows, strict=True)]
        return cls(pieces[0].owner, pieces, rows, buffer, parts)

    def fill(self, sources: Mapping[Piece, Tensor]) -> None:
        # what the owner sends, its rows or a copy of them
        values = [
            sources.get(piece, own) for piece, own in zip(self.pieces, self.rows, strict=True)
        ]
        if self.parts is not None:
            torch._foreach_copy_(self.parts, values)
        elif values[0] is not self.rows[0]:
            self.rows[0].copy_(values[0])

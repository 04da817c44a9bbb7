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

    Buffers for what is packed or rounded live from `start` to `wait`: kept, they would be as large
    as all small parameters.

    Args:
        parameters: those of one optimizer.
        pieces: of all ranks. Raises ValueError where they do not cover their parameters.
        group: the ranks; None: all.
        dtype: with ``torch.bfloat16``, wider floating-point values travel in it, and all ranks, the
            owner too, hold the rounded values afterwards.
        sources: what this rank sends where it is not the rows themselves: rounded or scattered
            ones.
        node: the ranks of `group` through memory, for parameters on the CPU.
    """

    def __init__(
        self,
        parameters: Sequence[Tensor],
        pieces: Sequence[Piece],
        *,
        group: dist.ProcessGroup | None = None,
        dtype: torch.dtype | None = None,
        sources: Mapping[Piece, Tensor] | None = None,
        node: NodeRows | None = None,
    ) -> None:
        check_pieces(pieces, parameters, world_size=dist.get_world_size(group))
        self.parameters, self.pieces = list(parameters), sorted(pieces)
        self.group, self.dtype, self.sources = group, dtype, sources or {}
        self.rank, self.node = dist.get_rank(group), node
        self._planned_for: Any = None
        self._plan: list[_Planned] = []

    @torch.no_grad()
    def start(self, indices: Collection[int] | None = None) -> PendingGather:
        """Begin to send the pieces of the parameters `indices` (default: of all).

        The same ones on all ranks.
        """
        messages = [planned.begin() for planned in self._planned(indices)]
        # all messages are under way before the first one is waited for
        works = self._read_from_memory(messages) if self.node else map(self._broadcast, messages)
        return PendingGather(list(zip(messages, works, strict=True)), rank=self.rank)

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
        """Start one operation, which all messages wait for."""
        assert self.node is not None
        parts: dict[int, list[Tensor]] = {}
        for message in messages:
            if message.owner == self.rank:
                message.fill(self.sources)
            parts.setdefault(message.owner, []).append(message.buffer)
        return [self.node.gather_rows(parts)] * len(messages) if messages else []

    def gather(self, indices: Collection[int] | None = None) -> None:
        """Send the pieces and wait until all have arrived."""
        self.start(indices).wait()

    def _planned(self, indices: Collection[int] | None) -> list[_Planned]:
        """Return the messages.

        They are planned again when other parameters are sent or a parameter has got other memory.
        """
        chosen = None if indices is None else frozenset(indices)
        pieces = [piece for piece in self.pieces if chosen is None or piece.index in chosen]
        state = (  # what the plan depends on
            chosen,
            [
                self.parameters[index].data_ptr()
                for index in dict.fromkeys(piece.index for piece in pieces)
            ],
        )
        if self._planned_for != state:
            self._planned_for, self._plan = state, list(self._interleaved(pieces))
        return self._plan

    def _interleaved(self, pieces: Sequence[Piece]) -> Iterator[_Planned]:
        """Yield the messages of the owners in alternation, so that links carry both directions."""
        by_owner: dict[int, list[_Planned]] = {}
        for together in packed(pieces, self.parameters, dtype=self.dtype):
            dtype = sent_dtype(self.parameters[together[0].index], self.dtype)
            rows = [rows_of(self.parameters[piece.index], piece) for piece in together]
            copied = dtype != rows[0].dtype or any(piece in self.sources for piece in together)
            planned = _Planned(together[0].owner, together, rows, dtype, copied)
            by_owner.setdefault(planned.owner, []).append(planned)
        messages = chain.from_iterable(
            zip_longest(*(by_owner[owner] for owner in sorted(by_owner)))
        )
        return (message for message in messages if message is not None)


class PendingGather:
    """A gather under way; `wait` until the parameters hold the owners' values."""

    def __init__(self, messages: Sequence[tuple[_Message, Any]], *, rank: int) -> None:
        self._messages, self._rank = list(messages), rank

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
            message.unpack(self._rank)


def packed(
    pieces: Sequence[Piece], parameters: Sequence[Tensor], *, dtype: torch.dtype | None = None
) -> Iterator[list[Piece]]:
    """Yield the pieces of each message: large ones alone, small ones of one owner together.

    Small ones of a message have one dtype and one device.
    """
    packs: dict[tuple[Any, ...], list[list[Piece]]] = {}
    filled: dict[tuple[Any, ...], int] = {}
    for piece in pieces:
        rows = rows_of(parameters[piece.index], piece)
        sent = sent_dtype(rows, dtype)
        size, kind = rows.numel() * sent.itemsize, (piece.owner, sent, rows.dtype, rows.device)
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


def sent_dtype(parameter: Tensor, dtype: torch.dtype | None) -> torch.dtype:
    """Return how values of `parameter` travel.

    As `dtype` where it is narrower than the parameter's own floating-point type.
    """
    narrower = (
        dtype is not None
        and parameter.is_floating_point()
        and dtype.itemsize < parameter.element_size()
    )
    return dtype if narrower and dtype is not None else parameter.dtype


@dataclass(frozen=True)
class _Planned:
    """One broadcast to come: `rows`, those of `pieces`, travel as `dtype`."""

    owner: int
    pieces: list[Piece]
    rows: list[Tensor]
    dtype: torch.dtype
    copied: bool  # what the owner sends is not its rows: it takes the sent values, too

    def begin(self) -> _Message:
        """Return the message with the memory that it needs while it is under way."""
        rows, first = self.rows, self.rows[0]
        # in place: a single contiguous piece that travels as it is
        if len(rows) == 1 and first.is_contiguous() and self.dtype == first.dtype:
            return _Message(self.owner, self.pieces, rows, first.view(-1), None, self.copied)
        # else through a buffer, of which each piece has a view
        sizes = [part.numel() for part in rows]
        buffer = torch.empty(sum(sizes), dtype=self.dtype, device=first.device)
        parts = [
            part.view(own.shape) for part, own in zip(torch.split(buffer, sizes), rows, strict=True)
        ]
        return _Message(self.owner, self.pieces, rows, buffer, parts, self.copied)


@dataclass(frozen=True)
class _Message:
    """One broadcast: `buffer` is the memory of its only piece, or `parts` are views into it."""

    owner: int
    pieces: list[Piece]
    rows: list[Tensor]
    buffer: Tensor
    parts: list[Tensor] | None
    copied: bool

    def fill(self, sources: Mapping[Piece, Tensor]) -> None:
        if self.parts is not None:
            values = [
                sources.get(piece, rows) for piece, rows in zip(self.pieces, self.rows, strict=True)
            ]
            torch._foreach_copy_(self.parts, values)

    def unpack(self, rank: int) -> None:
        if self.parts is not None and (self.copied or rank != self.owner):
            torch._foreach_copy_(self.rows, self.parts)

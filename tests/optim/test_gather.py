"""The gather of pieces against copies of what every owner holds."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_topt.communication.node.rows import NodeRows
from lightning_topt.optim import parallel_step as gather_module
from lightning_topt.optim.parallel_step import PieceGather
from lightning_topt.optim.pieces import Piece, rows_of
from tests.launch import run_ranks
from tests.optim.parallel_cases import row_pieces, whole_pieces


def make_parameters(owner: int) -> list[Tensor]:
    """Fresh copies of what rank `owner` holds."""
    return [p.clone() for p in held_by(owner)]


@functools.cache
def held_by(owner: int) -> list[Tensor]:
    """Large and small, no dims, no rows, channels last, transposed, three dtypes."""
    generator = torch.Generator().manual_seed(owner)

    def make(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    return [
        make(600, 500),  # beyond SMALL_BYTES, also in halves
        make(),
        make(7),
        make(8, 3, 5, 5).to(memory_format=torch.channels_last),
        make(5, 12).t(),
        make(9, 4).double(),
        make(6, 2).bfloat16(),
        torch.arange(10) + owner,
        make(40, 3),
        make(4, 0),
        make(700, 400).t(),
        torch.complex(make(4, 2), make(4, 2)),
    ]


def expected(pieces: list[Piece]) -> list[Tensor]:
    """The obvious twin: every rank's parameters are made here and copied piece by piece."""
    result = make_parameters(dist.get_rank())
    for piece in pieces:
        rows = rows_of(held_by(piece.owner)[piece.index], piece)
        rows_of(result[piece.index], piece).copy_(rows)
    return result


def gathers(rank: int) -> int:
    world_size, checked = dist.get_world_size(), 0
    memory = NodeRows(dist.group.WORLD, timeout_seconds=30)
    for split in (whole_pieces, row_pieces):
        for node in (None, memory):
            for chosen in (None, {0, 2, 3, 8}, set()):
                parameters = make_parameters(rank)
                layouts = [p.stride() for p in parameters]
                pieces = split(parameters, world_size)
                gather = PieceGather(parameters, pieces, node=node)
                pending = gather.start(chosen)
                pending.wait()
                pending.wait()
                wanted = expected([p for p in pieces if chosen is None or p.index in chosen])
                for index, (got, want) in enumerate(zip(parameters, wanted, strict=True)):
                    assert got.equal(want), (split.__name__, chosen, index)
                assert layouts == [p.stride() for p in parameters]
                checked += 1
    return checked


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_all_ranks_have_what_owners_hold(world_size: int) -> None:
    assert run_ranks(gathers, world_size) == [12] * world_size


def again(rank: int) -> None:
    """Repeated gathers see new values, new memory and other parameters; several may be under way at
    once.
    """
    gather_module.PACK_BYTES = 100  # more than one pack of small pieces
    parameters = [torch.zeros(6, 2) for _ in range(5)]
    pieces = row_pieces(parameters, 2)
    gather = PieceGather(parameters, pieces)
    for step in range(4):
        if step == 2:
            parameters[1].data = torch.zeros(6, 2)
        for p in parameters:
            p.fill_(rank + 10 * step)
        first, second = gather.start({0, 1}), PieceGather(parameters, pieces).start({2, 3})
        first.wait()
        second.wait()
        for piece in pieces:
            value = (piece.owner if piece.index < 4 else rank) + 10 * step
            assert rows_of(parameters[piece.index], piece).eq(value).all()


def test_gathers_again() -> None:
    run_ranks(again, 2)


def sources(rank: int) -> None:
    """What an owner sends may be apart from the parameter, and arrives on the owner too."""
    parameters = [torch.zeros(4, 3), torch.zeros(3, 4).t()]
    pieces = [Piece(i, *rows) for i in range(2) for rows in ((0, 1, 0), (1, 4, 1))]
    given = {
        piece: rows_of(torch.full((4, 3), 1.0), piece) + rank
        for piece in pieces
        if piece.owner == rank
    }
    PieceGather(parameters, pieces, sources=given).gather()
    assert all(p[:1].eq(1).all() and p[1:].eq(2).all() for p in parameters)
    parameter = parameters[0]
    group = dist.new_group([1, 0])  # owners are ranks of the group
    parameter.fill_(rank)
    PieceGather([parameter], [Piece(0, 0, 4, 0)], group=group).gather()
    assert parameter.eq(dist.get_global_rank(group, 0)).all()
    with pytest.raises(ValueError, match="have no owner"):
        PieceGather([parameter], [Piece(0, 0, 2, 0)])


def test_sources_and_groups() -> None:
    run_ranks(sources, 2)

"""The gather of pieces against copies of what every owner holds."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_topt.communication.node.rows import NodeRows
from lightning_topt.optim import parallel_step as gather_module
from lightning_topt.optim.parallel_step import PieceGather
from lightning_topt.optim.pieces import Piece, rows_of
from tests.launch import run_ranks
from tests.nccl_twin import TWIN
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


def gathers(rank: int, on_nccl: bool = False) -> int:
    world_size, checked = dist.get_world_size(), 0
    memory = None if on_nccl else NodeRows(dist.group.WORLD, timeout_seconds=30)
    for split in (whole_pieces, row_pieces):
        for node in {None, memory}:
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


def gathers_on_nccl(rank: int) -> tuple[int, dict[str, int]]:
    """Pieces of equal shares of 8 MB take all-gathers alone, in runs of rows."""
    checked = gathers(rank, on_nccl=True)
    parameters = [torch.full((300, 40), float(rank)), torch.full((50,), float(rank)).double()]
    counts = dict.fromkeys(("broadcast", "all_gather_into"), 0)

    def counted(name: str, own: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            counts[name] += 1
            assert name == "broadcast" or args[0].nbytes <= 2 * gather_module.share_bytes(2)
            return own(*args, **kwargs)

        return call

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "broadcast", counted("broadcast", dist.broadcast))
        gather_all = counted("all_gather_into", gather_module.all_gather_into)
        patch.setattr(gather_module, "all_gather_into", gather_all)
        patch.setattr(gather_module, "BUCKET_BYTES", 20_000)
        patch.setattr(gather_module, "SMALL_BYTES", 100)
        halves = (150, 25)
        pieces = [Piece(i, n * h, (n + 1) * h, n) for i, h in enumerate(halves) for n in (0, 1)]
        PieceGather(parameters, pieces).gather()
    assert all(rows_of(parameters[p.index], p).eq(p.owner).all() for p in pieces)
    return checked, counts


def test_equal_shares_take_all_gathers_on_nccl() -> None:
    """150 rows of 160 bytes are three buckets of at most 10,000 bytes, the doubles another one."""
    expected = 6, {"broadcast": 0, "all_gather_into": 4}
    assert run_ranks(gathers_on_nccl, 2, backend=TWIN) == [expected] * 2


def again(rank: int) -> None:
    """Repeated gathers see new values, memory and parameters; several may be under way."""
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


def of_groups(rank: int) -> None:
    parameter = torch.zeros(4, 3)
    group = dist.new_group([1, 0])  # owners are ranks of the group
    parameter.fill_(rank)
    PieceGather([parameter], [Piece(0, 0, 4, 0)], group=group).gather()
    assert parameter.eq(dist.get_global_rank(group, 0)).all()
    with pytest.raises(ValueError, match="have no owner"):
        PieceGather([parameter], [Piece(0, 0, 2, 0)])


def test_owners_are_ranks_of_the_group() -> None:
    run_ranks(of_groups, 2)

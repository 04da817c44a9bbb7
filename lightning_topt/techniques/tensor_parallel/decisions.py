"""A call takes, on each axis, the row that moves the least. Parameters stay where they are while a
row lets them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from lightning_topt.graph.op_config import Placement, Shard
from lightning_topt.techniques.tensor_parallel.kinds import Call, Kind, Row
from lightning_topt.techniques.tensor_parallel.layout import (
    PARTIAL,
    REPLICATE,
    Layout,
    numel,
    pieces,
)


class Known(NamedTuple):
    """A `Known` is where an argument is before the call, whether it needs a gradient, is a
    parameter, is of type bool.
    """

    layout: Layout
    needs_grad: bool
    is_parameter: bool
    is_mask: bool = False


class Decision(NamedTuple):
    """Placements by axis: of every argument, of every result (empty: all are whole), and the
    argument added at the end, whose only dim is dim `along` of the result.

    `enters` says, for every argument and axis, that it is whole and each rank uses it differently.
    `writes_back`: the call changes its first argument, which moves; the slice of what it becomes is
    copied into it.
    """

    inputs: tuple[tuple[Placement, ...], ...]
    enters: tuple[tuple[bool, ...], ...]
    outputs: tuple[tuple[Placement, ...], ...]
    added: int | None
    along: int = -1
    writes_back: bool = False


def decide(
    kind: Kind | None,
    call: Call,
    known: Sequence[Known],
    sizes: Sequence[int],
    *,
    in_place: bool,
    splits: Sequence[Placement | None] = (),
    gathers: Sequence[bool] = (),
) -> Decision:
    """Return the rows that the call takes, one for each axis.

    Along an axis that `splits` activations, what it costs to sum gradients of whole parameters is
    not counted, so they stay split; of equal rows that is taken whose results are where it splits
    them. An axis that `gathers` takes slices of parameters for whole ones, and they are gathered.
    """
    chosen = [
        _row(
            kind,
            call,
            [_taken_whole(each, axis) for each in known] if gathers and gathers[axis] else known,
            axis=axis,
            sizes=sizes,
            in_place=in_place,
            splits=splits[axis] if splits else None,
        )
        for axis in range(len(sizes))
    ]
    stays = not in_place or all(
        row.inputs[0] == known[0].layout.placements[axis] for axis, row in enumerate(chosen)
    )
    if not stays or not _fits(chosen, call, sizes):
        # a dim would be cut into pieces that several axes together do not divide
        chosen = [_whole(call)] * len(sizes)
    inputs = tuple(zip(*(row.inputs for row in chosen), strict=True))
    count = max(len(row.outputs) for row in chosen)
    outputs = tuple(
        tuple(
            row.outputs[min(index, len(row.outputs) - 1)] if row.outputs else REPLICATE
            for row in chosen
        )
        for index in range(count)
    )
    added = next((row for row in chosen if row.added is not None), None)
    parted = [any(isinstance(placement, Shard) for placement in row.inputs) for row in chosen]
    enters = tuple(
        tuple(
            is_split
            and placement == REPLICATE
            and row.added != place  # what is added to a sum is used alike by all ranks
            for is_split, placement, row in zip(parted, placements, chosen, strict=True)
        )
        for place, placements in enumerate(inputs)
    )
    back = in_place and inputs[0] != known[0].layout.placements
    return Decision(
        inputs, enters, outputs, *((added.added, added.along) if added else (None, -1)), back
    )


def _row(
    kind: Kind | None,
    call: Call,
    known: Sequence[Known],
    *,
    axis: int,
    sizes: Sequence[int],
    in_place: bool,
    splits: Placement | None,
) -> Row:
    whole = _whole(call)
    now = [each.layout.placements[axis] for each in known]
    if kind is None or all(placement == REPLICATE for placement in now):
        return whole
    rows: Iterable[Row] = (*kind.rows(call, sizes[axis]), whole)
    if in_place:
        rows = [row for row in rows if row.inputs[0] == now[0]] or [whole]
    ranks = max(sizes[axis], 2)  # an axis of one rank takes the rows of a longer one
    return min(rows, key=lambda row: _cost(row, now, known, ranks, splits=splits))


def _taken_whole(known: Known, axis: int) -> Known:
    if not known.is_parameter:
        return known
    placements = known.layout.placements
    whole = (*placements[:axis], REPLICATE, *placements[axis + 1 :])
    return known._replace(layout=known.layout._replace(placements=whole))


def _whole(call: Call) -> Row:
    return Row((REPLICATE,) * len(call.operands), ())


def _cost(
    row: Row,
    now: Sequence[Placement],
    known: Sequence[Known],
    ranks: int,
    *,
    splits: Placement | None,
) -> tuple[float, float, bool]:
    """Elements that travel, forward and backward, per rank: of parameters, which the plan has
    placed, and of all.
    """
    is_split = any(isinstance(placement, Shard) for placement in row.inputs)
    parameters = total = 0.0
    for before, after, operand in zip(now, row.inputs, known, strict=True):
        moved = numel(operand.layout.shape) * (ranks - 1) / ranks
        if isinstance(before, Shard):
            if before == after:
                continue
            cost = (moved / ranks if isinstance(after, Shard) else moved) * (1 + operand.needs_grad)
            parameters += cost if operand.is_parameter else 0.0
            total += cost
        elif (
            splits and operand.is_parameter and isinstance(after, Shard) and PARTIAL in row.outputs
        ):
            parameters += moved  # a sum over ranks of what whole parameters give at once
        elif (
            operand.needs_grad
            and is_split
            and not (splits and operand.is_parameter and after == REPLICATE)
        ):
            # What is whole and used differently by each rank has its gradient summed; a slice's is
            # gathered.
            total += moved if isinstance(after, Shard) else 2 * moved
    return parameters, total, splits is not None and splits not in row.outputs


def _fits(rows: Sequence[Row], call: Call, sizes: Sequence[int]) -> bool:
    """Whether all axes together cut arguments and results into slices that divide."""
    if len(sizes) == 1:
        return True
    for operand in call.operands:
        found = pieces([row.inputs[operand.place] for row in rows], sizes)
        if found is None or any(operand.shape[dim] % count for dim, count in found.items()):
            return False
    count = min((len(row.outputs) for row in rows if row.outputs), default=0)
    cut_by = [size for row, size in zip(rows, sizes, strict=True) if row.outputs]
    return all(
        pieces([row.outputs[i] for row in rows if row.outputs], cut_by) is not None
        for i in range(count)
    )

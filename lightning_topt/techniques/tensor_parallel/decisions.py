"""What a call does on split tensors: the row it takes on each axis.

A call takes, on each axis, the row that moves the least. Parameters stay where they are while a row
lets them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_topt.graph.op_config import Placement, Shard
from lightning_topt.techniques.tensor_parallel.layout import (
    PARTIAL,
    REPLICATE,
    Layout,
    layout_of,
    numel,
    pieces,
)
from lightning_topt.techniques.tensor_parallel.op_rules.rules import (
    Kind,
    OpCall,
    Operand,
    Row,
    replaced,
)


class Argument(NamedTuple):
    """Where an argument is before the call; whether it needs a gradient, is a parameter, a mask."""

    layout: Layout
    needs_grad: bool
    is_parameter: bool
    is_mask: bool = False


class CallDecision(NamedTuple):
    """What a call does: placements by axis, and what is moved or added.

    Args:
        inputs: placements of every argument
        enters: for every argument and axis, whether it is replicated and each rank uses it
            differently
        outputs: placements of every result; empty: all are replicated
        added: the argument that is added at the end
        along: the dim of the result, from the end, that is the only dim of `added`
        writes_back: the call changes its first argument, which moves; the slice of what it becomes
            is copied into it
    """

    inputs: tuple[tuple[Placement, ...], ...]
    enters: tuple[tuple[bool, ...], ...]
    outputs: tuple[tuple[Placement, ...], ...]
    added: int | None
    along: int = -1
    writes_back: bool = False


def decide(
    kind: Kind | None,
    call: OpCall,
    known: Sequence[Argument],
    sizes: Sequence[int],
    *,
    in_place: bool,
    splits: Sequence[Placement | None] = (),
    gathers: Sequence[bool] = (),
) -> CallDecision:
    """Return the rows that the call takes, one for each axis.

    Args:
        kind: of the function; None: it gets unsharded tensors
        call: with full shapes
        known: where its arguments are
        sizes: of the axes
        in_place: whether it changes its first argument
        splits: where each axis splits activations: sums of gradients of replicated parameters are
            then not counted, so activations stay split; of equal rows the one is taken that has its
            results there
        gathers: whether each axis gathers slices of parameters, which then count as replicated
    """
    # one axis at a time
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
    # several axes together may cut a dim into pieces that do not divide: then nothing is split
    if not stays or not _fits(chosen, call, sizes):
        chosen = [_whole(call)] * len(sizes)
    # from rows by axis to placements by tensor
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
    # used differently by each rank: replicated beside something that is split
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
    return CallDecision(
        inputs, enters, outputs, *((added.added, added.along) if added else (None, -1)), back
    )


def _row(
    kind: Kind | None,
    call: OpCall,
    known: Sequence[Argument],
    *,
    axis: int,
    sizes: Sequence[int],
    in_place: bool,
    splits: Placement | None,
) -> Row:
    # The row of `kind` that costs least along one axis
    whole = _whole(call)
    now = [each.layout.placements[axis] for each in known]
    if kind is None or all(placement == REPLICATE for placement in now):
        return whole
    rows: Iterable[Row] = (*kind.rows(call, sizes[axis]), whole)
    # a tensor that is changed in place must stay where it is
    if in_place:
        rows = [row for row in rows if row.inputs[0] == now[0]] or [whole]
    ranks = max(sizes[axis], 2)  # an axis of one rank takes the rows of a longer one
    return min(rows, key=lambda row: _cost(row, now, known, ranks, splits=splits))


def _taken_whole(known: Argument, axis: int) -> Argument:
    # A parameter as if it were replicated along `axis`
    if not known.is_parameter:
        return known
    placements = known.layout.placements
    whole = (*placements[:axis], REPLICATE, *placements[axis + 1 :])
    return known._replace(layout=known.layout._replace(placements=whole))


def _whole(call: OpCall) -> Row:
    return Row((REPLICATE,) * len(call.operands), ())


def _cost(
    row: Row,
    now: Sequence[Placement],
    known: Sequence[Argument],
    ranks: int,
    *,
    splits: Placement | None,
) -> tuple[float, float, bool]:
    # Return the elements that travel per rank, of parameters and of all; and a tie-break.
    # Forward and backward count. Parameters come first, since the plan has placed them.
    is_split = any(isinstance(placement, Shard) for placement in row.inputs)
    parameters = total = 0.0
    for before, after, operand in zip(now, row.inputs, known, strict=True):
        # elements that a gather brings to one rank
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
            parameters += moved  # a sum over ranks that replicated parameters do not need
        elif (
            operand.needs_grad
            and is_split
            and not (splits and operand.is_parameter and after == REPLICATE)
        ):
            # replicated, used differently by each rank: its gradient is summed, a slice's gathered
            total += moved if isinstance(after, Shard) else 2 * moved
    return parameters, total, splits is not None and splits not in row.outputs


def _fits(rows: Sequence[Row], call: OpCall, sizes: Sequence[int]) -> bool:
    # Whether all axes together cut arguments and results into slices that divide
    if len(sizes) == 1:
        return True
    # arguments, then results
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


_CHANGES = {
    *(
        "__setitem__",
        "__set__",
        "__iadd__",
        "__isub__",
        "__imul__",
        "__idiv__",
        "__itruediv__",
        "__ifloordiv__",
        "__imod__",
    ),
    *("__ipow__", "__imatmul__", "__iand__", "__ior__", "__ixor__", "__ilshift__", "__irshift__"),
}


def known_of(tensor: Tensor, whole: Layout) -> Argument:
    """Return where an argument is; `whole` is the layout of unsharded ones, but for the shape."""
    layout = layout_of(tensor) or whole._replace(shape=tuple(tensor.shape))
    return Argument(
        layout, tensor.requires_grad, isinstance(tensor, nn.Parameter), tensor.dtype == torch.bool
    )


def call_of(
    func: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    known: Sequence[Argument],
    *,
    of: type = Tensor,
) -> OpCall:
    """Return the call with operands for its tensors, the instances of `of`.

    `known` says where they are, in order.
    """
    operands = tuple(Operand(index, each.layout.shape) for index, each in enumerate(known))
    new_args, new_kwargs = replaced((args, tuple(kwargs.values())), operands, of=of)
    # parts that any shard among the arguments has
    placements = (placement for each in known for placement in each.layout.placements)
    parts = {1, *(placement.parts for placement in placements if isinstance(placement, Shard))}
    masks = frozenset(index for index, each in enumerate(known) if each.is_mask)
    return OpCall(
        func,
        new_args,
        dict(zip(kwargs, new_kwargs, strict=True)),
        operands,
        tuple(sorted(parts)),
        masks,
    )


def is_in_place(func: Callable[..., Any], kwargs: dict[str, Any]) -> bool:
    """Return whether a call changes its first tensor."""
    name = getattr(func, "__name__", "")
    changes = (name.endswith("_") and not name.startswith("__")) or name in _CHANGES
    return changes or kwargs.get("inplace") is True

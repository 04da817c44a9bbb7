"""A call takes, on each axis, the row that moves the least. Parameters stay where they are while a row lets them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from lightning_topt.graph.op_config import Placement, Shard
from lightning_topt.techniques.tensor_parallel.kinds import Call, Kind, Operand, Row, replaced
from lightning_topt.techniques.tensor_parallel.layout import REPLICATE, Layout, numel

_STAYS = 1000.0  # a parameter that moves travels in every step


class Known(NamedTuple):
    """A `Known` is where an argument is before the call, whether it needs a gradient, and whether it is a parameter."""

    layout: Layout
    needs_grad: bool
    is_parameter: bool


class Decision(NamedTuple):
    """Placements by axis: of every argument, of every result (empty: all are whole), and the argument added at the end.

    `enters` says, for every argument and axis, that it is whole and each rank uses it differently.
    """

    inputs: tuple[tuple[Placement, ...], ...]
    enters: tuple[tuple[bool, ...], ...]
    outputs: tuple[tuple[Placement, ...], ...]
    added: int | None


def decide(kind: Kind | None, call: Call, known: Sequence[Known], sizes: Sequence[int], *, in_place: bool) -> Decision:
    """Return the rows that the call takes. Raises ValueError where a call that changes its first argument would move it."""
    chosen = [_row(kind, call, known, axis=axis, sizes=sizes, in_place=in_place) for axis in range(len(sizes))]
    if not _fits([row.inputs for row in chosen], call, sizes):
        chosen = [_whole(call)] * len(sizes)  # a dim would be cut into pieces that several axes together do not divide
    inputs = tuple(zip(*(row.inputs for row in chosen), strict=True))
    count = max(len(row.outputs) for row in chosen)
    outputs = tuple(
        tuple(row.outputs[min(index, len(row.outputs) - 1)] if row.outputs else REPLICATE for row in chosen)
        for index in range(count)
    )
    added = [row.added for row in chosen if row.added is not None]
    if in_place and inputs[0] != known[0].layout.placements:
        raise ValueError(
            f"{call.func.__name__} changes a tensor in place that is split {_shown(known[0].layout)}, which is not known for "
            "such a tensor; write it without the in-place call, or keep the tensor's block whole"
        )
    splits = [any(isinstance(placement, Shard) for placement in row.inputs) for row in chosen]
    enters = tuple(
        tuple(split and placement == REPLICATE for split, placement in zip(splits, placements, strict=True))
        for placements in inputs
    )
    return Decision(inputs, enters, outputs, added[0] if added else None)


def call_on(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], known: Sequence[Known], *, of: type
) -> Call:
    """Return the call with an operand for each of its tensors, which are instances of `of` and of which `known` tells."""
    operands = tuple(Operand(index, each.layout.shape) for index, each in enumerate(known))
    new_args, new_kwargs = replaced((args, tuple(kwargs.values())), operands, of=of)
    placements = (placement for each in known for placement in each.layout.placements)
    parts = {1, *(placement.parts for placement in placements if isinstance(placement, Shard))}
    return Call(func, new_args, dict(zip(kwargs, new_kwargs, strict=True)), operands, tuple(sorted(parts)))


def is_in_place(func: Callable[..., Any], kwargs: dict[str, Any]) -> bool:
    """Return whether the call changes its first argument."""
    name = getattr(func, "__name__", "")
    changes = (name.endswith("_") and not name.startswith("__")) or name in _CHANGES
    return changes or "out" in kwargs or kwargs.get("inplace") is True


_CHANGES = {
    "__setitem__",
    "__iadd__",
    "__isub__",
    "__imul__",
    "__idiv__",
    "__itruediv__",
    "__ipow__",
    "__iand__",
    "__ior__",
}


def _row(
    kind: Kind | None, call: Call, known: Sequence[Known], *, axis: int, sizes: Sequence[int], in_place: bool
) -> Row:
    whole = _whole(call)
    now = [each.layout.placements[axis] for each in known]
    if kind is None or all(placement == REPLICATE for placement in now):
        return whole
    rows: Iterable[Row] = (*kind.rows(call, sizes[axis]), whole)
    if in_place:
        rows = [row for row in rows if row.inputs[0] == now[0]] or [whole]
    return min(rows, key=lambda row: _cost(row, now, known, sizes[axis]))


def _whole(call: Call) -> Row:
    return Row((REPLICATE,) * len(call.operands), ())


def _cost(row: Row, now: Sequence[Placement], known: Sequence[Known], ranks: int) -> float:
    """Elements that travel, forward and backward, per rank."""
    splits = any(isinstance(placement, Shard) for placement in row.inputs)
    total = 0.0
    for before, after, operand in zip(now, row.inputs, known, strict=True):
        size = numel(operand.layout.shape) * (ranks - 1) / ranks * (_STAYS if operand.is_parameter else 1.0)
        if isinstance(before, Shard):
            total += (
                0.0
                if before == after
                else size / ranks
                if isinstance(after, Shard)
                else size * (1 + operand.needs_grad)
            )
        elif operand.needs_grad and splits:
            # What is whole and used differently by each rank has its gradient summed; a slice's is gathered.
            moved = numel(operand.layout.shape) * (ranks - 1) / ranks
            total += moved if isinstance(after, Shard) else 2 * moved
    return total


def _fits(rows: Sequence[Sequence[Placement]], call: Call, sizes: Sequence[int]) -> bool:
    for operand in call.operands:
        pieces: dict[int, int] = {}
        for row, size in zip(rows, sizes, strict=True):
            placement = row[operand.place]
            if isinstance(placement, Shard):
                pieces[placement.dim] = pieces.get(placement.dim, 1) * size * placement.parts
        if any(operand.shape[dim] % count for dim, count in pieces.items()):
            return False
    return True


def _shown(layout: Layout) -> str:
    return " x ".join(map(str, layout.placements))

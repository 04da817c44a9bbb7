"""Pieces of parameters: what one rank updates and the others receive; and who owns which.

A parameter that is updated as a whole is one piece. One whose rule treats every element by itself
may be cut anywhere along its first dim, so that every piece is a contiguous block of rows.

`assign_pieces` balances the work by cost and by bytes at once. Uncut parameters go by longest
processing time first (Graham, 1969: at most 4/3 - 1/(3P) times the best for one criterion): each
to the rank whose larger load, of cost or of bytes, stays smallest. Those that may be cut then fill
the ranks up to one level, as runs of neighbouring rows, so that there are few cuts. The result
depends on the arguments alone: ranks with equal arguments get equal pieces.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

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


_SAME_RATIO = 1.25  # shares whose seconds per byte differ by less are in one run
# runs with less of the cost and of the bytes than this are not worth cuts of their own
_SMALL_RUN = 0.01
_SNAP = 0.005  # of a rank's part of a run: a cut this near to the end of a parameter moves there
_BISECTIONS = 60


@dataclass(frozen=True)
class Share:
    """The work and memory of one parameter.

    Attributes:
        index: as in `Piece`.
        rows: how many rows it may be cut into.
        nbytes: what its owner keeps for it alone (its state).
        cost_seconds: one update of all of it.
        splittable: its rows may have different owners.
        group: its parameter group. Groups are cut one by one, so that each is spread over all
            ranks.
    """

    index: int
    rows: int
    nbytes: int
    cost_seconds: float
    splittable: bool
    group: int = 0


def assign_pieces(shares: Sequence[Share], *, world_size: int) -> list[Piece]:
    """Return an owner for every row of every share, sorted by parameter and row.

    The largest load of any rank, of cost or of bytes (each as a fraction of its total), is kept
    small: a list scheduling bound for whole shares, and to a row for those that may be cut.
    """
    assert world_size >= 1 and len({share.index for share in shares}) == len(shares)
    assert all(s.rows >= 1 and s.nbytes >= 0 and 0 <= s.cost_seconds < math.inf for s in shares)
    loads = Loads(shares, world_size=world_size)
    # uncut parameters: longest processing time first
    uncut = [share for share in shares if not share.splittable or share.rows == 1]
    pieces = []
    for share in sorted(uncut, key=lambda share: (-max(loads.fractions(share)), share.index)):
        owner = loads.least_after(share)
        loads.add(share, owner=owner, rows=share.rows)
        pieces.append(Piece(share.index, 0, share.rows, owner))
    # the others: run by run, up to one level, heaviest run first; a run is of one parameter group
    # and has about the same seconds per byte
    groups: dict[int, list[Share]] = defaultdict(list)
    for share in shares:
        if share.splittable and share.rows > 1:
            groups[share.group].append(share)
    alike = [
        sorted(run, key=lambda share: share.index)
        for group in groups.values()
        for run in _alike(group, loads)
    ]
    runs = sorted(alike, key=lambda run: (-_weight(run, loads), run[0].index))
    for position, run in enumerate(runs):
        # Later runs are spread with this one, so that they make up for its rounding to rows.
        rest = [share for later in runs[position:] for share in later]
        pieces += _cut(run, fill_up(rest, loads), loads)
    return sorted(pieces)


def update_work(shape: Sequence[int]) -> float:
    """Return the work of an update of whole parameters, in elements.

    A matrix (m, n) has max(m, n) min(m, n)^2 more: `step_costs.estimate_seconds`.
    """
    numel = math.prod(shape)
    if len(shape) < 2 or not numel:
        return float(numel)
    small, large = sorted((shape[0], numel // shape[0]))
    return float(numel) + float(large) * small**2


class Loads:
    """Cost and bytes of each rank as fractions of the totals of all shares: 1/P each is perfect."""

    def __init__(self, shares: Sequence[Share], *, world_size: int) -> None:
        self.total_cost = math.fsum(share.cost_seconds for share in shares)
        self.total_bytes = sum(share.nbytes for share in shares)
        self.cost = [0.0] * world_size
        self.bytes = [0.0] * world_size

    def fractions(self, share: Share) -> tuple[float, float]:
        """Return a share's cost and bytes."""
        cost = share.cost_seconds / self.total_cost if self.total_cost else 0.0
        return cost, share.nbytes / self.total_bytes if self.total_bytes else 0.0

    def add(self, share: Share, *, owner: int, rows: int) -> None:
        """Give `rows` of a share to a rank."""
        cost, nbytes = self.fractions(share)
        self.cost[owner] += cost * rows / share.rows
        self.bytes[owner] += nbytes * rows / share.rows

    def least_after(self, share: Share) -> int:
        """Return the rank whose larger load would be smallest with the share.

        Ties go to the smaller sum of both loads, then to the lower rank.
        """
        cost, nbytes = self.fractions(share)

        def after(rank: int) -> tuple[float, float, int]:
            loads = self.cost[rank] + cost, self.bytes[rank] + nbytes
            return max(loads), sum(loads), rank

        return min(range(len(self.cost)), key=after)

    def level(self) -> float:
        """Return the largest load, of cost or bytes, of any rank."""
        return max(*self.cost, *self.bytes)


def fill_up(shares: Sequence[Share], loads: Loads) -> list[float]:
    """Return the fraction of `shares` for each rank that keeps the largest load smallest.

    `shares` are taken as one mass.
    """
    cost, nbytes = _sums(shares, loads)
    if cost == nbytes == 0:  # nothing to balance
        return [1 / len(loads.cost)] * len(loads.cost)

    def taken(level: float) -> list[float]:
        rooms = ((level - c, level - b) for c, b in zip(loads.cost, loads.bytes, strict=True))
        return [
            max(0.0, min(c / cost if cost else math.inf, b / nbytes if nbytes else math.inf))
            for c, b in rooms
        ]

    # at `high`, the fullest rank could take everything
    low, high = 0.0, loads.level() + max(cost, nbytes)
    for _ in range(_BISECTIONS):  # the lowest level at which all of it finds room
        middle = (low + high) / 2
        low, high = (low, middle) if sum(taken(middle)) >= 1 else (middle, high)
    fractions = taken(high)
    return [fraction / sum(fractions) for fraction in fractions]


def _alike(shares: Sequence[Share], loads: Loads) -> Iterator[list[Share]]:
    """Yield the runs of one group: shares whose seconds per byte differ little."""
    run: list[Share] = []
    rest: list[Share] = []
    ratios = {
        share.index: share.cost_seconds / share.nbytes if share.nbytes else math.inf
        for share in shares
    }
    for share in sorted(shares, key=lambda share: (ratios[share.index], share.index)):
        if run and ratios[share.index] > _SAME_RATIO * ratios[run[0].index]:
            if _weight(run, loads) >= _SMALL_RUN:
                yield run
            else:
                rest += run
            run = []
        run.append(share)
    yield from (
        part
        for part in ((run + rest,) if _weight(run, loads) < _SMALL_RUN else (run, rest))
        if part
    )


def _cut(run: Sequence[Share], fractions: Sequence[float], loads: Loads) -> list[Piece]:
    """Deal out the rows of `run` in order: the first for rank 0, the next for rank 1, ...

    Each rank gets as many as `fractions` says.
    """
    sizes = _sizes(run)
    total, last = math.fsum(sizes), len(fractions) - 1
    bounds = [total * bound for bound in accumulate(fractions)]  # where each rank's part ends
    snap = _SNAP * total / len(fractions)
    pieces, owner, reached = [], 0, 0.0
    for share, size in zip(run, sizes, strict=True):
        start, per_row = 0, size / share.rows
        while start < share.rows:
            left = share.rows - start
            rows = (
                left
                if owner == last
                else _rows_within(bounds[owner] - reached, per_row, left, snap)
            )
            if rows:
                pieces.append(Piece(share.index, start, start + rows, owner))
                loads.add(share, owner=owner, rows=rows)
            start, reached = start + rows, reached + rows * per_row
            owner += start < share.rows
    return pieces


def _sizes(run: Sequence[Share]) -> list[float]:
    """Return what is cut evenly: bytes; without any, cost; without that, rows.

    With bytes, memory is exact and cost nearly so.
    """
    for sizes in ([float(share.nbytes) for share in run], [share.cost_seconds for share in run]):
        if any(sizes):
            return sizes
    return [float(share.rows) for share in run]


def _rows_within(room: float, per_row: float, left: int, snap: float) -> int:
    """Return how many of `left` rows fit into `room`, to the nearest row.

    None or all of them where that is within `snap`.
    """
    if room >= left * per_row - snap:
        return left
    return 0 if room < snap else round(room / per_row)


def _weight(shares: Sequence[Share], loads: Loads) -> float:
    cost, nbytes = _sums(shares, loads)
    return max(cost, nbytes)


def _sums(shares: Sequence[Share], loads: Loads) -> tuple[float, float]:
    fractions = [loads.fractions(share) for share in shares]
    return math.fsum(cost for cost, _ in fractions), math.fsum(nbytes for _, nbytes in fractions)

"""The decision says when sharing the optimizer's step pays: what it saves against what gathering
the parameters costs.

PTO (arXiv 2010.10458): t_op (1 - 1/P) > t_all-gather. Here with the busiest rank's real part of
t_op instead of 1/P, for every parameter group. All numbers are the slowest rank's, so that all
ranks decide alike.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_topt.communication.node.rows import NodeRows
from lightning_topt.optim.assignment import Share, assign_pieces
from lightning_topt.optim.gather import PieceGather
from lightning_topt.optim.pieces import Piece
from lightning_topt.optim.step_costs import slowest_of_ranks

_SMALL_ELEMENTS = 256
_LARGE_ELEMENTS = 1 << 20  # per rank, float32: well above what is packed
_SAMPLE_BYTES = 64 << 20  # of the real parameters
# of the large gather, after one that is not counted; the small one is repeated more often
_REPEATS = 5
_SMALL_REPEATS = 15


@dataclass(frozen=True)
class GatherCost:
    """Seconds until all ranks have n bytes of parameters: `latency_seconds` + n *
    `seconds_per_byte`.
    """

    latency_seconds: float
    seconds_per_byte: float


@dataclass(frozen=True)
class GroupCost:
    """One parameter group: bytes to gather, seconds of its update on every rank, and on the busiest
    rank when shared.
    """

    group: int
    sent_bytes: int
    update_seconds: float
    shared_seconds: float


@dataclass(frozen=True)
class Decision:
    """Whether sharing the update of a parameter group `pays`, whether it is `shared`, and the
    `reason` in a sentence.
    """

    group: int
    pays: bool
    update_seconds: float
    shared_seconds: float
    gather_seconds: float
    reason: str
    shared: bool


def measure_gather(
    group: dist.ProcessGroup | None = None,
    *,
    device: torch.device,
    parameters: Sequence[Tensor] = (),
    pieces: Sequence[Piece] = (),
    node: NodeRows | None = None,
) -> GatherCost:
    """Time gathers between the ranks of `group`, which all call this: a tiny one and a large one,
    of test tensors.

    Or, better, the large one is of up to 64 MiB of the real `parameters`, as `pieces` will send
    them: they must be equal on all ranks (as under DDP), and stay what they are. The slowest rank
    counts. `node` as for `PieceGather`.
    """
    world_size = dist.get_world_size(group)
    small = _rows(world_size, _SMALL_ELEMENTS, device), _piece_per_rank(world_size)
    sample = _sample(parameters, pieces) or (
        _rows(world_size, _LARGE_ELEMENTS, device),
        _piece_per_rank(world_size),
    )
    latency = _time_gather(*small, group=group, device=device, repeats=_SMALL_REPEATS, node=node)
    elapsed = _time_gather(*sample, group=group, device=device, repeats=_REPEATS, node=node)
    latency, elapsed = slowest_of_ranks([latency, elapsed], device=device, group=group)
    return GatherCost(latency, max(elapsed - latency, 0.0) / _sent_bytes(*sample))


def _rows(world_size: int, elements: int, device: torch.device) -> list[Tensor]:
    return [torch.zeros((world_size, elements), device=device)]


def _piece_per_rank(world_size: int) -> list[Piece]:
    return [Piece(0, rank, rank + 1, rank) for rank in range(world_size)]


def _sample(
    parameters: Sequence[Tensor], pieces: Sequence[Piece]
) -> tuple[list[Tensor], list[Piece]] | None:
    """Every n-th parameter that has pieces, so many that the bytes stay within `_SAMPLE_BYTES` (but
    at least one).
    """
    indices = sorted({piece.index for piece in pieces})
    if not indices:
        return None
    total = sum(parameters[index].nbytes for index in indices)
    chosen = set(indices[:: max(1, -(-total // _SAMPLE_BYTES))])
    return list(parameters), [piece for piece in pieces if piece.index in chosen]


def _sent_bytes(parameters: Sequence[Tensor], pieces: Sequence[Piece]) -> int:
    return max(1, sum(parameters[index].nbytes for index in {piece.index for piece in pieces}))


def _time_gather(
    parameters: Sequence[Tensor],
    pieces: Sequence[Piece],
    *,
    group: dist.ProcessGroup | None,
    device: torch.device,
    repeats: int,
    node: NodeRows | None,
) -> float:
    gather = PieceGather(parameters, pieces, group=group, node=node)
    together = torch.zeros(1, device=device)
    seconds = []
    for repeat in range(repeats + 1):
        dist.all_reduce(together, group=group)  # no rank waits for another inside the measured part
        _synchronize(device)
        start = perf_counter()
        gather.gather()
        _synchronize(device)
        seconds += [perf_counter() - start] if repeat else []
    return statistics.median(seconds)


def _synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def group_costs(
    shares: Sequence[Share],
    pieces: Sequence[Piece],
    *,
    sent_bytes: Mapping[int, int],
    world_size: int,
) -> list[GroupCost]:
    """Return the costs of every group of `shares` when they are split into `pieces`; `sent_bytes`
    by parameter index.

    Groups make up for each other's imbalance, so the busiest rank's time is attributed in
    proportion to their updates.
    """
    by_index = {share.index: share for share in shares}
    busy = [0.0] * world_size
    for piece in pieces:
        share = by_index[piece.index]
        busy[piece.owner] += share.cost_seconds * (piece.stop - piece.start) / share.rows
    total = sum(share.cost_seconds for share in shares)
    costs = []
    for group in sorted({share.group for share in shares}):
        members = [share for share in shares if share.group == group]
        update = sum(share.cost_seconds for share in members)
        sent = sum(sent_bytes[share.index] for share in members)
        costs.append(GroupCost(group, sent, update, update * max(busy) / total if total else 0.0))
    return costs


def decide(
    costs: Sequence[GroupCost], *, world_size: int, gather: GatherCost, always: bool = False
) -> list[Decision]:
    """Decide for each group whether it is faster to share its update: seconds saved on the busiest
    rank > seconds to gather.

    The latency, which all groups pay together, is attributed by bytes. With `always` all are
    shared, whatever it costs; with one rank none is.
    """
    total = sum(cost.sent_bytes for cost in costs)
    decisions = []
    for cost in costs:
        latency = gather.latency_seconds * (cost.sent_bytes / total if total else 1 / len(costs))
        gather_seconds = latency + cost.sent_bytes * gather.seconds_per_byte
        pays = world_size > 1 and cost.update_seconds - cost.shared_seconds > gather_seconds
        shared = world_size > 1 and (pays or always)
        reason = _reason(cost, gather_seconds, world_size=world_size, pays=pays, shared=shared)
        times = cost.update_seconds, cost.shared_seconds, gather_seconds
        decisions.append(Decision(cost.group, pays, *times, reason, shared))
    return decisions


def _reason(
    cost: GroupCost, gather_seconds: float, *, world_size: int, pays: bool, shared: bool
) -> str:
    if world_size == 1:
        return f"group {cost.group}: not shared, there is only one rank"
    verdict = (
        "shared" if pays else "shared as told although it does not pay" if shared else "not shared"
    )
    gain = cost.update_seconds - cost.shared_seconds - gather_seconds
    effect = "saves" if pays else "costs" if shared else "would cost"
    return (
        f"group {cost.group}: {verdict}; its update takes {_ms(cost.update_seconds)} on every "
        "rank, "
        f"{_ms(cost.shared_seconds)} on the busiest of {world_size} when shared, and gathering "
        f"{cost.sent_bytes / 1e6:.1f} MB "
        f"takes {_ms(gather_seconds)}: {effect} {_ms(abs(gain))} per step"
    )


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms"


def choose_pieces(
    shares: Sequence[Share],
    *,
    sent_bytes: Mapping[int, int],
    world_size: int,
    gather: GatherCost,
    always: bool = False,
) -> tuple[list[Piece], list[Decision]]:
    """Return the pieces of the parameters whose groups are worth sharing, and a decision for every
    group, sorted.

    What one group gains depends on which others fill up the ranks with it: the group that loses
    most is left out until all that remain gain. Arguments that are equal on all ranks
    (`slowest_of_ranks`) give equal pieces.
    """
    remaining = list(shares)
    declined: list[Decision] = []
    while remaining:
        pieces = assign_pieces(remaining, world_size=world_size)
        costs = group_costs(remaining, pieces, sent_bytes=sent_bytes, world_size=world_size)
        decisions = decide(costs, world_size=world_size, gather=gather, always=always)
        losing = [decision for decision in decisions if not decision.shared]
        if not losing:
            return pieces, sorted(decisions + declined, key=lambda decision: decision.group)
        worst = min(
            losing, key=lambda d: (d.update_seconds - d.shared_seconds - d.gather_seconds, d.group)
        )
        declined.append(worst)
        remaining = [share for share in remaining if share.group != worst.group]
    return [], sorted(declined, key=lambda decision: decision.group)

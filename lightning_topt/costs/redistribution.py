"""Seconds and bytes of moving a tensor on a mesh from the placements it has to those an operator
wants.

Along one axis of n ranks, L bytes of the tensor as that axis has it: the whole tensor over the
sizes of all other axes along which it is sharded. As DTensor does it (torch 2.13,
`placement_types.py` and `_functional_collectives.py`):

    from        to          collective       result  temporary  copied
    Partial     Replicate   all_reduce       L       -          -
    Partial     Shard(d)    reduce_scatter   L / n   L, d > 0   as much
    Shard(d)    Replicate   all_gather       L       L, d > 0   as much
    Shard(a)    Shard(b)    all_to_all       L / n   2 L / n    as much; on gloo by way of Replicate
    Replicate   Shard(d)    none             L / n   -          L / n
    Replicate   Partial     none             L       -          L

Axes change one after another, in the order that takes the least time (`estimate_redistribution`
tries all). Of axes that shard one dim the outer ones cut it first: an axis cannot change while an
inner one cuts the same dim, which is gathered before and cut again after. Gradients go the other
way, and those of a sum are equal for all its summands:

    y = x moved from s to t            dx = dy moved from g(t), or where its     estimate_edge
                                       reader leaves it, to g(s)
    g(Partial) = Replicate, g(p) = p                                             gradient_placements

Shards are taken as even.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from lightning_topt.costs.cluster import Cluster
from lightning_topt.costs.communication import estimate_collective_seconds
from lightning_topt.costs.groups import group_along
from lightning_topt.graph.mesh_axes import Mesh
from lightning_topt.graph.op_config import Partial, Placement, Replicate, Shard

Placements = tuple[Placement, ...]  # by axis of the mesh


@dataclass(frozen=True)
class Step:
    """One axis changes by the collective `op` (``""``: none); bytes on each rank, of which
    `copied_bytes` are copied.
    """

    axis: int
    op: str
    result_bytes: float
    temporary_bytes: float
    copied_bytes: float


@dataclass(frozen=True)
class Redistribution:
    """A `Redistribution` holds what one takes on each rank: its steps, their seconds, and the
    memory beside the tensor it begins with.

    `peak_bytes` are alive at once, `allocated_bytes` are taken altogether.
    """

    steps: tuple[Step, ...] = ()
    seconds: float = 0.0
    peak_bytes: float = 0.0
    allocated_bytes: float = 0.0


@dataclass(frozen=True)
class Edge:
    """A tensor between two operators: its redistribution in the forward pass and that of its
    gradient in the backward pass.
    """

    forward: Redistribution
    backward: Redistribution

    @property
    def seconds(self) -> float:
        """Seconds of both directions."""
        return self.forward.seconds + self.backward.seconds


def estimate_redistribution(
    cluster: Cluster, *, mesh: Mesh, source: Placements, target: Placements, size: float
) -> Redistribution:
    """Return the redistribution of a tensor of `size` bytes, all ranks' shards together, that takes
    the least time.

    Of equally quick ones that with the least memory. Raises ValueError where `source` and `target`
    do not name a placement for each axis, and where a sharded tensor should become partial, which
    torch does not do.
    """
    _check(mesh, source, target)
    alone = [n == 1 for n in mesh.shape]
    source = tuple(
        after if one else before for before, after, one in zip(source, target, alone, strict=True)
    )
    count = itertools.count()  # placements have no order
    queue = [(0.0, 0.0, 0, next(count), source, Redistribution())]
    done = set()
    while True:
        *_, placements, found = heapq.heappop(queue)
        if placements == target:
            return found
        if placements in done:
            continue
        done.add(placements)
        for axis, placement in _next_placements(placements, target, backend=cluster.backend):
            changed = (*placements[:axis], placement, *placements[axis + 1 :])
            more = _with_step(
                cluster,
                found,
                mesh=mesh,
                placements=placements,
                axis=axis,
                target=placement,
                size=size,
            )
            heapq.heappush(
                queue, (more.seconds, more.peak_bytes, len(more.steps), next(count), changed, more)
            )


def estimate_edge(
    cluster: Cluster,
    *,
    mesh: Mesh,
    source: Placements,
    target: Placements,
    size: float,
    gradient: Placements | None = None,
) -> Edge:
    """Return the edge from where a tensor is made (`source`) to where it is read (`target`), in
    both passes.

    `gradient` is how the reader's backward pass leaves the gradient: by default as the tensor it
    reads is placed, Partial for instance where a replicated input meets weights that are sharded by
    column. Raises ValueError as `estimate_redistribution` does.
    """
    left = gradient_placements(target) if gradient is None else gradient
    return Edge(
        estimate_redistribution(cluster, mesh=mesh, source=source, target=target, size=size),
        estimate_redistribution(
            cluster, mesh=mesh, source=left, target=gradient_placements(source), size=size
        ),
    )


def gradient_placements(placements: Placements) -> Placements:
    """Return the placements of a tensor's gradient: its own, and Replicate for Partial, whose
    summands share one gradient.
    """
    return tuple(
        Replicate() if isinstance(placement, Partial) else placement for placement in placements
    )


def local_bytes(size: float, *, mesh: Mesh, placements: Sequence[Placement]) -> float:
    """Return the bytes that one rank holds of a tensor of `size` bytes."""
    sharded = (
        n
        for n, placement in zip(mesh.shape, placements, strict=True)
        if isinstance(placement, Shard)
    )
    return size / math.prod(sharded)


def _check(mesh: Mesh, source: Placements, target: Placements) -> None:
    if not len(source) == len(target) == len(mesh.axes):
        raise ValueError(
            f"a tensor has one placement for each of the axes {mesh.names}; got {len(source)} and "
            f"{len(target)} placements"
        )
    for name, before, after in zip(mesh.names, source, target, strict=True):
        if isinstance(before, Shard) and isinstance(after, Partial):
            raise ValueError(
                f"axis {name!r}: a sharded tensor cannot become partial; make it replicate before"
            )


def _next_placements(
    current: Placements, target: Placements, *, backend: str
) -> Iterator[tuple[int, Placement]]:
    """The axes that may change now, and to what: their target, or Replicate on the way to it or to
    let another one change.
    """
    for axis, (before, after) in enumerate(zip(current, target, strict=True)):
        inner = {placement.dim for placement in current[axis + 1 :] if isinstance(placement, Shard)}
        if isinstance(before, Shard) and before.dim in inner:
            continue
        blocked = isinstance(after, Shard) and (
            after.dim in inner or (isinstance(before, Shard) and backend == "gloo")
        )
        if after != before and not blocked:
            yield axis, after
        if isinstance(before, Shard) or (isinstance(before, Partial) and blocked):
            yield axis, Replicate()


def _with_step(
    cluster: Cluster,
    before: Redistribution,
    *,
    mesh: Mesh,
    placements: Placements,
    axis: int,
    target: Placement,
    size: float,
) -> Redistribution:
    """Return `before`, and `axis` to `target` after it."""
    source, n = placements[axis], mesh.shape[axis]
    seen = local_bytes(size, mesh=mesh, placements=placements) * (
        n if isinstance(source, Shard) else 1
    )
    shard = source if isinstance(source, Shard) else target
    # pieces along dim 0 lie in a row as they are
    crosswise = isinstance(shard, Shard) and shard.dim > 0
    step = Step(axis, *_STEPS[type(source), type(target)](seen, n, crosswise))
    seconds = 2 * step.copied_bytes / cluster.device.memory_bandwidth
    if step.op:
        seconds += estimate_collective_seconds(
            cluster, op=step.op, size=seen, group=group_along(mesh, [axis])
        )
    # what the step begins with, beside the first tensor
    held = before.steps[-1].result_bytes if before.steps else 0.0
    new = step.result_bytes + step.temporary_bytes
    return Redistribution(
        (*before.steps, step),
        before.seconds + seconds,
        max(before.peak_bytes, held + new),
        before.allocated_bytes + new,
    )


_Numbers = tuple[str, float, float, float]  # collective, bytes of result, temporaries and copies


_STEPS: dict[tuple[type, type], Callable[[float, int, bool], _Numbers]] = {
    (Partial, Replicate): lambda seen, n, crosswise: ("all_reduce", seen, 0.0, 0.0),
    (Partial, Shard): lambda seen, n, crosswise: (
        "reduce_scatter",
        seen / n,
        seen * crosswise,
        seen * crosswise,
    ),
    (Shard, Replicate): lambda seen, n, crosswise: (
        "all_gather",
        seen,
        seen * crosswise,
        seen * crosswise,
    ),
    (Shard, Shard): lambda seen, n, crosswise: ("all_to_all", seen / n, 2 * seen / n, 2 * seen / n),
    (Replicate, Shard): lambda seen, n, crosswise: ("", seen / n, 0.0, seen / n),
    (Replicate, Partial): lambda seen, n, crosswise: ("", seen, 0.0, seen),
}

"""Collectives between placements along one tensor axis, each with its gradient. Shapes are local.

    move            forward         backward        source
    enter           none            all-reduce      "f" of Shoeybi et al., arXiv 1909.08053,
                                                    section 3
    reduce          all-reduce      none            "g" of the same
    gather          all-gather      own slice       ranks use the result in the same way
    gather, shared  all-gather      reduce-scatter  "g" of Korthikanti et al., arXiv 2205.05198,
                                                    section 4.2.2
    scatter         reduce-scatter  all-gather      its conjugate
    take            own slice       all-gather
    exchange        all-to-all      all-to-all

Gradients of gradients pass the same moves: the gradient of each is another one of them.

*shared*: every rank computes something else from the gathered tensor, so its gradients are summands
of the full one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

from lightning_topt.communication.collectives import all_gather_into, reduce_scatter_into
from lightning_topt.graph.op_config import Partial, Placement, Shard
from lightning_topt.techniques.tensor_parallel.layout import (
    REPLICATE,
    TensorAxes,
    cut,
    joined,
    local_shard,
    pieces,
)

Move = Callable[[Tensor], Tensor]


def all_reduce(tensor: Tensor, axes: TensorAxes, axis: int) -> Tensor:
    """Return the sum over the ranks of `axis`, a new tensor."""
    result = tensor.clone(memory_format=torch.contiguous_format)
    axes.note("all_reduce", axis, result)
    if (group := axes.groups[axis]) is not None:
        dist.all_reduce(result, group=group)
    return result


def all_gather(tensor: Tensor, shard: Shard, axes: TensorAxes, axis: int) -> Tensor:
    """Return the full tensor of all ranks' slices along ``shard.dim``."""
    local = tensor.contiguous()
    # (ranks, *local shape): what comes from each rank lies together
    slices = local.new_empty((axes.sizes[axis], *local.shape))
    axes.note("all_gather", axis, slices)
    if (group := axes.groups[axis]) is not None:
        all_gather_into(slices.view(-1), local.view(-1), group=group)
    # slices of the first dim lie one after the other already: no copy
    if shard.dim == 0 and shard.parts == 1:
        return slices.flatten(0, 1)
    return joined(slices.unbind(), shard)


def reduce_scatter(tensor: Tensor, shard: Shard, axes: TensorAxes, axis: int) -> Tensor:
    """Return this rank's slice along ``shard.dim`` of the sum over ranks."""
    count = axes.sizes[axis]
    slices = torch.stack([cut(tensor, shard, index=index, count=count) for index in range(count)])
    result = torch.empty_like(slices[0])
    axes.note("reduce_scatter", axis, slices)
    if (group := axes.groups[axis]) is not None:
        reduce_scatter_into(result.view(-1), slices.view(-1), group=group)
    return result


def all_to_all(tensor: Tensor, source: Shard, target: Shard, axes: TensorAxes, axis: int) -> Tensor:
    """Return this rank's slice along ``target.dim`` of a tensor cut along ``source.dim``."""
    count = axes.sizes[axis]
    slices = torch.stack([cut(tensor, target, index=index, count=count) for index in range(count)])
    # (ranks, ...): slice r goes to rank r, and comes from it
    received = torch.empty_like(slices)
    axes.note("all_to_all", axis, slices)
    if (group := axes.groups[axis]) is not None:
        dist.all_to_all_single(received, slices, group=group)
    return joined(received.unbind(), source)


class _Moved(Function):
    # What `run` makes of a tensor; `gradient` makes its gradient of that of the result, by a move
    # that has a gradient too.

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, run: Move, gradient: Move) -> Tensor:
        ctx.gradient = gradient
        return run(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return ctx.gradient(gradient), None, None


def _moved(tensor: Tensor, run: Move, gradient: Move) -> Tensor:
    result: Tensor = _Moved.apply(tensor, run, gradient)  # type: ignore[no-untyped-call]
    return result


def enter(tensor: Tensor, axes: TensorAxes, axis: int) -> Tensor:
    """Return `tensor`, which all ranks have in full, for different use on each.

    Its gradient is the sum of theirs.
    """
    if not (tensor.requires_grad and torch.is_grad_enabled()):
        return tensor
    # no view: attributes of the result must not keep it alive
    return _moved(tensor, Tensor.detach, partial(reduce, axes=axes, axis=axis))


def reduce(tensor: Tensor, axes: TensorAxes, axis: int) -> Tensor:
    """Return the sum of the ranks' summands, in full on each."""
    place: Any = {"axes": axes, "axis": axis}
    return _moved(tensor, partial(all_reduce, **place), partial(enter, **place))


def gather(tensor: Tensor, shard: Shard, axes: TensorAxes, axis: int, *, shared: bool) -> Tensor:
    """Return the full tensor; `shared`: for different use on each rank."""
    place: Any = {"shard": shard, "axes": axes, "axis": axis}
    # each rank has a gradient of the full tensor: their sum counts. Else all have the same
    gradient = scatter if shared else take
    return _moved(tensor, partial(all_gather, **place), partial(gradient, **place))


def scatter(tensor: Tensor, shard: Shard, axes: TensorAxes, axis: int) -> Tensor:
    """Return this rank's slice of the sum of the ranks' summands."""
    place: Any = {"shard": shard, "axes": axes, "axis": axis}
    return _moved(tensor, partial(reduce_scatter, **place), partial(gather, **place, shared=True))


def take(tensor: Tensor, shard: Shard, axes: TensorAxes, axis: int) -> Tensor:
    """Return this rank's slice of a tensor that all ranks have in full."""
    index, count = axes.coordinates[axis], axes.sizes[axis]

    def run(full: Tensor) -> Tensor:
        own = cut(full, shard, index=index, count=count)
        return own.clone(memory_format=torch.contiguous_format)

    return _moved(tensor, run, partial(gather, shard=shard, axes=axes, axis=axis, shared=False))


def exchange(tensor: Tensor, source: Shard, target: Shard, axes: TensorAxes, axis: int) -> Tensor:
    """Return this rank's slice along another dim."""
    forth: Any = {"source": source, "target": target, "axes": axes, "axis": axis}
    back: Any = {**forth, "source": target, "target": source}
    return _moved(tensor, partial(all_to_all, **forth), partial(exchange, **back))


def move(
    tensor: Tensor,
    source: Sequence[Placement],
    target: Sequence[Placement],
    enters: Sequence[bool],
    axes: TensorAxes,
) -> Tensor:
    """Return the local tensor at `target`, axis by axis.

    Gathers go from the inner axes out, then slices from the outer axes in.

    Args:
        tensor: the local tensor at `source`
        source: placements now, by axis
        target: placements wanted
        enters: on which axes it is full then and used differently by each rank
        axes: the tensor axes
    """
    # gather, or exchange, from the inside out
    now, sizes = [*source], axes.sizes
    for axis in reversed(range(len(axes))):
        before, after = now[axis], target[axis]
        # nothing to do here; that an axis is entered comes below
        if before == after:
            continue
        # inner axes that cut pieces of this axis's slices are gathered first
        for inner in range(len(axes) - 1, axis, -1):
            if any(_hides(now[inner], each, sizes[inner], sizes[axis]) for each in (before, after)):
                own = local_shard(now, sizes, inner)
                tensor, now[inner] = gather(tensor, own, axes, inner, shared=False), REPLICATE
        if not isinstance(before, Shard):
            continue
        own, then = local_shard(now, sizes, axis), [*now[:axis], after, *now[axis + 1 :]]
        if (
            isinstance(after, Shard)
            and after.dim != before.dim
            and _can_exchange(then, sizes, axis)
        ):
            tensor = exchange(tensor, own, local_shard(then, sizes, axis), axes, axis)
            now[axis] = after
        else:
            tensor, now[axis] = gather(tensor, own, axes, axis, shared=enters[axis]), REPLICATE
    # slice from the outside in
    for axis, after in enumerate(target):
        if isinstance(after, Shard) and now[axis] != after:
            now[axis] = after
            tensor = take(tensor, local_shard(now, sizes, axis), axes, axis)
        elif enters[axis] and source[axis] == REPLICATE:
            tensor = enter(tensor, axes, axis)
    return tensor


def unsharded(tensor: Tensor, source: Sequence[Placement], axes: TensorAxes) -> Tensor:
    """Return the full tensor of the slices at `source`, for the same use on every rank."""
    return move(tensor, source, (REPLICATE,) * len(axes), (False,) * len(axes), axes)


def sliced(tensor: Tensor, target: Sequence[Placement], axes: TensorAxes) -> Tensor:
    """Return this rank's slice at `target` of a full tensor."""
    return move(tensor, (REPLICATE,) * len(axes), target, (False,) * len(axes), axes)


def bias_for(
    bias: Tensor,
    summed: Sequence[Placement],
    now: Sequence[Placement],
    axes: TensorAxes,
    *,
    ndim: int,
    along: int,
) -> Tensor:
    """Return a bias that fits what each rank keeps of a sum.

    Args:
        bias: of one dim
        summed: placements of the sum before it is summed
        now: placements afterwards
        axes: the tensor axes
        ndim: dims of the sum
        along: the dim of the bias in it, counted from the end
    """
    for axis, (placement, kept) in enumerate(zip(summed, now, strict=True)):
        if isinstance(placement, Partial) and isinstance(kept, Shard):
            # cut as the sum is, where that is cut along the dim of the bias
            own = Shard(0, kept.parts) if kept.dim == ndim + along else None
            bias = enter(bias, axes, axis) if own is None else take(bias, own, axes, axis)
    return bias if along == -1 else bias.view(-1, *(1 for _ in range(-1 - along)))


def _hides(inner: Placement, outer: Placement, inner_size: int, outer_size: int) -> bool:
    # Return whether `inner` cuts pieces of what the outer axis cuts.
    # Then it has to be gathered before the outer axis moves.
    # axes that cut different dims do not meet
    if not (isinstance(inner, Shard) and isinstance(outer, Shard) and inner.dim == outer.dim):
        return False
    below = inner.parts % (outer.parts * outer_size)
    above = outer.parts % (inner.parts * inner_size)
    return bool(below and above)


def _can_exchange(then: Sequence[Placement], sizes: Sequence[int], axis: int) -> bool:
    # Return whether an all-to-all can reach `then`.
    # `axis` must cut what the outer axes leave of the dim, and no inner axis may cut that.
    inner = zip(then[axis + 1 :], sizes[axis + 1 :], strict=True)
    hidden = any(_hides(each, then[axis], size, sizes[axis]) for each, size in inner)
    return not hidden and pieces(then, sizes) is not None

"""Split parameters: plain parameters of the local shape, which carry their layout.

They rest in slices along tensor axes between steps. The user's own parameters lose their memory
until `join_parameters`.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from lightning_topt.graph.op_config import Placement, Shard
from lightning_topt.techniques.tensor_parallel import moves
from lightning_topt.techniques.tensor_parallel.layout import (
    REPLICATE,
    Layout,
    Span,
    TensorAxes,
    check_divides,
    cut_spans,
    local_shard,
    own_slice,
    pieces,
    with_layout,
)


@dataclass(frozen=True)
class SplitTensor:
    """How a parameter, and what has its shape, is cut along tensor axes.

    Its gradient and the optimizer's state have its shape.
    """

    layout: Layout
    axes: TensorAxes

    def own(self, whole: Tensor) -> Tensor:
        """Return this rank's slice of `whole`, in memory of its own."""
        own = own_slice(whole, self.layout.placements, self.axes)
        return own.clone(memory_format=torch.contiguous_format)

    def whole(self, local: Tensor) -> Tensor:
        """Return the full tensor of all slices, on every rank. A collective call."""
        return moves.unsharded(local.detach(), self.layout.placements, self.axes)

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape of a slice."""
        return self.layout.local_shape(self.axes.sizes)

    @cached_property
    def spans(self) -> tuple[tuple[Span, ...], ...]:
        """The runs of indices that this rank's slice has of the full tensor, by dim."""
        # cut from the outside in, as `own_slice` does
        spans: list[tuple[Span, ...]] = [(Span(0, 0, size),) for size in self.layout.shape]
        now: list[Placement] = [REPLICATE] * len(self.axes)
        for axis, placement in enumerate(self.layout.placements):
            if isinstance(placement, Shard):
                now[axis] = placement
                spans[placement.dim] = cut_spans(
                    spans[placement.dim],
                    local_shard(now, self.axes.sizes, axis),
                    index=self.axes.coordinates[axis],
                    count=self.axes.sizes[axis],
                )
        return tuple(spans)

    @property
    def slices(self) -> int:
        """The number of slices that it is cut into."""
        count = 1
        for placement, size in zip(self.layout.placements, self.axes.sizes, strict=True):
            count *= size if isinstance(placement, Shard) else 1
        return count


def check_split(
    name: str, shape: tuple[int, ...], placements: tuple[Placement, ...], axes: TensorAxes
) -> None:
    """Raise ValueError if parameter `name` of this shape cannot be cut so.

    The message names parameter and axis.
    """
    if len(placements) != len(axes):
        raise ValueError(
            f"parameter {name!r} has {len(placements)} placements for the axes {axes.names}"
        )
    if pieces(placements, axes.sizes) is None:
        raise ValueError(
            f"parameter {name!r} is cut along one dim by several of the axes "
            f"{', '.join(axes.names)}, and the parts of one are not pieces of the parts of "
            "another; choose other parts, or another dim"
        )
    # each axis divides what those before it leave
    left = [*shape]
    for axis, (placement, named, size) in enumerate(
        zip(placements, axes.names, axes.sizes, strict=True)
    ):
        if not isinstance(placement, Shard):
            continue
        if placement.dim >= len(shape):
            raise ValueError(
                f"parameter {name!r} of shape {shape} has no dim {placement.dim} to split along "
                f"axis {named!r}"
            )
        what = f"dim {placement.dim} of parameter {name!r} along axis {named!r}"
        check_divides(
            left[placement.dim], local_shard(placements, axes.sizes, axis).parts, size, what=what
        )
        left[placement.dim] //= size


@dataclass(frozen=True)
class SplitParameter:
    """A parameter of the user's, and the `slice` in its place, cut as `how` says."""

    original: nn.Parameter
    slice: nn.Parameter
    how: SplitTensor


@torch.no_grad()
def split_parameters(
    module: nn.Module, placements: Mapping[str, tuple[Placement, ...]], axes: TensorAxes
) -> list[SplitParameter]:
    """Put this rank's slices in the place of the named parameters, under all names of a tied one.

    The originals, which optimizers and the user's code may refer to, lose their memory until
    `join_parameters`.

    Raises:
        ValueError: as in `check_split`; or for a name that `module` does not have, for a parameter
            with hooks, and if two names of one parameter are placed differently
    """
    # check all before anything is changed
    parameters = dict(module.named_parameters(remove_duplicate=False))
    found: dict[nn.Parameter, SplitTensor] = {}
    for name, along in placements.items():
        if name not in parameters:
            raise ValueError(
                f"the plan places a parameter {name!r}, and {type(module).__name__} has none of "
                "that name"
            )
        # tied names are one parameter, which is cut once
        parameter = parameters[name]
        check_split(name, tuple(parameter.shape), along, axes)
        hooked = parameter._backward_hooks or getattr(
            parameter, "_post_accumulate_grad_hooks", None
        )
        if hooked and any(isinstance(placement, Shard) for placement in along):
            raise ValueError(
                f"parameter {name!r} has a hook for its gradient, and the plan splits it: the hook "
                "would not see the whole gradient; remove the hook, or keep the parameter whole"
            )
        how = SplitTensor(Layout(tuple(parameter.shape), along), axes)
        if found.setdefault(parameter, how).layout != how.layout:
            raise ValueError(
                f"parameter {name!r} is tied to another one, which is split differently: place "
                "them alike"
            )
    # cut, then put the slices in the place of the parameters under all their names
    split = [_split(parameter, how) for parameter, how in found.items() if how.slices > 1]
    _replace(module, {one.original: one.slice for one in split})
    return split


def _split(parameter: nn.Parameter, how: SplitTensor) -> SplitParameter:
    # a new Parameter: autograd remembers the shape of one that was used
    own = nn.Parameter(how.own(parameter.data), requires_grad=parameter.requires_grad)
    with_layout(own, how.layout)
    parameter.data = torch.empty(0, dtype=parameter.dtype, device=parameter.device)
    parameter.grad = None
    return SplitParameter(parameter, own, how)


@torch.no_grad()
def join_parameters(module: nn.Module, split: Iterable[SplitParameter]) -> None:
    """Restore the unsharded parameters of `module`, on every rank. A collective call."""
    # a step may be under way, whose mode would take a slice for the full tensor
    with torch._C.DisableTorchFunction():
        for one in split:
            one.original.data = one.how.whole(one.slice.data)
    _replace(module, {one.slice: one.original for one in split})


@contextmanager
def joined_parameters(module: nn.Module, split: Sequence[SplitParameter]) -> Generator[None]:
    """Give `module` its unsharded parameters on every rank, and the slices again at the end.

    Entering is a collective call.
    """
    with torch.inference_mode(False):  # an evaluation is in it; its tensors could not be trained
        join_parameters(module, split)
    try:
        yield
    finally:
        _replace(module, {one.original: one.slice for one in split})
        for one in split:
            one.original.data = torch.empty(0, dtype=one.original.dtype, device=one.original.device)


def _replace(module: nn.Module, new: Mapping[nn.Parameter, nn.Parameter]) -> None:
    for submodule in module.modules():
        own = submodule._parameters
        own.update({name: new[p] for name, p in own.items() if p is not None and p in new})

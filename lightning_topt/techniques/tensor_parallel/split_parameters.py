"""Split parameters rest in slices along tensor axes: plain parameters of the local shape, which carry their layout."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_topt.graph.op_config import Placement, Shard
from lightning_topt.techniques.tensor_parallel import moves
from lightning_topt.techniques.tensor_parallel.layout import Layout, check_divides, cut, with_layout, without_layout
from lightning_topt.techniques.tensor_parallel.tensor_axes import TensorAxes


@dataclass(frozen=True)
class SplitTensor:
    """A `SplitTensor` says how a parameter, and what has its shape (a gradient, optimizer state), is cut along tensor axes."""

    layout: Layout
    axes: TensorAxes

    def own(self, whole: Tensor) -> Tensor:
        """Return this rank's slice of `whole`, a tensor of its own."""
        for axis, placement in enumerate(self.layout.placements):
            if isinstance(placement, Shard):
                whole = cut(whole, placement, index=self.axes.coordinates[axis], count=self.axes.sizes[axis])
        return whole.clone(memory_format=torch.contiguous_format)

    def whole(self, local: Tensor) -> Tensor:
        """Return the whole tensor of all slices, on every rank. A collective call."""
        for axis in reversed(range(len(self.axes))):
            placement = self.layout.placements[axis]
            if isinstance(placement, Shard):
                local = moves.all_gather(local, placement, self.axes, axis)
        return local

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape of a slice."""
        return self.layout.local_shape(self.axes.sizes)

    @property
    def slices(self) -> int:
        """Into how many slices it is cut."""
        count = 1
        for placement, size in zip(self.layout.placements, self.axes.sizes, strict=True):
            count *= size if isinstance(placement, Shard) else 1
        return count


def check_split(name: str, shape: tuple[int, ...], placements: tuple[Placement, ...], axes: TensorAxes) -> None:
    """Raise ValueError where parameter `name` of this shape cannot be cut so; names the parameter and the axis."""
    if len(placements) != len(axes):
        raise ValueError(f"parameter {name!r} has {len(placements)} placements for the axes {axes.names}")
    left = [*shape]
    for placement, axis, size in zip(placements, axes.names, axes.sizes, strict=True):
        if not isinstance(placement, Shard):
            continue
        if placement.dim >= len(shape):
            raise ValueError(
                f"parameter {name!r} of shape {shape} has no dim {placement.dim} to split along axis {axis!r}"
            )
        what = f"dim {placement.dim} of parameter {name!r} along axis {axis!r}"
        check_divides(left[placement.dim], placement.parts, size, what=what)
        left[placement.dim] //= size


@torch.no_grad()
def split_parameters(
    parameters: Mapping[str, nn.Parameter], placements: Mapping[str, tuple[Placement, ...]], axes: TensorAxes
) -> dict[nn.Parameter, SplitTensor]:
    """Cut the named parameters in place to this rank's slices; return how, by parameter. Raises ValueError as `check_split`."""
    for name, along in placements.items():
        check_split(name, tuple(parameters[name].shape), along, axes)
    found: dict[nn.Parameter, SplitTensor] = {}
    for name, along in placements.items():
        parameter = parameters[name]
        split = SplitTensor(Layout(tuple(parameter.shape), along), axes)
        if not any(isinstance(placement, Shard) for placement in along):
            continue
        if parameter in found:
            if found[parameter].layout != split.layout:
                raise ValueError(f"parameter {name!r} is tied to another one that is split differently")
            continue
        found[parameter] = split
    for parameter, split in found.items():
        parameter.data, parameter.grad = split.own(parameter.data), None
        with_layout(parameter, split.layout)
    return found


@torch.no_grad()
def join_parameters(split: Mapping[nn.Parameter, SplitTensor]) -> None:
    """Give parameters their whole values back, on every rank. A collective call."""
    for parameter, how in split.items():
        parameter.data, parameter.grad = how.whole(parameter.data), None
        without_layout(parameter)


def split_state(state: Mapping[str, Any], split: SplitTensor, *, of: torch.Size) -> dict[str, Any]:
    """Return an optimizer's state of one parameter with all that has its whole shape, `of`, cut to this rank's slice."""
    return {
        key: split.own(value) if isinstance(value, Tensor) and value.shape == of else value
        for key, value in state.items()
    }

"""Stand-ins: what a call of a unit returns on a stage that does not run it."""

from __future__ import annotations

import functools
from collections.abc import Hashable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_unflatten

from lightning_topt.graph.draws import PLAIN, draw_again, draw_of
from lightning_topt.graph.fake import ShapeMode, empty_fake
from lightning_topt.graph.step_flow import LeafSpec, TensorRef, UnitCall

MOST_SHAPES = 10_000


class StandIns(ShapeMode):  # type: ignore[no-untyped-call]
    """Makes what calls of units return where they are not run: the tensors that were received, and
    shapes for all others.

    Functional operators on such shapes compute shapes, and keep what they have computed; they draw
    their random numbers.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self.device = device
        self._is_inside = False
        self._shapes: dict[Hashable, LeafSpec] = {}

    def dispatch(self, func: OpOverload, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Compute the shape of a result, and draw the random numbers that the operator would
        draw.
        """
        if self._is_inside:
            return super().dispatch(func, types, args, kwargs)
        self._is_inside = True
        try:
            if torch.Tag.nondeterministic_seeded in func.tags:
                self._draw(func, args, kwargs or {})
            elif _is_pure(func) and (key := _key((args, kwargs))) is not None:
                return self._known_shape((func, key), types, args, kwargs)
            return super().dispatch(func, types, args, kwargs)
        finally:
            self._is_inside = False

    def _draw(self, func: OpOverload, args: Any, kwargs: Any) -> None:
        draw = draw_of(func, args, kwargs)
        if draw is not None and not draw.problem:
            with torch.utils._python_dispatch._disable_current_modes():
                draw_again([draw], self.device)

    def _known_shape(
        self, key: tuple[OpOverload, Hashable], types: Any, args: Any, kwargs: Any
    ) -> Any:
        """Do what `dispatch` does, from memory where the same operator has had arguments of the
        same shapes.
        """
        if (spec := self._shapes.get(key)) is not None:
            return self.absent(spec)
        result = super().dispatch(key[0], types, args, kwargs)
        if (
            type(result) is FakeTensor
            and result.layout is torch.strided
            and result.device == self.device
        ):
            if len(self._shapes) >= MOST_SHAPES:
                self._shapes.clear()
            self._shapes[key] = LeafSpec(
                tuple(result.shape), tuple(result.stride()), result.dtype, requires_grad=False
            )
        return result

    def result(self, call: UnitCall, received: Mapping[TensorRef, Tensor]) -> Any:
        """Return what `call` returned, with the tensors that are `received` in their places."""
        leaves: list[Any] = []
        for number, leaf in enumerate(call.leaves):
            if not isinstance(leaf, LeafSpec):
                leaves.append(leaf)
            elif leaf.same_as is not None:
                leaves.append(leaves[leaf.same_as])
            else:
                given = received.get(TensorRef(call.index, number))
                leaves.append(self.absent(leaf) if given is None else given)
        return tree_unflatten(leaves, call.structure)

    def absent(self, spec: LeafSpec) -> Tensor:
        """Return a tensor without elements."""
        return empty_fake(self, like=(spec.shape, spec.stride, spec.dtype, self.device))


@functools.cache
def _is_pure(func: OpOverload) -> bool:
    """Whether `func` makes one new tensor of its arguments and does nothing else."""
    schema = func._schema
    aliases = [*schema.arguments, *schema.returns]
    return (
        len(schema.returns) == 1
        and not schema.is_mutable
        and all(each.alias_info is None for each in aliases)
    )


def _key(value: Any) -> Hashable | None:
    """Return all about arguments that decides the shape of a result; None where that is not
    known.
    """
    if isinstance(value, Tensor):
        if value.layout is not torch.strided or value.is_conj() or value.is_neg():
            return None
        return Tensor, value.shape, value.stride(), value.dtype, value.device.type
    if isinstance(value, dict):
        value = tuple(value.items())
    if isinstance(value, (tuple, list)):
        parts = tuple(_key(part) for part in value)
        return None if None in parts else (type(value), parts)
    return (type(value), value) if isinstance(value, PLAIN) else None


class Received(torch.autograd.Function):
    """The identity, so that user code may write to a received tensor in place, which autograd
    forbids for a leaf.
    """

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        """Return another tensor on the same memory."""
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Return the gradient as it came."""
        return gradients[0]

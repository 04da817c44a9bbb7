"""`TensorMover` brings tensors to placements, and remembers what it made where other calls may want
it.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from lightning_topt.graph.op_config import Placements
from lightning_topt.techniques.tensor_parallel import moves
from lightning_topt.techniques.tensor_parallel.block_rules import BlockRule, at_border
from lightning_topt.techniques.tensor_parallel.layout import (
    REPLICATE,
    Layout,
    layout_of,
    with_layout,
)
from lightning_topt.techniques.tensor_parallel.regather import Gathered
from lightning_topt.techniques.tensor_parallel.tensor_axes import TensorAxes

MOVED = "_topt_moved"
_GATHERED = "_topt_gathered"


class TensorMover:
    """Moves tensors along `axes`. Where it `gathers_again`, what it gathers is saved for backward
    as a slice; `sums_later` is as in `moves.enter`.
    """

    def __init__(self, axes: TensorAxes) -> None:
        self.axes, self.gathers_again, self.sums_later = axes, False, False
        self.whole_layout: Layout = Layout((), (REPLICATE,) * len(axes))
        self._alike = (False,) * len(axes)
        # the last one gathered, which the next call may want too
        self._shared: Tensor | None = None

    def forget(self) -> None:
        """Let go of what was gathered last."""
        self._shared = None

    def shape(self, tensor: Tensor) -> tuple[int, ...]:
        """Return the shape of the whole tensor."""
        if (layout := layout_of(tensor)) is not None:
            return layout.shape
        return tuple(tensor.shape)

    def move(
        self, tensor: Tensor, source: Placements, target: Placements, enters: tuple[bool, ...]
    ) -> Tensor:
        """Return the local tensor at `target`, remembered where other calls may want it (queries,
        keys and values of one input); `enters` as in `moves.move`.
        """
        if source == target and not (
            any(enters) and tensor.requires_grad and torch.is_grad_enabled()
        ):
            return tensor
        # The gradient of a leaf would hold it, and it what is remembered; changes of inference
        # tensors are not counted.
        if (tensor.is_leaf and tensor.requires_grad) or tensor.is_inference():
            return self._made(tensor, source, target, enters)[0]
        known = tensor.__dict__.setdefault(MOVED, {})
        key = target, enters, torch.is_grad_enabled()
        if (found := known.get(key)) is not None:
            again = self._held(found[2])
            if again is not None and found[:2] == (tensor._version, again._version):
                return again
        moved, is_copy = self._made(tensor, source, target, enters)
        if is_copy:  # while the slice lives, its whole copy must not
            self._shared = moved
        known[key] = tensor._version, moved._version, weakref.ref(moved) if is_copy else moved
        return moved

    def _held(self, kept: Any) -> Tensor | None:
        """Return what was remembered, of copies the last one only: ranks must not differ by when
        Python frees the others.
        """
        tensor: Tensor | None = kept if isinstance(kept, Tensor) else kept()
        return tensor if isinstance(kept, Tensor) or tensor is self._shared else None

    def _made(
        self, tensor: Tensor, source: Placements, target: Placements, enters: tuple[bool, ...]
    ) -> tuple[Tensor, bool]:
        """The tensor at `target`, and whether it is one that backward gathers again."""
        moved = moves.move(tensor, source, target, enters, self.axes, sums_later=self.sums_later)
        if not self.gathers_again or moved.numel() <= tensor.numel() or not torch.is_grad_enabled():
            return moved, False
        axes, alike = self.axes, self._alike
        again = Gathered(
            moved, tensor, lambda local: moves.move(local, source, target, alike, axes)
        )
        moved.__dict__[_GATHERED] = again
        return moved, True

    def whole(self, value: Any) -> Any:
        """Return `value`, a tensor or anything that holds tensors, with whole tensors in the place
        of split ones.
        """
        if isinstance(value, Tensor):
            if (layout := layout_of(value)) is None:
                return value
            with torch._C.DisableTorchFunction():  # the calls that move it are not user code
                return self.move(
                    value, layout.placements, self.whole_layout.placements, self._alike
                )
        if any(
            isinstance(leaf, Tensor) and layout_of(leaf) is not None for leaf in tree_leaves(value)
        ):
            return tree_map(
                lambda leaf: self.whole(leaf) if isinstance(leaf, Tensor) else leaf, value
            )
        return value

    def at_border(self, rule: BlockRule, wanted: Sequence[Placements], value: Any) -> Any:
        """Return `value`, a tree of tensors, with these moved to where `rule` has them at a border
        (its inputs or outputs).
        """
        leaves, tree = tree_flatten(value)
        index = 0
        with torch._C.DisableTorchFunction():
            for place, leaf in enumerate(leaves):
                if isinstance(leaf, Tensor):
                    leaves[place] = self._at_border(rule, wanted, index, leaf)
                    index += 1
        return tree_unflatten(leaves, tree)

    def _at_border(
        self, rule: BlockRule, wanted: Sequence[Placements], index: int, tensor: Tensor
    ) -> Tensor:
        layout, shape, axes, whole = (
            layout_of(tensor),
            self.shape(tensor),
            self.axes,
            self.whole_layout.placements,
        )
        target = at_border(rule, wanted, index, shape, names=axes.names, sizes=axes.sizes)
        source = whole if layout is None else layout.placements
        if source == target:
            return tensor
        moved = self.move(tensor, source, target, self._alike)
        return moved if target == whole else with_layout(moved, Layout(shape, target))


def gathered_among(tensors: Sequence[Tensor]) -> list[Gathered]:
    """Return what backward gathers again of `tensors`."""
    return [tensor.__dict__[_GATHERED] for tensor in tensors if _GATHERED in tensor.__dict__]

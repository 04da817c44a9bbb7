"""Moves of tensors to placements, remembered where other calls may want the result.

A subject of its own: how long moved tensors live. Operands that were gathered are saved for
backward as the slices they were gathered from, and gathered again there (Korthikanti et al., arXiv
2205.05198, section 4.2.2). So activations cost a slice on each rank. What several calls share is
gathered once more for all of them: it is kept until the backward of the gather itself.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from lightning_topt.graph.op_config import Placements
from lightning_topt.techniques.tensor_parallel import moves
from lightning_topt.techniques.tensor_parallel.block_rules import BlockRule, at_border
from lightning_topt.techniques.tensor_parallel.layout import (
    REPLICATE,
    Layout,
    TensorAxes,
    layout_of,
    with_layout,
)

MOVED = "_topt_moved"
_LOWERED = "_topt_lowered"
_GATHERED = "_topt_gathered"


class TensorMover:
    """Moves tensors along `axes`.

    If it `gathers_again`, what it gathers is saved for backward as a slice.
    """

    def __init__(self, axes: TensorAxes) -> None:
        self.axes, self.gathers_again = axes, False
        self.whole_layout: Layout = Layout((), (REPLICATE,) * len(axes))
        self._alike = (False,) * len(axes)
        # the last tensor gathered, which the next call may want too
        self._shared: Tensor | None = None

    def forget(self) -> None:
        """Release what was gathered last."""
        self._shared = None

    def shape(self, tensor: Tensor) -> tuple[int, ...]:
        """Return the full shape of `tensor`."""
        if (layout := layout_of(tensor)) is not None:
            return layout.shape
        return tuple(tensor.shape)

    def move(
        self, tensor: Tensor, source: Placements, target: Placements, enters: tuple[bool, ...]
    ) -> Tensor:
        """Return the local tensor at `target`, remembered if other calls may want it.

        Examples are queries, keys and values of one input. `enters` is as in `moves.move`.
        """
        if source == target and not (
            any(enters) and tensor.requires_grad and torch.is_grad_enabled()
        ):
            return tensor
        # Not remembered: the gradient of a leaf would keep it alive, and it what is remembered.
        # Changes of inference tensors are not counted.
        if (tensor.is_leaf and tensor.requires_grad) or tensor.is_inference():
            return self._made(tensor, source, target, enters)[0]
        # remembered on the tensor, as long as neither has changed
        known = tensor.__dict__.setdefault(MOVED, {})
        key = target, enters, torch.is_grad_enabled()
        if (found := known.get(key)) is not None:
            # Of gathered copies only the last: ranks must not differ by when Python frees others.
            kept = found[2]
            again: Tensor | None = kept if isinstance(kept, Tensor) else kept()
            if not isinstance(kept, Tensor) and again is not self._shared:
                again = None
            if again is not None and found[:2] == (tensor._version, again._version):
                return again
        moved, is_copy = self._made(tensor, source, target, enters)
        if is_copy:  # the full copy must not live as long as the slice: a weak reference
            self._shared = moved
        known[key] = tensor._version, moved._version, weakref.ref(moved) if is_copy else moved
        return moved

    def lowered(self, tensor: Tensor) -> Tensor:
        """Return a slice in the dtype of autocast, where that is on and would lower it.

        It is remembered as what `move` returns is: several calls share one.
        """
        kind = tensor.device.type
        if tensor.dtype != torch.float32 or not torch.is_autocast_enabled(kind):
            return tensor
        # parameters are cast, and remembered, by autocast
        if tensor.is_leaf and tensor.requires_grad:
            return tensor
        key = torch.get_autocast_dtype(kind), torch.is_grad_enabled()
        known = tensor.__dict__.get(_LOWERED)
        if known is not None and known[:2] == (key, tensor._version):
            found: Tensor = known[2]
            return found
        with torch._C.DisableTorchFunction():
            found = tensor.to(key[0])
        if (layout := layout_of(tensor)) is not None:
            with_layout(found, layout)
        if not tensor.is_inference():
            tensor.__dict__[_LOWERED] = key, tensor._version, found
        return found

    def _made(
        self, tensor: Tensor, source: Placements, target: Placements, enters: tuple[bool, ...]
    ) -> tuple[Tensor, bool]:
        # The tensor at `target`, and whether backward gathers it again
        moved = moves.move(tensor, source, target, enters, self.axes)
        if not self.gathers_again or moved.numel() <= tensor.numel() or not torch.is_grad_enabled():
            return moved, False
        # in the gather of backward, ranks use the tensor alike
        axes, alike = self.axes, self._alike
        again = Gathered(
            moved, tensor, lambda local: moves.move(local, source, target, alike, axes)
        )
        moved.__dict__[_GATHERED] = again
        return moved, True

    def whole(self, value: object) -> Any:
        """Return `value`, a tensor or a tree of tensors, with split tensors unsharded."""
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

    def at_border(self, rule: BlockRule, wanted: Sequence[Placements], value: object) -> Any:
        """Return `value`, a tree of tensors, moved to where `rule` has them at a border.

        `wanted` are its inputs or outputs.
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
        layout = layout_of(tensor)
        shape = self.shape(tensor)
        axes = self.axes
        whole = self.whole_layout.placements
        target = at_border(rule, wanted, index, shape, names=axes.names, sizes=axes.sizes)
        source = whole if layout is None else layout.placements
        if source == target:
            return tensor
        moved = self.move(tensor, source, target, self._alike)
        return moved if target == whole else with_layout(moved, Layout(shape, target))


def gathered_among(tensors: Sequence[Tensor]) -> list[Gathered]:
    """Return what backward gathers again of `tensors`."""
    return [tensor.__dict__[_GATHERED] for tensor in tensors if _GATHERED in tensor.__dict__]


_CHECKPOINT = "torch.utils.checkpoint"


class Gathered:
    """A tensor that `gather`, given `local`, made as `whole`.

    `local` is kept until the backward of the gather, and `whole` made again once.
    """

    def __init__(self, whole: Tensor, local: Tensor, gather: Callable[[Tensor], Tensor]) -> None:
        self.address = whole.untyped_storage()._cdata
        self.local: Tensor | None = local.detach()
        self._gather = gather
        self._again: Tensor | None = None
        self._waits = whole.grad_fn is not None
        if whole.grad_fn is not None:
            whole.grad_fn.register_hook(lambda *_: self._forget())

    def again(self, local: Tensor) -> Tensor:
        """Return the unsharded tensor, from what `local` was saved as."""
        if self._again is not None:
            return self._again
        with torch.no_grad(), torch._C.DisableTorchFunction():
            whole = self._gather(local)
        if self._waits:
            self._again = whole
        return whole

    def _forget(self) -> None:
        self._again = self.local = None  # the graph, which refers to this, may live on


@contextmanager
def saved_as_slices(gathered: Sequence[Gathered]) -> Generator[None, None, None]:
    """Save these tensors as slices within it; recomputation, which keeps nothing, is left alone."""
    # hooks that are there already see what is kept
    outer = torch._C._autograd._top_saved_tensors_default_hooks(True)
    if not torch.is_grad_enabled() or (outer is not None and outer[0].__module__ == _CHECKPOINT):
        yield
        return
    # what is saved is recognized by its memory: views of it too
    by_address = {each.address: each for each in gathered}

    def pack(tensor: Tensor) -> Any:
        found = (
            by_address.get(tensor.untyped_storage()._cdata)
            if tensor.layout is torch.strided
            else None
        )
        local = None if found is None else found.local
        found, kept = (None, tensor) if local is None else (found, local)
        view = None if found is None else (tensor.size(), tensor.stride(), tensor.storage_offset())
        return found, view, kept if outer is None else outer[0](kept)

    def unpack(saved: Any) -> Tensor:
        found, view, kept = saved
        tensor: Tensor = kept if outer is None else outer[1](kept)
        return tensor if found is None else found.again(tensor).as_strided(*view)

    with saved_tensors_hooks(pack, unpack):
        yield

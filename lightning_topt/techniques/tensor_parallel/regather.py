"""Operands that were gathered are saved for backward as the slices they were gathered from, and
gathered again there.

Korthikanti et al., arXiv 2205.05198, section 4.2.2: so activations cost a slice on each rank. What
several calls share is gathered once more for all of them: it is kept until the backward of the
gather itself.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

_CHECKPOINT = "torch.utils.checkpoint"


class Gathered:
    """A `Gathered` is a tensor that `gather`, given `local`, made as `whole`: `local` is kept until
    the backward of the gather, and `whole` made again once.
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
        """Return the whole tensor, from what `local` was saved as."""
        if self._again is not None:
            return self._again
        with torch.no_grad(), torch._C.DisableTorchFunction():
            whole = self._gather(local)
        if self._waits:
            self._again = whole
        return whole

    def _forget(self) -> None:
        self._again = self.local = None  # the graph, which holds this, may live on


@contextmanager
def saved_as_slices(gathered: Sequence[Gathered]) -> Generator[None, None, None]:
    """Save these tensors as slices within it. Recomputation, which keeps nothing, is left alone."""
    outer = torch._C._autograd._top_saved_tensors_default_hooks(True)
    if not torch.is_grad_enabled() or (outer is not None and outer[0].__module__ == _CHECKPOINT):
        yield
        return
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

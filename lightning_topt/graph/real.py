"""Modules whose parameters are the original ones in memory, for steps that need the values of tensors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from lightning_topt.graph.module_copy import TensorCopies, copy_module
from lightning_topt.graph.structures import map_tensors

T = TypeVar("T", bound=nn.Module)


def real_copy(module: T) -> T:
    """Return a deep copy whose parameters and other tensors share memory with those of `module`; buffers are copied.

    Nothing of `module` changes when a `Backups` sees every write of the copy; see `fake_copy` for the rest.
    """
    return copy_module(module, _Aliases(module), fake=False)


def filled_copy(module: T) -> T:
    """Return a deep copy with memory of its own on the CPU: the values of `module`, zeros where it is on the meta device."""
    return copy_module(module, _Filled(torch.device("cpu")), fake=False)


def real_batch(batch: Any) -> Any:
    """Return `batch` with copies of its tensors."""
    return map_tensors(batch, lambda tensor: tensor.detach().clone().requires_grad_(tensor.requires_grad))


class Backups:
    """Copies of memory that somebody else owns, taken before the first write to it."""

    def __init__(self) -> None:
        self._saved: dict[int, tuple[Any, Any]] = {}

    def before_write(self, tensors: Iterable[Tensor]) -> None:
        """Save the memory of `tensors` where that has not been done yet."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage._cdata not in self._saved:
                self._saved[storage._cdata] = storage, storage.clone()  # type: ignore[no-untyped-call]

    @contextmanager
    def restored(self) -> Iterator[Backups]:
        """Put everything back at the end. Version counters do not move."""
        try:
            yield self
        finally:
            for storage, copied in self._saved.values():
                storage.resize_(copied.nbytes()) if storage.nbytes() != copied.nbytes() else None
                storage.copy_(copied)
            self._saved.clear()


class _Filled(TensorCopies):
    """Tensors with memory of their own."""

    def convert(self, tensor: Tensor) -> Tensor:
        with torch._C.DisableTorchFunction(), torch.no_grad():
            new = torch.empty_like(tensor, device=self.device)
            new = new.zero_() if tensor.is_meta else new.copy_(tensor)
            if isinstance(tensor, nn.Parameter):
                return nn.Parameter(new, requires_grad=tensor.requires_grad)
            return new.requires_grad_(tensor.requires_grad)


class _Aliases(TensorCopies):
    """Tensors of their own on the same memory; buffers, which modules write to, on a copy of it."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(None)
        parameters = {p.untyped_storage()._cdata for p in module.parameters() if p.layout is torch.strided}
        buffers = (b for b in module.buffers() if b.layout is torch.strided)
        self.copied: dict[int, Any] = {
            storage._cdata: storage.clone()  # type: ignore[no-untyped-call]
            for storage in {b.untyped_storage()._cdata: b.untyped_storage() for b in buffers}.values()
            if storage._cdata not in parameters
        }

    def convert(self, tensor: Tensor) -> Tensor:
        with torch._C.DisableTorchFunction(), torch.no_grad():
            new = tensor.data
            if tensor.layout is torch.strided and (memory := self.copied.get(tensor.untyped_storage()._cdata)):
                new = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
                new = new.set_(memory, tensor.storage_offset(), tensor.shape, tensor.stride())
            if isinstance(tensor, nn.Parameter):
                new = nn.Parameter(new, requires_grad=tensor.requires_grad)
            else:
                new.requires_grad_(tensor.requires_grad)
        vars(new).update({name: value for name, value in vars(tensor).items() if name not in vars(new)})
        return new

"""Rows of a tensor that ranks have divided among them, in the form that torch.distributed.checkpoint takes.

The interface is that of `torch.distributed._checkpointable._Checkpointable`, which DTensor has as well; DTensor divides evenly,
an optimizer step that is shared by its costs does not.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType


class TensorRows(Tensor):
    """The rows from `start` on of a tensor of shape `whole`, in the memory of `local` (rows, ...)."""

    start: int
    whole: torch.Size

    # Operators see the local tensor.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # as torch's own subclasses

    @staticmethod
    def __new__(cls, local: Tensor, *, start: int, whole: torch.Size) -> TensorRows:
        """Make it of `local`, which stays what it is."""
        rows: TensorRows = Tensor._make_subclass(cls, local.detach())
        rows.start, rows.whole = start, whole
        return rows

    @property
    def local(self) -> Tensor:
        """The rows as a plain tensor, in the same memory."""
        return self.as_subclass(Tensor)

    def size(self, dim: int | None = None) -> Any:  # what checkpoints compare
        """Return the shape of the whole tensor."""
        return self.whole if dim is None else self.whole[dim]

    def _chunk(self) -> ChunkStorageMetadata:
        offsets = (self.start, *(0 for _ in self.whole[1:]))
        return ChunkStorageMetadata(offsets=torch.Size(offsets), sizes=self.local.size())

    def __create_write_items__(self, fqn: str, _: Any) -> list[WriteItem]:
        """Say what is written: one chunk."""
        chunk = self._chunk()
        properties = TensorProperties.create_from_tensor(self.local)
        data = TensorWriteData(chunk=chunk, properties=properties, size=self.whole)
        return [WriteItem(index=MetadataIndex(fqn, chunk.offsets), type=WriteItemType.SHARD, tensor_data=data)]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        """Say what is to be read."""
        return [self._chunk()]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        """Return the memory that a chunk is written from or read into."""
        if index.offset is not None and index.offset != self._chunk().offsets:
            raise ValueError(f"no rows of {index.fqn} at {index.offset} are on this rank")
        return self.local

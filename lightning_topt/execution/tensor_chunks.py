"""The part of a tensor that a rank keeps, in the form that torch.distributed.checkpoint takes.

The interface is that of `torch.distributed._checkpointable._Checkpointable`, which DTensor has as
well; DTensor divides evenly and in one piece. An optimizer step that is shared by its costs does
not, and slices along tensor axes may be of several parts.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor

from lightning_topt.techniques.tensor_parallel.layout import Span, narrowed
from lightning_topt.techniques.tensor_parallel.split_parameters import SplitTensor

Spans = Sequence[Sequence[Span]]  # by dim


class TensorChunks(Tensor):
    """The indices `spans` of a tensor of shape `whole`, in the memory of `local`."""

    spans: Spans
    whole: torch.Size

    # Operators see the local tensor.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # as torch's own subclasses

    @staticmethod
    def __new__(cls, local: Tensor, *, spans: Spans, whole: Sequence[int]) -> TensorChunks:
        """Make it of `local`, which stays what it is."""
        chunks: TensorChunks = Tensor._make_subclass(cls, local.detach())
        chunks.spans, chunks.whole = spans, torch.Size(whole)
        return chunks

    @property
    def local(self) -> Tensor:
        """The part as a plain tensor, in the same memory."""
        return self.as_subclass(Tensor)

    def size(self, dim: int | None = None) -> Any:  # what checkpoints compare
        """Return the shape of the whole tensor."""
        return self.whole if dim is None else self.whole[dim]

    def _parts(self) -> dict[torch.Size, tuple[Span, ...]]:
        """By the offsets in the whole tensor."""
        return {
            torch.Size(span.start for span in spans): spans
            for spans in itertools.product(*self.spans)
        }

    def __create_write_items__(self, fqn: str, _: Any) -> list[WriteItem]:
        """Say what is written."""
        properties = TensorProperties.create_from_tensor(self.local)
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=self.whole),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        """Say what is to be read."""
        return [
            ChunkStorageMetadata(offsets=offsets, sizes=torch.Size(span.length for span in spans))
            for offsets, spans in self._parts().items()
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        """Return the memory that a chunk is written from or read into."""
        parts = self._parts()
        if index.offset is None or index.offset not in parts:
            raise ValueError(f"no part of {index.fqn} at {index.offset} is on this rank")
        local = self.local
        for dim, span in enumerate(parts[index.offset]):
            local = local.narrow(dim, span.local, span.length)
        return local


def rows_of_tensor(
    local: Tensor, *, rows: range, whole: Sequence[int], split: SplitTensor | None = None
) -> TensorChunks:
    """Return `local`: these `rows` of a tensor of shape `whole` or, where it is `split`, of this
    rank's slice of it.
    """
    spans = [(Span(0, 0, size),) for size in whole] if split is None else split.spans
    return TensorChunks(
        local, spans=[narrowed(spans[0], rows.start, len(rows)), *spans[1:]], whole=whole
    )


def chunks_of(value: Any, split: SplitTensor | None) -> Any:
    """Return `value` as the chunks of a whole tensor that it is, where it is a slice, or a shard of
    one, that is `split`.

    A fake tensor stays what it is: it cannot be of a class more, and there is nothing in it to
    write.
    """
    if (
        split is None
        or not isinstance(value, Tensor)
        or tuple(value.shape) != split.local_shape
        or is_fake(value)
    ):
        return value
    if not isinstance(value, DTensor):
        return TensorChunks(value, spans=split.spans, whole=split.layout.shape)
    spans, local = list(split.spans), value.to_local()
    (shard,) = value.__create_chunk_list__()  # type: ignore[no-untyped-call]
    for dim, (offset, size) in enumerate(zip(shard.offsets, shard.sizes, strict=True)):
        spans[dim] = narrowed(spans[dim], offset, size)
    return TensorChunks(local, spans=spans, whole=split.layout.shape)

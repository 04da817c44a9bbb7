"""States in an open checkpoint folder, and the parts of tensors that ranks have.

`StoredModule`, `StoredOptimizer` and `StoredExchange` are mappings that read an entry when it is
asked for, each rank what it is to keep. World size and plan may change between writing and reading:
`TensorChunks` says which part of a tensor a rank has.
"""

from __future__ import annotations

import io
import itertools
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    ReadItem,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.tensor import DTensor

from lightning_topt.optim.pieces import num_rows
from lightning_topt.techniques.tensor_parallel.layout import Span, narrowed
from lightning_topt.techniques.tensor_parallel.split_parameters import SplitTensor

if TYPE_CHECKING:
    from lightning_topt.execution.checkpoint_files import ShardFolder

State = dict[str, Any]
Spans = Sequence[Sequence[Span]]  # by dim


class StoredModule(Mapping[str, Any]):
    """A module's state in a checkpoint folder; entries are read, unsharded, when asked for.

    Keys of its tensors begin with `prefix`; `others` are its values that are no tensors.
    """

    def __init__(
        self, folder: ShardFolder, others: Mapping[str, object], *, prefix: str = "module."
    ) -> None:
        self._folder, self._others, self._prefix = folder, others, prefix
        self._known = {
            key.removeprefix(prefix): metadata
            for key, metadata in stored_tensors(folder).items()
            if key.startswith(prefix)
        }

    @property
    def stored(self) -> Mapping[str, TensorStorageMetadata]:
        """What is known of its tensors, none of which is read."""
        return self._known

    def read(
        self,
        like: Mapping[str, Any] | None = None,
        *,
        split: Mapping[str, SplitTensor] | None = None,
    ) -> State:
        """Return all entries, each as this rank keeps it.

        That is a slice where `split` says so, and a shard of what is a DTensor in `like`.
        """
        like, split = like or {}, split or {}
        targets = {
            name: _target(metadata, like.get(name), split=split.get(name))
            for name, metadata in self._known.items()
        }
        chunks = {
            f"{self._prefix}{name}": chunks_of(target, split.get(name))
            for name, target in targets.items()
        }
        _read(self._folder, chunks)
        return targets | dict(self._others)

    def __getitem__(self, name: str) -> Any:
        if name in self._others:
            return self._others[name]
        key = f"{self._prefix}{name}"
        return read_tensors(self._folder, [key])[key]

    def __iter__(self) -> Iterator[str]:
        yield from (*self._known, *self._others)

    def __len__(self) -> int:
        return len(self._known) + len(self._others)


class StoredOptimizer(Mapping[str, Any]):
    """An optimizer's ``state_dict`` in a checkpoint folder.

    ``["state"]`` is read, unsharded, when it is asked for.

    Args:
        folder: that has it.
        entries: of each key of a tensor, the parameter's index and what of its state it is.
        values: that are no tensors, by index.
        param_groups: as they were saved.
        names: of the parameters, by index, where another program has saved them.
    """

    def __init__(
        self,
        folder: ShardFolder,
        entries: Mapping[str, tuple[int, str]],
        *,
        values: Mapping[int, State],
        param_groups: list[dict[str, Any]],
        names: Sequence[str] | None = None,
    ) -> None:
        self._folder, self._entries, self._values = folder, entries, values
        self.param_groups, self.names = param_groups, names
        known = stored_tensors(folder)
        self._known = {key: known[key] for key in entries}

    def renumbered(self, indices: Mapping[int, int]) -> StoredOptimizer:
        """Return it with other indices of parameters, of which those that `indices` lacks go."""
        entries = {
            key: (indices[index], name)
            for key, (index, name) in self._entries.items()
            if index in indices
        }
        values = {indices[index]: of for index, of in self._values.items() if index in indices}
        groups = [
            {**group, "params": sorted(indices[i] for i in group["params"] if i in indices)}
            for group in self.param_groups
        ]
        return StoredOptimizer(self._folder, entries, values=values, param_groups=groups)

    @property
    def stored(self) -> Mapping[str, TensorStorageMetadata]:
        """What is known of its tensors, by key; none of them is read."""
        return self._known

    def whole(self) -> State:
        """Return the ``state_dict`` of one process, with CPU tensors."""
        return self.read()

    def read(
        self,
        parameters: Sequence[Tensor] = (),
        *,
        rows: Callable[[int], range] | None = None,
        split: Mapping[int, SplitTensor] | None = None,
    ) -> State:
        """Return the ``state_dict`` as this rank keeps it.

        Args:
            parameters: of the optimizer; states of those in shards are read in shards.
            rows: ``rows(index)`` are those wanted of the other parameters; None: all.
            split: the parameters, by index, of which this rank has slices.
        """
        # which parameters this rank wants states of, and which rows of them (None: all)
        indices = {*self._values, *(index for index, _ in self._entries.values())}
        known = {index: parameters[index] for index in indices if index < len(parameters)}
        wanted = {
            index: rows(index) if rows is not None and index in known else None for index in indices
        }
        kept = {index for index, of_index in wanted.items() if of_index is None or len(of_index)}
        # Memory for each tensor, and the chunks of the full tensor that it is.
        targets, chunks, cut = {}, {}, split or {}
        for key, metadata in self._known.items():
            if (index := self._entries[key][0]) in kept:
                target = _target(
                    metadata, known.get(index), rows=wanted[index], split=cut.get(index)
                )
                targets[key] = target
                chunks[key] = _chunks(target, metadata.size, cut.get(index), rows=wanted[index])
        _read(self._folder, chunks)
        # values that are no tensors first, then the tensors that were read
        state = {index: dict(values) for index, values in self._values.items() if index in kept}
        for key, value in targets.items():
            index, name = self._entries[key]
            state.setdefault(index, {})[name] = value
        return {"state": dict(sorted(state.items())), "param_groups": self.param_groups}

    def __getitem__(self, name: str) -> Any:
        return self.param_groups if name == "param_groups" else self.whole()[name]

    def __iter__(self) -> Iterator[str]:
        yield from ("state", "param_groups")

    def __len__(self) -> int:
        return 2


class StoredExchange(Sequence[dict[str, dict[str, Tensor]]]):
    """Stashed gradients of each rank of a gradient exchange, in a checkpoint folder.

    An entry is read when it is asked for.
    """

    def __init__(self, folder: ShardFolder, ranks: int) -> None:
        self._folder, self._ranks = folder, ranks
        self._known = {
            key: metadata
            for key, metadata in stored_tensors(folder).items()
            if key.startswith("exchange.")
        }

    def __len__(self) -> int:
        return self._ranks

    def __getitem__(self, position: Any) -> Any:
        if not 0 <= position < self._ranks:
            raise IndexError(position)
        prefix = f"exchange.{position}."
        targets = {
            key: _target(metadata, None)
            for key, metadata in self._known.items()
            if key.startswith(prefix)
        }
        _read(self._folder, targets)
        state: dict[str, dict[str, Tensor]] = {}
        for key, value in targets.items():
            kind, name = key.removeprefix(prefix).split(".", 1)
            state.setdefault(kind, {})[name] = value
        return state


def stored_tensors(folder: ShardFolder) -> dict[str, TensorStorageMetadata]:
    """Return what the folder says of its tensors, by key."""
    return {
        key: metadata
        for key, metadata in folder.metadata.state_dict_metadata.items()
        if isinstance(metadata, TensorStorageMetadata)
    }


def _target(
    metadata: TensorStorageMetadata,
    like: Any,
    *,
    rows: range | None = None,
    split: SplitTensor | None = None,
) -> Tensor:
    # Memory for what this rank keeps of a stored tensor
    dtype, shape = metadata.properties.dtype, metadata.size
    # A slice, a shard, rows of a tensor, or all of it.
    if split is not None and tuple(shape) == split.layout.shape:
        shape = torch.Size(split.local_shape)
    if isinstance(like, DTensor) and like.shape == shape:
        return torch.empty_like(like, dtype=dtype, requires_grad=False)
    if (
        rows is not None
        and isinstance(like, Tensor)
        and like.shape == shape
        and 0 < len(rows) < num_rows(like)
    ):
        shape = torch.Size((len(rows), *shape[1:]))
    return torch.empty(shape, dtype=dtype)


def _chunks(
    target: Tensor, whole: torch.Size, split: SplitTensor | None, *, rows: range | None
) -> Tensor:
    # `target` as the part that it is of a stored tensor of shape `whole`
    part = split if split is not None and tuple(whole) == split.layout.shape else None
    everything = whole if part is None else torch.Size(part.local_shape)
    if rows is None or isinstance(target, DTensor) or target.shape == everything:
        chunks: Tensor = chunks_of(target, part)
        return chunks
    return rows_of_tensor(target, rows=rows, whole=whole, split=part)


def _read(
    folder: ShardFolder,
    targets: dict[str, Any],
    planner_class: type[DefaultLoadPlanner] = DefaultLoadPlanner,
) -> None:
    # Fill `targets`, on this rank alone
    if not targets:
        return
    from lightning_topt.execution.checkpoint_files import ShardReader  # noqa: PLC0415  (resumed)

    # Without communication: each rank reads the chunks that it needs.
    planner = planner_class(flatten_state_dict=False, flatten_sharded_tensors=False)
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", message="torch.distributed is disabled, unavailable or uninitialized"
        )
        try:
            load(targets, storage_reader=ShardReader(folder), planner=planner, no_dist=True)
        except CheckpointException as error:
            # what went wrong, rather than on which rank: there is one
            raise next(iter(error.failures.values()))[0] from None


def read_tensors(folder: ShardFolder, keys: Iterable[str]) -> dict[str, Tensor]:
    """Return tensors by their keys, unsharded."""
    known = stored_tensors(folder)
    targets = {key: _target(known[key], None) for key in keys}
    _read(folder, targets)
    return targets


def read_pickles(folder: ShardFolder, keys: Sequence[str]) -> State:
    """Return what other programs have pickled beside the tensors. Runs no code of it."""
    values: State = {}

    class Planner(DefaultLoadPlanner):
        def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
            values[read_item.dest_index.fqn] = torch.load(
                value, map_location="cpu", weights_only=True
            )

    _read(folder, dict.fromkeys(keys), Planner)
    return values


# ---- parts of tensors ----------------------------------------------------------------------------


class TensorChunks(Tensor):
    """The indices `spans` of a tensor of shape `whole`, in the memory of `local`.

    The form that torch.distributed.checkpoint takes: its interface is that of
    `torch.distributed._checkpointable._Checkpointable`, which DTensor has as well. A DTensor is
    divided evenly and in one piece. An optimizer step that is shared by its costs is not, and
    slices along tensor axes may be of several parts.
    """

    spans: Spans
    whole: torch.Size

    # Operators see the local tensor, as in torch's own subclasses.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

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
        """Return the shape of the full tensor."""
        return self.whole if dim is None else self.whole[dim]

    def _parts(self) -> dict[torch.Size, tuple[Span, ...]]:
        # The parts by their offsets in the full tensor
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
        # Views of the local memory: reading writes into it.
        local = self.local
        for dim, span in enumerate(parts[index.offset]):
            local = local.narrow(dim, span.local, span.length)
        return local


def rows_of_tensor(
    local: Tensor, *, rows: range, whole: Sequence[int], split: SplitTensor | None = None
) -> TensorChunks:
    """Return `local` as these `rows` of a tensor of shape `whole`.

    Where it is `split`, the rows are those of this rank's slice.
    """
    spans = [(Span(0, 0, size),) for size in whole] if split is None else split.spans
    return TensorChunks(
        local, spans=[narrowed(spans[0], rows.start, len(rows)), *spans[1:]], whole=whole
    )


def chunks_of(value: object, split: SplitTensor | None) -> Any:
    """Return a slice that is `split`, or a shard of one, as the chunks of the tensor that it is.

    Other values are returned as they are. A fake tensor is, too: it cannot be of a class more, and
    there is nothing in it to write.
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
    # a shard of a slice
    return _shard_of(value, split.spans, split.layout.shape)


def chunks_of_shard(value: DTensor) -> TensorChunks:
    """Return a shard as the chunk that it is of its full tensor."""
    return _shard_of(value, [(Span(0, 0, size),) for size in value.shape], value.shape)


def _shard_of(value: DTensor, spans: Spans, whole: Sequence[int]) -> TensorChunks:
    # Narrow the spans of what was divided to those of the shard.
    narrow = list(spans)
    (shard,) = value.__create_chunk_list__()
    for dim, (offset, size) in enumerate(zip(shard.offsets, shard.sizes, strict=True)):
        narrow[dim] = narrowed(narrow[dim], offset, size)
    return TensorChunks(value.to_local(), spans=narrow, whole=whole)

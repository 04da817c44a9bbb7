"""Checkpoints as a folder: every rank writes what it keeps, and reads what it is to keep.

    save_sharded(path, module=..., optimizers=[...], rest=...)     # all ranks
    checkpoint = open_sharded(path, rest)                           # lazy: read when asked for
    checkpoint = read_sharded_checkpoint(path)                      # as one process has it

    in the folder                                    what
    ``module.<name>``                                tensors, in torch.distributed.checkpoint's
    ``optimizers.<number>.<index>.<name>``           files; a rank writes the chunks of a tensor
    ``exchange.<position>.<kind>.<name>``            that it keeps (`TensorChunks`)
    `REST`                                           whatever is no tensor

World size and plan may change between writing and reading. `StoredModule`, `StoredOptimizer` and
`StoredExchange` are the states of an open folder: mappings that read an entry when it is asked for,
each rank what it is to keep.
"""

from __future__ import annotations

import itertools
import os
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor

from lightning_topt.optim.pieces import num_rows
from lightning_topt.techniques.tensor_parallel.layout import Span, narrowed
from lightning_topt.techniques.tensor_parallel.split_parameters import SplitTensor

State = dict[str, Any]
Spans = Sequence[Sequence[Span]]  # by dim
REST = "trainer_state.pt"
_OTHERS = "sharded_checkpoint"  # key in REST of what is no tensor in the states
# where checkpoints have the state of the gradient exchange
EXCHANGE_AT = ("lightning_topt", "gradient_exchange")
_METADATA = ".metadata"  # torch.distributed.checkpoint's


def holds_shards(path: str | os.PathLike[str]) -> bool:
    """Return whether `path` is a folder that `save_sharded` wrote."""
    return (Path(path) / REST).is_file() and (Path(path) / _METADATA).is_file()


def save_sharded(
    path: str | os.PathLike[str],
    *,
    module: Mapping[str, object],
    optimizers: Sequence[Mapping[str, Any]],
    exchange: Mapping[str, Any] | None = None,
    rest: Mapping[str, object],
    save_rest: Callable[[Any, Path], None] = torch.save,
) -> None:
    """Write the states that ranks keep, and rank 0's `rest`, to a folder. A collective call.

    What was at `path` is replaced once all is written.

    Args:
        path: on a file system that all ranks see.
        module: of `Engine.state_dict(full=False)`, as are `optimizers` and `exchange`.
        optimizers: a state for each.
        exchange: of a plan that compresses gradients.
        rest: whatever else is to be saved.
        save_rest: writes it to a file.
    """
    # Written beside the target, which it replaces at the end.
    rank, target = dist.get_rank(), Path(path)
    unfinished = target.with_name(target.name + ".unfinished")
    if rank == 0:
        target.parent.mkdir(parents=True, exist_ok=True)
        _remove(unfinished)
    # Tensors by their keys, everything else apart.
    tensors = {
        f"module.{name}": value for name, value in module.items() if isinstance(value, Tensor)
    }
    # What is no tensor: the module's first, then one entry for each optimizer.
    others: list[Any] = [
        {name: value for name, value in module.items() if not isinstance(value, Tensor)}
    ]
    for number, optimizer in enumerate(optimizers):
        plain: dict[int, State] = {}
        for index, values in optimizer["state"].items():
            for name, value in values.items():
                if isinstance(value, Tensor):
                    tensors[f"optimizers.{number}.{index}.{name}"] = value
                else:
                    plain.setdefault(index, {})[name] = value
        others.append({"values": plain, "param_groups": optimizer["param_groups"]})
    if exchange is not None:
        for kind, values in exchange["state"].items():
            for name, value in values.items():
                tensors[f"exchange.{exchange['position']}.{kind}.{name}"] = value
    # Some of it is with one rank only.
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.gather_object(others, gathered if rank == 0 else None)
    dist.barrier()  # the folder is empty
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    save(tensors, storage_writer=FileSystemWriter(unfinished), planner=planner)
    if rank == 0:
        joined = _joined(gathered)
        if exchange is not None:
            joined["exchange"] = {
                "step": exchange["step"],
                "method": exchange["method"],
                "ranks": exchange["holders"],
            }
        save_rest({**rest, _OTHERS: joined}, unfinished / REST)
        # At every moment there is a complete checkpoint at one of the names.
        old = target.with_name(target.name + ".old")
        _remove(old)
        if target.exists() or target.is_symlink():
            target.rename(old)
        unfinished.rename(target)
        _remove(old)
    dist.barrier()


def _joined(gathered: Sequence[object]) -> State:
    """Return what is no tensor, joined over ranks: some states are with one rank only."""
    modules, *optimizers = zip(*gathered, strict=True)
    return {
        "module": modules[0],
        "optimizers": [
            {
                "values": {
                    index: values
                    # of what several ranks have, the lowest rank's stays
                    for of_rank in reversed(ranks)
                    for index, values in of_rank["values"].items()
                },
                "param_groups": ranks[0]["param_groups"],
            }
            for ranks in optimizers
        ],
    }


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def open_sharded(path: str | os.PathLike[str], rest: Mapping[str, Any]) -> State:
    """Return a checkpoint in the plain form, whose states are read when they are asked for.

    ``["state_dict"]`` is a `StoredModule`, ``["optimizer_states"]`` a list of `StoredOptimizer`.
    `rest` is what the file `REST` of the folder has.
    """
    # What is no tensor is there already; tensors stay in the folder.
    others = rest[_OTHERS]
    checkpoint = {name: value for name, value in rest.items() if name != _OTHERS}
    checkpoint["state_dict"] = StoredModule(Path(path), others["module"])
    if others["optimizers"]:
        checkpoint["optimizer_states"] = [
            StoredOptimizer(Path(path), number, **of_optimizer)
            for number, of_optimizer in enumerate(others["optimizers"])
        ]
    if "exchange" in others:
        section, key = EXCHANGE_AT
        state = {
            **others["exchange"],
            "ranks": StoredExchange(Path(path), others["exchange"]["ranks"]),
        }
        checkpoint[section] = {**checkpoint.get(section, {}), key: state}
    return checkpoint


def read_sharded_checkpoint(path: str | os.PathLike[str], *, weights_only: bool = True) -> State:
    """Return the checkpoint in a folder as the plain file of one process, with CPU tensors.

    ``torch.save`` of it can be loaded under any strategy. `weights_only` as in ``torch.load``.
    Raises ValueError for a path without such a checkpoint.
    """
    if not holds_shards(path):
        raise ValueError(
            f"{str(path)!r} is not a checkpoint folder: it lacks {REST} or {_METADATA}"
        )
    rest = torch.load(Path(path) / REST, map_location="cpu", weights_only=weights_only)
    checkpoint = open_sharded(path, rest)
    checkpoint["state_dict"] = checkpoint["state_dict"].read()
    if "optimizer_states" in checkpoint:
        checkpoint["optimizer_states"] = [
            stored.whole() for stored in checkpoint["optimizer_states"]
        ]
    if exchange := checkpoint.get(EXCHANGE_AT[0], {}).get(EXCHANGE_AT[1]):
        exchange["ranks"] = list(exchange["ranks"])
    return checkpoint


# ---- stored states -------------------------------------------------------------------------------


class StoredModule(Mapping[str, Any]):
    """A module's state in a checkpoint folder; entries are read, unsharded, when asked for."""

    def __init__(self, path: Path, others: Mapping[str, object]) -> None:
        self._path, self._others = path, others
        self._known = {
            key.removeprefix("module."): m
            for key, m in _tensors(path).items()
            if key.startswith("module.")
        }

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
            f"module.{name}": chunks_of(target, split.get(name)) for name, target in targets.items()
        }
        _read(self._path, chunks)
        return targets | dict(self._others)

    def __getitem__(self, name: str) -> Any:
        if name in self._others:
            return self._others[name]
        targets = {f"module.{name}": _target(self._known[name], None)}
        _read(self._path, targets)
        return targets[f"module.{name}"]

    def __iter__(self) -> Iterator[str]:
        yield from (*self._known, *self._others)

    def __len__(self) -> int:
        return len(self._known) + len(self._others)


class StoredOptimizer(Mapping[str, Any]):
    """An optimizer's ``state_dict`` in a checkpoint folder.

    ``["state"]`` is read, unsharded, when it is asked for.
    """

    def __init__(
        self,
        path: Path,
        number: int,
        *,
        values: Mapping[int, State],
        param_groups: list[dict[str, Any]],
    ) -> None:
        self._path, self._values, self.param_groups = path, values, param_groups
        # keys as `save_sharded` writes them
        prefix = f"optimizers.{number}."
        self._known = {
            key: metadata for key, metadata in _tensors(path).items() if key.startswith(prefix)
        }

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
        indices = {*self._values, *(_index_and_name(key)[0] for key in self._known)}
        known = {index: parameters[index] for index in indices if index < len(parameters)}
        wanted = {
            index: rows(index) if rows is not None and index in known else None for index in indices
        }
        kept = {index for index, of_index in wanted.items() if of_index is None or len(of_index)}
        # Memory for each tensor, and the chunks of the full tensor that it is.
        targets, chunks, cut = {}, {}, split or {}
        for key, metadata in self._known.items():
            if (index := _index_and_name(key)[0]) in kept:
                target = _target(
                    metadata, known.get(index), rows=wanted[index], split=cut.get(index)
                )
                targets[key] = target
                chunks[key] = _chunks(target, metadata.size, cut.get(index), rows=wanted[index])
        _read(self._path, chunks)
        # values that are no tensors first, then the tensors that were read
        state = {index: dict(values) for index, values in self._values.items() if index in kept}
        for key, value in targets.items():
            index, name = _index_and_name(key)
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

    def __init__(self, path: Path, ranks: int) -> None:
        self._path, self._ranks = path, ranks
        self._known = {
            key: metadata for key, metadata in _tensors(path).items() if key.startswith("exchange.")
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
        _read(self._path, targets)
        state: dict[str, dict[str, Tensor]] = {}
        for key, value in targets.items():
            kind, name = key.removeprefix(prefix).split(".", 1)
            state.setdefault(kind, {})[name] = value
        return state


def _index_and_name(key: str) -> tuple[int, str]:
    """Split a key of an optimizer's tensor."""
    _, _, index, name = key.split(".", 3)
    return int(index), name


def _tensors(path: Path) -> dict[str, TensorStorageMetadata]:
    """Return what the folder says of its tensors, by key."""
    known = FileSystemReader(path).read_metadata().state_dict_metadata
    return {
        key: metadata
        for key, metadata in known.items()
        if isinstance(metadata, TensorStorageMetadata)
    }


def _target(
    metadata: TensorStorageMetadata,
    like: Any,
    *,
    rows: range | None = None,
    split: SplitTensor | None = None,
) -> Tensor:
    """Return memory for what this rank keeps of a stored tensor."""
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
    """Return `target` as the part that it is of a stored tensor of shape `whole`."""
    part = split if split is not None and tuple(whole) == split.layout.shape else None
    everything = whole if part is None else torch.Size(part.local_shape)
    if rows is None or isinstance(target, DTensor) or target.shape == everything:
        chunks: Tensor = chunks_of(target, part)
        return chunks
    return rows_of_tensor(target, rows=rows, whole=whole, split=part)


def _read(path: Path, targets: dict[str, Any]) -> None:
    """Fill `targets`, on this rank alone."""
    # Without communication: each rank reads the chunks that it needs.
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", message="torch.distributed is disabled, unavailable or uninitialized"
        )
        load(targets, storage_reader=FileSystemReader(path), planner=planner, no_dist=True)


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
        """Return the shape of the full tensor."""
        return self.whole if dim is None else self.whole[dim]

    def _parts(self) -> dict[torch.Size, tuple[Span, ...]]:
        """Return the parts by their offsets in the full tensor."""
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
    # A shard of a slice: narrow the spans of the slice to those of the shard.
    spans, local = list(split.spans), value.to_local()
    (shard,) = value.__create_chunk_list__()  # type: ignore[no-untyped-call]
    for dim, (offset, size) in enumerate(zip(shard.offsets, shard.sizes, strict=True)):
        spans[dim] = narrowed(spans[dim], offset, size)
    return TensorChunks(local, spans=spans, whole=split.layout.shape)

"""States of modules and optimizers: in full form, in checkpoint folders, and the parts of ranks.

    module_state, load_module_state                        a module's
    gather_parameter_states, place_optimizer_state         an optimizer's
    follow_parameters                                      an optimizer over other parameters
    StoredModule, StoredOptimizer, StoredExchange          in an open checkpoint folder
    TensorChunks                                           which part of a tensor a rank has

Full form: plain tensors under plain keys, whatever plan the run has. `gather_*` are collective
calls that leave the full state on rank 0 (CPU tensors) and an empty dict elsewhere. `place_*` need
no communication: every rank has read the full state and keeps its part. Tensors are in shards
(DTensors), in slices along tensor axes (`split`), or in shards of slices.

Stored states are mappings that read an entry when it is asked for, each rank what it is to keep.
World size and plan may change between writing and reading.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import is_fake
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer

from lightning_topt.optim.full_state import laid_out, parameters_of
from lightning_topt.optim.pieces import num_rows
from lightning_topt.optim.shard_step import on_mesh
from lightning_topt.techniques.tensor_parallel.layout import Span, narrowed
from lightning_topt.techniques.tensor_parallel.split_parameters import SplitTensor

if TYPE_CHECKING:
    from lightning_topt.execution.checkpoint_files import ShardFolder

State = dict[str, Any]
Spans = Sequence[Sequence[Span]]  # by dim


# ---- modules -------------------------------------------------------------------------------------


def module_state(module: nn.Module, split: Mapping[str, SplitTensor], *, full: bool) -> State:
    """Return a module's state: `full` on rank 0, or this rank's part of it."""
    state = module.state_dict()
    if full:
        return gather_values(state, split, wanted=dist.get_rank() == 0)
    return {name: chunks_of(value, split.get(name)) for name, value in state.items()}


def load_module_state(
    module: nn.Module,
    state: Mapping[str, object],
    split: Mapping[str, SplitTensor] | None,
    *,
    strict: bool,
) -> None:
    """Load a full state, or a stored one, of which this rank's part is read.

    `split` None: the module is unsharded.
    """
    # Its DTensors say which shards this rank keeps.
    own = module.state_dict()
    if isinstance(state, StoredModule):
        state = state.read(like=own, split=split)
    module.load_state_dict(
        state if split is None else place_module_state(state, own, split), strict=strict
    )


@torch.no_grad()
def gather_values(
    values: Mapping[str, object], split: Mapping[str, SplitTensor | None], *, wanted: bool
) -> State:
    """Return the full form of `values` in host memory, where they are `wanted`.

    A collective call: every rank takes part in gathering.
    """
    gathered: State = {}
    for name, value in values.items():
        full = _full(value, split.get(name))
        if wanted:
            gathered[name] = full.cpu() if isinstance(full, Tensor) else full
    return gathered


def place_module_state(
    state: Mapping[str, object],
    module_state: Mapping[str, object],
    split: Mapping[str, SplitTensor],
) -> State:
    """Return the entries of full `state`, placed like those of a module's own `module_state`."""
    return {
        name: place_like(_own(value, split.get(name)), module_state.get(name))
        for name, value in state.items()
    }


# ---- optimizers ----------------------------------------------------------------------------------


def gather_parameter_states(
    states: Iterable[tuple[int, State]],
    split: Mapping[int, SplitTensor],
    *,
    everywhere: bool = False,
) -> dict[int, State]:
    """Return the full form of an optimizer's states by parameter index, gathered one by one.

    On rank 0, or `everywhere`. A collective call.
    """
    wanted = everywhere or dist.get_rank() == 0
    gathered: dict[int, State] = {}
    for index, values in states:
        full = gather_values(values, dict.fromkeys(values, split.get(index)), wanted=wanted)
        if wanted:
            gathered[index] = full
    return gathered


def place_optimizer_state(
    optimizer: Optimizer,
    state: Mapping[str, Any],
    split: Mapping[int, SplitTensor],
    *,
    replicated: Collection[int] = (),
) -> State:
    """Return the part of full `state` that this rank keeps of an optimizer's state.

    No shards are made of the state of parameters that are `replicated`, by index.
    """
    parameters = dict(enumerate(parameters_of(optimizer)))
    placed = {
        index: {
            key: place_like(
                _own(value, split.get(index)),
                None
                if index in replicated and isinstance(parameters[index], DTensor)
                else parameters[index],
            )
            for key, value in values.items()
        }
        for index, values in state["state"].items()
    }
    return {**state, "state": placed}


def follow_parameters(
    optimizer: Optimizer, replaced: Mapping[Tensor, Tensor], split: Mapping[Tensor, SplitTensor]
) -> None:
    """Make an optimizer update the parameters that `replaced` has in the place of its own.

    Its state follows; full state of parameters that are `split` is cut.
    """
    for group in optimizer.param_groups:
        group["params"][:] = [replaced.get(parameter, parameter) for parameter in group["params"]]
    # Keys of the state are parameters: put it in again under the new ones.
    state = dict(optimizer.state)
    optimizer.state.clear()
    for parameter, values in state.items():
        target = replaced.get(parameter, parameter)
        own = {key: _own(value, split.get(parameter)) for key, value in values.items()}
        optimizer.state[target] = {key: place_like(value, target) for key, value in own.items()}


# ---- one value -----------------------------------------------------------------------------------


def _full(value: object, split: SplitTensor | None) -> Any:
    # A value without shards and slices. A collective call where there are some.
    # Shards first, since slices are cut into shards; then slices.
    full = on_mesh(value).full_tensor() if isinstance(value, DTensor) else value
    if split is None or not isinstance(full, Tensor) or tuple(full.shape) != split.local_shape:
        return full
    return split.whole(full)


def _own(value: Any, split: SplitTensor | None) -> Any:
    # This rank's slice of a full tensor that is `split`; else `value`
    is_full = isinstance(value, Tensor) and split and tuple(value.shape) == split.layout.shape
    return split.own(value) if is_full and split is not None else value


def place_like(value: object, target: object) -> Any:
    """Return a full value with the placements of `target`, a DTensor, or with its strides."""
    if not isinstance(target, DTensor):
        return laid_out(value, target) if isinstance(target, Tensor) else value
    if not isinstance(value, Tensor) or value.shape != target.shape:
        return value  # a wrong shape is load_state_dict's to report
    if isinstance(value, DTensor):
        return value
    # Fused kernels take equal strides for granted, and shards of parameters are contiguous. The
    # dtype stays: 8-bit optimizers have states of integers, in the shape of the parameter.
    value = value.to(target.device_mesh.device_type).contiguous()
    return distribute_tensor(value, target.device_mesh, target.placements, src_data_rank=None)


# ---- in a checkpoint folder ----------------------------------------------------------------------


class StoredModule(Mapping[str, Any]):
    """A module's state in a checkpoint folder; entries are read, unsharded, when asked for.

    `others` are its values that are no tensors.
    """

    def __init__(self, folder: ShardFolder, others: Mapping[str, object]) -> None:
        self._folder, self._others = folder, others
        self._known = stored_tensors(folder, "module.")

    @property
    def tensors(self) -> dict[str, tuple[torch.dtype, torch.Size]]:
        """The dtype and shape of each tensor, by name."""
        return {name: (of.properties.dtype, of.size) for name, of in self._known.items()}

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
        _read(self._folder, chunks)
        return targets | dict(self._others)

    def __getitem__(self, name: str) -> Any:
        if name in self._others:
            return self._others[name]
        target = {f"module.{name}": _target(self._known[name], None)}
        _read(self._folder, target)
        return target[f"module.{name}"]

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
    """

    def __init__(
        self,
        folder: ShardFolder,
        entries: Mapping[str, tuple[int, str]],
        *,
        values: Mapping[int, State],
        param_groups: list[dict[str, Any]],
    ) -> None:
        self._folder, self._entries, self._values = folder, entries, values
        self.param_groups = param_groups
        known = stored_tensors(folder)
        self._known = {key: known[key] for key in entries}

    def read(
        self,
        parameters: Sequence[Tensor] = (),
        *,
        rows: Callable[[int], range] | None = None,
        split: Mapping[int, SplitTensor] | None = None,
    ) -> State:
        """Return the ``state_dict`` as this rank keeps it; without arguments that of one process.

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
        return self.param_groups if name == "param_groups" else self.read()[name]

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

    def __len__(self) -> int:
        return self._ranks

    def __getitem__(self, position: Any) -> Any:
        if not 0 <= position < self._ranks:
            raise IndexError(position)
        prefix = f"exchange.{position}."
        known = stored_tensors(self._folder, prefix)
        targets = {key: _target(metadata, None) for key, metadata in known.items()}
        _read(self._folder, {f"{prefix}{key}": target for key, target in targets.items()})
        state: dict[str, dict[str, Tensor]] = {}
        for key, value in targets.items():
            kind, name = key.split(".", 1)
            state.setdefault(kind, {})[name] = value
        return state


def stored_tensors(folder: ShardFolder, prefix: str = "") -> dict[str, TensorStorageMetadata]:
    """Return what the folder says of tensors whose keys have this prefix, by the rest of these."""
    return {
        key.removeprefix(prefix): metadata
        for key, metadata in folder.metadata.state_dict_metadata.items()
        if isinstance(metadata, TensorStorageMetadata) and key.startswith(prefix)
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
    target: Tensor, full_shape: torch.Size, split: SplitTensor | None, *, rows: range | None
) -> Tensor:
    # `target` as the part that it is of a stored tensor of shape `full_shape`
    part = split if split is not None and tuple(full_shape) == split.layout.shape else None
    everything = full_shape if part is None else torch.Size(part.local_shape)
    if rows is None or isinstance(target, DTensor) or target.shape == everything:
        chunks: Tensor = chunks_of(target, part)
        return chunks
    return rows_of_tensor(target, rows=rows, full_shape=full_shape, split=part)


def _read(folder: ShardFolder, targets: dict[str, Any]) -> None:
    # Fill `targets`, on this rank alone
    if not targets:
        return
    from lightning_topt.execution.checkpoint_files import ShardReader  # noqa: PLC0415  (resumed)

    # Without communication: each rank reads the chunks that it needs.
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", message="torch.distributed is disabled, unavailable or uninitialized"
        )
        try:
            load(targets, storage_reader=ShardReader(folder), planner=planner, no_dist=True)
        except CheckpointException as error:
            # what went wrong, rather than on which rank: there is one
            raise next(iter(error.failures.values()))[0] from None


# ---- parts of tensors ----------------------------------------------------------------------------


class TensorChunks(Tensor):
    """The indices `spans` of a tensor of shape `full_shape`, in the memory of `local`.

    The form that torch.distributed.checkpoint takes: its interface is that of
    `torch.distributed._checkpointable._Checkpointable`, which DTensor has as well. A DTensor is
    divided evenly and in one piece. An optimizer step that is shared by its costs is not, and
    slices along tensor axes may be of several parts.
    """

    spans: Spans
    full_shape: torch.Size

    # Operators see the local tensor, as in torch's own subclasses.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, local: Tensor, *, spans: Spans, full_shape: Sequence[int]) -> TensorChunks:
        """Make it of `local`, which stays what it is."""
        chunks: TensorChunks = Tensor._make_subclass(cls, local.detach())
        chunks.spans, chunks.full_shape = spans, torch.Size(full_shape)
        return chunks

    @property
    def local(self) -> Tensor:
        """The part as a plain tensor, in the same memory."""
        return self.as_subclass(Tensor)

    def size(self, dim: int | None = None) -> Any:  # what checkpoints compare
        """Return the shape of the full tensor."""
        return self.full_shape if dim is None else self.full_shape[dim]

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
                tensor_data=TensorWriteData(
                    chunk=chunk, properties=properties, size=self.full_shape
                ),
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
    local: Tensor, *, rows: range, full_shape: Sequence[int], split: SplitTensor | None = None
) -> TensorChunks:
    """Return `local` as these `rows` of a tensor of shape `full_shape`.

    Where it is `split`, the rows are those of this rank's slice.
    """
    spans = [(Span(0, 0, size),) for size in full_shape] if split is None else split.spans
    return TensorChunks(
        local, spans=[narrowed(spans[0], rows.start, len(rows)), *spans[1:]], full_shape=full_shape
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
        return TensorChunks(value, spans=split.spans, full_shape=split.layout.shape)
    # A shard of a slice: narrow the spans of what was divided to those of the shard.
    spans = list(split.spans)
    (shard,) = value.__create_chunk_list__()
    for dim, (offset, size) in enumerate(zip(shard.offsets, shard.sizes, strict=True)):
        spans[dim] = narrowed(spans[dim], offset, size)
    return TensorChunks(value.to_local(), spans=spans, full_shape=split.layout.shape)

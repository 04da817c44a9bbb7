"""States in a checkpoint folder are mappings that read an entry when it is asked for, each rank
what it is to keep.

`sharded_checkpoint` says what is in the folder, and under which keys.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.tensor import DTensor

from lightning_topt.execution.tensor_chunks import chunks_of, rows_of_tensor
from lightning_topt.optim.pieces import num_rows
from lightning_topt.techniques.tensor_parallel.split_parameters import SplitTensor

State = dict[str, Any]


class StoredModule(Mapping[str, Any]):
    """A module's state in a checkpoint folder; an entry is read, whole, when it is asked for."""

    def __init__(self, path: Path, others: Mapping[str, Any]) -> None:
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
        """Return all entries: of what `split` says is cut this rank's slice; in shards what is a
        DTensor in `like`.
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
    """An optimizer's ``state_dict`` in a checkpoint folder; ``["state"]`` is read, whole, when it
    is asked for.
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
        """Return the state of parameters, by index: in shards where they are, of the others the
        `rows` that are wanted.

        Of parameters that are `split` this rank's slices, or rows of these.
        """
        indices = {*self._values, *(_index_and_name(key)[0] for key in self._known)}
        known = {index: parameters[index] for index in indices if index < len(parameters)}
        wanted = {
            index: rows(index) if rows is not None and index in known else None for index in indices
        }
        kept = {index for index, of_index in wanted.items() if of_index is None or len(of_index)}
        targets, chunks, cut = {}, {}, split or {}
        for key, metadata in self._known.items():
            if (index := _index_and_name(key)[0]) in kept:
                target = _target(
                    metadata, known.get(index), rows=wanted[index], split=cut.get(index)
                )
                targets[key] = target
                chunks[key] = _chunks(target, metadata.size, cut.get(index), rows=wanted[index])
        _read(self._path, chunks)
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
    """A `StoredExchange` is what each rank of a gradient exchange held back, in a checkpoint
    folder; an entry is read when it is asked for.
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
    _, _, index, name = key.split(".", 3)
    return int(index), name


def _tensors(path: Path) -> dict[str, TensorStorageMetadata]:
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
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", message="torch.distributed is disabled, unavailable or uninitialized"
        )
        load(targets, storage_reader=FileSystemReader(path), planner=planner, no_dist=True)

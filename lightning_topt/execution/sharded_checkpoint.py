"""Checkpoints as a folder: every rank writes what it keeps, and reads what it is to keep under any plan and world size.

Tensors are in torch.distributed.checkpoint's files, under ``module.<name>``, ``optimizers.<number>.<index>.<name>`` and
``exchange.<position>.<kind>.<name>``, whatever is no tensor beside them in `REST`. `read_sharded_checkpoint` gives what the
plain file of one process has.
"""

from __future__ import annotations

import os
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor

from lightning_topt.execution.tensor_chunks import chunks_of, rows_of_tensor
from lightning_topt.optim.pieces import num_rows
from lightning_topt.techniques.tensor_parallel.split_parameters import SplitTensor

State = dict[str, Any]
REST = "trainer_state.pt"
_OTHERS = "sharded_checkpoint"  # key in REST of what is no tensor in the states
EXCHANGE_AT = ("lightning_topt", "gradient_exchange")  # where checkpoints have the state of the gradient exchange
_METADATA = ".metadata"  # torch.distributed.checkpoint's


def is_sharded_checkpoint(path: str | os.PathLike[str]) -> bool:
    """Return whether `path` is a folder that `save_sharded` wrote."""
    return (Path(path) / REST).is_file() and (Path(path) / _METADATA).is_file()


def save_sharded(
    path: str | os.PathLike[str],
    *,
    module: Mapping[str, Any],
    optimizers: Sequence[Mapping[str, Any]],
    exchange: Mapping[str, Any] | None = None,
    rest: Mapping[str, Any],
    save_rest: Callable[[Any, Path], None] = torch.save,
) -> None:
    """Write the states that ranks keep (`Engine.state_dict` without `full`), and rank 0's `rest`, to the folder `path`.

    A collective call; `path` is on a file system that all ranks see. What was at `path` is replaced once all is written.
    """
    rank, target = dist.get_rank(), Path(path)
    unfinished = target.with_name(target.name + ".unfinished")
    if rank == 0:
        target.parent.mkdir(parents=True, exist_ok=True)
        _remove(unfinished)
    tensors = {f"module.{name}": value for name, value in module.items() if isinstance(value, Tensor)}
    others: list[Any] = [{name: value for name, value in module.items() if not isinstance(value, Tensor)}]
    for number, optimizer in enumerate(optimizers):
        plain: dict[int, State] = {}
        for index, values in optimizer["state"].items():
            for name, value in values.items():
                if isinstance(value, Tensor):
                    tensors[f"optimizers.{number}.{index}.{name}"] = value
                else:
                    plain.setdefault(index, {})[name] = value
        others.append({"values": plain, "param_groups": optimizer["param_groups"]})
    for kind, values in (exchange or {"state": {}})["state"].items():
        assert exchange is not None
        tensors.update({f"exchange.{exchange['position']}.{kind}.{name}": value for name, value in values.items()})
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.gather_object(others, gathered if rank == 0 else None)
    dist.barrier()  # the folder is empty
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    save(tensors, storage_writer=FileSystemWriter(unfinished), planner=planner)
    if rank == 0:
        joined = _joined(gathered) | ({} if exchange is None else {"exchange": _outline(exchange)})
        save_rest({**rest, _OTHERS: joined}, unfinished / REST)
        _replace(target, unfinished)
    dist.barrier()


def open_sharded(path: str | os.PathLike[str], rest: Mapping[str, Any]) -> State:
    """Return a checkpoint in the plain form, from its folder and what `REST` there has: states are read when asked for.

    ``["state_dict"]`` is a `StoredModule`, ``["optimizer_states"]`` a list of `StoredOptimizer`.
    """
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
        state = {**others["exchange"], "ranks": StoredExchange(Path(path), others["exchange"]["ranks"])}
        checkpoint[section] = {**checkpoint.get(section, {}), key: state}
    return checkpoint


def read_sharded_checkpoint(path: str | os.PathLike[str], *, weights_only: bool = True) -> State:
    """Return the checkpoint in the folder `path` as the plain file of one process has it, with CPU tensors.

    ``torch.save`` of it can be loaded under any strategy. `weights_only` as in ``torch.load``. Raises ValueError for a path
    without such a checkpoint.
    """
    if not is_sharded_checkpoint(path):
        raise ValueError(f"{str(path)!r} is not a checkpoint folder: it lacks {REST} or {_METADATA}")
    rest = torch.load(Path(path) / REST, map_location="cpu", weights_only=weights_only)
    checkpoint = open_sharded(path, rest)
    checkpoint["state_dict"] = checkpoint["state_dict"].read()
    if "optimizer_states" in checkpoint:
        checkpoint["optimizer_states"] = [stored.whole() for stored in checkpoint["optimizer_states"]]
    if exchange := checkpoint.get(EXCHANGE_AT[0], {}).get(EXCHANGE_AT[1]):
        exchange["ranks"] = list(exchange["ranks"])
    return checkpoint


class StoredModule(Mapping[str, Any]):
    """A module's state in a checkpoint folder; an entry is read, whole, when it is asked for."""

    def __init__(self, path: Path, others: Mapping[str, Any]) -> None:
        self._path, self._others = path, others
        self._known = {key.removeprefix("module."): m for key, m in _tensors(path).items() if key.startswith("module.")}

    def read(self, like: Mapping[str, Any] | None = None, *, split: Mapping[str, SplitTensor] | None = None) -> State:
        """Return all entries: of what `split` says is cut this rank's slice; in shards what is a DTensor in `like`."""
        like, split = like or {}, split or {}
        targets = {
            name: _target(metadata, like.get(name), split=split.get(name)) for name, metadata in self._known.items()
        }
        chunks = {f"module.{name}": chunks_of(target, split.get(name)) for name, target in targets.items()}
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
    """An optimizer's ``state_dict`` in a checkpoint folder; ``["state"]`` is read, whole, when it is asked for."""

    def __init__(
        self, path: Path, number: int, *, values: Mapping[int, State], param_groups: list[dict[str, Any]]
    ) -> None:
        self._path, self._values, self.param_groups = path, values, param_groups
        prefix = f"optimizers.{number}."
        self._known = {key: metadata for key, metadata in _tensors(path).items() if key.startswith(prefix)}

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
        """Return the state of parameters, by index: in shards where they are, of the others the `rows` that are wanted.

        Of parameters that are `split` this rank's slices, or rows of these.
        """
        indices = {*self._values, *(_index_and_name(key)[0] for key in self._known)}
        known = {index: parameters[index] for index in indices if index < len(parameters)}
        wanted = {index: rows(index) if rows is not None and index in known else None for index in indices}
        kept = {index for index, of_index in wanted.items() if of_index is None or len(of_index)}
        targets, chunks, cut = {}, {}, split or {}
        for key, metadata in self._known.items():
            if (index := _index_and_name(key)[0]) in kept:
                target = _target(metadata, known.get(index), rows=wanted[index], split=cut.get(index))
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
    """A `StoredExchange` is what each rank of a gradient exchange held back, in a checkpoint folder; an entry is read when it
    is asked for.
    """

    def __init__(self, path: Path, ranks: int) -> None:
        self._path, self._ranks = path, ranks
        self._known = {key: metadata for key, metadata in _tensors(path).items() if key.startswith("exchange.")}

    def __len__(self) -> int:
        return self._ranks

    def __getitem__(self, position: Any) -> Any:
        if not 0 <= position < self._ranks:
            raise IndexError(position)
        prefix = f"exchange.{position}."
        targets = {key: _target(metadata, None) for key, metadata in self._known.items() if key.startswith(prefix)}
        _read(self._path, targets)
        state: dict[str, dict[str, Tensor]] = {}
        for key, value in targets.items():
            kind, name = key.removeprefix(prefix).split(".", 1)
            state.setdefault(kind, {})[name] = value
        return state


def _outline(exchange: Mapping[str, Any]) -> State:
    return {"step": exchange["step"], "method": exchange["method"], "ranks": exchange["holders"]}


def _joined(gathered: Sequence[Any]) -> State:
    """Return what is no tensor, of all ranks: some states are with one rank only."""
    modules, *optimizers = zip(*gathered, strict=True)
    return {
        "module": modules[0],
        "optimizers": [
            {
                "values": {index: values for of_rank in reversed(ranks) for index, values in of_rank["values"].items()},
                "param_groups": ranks[0]["param_groups"],
            }
            for ranks in optimizers
        ],
    }


def _index_and_name(key: str) -> tuple[int, str]:
    _, _, index, name = key.split(".", 3)
    return int(index), name


def _tensors(path: Path) -> dict[str, TensorStorageMetadata]:
    known = FileSystemReader(path).read_metadata().state_dict_metadata
    return {key: metadata for key, metadata in known.items() if isinstance(metadata, TensorStorageMetadata)}


def _target(
    metadata: TensorStorageMetadata, like: Any, *, rows: range | None = None, split: SplitTensor | None = None
) -> Tensor:
    """Return memory for what this rank keeps of a stored tensor."""
    dtype, shape = metadata.properties.dtype, metadata.size
    if split is not None and tuple(shape) == split.layout.shape:
        shape = torch.Size(split.local_shape)
    if isinstance(like, DTensor) and like.shape == shape:
        return torch.empty_like(like, dtype=dtype, requires_grad=False)
    if rows is not None and isinstance(like, Tensor) and like.shape == shape and 0 < len(rows) < num_rows(like):
        shape = torch.Size((len(rows), *shape[1:]))
    return torch.empty(shape, dtype=dtype)


def _chunks(target: Tensor, whole: torch.Size, split: SplitTensor | None, *, rows: range | None) -> Tensor:
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
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
        load(targets, storage_reader=FileSystemReader(path), planner=planner, no_dist=True)


def _replace(target: Path, finished: Path) -> None:
    """At every moment there is a whole checkpoint at one of the names."""
    old = target.with_name(target.name + ".old")
    _remove(old)
    if target.exists() or target.is_symlink():
        target.rename(old)
    finished.rename(target)
    _remove(old)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)

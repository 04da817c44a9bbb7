"""Checkpoints as a folder: every rank writes what it keeps, and reads what it is to keep.

    save_sharded(path, module=..., optimizers=[...], rest=...)     # all ranks
    checkpoint = open_sharded(path)                                 # lazy: read when asked for
    checkpoint = read_sharded_checkpoint(path)                      # as one process has it

    in the folder                                    what
    `MANIFEST`                                       names the folder of the files, and has their
                                                     checksums
    ``shards.<random>/``                             the files of one save:
        ``module.<name>``                            tensors, in torch.distributed.checkpoint's
        ``optimizers.<number>.<index>.<name>``       files; a rank writes the chunks of a tensor
        ``exchange.<position>.<kind>.<name>``        that it keeps (`TensorChunks`)
        `REST`                                       whatever is no tensor

A save writes a new folder of files, then replaces the manifest, then removes the files before: at
every moment the manifest names a complete checkpoint. Folders of releases before have the files
themselves, without a manifest; they are read without checksums. What is no such folder is
renamed (`_beside`) before a new one takes its name.

World size and plan may change between writing and reading. `StoredModule`, `StoredOptimizer` and
`StoredExchange` are the states of an open folder: mappings that read an entry when it is asked for,
each rank what it is to keep.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import os
import pickle
import secrets
import shutil
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any, ClassVar, NoReturn

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import (
    FileSystemReader,
    FileSystemWriter,
    _StorageInfo,
)
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor
from torch.futures import Future

from lightning_topt.optim.pieces import num_rows
from lightning_topt.techniques.tensor_parallel.layout import Span, narrowed
from lightning_topt.techniques.tensor_parallel.split_parameters import SplitTensor

State = dict[str, Any]
Spans = Sequence[Sequence[Span]]  # by dim
# Of a file, by the first byte of an entry: how many bytes it has, and their XXH3.
Checksums = Mapping[str, Sequence[Any]]
MANIFEST = "checkpoint.json"
_FILES_IN = "shards."  # how the name of a folder of files begins
REST = "trainer_state.pt"
_OTHERS = "sharded_checkpoint"  # key in REST of what is no tensor in the states
# where checkpoints have the state of the gradient exchange
EXCHANGE_AT = ("lightning_topt", "gradient_exchange")
_METADATA = ".metadata"  # torch.distributed.checkpoint's
_VERSION = 1  # of the manifest
_BLOCK = 1 << 20  # bytes that are read at a time for a checksum
# The classes whose instances ``.metadata`` has, beside numbers, texts, containers and `_VALUES`.
_FILLED = (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
    _StorageInfo,
)


def holds_shards(path: str | os.PathLike[str]) -> bool:
    """Return whether `path` is a folder that `save_sharded` wrote."""
    folder = Path(path)
    if (folder / MANIFEST).is_file():  # as files of others may be called
        return any(folder.glob(f"{_FILES_IN}*"))
    return (folder / REST).is_file() and (folder / _METADATA).is_file()


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
    rank, target = dist.get_rank(), Path(path)
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
    # Rank 0 makes the folder that all write to.
    home, name = _on_first(lambda: _begin_folder(target))
    folder = target.with_name(home) / name
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    writer = _ShardWriter(folder)
    save(tensors, storage_writer=writer, planner=planner)
    written: list[Any] = [None] * dist.get_world_size()
    dist.gather_object(writer.checksums, written if rank == 0 else None)

    def finish() -> None:
        joined = _joined(gathered)
        if exchange is not None:
            joined["exchange"] = {
                "step": exchange["step"],
                "method": exchange["method"],
                "ranks": exchange["holders"],
            }
        save_rest({**rest, _OTHERS: joined}, folder / REST)
        _sync(folder / REST)
        checksums = {name: of_file for of_rank in written for name, of_file in of_rank.items()}
        checksums |= {name: _of_whole_file(folder / name) for name in (_METADATA, REST)}
        _commit(folder, target, checksums)

    _on_first(finish)


def replace_by_file(target: Path, write: Callable[[Path], None]) -> None:
    """Let a file, which ``write(path)`` writes, be where a folder of shards is now.

    The folder stays until the file is whole. Between two renamings there is neither under its name.
    """
    unfinished, old = _beside(target)
    _tidy([unfinished, old], but=target)
    write(unfinished)
    _sync(unfinished)
    target.rename(old)
    unfinished.rename(target)
    _sync(target.parent)
    _tidy([old], but=target)


def _on_first(action: Callable[[], Any]) -> Any:
    """Return what `action` returns on rank 0, on all ranks. A collective call.

    An error of it is raised on all ranks.
    """
    found, said, error = None, "", None
    if dist.get_rank() == 0:
        try:
            found = action()
        except Exception as raised:
            error, said = raised, f"{type(raised).__name__}: {raised}"
    of_first: list[Any] = [found, said]
    dist.broadcast_object_list(of_first)
    if error is not None:
        raise error
    found, said = of_first
    if said:
        raise RuntimeError(f"rank 0 could not save the checkpoint: {said}")
    return found


def _begin_folder(target: Path) -> tuple[str, str]:
    """Make an empty folder for the files of a save; return its parent's name and its own.

    It is in the checkpoint folder that is to be replaced; where there is none, in one beside it.
    """
    home, (unfinished, _) = target, _beside(target)
    # A kill may have come before the very last step.
    if holds_shards(unfinished) and not os.path.lexists(target):
        unfinished.rename(target)
    if target.is_symlink() or not holds_shards(target):
        home = unfinished
        _remove(home)
    else:
        # what a save left that was cut off; of a damaged manifest it is not known
        with contextlib.suppress(ValueError):
            _tidy(home.glob(f"{_FILES_IN}*"), but=ShardFolder.at(home).path)
    folder = home / f"{_FILES_IN}{secrets.token_hex(4)}"
    folder.mkdir(parents=True)
    return home.name, folder.name


def _beside(target: Path) -> tuple[Path, Path]:
    """Return the folder that is to be `target`, and what was there, while one replaces the other.

    Lightning takes what has a checkpoint's name in its own for a checkpoint.
    """
    name = xxhash.xxh3_64_hexdigest(os.fsencode(target.name))
    return target.with_name(f"{name}.unfinished"), target.with_name(f"{name}.old")


def _commit(folder: Path, target: Path, checksums: Mapping[str, Checksums]) -> None:
    """Make the files in `folder` the checkpoint at `target`, and remove those that it had."""
    home, (unfinished, old) = folder.parent, _beside(target)
    for name in checksums:
        if not (folder / name).is_file():
            raise FileNotFoundError(
                f"{name} was written to {str(folder)!r}, and rank 0 does not find it there: all "
                "ranks must see one file system"
            )
    content = {"version": _VERSION, "folder": folder.name, "checksums": checksums}
    manifest, new = home / MANIFEST, home / f"{MANIFEST}.unfinished"
    new.write_text(json.dumps({"content": content, "checksum": _digest(content)}))
    _sync(new)
    _sync(folder)
    new.replace(manifest)
    _sync(home)
    # Nothing was there, or something else: no folder can replace that in one step.
    if home != target:
        if os.path.lexists(target):
            _remove(old)
            target.rename(old)
        home.rename(target)
        _sync(target.parent)
    before = [*target.glob("*.distcp"), target / _METADATA, target / REST]
    _tidy([*target.glob(f"{_FILES_IN}*"), *before, unfinished, old], but=target / folder.name)


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


def _tidy(paths: Iterable[Path], *, but: Path) -> None:
    """Remove `paths`, but one. What cannot be removed stays until the next save."""
    for path in [*paths]:
        if path != but:
            with contextlib.suppress(OSError):
                _remove(path)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _sync(path: Path) -> None:
    """Let the system write a file, or the names in a folder, to its disk."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError:
        if not path.is_dir():  # which not every file system can write by itself
            raise


def _load_plain(path: Path) -> State:
    plain: State = torch.load(path, map_location="cpu", weights_only=True)
    return plain


def open_sharded(
    path: str | os.PathLike[str], load_rest: Callable[[Path], State] = _load_plain
) -> State:
    """Return a checkpoint in the plain form, whose states are read when they are asked for.

    ``["state_dict"]`` is a `StoredModule`, ``["optimizer_states"]`` a list of `StoredOptimizer`.
    `load_rest` reads the file `REST`. Raises ValueError where a file is damaged.
    """
    # What is no tensor is read now; tensors stay in the folder.
    folder = ShardFolder.at(Path(path))
    folder.verify(REST)
    rest = load_rest(folder.path / REST)
    others = rest[_OTHERS]
    checkpoint = {name: value for name, value in rest.items() if name != _OTHERS}
    checkpoint["state_dict"] = StoredModule(folder, others["module"])
    if others["optimizers"]:
        checkpoint["optimizer_states"] = [
            StoredOptimizer(folder, number, **of_optimizer)
            for number, of_optimizer in enumerate(others["optimizers"])
        ]
    if "exchange" in others:
        section, key = EXCHANGE_AT
        state = {
            **others["exchange"],
            "ranks": StoredExchange(folder, others["exchange"]["ranks"]),
        }
        checkpoint[section] = {**checkpoint.get(section, {}), key: state}
    return checkpoint


def read_sharded_checkpoint(path: str | os.PathLike[str], *, weights_only: bool = True) -> State:
    """Return the checkpoint in a folder as the plain file of one process, with CPU tensors.

    ``torch.save`` of it can be loaded under any strategy. `weights_only` as in ``torch.load``: by
    default no file of the folder can run code.

    Raises:
        ValueError: there is no such checkpoint at `path`, or a file of it is damaged.
    """
    if not holds_shards(path):
        raise ValueError(
            f"{str(path)!r} is not a checkpoint folder: it lacks {MANIFEST} or {_FILES_IN}*"
        )
    checkpoint = open_sharded(
        path, lambda file: torch.load(file, map_location="cpu", weights_only=weights_only)
    )
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

    def __init__(self, folder: ShardFolder, others: Mapping[str, object]) -> None:
        self._folder, self._others = folder, others
        self._known = {
            key.removeprefix("module."): m
            for key, m in _tensors(folder).items()
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
        _read(self._folder, chunks)
        return targets | dict(self._others)

    def __getitem__(self, name: str) -> Any:
        if name in self._others:
            return self._others[name]
        targets = {f"module.{name}": _target(self._known[name], None)}
        _read(self._folder, targets)
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
        folder: ShardFolder,
        number: int,
        *,
        values: Mapping[int, State],
        param_groups: list[dict[str, Any]],
    ) -> None:
        self._folder, self._values, self.param_groups = folder, values, param_groups
        # keys as `save_sharded` writes them
        prefix = f"optimizers.{number}."
        self._known = {
            key: metadata for key, metadata in _tensors(folder).items() if key.startswith(prefix)
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
        _read(self._folder, chunks)
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

    def __init__(self, folder: ShardFolder, ranks: int) -> None:
        self._folder, self._ranks = folder, ranks
        self._known = {
            key: metadata
            for key, metadata in _tensors(folder).items()
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


def _index_and_name(key: str) -> tuple[int, str]:
    """Split a key of an optimizer's tensor."""
    _, _, index, name = key.split(".", 3)
    return int(index), name


def _tensors(folder: ShardFolder) -> dict[str, TensorStorageMetadata]:
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


def _read(folder: ShardFolder, targets: dict[str, Any]) -> None:
    """Fill `targets`, on this rank alone."""
    # Without communication: each rank reads the chunks that it needs.
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", message="torch.distributed is disabled, unavailable or uninitialized"
        )
        try:
            load(targets, storage_reader=_ShardReader(folder), planner=planner, no_dist=True)
        except CheckpointException as error:
            # what went wrong, rather than on which rank: there is one
            raise next(iter(error.failures.values()))[0] from None


# ---- files, and their checksums ------------------------------------------------------------------


@dataclass(frozen=True)
class ShardFolder:
    """The files of a checkpoint; `checksums` by file, None where they were saved without."""

    path: Path
    checksums: Mapping[str, Checksums] | None

    @staticmethod
    def at(path: Path) -> ShardFolder:
        """Return the files that the manifest in `path` names. Raises ValueError: it is damaged."""
        if not (path / MANIFEST).is_file():
            return ShardFolder(path, None)
        try:
            manifest = json.loads((path / MANIFEST).read_bytes())
            content = manifest["content"]
            undamaged = manifest["checksum"] == _digest(content)
            version, name = content["version"], PurePath(content["folder"]).name
        except (ValueError, LookupError, TypeError):
            undamaged = False
        if not undamaged or not name.startswith(_FILES_IN):
            _refuse(path / MANIFEST, "is damaged: it is not what was saved")
        if version > _VERSION:
            _refuse(path / MANIFEST, "was written by a newer release of lightning_topt")
        return ShardFolder(path / name, content["checksums"])

    @functools.cached_property
    def metadata(self) -> Metadata:
        """What ``.metadata`` has, read once. Raises ValueError where that is anything else."""
        self.verify(_METADATA)
        file = self.path / _METADATA
        try:
            with file.open("rb") as stream:
                metadata = _MetadataUnpickler(stream).load()
        # the bytes decide what is raised
        except Exception as error:
            _refuse(file, f"cannot be read: {error}")
        if not isinstance(metadata, Metadata):
            _refuse(file, f"cannot be read: it is a {type(metadata).__name__}")
        return metadata

    def verify(self, name: str, offset: int = 0) -> None:
        """Raise ValueError where an entry of a file is not what was saved."""
        file = self.path / name
        if PurePath(name).name != name or not file.is_file():
            _refuse(file, "is missing")
        if self.checksums is None:
            return
        size, digest = self.checksums.get(name, {}).get(str(offset), (0, None))
        if _file_digest(file, offset, size) != digest:
            _refuse(file, "is damaged: it is not what was saved")


def _refuse(file: Path, reason: str) -> NoReturn:
    raise ValueError(f"{file.name} of the checkpoint in {str(file.parent)!r} {reason}")


def _digest(content: object) -> str:
    """Return the checksum of a manifest's content."""
    return xxhash.xxh3_64_hexdigest(json.dumps(content, sort_keys=True).encode())


def _file_digest(path: Path, offset: int, size: int) -> str:
    """Return the checksum of `size` bytes of a file from `offset` on."""
    digest = xxhash.xxh3_64()
    with path.open("rb") as file:
        file.seek(offset)
        while block := file.read(min(_BLOCK, size)):
            digest.update(block)
            size -= len(block)
    return digest.hexdigest()


def _of_whole_file(path: Path) -> Checksums:
    size = path.stat().st_size
    return {"0": (size, _file_digest(path, 0, size))}


class _ShardWriter(FileSystemWriter):
    """Writes this rank's files, and then knows the `checksums` of what it wrote, by file."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._written_to = folder
        self.checksums: dict[str, dict[str, tuple[int, str]]] = {}

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write, and read back what was written."""
        written = super().write_data(plan, planner)
        for result in written.wait():
            at = result.storage_data
            digest = _file_digest(self._written_to / at.relative_path, at.offset, at.length)
            of_file = self.checksums.setdefault(at.relative_path, {})
            of_file[str(at.offset)] = at.length, digest
        return written


class _ShardReader(FileSystemReader):
    """Reads nothing that is not what was saved, and runs no code of the files."""

    def __init__(self, folder: ShardFolder) -> None:
        super().__init__(folder.path)
        self._folder = folder

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        """Return what ``.metadata`` has."""
        return self._folder.metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Verify each entry, then read it."""
        for index in {item.storage_index for item in plan.items}:
            at = self.storage_data[index]
            self._folder.verify(at.relative_path, at.offset)
        return super().read_data(plan, planner)


def _layout(name: str) -> torch.layout:
    return _LAYOUTS[name]


def _memory_format(*of: Any) -> _MEM_FORMAT_ENCODING:
    # Python 3.11 makes members of an enumeration of the class and a name, later ones of a value
    return _MEM_FORMAT_ENCODING[of[1]] if len(of) == 2 else _MEM_FORMAT_ENCODING(*of)


_LAYOUTS = {str(of): of for of in vars(torch).values() if isinstance(of, torch.layout)}
# What ``.metadata`` has, by module and name, beside `_FILLED`. Functions are of this module, so
# that they do no more than is written here.
_VALUES: dict[tuple[str, str], Any] = {
    **{("torch", name): of for name, of in vars(torch).items() if isinstance(of, torch.dtype)},
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): _layout,
    (_MEM_FORMAT_ENCODING.__module__, _MEM_FORMAT_ENCODING.__name__): _memory_format,
    ("builtins", "getattr"): _memory_format,
    **{(of.__module__, of.__name__): of for of in _FILLED},
}


class _MetadataUnpickler(pickle._Unpickler):
    """Makes the values that ``.metadata`` has, and no others.

    pickle itself would call anything, and set attributes of anything: of classes and functions,
    too. Its form in C cannot be kept from that.
    """

    stack: list[Any]  # pickle's

    def find_class(self, module: str, name: str) -> Any:
        """Return a class or function by its name. Raises UnpicklingError for another one."""
        if module.partition(".")[0] == "pathlib":  # of the folder that was written to
            return PurePath
        if (module, name) not in _VALUES:
            raise pickle.UnpicklingError(f"it has {module}.{name}, which would run code")
        return _VALUES[module, name]

    def load_build(self) -> None:
        """Set the attributes of an instance that was just made, and of nothing else."""
        state, made = self.stack.pop(), self.stack[-1]
        if type(made) not in _FILLED:
            raise pickle.UnpicklingError(f"it sets attributes of {made!r}")
        if isinstance(made, TensorProperties):
            TensorProperties.__setstate__(made, state)  # as torch has it
        else:
            made.__dict__.update(state)

    # without what other programs have registered with copyreg
    dispatch: ClassVar[dict[int, Any]] = {
        **{
            code: of
            for code, of in pickle._Unpickler.dispatch.items()
            if code not in pickle.EXT1 + pickle.EXT2 + pickle.EXT4
        },
        pickle.BUILD[0]: load_build,
    }


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
    (shard,) = value.__create_chunk_list__()
    for dim, (offset, size) in enumerate(zip(shard.offsets, shard.sizes, strict=True)):
        spans[dim] = narrowed(spans[dim], offset, size)
    return TensorChunks(local, spans=spans, whole=split.layout.shape)

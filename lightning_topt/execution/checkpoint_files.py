"""The files of a checkpoint folder, on a disk or in an object store.

    place = place_of("s3://bucket/run/last.ckpt")       # or a path of the disk
    folder = begin_folder(place)                        # rank 0: where the files of a save go
    writer_of(folder)                                   # each rank, for torch's `save`
    commit(folder, place)                               # rank 0: they are the checkpoint now
    ShardReader(ShardFolder.at(place))                  # for torch's `load`

    in the folder                                    what
    `MANIFEST`                                       names the folder of the files
    ``shards.<random>/``                             the files of one save

A save writes a new folder of files, then replaces the manifest, then removes the files before: at
every moment the manifest names a complete checkpoint. A folder without one is of a save that was
cut off, and is none. On a disk, what is no such folder is renamed (`beside`) before a new
one takes its name. Object stores rename nothing: there the manifest comes last, in one request.
"""

from __future__ import annotations

import contextlib
import fnmatch
import functools
import io
import json
import os
import pickle
import secrets
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from pathlib import Path, PurePath
from typing import IO, Any, ClassVar, NoReturn

import fsspec
import torch
import xxhash
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.futures import Future

try:  # torch 2.15 and later
    from torch.distributed.checkpoint.fsspec_filesystem import FsspecReader, FsspecWriter
except ImportError:
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter

MANIFEST = "checkpoint.json"
FILES_IN = "shards."  # how the name of a folder of files begins
REST = "trainer_state.pt"  # whatever is no tensor
METADATA = ".metadata"  # torch.distributed.checkpoint's
_VERSION = 2  # of the manifest
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


# ---- where it is ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class RemotePath:
    """A path of fsspec, such as ``s3://bucket/run``, with what is needed of `pathlib.Path`."""

    url: str

    def __str__(self) -> str:
        return self.url

    def __truediv__(self, name: str) -> RemotePath:
        return RemotePath(f"{self.url}/{name}")

    @property
    def name(self) -> str:
        """The last part."""
        return self.url.rpartition("/")[2]

    @property
    def parent(self) -> RemotePath:
        """All but the last part."""
        return RemotePath(self.url.rpartition("/")[0])

    @property
    def files(self) -> Any:
        """The file system, as it is now: fsspec makes one in each process, which keeps listings."""
        files, path = fsspec.core.url_to_fs(self.url)
        files.invalidate_cache(path)
        return files

    def is_file(self) -> bool:
        """Return whether there is a file."""
        return bool(self.files.isfile(self.url))

    def glob(self, pattern: str) -> list[RemotePath]:
        """Return what is in this folder, by name; nothing where it is none."""
        try:
            found = self.files.ls(self.url, detail=False)
        except (FileNotFoundError, NotADirectoryError):
            return []
        names = sorted({each.rstrip("/").rpartition("/")[2] for each in found})
        return [self / name for name in names if fnmatch.fnmatchcase(name, pattern)]

    def open(self, mode: str = "rb") -> IO[bytes]:
        """Open the file; what is written is there once it is closed."""
        opened: IO[bytes] = self.files.open(self.url, mode)
        return opened

    def read_bytes(self) -> bytes:
        """Return the file."""
        content: bytes = self.files.cat_file(self.url)
        return content


Place = Path | RemotePath


def place_of(path: str | os.PathLike[str] | RemotePath) -> Place:
    """Return where `path` is: on a disk, or in a file system of fsspec."""
    if isinstance(path, RemotePath):
        return path
    text = os.fspath(path)
    protocol, separator, _ = text.partition("://")
    if not separator:
        return Path(path)
    if protocol in ("file", "local"):
        return Path(fsspec.core.url_to_fs(text)[1])
    return RemotePath(text.rstrip("/"))


def holds_shards(path: str | os.PathLike[str] | RemotePath) -> bool:
    """Return whether `path` is a folder that `save_sharded` wrote, in one piece."""
    place = place_of(path)
    # a manifest alone does not do: files of others may be called like it
    return (place / MANIFEST).is_file() and any(True for _ in place.glob(f"{FILES_IN}*"))


def newest_checkpoint(folder: str | os.PathLike[str], name: str = "last") -> str | None:
    """Return the path of the newest complete checkpoint in `folder`; None where there is none.

    ``fit(ckpt_path=newest_checkpoint("s3://bucket/run"))`` is what ``ckpt_path="last"`` is on a
    disk: Lightning does not look into object stores. What a save left that was cut off is no
    checkpoint.

    Args:
        folder: on a disk or in a file system of fsspec.
        name: how names of checkpoints begin; all of them end with ``.ckpt``.
    """
    found = []
    for place in place_of(folder).glob(f"{name}*.ckpt"):
        file = place
        if not place.is_file():
            if not holds_shards(place):
                continue
            file = place / MANIFEST
        files, path = fsspec.core.url_to_fs(str(file))
        found.append((files.modified(path).timestamp(), str(place)))
    return max(found)[1] if found else None


# ---- a save --------------------------------------------------------------------------------------


def begin_folder(target: Place) -> Place:
    """Make an empty folder for the files of a save, and return it.

    It is in the checkpoint folder that is to be replaced; where there is none on a disk, in one
    beside it.
    """
    name = f"{FILES_IN}{secrets.token_hex(4)}"
    if isinstance(target, RemotePath):
        _tidy_leftovers(target)
        return target / name
    home, (unfinished, _) = target, beside(target)
    # A kill may have come before the very last step.
    if holds_shards(unfinished) and not os.path.lexists(target):
        unfinished.rename(target)
    if target.is_symlink() or not holds_shards(target):
        home = unfinished
        _remove(home)
    else:
        _tidy_leftovers(home)
    folder = home / name
    folder.mkdir(parents=True)
    return folder


def _tidy_leftovers(home: Place) -> None:
    # Remove what a save left that was cut off
    with contextlib.suppress(ValueError):  # a damaged manifest does not say what to keep
        kept = ShardFolder.at(home).path if (home / MANIFEST).is_file() else home
        _tidy(home.glob(f"{FILES_IN}*"), but=kept)


def beside(target: Path) -> tuple[Path, Path]:
    """Return the folder that is to be `target`, and what was there, while one replaces the other.

    Lightning takes what has a checkpoint's name in its own for a checkpoint.
    """
    name = xxhash.xxh3_64_hexdigest(os.fsencode(target.name))
    return target.with_name(f"{name}.unfinished"), target.with_name(f"{name}.old")


def commit(folder: Place, target: Place) -> None:
    """Make the files in `folder` the checkpoint at `target`, and remove those that it had."""
    metadata = ShardFolder(folder).metadata
    for name in sorted({at.relative_path for at in metadata.storage_data.values()}):
        if not (folder / name).is_file():
            raise FileNotFoundError(
                f"{name} was written to {str(folder)!r}, and rank 0 does not find it there: all "
                "ranks must see one file system"
            )
    content = {"version": _VERSION, "folder": folder.name}
    manifest = json.dumps({"content": content, "checksum": _digest(content)}).encode()
    if isinstance(target, RemotePath):
        target.files.pipe_file(f"{target}/{MANIFEST}", manifest)  # one request: all of it or none
        _tidy(target.glob(f"{FILES_IN}*"), but=folder)
        if target.is_file():  # beside a folder of its name, as in object stores
            target.files.rm_file(str(target))
        return
    assert isinstance(folder, Path)
    home, (unfinished, old) = folder.parent, beside(target)
    new = home / f"{MANIFEST}.unfinished"
    new.write_bytes(manifest)
    sync(new)
    sync(folder)
    new.replace(home / MANIFEST)
    sync(home)
    # Nothing was there, or something else: no folder can replace that in one step.
    if home != target:
        if os.path.lexists(target):
            _remove(old)
            target.rename(old)
        home.rename(target)
        sync(target.parent)
    _tidy([*target.glob(f"{FILES_IN}*"), unfinished, old], but=target / folder.name)


def replace_by_file(path: str | os.PathLike[str], write: Callable[[str], object]) -> None:
    """Let a file, which ``write(path)`` writes, be where a folder of shards is now.

    The folder stays until the file is whole. On a disk there is neither under its name between two
    renamings.
    """
    target = place_of(path)
    if isinstance(target, RemotePath):
        write(str(target))
        remove_folder(target)
        return
    unfinished, old = beside(target)
    _tidy([unfinished, old], but=target)
    write(str(unfinished))
    sync(unfinished)
    target.rename(old)
    unfinished.rename(target)
    sync(target.parent)
    _tidy([old], but=target)


def remove_folder(path: str | os.PathLike[str] | RemotePath) -> None:
    """Remove a checkpoint folder: the manifest first, so that what remains is none."""
    place = place_of(path)
    if (place / MANIFEST).is_file():
        _remove(place / MANIFEST)
    if isinstance(place, Path):
        _remove(place)
        return
    for part in place.glob("*"):  # where a file has its name too, that stays
        _remove(part)
    if not place.is_file():  # the folder itself, which not every store has
        with contextlib.suppress(FileNotFoundError):
            place.files.rm(str(place), recursive=True)


def _tidy(paths: Iterable[Place], *, but: Place) -> None:
    # Remove `paths`, but one. What cannot be removed stays until the next save.
    for path in [*paths]:
        if path != but:
            with contextlib.suppress(OSError):
                _remove(path)


def _remove(path: Place) -> None:
    if isinstance(path, RemotePath):
        path.files.rm(str(path), recursive=True)
    elif path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def sync(path: Path) -> None:
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


# ---- files ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ShardFolder:
    """The files of a checkpoint."""

    path: Place

    @staticmethod
    def at(path: Place) -> ShardFolder:
        """Return the files that the manifest in `path` names. Raises ValueError: it is damaged."""
        try:
            manifest = json.loads((path / MANIFEST).read_bytes())
            content = manifest["content"]
            undamaged = manifest["checksum"] == _digest(content)
            version, name = content["version"], PurePath(content["folder"]).name
        except (ValueError, LookupError, TypeError):
            undamaged = False
        if not undamaged or not name.startswith(FILES_IN):
            _refuse(path / MANIFEST, "is damaged: it is not what was saved")
        if version > _VERSION:
            _refuse(path / MANIFEST, "was written by a newer release of lightning_topt")
        return ShardFolder(path / name)

    @functools.cached_property
    def metadata(self) -> Metadata:
        """What ``.metadata`` has, read once. Raises ValueError where that is anything else."""
        file = self.file(METADATA)
        try:
            metadata = _MetadataUnpickler(io.BytesIO(file.read_bytes())).load()
        # the bytes decide what is raised
        except Exception as error:
            _refuse(file, f"cannot be read: {error}")
        if not isinstance(metadata, Metadata):
            _refuse(file, f"cannot be read: it is a {type(metadata).__name__}")
        return metadata

    def file(self, name: str) -> Place:
        """Return the place of a file. Raises ValueError where it is missing, or elsewhere."""
        file = self.path / name
        if PurePath(name).name != name or not file.is_file():
            _refuse(file, "is missing")
        return file


def _refuse(file: Place, reason: str) -> NoReturn:
    raise ValueError(f"{file.name} of the checkpoint in {str(file.parent)!r} {reason}")


def _digest(content: object) -> str:
    # the checksum of a manifest's content
    return xxhash.xxh3_64_hexdigest(json.dumps(content, sort_keys=True).encode())


def writer_of(folder: Place) -> FileSystemWriter:
    """Return what writes this rank's files."""
    if isinstance(folder, RemotePath):
        remote: FileSystemWriter = FsspecWriter(str(folder), sync_files=False)
        return remote
    return FileSystemWriter(folder)


class ShardReader(FileSystemReader):
    """Reads tensors, and runs no code of the files."""

    def __init__(self, folder: ShardFolder) -> None:
        super().__init__(str(folder.path))
        self._folder = folder
        if isinstance(folder.path, RemotePath):
            remote: Any = FsspecReader(str(folder.path))
            self.fs, self.path = remote.fs, remote.path

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        """Return what ``.metadata`` has."""
        return self._folder.metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read what is planned, file by file. Raises ValueError where one is damaged or missing."""
        by_file = dict[str, LoadPlan]()
        for item in plan.items:
            name = self.storage_data[item.storage_index].relative_path
            by_file.setdefault(name, LoadPlan([])).items.append(item)
        for name, items in by_file.items():
            file = self._folder.file(name)
            try:
                super().read_data(items, planner)
            # the bytes decide what is raised
            except Exception as error:
                _refuse(file, f"is damaged: {error}")
        done: Future[None] = Future()
        done.set_result(None)
        return done


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
        # Return a class or function by its name. Raises UnpicklingError for another one.
        if module.partition(".")[0] == "pathlib":  # of the folder that was written to
            return PurePath
        if (module, name) in _VALUES:
            return _VALUES[module, name]
        raise pickle.UnpicklingError(f"it has {module}.{name}, which would run code")

    def load_build(self) -> None:
        # Set the attributes of an instance that was just made, and of nothing else.
        state, made = self.stack.pop(), self.stack[-1]
        if type(made) not in _FILLED:
            raise pickle.UnpicklingError(f"it sets attributes of {made!r}")
        if isinstance(made, TensorProperties):
            # as torch has it: from 2.15 on a sixth value follows, which tells nothing
            TensorProperties.__setstate__(made, state[: len(fields(made))])
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

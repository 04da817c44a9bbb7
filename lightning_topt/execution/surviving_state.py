"""The state of a run in the memory of its machines, for ranks that begin again after a loss.

Ranks that survive a loss leave what they have in a folder of ``/dev/shm``, one of each machine:

    states = SurvivingStates(folder)
    states.write(place, lambda: checkpoint)     # each survivor; one of a machine writes
    found = find_newest(states, fit=0)          # all ranks of the next process group
    checkpoint = found.load()
    states.remove_before(place)                 # once all ranks have made a step

A name says which state it is, and has its checksum: ``FIT-STEP-BATCHES-CHECKSUM.state``. The name
comes last, so a kill while a state is written leaves nothing under such a name. The newest state
that is undamaged counts. A machine without it gets it from another one's memory.

The folder outlives the processes of ranks, and belongs to the one that starts them, torchrun. A
small process of its own removes it (`remove_after`) when that ends, however it does.
"""

from __future__ import annotations

import fcntl
import io
import logging
import os
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor
from torch.utils._pytree import tree_map_only

from lightning_topt.communication.rank_watch import process_start

log = logging.getLogger(__name__)

MEMORY = Path("/dev/shm")
_STATE, _UNFINISHED, _LOCK, _REMOVER = ".state", ".unfinished", "lock", "remover"
LOCK_SECONDS = 60.0  # that a process waits while another one of its machine writes
_BLOCK = 1 << 24  # bytes that are sent at a time
_CACHED = 1 << 20  # and that are read, which stay in a core's cache

# Run by a bare interpreter: waits until a process has ended, then removes the folder.
_REMOVE_AFTER = """
import fcntl, os, select, shutil, sys
folder, process = sys.argv[1], int(sys.argv[2])
lock = open(folder + "/{lock}", "w")
try:
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
except BlockingIOError:
    raise SystemExit  # another one does it
try:
    descriptor = os.pidfd_open(process)
    print("waits", flush=True)
    select.select([descriptor], [], [])
except ProcessLookupError:
    pass
shutil.rmtree(folder, ignore_errors=True)
"""


class Place(NamedTuple):
    """How far a run was: the larger one is the newer one.

    Attributes:
        fit: which of the program's fits.
        step: optimizer steps of it.
        batches: that it was trained on.
    """

    fit: int
    step: int
    batches: int


@dataclass(frozen=True)
class FoundState:
    """A state that was found in memory, the same on all ranks.

    Attributes:
        place: of which it is.
        path: the file; on a machine that had none, the name that it would have.
        received: its bytes, where another machine has sent them.
    """

    place: Place
    path: Path
    received: bytes | None = None

    def load(self) -> dict[str, Any]:
        """Return the checkpoint. Its pickles are of this run.

        Tensors in its "state_dict" are mapped from the file, as they are copied only once. Others,
        such as the optimizer's, become part of the run.
        """
        if self.received is not None:
            file = io.BytesIO(self.received)
            received: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=False)
            return received
        checkpoint = torch.load(self.path, map_location="cpu", weights_only=False, mmap=True)
        return {
            key: value if key == "state_dict" else tree_map_only(Tensor, torch.clone, value)
            for key, value in checkpoint.items()
        }


class SurvivingStates:
    """The states in `folder`, which is this user's alone.

    Args:
        folder: is made with the first state.
        owner: the process with which the folder goes; None: it stays.

    Where the folder is another's, `write` raises PermissionError, and there is no newest state.
    """

    def __init__(self, folder: Path, owner: int | None = None) -> None:
        self.folder, self._owner = folder, owner

    def write(self, place: Place, make: Callable[[], Any]) -> None:
        """Write the state that `make` returns, unless the machine has it.

        One process writes at a time. Where it is killed, or its state is damaged, the next one
        writes. `make` must not communicate with other ranks: they wait here, or have ended.

        Raises TimeoutError if another process writes for longer than `LOCK_SECONDS`.
        """
        self._open()
        with (self.folder / _LOCK).open("w") as lock:
            _lock(lock)
            if not any(_is_whole(path) for path in self._of(place)):
                self._write(place, make())

    def _write(self, place: Place, state: Any) -> None:
        unfinished = self.folder / f"{_stem(place)}{_UNFINISHED}"
        before = torch.serialization.get_crc32_options()
        torch.serialization.set_crc32_options(False)  # the checksum of the name is faster
        try:
            torch.save(state, unfinished)
            unfinished.rename(self.folder / f"{_stem(place)}-{checksum(unfinished)}{_STATE}")
        except BaseException:
            unfinished.unlink(missing_ok=True)
            raise
        finally:
            torch.serialization.set_crc32_options(before)

    def newest(self, fit: int) -> tuple[Place, Path] | None:
        """Return the newest state of `fit` that is undamaged, None where there is none."""
        if not self.folder.is_dir():
            return None
        try:
            self._check_owner()
        except PermissionError as error:
            log.warning("no state is looked for in memory: %s", error)
            return None
        for path in sorted(self.folder.glob(f"{fit}-*{_STATE}"), reverse=True):
            if _is_whole(path):
                return Place(*map(int, path.stem.split("-")[:3])), path
            log.warning("the state %s is damaged, and is left out", path.name)
        return None

    def remove_before(self, place: Place) -> None:
        """Remove what is older than `place`, of its fit."""
        for path in self.folder.glob(f"{place.fit}-*"):
            numbers = path.stem.split("-")[:3]
            if Place(*map(int, numbers)) < place:
                path.unlink(missing_ok=True)

    def _of(self, place: Place) -> list[Path]:
        return list(self.folder.glob(f"{_stem(place)}-*{_STATE}"))

    def _open(self) -> None:
        with suppress(FileExistsError):
            self.folder.mkdir(mode=0o700)
        self._check_owner()
        if self._owner is not None:
            remove_after(self.folder, self._owner)

    def _check_owner(self) -> None:
        # Whoever may write there runs code in this process, by what is unpickled.
        found = self.folder.lstat()
        is_own = found.st_uid == os.getuid() and not stat.S_IMODE(found.st_mode) & 0o077
        if not stat.S_ISDIR(found.st_mode) or not is_own:
            raise PermissionError(f"{self.folder} is not a folder of this user alone")


def _stem(place: Place) -> str:
    return f"{place.fit}-{place.step:012d}-{place.batches:012d}"


def _lock(file: IO[str]) -> None:
    deadline = time.monotonic() + LOCK_SECONDS
    while True:
        try:
            return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"another process has written its state for {LOCK_SECONDS:.0f} s: hooks such "
                    "as on_save_checkpoint must not communicate after a loss"
                ) from None
        time.sleep(0.01)


def _is_whole(path: Path) -> bool:
    """Return whether a state has the checksum that its name says."""
    return checksum(path) == path.stem.rpartition("-")[2]


def checksum(path: Path) -> str:
    """Return the XXH3 of a file, as text."""
    digest, block = xxhash.xxh3_128(), memoryview(bytearray(_CACHED))
    with path.open("rb", buffering=0) as file:
        while length := file.readinto(block):
            digest.update(block[:length])
    return digest.hexdigest()


def states_of(owner: int) -> SurvivingStates:
    """Return the states of the ranks that process `owner` starts, on this machine."""
    name = f"topt-elastic-{os.getuid()}-{owner}-{process_start(owner)}"
    return SurvivingStates(MEMORY / name, owner)


def find_newest(
    states: SurvivingStates, *, fit: int, group: dist.ProcessGroup | None = None
) -> FoundState | None:
    """Return the newest state that any machine has, None where none has one.

    A collective call of all ranks, on `group`, which has tensors of the host. The first rank of
    those that share a folder looks for all of them. Where a folder lacks the state, they get its
    bytes from the first rank that has it.
    """
    own_folder = (socket.gethostname(), str(states.folder))
    folders: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(folders, own_folder, group)
    own = states.newest(fit) if folders.index(own_folder) == dist.get_rank() else None
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, own and (own[0], own[1].name), group)
    if not any(found):
        return None
    newest = max(place for place, _ in filter(None, found))
    # Files of one place have different names, as they have different checksums.
    names = [found[folders.index(folder)] for folder in folders]
    owners = [rank for rank, each in enumerate(names) if each and each[0] == newest]
    has_it = dist.get_rank() in owners
    path = states.folder / names[dist.get_rank() if has_it else owners[0]][1]
    received = None
    if len(owners) < len(names):
        if has_it:
            _send(path, owners[0], group)
        else:
            received = _receive(owners[0], group)
    return FoundState(newest, path, received)


def _send(path: Path, source: int, group: dist.ProcessGroup | None) -> None:
    """Take part in sending a file from rank `source`, as one that has it."""
    size = torch.tensor(path.stat().st_size if dist.get_rank() == source else 0)
    dist.broadcast(size, source, group)
    with path.open("rb") as file:
        for length in _lengths(int(size)):
            block = file.read(length) if dist.get_rank() == source else bytes(length)
            dist.broadcast(torch.frombuffer(bytearray(block), dtype=torch.uint8), source, group)


def _receive(source: int, group: dist.ProcessGroup | None) -> bytes:
    size, blocks = torch.tensor(0), list[Tensor]()
    dist.broadcast(size, source, group)
    for length in _lengths(int(size)):
        blocks.append(torch.empty(length, dtype=torch.uint8))
        dist.broadcast(blocks[-1], source, group)
    return b"".join(block.numpy().tobytes() for block in blocks)


def _lengths(size: int) -> list[int]:
    return [min(_BLOCK, size - start) for start in range(0, size, _BLOCK)]


def remove_after(folder: Path, process: int) -> None:
    """Start a process that removes `folder` when `process` has ended.

    It is in a session of its own, and the only one of the folder.
    """
    with (folder / _REMOVER).open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return  # it is there
    code = _REMOVE_AFTER.format(lock=_REMOVER)
    remover = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", code, str(folder), str(process)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    assert remover.stdout is not None
    remover.stdout.readline()  # it waits now, or another one does
    remover.stdout.close()

"""Preparation of batches: the same bits in every process, by the worker processes of one job.

SeededBatches   the index lists of an epoch, from a sampler, a seed and the epoch's number
Preparation     one batch: samples, augmentation and collating, seeded by (seed, epoch, batch)
Workers         the processes of a job, which prepare what the coordinator assigns to them
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import multiprocessing
import os
import random
import signal
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection as Pipe
from typing import Any, NamedTuple

import numpy as np
import torch
from torch._utils import ExceptionWrapper
from torch.utils.data import _utils

from lightning_topt.data.cache import sample_codec
from lightning_topt.data.coordinated.coordinator_link import (
    Connection,
    CoordinatorLost,
    Message,
    join,
    memory_file,
)
from lightning_topt.data.coordinated.ledger import Position
from lightning_topt.data.resumable_loader import restored_random_states

LOOK_SECONDS = 5.0  # how often an idle worker checks that its job lives; the coordinator is faster
END_SECONDS = 5.0  # for a worker to finish its batch at the end; as in torch's DataLoader
EPOCHS_KEPT = 4  # lists of batches; jobs are rarely further apart
SAMPLERS_INSIDE = 8  # depth of nested samplers
Batches = Callable[[int], Sequence[Sequence[object]]]


class SeededBatches:
    """`batches(epoch)` from a batch sampler, decided by nothing but `seed` and `epoch`.

    While it draws, the global generators of torch, NumPy and Python are seeded (and restored). So
    are the generators of the sampler and of the samplers inside it. ``set_epoch`` is called where
    there is one.
    """

    def __init__(self, batch_sampler: Any, *, seed: int) -> None:
        self.batch_sampler, self.seed = batch_sampler, seed

    def __call__(self, epoch: int) -> list[list[object]]:
        """Return the index lists of that epoch's batches."""
        # one sequence, so that the generators' seeds have nothing to do with one another
        words = np.random.SeedSequence([self.seed, epoch]).generate_state(4)
        torch_seed = int(words[0]) << 32 | int(words[1])
        # The sampler, and those inside it.
        sampler = self.batch_sampler
        for _ in range(SAMPLERS_INSIDE):
            if hasattr(sampler, "set_epoch"):
                sampler.set_epoch(epoch)
            if isinstance(getattr(sampler, "generator", None), torch.Generator):
                sampler.generator.manual_seed(torch_seed)
            sampler = getattr(sampler, "sampler", None)
        with restored_random_states():
            # samplers without a generator draw from the global ones
            torch.default_generator.manual_seed(torch_seed)
            np.random.seed(words[2])
            random.seed(int(words[3]))
            return [list(indices) for indices in self.batch_sampler]


class Preparation:
    """How batch `batch` of epoch `epoch` is made: the same bits in every process.

    Random augmentation draws from the global generators of Python, NumPy and torch. They are seeded
    from (seed, epoch, batch) and not restored: call it in a process of its own.

    Args:
        batches: returns the index lists of an epoch's batches.
        collate_fn: makes a batch of a list of samples.
    """

    def __init__(
        self, dataset: Any, *, batches: Batches, collate_fn: Callable[[list[Any]], Any], seed: int
    ) -> None:
        self.dataset, self.batches, self.collate_fn, self.seed = dataset, batches, collate_fn, seed
        self._lists: dict[int, tuple[Sequence[Sequence[object]], str]] = {}

    def epoch(self, epoch: int) -> tuple[Sequence[Sequence[object]], str]:
        """Return the index lists of an epoch, and their digest."""
        if epoch not in self._lists:
            lists = self.batches(epoch)
            # the oldest one goes
            if len(self._lists) >= EPOCHS_KEPT:
                del self._lists[next(iter(self._lists))]
            self._lists[epoch] = lists, _digest(lists)
        return self._lists[epoch]

    def prepare(self, epoch: int, batch: int) -> Any:
        """Make the batch."""
        # Three generators with independent seeds from one sequence.
        indices = self.epoch(epoch)[0][batch]
        state = np.random.SeedSequence([self.seed, epoch, batch]).generate_state(4)
        random.seed(int(state[0]))
        np.random.seed(state[1])
        torch.default_generator.manual_seed(int(state[2]) << 32 | int(state[3]))
        # data sets that read several samples at once get the whole batch
        if hasattr(self.dataset, "__getitems__"):
            return self.collate_fn(self.dataset.__getitems__(list(indices)))
        return self.collate_fn([self.dataset[index] for index in indices])


def _digest(lists: Sequence[Sequence[object]]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for indices in lists:
        array = np.asarray(indices)
        # Indices other than integers (tuples, names) are distinguished by their repr.
        data = (
            array.astype("<i8").tobytes()
            if array.dtype.kind in "iu" and array.ndim == 1
            else repr(indices).encode()
        )
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()


class EpochAlone(torch.utils.data.Dataset[object]):
    """One epoch as a dataset of whole batches, for a DataLoader.

    It serves when there is no coordinator.
    """

    def __init__(self, preparation: Preparation, *, epoch: int) -> None:
        self.preparation, self.epoch = preparation, epoch

    def __getitem__(self, batch: int) -> Any:
        return self.preparation.prepare(self.epoch, batch)


class Workers:
    """The `count` processes of one job that prepare batches, until they are closed."""

    def __init__(
        self,
        preparation: Preparation,
        *,
        count: int,
        address: str,
        hello: Message,
        timeout_seconds: float,
        context: str | None,
        init: Callable[[int], None] | None,
    ) -> None:
        method = multiprocessing.get_context(context)
        parent = os.getpid() if method.get_start_method() == "fork" else None
        self.errors: dict[Position, ExceptionWrapper] = {}
        self._pipes: list[Pipe] = []
        self._processes: list[Any] = []
        for number in range(count):
            reader, writer = method.Pipe(duplex=False)
            place = WorkerPlace(number, count, address, hello, timeout_seconds, parent)
            arguments = (preparation, place, init, writer)
            process = method.Process(  # type: ignore[attr-defined]
                target=_work, args=arguments, daemon=True
            )
            process.start()
            # the worker's end: with it the pipe ends when the worker does
            writer.close()
            self._pipes.append(reader)
            self._processes.append(process)

    def waitables(self) -> list[Any]:
        """Return what becomes ready when a worker failed or died.

        It is for `multiprocessing.connection.wait`.
        """
        return [
            *self._pipes,
            *(process.sentinel for process in self._processes if process.exitcode is None),
        ]

    def check(self) -> None:
        """Collect the exceptions of failed batches into `errors`.

        Raises:
            RuntimeError: a worker was killed.
        """
        for pipe in list(self._pipes):
            try:
                while pipe.poll():
                    position, error = pipe.recv()
                    self.errors[position] = error
            # the worker has ended
            except (EOFError, OSError):
                self._pipes.remove(pipe)
        for process in self._processes:
            if process.exitcode:
                raise RuntimeError(
                    f"a process that prepares batches (pid {process.pid}) ended with exit code "
                    f"{process.exitcode}; -9 is often the system's answer to too little memory"
                )

    def are_alive(self) -> bool:
        """Return whether any worker is alive."""
        return any(process.is_alive() for process in self._processes)

    def close(self, *, at_once: bool = False) -> None:
        """End the workers.

        Close the job's connection first: workers end when the coordinator drops them.
        """
        # Wait, then terminate, then kill.
        deadline = time.monotonic() + (0 if at_once else END_SECONDS)
        for process in self._processes:
            process.join(max(0, deadline - time.monotonic()))
            for end in (process.terminate, process.kill):
                if process.is_alive():
                    end()
                    process.join(END_SECONDS)
        for pipe in self._pipes:
            pipe.close()


class Worker(_utils.worker.WorkerInfo):
    """What ``get_worker_info()`` returns in these processes."""

    __slots__ = ()
    own_memory = True  # batches are not sent in shared memory (`cached_batches`)


class WorkerPlace(NamedTuple):
    """A worker's place: its number of how many, the coordinator, and its job.

    `parent` is the job's process id where that forked the worker, else None.
    """

    number: int
    workers: int
    address: str
    hello: Message
    timeout_seconds: float
    parent: int | None


def _work(
    preparation: Preparation, place: WorkerPlace, init: Callable[[int], None] | None, errors: Pipe
) -> None:
    # The start of a worker, as in torch's DataLoader. Ctrl-C is the job's, which ends its workers.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    # get_worker_info() works as in a DataLoader's worker.
    _utils.worker._worker_info = Worker(
        id=place.number,
        num_workers=place.workers,
        seed=preparation.seed,
        dataset=preparation.dataset,
    )
    if init is not None:
        init(place.number)
    # The batch is copied to a memory file, so collating need not fill /dev/shm, which is small in a
    # container.
    preparation.collate_fn = functools.partial(_collate, preparation.collate_fn)
    hello = {**place.hello, "role": "worker"}
    with contextlib.suppress(CoordinatorLost):  # its job sees that too, and continues alone
        connection, answer = join(
            place.address, hello, timeout_seconds=place.timeout_seconds, may_start=False
        )
        if answer["type"] == "welcome":
            _serve(preparation, connection, errors, place.parent)


def _collate(collate_fn: Callable[[list[Any]], Any], samples: list[Any]) -> Any:
    # Collate as in the main process: torch's own function takes shared memory in a worker
    info, _utils.worker._worker_info = _utils.worker._worker_info, None
    try:
        return collate_fn(samples)
    finally:
        _utils.worker._worker_info = info


def _lives(parent: int | None) -> bool:
    """Return whether the job is alive.

    A fork server's processes have another parent. Forked ones keep open the pipe by which
    multiprocessing detects the end of the job, so for them `parent` is the job's process.
    """
    if parent is not None:
        return os.getppid() == parent
    process = multiprocessing.parent_process()
    return process is not None and process.is_alive()


def _serve(
    preparation: Preparation, connection: Connection, errors: Pipe, parent: int | None
) -> None:
    # Prepare what the coordinator assigns, until it or the job is gone
    connection.send({"type": "ready"})
    while _lives(parent):
        received = connection.receive(timeout_seconds=LOOK_SECONDS)
        # nothing to do yet: see whether the job lives
        if received is None:
            continue
        message = received[0]
        # refused
        if message["type"] != "prepare":
            return
        position = message["epoch"], message["batch"]
        fields = {"epoch": position[0], "batch": position[1]}
        try:
            if preparation.epoch(position[0])[1] != message["digest"]:
                raise ValueError(
                    f"the list of batches of epoch {position[0]} is another one in a worker "
                    "process: it must depend on the seed and the epoch only"
                )
            descriptor = memory_file(sample_codec.encode(preparation.prepare(*position)))
        # the error goes to the job, its number to the coordinator
        except Exception:
            where = f"in a process that prepares batches (pid {os.getpid()})"
            errors.send((position, ExceptionWrapper(where=where)))
            connection.send({"type": "failed", **fields})
            continue
        try:
            connection.send({"type": "prepared", **fields}, descriptor=descriptor)
        finally:
            os.close(descriptor)

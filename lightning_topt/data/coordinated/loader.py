"""Batches that several jobs on one machine prepare together: each once, used by all of them.

    loader = CoordinatedLoader(dataset, batches=SeededBatches(sampler, seed=0), ...)
    for batch in loader:        # own worker processes and those of the other jobs prepared it
        train(batch)

It follows CoorDL's coordinated preparation (arXiv 2007.06775, section 4.3), without shares fixed in
advance and without spinning: see `coordinator` and `ledger`. Trials of a search that run side by
side (Hydra multirun) then decode and augment once.
"""

from __future__ import annotations

import mmap
import multiprocessing.connection
import os
import secrets
import sys
import warnings
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils.data import DataLoader, _utils

from lightning_topt.basics.argument_checks import check_real, check_size, check_whole
from lightning_topt.data.cache import sample_codec
from lightning_topt.data.coordinated.coordinator_link import (
    CoordinatorLost,
    Message,
    address_of,
    close_quietly,
    is_supported,
    join,
)
from lightning_topt.data.coordinated.ledger import Position
from lightning_topt.data.coordinated.preparation import Batches, EpochAlone, Preparation, Workers

__all__ = ["CoordinatedLoader", "CoordinationRefused", "CoordinationStatistics", "CoordinatorLost"]


class CoordinationRefused(ValueError):
    """The jobs that meet in the same directory prepare other batches."""


@dataclass(frozen=True)
class CoordinationStatistics:
    """Batches that this job got, by who prepared them.

    Args:
        own: this job's worker processes.
        others: those of other jobs.
        alone: this job's, without coordination.
    """

    own: int = 0
    others: int = 0
    alone: int = 0


class CoordinatedLoader:
    """The prepared batches of an epoch, each exactly once and in order, as of a DataLoader.

    Tensors of a batch are views of shared pages that are copied when written to: changing them in
    place harms no other job. Without a coordinator (lost, or not possible on this system) it warns
    once, and the job's own workers prepare the rest of the epoch; the next epoch tries to join
    again.

    Args:
        dataset: map-style.
        batches: returns the index lists of an epoch's batches; it depends on the epoch's number
            only, and is the same in all jobs.
        collate_fn: makes a batch (what `sample_codec.encode` takes) of a list of samples.
        directory: jobs that name the same one share; nothing is written there.
        fingerprint: of the data set and everything done to it.
        seed: random augmentation draws from the global generators, seeded by (seed, epoch, batch).
        memory_bytes: what the coordinator may keep, a number or text (``"1GiB"``); the least of all
            jobs counts. Besides, each job has the batch it uses and the next one, and each worker
            the one it prepares.
        timeout_seconds: then another worker prepares a batch that a stopped or hanging job has
            claimed, and a coordinator that does not answer is given up.
        num_workers: processes of this job that prepare, at least 1: the training process would
            alternate between preparing and training, and its random state would change. Four jobs
            with one worker each use four cores.
        group: keeps jobs of one directory apart, such as the ranks of a distributed job.
        multiprocessing_context: as of DataLoader.
        worker_init_fn: as of DataLoader.
        pin_memory: as of DataLoader.

    Iterating raises CoordinationRefused (a ValueError) when other jobs prepare other batches in
    this directory. The data set's own exceptions are raised when their batch is reached, and
    RuntimeError when a worker process died.
    """

    def __init__(
        self,
        dataset: object,
        *,
        batches: Batches,
        collate_fn: Callable[[list[Any]], Any],
        directory: str | os.PathLike[str],
        fingerprint: str,
        seed: int,
        memory_bytes: int | str,
        timeout_seconds: float = 30.0,
        num_workers: int = 1,
        group: str = "",
        multiprocessing_context: str | None = None,
        worker_init_fn: Callable[[int], None] | None = None,
        pin_memory: bool = False,
    ) -> None:
        seed = check_whole(seed, name="seed", least=0)
        self.memory_bytes = check_size(memory_bytes, name="memory_bytes")
        self.num_workers = check_whole(num_workers, name="num_workers")
        self.timeout_seconds = check_real(timeout_seconds, name="timeout_seconds", positive=True)
        self.preparation = Preparation(dataset, batches=batches, collate_fn=collate_fn, seed=seed)
        self.pin_memory = pin_memory
        self._address = address_of(directory, group=group)
        self._agreement = {"fingerprint": fingerprint, "seed": seed}
        self._context, self._init = multiprocessing_context, worker_init_fn
        self._membership: Membership | None = None
        # (epoch, batch) where the next iteration begins, and where the current one is
        self._next = self._now = (0, 0)
        self._iteration = 0
        self._warned: set[str] = set()
        self._may_join = True
        self._statistics = CoordinationStatistics()

    @property
    def dataset(self) -> Any:
        """The data set that is shared."""
        return self.preparation.dataset

    @property
    def sampler(self) -> CoordinatedLoader:
        """The loader itself: Lightning looks for `set_epoch` here."""
        return self

    def __len__(self) -> int:
        return len(self.preparation.epoch(self._now[0])[0])

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration; without it, epochs are counted."""
        if epoch != self._next[0]:
            self._next = self._now = epoch, 0

    def state_dict(self) -> dict[str, int]:
        """Return the epoch, and how many batches of it were handed out."""
        epoch, batch = self._now
        # the end of an epoch is the beginning of the next
        if batch >= len(self):
            epoch, batch = epoch + 1, 0
        return {"epoch": epoch, "batch": batch}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Let the next iteration continue from a state."""
        self._next = self._now = state["epoch"], state["batch"]

    def statistics(self) -> CoordinationStatistics:
        """Return where the batches so far came from."""
        return self._statistics

    def close(self) -> None:
        """Leave the other jobs and end the workers; iterating joins again."""
        self._leave(at_once=False)

    def _leave(self, *, at_once: bool) -> None:
        membership, self._membership = self._membership, None
        if membership is not None:
            membership.close(at_once=at_once)

    def __iter__(self) -> Iterator[Any]:
        # Nothing happens before the first batch is requested: Lightning makes an iterator just to
        # see that it can.
        self._iteration += 1
        iteration, (epoch, start) = self._iteration, self._next
        self._next, self._now = (epoch + 1, 0), (epoch, start)
        for batch, (value, origin) in enumerate(self._values(epoch, start), start):
            self._statistics = replace(
                self._statistics, **{origin: getattr(self._statistics, origin) + 1}
            )
            self._now = epoch, batch + 1
            if self.pin_memory and torch.accelerator.is_available():
                value = _utils.pin_memory.pin_memory(value)
            yield value
            # after the batch was used, when this iteration is asked for another one
            if iteration != self._iteration:
                raise RuntimeError(
                    "a newer iteration over this CoordinatedLoader was begun: only one goes on at "
                    "a time"
                )

    def _values(self, epoch: int, start: int) -> Iterator[tuple[object, str]]:
        """Yield each batch from `start` on, with its origin.

        The origin is a field of CoordinationStatistics.
        """
        # Together with the other jobs, as long as there is a coordinator.
        lists, digest = self.preparation.epoch(epoch)
        try:
            for value, is_own, nbytes in self._joined().batches(
                epoch, start, len(lists), digest=digest
            ):
                # more than the coordinator may keep: it is handed on, and kept for nobody
                if nbytes > self.memory_bytes:
                    message = (
                        f"a batch has {nbytes} bytes and memory_bytes={self.memory_bytes} keeps "
                        "none for other jobs"
                    )
                    self._warn("memory", message)
                # where to go on alone, if the coordinator is lost
                start += 1
                yield value, "own" if is_own else "others"
            return
        except CoordinationRefused:
            self._leave(at_once=True)
            raise
        except CoordinatorLost as error:
            lost = str(error)
        # Alone, to the end of the epoch.
        self._leave(at_once=True)
        self._warn(
            "alone", f"batches are prepared without the other jobs, at least in this epoch: {lost}"
        )
        for value in self._alone(epoch, range(start, len(lists))):
            yield value, "alone"

    def _joined(self) -> Membership:
        """Return the membership in the group of jobs, joined once for all epochs.

        Raises:
            CoordinatorLost: there is no coordinator.
        """
        if self._membership is not None and self._membership.process != os.getpid():
            self._membership = None  # it is the parent's, of which this process was forked
        if self._membership is None:
            if not is_supported():
                raise CoordinatorLost(
                    f"{sys.platform} has no open files in memory to pass on; coordination needs "
                    "Linux"
                )
            if not self._may_join:
                raise CoordinatorLost("no coordinator answered before")
            try:
                self._membership = Membership(
                    self._start_workers,
                    address=self._address,
                    hello={
                        "job": f"{os.getpid()}-{secrets.token_hex(8)}",
                        **self._agreement,
                        "batches": self.preparation.epoch(0)[1],
                        "memory_bytes": self.memory_bytes,
                        "timeout_seconds": self.timeout_seconds,
                    },
                    timeout_seconds=self.timeout_seconds,
                )
            except CoordinatorLost:
                self._may_join = False  # one attempt is enough where it does not work
                raise
            weakref.finalize(self, self._membership.close)
        return self._membership

    def _start_workers(self, hello: Message) -> Workers:
        return Workers(
            self.preparation,
            count=self.num_workers,
            address=self._address,
            hello=hello,
            timeout_seconds=self.timeout_seconds,
            context=self._context,
            init=self._init,
        )

    def _alone(self, epoch: int, numbers: range) -> Iterator[object]:
        # the same batches under the same seeds, from this job's workers
        loader: DataLoader[object] = DataLoader(
            EpochAlone(self.preparation, epoch=epoch),
            batch_size=None,
            sampler=numbers,
            num_workers=self.num_workers,
            collate_fn=_unchanged,
            multiprocessing_context=self._context,
            worker_init_fn=self._init,
        )
        yield from loader

    def _warn(self, about: str, message: str) -> None:
        if about not in self._warned:
            self._warned.add(about)
            warnings.warn(message, stacklevel=5)


def _unchanged(value: object) -> object:
    return value


class Membership:
    """A job in a group of jobs: its connection to the coordinator, and its workers.

    Raises:
        CoordinatorLost: no coordinator answers within `timeout_seconds`.
        CoordinationRefused: the group prepares other batches.
    """

    def __init__(
        self,
        start_workers: Callable[[Message], Workers],
        *,
        address: str,
        hello: Message,
        timeout_seconds: float,
    ) -> None:
        self.timeout_seconds, self.process, self.job = timeout_seconds, os.getpid(), hello["job"]
        self.connection, answer = join(
            address, {**hello, "role": "job"}, timeout_seconds=timeout_seconds, may_start=True
        )
        _raise_refusal(answer)
        self.coordinator_pid = int(answer["pid"])
        self._closed = False
        # without workers a job is no member
        try:
            self.workers = start_workers(hello)
        except BaseException:
            self.connection.close()
            raise

    def batches(
        self, epoch: int, start: int, end: int, *, digest: str
    ) -> Iterator[tuple[object, bool, int]]:
        """Yield the batches from `start` to `end` (excluded).

        Each comes with whether this job's own worker prepared it, and its bytes.

        Raises:
            CoordinatorLost: the coordinator is gone.
            CoordinationRefused: the other jobs' batches differ.
            RuntimeError: a worker died. Exceptions of the data set are raised as they are.
        """
        # the coordinator answers a `next` as soon as that batch is there
        where = {"epoch": epoch, "batch": start, "batches": end, "digest": digest}
        self.connection.send({"type": "start", **where})
        for batch in range(start, end):
            # One request ahead: the next batch comes while this one is used.
            if batch == start:
                self.connection.send({"type": "next"})
            message, descriptor = self._receive((epoch, batch))
            if batch + 1 < end:
                self.connection.send({"type": "next"})
            # the batch is a file in memory, whose descriptor was passed on
            nbytes = os.fstat(descriptor).st_size
            yield _decode(descriptor, nbytes), message["by"] == self.job, nbytes

    def close(self, *, at_once: bool = False) -> None:
        """Leave the group and end the workers.

        It may be called twice, and in a process forked from the job's. With `at_once` workers do
        not finish their batch: there is no coordinator to stop them.
        """
        if self._closed:
            return
        self._closed = True
        self.connection.close()
        if self.process == os.getpid():
            self.workers.close(at_once=at_once)

    def _receive(self, position: Position) -> tuple[Message, int]:
        """Return the answer with that batch.

        A coordinator that is silent for long is pinged, and lost if it does not answer.
        """
        asked = False
        while True:
            received = self.connection.receive(timeout_seconds=0)
            if received is None:
                # nothing has come: wait for the coordinator, or for the end of a worker
                ready = self._wait(position)
                if not ready and asked:
                    raise CoordinatorLost(
                        f"the coordinator did not answer within {self.timeout_seconds:g} seconds"
                    )
                if not ready:
                    self.connection.send({"type": "ping"})
                    asked = True
                continue
            asked = False
            message, descriptor = received
            if descriptor is not None and (message["epoch"], message["batch"]) == position:
                return message, descriptor
            close_quietly(descriptor)  # requested by an earlier iteration
            _raise_refusal(message)

    def _wait(self, position: Position) -> bool:
        """Return whether something came within `timeout_seconds`.

        Raises what prevents that batch from coming.
        """
        ready = multiprocessing.connection.wait(
            [self.connection.socket, *self.workers.waitables()], self.timeout_seconds
        )
        are_alive = self.workers.are_alive()  # before `check`, which says why not
        self.workers.check()
        if position in self.workers.errors:
            self.workers.errors[position].reraise()
        if not are_alive and self.connection.socket not in ready:
            raise CoordinatorLost(
                "the processes that prepare batches could not reach the coordinator"
            )
        return bool(ready)


def _raise_refusal(message: Message) -> None:
    if message["type"] == "refused":
        raise CoordinationRefused(message["reason"])


def _decode(descriptor: int, nbytes: int) -> object:
    """Map the batch in a file, and close the descriptor.

    Pages are shared with the other jobs until this one writes to them.
    """
    try:
        pages = mmap.mmap(
            descriptor, nbytes, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE
        )
    finally:
        os.close(descriptor)
    return sample_codec.decode(pages)

"""Batches that several jobs on one machine prepare together: each is prepared once and used by all
of them.

After CoorDL's coordinated preparation (arXiv 2007.06775, section 4.3), without shares that are
fixed beforehand, and without spinning: see `coordinator`. Trials of a search that run side by side
(Hydra multirun) then decode and augment once.
"""

from __future__ import annotations

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
from lightning_topt.data.coordinated.coordinated_worker import (
    Batches,
    EpochAlone,
    Preparation,
    Workers,
)
from lightning_topt.data.coordinated.coordinator_link import (
    CoordinatorLost,
    Message,
    address_of,
    is_supported,
)
from lightning_topt.data.coordinated.membership import CoordinationRefused, Membership

__all__ = ["CoordinatedLoader", "CoordinationRefused", "CoordinationStatistics", "CoordinatorLost"]


@dataclass(frozen=True)
class CoordinationStatistics:
    """Batches that this job got: prepared by its own worker processes, by those of other jobs, or
    without coordination.
    """

    own: int = 0
    others: int = 0
    alone: int = 0


class CoordinatedLoader:
    """The prepared batches of an epoch, each exactly once and in the epoch's order, as a DataLoader
    would give them.

    - ``dataset``: map-style; ``batches(epoch)``: the list of the index lists of that epoch's
      batches, a function of nothing else, the same in all jobs; ``collate_fn``: makes a batch (what
      `sample_codec.encode` takes) of a list of samples;
    - ``directory``: jobs that name the same one share; nothing is written there. ``group`` keeps
      those of one directory apart, such as the ranks of a distributed job;
    - ``fingerprint``: of the data set and all that is done to it; together with ``seed`` it decides
      the batches' bits: random augmentation draws from the global generators, seeded by (seed,
      epoch, batch);
    - ``memory_bytes``: what the coordinator may keep, a number or text (``"1GiB"``), the least that
      any job says; besides, each job has the batch it uses and the next one, and each worker the
      one it prepares;
    - ``num_workers``: processes of this job that prepare, at least 1: preparing in the training
      process would take turns with training, and disturb its random state. Four jobs with one
      worker each use four cores;
    - ``timeout_seconds``: after this a batch that a stopped or hanging job promised is prepared by
      another, and a coordinator that does not answer is given up;
    - ``multiprocessing_context``, ``worker_init_fn``, ``pin_memory``: as of DataLoader.

    Tensors of a batch are views of shared pages that are copied when written to: changing them in
    place harms nobody.

    Iterating raises CoordinationRefused (a ValueError) when other jobs prepare other batches in
    this directory, the data set's own exceptions when the batch they belong to is reached, and
    RuntimeError when a worker process died. Without a coordinator (lost, or not possible on this
    system) it warns once and the rest of the epoch is prepared by this job's own workers; the next
    epoch tries to join again.
    """

    def __init__(
        self,
        dataset: Any,
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
        # epoch, batch: where the next iteration begins, and what the last one gave
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
        """Itself: where Lightning looks for `set_epoch`."""
        return self

    def __len__(self) -> int:
        return len(self.preparation.epoch(self._now[0])[0])

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch that the next iteration gives; by itself each follows the one before."""
        if epoch != self._next[0]:
            self._next = self._now = epoch, 0

    def state_dict(self) -> dict[str, int]:
        """Return where it stands: the epoch, and how many batches of it were given out."""
        epoch, batch = self._now
        if batch >= len(self):
            epoch, batch = epoch + 1, 0
        return {"epoch": epoch, "batch": batch}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Let the next iteration go on there."""
        self._next = self._now = state["epoch"], state["batch"]

    def statistics(self) -> CoordinationStatistics:
        """Return where the batches so far came from."""
        return self._statistics

    def close(self) -> None:
        """Leave the other jobs and end the worker processes; iterating joins again."""
        self._leave(at_once=False)

    def _leave(self, *, at_once: bool) -> None:
        membership, self._membership = self._membership, None
        if membership is not None:
            membership.close(at_once=at_once)

    def __iter__(self) -> Iterator[Any]:
        # Nothing happens before the first batch is asked for: Lightning makes an iterator just to
        # see that it can.
        self._iteration += 1
        iteration, (epoch, start) = self._iteration, self._next
        self._next, self._now = (epoch + 1, 0), (epoch, start)
        for batch, (value, origin) in enumerate(self._values(epoch, start), start):
            self._statistics = replace(
                self._statistics, **{origin: getattr(self._statistics, origin) + 1}
            )
            self._now = epoch, batch + 1
            yield self._pinned(value)
            self._check(iteration)

    def _check(self, iteration: int) -> None:
        if iteration != self._iteration:
            raise RuntimeError(
                "a newer iteration over this CoordinatedLoader was begun: only one goes on at a "
                "time"
            )

    def _values(self, epoch: int, start: int) -> Iterator[tuple[Any, str]]:
        """Each batch from `start` on, and its origin: a field of CoordinationStatistics."""
        lists, digest = self.preparation.epoch(epoch)
        try:
            for value, is_own, nbytes in self._joined().batches(
                epoch, start, len(lists), digest=digest
            ):
                if nbytes > self.memory_bytes:
                    message = (
                        f"a batch has {nbytes} bytes and memory_bytes={self.memory_bytes} "
                        "keeps none for other jobs"
                    )
                    self._warn("memory", message)
                start += 1
                yield value, "own" if is_own else "others"
            return
        except CoordinationRefused:
            self._leave(at_once=True)
            raise
        except CoordinatorLost as error:
            lost = str(error)
        self._leave(at_once=True)
        self._warn(
            "alone", f"batches are prepared without the other jobs, at least in this epoch: {lost}"
        )
        for value in self._alone(epoch, range(start, len(lists))):
            yield value, "alone"

    def _joined(self) -> Membership:
        """Membership in the group of jobs, kept over epochs. Raises CoordinatorLost."""
        if self._membership is not None and self._membership.process != os.getpid():
            self._membership = None  # of the process that this one was forked from
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
                    hello=self._hello(),
                    timeout_seconds=self.timeout_seconds,
                )
            except CoordinatorLost:
                self._may_join = False  # asking once is enough where it does not work
                raise
            weakref.finalize(self, self._membership.close)
        return self._membership

    def _hello(self) -> Message:
        name = f"{os.getpid()}-{secrets.token_hex(8)}"
        limits = {"memory_bytes": self.memory_bytes, "timeout_seconds": self.timeout_seconds}
        return {"job": name, **self._agreement, "batches": self.preparation.epoch(0)[1], **limits}

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

    def _alone(self, epoch: int, numbers: range) -> Iterator[Any]:
        loader: DataLoader[Any] = DataLoader(
            EpochAlone(self.preparation, epoch=epoch),
            batch_size=None,
            sampler=numbers,
            num_workers=self.num_workers,
            collate_fn=_unchanged,
            multiprocessing_context=self._context,
            worker_init_fn=self._init,
        )
        yield from loader

    def _pinned(self, value: Any) -> Any:
        if self.pin_memory and torch.accelerator.is_available():
            return _utils.pin_memory.pin_memory(value)  # type: ignore[no-untyped-call]
        return value

    def _warn(self, about: str, message: str) -> None:
        if about not in self._warned:
            self._warned.add(about)
            warnings.warn(message, stacklevel=5)


def _unchanged(value: Any) -> Any:
    return value

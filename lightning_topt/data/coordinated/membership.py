"""A job among those that share their batches: its connection to the coordinator, and its
workers.
"""

from __future__ import annotations

import dataclasses
import mmap
import multiprocessing.connection
import os
import sys
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

from lightning_topt.data.cache import sample_codec
from lightning_topt.data.coordinated.coordinated_worker import Workers
from lightning_topt.data.coordinated.coordinator_link import (
    CoordinatorLost,
    Message,
    close_quietly,
    join,
)
from lightning_topt.data.coordinated.ledger import Position


class CoordinationRefused(ValueError):
    """The jobs that meet in the same directory prepare other batches."""


class Membership:
    """Joins the jobs at `address`, as the first one or a later one, and starts this job's workers.

    Raises CoordinatorLost when no coordinator answers within `timeout_seconds`, CoordinationRefused
    when it serves other data.
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
        _refuse(answer)
        self.coordinator_pid = int(answer["pid"])
        self._closed = False
        try:
            self.workers = start_workers(hello)
        except BaseException:
            self.connection.close()
            raise

    def batches(
        self, epoch: int, start: int, end: int, *, digest: str
    ) -> Iterator[tuple[Any, bool, int]]:
        """Yield each batch from `start` to `end` (excluded), whether this job's own worker prepared
        it, and its bytes.

        Raises CoordinatorLost, CoordinationRefused, what the data set raised, and RuntimeError for
        a worker that died.
        """
        where = {"epoch": epoch, "batch": start, "batches": end, "digest": digest}
        self.connection.send({"type": "start", **where})
        for batch in range(start, end):
            if batch == start:
                self.connection.send({"type": "next"})
            message, descriptor = self._receive((epoch, batch))
            if batch + 1 < end:
                self.connection.send({"type": "next"})  # comes while this one is used
            nbytes = os.fstat(descriptor).st_size
            yield _decode(descriptor, nbytes), message["by"] == self.job, nbytes

    def close(self, *, at_once: bool = False) -> None:
        """Leave the group and end the workers. Safe to call twice, and where this process was
        forked from the job's.

        Workers may finish their batch, unless it must be `at_once`: where there is no coordinator
        to tell them.
        """
        if self._closed:
            return
        self._closed = True
        self.connection.close()
        if self.process == os.getpid():
            self.workers.close(at_once=at_once)

    def _receive(self, position: Position) -> tuple[Message, int]:
        """The answer for that batch. The coordinator is asked whether it is there when it is silent
        for long.
        """
        asked = False
        while True:
            received = self.connection.receive(timeout_seconds=0)
            if received is None:
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
            close_quietly(descriptor)  # asked for by an iteration that was given up
            _refuse(message)

    def _wait(self, position: Position) -> bool:
        """Whether something came within `timeout_seconds`; raises what prevents that batch from
        coming.
        """
        ready = multiprocessing.connection.wait(
            [self.connection.socket, *self.workers.waitables()], self.timeout_seconds
        )
        are_alive = self.workers.are_alive()  # asked before `check`, which says why not
        self.workers.check()
        if position in self.workers.errors:
            self.workers.errors[position].reraise()  # type: ignore[no-untyped-call]
        if not are_alive and self.connection.socket not in ready:
            raise CoordinatorLost(
                "the processes that prepare batches could not reach the coordinator"
            )
        return bool(ready)


def _refuse(message: Message) -> None:
    if message["type"] == "refused":
        raise CoordinationRefused(message["reason"])
    if message["type"] == "ended":
        raise CoordinatorLost(f"the coordinator failed: {message['reason']}")


def _decode(descriptor: int, nbytes: int) -> Any:
    """The batch in a file, which is closed; pages are shared with the other jobs until this one
    writes to them.
    """
    try:
        pages = mmap.mmap(
            descriptor, nbytes, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE
        )
    finally:
        os.close(descriptor)
    _find_records(sample_codec.header_of(pages))
    return sample_codec.decode(pages)


@lru_cache(maxsize=1024)
def _find_records(header: bytes) -> None:
    """Register the NamedTuples and dataclasses of a batch that another process encoded, where their
    module is imported.
    """
    specs = [sample_codec.layout_of(header).spec]
    while specs:
        spec = specs.pop()
        specs.extend(sample_codec.children(spec))
        if spec[0] in ("named", "record"):
            record = _imported(spec[1])
            if dataclasses.is_dataclass(record) or hasattr(record, "_fields"):
                sample_codec.register_sample_type(record)


def _imported(name: str) -> Any:
    """The class with that full name, None unless its module is imported already."""
    module, _, rest = name.rpartition(".")
    path = [rest]
    while module and module not in sys.modules:
        module, _, rest = module.rpartition(".")
        path.insert(0, rest)
    found: Any = sys.modules.get(module)
    for part in path:
        found = getattr(found, part, None)
    return found if isinstance(found, type) else None

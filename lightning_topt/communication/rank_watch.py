"""One thread on each rank that answers for it, so that after a failed collective the ranks that do
not answer can be named.

A rank's main thread may be anywhere when another rank's collective fails: in a collective itself,
in a long step, in the user's code. The thread looks at the job's store once a second, over a
connection of its own, and answers whatever the main thread does; a process that is killed or
stopped does not. No rank is asked before something fails.
"""

from __future__ import annotations

import atexit
import itertools
import logging
import os
import queue
import re
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store, _get_default_store

from lightning_topt.communication.peers import (
    FAILED,
    GRACE_SECONDS,
    POLL_SECONDS,
    PeerLostError,
    Survivors,
    describe_lost,
    find_survivors,
)
from lightning_topt.communication.processes import fate_of, own_identity, position_of_main_thread

log = logging.getLogger(__name__)

OF_COLLECTIVES = re.compile(
    r"gloo/|gloo connect|pair closure|closed by peer|reset by peer|broken pipe|remote process "
    r"exited|NCCL|ProcessGroup",
    re.IGNORECASE,
)
STORE_SECONDS = 5.0  # longer than any answer of a store that works
_INTRODUCTION_SECONDS = 0.05
_END_SECONDS = 3.0  # that a killed process may take to end, on a busy machine
SHARE_OF_SILENCE, BEATS = (
    0.8,
    8,
)  # of the time limit until a silent rank is reported, and how often a rank shows itself in it
_made = itertools.count()  # watches are made in the same order on all ranks

Request = Callable[[], Any]


def is_of_collective(error: BaseException) -> bool:
    """Return whether `error` is of a collective call that failed because of another rank, the
    network or the time limit.
    """
    if isinstance(error, PeerLostError | dist.DistError):
        return True
    return isinstance(error, RuntimeError) and OF_COLLECTIVES.search(str(error)) is not None


def time_limit(group: dist.ProcessGroup | None = None) -> timedelta | None:
    """Return how long a collective call on `group` (None: all ranks) may take; None where its
    backend does not say.
    """
    group = group or dist.group.WORLD
    if group is None:
        return None
    for device in group._device_types:
        limit = getattr(getattr(group._get_backend(device), "options", None), "_timeout", None)
        if isinstance(limit, timedelta):
            return limit
    return None


def within_limit(seconds: float, *, group: dist.ProcessGroup | None = None) -> float:
    """Return `seconds`, or the time limit of `group` where that is shorter."""
    limit = time_limit(group)
    return seconds if limit is None else min(seconds, limit.total_seconds())


def watch_ranks() -> RankWatch | None:
    """Return the watch over all ranks of the default process group, made alike on all; None for a
    rank that is alone.
    """
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    store = PrefixStore(f"lightning_topt/watch/{next(_made)}", _get_default_store().clone())  # type: ignore[attr-defined]  # missing in the stubs
    limit = time_limit()
    # Gloo's calls raise in time. What NCCL does is waited for on the device, and its own watchdog
    # ends the process.
    silence = (
        None
        if dist.get_backend() == "gloo" or limit is None
        else SHARE_OF_SILENCE * limit.total_seconds()
    )
    return RankWatch(
        store, rank=dist.get_rank(), world_size=dist.get_world_size(), silence_seconds=silence
    )


class RankWatch:
    """Answers for `rank` until `stop` or the end of the process, and says who is lost when a
    collective call has failed.

    `store`: of this watch alone. `silence_seconds`: a rank from which nothing was heard for so long
    is reported in the log, for backends whose calls do not raise; None: nobody is asked.
    """

    def __init__(
        self, store: Store, *, rank: int, world_size: int, silence_seconds: float | None = None
    ) -> None:
        self.rank, self.world_size = rank, world_size
        self._requests: queue.SimpleQueue[Request | None] = queue.SimpleQueue()
        self._answering = _Answering(store, rank, world_size, silence_seconds)
        self._thread = threading.Thread(
            target=_serve, args=(self._answering, self._requests), name="rank-watch", daemon=True
        )
        self._thread.start()
        # a thread inside torch while the interpreter ends can abort the process
        atexit.register(self.stop)

    def diagnose(
        self, error: BaseException, *, grace_seconds: float | None = None
    ) -> PeerLostError:
        """Say who is lost now that `error` has ended a collective call; waits at most a few seconds
        for answers.
        """
        grace = GRACE_SECONDS if grace_seconds is None else grace_seconds
        cause = str(error)
        found = self._ask(lambda: self._answering.find(grace), seconds=grace + STORE_SECONDS)
        if found is None:
            lost = PeerLostError(f"{self._answering.host()}; seen by rank {self.rank}: {cause}")
        else:
            lost = PeerLostError(describe_lost(found, rank=self.rank, cause=cause))
        lost.diagnosed, lost.__cause__ = True, error
        return lost

    def tell(self, error: BaseException) -> None:
        """Leave word that this rank ends with `error`, for ranks whose collective calls then
        fail.
        """
        text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        self._ask(lambda: self._answering.tell(text.partition("\n")[0][:500]), seconds=POLL_SECONDS)

    def stop(self) -> None:
        """End the thread and its connection, and take back what it left in the store, unless ranks
        were lost.
        """
        atexit.unregister(self.stop)
        self._requests.put(None)
        self._thread.join(timeout=STORE_SECONDS)

    def _ask(self, request: Request, *, seconds: float) -> Any:
        """Return what `request` returns in the watch's thread; None where the store does not answer
        in `seconds`.
        """
        answer: Future[Any] = Future()

        def run() -> None:
            try:
                answer.set_result(request())
            except RuntimeError:
                answer.set_result(None)

        if not self._thread.is_alive():
            return None
        self._requests.put(run)
        try:
            return answer.result(timeout=seconds)
        except TimeoutError:
            return None


def _serve(answering: _Answering, requests: queue.SimpleQueue[Request | None]) -> None:
    answering.look()
    while True:
        try:
            request = requests.get(timeout=answering.pause)
        except queue.Empty:
            answering.look()
            continue
        if request is None:
            answering.leave()
            return
        request()


@dataclass
class _Answering:
    """An `_Answering` is what the thread does; it alone touches `store`."""

    store: Store
    rank: int
    world_size: int
    silence_seconds: float | None
    reachable: bool = True
    answered: bool = False  # somebody failed, and knows that this rank lives; or this rank has
    introduced: bool = False
    host_identity: str = ""
    beats: int = 0
    waited: float = field(default=0.0)  # since the last beat
    # the neighbour's last beat, and for how many of one's own it has been the last
    heard: tuple[bytes, int] = (b"", 0)

    @property
    def pause(self) -> float:
        """Seconds until the next look: soon, as long as it is not known who hosts the store."""
        return POLL_SECONDS if self.host_identity or not self.reachable else _INTRODUCTION_SECONDS

    def look(self) -> None:
        """Answer where somebody asks. A store that is gone is no error: its host may simply have
        finished before.
        """
        if not self.reachable:
            return
        try:
            if not self.introduced:
                self.store.set(f"process/{self.rank}", own_identity())
                self.introduced = True
            if not self.host_identity and self.store.check(["process/0"]):
                self.host_identity = self.store.get("process/0").decode()
            if not self.answered and self.store.check([FAILED]):
                self.store.set(f"alive/{self.rank}", position_of_main_thread() or "-")
                self.answered = True
            if self.silence_seconds is not None:
                self.listen(self.silence_seconds)
        except RuntimeError:
            self.reachable = False

    def find(self, grace_seconds: float) -> Survivors:
        """Ask all ranks, and wait for their answers. Raises RuntimeError without a store."""
        self.look()
        self.answered = True
        self.store.set(f"alive/{self.rank}", "")
        self.store.set(FAILED, "1")
        return find_survivors(self.store, self.world_size, grace_seconds=grace_seconds)

    def tell(self, text: str) -> None:
        self.answered = True
        self.store.set(f"ended/{self.rank}", text)

    def leave(self) -> None:
        if self.reachable and not self.answered:
            try:
                for key in (f"process/{self.rank}", f"beat/{self.rank}"):
                    self.store.delete_key(key)
            except RuntimeError:
                self.reachable = False

    def host(self) -> str:
        """Say who is gone with the store."""
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            return (
                "the job's store does not answer: torchrun, which hosts it, is gone or stopped "
                "on the first node"
            )
        fate, waited = fate_of(self.host_identity), 0.0
        while not fate and waited < _END_SECONDS:  # its sockets close before it has ended
            time.sleep(POLL_SECONDS)
            fate, waited = fate_of(self.host_identity), waited + POLL_SECONDS
        return (
            "rank 0 did not answer: the job's store, which it hosts, does "
            f"not{f' ({fate})' if fate else ''}"
        )

    # ---- backends whose calls do not raise -------------------------------------------------------

    def listen(self, silence_seconds: float) -> None:
        """Show that this rank runs, and look whether the next one does."""
        self.waited += self.pause
        if self.waited < silence_seconds / BEATS:
            return
        self.waited, self.beats = 0.0, self.beats + 1
        self.store.set(f"beat/{self.rank}", str(self.beats))
        other = (self.rank + 1) % self.world_size
        key, (last, silent) = f"beat/{other}", self.heard
        beat = self.store.get(key) if self.store.check([key]) else b""
        # Without a beat it has not begun, or has left. Counted in one's own beats: where all were
        # stopped, nobody was silent.
        self.heard = beat, silent + 1 if beat == last and beat else 0
        if self.heard[1] == BEATS:
            self.report(other, silence_seconds)

    def report(self, other: int, silence_seconds: float) -> None:
        key = f"process/{other}"
        fate = fate_of(self.store.get(key).decode()) if self.store.check([key]) else ""
        log.error(
            "rank %d has not been heard of for %.0f s%s; what waits for it ends at the time limit "
            "of its group",
            other,
            silence_seconds,
            f" ({fate})" if fate else "",
        )

"""Lost ranks: who is gone when a collective call fails.

A failed collective call says that some connection broke, not whose. So survivors sign in at the
job's store, and those that do not are named in a `PeerLostError`. A `RankWatch` is one thread on
each rank that answers for it: the main thread may be anywhere when another rank's call fails, in a
collective call itself, in a long step, in the user's code. The thread reads the store once a
second, over a connection of its own, and answers whatever the main thread does; a process that is
killed or stopped does not. No rank is asked before something fails. Calls of NCCL may not raise:
its own watchdog ends the process.

    key             written by                        says
    failed          the first that sees a failure     sign in
    alive/RANK      each survivor                     it lives
    learned/RANK    each survivor                     it knows who is lost
    ended/RANK      a rank that ends with an error    which error
    process/RANK    each watch, when it starts        which process it is
    over            rank 0, when its run is over      ask no more: it may host the store

Rank 0 may host the store, and its error may end its process. So it first waits until the other
survivors have learned who is lost.

Where torchrun restarts the job, `init_attempt` gives each attempt its own part of torchrun's store.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import json
import os
import re
import secrets
import threading
import time
from collections.abc import Generator, Iterable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store, _get_default_store
from torch.distributed.rendezvous import rendezvous

FAILED = "failed"
POLL_SECONDS = 1.0  # between two checks whether another rank reported a failure
# survivors check every POLL_SECONDS, also while idle: who has not signed in by then is gone
GRACE_SECONDS = 5.0
STORE_SECONDS = 5.0  # longer than any answer of a store that works

OF_COLLECTIVES = re.compile(
    r"gloo/|gloo connect|pair closure|closed by peer|reset by peer|broken pipe|remote process "
    r"exited|NCCL|ProcessGroup",
    re.IGNORECASE,
)
BOOT = Path("/proc/sys/kernel/random/boot_id")
PROCESS_SPACE = Path("/proc/self/ns/pid")
ATTEMPT_PAUSE_SECONDS = 0.02
ATTEMPT = "lightning_topt/attempt"  # keys of `attempt_store`

_made = itertools.count()  # watches are made in the same order on all ranks


class PeerLostError(RuntimeError):
    """A collective call failed because of other ranks.

    It names those that did not sign in, where it is `diagnosed`.
    """

    diagnosed = False


def is_of_collective(error: BaseException) -> bool:
    """Return whether `error` is of a collective call that failed because of others.

    That is another rank, the network or the time limit, not a device that is full.
    """
    if isinstance(error, PeerLostError):  # which may say that another rank's device is
        return True
    of_calls = isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and OF_COLLECTIVES.search(str(error)) is not None
    )
    return of_calls and "out of memory" not in str(error)


def watch_ranks() -> RankWatch | None:
    """Return the watch over all ranks of the default process group, made alike on all.

    None for a rank that is alone.
    """
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    default: Any = _get_default_store()
    store = PrefixStore(f"lightning_topt/watch/{next(_made)}", default.clone())
    return RankWatch(store, rank=dist.get_rank(), world_size=dist.get_world_size())


class RankWatch:
    """Answers for `rank`, and says who is lost when a collective call has failed.

    It does so until `stop` or the end of the process. Its thread alone touches `store`: the main
    thread may be stuck in a connection of its own.

    Args:
        store: the job's, with keys of this watch alone.
        rank: this rank.
        world_size: number of ranks.
    """

    def __init__(self, store: Store, *, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size
        self.survivors: Survivors | None = None  # once somebody failed
        self._own_end = ""  # the error that this rank ends with
        self._asks = self._stops = False
        self._wake, self._done = threading.Event(), threading.Event()
        self._thread = threading.Thread(
            target=self._answer, args=(store,), name="rank-watch", daemon=True
        )
        self._thread.start()
        # a thread inside torch while the interpreter ends can abort the process
        atexit.register(self.stop)

    def diagnose(self, error: BaseException) -> PeerLostError:
        """Say who is lost now that `error` has ended a collective call.

        Waits at most a few seconds for answers, whatever the ranks do meanwhile.
        """
        self._asks = True
        self._wake.set()
        # as long again for the thread's own question, and for others to learn
        self._done.wait(2 * GRACE_SECONDS + STORE_SECONDS)
        if self._stops and self.survivors is None:
            lost = "a collective call failed after the run, which nobody watches"
        elif self.survivors is None:
            host = "rank 0"
            if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
                host = "torchrun on the first node"
            lost = f"{host} did not answer: the job's store, which it hosts, is gone"
        else:
            lost = self.survivors.describe()
        named = PeerLostError(f"{lost}; seen by rank {self.rank}: {error}")
        named.diagnosed, named.__cause__ = True, error
        return named

    def others_failed(self) -> bool:
        """Return whether another rank reported a failure."""
        return self.survivors is not None

    def tell(self, error: BaseException) -> None:
        """Record that this rank ends with `error`, for ranks whose collective calls then fail."""
        text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        self._own_end = text.partition("\n")[0][:500]
        self._wake.set()
        self._done.wait(POLL_SECONDS)

    def stop(self) -> None:
        """End the thread and its connection.

        What it left in the store is taken back, unless ranks were lost.
        """
        atexit.unregister(self.stop)
        self._stops = True
        self._wake.set()
        self._thread.join(timeout=STORE_SECONDS)

    # ---- the watch's thread

    def _answer(self, store: Store) -> None:
        # A store that is gone is no error: its host may simply have finished before.
        with contextlib.suppress(RuntimeError):
            store.set(f"process/{self.rank}", own_identity())
            # until somebody fails, or this rank ends
            while not self._stops and not self._own_end and not store.check(["over"]):
                if self._asks or store.check([FAILED]):
                    self._learn(store)
                    break
                self._wake.wait(POLL_SECONDS)
            if self._own_end:
                store.set(f"ended/{self.rank}", self._own_end)
            elif self.survivors is None:
                store.delete_key(f"process/{self.rank}")
                if self.rank == 0:
                    self._let_go(store)
        self._done.set()

    def _let_go(self, store: Store) -> None:
        # Wait until the watches of other ranks have ended: the store may go with this process
        store.set("over", "1")
        others = [f"process/{rank}" for rank in range(1, self.world_size)]
        deadline = time.monotonic() + 2 * POLL_SECONDS
        while any(store.check([key]) for key in others) and time.monotonic() < deadline:
            time.sleep(0.02)
        store.delete_key("over")

    def _learn(self, store: Store) -> None:
        # Sign in, find out who is lost, and let the others do so
        store.set(f"alive/{self.rank}", "1")
        store.set(FAILED, "1")
        self.survivors = found = find_survivors(store, self.world_size)
        store.set(f"learned/{self.rank}", "1")
        if self.rank == 0:
            gone = {0, *found.missing, *found.ended}
            wait_for_learners(store, set(range(self.world_size)) - gone)


@contextlib.contextmanager
def named_errors(watch: RankWatch | None) -> Generator[None]:
    """Let an error of a collective call within say who is lost, by a PeerLostError."""
    try:
        yield
    except (RuntimeError, TimeoutError) as error:
        if watch is None or isinstance(error, PeerLostError):
            raise
        raise watch.diagnose(error) from error


@contextlib.contextmanager
def lost_peers(what: str) -> Generator[None]:
    """Say in a PeerLostError `what` a collective call that fails within has left undone."""
    try:
        yield
    except RuntimeError as error:
        raise PeerLostError(
            f"{what}: a rank is gone, or slower than the timeout of the process group; go back to "
            f"a checkpoint: {error}"
        ) from error


def wait_watched(
    work: Any, watch: RankWatch | None, *, timeout_seconds: float, pause: float
) -> None:
    """Wait until `work` is done, with `pause` seconds between two looks at it.

    Raises:
        RuntimeError: another rank reports a failure.
        TimeoutError: `timeout_seconds` have passed.
    """
    deadline = time.monotonic() + timeout_seconds
    while not work.is_completed():
        if watch is not None and watch.others_failed():
            raise RuntimeError("another rank reported a failure")
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited longer than {timeout_seconds:g} s for another rank")
        time.sleep(pause)
    work.wait()


@dataclass(frozen=True)
class Survivors:
    """What the ranks answered when one asked.

    `ended` are the errors of ranks that ended; `missing` gave no answer; `fates` has what is known
    of their processes.
    """

    ended: dict[int, str]
    missing: list[int]
    fates: dict[int, str]

    def describe(self) -> str:
        """Say who is lost."""
        if self.ended:
            return "; ".join(f"rank {rank} ended with {text}" for rank, text in self.ended.items())
        if self.missing:
            who = ", ".join(f"rank {rank}" for rank in self.missing)
            fates = ", ".join(f"rank {rank}: {fate}" for rank, fate in self.fates.items())
            return f"{who} did not answer in a collective call{f' ({fates})' if fates else ''}"
        return (
            "a collective call failed although all ranks are alive: one of them is slow, hangs, or "
            "makes other calls; if one is slow, raise the strategy's timeout"
        )


def find_survivors(store: Store, world_size: int) -> Survivors:
    """Wait until every rank has answered, or is known to be gone.

    Answers are ``alive/RANK`` or ``ended/RANK``; ``process/RANK`` says which process it is.
    """
    deadline = time.monotonic() + GRACE_SECONDS
    missing, fates = list(range(world_size)), dict[int, str]()
    # until all have answered, the others have ended, or the time is over
    while True:
        missing = [
            r
            for r in missing
            if not store.check([f"alive/{r}"]) and not store.check([f"ended/{r}"])
        ]
        identities = _read(store, "process", missing)
        fates = {rank: fate for rank, text in identities.items() if (fate := fate_of(text))}
        if len(fates) == len(missing) or time.monotonic() > deadline:
            return Survivors(_read(store, "ended", range(world_size)), missing, fates)
        time.sleep(0.05)


def _read(store: Store, kind: str, ranks: Iterable[int]) -> dict[int, str]:
    # What ranks have written of a kind
    keys = {rank: f"{kind}/{rank}" for rank in ranks}
    return {rank: store.get(key).decode() for rank, key in keys.items() if store.check([key])}


def wait_for_learners(store: Store, ranks: Iterable[int]) -> None:
    """Wait until these ranks have learned who is lost: the store goes with the rank that hosts it.

    They ask every `POLL_SECONDS`, and wait for answers as long as this rank did.
    """
    keys, deadline = [f"learned/{rank}" for rank in ranks], time.monotonic() + GRACE_SECONDS
    with contextlib.suppress(RuntimeError):  # torchrun, which hosted it, is gone
        while keys and not store.check(keys) and time.monotonic() < deadline:
            time.sleep(0.05)


# ---- time limits of process groups


def time_limit(group: dist.ProcessGroup | None = None) -> timedelta | None:
    """Return how long a collective call on `group` (None: all ranks) may take.

    None where its backend does not say.
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


# ---- processes of this machine


def own_identity() -> str:
    """Return text by which another process of this machine finds this one.

    It is the boot, the process namespace, the process id and its start.
    """
    boot = space = ""
    with contextlib.suppress(OSError):  # another system than Linux
        boot, space = BOOT.read_text().strip(), os.readlink(PROCESS_SPACE)
    return " ".join(
        (boot or "-", space or "-", str(os.getpid()), process_start(os.getpid()) or "-")
    )


def fate_of(identity: str) -> str:
    """Return that the process with that `own_identity` has ended or is stopped, else ""."""
    # only a process of the same machine and namespace can be seen
    here, there = own_identity().split(), identity.split()
    if len(there) != 4 or there[:2] != here[:2] or "-" in there:
        return ""
    state, started = process_state(int(there[2]))
    if started != there[3] or state in "ZX":
        return f"process {there[2]} has ended"
    return f"process {there[2]} is stopped" if state in "Tt" else ""


def process_start(process: int) -> str:
    """Return when `process` started, in ticks since boot; empty where it has ended.

    Also where its parent does not know yet that it has.
    """
    state, started = process_state(process)
    return "" if state in "ZX" else started


def process_state(process: int) -> tuple[str, str]:
    """Return the state of `process` (R, S, T, Z, ... of /proc) and its start in ticks since boot.

    Both are empty where there is no such process.
    """
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return "", ""
    return fields[0], fields[19]


# ---- restarts by torchrun


def shares_store_between_attempts() -> bool:
    """Return whether torchrun may start this rank again, and then gives it the same store."""
    shared = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return shared and int(os.environ.get("TORCHELASTIC_MAX_RESTARTS") or 0) > 0


def init_attempt(
    backend: str,
    *,
    rank: int,
    world_size: int,
    timeout: timedelta,
    device_id: torch.device | None = None,
) -> None:
    """Make the default process group, in a part of torchrun's store that no other attempt uses.

    With ``--max-restarts`` torchrun (torch 2.13, rendezvous c10d) gives every attempt the store of
    the one before. gloo then connects to the addresses of ranks that are dead: the second attempt
    never begins. Raises TimeoutError where not all ranks come.
    """
    store, _, _ = next(rendezvous("env://", rank, world_size, timeout=timeout))
    own = attempt_store(store, rank=rank, world_size=world_size, timeout=timeout)
    options: dict[str, Any] = {
        "rank": rank,
        "world_size": world_size,
        "timeout": timeout,
        "device_id": device_id,
    }
    dist.init_process_group(backend, store=own, **options)


def attempt_store(store: Store, *, rank: int, world_size: int, timeout: timedelta) -> PrefixStore:
    """Return the part of `store` of the ranks that call this now.

    Each node counts its restarts for itself, so ranks agree on a name for the attempt instead.
    Every rank leaves a token. Rank 0 proposes a name for the tokens that it sees, anew when one is
    replaced, until every rank has found its own token in the proposal. What ranks of earlier
    attempts left in `store` does not matter. Raises TimeoutError.
    """
    token, deadline = secrets.token_hex(8), time.monotonic() + timeout.total_seconds()
    store.set(f"{ATTEMPT}/token/{rank}", token)
    tokens: list[str] = []  # those that rank 0 last made a proposal for
    while True:
        # rank 0 proposes a name for the tokens that are there
        if rank == 0:
            keys = [f"{ATTEMPT}/token/{other}" for other in range(world_size)]
            seen = [store.get(key).decode() if store.check([key]) else "" for key in keys]
            if seen != tokens and all(seen):
                tokens = seen
                store.set(f"{ATTEMPT}/proposal", json.dumps([secrets.token_hex(8), tokens]))
        name, proposed = "", []
        if store.check([f"{ATTEMPT}/proposal"]):
            name, proposed = json.loads(store.get(f"{ATTEMPT}/proposal"))
        # its own token is in it: join, and begin once all have joined and rank 0 has begun
        if len(proposed) == world_size and proposed[rank] == token:
            store.set(f"{ATTEMPT}/{name}/joined/{rank}", token)
            missing = [
                other
                for other in range(world_size)
                if not store.check([f"{ATTEMPT}/{name}/joined/{other}"])
            ]
            if not missing and (rank == 0 or store.check([f"{ATTEMPT}/{name}/begun"])):
                store.set(f"{ATTEMPT}/{name}/begun", "1")
                return PrefixStore(f"{ATTEMPT}/{name}", store)
        if time.monotonic() > deadline:
            raise TimeoutError(
                f"rank {rank} waited {timeout.total_seconds():g} s for all {world_size} ranks of "
                "this attempt"
            )
        time.sleep(ATTEMPT_PAUSE_SECONDS)

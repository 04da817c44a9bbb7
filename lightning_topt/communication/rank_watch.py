"""Lost ranks: who is gone when a collective fails, and a fresh store when all begin anew.

A failed collective says that some connection broke, not whose. So survivors sign in at the job's
store, and those that do not are named in a `PeerLostError`. Two signers:

- `RankWatch`, for any collective call (`plugins.lost_ranks`; `plugins.parallel_optimizer` under
  Lightning's own ddp): one thread on each rank answers for it. The main thread may
  be anywhere when another rank's collective fails: in a collective itself, in a long step, in the
  user's code. The thread reads the store once a second, over a connection of its own, and answers
  whatever the main thread does; a process that is killed or stopped does not. No rank is asked
  before something fails. Calls of NCCL may not raise: its own watchdog ends the process.
- `PeerMonitor`, for an exchange that polls anyway (`exchange_worker`): its own worker signs in, no
  thread.

    key             written by                            says
    failed          the first that sees a failure         sign in
    alive/RANK      each survivor                         where it is; "": it failed too
    learned/RANK    each survivor                         it knows who is lost
    asks/RANK       each survivor with a `PeerMonitor`    it will learn it
    ended/RANK      a rank that ends with an error        which error
    process/RANK    each watch, when it starts            which process it is

Rank 0 may host the store, and its error may end its process. So it first waits until the other
survivors have learned who is lost.

Where torchrun restarts the job, `init_attempt` gives each attempt its own part of torchrun's store.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import json
import logging
import os
import queue
import re
import secrets
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store, _get_default_store
from torch.distributed.rendezvous import rendezvous

log = logging.getLogger(__name__)

FAILED = "failed"
POLL_SECONDS = 1.0  # between two checks whether another rank reported a failure
# survivors check every POLL_SECONDS, also while idle: who has not signed in by then is gone
GRACE_SECONDS = 5.0
STORE_SECONDS = 5.0  # longer than any answer of a store that works
_INTRODUCTION_SECONDS = 0.05
_END_SECONDS = 3.0  # that a killed process may take to end, on a busy machine

OF_COLLECTIVES = re.compile(
    r"gloo/|gloo connect|pair closure|closed by peer|reset by peer|broken pipe|remote process "
    r"exited|NCCL|ProcessGroup",
    re.IGNORECASE,
)
BOOT = Path("/proc/sys/kernel/random/boot_id")
PROCESS_SPACE = Path("/proc/self/ns/pid")
INSTALLED = ("site-packages", "dist-packages", f"{os.sep}lib{os.sep}python", "<frozen", "<string>")
ATTEMPT_PAUSE_SECONDS = 0.02
ATTEMPT = "lightning_topt/attempt"  # keys of `attempt_store`

_made = itertools.count()  # watches are made in the same order on all ranks

Request = Callable[[], Any]


class PeerLostError(RuntimeError):
    """An exchange failed because of other ranks.

    It names those that did not sign in, where it is `diagnosed`.
    """

    diagnosed = False


def is_of_collective(error: BaseException) -> bool:
    """Return whether `error` is of a collective call that failed because of others.

    That is another rank, the network or the time limit.
    """
    if isinstance(error, PeerLostError | dist.DistError):
        return True
    return isinstance(error, RuntimeError) and OF_COLLECTIVES.search(str(error)) is not None


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

    It does so until `stop` or the end of the process.

    Args:
        store: the job's, with keys of this watch alone.
        rank: this rank.
        world_size: number of ranks.
    """

    def __init__(self, store: Store, *, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size
        self._requests: queue.SimpleQueue[Request | None] = queue.SimpleQueue()
        self._answering = _Answering(store, rank, world_size)
        self._thread = threading.Thread(
            target=_serve, args=(self._answering, self._requests), name="rank-watch", daemon=True
        )
        self._thread.start()
        # a thread inside torch while the interpreter ends can abort the process
        atexit.register(self.stop)

    def diagnose(
        self, error: BaseException, *, grace_seconds: float | None = None
    ) -> PeerLostError:
        """Say who is lost now that `error` has ended a collective call.

        Waits at most a few seconds for answers, whatever the ranks do meanwhile.
        """
        # the watch's thread asks; the main thread may be stuck in the store's own connection
        grace = GRACE_SECONDS if grace_seconds is None else grace_seconds
        cause = str(error)
        # as long again for the thread's own question, and for others to learn
        found = self._ask(lambda: self._answering.find(grace), seconds=2 * grace + STORE_SECONDS)
        if found is None:
            lost = PeerLostError(f"{self._answering.host()}; seen by rank {self.rank}: {cause}")
        else:
            lost = PeerLostError(describe_lost(found, rank=self.rank, cause=cause))
        lost.diagnosed, lost.__cause__ = True, error
        return lost

    def others_failed(self) -> bool:
        """Return whether another rank reported a failure."""
        return self._answering.found is not None

    def tell(self, error: BaseException) -> None:
        """Record that this rank ends with `error`, for ranks whose collective calls then fail."""
        text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        self._ask(
            lambda: self._answering.record_end(text.partition("\n")[0][:500]), seconds=POLL_SECONDS
        )

    def stop(self) -> None:
        """End the thread and its connection.

        What it left in the store is taken back, unless ranks were lost.
        """
        atexit.unregister(self.stop)
        self._requests.put(None)
        self._thread.join(timeout=STORE_SECONDS)

    def _ask(self, request: Request, *, seconds: float) -> Any:
        """Return what `request` returns in the watch's thread.

        None where the store does not answer in `seconds`.
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
    # Answer other ranks and do what this one requests; the watch's thread
    answering.check()
    while True:
        try:
            request = requests.get(timeout=answering.pause)
        except queue.Empty:
            answering.check()
            continue
        if request is None:
            answering.leave()
            return
        request()


@dataclass
class _Answering:
    """What the watch's thread does; it alone touches `store`."""

    store: Store
    rank: int
    world_size: int
    reachable: bool = True
    answered: bool = False  # somebody failed, and knows that this rank lives; or this rank has
    found: Survivors | None = None  # once somebody failed
    introduced: bool = False
    host_identity: str = ""

    @property
    def pause(self) -> float:
        """Seconds until the next check: short as long as it is not known who hosts the store."""
        return POLL_SECONDS if self.host_identity or not self.reachable else _INTRODUCTION_SECONDS

    def check(self) -> None:
        """Answer where somebody asks.

        A store that is gone is no error: its host may simply have finished before.
        """
        if not self.reachable:
            return
        try:
            self.introduce()
            # somebody failed: answer, once, and learn who is lost while the store is there
            if not self.answered and self.store.check([FAILED]):
                self.store.set(f"alive/{self.rank}", position_of_main_thread() or "-")
                self.learn(GRACE_SECONDS)
        except RuntimeError:
            self.reachable = False

    def introduce(self) -> None:
        """Say who this rank is, and learn who hosts the store."""
        if not self.introduced:
            self.store.set(f"process/{self.rank}", own_identity())
            self.introduced = True
        if not self.host_identity and self.store.check(["process/0"]):
            self.host_identity = self.store.get("process/0").decode()

    def find(self, grace_seconds: float) -> Survivors:
        """Ask all ranks, and wait for their answers. Raises RuntimeError without a store.

        Where this rank has learned it already the store may be gone.
        """
        if self.found is None:
            self.introduce()
            self.store.set(f"alive/{self.rank}", "")
            self.store.set(FAILED, "1")
            self.learn(grace_seconds)
        assert self.found is not None
        if self.rank == 0:
            gone = {0, *self.found.missing, *self.found.ended}
            wait_for_learners(self.store, set(range(self.world_size)) - gone)
        return self.found

    def learn(self, grace_seconds: float) -> None:
        """Find out who is lost, and say that this rank knows it."""
        self.answered = True
        self.found = find_survivors(self.store, self.world_size, grace_seconds=grace_seconds)
        self.found.positions.pop(self.rank, None)
        self.store.set(f"learned/{self.rank}", "1")

    def record_end(self, text: str) -> None:
        """Record the error that this rank ends with."""
        self.answered = True
        self.store.set(f"ended/{self.rank}", text)

    def leave(self) -> None:
        """Take back what this rank left in the store, unless somebody failed."""
        if self.reachable and not self.answered:
            try:
                self.store.delete_key(f"process/{self.rank}")
            except RuntimeError:
                self.reachable = False

    def host(self) -> str:
        """Say who is gone with the store."""
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            return (
                "the job's store does not answer: torchrun, which hosts it, is gone or stopped on "
                "the first node"
            )
        fate, waited = fate_of(self.host_identity), 0.0
        while not fate and waited < _END_SECONDS:  # its sockets close before it has ended
            time.sleep(POLL_SECONDS)
            fate, waited = fate_of(self.host_identity), waited + POLL_SECONDS
        return (
            "rank 0 did not answer: the job's store, which it hosts, does "
            f"not{f' ({fate})' if fate else ''}"
        )


def find_survivors(store: Store, world_size: int, *, grace_seconds: float) -> Survivors:
    """Wait until every rank has answered, or is known to be gone.

    Answers are ``alive/RANK`` or ``ended/RANK``; ``process/RANK`` says which process it is.
    """
    deadline = time.monotonic() + grace_seconds
    missing, fates = list(range(world_size)), dict[int, str]()
    # until all have answered, the others have ended, or the time is over
    while True:
        missing = [
            r
            for r in missing
            if not store.check([f"alive/{r}"]) and not store.check([f"ended/{r}"])
        ]
        known = {
            rank: store.get(f"process/{rank}").decode()
            for rank in missing
            if store.check([f"process/{rank}"])
        }
        fates = {rank: fate for rank, identity in known.items() if (fate := fate_of(identity))}
        if len(fates) == len(missing) or time.monotonic() > deadline:
            break
        time.sleep(0.05)
    answers = {
        kind: {
            rank: store.get(f"{kind}/{rank}").decode()
            for rank in range(world_size)
            if store.check([f"{kind}/{rank}"])
        }
        for kind in ("alive", "ended")
    }
    return Survivors(
        {r: text for r, text in answers["alive"].items() if text}, answers["ended"], missing, fates
    )


def wait_for_learners(store: Store, ranks: Iterable[int]) -> None:
    """Wait until these ranks have learned who is lost: the store goes with the rank that hosts it.

    They ask every `POLL_SECONDS`, and wait for answers as long as this rank did.
    """
    keys, deadline = [f"learned/{rank}" for rank in ranks], time.monotonic() + GRACE_SECONDS
    with contextlib.suppress(RuntimeError):  # torchrun, which hosted it, is gone
        while keys and not store.check(keys) and time.monotonic() < deadline:
            time.sleep(0.05)


@dataclass(frozen=True)
class Survivors:
    """What the ranks answered when one asked.

    `positions` are those of ranks that did not fail themselves; `ended` are the errors of others;
    `missing` gave no answer; `fates` has what is known of their processes.
    """

    positions: dict[int, str]
    ended: dict[int, str]
    missing: list[int]
    fates: dict[int, str]


def describe_lost(found: Survivors, *, rank: int, cause: str) -> str:
    """Say who is lost, as `rank` sees it after the error `cause`."""
    seen = f"seen by rank {rank}: {cause}"
    if found.ended:
        ends = "; ".join(f"rank {other} ended with {text}" for other, text in found.ended.items())
        return f"{ends}; {seen}"
    if found.missing:
        who = ", ".join(f"rank {other}" for other in found.missing)
        fates = ", ".join(f"rank {other}: {fate}" for other, fate in found.fates.items())
        return f"{who} did not answer in a collective call{f' ({fates})' if fates else ''}; {seen}"
    places = "; ".join(
        f"rank {other} is at {place}" for other, place in found.positions.items() if place != "-"
    )
    return (
        "a collective call failed although all ranks are alive: one of them is slow, hangs, or "
        f"makes other calls{f' ({places})' if places else ''}; if one is slow, raise the "
        f"strategy's timeout; {seen}"
    )


# ---- for exchanges that poll by themselves


class PeerMonitor:
    """Finds out who is gone when a collective of an exchange fails, on all surviving ranks.

    Args:
        store: the job's, with keys of this exchange alone.
        rank: this rank.
        world_size: number of ranks.
        ranks: those that share the store, if not all of `world_size`.
    """

    def __init__(
        self, store: Store, *, rank: int, world_size: int, ranks: Sequence[int] | None = None
    ) -> None:
        self.store, self.rank, self.world_size = store, rank, world_size
        self.ranks = range(world_size) if ranks is None else ranks
        self.asked_at = time.monotonic()
        self.reachable = True

    def others_failed(self) -> bool:
        """Return whether another rank reported a failure.

        Asks the store at most every `POLL_SECONDS`.
        """
        if not self.reachable or time.monotonic() - self.asked_at < POLL_SECONDS:
            return False
        self.asked_at = time.monotonic()
        try:
            return bool(self.store.check([FAILED]))
        except RuntimeError:
            # The store's host may simply have finished before; a collective that fails reports it.
            self.reachable = False
            return False

    def diagnose(
        self, error: BaseException, *, grace_seconds: float | None = None
    ) -> PeerLostError:
        """Sign in, wait for the other survivors, and say who did not come.

        `error` is the cause; `grace_seconds` is how long to wait (None: `GRACE_SECONDS`).
        """
        grace = GRACE_SECONDS if grace_seconds is None else grace_seconds
        lost = PeerLostError(self._describe(error, grace))
        lost.diagnosed, lost.__cause__ = True, error
        return lost

    def sign_in(self) -> None:
        """Say that this rank lives, and that the exchange has failed.

        Raises RuntimeError without a store.
        """
        self.store.set(f"alive/{self.rank}", "1")
        self.store.set(FAILED, "1")

    def _describe(self, error: BaseException, grace_seconds: float) -> str:
        try:
            self.store.set(f"asks/{self.rank}", "1")
            self.sign_in()
            missing = self._missing(grace_seconds)
            self.store.set(f"learned/{self.rank}", "1")
            # one that only signed in does not ask
            if self.rank == 0:
                asking = [rank for rank in self.ranks if self.store.check([f"asks/{rank}"])]
                wait_for_learners(self.store, asking)
        except Exception:
            return (
                f"rank {self.rank} lost the job's store in an exchange of gradients: the rank that "
                f"hosts it (rank 0, unless torchrun does) is gone; {error}"
            )
        if missing:
            who = ", ".join(f"rank {rank}" for rank in missing)
            return (
                f"{who} did not answer in an exchange of gradients; seen by rank {self.rank}: "
                f"{error}"
            )
        return (
            f"an exchange of gradients failed on rank {self.rank} although all {len(self.ranks)} "
            f"ranks are alive: {error}; if one is slow, raise timeout_seconds"
        )

    def _missing(self, grace_seconds: float) -> list[int]:
        # The ranks that do not sign in within `grace_seconds`
        deadline = time.monotonic() + grace_seconds
        missing = list(self.ranks)
        while missing and time.monotonic() < deadline:
            missing = [rank for rank in missing if not self.store.check([f"alive/{rank}"])]
            if missing:
                time.sleep(0.05)
        return missing


def ranks_that(
    flag: bool, *, store: Store, rank: int, world_size: int, key: str, seconds: float
) -> list[int]:
    """Return the ranks with a true `flag`; all ranks call this with the same, unused `key`.

    Raises DistStoreError after `seconds`.
    """
    store.set(f"{key}/{rank}", "1" if flag else "0")
    keys = [f"{key}/{other}" for other in range(world_size)]
    store.wait(keys, timedelta(seconds=seconds))
    return [other for other, name in enumerate(keys) if store.get(name) == b"1"]


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


def position_of_main_thread() -> str:
    """Return the innermost line of the user's code that the main thread is at.

    As ``file.py:12 in function``; empty if there is none.
    """
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    # outwards from the innermost frame, past this package and installed ones
    package = str(Path(__file__).parents[1])
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith(package) and not any(part in name for part in INSTALLED):
            return f"{name}:{frame.f_lineno} in {frame.f_code.co_name}"
        frame = frame.f_back
    return ""


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

"""The survivors of a failed collective sign in at the job's store, to find which rank is gone."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

from torch.distributed.distributed_c10d import Store

from lightning_topt.communication.processes import fate_of

FAILED = "failed"
POLL_SECONDS = 1.0  # how often a worker looks whether another rank reported a failure
# survivors look every POLL_SECONDS, also while idle: who has not signed in by then is gone
GRACE_SECONDS = 5.0


class PeerLostError(RuntimeError):
    """An exchange failed because of other ranks; names those that did not sign in, where it is
    `diagnosed`.
    """

    diagnosed = False


class PeerMonitor:
    """Finds out who is gone when a collective fails, on all surviving ranks."""

    def __init__(
        self, store: Store, *, rank: int, world_size: int, members: Sequence[int] | None = None
    ) -> None:
        """`members` are the ranks that share the store, if not all of `world_size`."""
        self.store, self.rank, self.world_size = store, rank, world_size
        self.members = range(world_size) if members is None else members
        self.looked = time.monotonic()
        self.reachable = True

    def look(self) -> bool:
        """Return whether another rank reported a failure; asks the store at most every
        `POLL_SECONDS`.
        """
        if not self.reachable or time.monotonic() - self.looked < POLL_SECONDS:
            return False
        self.looked = time.monotonic()
        try:
            return bool(self.store.check([FAILED]))
        except RuntimeError:
            # The store's host may simply have finished before us; a failure in a collective is
            # reported by that collective.
            self.reachable = False
            return False

    def diagnose(
        self, error: BaseException, *, grace_seconds: float | None = None
    ) -> PeerLostError:
        """Sign in, wait for the other survivors, and say who did not come within `grace_seconds`;
        `error` is the cause.
        """
        lost = self._diagnose(error, GRACE_SECONDS if grace_seconds is None else grace_seconds)
        lost.diagnosed, lost.__cause__ = True, error
        return lost

    def sign_in(self) -> None:
        """Tell the ranks that wait in the exchange that it has failed. Raises RuntimeError without
        a store.
        """
        self.store.set(f"alive/{self.rank}", "1")
        self.store.set(FAILED, "1")

    def _diagnose(self, error: BaseException, grace_seconds: float) -> PeerLostError:
        try:
            self.sign_in()
            missing = self._missing(grace_seconds)
        except Exception:
            return PeerLostError(
                f"rank {self.rank} lost the job's store in an exchange of gradients: the rank that "
                "hosts it (rank 0, "
                f"unless torchrun does) is gone; {error}"
            )
        if missing:
            who = ", ".join(f"rank {rank}" for rank in missing)
            return PeerLostError(
                f"{who} did not answer in an exchange of gradients; seen by rank {self.rank}: "
                f"{error}"
            )
        return PeerLostError(
            f"an exchange of gradients failed on rank {self.rank} although all {len(self.members)} "
            f"ranks are alive: {error}; "
            "if one is slow, raise timeout_seconds"
        )

    def _missing(self, grace_seconds: float) -> list[int]:
        deadline = time.monotonic() + grace_seconds
        missing = list(self.members)
        while missing and time.monotonic() < deadline:
            missing = [rank for rank in missing if not self.store.check([f"alive/{rank}"])]
            if missing:
                time.sleep(0.05)
        return missing


@dataclass(frozen=True)
class Survivors:
    """`Survivors` are what the ranks said when one asked: where those are that did not fail
    themselves, and with which error others ended.

    `missing` gave no answer; `fates` has what is known of their processes.
    """

    positions: dict[int, str]
    ended: dict[int, str]
    missing: list[int]
    fates: dict[int, str]


def find_survivors(store: Store, world_size: int, *, grace_seconds: float) -> Survivors:
    """Wait until every rank has answered under ``alive/RANK`` or ``ended/RANK``, or is known to be
    gone by ``process/RANK``.
    """
    deadline = time.monotonic() + grace_seconds
    missing, fates = list(range(world_size)), dict[int, str]()
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


def describe_lost(found: Survivors, *, rank: int, cause: str) -> str:
    """Say who is lost, as `rank` sees it after the error `cause`."""
    seen = f"seen by rank {rank}: {cause}"
    if found.ended:
        return (
            f"{'; '.join(f'rank {other} ended with {text}' for other, text in found.ended.items())}"
            f"; {seen}"
        )
    if found.missing:
        who = ", ".join(f"rank {other}" for other in found.missing)
        fates = ", ".join(f"rank {other}: {fate}" for other, fate in found.fates.items())
        return f"{who} did not answer in a collective call{f' ({fates})' if fates else ''}; {seen}"
    places = "; ".join(
        f"rank {other} is at {place}" for other, place in found.positions.items() if place != "-"
    )
    return (
        "a collective call failed although all ranks are alive: one of them is slow, hangs, or "
        "makes other calls"
        f"{f' ({places})' if places else ''}; if one is slow, raise the strategy's timeout; {seen}"
    )


def ranks_that(
    flag: bool, *, store: Store, rank: int, world_size: int, key: str, seconds: float
) -> list[int]:
    """Return the ranks with a true `flag`; all ranks call this with the same, unused `key`.
    DistStoreError after `seconds`.
    """
    store.set(f"{key}/{rank}", "1" if flag else "0")
    keys = [f"{key}/{other}" for other in range(world_size)]
    store.wait(keys, timedelta(seconds=seconds))
    return [other for other, name in enumerate(keys) if store.get(name) == b"1"]

"""Fetches from other nodes what a loader without workers will ask for next, while the training
process does something else.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Sequence
from typing import Any

from lightning_topt.data.cache.sample_codec import Parts
from lightning_topt.data.peers.client import PeerCounts, Peers


class _Group:
    """Items announced together, a batch: still to be fetched, on their way, or here."""

    def __init__(self, items: Sequence[int]) -> None:
        self.items = dict.fromkeys(items)
        self.is_coming = self.is_here = False
        self.entries: dict[int, Any] = {}

    @property
    def nbytes(self) -> int:
        return sum(len(entry) for entry in self.entries.values())


class PrefetchingPeers:
    """`peers`, with a thread that fetches the items that were announced with `expect`, in their
    order.

    Nothing is begun while `ahead_bytes` of entries are waiting. What was announced before a batch
    that is asked for, and not asked for itself, is dropped. Items that were not announced, or whose
    turn has not come, are fetched as they are asked for. Only the process that announces has a
    thread. Picklable; raises ValueError for `ahead_bytes` that are not positive.
    """

    def __init__(self, peers: Peers, *, ahead_bytes: int) -> None:
        if ahead_bytes <= 0:
            raise ValueError(f"ahead_bytes is positive; got {ahead_bytes}")
        self.peers, self.ahead_bytes = peers, ahead_bytes
        self._begin()

    def _begin(self) -> None:
        self._process = os.getpid()
        self._condition = threading.Condition()
        self._groups: deque[_Group] = deque()
        self._thread: threading.Thread | None = None
        self.prefetched = 0  # entries that were here, or on their way, when they were asked for

    def __getstate__(self) -> dict[str, Any]:
        return {"peers": self.peers, "ahead_bytes": self.ahead_bytes}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._begin()

    @property
    def counts(self) -> PeerCounts:
        """The counts of this process, prefetched or not."""
        return self.peers.counts

    def is_own(self, item: int) -> bool:
        """Return whether this node stores `item`."""
        return self.peers.is_own(item)

    def push(self, item: int, parts: Parts) -> None:
        """Give an entry to its owner, in the background."""
        self.peers.push(item, parts)

    def flush(self) -> None:
        """Wait for what was pushed."""
        self.peers.flush()

    def expect(self, items: Sequence[int]) -> None:
        """Announce a batch, to be asked for after those announced before. This node's own items are
        left out.
        """
        if self._process != os.getpid():  # forked: the thread is the parent's
            self._begin()
        others = [item for item in items if not self.peers.is_own(item)]
        if not others:
            return
        with self._condition:
            self._groups.append(_Group(others))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, daemon=True)
                self._thread.start()
            self._condition.notify_all()

    def forget(self) -> None:
        """Drop what was announced: something else will be asked for."""
        if self._process == os.getpid():
            with self._condition:
                self._groups.clear()
                self._condition.notify_all()

    def fetch(self, items: Sequence[int]) -> list[Any]:
        """As `Peers.fetch`; what was prefetched costs no exchange, also where its owner turned out
        to have none.
        """
        if self._process != os.getpid():
            return self.peers.fetch(items)
        entries: list[Any] = [None] * len(items)
        missing = []
        for i, item in enumerate(items):
            is_known, entries[i] = self._take(item)
            if not is_known:
                missing.append(i)
        for i, entry in zip(missing, self.peers.fetch([items[i] for i in missing]), strict=True):
            entries[i] = entry
        return entries

    def _take(self, item: int) -> tuple[bool, Any]:
        """Whether an announced item was looked for, and its entry; it is taken off the
        announcements.
        """
        with self._condition:
            group = next((group for group in self._groups if item in group.items), None)
            if group is None:
                return False, None
            # An exchange ends by the time limits of its connections, so this does.
            self._condition.wait_for(lambda: not group.is_coming)
            while self._groups and self._groups[0] is not group:
                self._groups.popleft()
            group.items.pop(item, None)
            if not group.items and self._groups:
                self._groups.popleft()
            self.prefetched += group.is_here
            self._condition.notify_all()
            return group.is_here, group.entries.pop(item, None)

    def _next(self) -> _Group | None:
        """The first group that may be fetched now."""
        if sum(group.nbytes for group in self._groups) >= self.ahead_bytes:
            return None
        return next((group for group in self._groups if not group.is_here), None)

    def _run(self) -> None:
        me = threading.current_thread()
        while True:
            with self._condition:
                self._condition.wait_for(lambda: self._thread is not me or self._next() is not None)
                group = self._next()
                if self._thread is not me or group is None:
                    return
                group.is_coming = True
                items = list(group.items)
            entries: list[Any] = []
            try:
                entries = self.peers.fetch(items)
            finally:
                with self._condition:
                    found = zip(items, entries, strict=False)
                    group.entries = {item: entry for item, entry in found if entry is not None}
                    group.is_coming, group.is_here = False, bool(entries)
                    self._condition.notify_all()

    def close(self) -> None:
        """Finish what was pushed, end the thread and hang up. Used again, it begins again."""
        if self._process == os.getpid():
            with self._condition:
                thread, self._thread = self._thread, None
                self._groups.clear()
                self._condition.notify_all()
            if thread is not None:
                thread.join(timeout=self.peers.timeout_seconds)
        self.peers.close()

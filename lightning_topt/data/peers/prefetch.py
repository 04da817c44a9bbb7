"""Prefetching from other nodes, for a loader without workers.

The loader announces its next batches (`expect`); a thread fetches their entries while the training
process does something else. Loaders with workers fetch ahead by themselves.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Sequence
from typing import Any

from lightning_topt.data.cache.sample_codec import Parts
from lightning_topt.data.peers.client import PeerCounts, Peers


class PrefetchingPeers:
    """`peers`, with a thread that fetches announced items in the order of `expect`.

    No fetch starts while `ahead_bytes` of entries are waiting. Announced items that are skipped, as
    a later batch is requested, are dropped. Items that were not announced, or are not on their way
    yet, are fetched when they are requested. Only the process that announces has a thread; it is
    picklable.

    Raises:
        ValueError: `ahead_bytes` is not positive.
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
        self.prefetched = 0  # entries here, or on their way, when they were requested

    def __getstate__(self) -> dict[str, object]:
        return {"peers": self.peers, "ahead_bytes": self.ahead_bytes}

    def __setstate__(self, state: dict[str, object]) -> None:
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
        """Queue an entry for its owner, see `Peers.push`."""
        self.peers.push(item, parts)

    def flush(self) -> None:
        """Wait until pushed entries were sent, see `Peers.flush`."""
        self.peers.flush()

    def expect(self, items: Sequence[int]) -> None:
        """Announce a batch, which comes after those announced before.

        This node's own items are left out.
        """
        if self._process != os.getpid():  # forked: the thread is the parent's
            self._begin()
        # own items need no exchange
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
        """Drop all announcements: other items will be requested."""
        if self._process == os.getpid():
            with self._condition:
                self._groups.clear()
                self._condition.notify_all()

    def fetch(self, items: Sequence[int]) -> list[Any]:
        """Fetch entries as `Peers.fetch` does; prefetched ones cost no exchange.

        That includes those which their owner does not have.
        """
        # no process but the one that announces has prefetched anything
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
        """Take an announced item: whether its owner was asked for it, and its entry.

        It waits for a fetch that is on its way.
        """
        with self._condition:
            group = next((group for group in self._groups if item in group.items), None)
            # not announced: the caller fetches it with the others
            if group is None:
                return False, None
            # This ends: an exchange has the time limits of its connections.
            self._condition.wait_for(lambda: not group.is_coming)
            # Earlier groups were skipped.
            while self._groups and self._groups[0] is not group:
                self._groups.popleft()
            group.items.pop(item, None)
            # all items of this batch were taken
            if not group.items and self._groups:
                self._groups.popleft()
            self.prefetched += group.is_here
            self._condition.notify_all()
            return group.is_here, group.entries.pop(item, None)

    def _next(self) -> _Group | None:
        """Return the first group that may be fetched now."""
        # enough entries are waiting to be taken
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
            # Without the lock: others may announce and take meanwhile.
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
        """Finish the pushes, end the thread and hang up. Used again, it starts again."""
        if self._process == os.getpid():
            with self._condition:
                thread, self._thread = self._thread, None
                self._groups.clear()
                self._condition.notify_all()
            if thread is not None:
                thread.join(timeout=self.peers.timeout_seconds)
        self.peers.close()


class _Group:
    """The items of one announced batch: to be fetched, on their way, or here."""

    def __init__(self, items: Sequence[int]) -> None:
        self.items = dict.fromkeys(items)
        self.is_coming = self.is_here = False
        self.entries: dict[int, Any] = {}

    @property
    def nbytes(self) -> int:
        return sum(len(entry) for entry in self.entries.values())

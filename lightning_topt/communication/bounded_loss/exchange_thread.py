"""The one thread of an exchange: opens parts, lets the compiled loop work, hands out what is done,
and finds who is gone.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque

import numpy as np

from lightning_topt.communication.bounded_loss import tables
from lightning_topt.communication.bounded_loss.control_messages import (
    BODY,
    BY_BOTH,
    BY_STREAM,
    send_control,
)
from lightning_topt.communication.bounded_loss.datagram import FAILED, LEAVE, PING
from lightning_topt.communication.bounded_loss.delivery import Handle, PeerSilentError
from lightning_topt.communication.bounded_loss.engine_loop import run_loop, sleep_precisely
from lightning_topt.communication.bounded_loss.exchange_parts import (
    BucketParts,
    Exact,
    Part,
    fill_slot,
    make_parts,
    undelivered_ranges,
)
from lightning_topt.communication.bounded_loss.part_progress import open_part
from lightning_topt.communication.bounded_loss.rate_rule import DEFAULT_TARGET, TARGET, TARGET_SHARE
from lightning_topt.communication.bounded_loss.tables import Tables, with_more_slots
from lightning_topt.communication.bounded_loss.unheard_ranks import find_lost, quiet_ranks

CHECKS = 16  # in the time limit
LEAVE_SECONDS = 5.0  # that others may still need results after `close`


class ExchangeThread:
    """Owns the tables. `start`, `close` are for other threads; everything else runs in this
    one's.
    """

    def __init__(
        self, t: Tables, *, timeout_seconds: float, part_segments: int, by_size: bool
    ) -> None:
        self.t, self.timeout_seconds, self.part_segments, self.by_size = (
            t,
            timeout_seconds,
            part_segments,
            by_size,
        )
        self.error: Exception | None = None
        self._lock = threading.Lock()
        self._commands: deque[tuple[Handle, Exact]] = deque()
        self._buckets: dict[int, BucketParts] = {}
        self._waiting: deque[tuple[Part, Handle]] = deque()  # until nobody needs the step before
        self._active: dict[int, tuple[Part, Handle]] = {}  # by slot
        self._closing: float | None = None  # seconds, when to leave at the latest
        self._more_to_open = False
        self._work = np.empty(part_segments + 1, np.int64)
        self._thread = threading.Thread(target=self._run, name="bounded-loss-exchange", daemon=True)
        self._thread.start()

    # ---- for other threads -----------------------------------------------------------------------

    def start(self, handle: Handle, exact: Exact) -> None:
        """Begin a bucket's next step. Raises what ended the exchange."""
        with self._lock:
            if self.error is not None:
                raise self.error
            if self._closing is not None:
                raise ValueError("the exchange is closed: make another one")
            self._commands.append((handle, exact))
        self._wake()

    def close(self) -> None:
        """End the thread, once the others have what they need of this rank; within seconds."""
        with self._lock:
            if self._closing is None:
                self._closing = time.monotonic() + min(LEAVE_SECONDS, self.timeout_seconds)
        if self._thread.is_alive():
            self._wake()
            if self._thread is not threading.current_thread():
                self._thread.join(LEAVE_SECONDS + 5)

    def _wake(self) -> None:
        os.eventfd_write(int(self.t.config[tables.WAKE]), 1)

    # ---- in the thread ---------------------------------------------------------------------------

    def _run(self) -> None:
        sleep_precisely()
        try:
            while not self._may_leave():
                pause = self.timeout_seconds / CHECKS if self._closing is None else 0.05
                pause = 0.0 if self._more_to_open else pause
                self.t.config[tables.RETURN_NS] = time.monotonic_ns() + int(pause * 1e9)
                if run_loop(self.t.address):
                    os.eventfd_read(int(self.t.config[tables.WAKE]))
                self.t.config[tables.EVENTS] = 0
                self._take_commands()
                self._hand_out()
                self._open_waiting()
                self._look_for_lost()
        except Exception as error:
            self._fail(error)
        for peer in self._others():
            send_control(self.t.address, peer, LEAVE, 0, 0, 0, 0, 0, BY_STREAM)

    def _others(self) -> list[int]:
        config = self.t.config
        return [peer for peer in range(int(config[tables.WORLD])) if peer != config[tables.RANK]]

    def _may_leave(self) -> bool:
        if self._closing is None:
            return False
        idle = not (self._commands or self._waiting or self.t.slots[:, tables.ACTIVE].any())
        return idle or time.monotonic() > self._closing

    def _take_commands(self) -> None:
        while self._commands:
            handle, exact = self._commands.popleft()
            known = self._buckets.get(handle.bucket)
            if known is None:
                known = self._buckets[handle.bucket] = self._make(handle, exact)
            assert (known.numel, known.exact) == (len(handle.sent), exact)
            if handle.staging is not None:
                known.staging = (
                    known.staging
                    if known.staging is not None
                    else np.empty(known.numel, np.float32)
                )
                handle.staging = known.staging
            handle.parts_left = len(known.parts)
            self._waiting.extend((part, handle) for part in known.parts)
            if handle.tolerance > 0:
                self.t.link[TARGET] = handle.tolerance * TARGET_SHARE
            else:
                self.t.link[TARGET] = max(float(self.t.link[TARGET]), DEFAULT_TARGET)

    def _make(self, handle: Handle, exact: Exact) -> BucketParts:
        first = int(self.t.config[tables.USED_SLOTS])
        each = int(self.t.config[tables.ELEMENTS]) * self.part_segments
        needed = first + -(-len(handle.sent) // each)
        if needed > len(self.t.slots):
            self.t = with_more_slots(self.t, max(needed, 2 * len(self.t.slots)))
        made = make_parts(
            self.t,
            handle.bucket,
            len(handle.sent),
            exact,
            first_slot=first,
            part_segments=self.part_segments,
        )
        self.t.config[tables.USED_SLOTS] = needed
        return made

    def _open_waiting(self) -> None:
        """Open a part whose last step nobody needs any more; the loop comes back for the next, so
        that data need not wait.
        """
        self._more_to_open = False
        for _ in range(len(self._waiting)):
            part, handle = self._waiting.popleft()
            if self.t.slots[part.slot, tables.ACTIVE]:
                self.t.slots[part.slot, tables.WANTED] = 1
                self._waiting.append((part, handle))
                continue
            fill_slot(self.t, part, handle, by_size=self.by_size)
            self._active[part.slot] = part, handle
            open_part(self.t.address, part.slot, handle.tolerance, time.monotonic_ns())
            self._more_to_open = bool(self._waiting)
            return

    def _hand_out(self) -> None:
        """Let go of who waits for buckets that are done."""
        for slot in [slot for slot in self._active if self.t.slots[slot, tables.DONE]]:
            part, handle = self._active.pop(slot)
            handle.lost.extend(undelivered_ranges(self.t, part, self._work))
            handle.parts_left -= 1
            if handle.parts_left == 0:
                handle.finished = time.perf_counter()
                handle.done.set()

    def _look_for_lost(self) -> None:
        waits = bool(self._active or self._waiting)
        if not waits and not self.t.slots[:, tables.ACTIVE].any():
            return
        now = time.monotonic_ns()
        for peer in quiet_ranks(self.t, now, self.timeout_seconds / CHECKS):
            send_control(self.t.address, peer, PING, 0, 0, 0, 0, 0, BY_BOTH)
        if waits:
            find_lost(self.t, now, self.timeout_seconds)

    def _fail(self, error: Exception) -> None:
        with self._lock:
            self.error = error
            handles = {id(handle): handle for _, handle in (*self._active.values(), *self._waiting)}
            handles.update({id(handle): handle for handle, _ in self._commands})
            self._active.clear()
            self._waiting.clear()
            self._commands.clear()
        for rank in error.ranks[:1] if isinstance(error, PeerSilentError) else ():
            for peer in self._others():
                self.t.message[BODY : BODY + 8].view(np.int64)[0] = rank
                send_control(self.t.address, peer, FAILED, 0, 0, 0, 0, 8, BY_STREAM)
        for handle in handles.values():
            handle.error = error
            handle.done.set()

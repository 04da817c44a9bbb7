"""Compilation before it is needed: the first step must not wait half a minute for it, nor other
ranks for this one.
"""

from __future__ import annotations

import functools

import numpy as np

from lightning_topt.communication.bounded_loss import tables
from lightning_topt.communication.bounded_loss.control_messages import send_control
from lightning_topt.communication.bounded_loss.datagram import PING
from lightning_topt.communication.bounded_loss.engine_loop import run_loop
from lightning_topt.communication.bounded_loss.packed_halves import pack_halves, unpack_halves
from lightning_topt.communication.bounded_loss.part_progress import open_part
from lightning_topt.communication.bounded_loss.rate_rule import pacing_rate
from lightning_topt.communication.bounded_loss.shard_sum import undelivered_segments


@functools.cache
def load_kernels() -> None:
    """Compile what the thread calls, or read it from the cache on disk, once in a process."""
    t = tables.make_tables(world_size=2, slots=1, segments=1)
    for column in (tables.UDP, tables.WAKE):
        t.config[column] = -1
    t.config[tables.ELEMENTS], t.config[tables.DATAGRAM] = 1, 44
    t.peers[:, tables.STREAM] = -1
    run_loop(t.address)  # the time to return is over
    open_part(t.address, 0, 0.0, 0)
    send_control(t.address, 1, PING, 0, 0, 0, 0, 0, 0)
    undelivered_segments(t.address, 0, np.zeros(1, np.int64))
    pacing_rate(t.link, 44)
    pack_halves(np.zeros(2, np.float32), np.zeros(1, np.uint32))
    unpack_halves(np.zeros(1, np.uint32), np.zeros(2, np.float32))

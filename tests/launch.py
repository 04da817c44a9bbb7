"""The one way tests start ranks: processes on gloo with a file store, hard timeouts, errors carried
back.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import multiprocessing as mp
import os
import pickle
import random
import socket
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lightning_topt.communication.bounded_loss.exchange import load_kernels as load_datagram_kernels
from lightning_topt.communication.selection import warm_up
from lightning_topt.execution.observed_step import forget_meshes


@functools.cache
def load_kernels() -> None:
    """Compile what ranks call, or read it from the disk: once, rather than in each rank."""
    warm_up()
    load_datagram_kernels()


def free_port() -> int:
    """Return a port of this machine on which nobody listens, none of those that the kernel gives to
    connections.

    Such a one may be another's a moment after it was free.
    """
    given = Path("/proc/sys/net/ipv4/ip_local_port_range")
    first = int(given.read_text().split()[0]) if given.exists() else 32768
    while True:
        port = random.SystemRandom().randrange(first // 2, first)  # whatever a test's seed is
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


def run_ranks(
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout_seconds: float = 90,
    fresh: bool = False,
    backend: str = "gloo",
) -> list[Any]:
    """Run ``function(rank, *args)`` on `world_size` ranks; the results in rank order.

    Ranks are forked from this process. `fresh` ones are new processes: what this one holds is no
    part of their memory, and `function` and `args` must pickle. Results must pickle. Raises
    RuntimeError with the traceback of the first rank that failed, or on timeout.
    """
    if not fresh:
        load_kernels()
    context: Any = mp.get_context("spawn" if fresh else "fork")
    queue, connected = context.SimpleQueue(), context.Barrier(world_size)
    with tempfile.TemporaryDirectory() as folder:
        store = os.path.join(folder, "store")
        ranks = [
            context.Process(
                target=_rank,
                args=(
                    function,
                    rank,
                    world_size,
                    store,
                    queue,
                    connected,
                    timeout_seconds,
                    args,
                    backend,
                ),
                daemon=True,
            )
            for rank in range(world_size)
        ]
        for process in ranks:
            process.start()
        results: dict[int, Any] = {}
        try:
            while len(results) < world_size:
                _wait(queue, ranks, results, timeout_seconds)
                rank, value, error = queue.get()
                if error:
                    raise RuntimeError(f"rank {rank} failed:\n{error}")
                results[rank] = pickle.loads(value)
        finally:
            for process in ranks:
                process.join(timeout=5 if len(results) == world_size else 0.1)
                if process.is_alive():
                    process.kill()
                    process.join()
    return [results[rank] for rank in range(world_size)]


def _wait(queue: Any, ranks: Sequence[Any], results: Mapping[int, Any], seconds: float) -> None:
    """Wait for a result. Raises RuntimeError in time, or where a rank ended and will give none."""
    end = time.monotonic() + seconds
    while not queue._reader.poll(0.2):
        missing = [rank for rank in range(len(ranks)) if rank not in results]
        ended = [rank for rank in missing if ranks[rank].exitcode is not None]
        # what a rank wrote before it ended may be on its way still
        if len(ended) == len(missing) and not queue._reader.poll(1.0):
            codes = [ranks[rank].exitcode for rank in ended]
            raise RuntimeError(f"ranks {ended} gave no result: they ended, with status {codes}")
        if time.monotonic() > end:
            raise RuntimeError(f"ranks {missing} gave no result in time")


def _rank(  # type: ignore[no-untyped-def]
    function, rank, world_size, store, queue, connected, timeout_seconds, args, backend="gloo"
):
    torch.set_num_threads(1)
    # a test in this process may have had a mesh of a fake group: its rank would be taken for this
    # one's
    forget_meshes()
    # a collection would touch, and so copy, every page that the ranks share with the test
    gc.freeze()
    try:
        dist.init_process_group(
            backend,
            init_method=f"file://{store}",
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=timeout_seconds),
        )
        # who ends sooner would end the connections that others are making
        connected.wait(timeout_seconds)
        # Plain pickle copies tensors; torch's own queues pass file descriptors, which die with the
        # rank.
        queue.put((rank, pickle.dumps(function(rank, *args)), None))
    except BaseException:
        queue.put((rank, None, traceback.format_exc()))
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()

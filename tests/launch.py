"""The one way tests start ranks: on gloo with a file store, timeouts, errors carried back."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import gc
import multiprocessing as mp
import os
import pickle
import random
import secrets
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from lightning_topt.communication.bounded_loss.exchange import load_kernels as load_datagram_kernels
from lightning_topt.communication.node.node_kernels import (
    announce,
    gather_ranks,
    load_word,
    sum_ranks,
)
from lightning_topt.communication.selection import warm_up
from lightning_topt.techniques.technique import forget_meshes

PR_SET_PDEATHSIG = 1  # of linux/prctl.h


@functools.cache
def load_kernels() -> None:
    """Compile what ranks call, or read it from the disk: once, rather than in each rank.

    One process of a test run compiles, half a minute in a new checkout, for which others wait.
    """
    with open(__file__) as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        warm_up()
        load_datagram_kernels()
        word, none = np.zeros(1, np.int64), np.zeros(0, np.int64)
        for dtype in (np.float32, np.uint16, np.int16):  # the last two for those of 16 bits
            received = np.zeros((1, 1), dtype)
            sum_ranks(np.zeros(0, np.float32), np.zeros(0, dtype), none, none, 0, received, 0)
        gather_ranks(none, none, none, none, 0, 0)
        address = int(word.ctypes.data)
        announce(address, load_word(address))


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


def torchrun_environment(
    rank: int, world_size: int, *, port: int, nodes: int = 1
) -> dict[str, str]:
    """Return the variables that torchrun gives a rank, with as many ranks on each node."""
    node, local = divmod(rank, world_size // nodes)
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(local),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size // nodes),
        "GROUP_RANK": str(node),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": "test",
    }


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
        results: list[Any] = []
        try:
            results = _collect(queue, ranks, timeout_seconds)
        finally:
            for process in ranks:
                process.join(timeout=5 if results else 0.1)
                if process.is_alive():
                    process.kill()
                    process.join()
    return results


def _collect(queue: Any, ranks: Sequence[Any], timeout_seconds: float) -> list[Any]:
    """The results of all ranks. Raises RuntimeError as `run_ranks` does."""
    results: dict[int, Any] = {}
    while len(results) < len(ranks):
        _wait(queue, ranks, results, timeout_seconds)
        rank, value, error = queue.get()
        if error:
            raise RuntimeError(f"rank {rank} failed:\n{error}")
        results[rank] = pickle.loads(value)
    return [results[rank] for rank in range(len(ranks))]


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
    function,
    rank,
    world_size,
    store,
    queue,
    connected,
    timeout_seconds,
    args,
    backend="gloo",
    stays=False,
):
    if sys.platform == "linux":  # a rank that waits for others would outlive a killed test
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
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
        if dist.is_initialized() and not stays:
            dist.destroy_process_group()


def forget_compiled_functions() -> None:
    """Let this process look as one in which nothing was compiled: else no fit is watched."""
    if "torch._dynamo.eval_frame" in sys.modules:
        sys.modules["torch._dynamo.eval_frame"].always_optimize_code_objects.refs.clear()


# ---- ranks for many calls ------------------------------------------------------------------------


def run_on_pool(
    function: Callable[..., Any], world_size: int, *args: Any, timeout_seconds: float = 90
) -> list[Any]:
    """As `run_ranks`, on ranks that are forked once for all calls of a test module (in
    `tests.execution` and `tests.plugins`, for those of all modules).

    Each call has process groups and environment variables of its own, and random numbers that begin
    alike on all ranks. What it changes in modules stays, and what the test changed since the first
    call is not there: such calls are for `run_ranks`. `function` and `args` must pickle. A call
    that fails ends the ranks.
    """
    pool = _pools.pop(world_size, None) or _Pool(world_size)
    try:
        results = pool.run(function, args, timeout_seconds)
    except BaseException:
        pool.end()
        raise
    _pools[world_size] = pool
    return results


class _Pool:
    """Ranks that wait for calls."""

    def __init__(self, world_size: int) -> None:
        load_kernels()
        context: Any = mp.get_context("fork")
        self.queue = context.SimpleQueue()
        self.folder = tempfile.TemporaryDirectory()
        connected = context.Barrier(world_size)
        self.pipes, self.ranks = [], []
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            args = (rank, world_size, self.queue, connected, theirs)
            self.pipes.append(ours)
            self.ranks.append(context.Process(target=_serve, args=args, daemon=True))
            self.ranks[-1].start()

    def run(self, function: Callable[..., Any], args: Sequence[Any], seconds: float) -> list[Any]:
        store = os.path.join(self.folder.name, secrets.token_hex(8))
        call = pickle.dumps((function, store, seconds, args))
        for pipe in self.pipes:
            pipe.send_bytes(call)
        return _collect(self.queue, self.ranks, seconds)

    def end(self) -> None:
        for process in self.ranks:
            process.kill()
        for process in self.ranks:
            process.join()
        self.folder.cleanup()


_pools: dict[int, _Pool] = {}


def end_pools() -> None:
    """End all pools, which hold whatever descriptors this process had."""
    while _pools:
        _pools.popitem()[1].end()


def _serve(rank, world_size, queue, connected, pipe):  # type: ignore[no-untyped-def]
    parent, environment = os.getppid(), dict(os.environ)
    while os.getppid() == parent:  # which may be killed
        is_called = pipe.poll(3.0)
        # All ranks have ended the last call where another one comes. Where none does, one of them
        # may wait for an answer of this one: it is told that there will be none.
        if dist.is_initialized():
            dist.destroy_process_group()
            # Each group has a thread that wakes 300 times a second, also while nobody calls. All go
            # now: the next call freezes what is in memory, which is never collected.
            forget_meshes()
            gc.collect()
        if not is_called:
            continue
        function, store, timeout_seconds, args = pickle.loads(pipe.recv_bytes())
        for seed in (random.seed, np.random.seed, torch.manual_seed):
            seed(0)
        common = store, queue, connected, timeout_seconds
        _rank(function, rank, world_size, *common, args, stays=True)
        # what this call left ends before the next one begins
        os.environ.clear()
        os.environ.update(environment)
        forget_compiled_functions()

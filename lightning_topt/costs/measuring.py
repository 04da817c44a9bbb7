"""How things are measured here: time a call, agree between ranks, leave no trace.

Without a process group one process is alone, and every collective function returns at once.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import numpy as np
import psutil
import torch
import torch.distributed as dist

from lightning_topt.communication.collectives import synchronize, values_of_group
from lightning_topt.communication.rank_watch import is_of_collective
from lightning_topt.communication.topology import host_group

_SHORT_SECONDS, _MIN_REPEATS = 1e-4, 3
# of a kernel on CUDA
_KERNEL_SECONDS, _KERNEL_REPEATS = 2e-3, (3, 30)
_HOST_COPY_BYTES = 64 << 20  # between a device and its host
_CYCLES_PER_SECOND = 3e9  # more than any of NVIDIA's devices has
T = TypeVar("T")


# ---- Time on any device: the one place that knows how devices report time


def time_once(call: Callable[[], Any], *, device: torch.device) -> float:
    """Return the wall-clock seconds of one call, with the device idle before and after."""
    synchronize(device)
    start = time.perf_counter()
    call()
    synchronize(device)
    return time.perf_counter() - start


def time_call(
    call: Callable[[], Any], *, device: torch.device, budget_seconds: float, max_repeats: int = 100
) -> float:
    """Return the median seconds of a call after one unmeasured one.

    Repeated for about `budget_seconds`, at least three times. Where one call is much shorter than a
    synchronization, several run between two of them.
    """
    call()
    first = time_once(call, device=device)
    inner = max(1, round(_SHORT_SECONDS / max(first, 1e-7)))

    def batch() -> None:
        for _ in range(inner):
            call()

    possible = int((budget_seconds - 2 * first) / max(first * inner, 1e-7))
    repeats = min(max(possible, _MIN_REPEATS), max_repeats)
    return statistics.median(time_once(batch, device=device) / inner for _ in range(repeats))


def time_kernel(
    call: Callable[[], Any], *, device: torch.device, budget_seconds: float, max_repeats: int = 100
) -> float:
    """Return the median seconds that a call keeps the device busy, after one unmeasured one.

    On CUDA between events of the device, which waits until the host has issued everything: neither
    launches nor synchronization are in it. The L2 cache holds nothing that the call reads, as in a
    step, which moves much more between a kernel and the next of its kind. 2 ms are measured, or
    `budget_seconds`, whichever is more. On other devices as `time_call`.
    """
    if device.type != "cuda":
        return time_call(
            call, device=device, budget_seconds=budget_seconds, max_repeats=max_repeats
        )
    call()
    first, (least, most) = time_once(call, device=device), _KERNEL_REPEATS
    repeats = min(max(int(max(budget_seconds, _KERNEL_SECONDS) / max(first, 1e-7)), least), most)
    cache_bytes = torch.cuda.get_device_properties(device).L2_cache_size
    other = torch.empty(max(2 * cache_bytes, 1), dtype=torch.uint8, device=device)
    with torch.cuda.device(device):
        marks = [
            (torch.Event(device, enable_timing=True), torch.Event(device, enable_timing=True))
            for _ in range(repeats)
        ]

        def issue(marked: Sequence[tuple[torch.Event, torch.Event]]) -> None:
            for start, stop in marked:
                other.zero_()
                start.record()
                call()
                stop.record()

        # once to see how long the host takes, then all behind a kernel that only waits
        began = time.perf_counter()
        issue(marks[:1])
        cycles = (time.perf_counter() - began) * repeats * _CYCLES_PER_SECOND
        synchronize(device)
        torch.cuda._sleep(int(cycles))
        issue(marks)
        synchronize(device)
    milliseconds: list[float] = [start.elapsed_time(stop) for start, stop in marks]
    return statistics.median(milliseconds) / 1e3


def time_issue(call: Callable[[], Any], *, device: torch.device) -> float:
    """Return the least of three times that the host takes to issue a call to an idle device."""
    times = []
    for _ in range(3):
        synchronize(device)
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times)


# ---- Numbers and texts that all ranks of the default process group agree on
#
# They travel between hosts (`host_group`), whatever devices do, and each call says whether its rank
# goes on: a rank that cannot, for lack of memory say, leaves no other waiting for it.


class RemotePlanningError(RuntimeError):
    """Planning failed on another rank, whose message this is."""


def world_size() -> int:
    """Return the number of ranks; 1 without a process group."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def device_memory_bytes(device: torch.device, *, ranks: int | None = None) -> int:
    """Return the bytes of memory that one rank has, the same on all ranks of like machines.

    The device's memory, or an equal share of that of a machine of so many `ranks`; None: all.
    """
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return int(psutil.virtual_memory().total // (ranks or world_size()))


def usable_memory_bytes(device: torch.device, *, ranks: int | None = None) -> int:
    """Return the bytes that this rank may use, one of so many `ranks` of a machine; None: of all.

    Of a device what is free or what torch keeps already: not what CUDA, NCCL and other programs
    hold.
    """
    if device.type != "cuda":
        return device_memory_bytes(device, ranks=ranks)
    return torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)


def free_memory_bytes(device: torch.device) -> float:
    """Return the bytes that are free on each rank's device; infinite on CPUs. Collective.

    What torch keeps and nobody uses is given back first.
    """
    if device.type != "cuda":
        return math.inf
    torch.cuda.empty_cache()
    return min(gather(torch.cuda.mem_get_info(device)[0]))


def own_rank() -> int:
    """Return this process's rank; 0 without a process group."""
    return dist.get_rank() if world_size() > 1 else 0


def average(values: Sequence[float]) -> list[float]:
    """Return the mean over ranks, bit for bit the same on all of them. Collective."""
    return [sum(each) / len(each) for each in zip(*gather(values), strict=True)]


def most(value: float) -> float:
    """Return the largest of the ranks' values, 0 in the place of NaN. Collective."""
    return max(gather(0.0 if math.isnan(value) else value))


def gather(value: T, *, problem: str | None = None) -> list[T]:
    """Return every rank's `value`, which must pickle, in rank order. Collective.

    Raises RemotePlanningError where another rank has a `problem`, with which it leaves what all
    were doing.
    """
    if world_size() == 1:
        return [value]
    everyone = values_of_group((value, problem), host_group())
    for rank, (_, theirs) in enumerate(everyone):
        if theirs is not None and rank != own_rank():
            raise RemotePlanningError(f"planning failed on rank {rank}: {theirs}")
    return [theirs for theirs, _ in everyone]


def from_rank_0(value: T) -> T:
    """Return rank 0's `value`, which must pickle. Collective."""
    if world_size() == 1:
        return value
    box = [value]
    dist.broadcast_object_list(box, 0, group=host_group())
    return box[0]


def on_every_rank(function: Callable[[], T]) -> T:
    """Run `function` on every rank; when one fails, all raise.

    A collective call, and `function` may hold some: ranks that are left in one of these learn there
    of the failure.
    """
    try:
        result = function()
    except RemotePlanningError:  # everyone knows
        raise
    except Exception as error:
        if not is_of_collective(error):  # a rank is gone: the next call would wait for it again
            with suppress(RemotePlanningError):
                gather(None, problem=f"{type(error).__name__}: {error}")
        raise
    gather(None)
    return result


def on_rank_0(function: Callable[[], T]) -> T:
    """Run `function` on rank 0; every rank gets its result, or an error. A collective call."""
    own: Callable[[], Any] = function if own_rank() == 0 else lambda: None
    result: T = from_rank_0(on_every_rank(own))
    return result


# ---- Generators and modes of the whole process


@contextmanager
def kept_global_state() -> Iterator[None]:
    """Set plain training modes inside; all generators and modes are as before afterwards.

    The states of Python's, NumPy's and torch's default generators (of CUDA: all devices, if it is
    in use) are put back. Inside, gradients are enabled, inference mode and autocast are off and the
    default dtype is float32: what is measured does not depend on where it is measured from. CUDA's
    memory that was measured with is given back. Also usable as a decorator.
    """
    python, numpy, dtype = random.getstate(), np.random.get_state(), torch.get_default_dtype()
    # Asking for the state would start CUDA in a process that does not use it.
    in_use = torch.cuda.is_available() and torch.cuda.is_initialized()
    kept = torch.random.fork_rng(range(torch.cuda.device_count()) if in_use else ())
    try:
        torch.set_default_dtype(torch.float32)
        with kept, torch.inference_mode(False), torch.enable_grad(), _no_autocast():
            yield
    finally:
        torch.set_default_dtype(dtype)
        random.setstate(python)
        np.random.set_state(numpy)
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()  # the training lays out its memory anew


@contextmanager
def _no_autocast() -> Iterator[None]:
    with torch.autocast("cpu", enabled=False):
        if not torch.cuda.is_available():
            yield
            return
        with torch.autocast("cuda", enabled=False):
            yield


def measure_host_copies(device: torch.device) -> float:
    """Return the bytes/s of copies between `device` and the host; 0 where they are one.

    The slower way counts, and memory of the host is pinned, as for what is offloaded.
    """
    if device.type != "cuda":
        return 0.0
    there = torch.empty(_HOST_COPY_BYTES, dtype=torch.uint8, device=device)
    here = torch.empty(_HOST_COPY_BYTES, dtype=torch.uint8, pin_memory=True)
    ways = ((there, here), (here, there))
    seconds = (
        time_kernel(
            lambda to=to, source=source: to.copy_(source, non_blocking=True),  # type: ignore[misc]
            device=device,
            budget_seconds=0.0,
        )
        for to, source in ways
    )
    return _HOST_COPY_BYTES / max(seconds)

"""Collectives from 4 KiB to 1 GiB: calls in a row, `calibrate`'s curves, and nccl-tests.

`predicted` is the curve that plans are priced with, measured in 2 s to 256 MiB and extrapolated;
`wait` what comes on top in a step; `measured` the slowest rank's time of many calls in a row;
`nccl` the time out of place of nccl-tests, if `multi_gpu.sh` found them.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from benchmarks.multi_gpu.job import Job
from lightning_topt.communication.collectives import all_gather_into, reduce_scatter_into
from lightning_topt.costs.calibrate import calibrate
from lightning_topt.costs.communication import (
    Group,
    estimate_collective_seconds,
    estimate_wait_seconds,
)

OPS = ("all_reduce", "all_gather", "reduce_scatter", "broadcast")
_KIB, _GIB = 2**10, 2**30
_SECONDS = 60.0


def run(job: Job) -> None:
    largest = _GIB if job.device.type == "cuda" else 2**22 if job.report.quick else 2**26
    sizes = [size for power in range(20) if (size := 4 * _KIB << 2 * power) <= largest]
    names = [f"{op} {size // _KIB} KiB" for op in OPS for size in sizes]
    if not (left := job.left(names)):
        return
    cluster = calibrate(device=job.device)
    if job.rank == 0:
        job.report.note("cluster", cluster=cluster.to_dict())
    for op in OPS:
        theirs = nccl_tests(job.report.path.parent / f"nccl_tests.{op}.{job.ranks}.txt")
        for size in sizes:
            if (name := f"{op} {size // _KIB} KiB") not in left:
                continue
            with job.case(name, seconds=_SECONDS) as row:
                group = Group(job.ranks)
                row["wait_seconds"] = wait = estimate_wait_seconds(cluster, op=op, group=group)
                seconds = estimate_collective_seconds(cluster, op=op, size=size, group=group)
                row["predicted_seconds"] = seconds - wait
                row["measured_seconds"] = job.seconds_of(call_of(op, size, job))
                row["nccl_seconds"] = theirs.get(size)


def call_of(op: str, size: int, job: Job) -> Callable[[], Any]:
    """Return a call of `op` on a tensor of `size` bytes, as plans make it."""
    whole = job.empty(size)
    whole = whole[: len(whole) // job.ranks * job.ranks]
    part = whole.chunk(job.ranks)[job.rank].clone()
    if op == "all_reduce":
        return lambda: dist.all_reduce(whole)
    if op == "all_gather":
        return lambda: all_gather_into(whole, part)
    if op == "reduce_scatter":
        return lambda: reduce_scatter_into(part, whole)
    return lambda: dist.broadcast(whole, 0)


def nccl_tests(path: Path) -> dict[int, float]:
    """Return the seconds by bytes in what a program of nccl-tests has printed; none without it."""
    found = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        # size, count, type, redop, root, then out of place: microseconds, two bandwidths, errors
        fields = line.split()
        if len(fields) > 8 and fields[0].isdigit():
            found[int(fields[0])] = float(fields[5]) * 1e-6
    return found

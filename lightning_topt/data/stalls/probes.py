"""Probes measure what a source and a disk cost, seen from outside: samples are timed one by one, in
a process of their own.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from math import inf
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from torch.utils.data import DataLoader

from lightning_topt.data.apart import Failed, run_apart
from lightning_topt.data.stalls.loop import makes_batches, samples_per_batch

WARMUP_SAMPLES = 3  # which connect to the source
# standard deviation / mean of the samples' bytes, below which their waits tell no rate
_LEAST_SPREAD = 0.1
_SURE = 3.0  # standard deviations, by which larger samples must be slower than by chance
_DISK_TEST_BYTES = 1 << 26
_DISK_READS = 256
_COLLATIONS = 7
_MOST_KEPT = 64  # samples
_PATIENCE_SECONDS = 300.0


class SampleProbe(NamedTuple):
    """One sample read alone: seconds by the clock, seconds of cores, bytes that came from a network
    or a disk.
    """

    seconds: float
    core_seconds: float
    source_bytes: float

    @property
    def wait_seconds(self) -> float:
        """By the clock, with no core at work."""
        return max(0.0, self.seconds - self.core_seconds)


def probe_samples(
    read: Callable[[int], Any],
    items: Iterable[int],
    *,
    seconds: float,
    warmup: int = WARMUP_SAMPLES,
) -> tuple[list[SampleProbe], list[Any]]:
    """Read items one by one for at most `seconds`; probes, without the first `warmup`, and the last
    samples.
    """
    probes: list[SampleProbe] = []
    samples: list[Any] = []
    end = time.perf_counter() + seconds
    for item in items:
        received = _received_bytes()
        start, core = time.perf_counter(), time.process_time()
        sample = read(item)
        probe = SampleProbe(
            time.perf_counter() - start, time.process_time() - core, _received_bytes() - received
        )
        probes.append(probe)
        samples = [*samples[-_MOST_KEPT:], sample]
        if time.perf_counter() > end and len(probes) > warmup:
            break
    return probes[warmup:], samples


class SourceProbe(NamedTuple):
    """A `SourceProbe` says what reading samples and making batches of them costs a process that
    does nothing else.
    """

    samples: list[SampleProbe]
    collate_seconds: float  # per batch


def probe_source(loader: DataLoader[Any], items: Sequence[int], *, seconds: float) -> SourceProbe:
    """Read items for `seconds`, in a new process: connections that a data set opens must not be
    there when workers fork.

    Raises RuntimeError with the traceback where reading fails, or ends the process, or no sample
    comes within 5 minutes.
    """
    context: Any = loader.multiprocessing_context or multiprocessing.get_context()
    patience = _PATIENCE_SECONDS + seconds
    result = run_apart(
        _probe,
        loader,
        items,
        seconds,
        context=context,
        timeout_seconds=patience,
        doing="reading samples",
    )
    if isinstance(result, Failed):
        raise RuntimeError(f"reading samples failed:\n{result.trace}")
    return result  # type: ignore[no-any-return]


def _probe(loader: DataLoader[Any], items: Sequence[int], seconds: float) -> SourceProbe:
    dataset: Any = loader.dataset
    probes, samples = probe_samples(dataset.__getitem__, items, seconds=seconds)
    size = samples_per_batch(loader)
    group = (samples * math.ceil(size / len(samples)))[:size]
    whole = group if makes_batches(loader) else group[0]
    times = []
    for _ in range(_COLLATIONS):
        start = time.perf_counter()
        loader.collate_fn(whole)
        times.append(time.perf_counter() - start)
    return SourceProbe(probes, statistics.median(times))


def _received_bytes() -> int:
    """Since the machine started: of the busiest network device, or that this process read from
    disks, the larger one.

    A packet passes several devices on its way into a container. 0 where the system does not tell.
    """
    devices, disk = Path("/proc/self/net/dev"), Path("/proc/self/io")
    if not devices.exists():
        return 0
    network = max(
        int(line.split(":")[1].split()[0]) for line in devices.read_text().splitlines()[2:]
    )
    words = disk.read_text().split() if disk.exists() else []
    return network + (int(words[words.index("read_bytes:") + 1]) if "read_bytes:" in words else 0)


def fit_link(probes: Sequence[SampleProbe], *, rate: float | None = None) -> tuple[float, float]:
    """Return the latency (seconds) and rate (bytes per second) of wait = latency + bytes / rate;
    their mean wait is kept.

    The slope is Theil and Sen's (median over all pairs), for a few disturbed samples should not
    count. `rate`: where known. Where the samples' sizes say nothing, the rate is infinite and all
    the wait is latency.
    """
    waits = np.array([probe.wait_seconds for probe in probes])
    sizes = np.array([probe.source_bytes for probe in probes])
    slope = _slope(sizes, waits) if rate is None else 1 / rate
    transfer = slope * float(sizes.mean())
    if transfer <= 0:
        return float(waits.mean()), inf
    return max(0.0, float(waits.mean()) - transfer), 1 / slope


def _slope(sizes: npt.NDArray[np.float64], waits: npt.NDArray[np.float64]) -> float:
    if len(sizes) < 8 or sizes.mean() <= 0 or sizes.std() < _LEAST_SPREAD * sizes.mean():
        return 0.0
    count = len(sizes)
    first, second = np.triu_indices(count, 1)
    more_bytes, more_wait = sizes[second] - sizes[first], waits[second] - waits[first]
    # Kendall's S, of known variance under chance
    ordered = float((np.sign(more_bytes) * np.sign(more_wait)).sum())
    if ordered < _SURE * math.sqrt(count * (count - 1) * (2 * count + 5) / 18):
        return 0.0
    apart = np.abs(more_bytes) > 0.1 * sizes.std()
    return max(0.0, float(np.median(more_wait[apart] / more_bytes[apart])))


def read_rate(directory: str | Path, *, entry_bytes: float) -> float:
    """Return the bytes per second of reading entries of that size in any order, past the page
    cache; infinite where it cannot be told.
    """
    if not hasattr(os, "posix_fadvise"):
        return inf
    folder = Path(directory).expanduser()
    folder.mkdir(parents=True, exist_ok=True)
    size = int(min(max(1, entry_bytes), _DISK_TEST_BYTES))
    with tempfile.TemporaryFile(dir=folder) as file:
        block = os.urandom(1 << 20)
        for _ in range(_DISK_TEST_BYTES >> 20):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        places = (
            np.random.default_rng(0).permutation(_DISK_TEST_BYTES // size)[:_DISK_READS].tolist()
        )
        start = time.perf_counter()
        for place in places:
            os.pread(file.fileno(), size, place * size)
        return len(places) * size / (time.perf_counter() - start)

"""Measures what a loop waits for: the same loop on ready batches, on the source, and on a cache.

    synthetic   batches that are in memory already           the step alone
    cold        items not read before, from the source       everything
    cached      items in a cache of prepared samples         all but fetching and preparing

DS-Analyzer (arXiv 2007.06775, section 3.3) needs an edited script, and root to drop the page cache.
Here `train` is the user's own loop (`topt stalls`: a Trainer), and trains on whatever batches it
gets. The costs of a sample are seen from outside: the clock, core time, and the counters of bytes
that arrived. From them `model` predicts other set-ups.

`measure_stalls` comes first, then its runs, then the probes of the source, the link and the disk.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import cycle
from math import inf
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
from torch.utils.data import DataLoader

from lightning_topt.basics.argument_checks import check_size
from lightning_topt.data.apart import Failed, run_apart
from lightning_topt.data.stalls.loop import (
    LoopTimes,
    Watched,
    check_loader,
    loader_over,
    makes_batches,
    samples_per_batch,
    touch,
)
from lightning_topt.data.stalls.model import SetUp, StallCosts, Stalls, batch_seconds, split_stalls

LEAST_BATCHES = 8
_MOST_PROBES = 400  # samples
_REPLAYED = 4  # batches of the synthetic run
_LEAST_BUSY = 1.2  # cores; with fewer at work there is no contention to see


# The probes of the source, the link and the disk.
WARMUP_SAMPLES = 3  # they connect to the source
_LEAST_SPREAD = 0.1  # standard deviation / mean of the samples' bytes, to tell a rate by
_SURE = 3.0  # standard deviations; by less, larger samples may be slower by chance
_DISK_TEST_BYTES = 1 << 26
_DISK_READS = 256
_COLLATIONS = 7
_MOST_KEPT = 64  # samples, to be collated
_PATIENCE_SECONDS = 300.0

Train = Callable[[Watched], None]  # the user's loop, trains on every batch that it gets


class CacheUnderTest(Protocol):
    """A cache of prepared samples for the cached run, empty at first."""

    def loader_over(
        self, loader: DataLoader[object], items: Sequence[int], *, num_workers: int
    ) -> DataLoader[object]:
        """Make the same as `stalls.loop.loader_over`, with the cache in front of the data set.

        Samples come from the cache where they are there, and are stored where not.
        """

    def entry_bytes(self) -> float:
        """Return the mean size of the stored samples."""


@dataclass(frozen=True)
class MeasurementOptions:
    """How much to measure.

    Args:
        seconds: of each run; the whole measurement takes about eight times as long.
        memory_bytes: size of the cached run's cache, a number or text (``"1GiB"``).
        link_bytes_per_second: if known; None: estimated from samples of different sizes.
        cores: for this loop; None: those that this process may use.
        seed: for the choice of the items that are read.
    """

    seconds: float = 6.0
    memory_bytes: int | str = 1 << 30
    link_bytes_per_second: float | None = None
    cores: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "memory_bytes", check_size(self.memory_bytes, name="memory_bytes"))
        if self.seconds <= 0 or (self.cores is not None and self.cores < 1):
            raise ValueError("seconds are positive, cores at least 1")
        if self.link_bytes_per_second is not None and self.link_bytes_per_second <= 0:
            raise ValueError("link_bytes_per_second is positive")


@dataclass(frozen=True)
class StallMeasurement:
    """Result of a measurement on `setup`: times per batch of the three runs, and the costs.

    `costs` are the input of the model.
    """

    costs: StallCosts
    setup: SetUp
    synthetic: LoopTimes
    cold: LoopTimes
    cached: LoopTimes

    @property
    def stalls(self) -> Stalls:
        """The parts of the wait."""
        return split_stalls(
            self.costs,
            self.setup,
            cold_seconds=self.cold.batch_seconds,
            cached_seconds=self.cached.batch_seconds,
            step_seconds=self.synthetic.batch_seconds,
        )

    @property
    def model_errors(self) -> dict[str, float]:
        """Relative error of the model on the runs that it was made from (0.05: 5 % too fast).

        A large error says that the measurement or the model is wrong.
        """
        cached = replace(self.setup, memory_share=1.0)
        return {
            "cold": self.cold.batch_seconds / batch_seconds(self.costs, self.setup) - 1,
            "cached": self.cached.batch_seconds / batch_seconds(self.costs, cached) - 1,
        }

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON; an infinite rate is None."""
        # JSON has no infinity
        costs = {
            name: None if value == inf else value for name, value in asdict(self.costs).items()
        }
        runs = {name: getattr(self, name)._asdict() for name in ("synthetic", "cold", "cached")}
        stalls = {**asdict(self.stalls), "fraction": self.stalls.fraction}
        return {
            "costs": costs,
            "set_up": asdict(self.setup),
            "runs": runs,
            "stalls": stalls,
            "model_errors": self.model_errors,
        }


def measure_stalls(
    loader: DataLoader[object],
    *,
    train: Train,
    cache: CacheUnderTest,
    directory: str,
    options: MeasurementOptions,
) -> StallMeasurement:
    """Measure `loader` under `train`, each sample of the cold runs a new item while there are any.

    A local source that the machine's page cache holds is measured as that.

    Args:
        loader: of the training data.
        train: the user's loop.
        cache: for the cached run, empty.
        directory: where a cache on disk would be.
        options: how much to measure.

    Raises:
        ValueError: it cannot be cached (no DataLoader, no map-style data set), or the data set has
            less than 8 batches.
    """
    check_loader(loader)
    return _Measurement(loader, train, cache, options).run(directory)


class _Items:
    """The data set's items in random order, each once until all were used."""

    def __init__(self, count: int, seed: int) -> None:
        self.order: list[int] = np.random.default_rng(seed).permutation(count).tolist()
        self.used = 0

    def rest(self, *, at_least: int) -> list[int]:
        """Return the unused items; all of them again where fewer than `at_least` are left."""
        # too few are left: all of them once more
        if len(self.order) - self.used < at_least:
            self.used = 0
        return self.order[self.used :]


class _Measurement:
    def __init__(
        self,
        loader: DataLoader[object],
        train: Train,
        cache: CacheUnderTest,
        options: MeasurementOptions,
    ) -> None:
        self.loader, self.train, self.cache, self.options = loader, train, cache, options
        self.cores = options.cores or len(os.sched_getaffinity(0))
        self.batch_size = samples_per_batch(loader)
        self.items = _Items(len(loader.dataset), options.seed)  # type: ignore[arg-type]
        if len(self.items.order) < LEAST_BATCHES * self.batch_size:
            raise ValueError(
                f"stalls are measured on at least {LEAST_BATCHES} batches; this data set has "
                f"{len(self.items.order)} samples, a batch {self.batch_size}: choose a smaller "
                "batch size"
            )

    def run(self, directory: str) -> StallMeasurement:
        """Do all runs, and derive the costs.

        Their order lets no run find its items read before, as far as there are enough items.
        """
        workers, seconds = self.loader.num_workers, self.options.seconds
        # The source alone, then the loop on batches that are there.
        probes, batches = self._probe()
        synthetic = self._loop(Watched(cycle(batches), seconds))
        # Cold: one worker without the loop, all cores busy, and the user's number of workers.
        alone_cold, _ = self._cold(1, self._drain)
        crowded, used = self._cold(max(1, self.cores), self._loop)
        cold, used = (crowded, used) if workers == self.cores else self._cold(workers, self._loop)
        # Cached: the loop, and the loader alone without and with a worker.
        kept = self._fill(used)
        cached = self._loop(self._over(kept, workers))
        alone, beside = (self._drain(self._over(kept, count)) for count in (0, 1))
        # Costs: differences between these runs.
        hit_seconds = alone.core_seconds / self.batch_size
        _, link = fit_link(probes.samples, rate=self.options.link_bytes_per_second)
        source_bytes = float(np.mean([probe.source_bytes for probe in probes.samples]))
        # what a worker takes besides the samples that it reads from the cache
        worker_seconds = max(0.0, beside.worker_core_seconds - self.batch_size * hit_seconds)
        sample = sample_costs(
            alone_cold, synthetic, self.batch_size, worker_seconds + probes.collate_seconds
        )
        entry_bytes = self.cache.entry_bytes()
        costs = StallCosts(
            batch_size=self.batch_size,
            num_items=len(self.items.order),
            step_seconds=synthetic.batch_seconds,
            step_core_seconds=synthetic.core_seconds,
            # the part of a sample's wait that is no transfer
            latency_seconds=max(0.0, sample.wait_seconds - source_bytes / link),
            source_bytes=source_bytes,
            link_bytes_per_second=link,
            prepare_seconds=sample.core_seconds,
            hit_seconds=hit_seconds,
            collate_seconds=probes.collate_seconds,
            worker_seconds=worker_seconds,
            receive_seconds=beside.core_seconds,
            entry_bytes=entry_bytes,
            disk_bytes_per_second=read_rate(directory, entry_bytes=entry_bytes),
            other_seconds=sample.other_seconds,
        )
        costs = replace(costs, contention=contention(costs, crowded, cores=self.cores))
        setup = SetUp(workers, self.cores, prefetch_factor=self.loader.prefetch_factor or 2)
        return StallMeasurement(costs, setup, synthetic, cold, cached)

    def _probe(self) -> tuple[SourceProbe, list[Any]]:
        """Measure reading and collating alone, and keep a few batches for the synthetic run.

        This happens in another process; its children start without open connections.
        """
        count = max(_MOST_PROBES, 2 * self.batch_size)
        items = self.items.rest(at_least=count)[:count]
        probes = probe_source(self.loader, items, seconds=self.options.seconds)
        # these are no new items for the cold runs any more
        self.items.used += len(probes.samples) + WARMUP_SAMPLES
        batches = loader_over(self.loader, items[: _REPLAYED * self.batch_size], num_workers=1)
        return probes, list(batches)

    def _over(self, items: Sequence[int], workers: int, *, cached: bool = True) -> Watched:
        """Watch the loader over `items` in steady state, without start and end of its queues."""
        ahead = workers * (self.loader.prefetch_factor or 2)
        make = self.cache.loader_over if cached else loader_over
        loader = make(self.loader, items, num_workers=workers)
        count = len(loader)
        # neither the batches that fill the queues, nor those that empty them
        skip = min(4 + ahead + workers, count // 2)
        most = max(1, count - skip - ahead)
        return Watched(loader, self.options.seconds, skip=skip, most=most)

    def _loop(self, watched: Watched) -> LoopTimes:
        self.train(watched)
        return watched.times()

    def _cold(
        self, workers: int, run: Callable[[Watched], LoopTimes]
    ) -> tuple[LoopTimes, list[int]]:
        """Run on items that were not read before; returns these too."""
        items = self.items.rest(at_least=(16 + 8 * workers) * self.batch_size)
        watched = self._over(items, workers, cached=False)
        times = run(watched)
        taken = min(len(items), watched.used * self.batch_size)
        # Prefetched and not trained on: these count as read.
        ahead = workers * ((self.loader.prefetch_factor or 2) + 1) * self.batch_size
        self.items.used += min(len(items), taken + ahead)
        return times, items[:taken]

    def _fill(self, items: Sequence[int]) -> list[int]:
        """Store items in the cache, as many as there is room for, and return them."""
        # Not in this process: workers forked later would share the connections that it opens.
        workers = self.cores if self.loader.num_workers else 0
        # a few at first, to learn how large an entry is
        first = list(items[: max(self.batch_size, 16)])
        for _ in self.cache.loader_over(self.loader, first, num_workers=workers):
            pass
        # room for nine tenths of them, so that all fit
        room = int(0.9 * int(self.options.memory_bytes) / self.cache.entry_bytes())
        if room < LEAST_BATCHES * self.batch_size:
            raise ValueError(
                f"memory_bytes={self.options.memory_bytes} holds {room} samples, less than "
                f"{LEAST_BATCHES} batches of {self.batch_size}: raise it for the measurement"
            )
        kept = list(items[:room])
        for _ in self.cache.loader_over(self.loader, kept, num_workers=workers):
            pass
        return kept

    def _drain(self, watched: Watched) -> LoopTimes:
        """Time the loader alone, as fast as it goes.

        Each batch is touched: the memory that a worker sent is mapped by then.
        """
        watched.seconds = min(watched.seconds, 3.0)
        for batch in watched:
            touch(batch)
        return watched.times()


class SampleCosts(NamedTuple):
    """Seconds of one sample from the source: of waiting, of a core, of other processes."""

    wait_seconds: float
    core_seconds: float
    other_seconds: float


def sample_costs(
    cold: LoopTimes, idle: LoopTimes, batch_size: int, worker_seconds: float
) -> SampleCosts:
    """Return the costs of a sample, from one worker that does nothing but read the source.

    `worker_seconds` is the worker's time per batch besides its samples. The rest of the machine is
    also busy in the `idle` loop, which reads nothing; that part is subtracted.
    """
    # one worker: what the clock takes more than its core is waiting
    wait = max(0.0, cold.batch_seconds - cold.worker_core_seconds)
    # processes that work for it, without what is busy in the idle loop as well
    others = (
        cold.other_core_seconds - idle.other_core_seconds / idle.batch_seconds * cold.batch_seconds
    )
    work = max(0.0, cold.worker_core_seconds - worker_seconds)
    return SampleCosts(
        wait / batch_size, work / batch_size, min(wait, max(0.0, others)) / batch_size
    )


def contention(costs: StallCosts, crowded: LoopTimes, *, cores: int) -> float:
    """Return how much longer the work takes when every core has a worker.

    It is the core time of the `crowded` cold loop over that of the same work alone.
    """
    # the work of a batch, as measured alone
    alone = costs.batch_size * costs.miss_seconds
    alone += costs.worker_seconds + costs.receive_seconds + costs.step_core_seconds
    taken = crowded.core_seconds + crowded.worker_core_seconds
    # cores at work at a time
    busy = min(float(cores), taken / crowded.batch_seconds)
    if cores == 1 or busy < _LEAST_BUSY:
        return 1.0
    # seen with `busy` cores; in proportion with all of them
    return 1 + max(0.0, taken / alone - 1) * (cores - 1) / (busy - 1)


class SampleProbe(NamedTuple):
    """One sample read alone.

    Args:
        seconds: by the clock.
        core_seconds: core time.
        source_bytes: that came from a network or a disk meanwhile.
    """

    seconds: float
    core_seconds: float
    source_bytes: float

    @property
    def wait_seconds(self) -> float:
        """Seconds by the clock without a core at work."""
        return max(0.0, self.seconds - self.core_seconds)


class SourceProbe(NamedTuple):
    """Costs of reading samples and collating batches, in a process that does only that."""

    samples: list[SampleProbe]
    collate_seconds: float  # per batch


def probe_source(
    loader: DataLoader[object], items: Sequence[int], *, seconds: float
) -> SourceProbe:
    """Read items for `seconds` in a new process and time them.

    Connections that a data set opens must not exist in this process when workers fork.

    Raises:
        RuntimeError: reading fails (with the traceback), the process ends, or no sample comes
            within 5 minutes.
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


def _probe(loader: DataLoader[object], items: Sequence[int], seconds: float) -> SourceProbe:
    dataset: Any = loader.dataset
    probes, samples = probe_samples(dataset.__getitem__, items, seconds=seconds)
    size = samples_per_batch(loader)
    # as many samples as a batch has, some of them again where fewer were read
    group = (samples * math.ceil(size / len(samples)))[:size]
    whole = group if makes_batches(loader) else group[0]
    times = []
    for _ in range(_COLLATIONS):
        start = time.perf_counter()
        loader.collate_fn(whole)
        times.append(time.perf_counter() - start)
    return SourceProbe(probes, statistics.median(times))


def probe_samples(
    read: Callable[[int], Any],
    items: Iterable[int],
    *,
    seconds: float,
    warmup: int = WARMUP_SAMPLES,
) -> tuple[list[SampleProbe], list[Any]]:
    """Read items one by one for at most `seconds`.

    Returns the probes without the first `warmup`, and the last samples.
    """
    probes: list[SampleProbe] = []
    samples: list[Any] = []
    end = time.perf_counter() + seconds
    for item in items:
        # bytes, clock and core time before and after each read
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


def _received_bytes() -> int:
    """Return the bytes received so far: by the busiest network device, plus those read from disks.

    A packet passes several devices on its way into a container, so only one device counts. The
    disk's are those of this process. 0 where the system does not tell.
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
    """Fit wait = latency + bytes / rate; returns latency (seconds) and rate (bytes per second).

    The slope is Theil and Sen's (median over all pairs), so that a few disturbed samples do not
    count. The mean wait is kept. `rate`: if known. Where the sizes say nothing about the rate, it
    is infinite, and the whole wait is latency.
    """
    waits = np.array([probe.wait_seconds for probe in probes])
    sizes = np.array([probe.source_bytes for probe in probes])
    slope = _slope(sizes, waits) if rate is None else 1 / rate
    transfer = slope * float(sizes.mean())
    if transfer <= 0:
        return float(waits.mean()), inf
    return max(0.0, float(waits.mean()) - transfer), 1 / slope


def _slope(sizes: npt.NDArray[np.float64], waits: npt.NDArray[np.float64]) -> float:
    # sizes too equal to say anything of the rate
    if len(sizes) < 8 or sizes.mean() <= 0 or sizes.std() < _LEAST_SPREAD * sizes.mean():
        return 0.0
    count = len(sizes)
    first, second = np.triu_indices(count, 1)
    more_bytes, more_wait = sizes[second] - sizes[first], waits[second] - waits[first]
    # Do larger samples take longer, beyond chance? Kendall's S has a known variance.
    ordered = float((np.sign(more_bytes) * np.sign(more_wait)).sum())
    if ordered < _SURE * math.sqrt(count * (count - 1) * (2 * count + 5) / 18):
        return 0.0
    # pairs of nearly equal size would divide by next to nothing
    apart = np.abs(more_bytes) > 0.1 * sizes.std()
    return max(0.0, float(np.median(more_wait[apart] / more_bytes[apart])))


def read_rate(directory: str | Path, *, entry_bytes: float) -> float:
    """Measure random reads of `entry_bytes` past the page cache, in bytes per second.

    It is infinite where the system cannot drop pages.
    """
    if not hasattr(os, "posix_fadvise"):
        return inf
    folder = Path(directory).expanduser()
    folder.mkdir(parents=True, exist_ok=True)
    size = int(min(max(1, entry_bytes), _DISK_TEST_BYTES))
    with tempfile.TemporaryFile(dir=folder) as file:
        # a file on that disk, whose pages the kernel drops before it is read
        block = os.urandom(1 << 20)
        for _ in range(_DISK_TEST_BYTES >> 20):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        places = (
            np.random.default_rng(0).permutation(_DISK_TEST_BYTES // size)[:_DISK_READS].tolist()
        )
        # Random order, so that the kernel reads nothing ahead.
        start = time.perf_counter()
        for place in places:
            os.pread(file.fileno(), size, place * size)
        return len(places) * size / (time.perf_counter() - start)

"""Measurements of this machine that later starts read instead of measuring again.

    measurements = Measurements.open(device=torch.device("cpu"))
    cluster = measurements.cluster()
    kernel_seconds = measurements.kernel_seconds(graph)
    times = time_updates([optimizer], named_parameters=..., known=measurements.known_updates)
    seconds_per_element = measurements.agree_on_updates(times)

All ranks get the same. Rank 0 reads and writes one file per set-up (`describe_setup`) in the user's
cache directory. The file holds rates, curves and times by hashes; no names:

    {"version": 7, "setup": {...}, "refreshed": t, "entries": {name: {"time": t, "value": ...,
     "busy": share}}}

`t` are seconds since 1970. It is read only as this user's own, written whole, and merged with other
jobs'. Measuring again is always possible: what goes wrong with the file costs a warning, never
more.

What was measured while other programs had the cores has `busy`, the share of the time without one.
It serves as long as the machine is busy, is measured again by the first start that finds it quiet,
and never takes the place of what was measured on a quiet machine.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import math
import os
import platform
import secrets
import socket
import stat
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import psutil
import torch
import torch.distributed as dist
from torch.cuda import nccl

from lightning_topt.basics.core_wait import CoreWait, usable_cores
from lightning_topt.basics.own_files import not_own_reason
from lightning_topt.costs.calibrate import (
    USUAL_COLLECTIVES,
    busy_share,
    calibrate,
    measure_kernels,
)
from lightning_topt.costs.cluster import COLLECTIVES, Cluster, ClusterError
from lightning_topt.costs.communication import mesh_groups
from lightning_topt.costs.compute import KernelKey, kernel_key
from lightning_topt.costs.measuring import (
    average,
    from_rank_0,
    gather,
    most,
    on_all_ranks,
    own_rank,
    time_once,
    world_size,
)
from lightning_topt.costs.optimizer import UpdateTime
from lightning_topt.graph.op_graph import OpGraph

_CHANGED = 6.0  # a link that is so many times faster or slower than measured is another one
_CHECK_BYTES, _CHECK_SECONDS, _CHECK_REPEATS = 1 << 18, 0.02, 4
_PATIENCE_SECONDS = 0.5  # with a machine that is busy for a moment
_KERNELS_SECONDS = 2.0
_LOOK_SECONDS, _LOOK_WIDTH = 0.1, 256  # of products that find out whether the machine is busy
VERSION = 7
MAX_AGE_SECONDS = 30 * 24 * 3600.0
_MAX_BYTES, _MAX_ENTRIES = 1 << 25, 50_000
_LOCK_SECONDS = 2.0
_SUFFIX = ".json"
# Of the environment, what libraries read that compute, allocate or communicate. The number of
# threads is known as such.
_PREFIXES = (
    "MKL_",
    "KMP_",
    "GOMP_",
    "ONEDNN_",
    "DNNL_",
    "MALLOC_",
    "NCCL_",
    "GLOO_",
    "UCX_",
    "CUDA_",
    "PYTORCH_",
)
_NAMES = ("GLIBC_TUNABLES", "LD_PRELOAD", "ATEN_CPU_CAPABILITY", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE")
_DRIVER = Path("/sys/module/nvidia/version")
_NETNS_COOKIE = 71  # SO_NETNS_COOKIE, which Python has no name for
_WITHOUT_EFFECT = ("CUDA_VISIBLE_DEVICES", "MKL_NUM_THREADS")
Progress = Callable[[str], None]
T = TypeVar("T")


class Entry(NamedTuple):
    """A measured value, as JSON has it, and when it was measured.

    `busy` is the share of the time in which a rank had no core; 0 where the machine was quiet.
    """

    time: float
    value: Any
    busy: float = 0.0


Entries = dict[str, Entry]


class Measurements:
    """What was measured in one set-up.

    Every method but `save` and `renew` is collective over the default process group. `busy_share`
    is the largest `Entry.busy` of what was returned so far.
    """

    def __init__(
        self,
        setup: dict[str, Any],
        *,
        device: torch.device,
        entries: Entries,
        directory: Path | None,
        refreshed: float | None,
        progress: Progress | None,
    ) -> None:
        self.setup, self.device, self.entries, self.directory = setup, device, entries, directory
        self._refreshed, self._progress = refreshed, progress
        self.busy_share, self._opened, self._says_busy = 0.0, time.time(), True

    @classmethod
    def open(
        cls,
        *,
        device: torch.device | str = "cpu",
        num_nodes: int = 1,
        refresh: bool = False,
        directory: Path | str | None = None,
        progress: Progress | None = None,
    ) -> Measurements:
        """Read what is stored for this set-up, not older than 30 days. Collective.

        A file that is damaged or belongs to another user is not used, with a warning on rank 0.
        What was measured on a busy machine is not used once that is quiet.

        Args:
            device: what ranks train on.
            num_nodes: how many machines the ranks are on.
            refresh: measure everything again; what is stored is dropped with the next `save`.
            directory: where the files are; by default ``lightning_topt/measurements`` in the user's
                cache directory.
            progress: called on rank 0 with a short line before anything that takes longer than a
                blink.
        """
        folder: Path | None
        device = torch.device(device)
        setup = describe_setup(device, num_nodes=num_nodes)
        try:
            folder = default_directory() if directory is None else Path(directory)
        except RuntimeError:  # a user without a home
            folder = None

        options: dict[str, Any] = {"device": device, "directory": folder, "progress": progress}
        if refresh:
            return cls(setup, entries={}, refreshed=time.time(), **options)

        def read() -> Entries:
            return load_entries(folder, setup) if own_rank() == 0 and folder is not None else {}

        # rank 0's file counts: ranks that disagree would measure different things, and wait forever
        stored = from_rank_0(on_all_ranks(read))
        quiet = {name: entry for name, entry in stored.items() if not entry.busy}
        if len(quiet) < len(stored) and not _machine_is_busy(ranks=world_size() // num_nodes):
            stored = quiet
        return cls(setup, entries=stored, refreshed=None, **options)

    @property
    def path(self) -> Path | None:
        """The file of this set-up; None where the user has no directory for it."""
        return None if self.directory is None else self.directory / file_name(self.setup)

    def cluster(self) -> Cluster:
        """Return the cluster as stored, else as `calibrate` measures it now (about 2 s).

        With `refresh` all collectives and datagrams are measured (about 4 s). What is stored is
        measured again where one exchange now takes six times as long as it should, or a sixth.
        """
        stored = self._stored_cluster()
        if stored is not None and _links_are_as_in(stored, self.device):
            self._use(stored.busy_share)
            return stored
        again = (
            ""
            if stored is None
            else " again, since exchanges take another time than when it was measured"
        )
        self._tell(f"measuring this machine{again} (about 2 s)")
        ops = USUAL_COLLECTIVES if self._refreshed is None else COLLECTIVES
        datagrams = self._refreshed is not None
        cluster = calibrate(
            device=self.device,
            num_nodes=self.setup["num_nodes"],
            collectives=ops,
            datagrams=datagrams,
        )
        if cluster.busy_share:  # what was measured on a quiet machine stays
            self._refreshed = None
        self._add({self._name("cluster"): cluster.to_dict()}, busy=cluster.busy_share)
        return cluster

    def kernel_seconds(
        self, graph: OpGraph, *, budget_seconds: float = _KERNELS_SECONDS
    ) -> dict[KernelKey, float]:
        """Return the seconds of the graph's kernels by `kernel_key`.

        As stored, else as `measure_kernels` measures them now. A graph is measured once: kernels
        that could not be made, or for which there was no time, are left out afterwards too, so that
        two starts of one program plan with the same numbers.
        """
        names = {kernel_key(k): "" for op in graph.ops for k in (*op.forward, *op.backward)}
        # entries of kernels, and one that says that the whole graph was measured
        names = {key: self._name("kernel", *key) for key in names}
        graph_name = self._name("graph", *sorted(names.values()))
        known = {key: self._seconds(name) for key, name in names.items()}
        found = {key: seconds for key, seconds in known.items() if seconds is not None}
        if graph_name in self.entries or len(found) == len(names):
            return found
        self._tell(f"measuring {len(names) - len(found)} kernels (about {budget_seconds:.0f} s)")
        measured, busy = self._watched(
            lambda: measure_kernels(
                graph, device=self.device, budget_seconds=budget_seconds, known=found
            )
        )
        self._add({names[key]: seconds for key, seconds in measured.items()}, busy=busy, save=False)
        found |= measured
        if found:
            # As old as the oldest of them: what is too old some day is then measured again.
            oldest = min(self.entries[names[key]].time for key in found)
            busiest = max(self.entries[names[key]].busy for key in found)
            self.entries[graph_name] = Entry(oldest, True, busiest)
            self.save()
        return found

    def known_updates(self, key: str) -> float | None:
        """Return the stored seconds per element of a kind of update, by its key. Not collective."""
        return self._seconds(self._name("update", key))

    def agree_on_updates(self, times: Sequence[UpdateTime]) -> dict[str, float]:
        """Return the seconds per element of each parameter's update by name, the mean of all ranks.

        What was not known before is stored. `times` are of this rank, of equal kinds on all.
        """
        seconds = average([each.seconds for each in times]) if times else []
        new = {
            self._name("update", each.key): value
            for each, value in zip(times, seconds, strict=True)
            if each.key and each.waited is not None
        }
        if new:
            waited = most(max(each.waited or 0.0 for each in times))
            ranks = world_size() // self.setup["num_nodes"]
            is_cpu = self.device.type == "cpu"
            self._add(new, busy=busy_share(waited, ranks=ranks) if is_cpu else 0.0)
        return {
            name: value for each, value in zip(times, seconds, strict=True) for name in each.names
        }

    def save(self) -> None:
        """Write what was measured, on rank 0, merged with what other jobs have written.

        A failure costs a warning.
        """
        if own_rank() == 0 and self.directory is not None:
            save_entries(self.directory, self.setup, self.entries, refreshed=self._refreshed)

    def _watched(self, measure: Callable[[], T]) -> tuple[T, float]:
        """Return what computing ranks `measure`, and the share without a core if that is too much.

        An accelerator's times are its own, whoever has the cores.
        """
        watch = CoreWait(threads=torch.get_num_threads())
        found = measure()
        share = most(watch.share())
        ranks = world_size() // self.setup["num_nodes"]
        return found, busy_share(share, ranks=ranks) if self.device.type == "cpu" else 0.0

    def _use(self, busy: float) -> None:
        # Note that what is used was measured so, and tell once where the machine was busy
        self.busy_share = max(self.busy_share, busy)
        if self.busy_share and self._says_busy:
            self._says_busy = False
            self._tell(
                "this machine was busy while it was measured, so predictions may be too slow; a "
                "later start that finds it quiet measures again"
            )

    def _add(self, values: dict[str, Any], *, busy: float, save: bool = True) -> None:
        now = time.time()
        self.entries.update({name: Entry(now, value, busy) for name, value in values.items()})
        self._use(busy)
        if save:
            self.save()

    def _name(self, kind: str, *words: str) -> str:
        return f"{kind} {hashlib.sha256(json.dumps(['', *words]).encode()).hexdigest()[:32]}"

    def _seconds(self, name: str) -> float | None:
        entry = self.entries.get(name)
        value = None if entry is None else entry.value
        # an entry that is no time is measured again
        if isinstance(value, bool) or not isinstance(value, int | float):
            return None
        if entry is None or not (math.isfinite(value) and value > 0):
            return None
        self._use(entry.busy)
        return float(value)

    def _stored_cluster(self) -> Cluster | None:
        entry = self.entries.get(self._name("cluster"))
        try:
            cluster = None if entry is None else Cluster.from_dict(entry.value)
        except ClusterError:
            return None
        if cluster is None or (cluster.num_devices, cluster.num_nodes) != (
            world_size(),
            self.setup["num_nodes"],
        ):
            return None
        groups = mesh_groups(cluster.num_devices, devices_per_node=cluster.devices_per_node)
        complete = all(
            ("all_reduce", group.size, group.stride) in cluster.collectives for group in groups
        )
        return cluster if complete else None  # older measurements have the group of all ranks only

    def _tell(self, line: str) -> None:
        if self._progress is not None and own_rank() == 0:
            self._progress(line)


def _links_are_as_in(cluster: Cluster, device: torch.device) -> bool:
    """Return whether one small all_reduce takes about as long as `cluster` says.

    Collective: the same answer on all ranks.
    """
    ranks = world_size()
    curve = cluster.collectives.get(("all_reduce", ranks, 1))
    if curve is None:
        return ranks == 1
    sizes = [
        s
        for s, t in zip(curve.sizes, curve.seconds, strict=True)
        if s <= _CHECK_BYTES and t <= _CHECK_SECONDS
    ]
    size = max(sizes, default=curve.sizes[0])
    message = torch.ones(max(int(size) // 4, 1), device=device, dtype=torch.float32)
    expected, least, start = curve.seconds_at(size), math.inf, time.perf_counter()
    while True:
        times = [
            time_once(lambda: dist.all_reduce(message), device=device)
            for _ in range(_CHECK_REPEATS)
        ]
        seconds, waited = average([min(times), time.perf_counter() - start])
        least = min(least, seconds)
        if least <= _CHANGED * expected or waited > _PATIENCE_SECONDS:
            return expected / _CHANGED <= least <= _CHANGED * expected


def _machine_is_busy(*, ranks: int) -> bool:
    """Return whether other programs have cores that these `ranks` of a machine need, just now.

    All ranks compute for a tenth of a second. Collective: the same answer on all ranks.
    """
    matrix = torch.ones(_LOOK_WIDTH, _LOOK_WIDTH, dtype=torch.float32)
    average([0.0])  # all ranks at once
    watch, end = CoreWait(threads=torch.get_num_threads()), time.perf_counter() + _LOOK_SECONDS
    while time.perf_counter() < end:
        matrix @ matrix
    return busy_share(most(watch.share()), ranks=ranks) > 0


# ---- The set-up: equal set-ups may share measurements


def describe_setup(device: torch.device, *, num_nodes: int) -> dict[str, Any]:
    """Return the set-up as JSON values, the same on all ranks. Collective.

    Machines with their processors, devices, drivers and threads per rank; ranks and nodes; backend;
    versions of torch, of what it calls on CUDA and of this package; a hash of the environment
    variables that matter; settings of torch.
    """
    machines: list[Any] = []
    for machine in gather(_machine(device)):
        if machine not in machines:
            machines.append(machine)
    setup = {
        "machines": machines,
        "world_size": world_size(),
        "num_nodes": num_nodes,
        "backend": dist.get_backend() if world_size() > 1 else "",
        "torch": torch.__version__,
        # complete by now, not when this file is imported
        "package": sys.modules["lightning_topt"].__version__,
        "environment": _environment(),
        "settings": {
            "fp32_precision": _fp32_precisions(),
            "deterministic": torch.are_deterministic_algorithms_enabled(),
            "cudnn": [torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic],
        },
    }
    found: dict[str, Any] = from_rank_0(setup)
    return found


def _machine(device: torch.device) -> dict[str, Any]:
    return {
        "host": platform.node(),
        "cpu": _cpu_model(),
        "cores": usable_cores(),
        "memory": psutil.virtual_memory().total,
        "network": _network(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "libraries": _cuda_libraries() if device.type == "cuda" else [],
        "threads": torch.get_num_threads(),
    }


def _fp32_precisions() -> list[str]:
    """Return the precision of products, convolutions and recurrent layers in float32.

    `torch.get_float32_matmul_precision` raises once one of these was set by itself.
    """
    backends: Any = torch.backends
    parts = [backends.cuda.matmul, backends.cudnn.conv, backends.cudnn.rnn]
    parts += [backends.mkldnn.matmul, backends.mkldnn.conv, backends.mkldnn.rnn]
    return [part.fp32_precision for part in parts]


def _cuda_libraries() -> list[Any]:
    # The versions of the driver, CUDA, cuDNN and NCCL, as far as they are known
    try:
        driver = _DRIVER.read_text().strip()
    except OSError:
        driver = ""
    found = nccl.version() if dist.is_nccl_available() else ()
    cudnn = torch.backends.cudnn.version()
    return [driver, torch.version.cuda, cudnn, list(found)]


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        lines = []
    return next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")),
        platform.machine(),
    )


def _network() -> str:
    """Return the network namespace: containers on one machine have links of their own.

    Its number is given to another one when it ends, its cookie (Linux 5.14) never before the next
    boot.
    """
    try:
        number = os.readlink("/proc/self/ns/net")
    except OSError:  # no Linux
        return ""
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as any_socket:
            cookie = any_socket.getsockopt(socket.SOL_SOCKET, _NETNS_COOKIE, 8)
    except OSError:
        return number
    return f"{number} {int.from_bytes(cookie, sys.byteorder)}"


def _environment() -> str:
    # A hash of the environment variables that matter
    chosen = {
        name: value
        for name, value in os.environ.items()
        if (name.startswith(_PREFIXES) or name in _NAMES) and name not in _WITHOUT_EFFECT
    }
    return hashlib.sha256(json.dumps(chosen, sort_keys=True).encode()).hexdigest()[:16]


# ---- The file


def default_directory() -> Path:
    """Return where measurements of this user are kept.

    ``lightning_topt/measurements`` in the user's cache directory.
    """
    given = os.environ.get("XDG_CACHE_HOME", "")
    caches = Path(given) if os.path.isabs(given) else Path.home() / ".cache"
    return caches / "lightning_topt" / "measurements"


def file_name(setup: Mapping[str, Any]) -> str:
    """Return the name of the file for a set-up (of JSON values)."""
    return hashlib.sha256(json.dumps(setup, sort_keys=True).encode()).hexdigest()[:32] + _SUFFIX


def load_entries(directory: Path, setup: Mapping[str, Any]) -> Entries:
    """Return the entries for `setup` that are not older than 30 days.

    None, with a warning, where they cannot be read or trusted.
    """
    try:
        with _opened(directory) as folder:
            return _read(folder, setup)[0]
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        _warn(
            f"measurements in {directory} are not used, so this machine is measured again: {error}"
        )
        return {}


def save_entries(
    directory: Path, setup: Mapping[str, Any], entries: Entries, *, refreshed: float | None = None
) -> None:
    """Merge `entries` with those in the file for `setup`, of each the newer one.

    One of a busy machine replaces none of a quiet one. All from before `refreshed` are dropped.
    Other jobs may do the same at the same time. A directory that cannot be written costs a warning.
    """
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        with _opened(directory) as folder, _locked(folder):
            try:
                stored, limit = _read(folder, setup)
            except (OSError, ValueError, RecursionError):
                stored, limit = {}, 0.0
            limit = max(limit, refreshed or 0.0)
            merged = {name: entry for name, entry in stored.items() if entry.time >= limit}
            for name, entry in entries.items():
                if entry.time >= limit and _is_better(entry, merged.get(name)):
                    merged[name] = entry
            newest = sorted(merged, key=lambda name: -merged[name].time)[:_MAX_ENTRIES]
            _replace(folder, setup, {name: merged[name] for name in newest}, limit)
            _remove_old(folder)
    except (OSError, ValueError) as error:
        _warn(
            f"measurements cannot be kept in {directory}, so the next start measures again: {error}"
        )


def _is_better(entry: Entry, stored: Entry | None) -> bool:
    # Whether `entry` takes the place of the one that is `stored`, if any
    if stored is None or bool(stored.busy) != bool(entry.busy):
        return stored is None or not entry.busy
    return stored.time < entry.time


@contextlib.contextmanager
def _opened(directory: Path) -> Iterator[int]:
    # Yield a descriptor of the folder, which is this user's and nobody else's to write
    folder = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        _check_own(folder, str(directory))
        yield folder
    finally:
        os.close(folder)


def _check_own(descriptor: int, name: str) -> os.stat_result:
    # The status of a file or folder; raise PermissionError where it is not our own
    status = os.fstat(descriptor)
    if reason := not_own_reason(status, also_root=False):
        raise PermissionError(f"{name}: {reason}")
    return status


def _read(folder: int, setup: Mapping[str, Any]) -> tuple[Entries, float]:
    """Return the entries of the file, and before when everything was dropped.

    Raises ValueError, OSError for a file that is not ours.
    """
    name = file_name(setup)
    descriptor = os.open(
        name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder
    )
    with open(descriptor, "rb") as file:
        status = _check_own(descriptor, name)
        if not stat.S_ISREG(status.st_mode) or status.st_size > _MAX_BYTES:
            raise ValueError(f"{name} is no file of measurements")
        text = file.read(_MAX_BYTES + 1)
    try:
        data = json.loads(text)
        if data["version"] != VERSION or data["setup"] != dict(setup):
            raise ValueError("it is of another version or set-up")
        oldest = max(_time(data["refreshed"]), time.time() - MAX_AGE_SECONDS)
        entries = {
            str(key): Entry(_time(entry["time"]), entry["value"], _time(entry.get("busy", 0.0)))
            for key, entry in data["entries"].items()
        }
    except (KeyError, TypeError, AttributeError, ValueError, RecursionError) as error:
        raise ValueError(f"{name} cannot be read ({type(error).__name__}: {error})") from None
    latest = time.time() + 60  # a clock that was wrong must not keep entries for ever
    return {key: entry for key, entry in entries.items() if oldest <= entry.time <= latest}, _time(
        data["refreshed"]
    )


def _time(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{value!r} is no time")
    return float(value)


def _replace(folder: int, setup: Mapping[str, Any], entries: Entries, refreshed: float) -> None:
    """Write a new file beside the old one and give it its name.

    Readers see one or the other, never a part.
    """
    data = {"version": VERSION, "setup": dict(setup), "refreshed": refreshed}
    data["entries"] = {name: entry._asdict() for name, entry in entries.items()}
    name = file_name(setup)
    temporary = f"{name}.{secrets.token_hex(8)}.tmp"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(temporary, flags, 0o600, dir_fd=folder)
    try:
        with open(descriptor, "wb") as file:
            file.write(json.dumps(data).encode())
            file.flush()
            os.fsync(descriptor)
        os.replace(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary, dir_fd=folder)
        raise


@contextlib.contextmanager
def _locked(folder: int) -> Iterator[None]:
    """Wait for other writers, but not for ever.

    Without the lock the last writer wins, with a whole file all the same.
    """
    descriptor = os.open(
        ".lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=folder
    )
    try:
        deadline = time.monotonic() + _LOCK_SECONDS
        while time.monotonic() < deadline:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(0.01)
            except OSError:  # a file system without locks
                break
        yield
    finally:
        os.close(descriptor)


def _remove_old(folder: int) -> None:
    """Remove files that nobody has written for twice the age of their entries.

    Such as those of containers that are gone.
    """
    for name in os.listdir(folder):
        if name.endswith((_SUFFIX, ".tmp")):
            with contextlib.suppress(OSError):
                if (
                    time.time() - os.stat(name, dir_fd=folder, follow_symlinks=False).st_mtime
                    > 2 * MAX_AGE_SECONDS
                ):
                    os.unlink(name, dir_fd=folder)


def _warn(message: str) -> None:
    warnings.warn(message, stacklevel=4)

"""Measurements of this machine that later starts read instead of measuring again.

    measurements = Measurements.open(device=torch.device("cpu"))
    cluster = measurements.cluster()
    kernel_seconds = measurements.kernel_seconds(graph)
    times = time_updates([optimizer], named_parameters=..., known=measurements.known_updates)
    seconds_per_element = measurements.agree_on_updates(times)

All ranks get the same. Rank 0 reads and writes one file per set-up (`describe_setup`) in the user's
cache directory. The file holds rates, curves and times by hashes; no names:

    {"version": 8, "setup": {...}, "entries": {name: {"time": t, "value": ..., "busy": share}}}

`t` are seconds since 1970. It is read only as this user's own, replaced in one go, and merged with
other jobs'. Measuring again is always possible: what goes wrong with the file costs a warning,
never more.

What was measured while other programs had the cores has `busy`, the share of the time without one.
It serves for an hour, and never takes the place of what was measured on a quiet machine.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import platform
import secrets
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch
import torch.distributed as dist

from lightning_topt.basics.core_wait import usable_cores
from lightning_topt.basics.own_files import made, open_own
from lightning_topt.costs.calibrate import (
    USUAL_COLLECTIVES,
    WatchedPart,
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
    own_rank,
    time_once,
    usable_memory_bytes,
    world_size,
)
from lightning_topt.costs.optimizer import UpdateTime
from lightning_topt.graph.op_graph import OpGraph

_CHANGED = 6.0  # a link that is so many times faster or slower than measured is another one
_CHECK_BYTES, _CHECK_SECONDS, _CHECK_REPEATS = 1 << 18, 0.02, 4
_PATIENCE_SECONDS = 0.5  # with a machine that is busy for a moment
_KERNELS_SECONDS = 2.0
VERSION = 8
MAX_AGE_SECONDS, BUSY_AGE_SECONDS = 30 * 24 * 3600.0, 3600.0
_MAX_BYTES, _MAX_ENTRIES = 1 << 25, 50_000
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
_NAMES = (
    *("GLIBC_TUNABLES", "LD_PRELOAD", "ATEN_CPU_CAPABILITY"),
    *("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "TORCH_DIST_USE_NCCL2"),
)
_DRIVER = Path("/sys/module/nvidia/version")
_WITHOUT_EFFECT = ("CUDA_VISIBLE_DEVICES", "MKL_NUM_THREADS")
Progress = Callable[[str], None]


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

    Every method but `save` and `known_updates` is collective over the default process group.
    `busy_share` is the largest `Entry.busy` of what was returned so far.
    """

    def __init__(
        self,
        setup: dict[str, Any],
        *,
        device: torch.device,
        entries: Entries,
        directory: Path | None,
        refresh: bool,
        progress: Progress | None,
    ) -> None:
        self.setup, self.device, self.entries, self.directory = setup, device, entries, directory
        self._refresh, self._progress = refresh, progress
        self.busy_share = 0.0

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
        """Read what is stored for this set-up and not too old. Collective.

        A file that is damaged or belongs to another user is not used, with a warning on rank 0.

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

        stored: Entries = {}
        if not refresh and folder is not None and own_rank() == 0:
            stored = load_entries(folder, setup)
        # rank 0's file counts: ranks that disagree would measure different things, and wait forever
        return cls(
            setup,
            entries=from_rank_0(stored),
            refresh=refresh,
            device=device,
            directory=folder,
            progress=progress,
        )

    @property
    def path(self) -> Path | None:
        """The file of this set-up; None where the user has no directory for it."""
        return None if self.directory is None else file_of(self.directory, self.setup)

    def cluster(self) -> Cluster:
        """Return the cluster as stored, else as `calibrate` measures it now (about 2 s).

        With `refresh` all collectives are measured (about 4 s). What is stored is measured again
        where one exchange now takes six times as long as it should, or a sixth. How much memory is
        free is always that of now.
        """
        stored = self._stored_cluster()
        if stored is not None and _links_are_as_in(stored, self.device):
            self._use(stored.busy_share)
            free = min(gather(usable_memory_bytes(self.device, ranks=self._ranks)))
            return replace(stored, device=replace(stored.device, memory_bytes=free))
        again = (
            ""
            if stored is None
            else " again, since exchanges take another time than when it was measured"
        )
        self._tell(f"measuring this machine{again} (about 2 s)")
        cluster = calibrate(
            device=self.device,
            num_nodes=self.setup["num_nodes"],
            collectives=COLLECTIVES if self._refresh else USUAL_COLLECTIVES,
        )
        if cluster.busy_share:  # what was measured on a quiet machine stays
            self._refresh = False
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
        part = WatchedPart(
            lambda: measure_kernels(
                graph, device=self.device, budget_seconds=budget_seconds, known=found
            ),
            ranks=self._ranks,
        )
        measured = part()
        new = {names[key]: seconds for key, seconds in measured.items()}
        self._add(new, busy=part.busy_share, save=False)
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
            self._add(new, busy=busy_share(waited, ranks=self._ranks))
        return {
            name: value for each, value in zip(times, seconds, strict=True) for name in each.names
        }

    def save(self) -> None:
        """Write what was measured, on rank 0, merged with what other jobs have written.

        A failure costs a warning.
        """
        if own_rank() == 0 and self.directory is not None:
            save_entries(self.directory, self.setup, self.entries, merge=not self._refresh)

    @property
    def _ranks(self) -> int:
        # That share the cores of a machine
        return int(world_size() // self.setup["num_nodes"])

    def _use(self, busy: float) -> None:
        # Note that what is used was measured so, and tell once where the machine was busy
        if busy and not self.busy_share:
            self._tell(
                "this machine was busy while it was measured, so predictions may be off; what was "
                "measured is used for an hour"
            )
        self.busy_share = max(self.busy_share, busy)

    def _add(self, values: dict[str, Any], *, busy: float, save: bool = True) -> None:
        if self.device.type != "cpu":  # its times are its own, whoever has the cores
            busy = 0.0
        now = time.time()
        self.entries.update({name: Entry(now, value, busy) for name, value in values.items()})
        self._use(busy)
        if save:
            self.save()

    def _name(self, kind: str, *words: str) -> str:
        return f"{kind} {hashlib.sha256(json.dumps(['', *words]).encode()).hexdigest()[:32]}"

    def _seconds(self, name: str) -> float | None:
        entry = self.entries.get(name)
        # an entry that is no time is measured again
        if entry is None or type(entry.value) not in (int, float) or not 0 < entry.value < math.inf:
            return None
        self._use(entry.busy)
        return float(entry.value)

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
        return cluster if complete else None  # there was no room for some groups

    def _tell(self, line: str) -> None:
        if self._progress is not None and own_rank() == 0:
            self._progress(line)


def _links_are_as_in(cluster: Cluster, device: torch.device) -> bool:
    # Whether one small all_reduce takes about as long as `cluster` says. Collective: the same
    # answer on all ranks.
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


# ---- The set-up: equal set-ups may share measurements


def describe_setup(device: torch.device, *, num_nodes: int) -> dict[str, Any]:
    """Return the set-up as JSON values, the same on all ranks. Collective.

    Machines with their cores, devices, drivers and threads per rank; ranks and nodes; backend;
    versions of torch and of this package; a hash of the environment variables that matter; settings
    of torch.
    """
    machines: list[Any] = []
    for machine in gather(describe_machine(device)):
        if machine not in machines:
            machines.append(machine)
    setup = {
        **describe_software(),
        "machines": machines,
        "world_size": world_size(),
        "num_nodes": num_nodes,
        "backend": dist.get_backend() if world_size() > 1 else "",
    }
    found: dict[str, Any] = from_rank_0(setup)
    return found


def describe_software() -> dict[str, Any]:
    """Return versions, settings and the environment that times depend on, as JSON values."""
    return {
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


def describe_machine(device: torch.device) -> dict[str, Any]:
    """Return what times depend on of this machine, as JSON values."""
    driver = ""
    if device.type == "cuda":
        with contextlib.suppress(OSError):
            driver = _DRIVER.read_text().strip()
    return {
        "host": platform.node(),
        "cores": usable_cores(),
        "memory": psutil.virtual_memory().total,
        "network": _network(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "driver": driver,
        "threads": torch.get_num_threads(),
    }


def _fp32_precisions() -> list[str]:
    # The precision of products, convolutions and recurrent layers in float32.
    # `torch.get_float32_matmul_precision` raises once one of these was set by itself.
    backends: Any = torch.backends
    parts = [backends.cuda.matmul, backends.cudnn.conv, backends.cudnn.rnn]
    parts += [backends.mkldnn.matmul, backends.mkldnn.conv, backends.mkldnn.rnn]
    return [part.fp32_precision for part in parts]


def _network() -> str:
    # The network namespace: containers on one machine have links of their own. A later one may have
    # its number: links are looked at once in each start.
    with contextlib.suppress(OSError):  # no Linux
        return os.readlink("/proc/self/ns/net")
    return ""


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


def file_of(directory: Path, setup: Mapping[str, Any]) -> Path:
    """Return the path of the file for a set-up (of JSON values)."""
    text = json.dumps(setup, sort_keys=True)
    return directory / f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.json"


def load_entries(directory: Path, setup: Mapping[str, Any]) -> Entries:
    """Return the entries for `setup` that are not too old: 30 days, of a busy machine an hour.

    None, with a warning, where they cannot be read or trusted.
    """
    try:
        return _read(directory, setup)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        _warn(
            f"measurements in {directory} are not used, so this machine is measured again: {error}"
        )
        return {}


def save_entries(
    directory: Path, setup: Mapping[str, Any], entries: Entries, *, merge: bool = True
) -> None:
    """Write `entries` to the file for `setup`.

    With `merge` what else is there stays, and what a quiet machine gave is not replaced by what a
    busy one gives. A directory that cannot be written costs a warning.
    """
    stored: Entries = {}
    if merge:
        with contextlib.suppress(OSError, ValueError):
            stored = _read(directory, setup)
    stays = {name for name, entry in stored.items() if not entry.busy}
    better = {name: e for name, e in entries.items() if not (e.busy and name in stays)}
    newest = sorted((stored | better).items(), key=lambda item: -item[1].time)[:_MAX_ENTRIES]
    data = {"version": VERSION, "setup": dict(setup)}
    data["entries"] = {name: entry._asdict() for name, entry in newest}
    try:
        path = file_of(made(directory), setup)
        # a new file beside the old one takes its name: readers see one or the other
        temporary = path.with_suffix(f".{secrets.token_hex(8)}.tmp")
        try:
            with open(open_own(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "w") as file:
                json.dump(data, file)
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
        # files that nobody writes any more, such as those of containers that are gone
        for old in directory.iterdir():
            if old.suffix in (".json", ".tmp"):
                with contextlib.suppress(OSError):
                    if time.time() - old.lstat().st_mtime > 2 * MAX_AGE_SECONDS:
                        old.unlink()
    except (OSError, ValueError) as error:
        _warn(
            f"measurements cannot be kept in {directory}, so the next start measures again: {error}"
        )


def _read(directory: Path, setup: Mapping[str, Any]) -> Entries:
    # Raise ValueError, OSError for a file that is not ours
    path = file_of(directory, setup)
    if path.exists():
        made(directory)  # which checks whose it is
    with open(open_own(path, os.O_RDONLY), "rb") as file:
        text = file.read(_MAX_BYTES + 1)
    try:
        data = json.loads(text)
        if data["version"] != VERSION or data["setup"] != dict(setup):
            raise ValueError("it is of another version or set-up")
        entries = {str(name): Entry(**entry) for name, entry in data["entries"].items()}
        return {name: entry for name, entry in entries.items() if _is_fresh(entry)}
    except (KeyError, TypeError, AttributeError, ValueError, RecursionError) as error:
        raise ValueError(f"{path.name} cannot be read ({type(error).__name__}: {error})") from None


def _is_fresh(entry: Entry) -> bool:
    # a clock that was wrong must not keep entries for ever
    age = time.time() - entry.time
    return -60 < age < (BUSY_AGE_SECONDS if entry.busy > 0 else MAX_AGE_SECONDS)


def _warn(message: str) -> None:
    warnings.warn(message, stacklevel=4)

"""Measurements of this machine that later starts read instead of measuring again, for all ranks the
same.

measurements = Measurements.open(device=torch.device("cpu")) cluster = measurements.cluster()
kernel_seconds = measurements.kernel_seconds(graph) seconds_per_element =
measurements.update_seconds([optimizer], named_parameters=module.named_parameters())

Rank 0 reads and writes one file per set-up (`describe_setup`) in the user's cache directory. It
holds rates, curves and times by hashes; no names.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from lightning_topt.costs import measurement_store
from lightning_topt.costs.calibrate import USUAL_COLLECTIVES, calibrate, measure_kernels
from lightning_topt.costs.cluster import Cluster, ClusterError
from lightning_topt.costs.collective_curves import COLLECTIVES
from lightning_topt.costs.compute import KernelKey, kernel_key
from lightning_topt.costs.groups import mesh_groups
from lightning_topt.costs.machine_setup import describe_setup
from lightning_topt.costs.measurement_store import Entries, Entry, default_directory
from lightning_topt.costs.optimizer import UpdateKind, measure_kind, update_kinds
from lightning_topt.costs.ranks import average, from_rank_0, on_all_ranks, own_rank, world_size
from lightning_topt.costs.timing import time_once
from lightning_topt.graph.op_graph import OpGraph

_CHANGED = 6.0  # a link that is so many times faster or slower than measured is another one
_CHECK_BYTES, _CHECK_SECONDS, _CHECK_REPEATS = 1 << 18, 0.02, 4
_PATIENCE_SECONDS = 0.5  # with a machine that is busy for a moment
_KERNELS_SECONDS, _UPDATES_SECONDS = 2.0, 0.5


Progress = Callable[[str], None]


class Measurements:
    """`Measurements` are what was measured in one set-up; every method but `save` is collective
    over the default process group.
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
        dropped: Entries | None = None,
    ) -> None:
        self.setup, self.device, self.entries, self.directory = setup, device, entries, directory
        self._refreshed, self._progress, self._dropped = refreshed, progress, dropped or {}

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

        Args:
            device: what ranks train on.
            num_nodes: how many machines the ranks are on.
            refresh: measure everything again; what is stored is dropped with the next `save`.
            directory: where the files are; by default ``lightning_topt/measurements`` in the user's
                cache directory.
            progress: called on rank 0 with a short line before anything that takes longer than a
                blink.

        A file that is damaged or belongs to another user is not used, with a warning on rank 0.
        """
        device = torch.device(device)
        setup = describe_setup(device, num_nodes=num_nodes)
        folder = _directory(directory)

        def read() -> Entries:
            return (
                measurement_store.load(folder, setup)
                if own_rank() == 0 and folder is not None
                else {}
            )

        stored = from_rank_0(on_all_ranks(read))
        options: dict[str, Any] = {"device": device, "directory": folder, "progress": progress}
        if refresh:
            return cls(setup, entries={}, dropped=stored, refreshed=time.time(), **options)
        return cls(setup, entries=stored, refreshed=None, **options)

    @property
    def path(self) -> Path | None:
        """The file of this set-up; None where the user has no directory for it."""
        return (
            None
            if self.directory is None
            else self.directory / measurement_store.file_name(self.setup)
        )

    def cluster(self) -> Cluster:
        """Return the cluster as stored, else as `calibrate` measures it now (about 2 s); with
        `refresh` all collectives and datagrams (about 4 s).

        What is stored is measured again where one exchange now takes six times as long as it
        should, or a sixth.
        """
        stored = self._cluster_in(self.entries)
        if stored is not None and _links_are_as_in(stored, self.device):
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
        self._add({self._name("cluster"): cluster.to_dict()})
        return cluster

    @property
    def cluster_before(self) -> Cluster | None:
        """The cluster that was stored, which a `refresh` does not use; None where there was
        none.
        """
        return self._cluster_in(self._dropped)

    def kernel_seconds(
        self, graph: OpGraph, *, budget_seconds: float = _KERNELS_SECONDS
    ) -> dict[KernelKey, float]:
        """Return the seconds of the graph's kernels by `kernel_key`, as stored, else as
        `measure_kernels` measures them now.

        A graph is measured once: kernels that could not be made, or for which there was no time,
        are left out afterwards too, so that two starts of one program plan with the same numbers.
        """
        names = {kernel_key(k): "" for op in graph.ops for k in (*op.forward, *op.backward)}
        names = {key: self._name("kernel", *key) for key in names}
        graph_name = self._name("graph", *sorted(names.values()))
        known = {key: self._seconds(name) for key, name in names.items()}
        found = {key: seconds for key, seconds in known.items() if seconds is not None}
        if graph_name in self.entries or len(found) == len(names):
            return found
        self._tell(f"measuring {len(names) - len(found)} kernels (about {budget_seconds:.0f} s)")
        measured = measure_kernels(
            graph, device=self.device, budget_seconds=budget_seconds, known=found
        )
        self._add({names[key]: seconds for key, seconds in measured.items()}, save=False)
        found |= measured
        if found:
            # As old as the oldest of them: what is too old some day is then measured again.
            oldest = min(self.entries[names[key]].time for key in found)
            self.entries[graph_name] = Entry(oldest, True)
            self.save()
        return found

    def update_seconds(
        self,
        optimizers: Iterable[Optimizer],
        *,
        named_parameters: Iterable[tuple[str, nn.Parameter]],
    ) -> dict[str, float]:
        """Return the seconds per element of each parameter's update by name, as stored, else
        measured now (`measure_update_seconds`).

        The optimizers may be those of the training: they stay as they are. Raises OptimizerError
        for a parameter that is not among `named_parameters`, and for an optimizer that cannot be
        tried on a copy.
        """
        kinds = on_all_ranks(lambda: update_kinds(optimizers, named_parameters=named_parameters))
        found = [
            self._seconds(self._name("update", kind.key)) if kind.key else None for kind in kinds
        ]
        missing = [kind for kind, seconds in zip(kinds, found, strict=True) if seconds is None]
        measured = self._measure_updates(missing)
        updates: dict[str, float] = {}
        for kind, seconds in zip(kinds, found, strict=True):
            updates |= dict.fromkeys(kind.names, measured.pop(0) if seconds is None else seconds)
        return updates

    def save(self) -> None:
        """Write what was measured, on rank 0, merged with what other jobs have written; a failure
        costs a warning.
        """
        if own_rank() == 0 and self.directory is not None:
            measurement_store.save(
                self.directory, self.setup, self.entries, refreshed=self._refreshed
            )

    def _measure_updates(self, kinds: list[UpdateKind]) -> list[float]:
        if not kinds:
            return []
        self._tell(
            f"measuring {len(kinds)} kinds of optimizer step (about {_UPDATES_SECONDS:.1f} s)"
        )
        each = _UPDATES_SECONDS / len(kinds)
        seconds = on_all_ranks(
            lambda: [measure_kind(kind, device=self.device, budget_seconds=each) for kind in kinds]
        )
        seconds = average(seconds)
        self._add(
            {
                self._name("update", kind.key): s
                for kind, s in zip(kinds, seconds, strict=True)
                if kind.key
            }
        )
        return seconds

    def _add(self, values: dict[str, Any], *, save: bool = True) -> None:
        now = time.time()
        self.entries.update({name: Entry(now, value) for name, value in values.items()})
        if save:
            self.save()

    def _name(self, kind: str, *words: str) -> str:
        return f"{kind} {hashlib.sha256(json.dumps(['', *words]).encode()).hexdigest()[:32]}"

    def _seconds(self, name: str) -> float | None:
        value = self.entries[name].value if name in self.entries else None
        if isinstance(value, bool) or not isinstance(value, int | float):
            return None
        return float(value) if math.isfinite(value) and value > 0 else None

    def _cluster_in(self, entries: Entries) -> Cluster | None:
        entry = entries.get(self._name("cluster"))
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


def _directory(directory: Path | str | None) -> Path | None:
    try:
        return default_directory() if directory is None else Path(directory)
    except RuntimeError:  # a user without a home
        return None


def _links_are_as_in(cluster: Cluster, device: torch.device) -> bool:
    """Whether one small all_reduce takes about as long as `cluster` says: the same answer on all
    ranks. Collective.
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

"""Cluster, Device, Link: what the cost model knows of the machines, from a data sheet or measured (`calibrate`).

YAML is a plain mapping, so the files in ``conf/cluster`` are a Hydra config group as well. Sizes may be text with units
(see `units`). Every rate is what a program achieves, not the peak of the data sheet; each file says how it got there.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from lightning_topt.basics.units import parse_bandwidth, parse_bytes, parse_flops, parse_seconds
from lightning_topt.costs.collective_curves import COLLECTIVES, CollectiveCurve, CurveKey
from lightning_topt.costs.plain_values import (
    check_plain,
    dump_yaml,
    names,
    number,
    one_line,
    parse_yaml,
    read_text,
    shown,
    text,
    whole,
)


class ClusterError(ValueError):
    """A cluster description that cannot be read; says which entry and what to write instead."""


@dataclass(frozen=True)
class Device:
    """One accelerator, or the share of a CPU that one rank gets.

    `flops` is the achieved FLOP/s of matrix products by dtype (``"float32"``); a dtype that is not listed runs at the
    rate of ``"float32"``. `memory_bandwidth` is in bytes/s, `op_overhead_seconds` what one kernel costs at least,
    `process_bytes` is what a training rank keeps beside tensors (on CPUs: objects, buffers of libraries), `price_per_hour`
    in any currency. `page_fault_seconds_per_byte` is what a byte costs that is taken anew from the operating system, which
    plans under a memory limit do for every tensor on CPUs (`execution.allocator`), `framework_seconds` what a kernel of a
    step costs beyond itself where the host does not run ahead of the device: modules, autograd, Python (CPUs),
    `launch_seconds` what the host takes for a kernel of a step where it does (accelerators).
    """

    name: str
    memory_bytes: int
    flops: Mapping[str, float]
    memory_bandwidth: float
    op_overhead_seconds: float = 0.0
    price_per_hour: float | None = None
    process_bytes: int = 0
    page_fault_seconds_per_byte: float = 0.0
    framework_seconds: float = 0.0
    launch_seconds: float = 0.0

    def __post_init__(self) -> None:
        if "float32" not in self.flops:
            raise ClusterError("device.flops needs a rate for float32")
        if not all(value > 0 for value in (self.memory_bytes, self.memory_bandwidth, *self.flops.values())):
            raise ClusterError("device: memory_bytes, memory_bandwidth and every rate in flops must be positive")

    def flops_of(self, dtype: str) -> float:
        """Return the FLOP/s of matrix products of `dtype`."""
        return self.flops.get(dtype, self.flops["float32"])


@dataclass(frozen=True)
class Link:
    """A link is what one rank gets of a network: seconds before the first byte, then bytes per second."""

    latency_seconds: float
    bandwidth: float

    def __post_init__(self) -> None:
        if not (self.bandwidth > 0 and self.latency_seconds >= 0):
            raise ClusterError("a link's bandwidth must be positive, and its latency at least 0 seconds")


@dataclass(frozen=True)
class Cluster:
    """Nodes of equal devices.

    `intra` joins the devices of a node, `inter` the nodes (None with a single node), both per rank: a node's network is
    shared by its devices. `collectives` are measured curves by (collective, size, stride) of the group, of all groups
    like it at the same time (`groups.Group`). `overlap` is the share of a gradient exchange that really runs beside
    computation (0 none, 1 all). `backend` is torch.distributed's (``"nccl"``, ``"gloo"``). `source` says where the
    numbers are from.
    """

    name: str
    device: Device
    devices_per_node: int
    num_nodes: int
    intra: Link
    inter: Link | None = None
    collectives: Mapping[CurveKey, CollectiveCurve] = field(default_factory=dict)
    overlap: float = 0.0
    backend: str = "nccl"
    source: str = ""

    def __post_init__(self) -> None:
        if self.devices_per_node < 1 or self.num_nodes < 1:
            raise ClusterError("devices_per_node and num_nodes must be at least 1")
        if self.num_nodes > 1 and self.inter is None:
            raise ClusterError("a cluster of several nodes needs the link between them: inter")
        if not 0 <= self.overlap <= 1:
            raise ClusterError(f"overlap is a share between 0 and 1, got {self.overlap}")
        if self.backend not in ("nccl", "gloo"):
            raise ClusterError(f"backend must be 'nccl' or 'gloo', got {shown(self.backend)}")
        for op, size, stride in self.collectives:
            if op not in COLLECTIVES or size < 2 or stride < 1:
                raise ClusterError(
                    f"collectives: ({shown(op)}, {size}, {stride}) must be one of {COLLECTIVES}, at least 2 ranks, and a "
                    "stride of at least 1"
                )

    @property
    def num_devices(self) -> int:
        """Devices of all nodes together."""
        return self.devices_per_node * self.num_nodes

    def to_dict(self) -> dict[str, Any]:
        """Return plain values in base units, as `save` writes them."""
        data = dataclasses.asdict(dataclasses.replace(self, collectives={}))
        data["collectives"] = [
            {"op": op, "group_size": size, "stride": stride, "bytes": [*curve.sizes], "seconds": [*curve.seconds]}
            for (op, size, stride), curve in self.collectives.items()
        ]
        return data

    @classmethod
    def from_dict(cls, data: Any) -> Cluster:
        """Read a mapping such as the files in ``conf/cluster``. Raises ClusterError that names the wrong entry."""
        try:
            check_plain(data)
            return _cluster(data)
        except ClusterError:
            raise
        except (ValueError, TypeError, OverflowError) as error:
            raise ClusterError(one_line(error)) from error

    def save(self, path: str | Path) -> None:
        """Write the cluster to a YAML file."""
        Path(path).write_text(dump_yaml(self.to_dict()))

    @classmethod
    def load(cls, path: str | Path) -> Cluster:
        """Read a YAML file. Raises ClusterError that names the file and the wrong entry."""
        try:
            return cls.from_dict(parse_yaml(read_text(path)))
        except (ValueError, OSError) as error:
            raise ClusterError(f"cannot read the cluster {shown(str(path))}: {one_line(error)}") from error


_REQUIRED = object()


class _Entries:
    """Takes entries out of a mapping by name; what is left at the end is unknown."""

    def __init__(self, data: Any, where: str) -> None:
        if not isinstance(data, Mapping):
            raise ClusterError(f"{where} must be a mapping, got {shown(data)}")
        self.data, self.where, self.known = dict(data), where, set[str]()

    def take(self, key: str, parse: Callable[..., Any], default: Any = _REQUIRED) -> Any:
        self.known.add(key)
        if self.data.get(key) is None:
            if default is _REQUIRED:
                raise ClusterError(f"{self.where}: the entry {key!r} is missing")
            return default
        return parse(self.data[key], name=f"{self.where}.{key}")

    def finish(self) -> None:
        if unknown := set(self.data) - self.known:
            raise ClusterError(f"{self.where}: unknown entries {names(unknown)}; known are {sorted(self.known)}")


def _cluster(data: Any) -> Cluster:
    entries = _Entries(data, "cluster")
    cluster = Cluster(
        name=entries.take("name", text),
        device=entries.take("device", _device),
        devices_per_node=(devices := entries.take("devices_per_node", whole)),
        num_nodes=entries.take("num_nodes", whole, 1),
        intra=entries.take("intra", _link),
        inter=entries.take("inter", _link, None),
        collectives=entries.take("collectives", partial(_collectives, devices_per_node=devices), {}),
        overlap=entries.take("overlap", number, 0.0),
        backend=entries.take("backend", text, "nccl"),
        source=entries.take("source", text, ""),
    )
    entries.finish()
    return cluster


def _device(data: Any, *, name: str) -> Device:
    entries = _Entries(data, name)
    device = Device(
        name=entries.take("name", text),
        memory_bytes=entries.take("memory_bytes", parse_bytes),
        flops=entries.take("flops", _rates),
        memory_bandwidth=entries.take("memory_bandwidth", parse_bandwidth),
        op_overhead_seconds=entries.take("op_overhead_seconds", parse_seconds, 0.0),
        process_bytes=entries.take("process_bytes", parse_bytes, 0),
        page_fault_seconds_per_byte=entries.take("page_fault_seconds_per_byte", number, 0.0),
        framework_seconds=entries.take("framework_seconds", parse_seconds, 0.0),
        launch_seconds=entries.take("launch_seconds", parse_seconds, 0.0),
        price_per_hour=entries.take("price_per_hour", number, None),
    )
    entries.finish()
    return device


def _link(data: Any, *, name: str) -> Link:
    entries = _Entries(data, name)
    link = Link(entries.take("latency_seconds", parse_seconds), entries.take("bandwidth", parse_bandwidth))
    entries.finish()
    return link


def _collectives(data: Any, *, name: str, devices_per_node: int) -> dict[CurveKey, CollectiveCurve]:
    curves: dict[CurveKey, CollectiveCurve] = {}
    for index, entry in enumerate(_list(data, name=name)):
        entries = _Entries(entry, f"{name}[{index}]")
        key = _curve_key(entries, devices_per_node=devices_per_node)
        sizes = [float(parse_bytes(size, name=entries.where)) for size in entries.take("bytes", _list)]
        seconds = [parse_seconds(value, name=entries.where) for value in entries.take("seconds", _list)]
        entries.finish()
        curves[key] = CollectiveCurve(tuple(sizes), tuple(seconds))
    return curves


def _curve_key(entries: _Entries, *, devices_per_node: int) -> CurveKey:
    """The group of a curve; older files have `world_size` ranks packed node by node, and `scope` says where they end."""
    op = entries.take("op", text)
    if "world_size" not in entries.data:
        return op, entries.take("group_size", whole), entries.take("stride", whole, 1)
    size, scope = entries.take("world_size", whole), entries.take("scope", text)
    expected = "intra" if size <= devices_per_node else "inter"
    if scope != expected:
        raise ClusterError(
            f"{entries.where}: {size} ranks packed on nodes of {devices_per_node} have the scope {expected!r}, not "
            f"{shown(scope)}; write group_size and stride instead of world_size and scope for other groups"
        )
    return op, size, 1


def _rates(data: Any, *, name: str) -> dict[str, float]:
    if not isinstance(data, Mapping):
        raise ClusterError(f"{name} must map dtypes to rates, such as float32: 19.5TFLOP/s; got {shown(data)}")
    return {text(dtype, name=name): parse_flops(rate, name=f"{name}.{dtype}") for dtype, rate in data.items()}


def _list(data: Any, *, name: str) -> list[Any]:
    if not isinstance(data, list | tuple):
        raise ClusterError(f"{name} must be a list, got {shown(data)}")
    return list(data)

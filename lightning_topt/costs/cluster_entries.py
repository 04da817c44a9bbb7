"""The entries of a cluster's YAML file are read one by one, and errors name the entry that is
wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lightning_topt.basics.units import parse_bandwidth, parse_bytes, parse_flops, parse_seconds
from lightning_topt.costs.accuracy import Accuracy, ErrorFigure
from lightning_topt.costs.collective_curves import CollectiveCurve, CurveKey
from lightning_topt.costs.failures import Failures
from lightning_topt.costs.node_types import ClusterError, DatagramPath, Device, Link, NodeType
from lightning_topt.costs.plain_values import names, number, shown, text, whole

_REQUIRED = object()


class Entries:
    """`Entries` are taken out of a mapping by name; what is left at the end is unknown.

    `where` is how errors name the mapping. Raises ClusterError for what is no mapping.
    """

    def __init__(self, data: Any, where: str) -> None:
        if not isinstance(data, Mapping):
            raise ClusterError(f"{where} must be a mapping, got {shown(data)}")
        self.data, self.where, self.known = dict(data), where, set[str]()

    def take(self, key: str, parse: Callable[..., Any], default: Any = _REQUIRED) -> Any:
        """Return the entry `key` as ``parse(value, name=...)`` reads it; `default` where it is left
        out or null.

        Raises ClusterError where an entry without a default is missing.
        """
        self.known.add(key)
        if self.data.get(key) is None:
            if default is _REQUIRED:
                raise ClusterError(f"{self.where}: the entry {key!r} is missing")
            return default
        return parse(self.data[key], name=f"{self.where}.{key}")

    def finish(self) -> None:
        """Raise ClusterError for entries that nobody took."""
        if unknown := set(self.data) - self.known:
            raise ClusterError(
                f"{self.where}: unknown entries {names(unknown)}; known are {sorted(self.known)}"
            )


def read_nodes(data: Any, *, name: str) -> tuple[NodeType, ...]:
    """Return the kinds of nodes that the list `data` has, at least one; errors call it `name`."""
    found = []
    for index, entry in enumerate(_list(data, name=name)):
        entries = Entries(entry, f"{name}[{index}]")
        sizes = entries.take("devices_per_node", whole), entries.take("count", whole, 1)
        found.append(
            NodeType(
                entries.take("device", read_device), *sizes, entries.take("intra", read_link, None)
            )
        )
        entries.finish()
    if not found:
        raise ClusterError(
            f"{name} must list at least one kind of nodes; leave it out where all nodes are equal"
        )
    return tuple(found)


def read_device(data: Any, *, name: str) -> Device:
    """Return the device that the mapping `data` describes; errors call it `name`."""
    entries = Entries(data, name)
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
        half_rate_flops=entries.take("half_rate_flops", number, 0.0),
        price_per_hour=entries.take("price_per_hour", number, None),
        spot_price_per_hour=entries.take("spot_price_per_hour", number, None),
    )
    entries.finish()
    return device


def read_accuracy(data: Any, *, name: str) -> Accuracy:
    """Return the accuracy that the mapping `data` describes; errors call it `name`."""
    entries = Entries(data, name)
    figures = entries.take("seconds", _error_figure), entries.take("bytes", _error_figure, None)
    accuracy = Accuracy(*figures, source=entries.take("source", text, ""))
    entries.finish()
    return accuracy


def _error_figure(data: Any, *, name: str) -> ErrorFigure:
    entries = Entries(data, name)
    figure = ErrorFigure(
        entries.take("median", number), entries.take("p90", number), entries.take("runs", whole)
    )
    entries.finish()
    return figure


def read_link(data: Any, *, name: str) -> Link:
    """Return the link that the mapping `data` describes; errors call it `name`."""
    entries = Entries(data, name)
    latency, bandwidth = (
        entries.take("latency_seconds", parse_seconds),
        entries.take("bandwidth", parse_bandwidth),
    )
    link = Link(latency, bandwidth, entries.take("datagrams", _datagrams, None))
    entries.finish()
    return link


def _datagrams(data: Any, *, name: str) -> DatagramPath:
    entries = Entries(data, name)
    path = DatagramPath(
        entries.take("round_trip_seconds", parse_seconds),
        entries.take("loss", number, 0.0),
        entries.take("bandwidth", parse_bandwidth),
    )
    entries.finish()
    return path


def read_failures(data: Any, *, name: str) -> Failures:
    """Return the failures that the mapping `data` describes; errors call it `name`."""
    entries = Entries(data, name)
    failures = Failures(
        entries.take("per_device_hour", number, 0.0),
        entries.take("spot_per_device_hour", number, None),
        entries.take("restart_seconds", parse_seconds, 0.0),
        entries.take("checkpoint_bandwidth", parse_bandwidth, None),
    )
    entries.finish()
    return failures


def read_collectives(
    data: Any, *, name: str, devices_per_node: int
) -> dict[CurveKey, CollectiveCurve]:
    """Return the measured curves that the list `data` has, by group, on nodes of
    `devices_per_node`; errors call it `name`.
    """
    curves: dict[CurveKey, CollectiveCurve] = {}
    for index, entry in enumerate(_list(data, name=name)):
        entries = Entries(entry, f"{name}[{index}]")
        key = _curve_key(entries, devices_per_node=devices_per_node)
        sizes = [
            float(parse_bytes(size, name=entries.where)) for size in entries.take("bytes", _list)
        ]
        seconds = [
            parse_seconds(value, name=entries.where) for value in entries.take("seconds", _list)
        ]
        wait = entries.take("wait_seconds", parse_seconds, 0.0)
        entries.finish()
        curves[key] = CollectiveCurve(tuple(sizes), tuple(seconds), wait)
    return curves


def _curve_key(entries: Entries, *, devices_per_node: int) -> CurveKey:
    """The group of a curve; older files have `world_size` ranks packed node by node, and `scope`
    says where they end.
    """
    op = entries.take("op", text)
    if "world_size" not in entries.data:
        return op, entries.take("group_size", whole), entries.take("stride", whole, 1)
    size, scope = entries.take("world_size", whole), entries.take("scope", text)
    expected = "intra" if size <= devices_per_node else "inter"
    if scope != expected:
        raise ClusterError(
            f"{entries.where}: {size} ranks packed on nodes of {devices_per_node} have the scope "
            f"{expected!r}, not "
            f"{shown(scope)}; write group_size and stride instead of world_size and scope for "
            "other groups"
        )
    return op, size, 1


def _rates(data: Any, *, name: str) -> dict[str, float]:
    if not isinstance(data, Mapping):
        raise ClusterError(
            f"{name} must map dtypes to rates, such as float32: 19.5TFLOP/s; got {shown(data)}"
        )
    return {
        text(dtype, name=name): parse_flops(rate, name=f"{name}.{dtype}")
        for dtype, rate in data.items()
    }


def _list(data: Any, *, name: str) -> list[Any]:
    # Hydra's lists are no `list`
    if not isinstance(data, Sequence) or isinstance(data, str | bytes):
        raise ClusterError(f"{name} must be a list, got {shown(data)}")
    return list(data)

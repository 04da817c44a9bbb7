"""Device, Link and NodeType of a cluster, and the slowest of several, for all that does not tell
nodes from one another.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace


class ClusterError(ValueError):
    """A cluster description that cannot be read; says which entry and what to write instead."""


@dataclass(frozen=True)
class Device:
    """One accelerator, or the share of a CPU that one rank gets. Its owner may take it back at
    `spot_price_per_hour`.

    `flops` is the achieved FLOP/s of matrix products by dtype (``"float32"``); a dtype that is not
    listed runs at the rate of ``"float32"``. `memory_bandwidth` is in bytes/s,
    `op_overhead_seconds` what one kernel costs at least, `process_bytes` is what a training rank
    keeps beside tensors (on CPUs: objects, buffers of libraries), `price_per_hour` in any currency.
    `page_fault_seconds_per_byte` is what a byte costs that is taken anew from the operating system,
    which plans under a memory limit do for every tensor on CPUs (`execution.allocator`),
    `framework_seconds` what a kernel of a step costs beyond itself where the host does not run
    ahead of the device: modules, autograd, Python (CPUs), `launch_seconds` what the host takes for
    a kernel of a step where it does (accelerators), `half_rate_flops` the FLOPs of a matrix product
    that runs at half of the rate in `flops`: smaller ones do not fill the device.
    """

    name: str
    memory_bytes: int
    flops: Mapping[str, float]
    memory_bandwidth: float
    op_overhead_seconds: float = 0.0
    price_per_hour: float | None = None
    process_bytes: int = 0
    page_fault_seconds_per_byte: float = 0.0
    spot_price_per_hour: float | None = None
    framework_seconds: float = 0.0
    launch_seconds: float = 0.0
    half_rate_flops: float = 0.0

    def __post_init__(self) -> None:
        if "float32" not in self.flops:
            raise ClusterError("device.flops needs a rate for float32")
        if not all(
            value > 0 for value in (self.memory_bytes, self.memory_bandwidth, *self.flops.values())
        ):
            raise ClusterError(
                "device: memory_bytes, memory_bandwidth and every rate in flops must be positive"
            )

    def flops_of(self, dtype: str) -> float:
        """Return the FLOP/s of matrix products of `dtype`."""
        return self.flops.get(dtype, self.flops["float32"])


@dataclass(frozen=True)
class DatagramPath:
    """A path carries datagrams at `bandwidth` bytes/s per rank; the share `loss` of them does not
    arrive, answers take a round trip.
    """

    round_trip_seconds: float
    loss: float
    bandwidth: float

    def __post_init__(self) -> None:
        if not (self.bandwidth > 0 and self.round_trip_seconds >= 0 and 0 <= self.loss < 1):
            raise ClusterError(
                "datagrams of a link: the bandwidth must be positive, round_trip_seconds at least "
                "0, and loss a share below 1"
            )


@dataclass(frozen=True)
class Link:
    """A link is what one rank gets of a network: seconds before the first byte, then bytes per
    second.

    `datagrams` are measured beside that, for gradient exchanges that lose some (`BoundedLoss`).
    """

    latency_seconds: float
    bandwidth: float
    datagrams: DatagramPath | None = None

    def __post_init__(self) -> None:
        if not (self.bandwidth > 0 and self.latency_seconds >= 0):
            raise ClusterError(
                "a link's bandwidth must be positive, and its latency at least 0 seconds"
            )


@dataclass(frozen=True)
class NodeType:
    """So many nodes (`count`) of equal devices, joined by `intra` (None: that of the cluster)."""

    device: Device
    devices_per_node: int
    count: int = 1
    intra: Link | None = None

    def __post_init__(self) -> None:
        if self.devices_per_node < 1 or self.count < 1:
            raise ClusterError("nodes: devices_per_node and count must be at least 1")


def slowest_device(devices: Sequence[Device], counts: Sequence[int]) -> Device:
    """Return a device that is as slow and as small as the slowest and smallest of `devices`; its
    price is the mean of so many (`counts`) of each, unknown where one is.
    """
    first, *others = devices
    if not others:
        return first
    dtypes = dict.fromkeys(dtype for device in devices for dtype in device.flops)
    return replace(
        first,
        name=" and ".join(dict.fromkeys(device.name for device in devices)),
        memory_bytes=min(device.memory_bytes for device in devices),
        flops={dtype: min(device.flops_of(dtype) for device in devices) for dtype in dtypes},
        memory_bandwidth=min(device.memory_bandwidth for device in devices),
        op_overhead_seconds=max(device.op_overhead_seconds for device in devices),
        price_per_hour=_mean([device.price_per_hour for device in devices], counts),
        spot_price_per_hour=_mean([device.spot_price_per_hour for device in devices], counts),
        process_bytes=max(device.process_bytes for device in devices),
        page_fault_seconds_per_byte=max(device.page_fault_seconds_per_byte for device in devices),
        framework_seconds=max(device.framework_seconds for device in devices),
        launch_seconds=max(device.launch_seconds for device in devices),
        half_rate_flops=max(device.half_rate_flops for device in devices),
    )


def _mean(prices: Sequence[float | None], counts: Sequence[int]) -> float | None:
    paid = [price * count for price, count in zip(prices, counts, strict=True) if price is not None]
    return None if None in prices else sum(paid) / sum(counts)


def slowest_link(links: Sequence[Link]) -> Link:
    """Return a link with the largest latency, loss and round trip and the least bandwidth of
    `links`.
    """
    latency, bandwidth = (
        max(link.latency_seconds for link in links),
        min(link.bandwidth for link in links),
    )
    paths = [link.datagrams for link in links if link.datagrams is not None]
    slowest = None
    if len(paths) == len(links):
        slowest = DatagramPath(
            max(path.round_trip_seconds for path in paths),
            max(path.loss for path in paths),
            min(path.bandwidth for path in paths),
        )
    return Link(latency, bandwidth, slowest)

"""Cluster, Device, Link: what the cost model knows of the machines, from a data sheet or measured.

    cluster = Cluster.load("conf/cluster/a100_8x8.yaml")     # or calibrate.calibrate()
    cluster.num_devices, cluster.device.flops_of("bfloat16"), cluster.intra.bandwidth

YAML is a plain mapping, so the files in ``conf/cluster`` are a Hydra config group as well. Sizes
may be text with units (see `units`). Every rate is what a program achieves, not the peak of the
data sheet; each file says how it got there.

    Cluster           nodes of equal devices
    Device            rates and memory of one accelerator, or of a rank's share of a CPU
    Link              latency and bandwidth that one rank gets; `DatagramPath` of datagrams
    CollectiveCurve   measured seconds of a collective by message size
    Failures          how often devices are lost, and how much longer a run takes (`run_time`)

`costs.accuracy` has the errors of predictions with these numbers.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from lightning_topt.basics.units import parse_bandwidth, parse_bytes, parse_flops, parse_seconds
from lightning_topt.costs.accuracy import (
    CPU_BYTES,
    LEVEL,
    USUAL_MARGIN,
    Accuracy,
    ErrorFigure,
    Interval,
    interval_of,
    read_accuracy,
    share_at,
)
from lightning_topt.costs.plain_values import (
    ValueReader,
    dump_yaml,
    list_of,
    number,
    one_line,
    parse_yaml,
    read_entries,
    read_text,
    record,
    shown,
    text,
    truth,
    whole,
    write_text,
)

COLLECTIVES = ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "all_to_all", "send_recv")
CurveKey = tuple[str, int, int]  # collective, size and stride of the group


class ClusterError(ValueError):
    """A cluster description that cannot be read; says which entry and what to write instead."""


@dataclass(frozen=True)
class Cluster:
    """Nodes of equal devices.

    Attributes:
        name: for people.
        device: each of the devices.
        devices_per_node: of each node.
        num_nodes: of the cluster.
        intra: the link between devices of a node, per rank.
        inter: the link between nodes, per rank: a node's network is shared by its devices; None
            with a single node.
        collectives: measured curves by (collective, size, stride) of the group, of all groups like
            it at the same time (`communication.Group`).
        overlap: the share of a gradient exchange that really runs beside computation (0 none, 1
            all).
        backend: torch.distributed's (``"nccl"``, ``"gloo"``).
        source: where the numbers are from.
        failures: how often devices are lost and what that costs; None: nothing is known of it.
        accuracy: how far predictions with these numbers were from what was measured; None: nothing
            was.
        busy_share: the share of the time in which a rank had no core while this was measured, since
            other programs had it; 0: the machine was quiet, or nothing is known.
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
    failures: Failures | None = None
    accuracy: Accuracy | None = None
    busy_share: float = 0.0

    def __post_init__(self) -> None:
        if self.devices_per_node < 1 or self.num_nodes < 1:
            raise ClusterError("devices_per_node and num_nodes must be at least 1")
        if self.num_nodes > 1 and self.inter is None:
            raise ClusterError("a cluster of several nodes needs the link between them: inter")
        if not 0 <= self.overlap <= 1:
            raise ClusterError(f"overlap is a share between 0 and 1, got {self.overlap}")
        if not 0 <= self.busy_share <= 1:
            raise ClusterError(f"busy_share is a share between 0 and 1, got {self.busy_share}")
        if self.backend not in ("nccl", "gloo"):
            raise ClusterError(f"backend must be 'nccl' or 'gloo', got {shown(self.backend)}")
        for op, size, stride in self.collectives:  # keys of the curves
            if op not in COLLECTIVES or size < 2 or stride < 1:
                raise ClusterError(
                    f"collectives: ({shown(op)}, {size}, {stride}) must be one of {COLLECTIVES}, "
                    "at least 2 ranks, and a stride of at least 1"
                )

    @property
    def num_devices(self) -> int:
        """Devices of all nodes together."""
        return self.devices_per_node * self.num_nodes

    def node_of(self, rank: int) -> int:
        """Return the number of the node of a rank."""
        return rank // self.devices_per_node

    @property
    def bytes_error(self) -> ErrorFigure | None:
        """Errors of predicted peaks: this cluster's own, or those of CPU ranks; None: unknown."""
        if self.accuracy is not None and self.accuracy.bytes is not None:
            return self.accuracy.bytes
        return CPU_BYTES if self.backend == "gloo" else None

    def seconds_interval(
        self,
        seconds: float,
        sizes: Mapping[str, float],
        techniques: Sequence[str] = (),
        *,
        level: float = LEVEL,
    ) -> Interval | None:
        """Return the interval of predicted seconds; None where nothing is known of their errors."""
        if self.accuracy is None:
            return None
        return self.accuracy.interval(seconds, sizes, techniques, level=level)

    def bytes_interval(
        self,
        size: float,
        sizes: Mapping[str, float],
        techniques: Sequence[str] = (),
        *,
        level: float = LEVEL,
    ) -> Interval | None:
        """Return the interval of a predicted peak; None where nothing is known of their errors."""
        if self.bytes_error is None:
            return None
        domain = None if self.accuracy is None else self.accuracy.bytes_domain
        outside = {} if domain is None else domain.outside(sizes, techniques)
        return interval_of(size, error=self.bytes_error.p90, outside=outside, level=level)

    def memory_margin(self, level: float = LEVEL) -> float:
        """Return the share that keeps a limit of memory in so many of the runs like those measured.

        Of a cluster whose errors of bytes are not known, 5 % at the usual level. So it is where
        fewer peaks were measured than a level needs: the largest of n is above n / (n + 1) of all.
        """
        known = self.bytes_error
        if known is None or known is CPU_BYTES or known.runs < level * (known.runs + 1) - 1e-9:
            return share_at(USUAL_MARGIN, level)
        return share_at(known.p90 if known.above is None else known.above, level)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values in base units, as `save` writes them."""
        data = asdict(replace(self, collectives={}))
        if self.accuracy is None:
            del data["accuracy"]
        else:
            data["accuracy"] = self.accuracy.to_dict()
        if not self.busy_share:
            del data["busy_share"]
        data["collectives"] = [
            {
                "op": op,
                "group_size": size,
                "stride": stride,
                "bytes": [*curve.sizes],
                "seconds": [*curve.seconds],
                **({"wait_seconds": curve.wait_seconds} if curve.wait_seconds else {}),
            }
            for (op, size, stride), curve in self.collectives.items()
        ]
        return data

    @classmethod
    def from_dict(cls, data: Any) -> Cluster:
        """Read a mapping such as the files in ``conf/cluster``.

        Raises ClusterError that names the wrong entry.
        """
        try:
            return _cluster(data)
        except ClusterError:
            raise
        except (ValueError, TypeError, OverflowError) as error:
            raise ClusterError(one_line(error)) from error

    def save(self, path: str | Path) -> None:
        """Write the cluster to a YAML file."""
        write_text(path, dump_yaml(self.to_dict()))

    @classmethod
    def load(cls, path: str | Path) -> Cluster:
        """Read a YAML file. Raises ClusterError that names the file and the wrong entry."""
        try:
            return cls.from_dict(parse_yaml(read_text(path)))
        except (ValueError, OSError) as error:
            raise ClusterError(
                f"cannot read the cluster {shown(str(path))}: {one_line(error)}"
            ) from error


# ---- Devices, links and nodes


@dataclass(frozen=True)
class Device:
    """One accelerator, or the share of a CPU that one rank gets.

    Attributes:
        name: for people.
        memory_bytes: of one rank.
        flops: achieved FLOP/s of matrix products by dtype (``"float32"``); a dtype that is not
            listed runs at the rate of ``"float32"``.
        memory_bandwidth: bytes/s.
        op_overhead_seconds: what one kernel costs at least.
        price_per_hour: in any currency.
        process_bytes: what a training rank keeps beside tensors (on CPUs: objects, buffers of
            libraries).
        page_fault_seconds_per_byte: what a byte costs that is taken anew from the operating system,
            which plans under a memory limit do for every tensor on CPUs (`execution.memory`).
        framework_seconds: what a kernel of a step costs beyond itself where the host does not run
            ahead of the device: modules, autograd, Python (CPUs).
        launch_seconds: what the host takes for a kernel of a step where it does (accelerators).
        half_rate_flops: FLOPs of a matrix product that runs at half of the rate in `flops`: smaller
            ones do not fill the device.
        attention_flops: achieved FLOP/s of attention in half precision over many positions, where
            it is one kernel (0: half of that of matrix products).
        host_bandwidth: bytes/s to the memory of the host and back, each way (0: not known).
        caching_allocator: torch keeps freed memory in segments, as on CUDA; what these take beside
            tensors counts as memory of a plan (`reserved_memory`).
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
    half_rate_flops: float = 0.0
    attention_flops: float = 0.0
    caching_allocator: bool = False
    host_bandwidth: float = 0.0

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
class Link:
    """What one rank gets of a network: seconds before the first byte, then bytes per second.

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
class DatagramPath:
    """A path of datagrams: `bandwidth` bytes/s per rank, of which the share `loss` is lost.

    An answer takes a round trip.
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
class CollectiveCurve:
    """Seconds of one collective by size of the whole tensor in bytes, both ascending.

    Back to back and undisturbed. `wait_seconds` is what it takes more, at any size, after ranks
    have computed: they come one after another, and threads wait for cores. Raises ValueError for
    other values.
    """

    sizes: tuple[float, ...]
    seconds: tuple[float, ...]
    wait_seconds: float = 0.0

    def __post_init__(self) -> None:
        if not self.sizes or len(self.sizes) != len(self.seconds):
            raise ValueError("a measured collective needs as many bytes as seconds, at least one")
        if list(self.sizes) != sorted(set(self.sizes)) or min(*self.sizes, *self.seconds) <= 0:
            raise ValueError(
                "a measured collective needs positive seconds and strictly ascending positive bytes"
            )
        if not 0 <= self.wait_seconds < math.inf:
            raise ValueError("the seconds that a collective waits for ranks must be at least 0")

    def seconds_at(self, size: float) -> float:
        """Interpolate log-log, without the wait.

        Below the smallest size take its time, above the largest its bandwidth.
        """
        if size <= self.sizes[0]:
            return self.seconds[0]
        if size >= self.sizes[-1]:
            return self.seconds[-1] * size / self.sizes[-1]
        right = bisect.bisect_right(self.sizes, size)
        (x0, x1), (y0, y1) = self.sizes[right - 1 : right + 1], self.seconds[right - 1 : right + 1]
        share = math.log(size / x0) / math.log(x1 / x0)
        return float(y0 * (y1 / y0) ** share)  # a straight line on logarithmic axes


# ---- Failures, checkpoints and restarts: how much longer a run takes than its steps
#
#     equation                                                       function
#     M = 1 / (r * devices)                                          Failures.seconds_between
#     C = checkpoint bytes / B                                       checkpoint_seconds
#     tau = sqrt(2 C M) (1 + sqrt(C / 2M) / 3 + C / 2M / 9) - C      daly_interval
#           for C < 2M, else M
#     T = M exp(R / M) (exp((tau + C) / M) - 1) T_s / tau            expected_seconds
#
# Daly, FGCS 22(3), 2006. Failures are independent.
#
# r failures per device and second, M mean seconds between failures of any device, C seconds to
# write a checkpoint (training waits), R seconds from a failure to training again, B bytes/s of the
# store for all ranks together, tau seconds of training between two checkpoints, T_s seconds of
# steps alone, T seconds of the run. Failures are a Poisson process; what was trained since the last
# checkpoint is lost, and one failure stops the run whichever device it hits.

_MOST = 700.0  # exponents that a float takes


@dataclass(frozen=True)
class Failures:
    """How often devices of a cluster are lost, and what that costs.

    Args:
        per_device_hour: failures of a device per hour; 0: none.
        restart_seconds: from a failure to the first step after it, but for reading the checkpoint.
        checkpoint_bandwidth: bytes per second that all ranks together write to, and read from, the
            store of checkpoints; None: they take no time.

    Raises ValueError for negative numbers, and a bandwidth of 0.
    """

    per_device_hour: float = 0.0
    restart_seconds: float = 0.0
    checkpoint_bandwidth: float | None = None

    def __post_init__(self) -> None:
        if min(self.per_device_hour, self.restart_seconds) < 0:
            raise ValueError("failures: rates and restart_seconds are at least 0")
        if self.checkpoint_bandwidth is not None and not self.checkpoint_bandwidth > 0:
            raise ValueError("failures.checkpoint_bandwidth is positive")

    def seconds_between(self, devices: int) -> float:
        """Return the mean seconds between failures of any of `devices` devices.

        Infinite without failures.
        """
        rate = self.per_device_hour * devices
        return 3600.0 / rate if rate > 0 else math.inf


@dataclass(frozen=True)
class RunTime:
    """The seconds of a run.

    Attributes:
        step_seconds: of its steps alone.
        seconds: with checkpoints, failures and restarts.
        interval_seconds: of training between checkpoints; infinite: none is written.
        checkpoint_seconds: to write one.
        failures: how many are expected.
    """

    step_seconds: float
    seconds: float
    interval_seconds: float = math.inf
    checkpoint_seconds: float = 0.0
    failures: float = 0.0

    @property
    def overhead(self) -> float:
        """The share of the steps that checkpoints and failures add."""
        return self.seconds / self.step_seconds - 1 if self.step_seconds else 0.0


def daly_interval(checkpoint_seconds: float, *, seconds_between: float) -> float:
    """Return Daly's seconds of training between checkpoints; infinite without failures."""
    if math.isinf(seconds_between):
        return math.inf
    ratio = checkpoint_seconds / (2 * seconds_between)
    if ratio >= 1:
        return seconds_between
    young = math.sqrt(2 * checkpoint_seconds * seconds_between)
    return young * (1 + math.sqrt(ratio) / 3 + ratio / 9) - checkpoint_seconds


def expected_seconds(
    step_seconds: float,
    *,
    interval_seconds: float,
    checkpoint_seconds: float,
    restart_seconds: float,
    seconds_between: float,
) -> float:
    """Return the expected seconds of a run of `step_seconds`.

    Infinite where it would hardly ever reach a checkpoint.
    """
    if math.isinf(seconds_between):
        return step_seconds
    segment = (interval_seconds + checkpoint_seconds) / seconds_between
    again = restart_seconds / seconds_between
    if segment + again > _MOST:
        return math.inf
    return seconds_between * math.exp(again) * math.expm1(segment) * step_seconds / interval_seconds


def run_time(
    step_seconds: float, *, failures: Failures | None, devices: int, checkpoint_bytes: float
) -> RunTime:
    """Return what a run of `step_seconds` seconds of steps takes on `devices` devices.

    With checkpoints at Daly's interval. `checkpoint_bytes` are those of one checkpoint of all
    ranks. Without `failures`, or their rate, nothing is added.
    """
    if failures is None or failures.per_device_hour == 0:
        return RunTime(step_seconds, step_seconds)
    between = failures.seconds_between(devices)
    rate = math.inf if failures.checkpoint_bandwidth is None else failures.checkpoint_bandwidth
    writing = max(checkpoint_bytes / rate, 1e-3)  # nothing is written in no time
    interval = min(daly_interval(writing, seconds_between=between), max(step_seconds, 1e-9))
    total = expected_seconds(
        step_seconds,
        interval_seconds=interval,
        checkpoint_seconds=writing,
        restart_seconds=failures.restart_seconds + writing,
        seconds_between=between,
    )
    return RunTime(step_seconds, total, interval, writing, total / between)


# ---- The entries of a YAML file


def _cluster(data: Any) -> Cluster:
    # Read the mapping of a cluster
    needed = ["name", "intra", "device", "devices_per_node"]
    entries = read_entries(data, _READERS, needed=needed, name="cluster")
    curves = dict(entries.pop("collectives", ()))
    return Cluster(**{"num_nodes": 1, **entries, "collectives": curves})


def _rates(data: Any, *, name: str) -> dict[str, float]:
    if not isinstance(data, Mapping):
        raise ValueError(
            f"{name} must map dtypes to rates, such as float32: 19.5TFLOP/s; got {shown(data)}"
        )
    return {
        text(dtype, name=name): parse_flops(rate, name=f"{name}.{dtype}")
        for dtype, rate in data.items()
    }


def _path(round_trip_seconds: float, bandwidth: float, loss: float = 0.0) -> DatagramPath:
    return DatagramPath(round_trip_seconds, loss, bandwidth)


def _measured(
    op: str,
    group_size: int,
    bytes: Sequence[int],
    seconds: tuple[float, ...],
    stride: int = 1,
    wait_seconds: float = 0.0,
) -> tuple[CurveKey, CollectiveCurve]:
    curve = CollectiveCurve(tuple(map(float, bytes)), seconds, wait_seconds)
    return (op, group_size, stride), curve


_curve = record(
    _measured,
    op=text,
    group_size=whole,
    stride=whole,
    bytes=list_of(parse_bytes),
    seconds=list_of(parse_seconds),
    wait_seconds=parse_seconds,
)
_device = record(
    Device,
    name=text,
    memory_bytes=parse_bytes,
    flops=_rates,
    memory_bandwidth=parse_bandwidth,
    op_overhead_seconds=parse_seconds,
    process_bytes=parse_bytes,
    page_fault_seconds_per_byte=number,
    framework_seconds=parse_seconds,
    launch_seconds=parse_seconds,
    half_rate_flops=number,
    attention_flops=parse_flops,
    caching_allocator=truth,
    host_bandwidth=parse_bandwidth,
    price_per_hour=number,
)
_datagrams = record(_path, round_trip_seconds=parse_seconds, bandwidth=parse_bandwidth, loss=number)
_link = record(Link, latency_seconds=parse_seconds, bandwidth=parse_bandwidth, datagrams=_datagrams)
_failures = record(
    Failures,
    per_device_hour=number,
    restart_seconds=parse_seconds,
    checkpoint_bandwidth=parse_bandwidth,
)
_READERS: dict[str, ValueReader[Any]] = {
    "device": _device,
    "devices_per_node": whole,
    "num_nodes": whole,
    "name": text,
    "intra": _link,
    "inter": _link,
    "collectives": list_of(_curve),
    "overlap": number,
    "backend": text,
    "source": text,
    "failures": _failures,
    "accuracy": read_accuracy,
    "busy_share": number,
}

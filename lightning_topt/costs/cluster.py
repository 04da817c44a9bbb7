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
    Accuracy          errors of predictions with these numbers

Errors of predictions against what was measured stand beside new predictions:

    error of a run    |predicted / measured - 1|
    median, p90       the error that half of the runs, and nine of ten, stay below (`intervals`)
    fitted runs       residuals of a fit are too small: of n runs and k constants times
                      sqrt(n / (n - k))
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from lightning_topt.basics.units import parse_bandwidth, parse_bytes, parse_flops, parse_seconds
from lightning_topt.costs.failures import Failures
from lightning_topt.costs.intervals import (
    LEVEL,
    Domain,
    Interval,
    interval_of,
    quantile_of,
    share_at,
)
from lightning_topt.costs.plain_values import (
    ValueReader,
    check_plain,
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
)

COLLECTIVES = ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "all_to_all", "send_recv")
CurveKey = tuple[str, int, int]  # collective, size and stride of the group
UNKNOWN = (
    "How far predictions for this cluster are from the truth is not known: no run on it was "
    "compared (`topt predict runs=FOLDER` compares those of run.json files)."
)


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


# ---- How far predictions are from what was measured


_NO_SIZES: Mapping[str, float] = {}


@dataclass(frozen=True)
class ErrorFigure:
    """Shares of what was measured: `median` and `p90` of the errors of `runs` predictions.

    `above`: nine of ten measured values were above what was predicted by at most this share.
    """

    median: float
    p90: float
    runs: int
    above: float | None = None

    def __post_init__(self) -> None:
        if self.above is not None and self.above < 0:
            raise ValueError(f"above is a share of at least 0, got {self.above}")
        if not (0 <= self.median <= self.p90 and self.runs >= 1):
            raise ValueError(
                f"an error figure has 0 <= median <= p90 of at least 1 run, got {self.median}, "
                f"{self.p90}, {self.runs}"
            )

    @classmethod
    def of(
        cls, predicted: Sequence[float], measured: Sequence[float], *, above: bool = False
    ) -> ErrorFigure:
        """Return the figure of predictions; with `above` it has that share too."""
        ratios = np.log(np.asarray(predicted, float) / np.asarray(measured, float))
        errors = np.expm1(np.abs(ratios))
        p90 = quantile_of(errors.tolist())
        over = quantile_of(np.expm1(np.maximum(-ratios, 0.0)).tolist()) if above else None
        return cls(min(float(np.median(errors)), p90), p90, len(errors), over)

    def to_dict(self) -> dict[str, float]:
        """Return plain values, without what is not known."""
        return {name: value for name, value in vars(self).items() if value is not None}

    def __str__(self) -> str:
        return (
            f"half of {self.runs} runs within {_percent(self.median)}, nine of ten within "
            f"{_percent(self.p90)}"
        )


@dataclass(frozen=True)
class Accuracy:
    """Errors of predictions with the constants of a cluster.

    `seconds` of a step, `bytes` at its peak (None: not known), the `source` of the runs, and their
    `domain` (None: not known, so that nothing is outside); `bytes_domain` is that of the peaks.
    `difference`: errors of the ratio of two times, of pairs of plans for one job; what both have in
    common is not in it (None: not known).
    """

    seconds: ErrorFigure
    bytes: ErrorFigure | None = None
    source: str = ""
    domain: Domain | None = None
    difference: ErrorFigure | None = None
    bytes_domain: Domain | None = None

    def interval(
        self,
        seconds: float,
        sizes: Mapping[str, float] = _NO_SIZES,
        techniques: Sequence[str] = (),
        *,
        level: float = LEVEL,
    ) -> Interval:
        """Return the interval of predicted seconds of a run with these sizes and techniques."""
        outside = {} if self.domain is None else self.domain.outside(sizes, techniques)
        return interval_of(seconds, error=self.seconds.p90, outside=outside, level=level)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, as a cluster file has them."""
        data: dict[str, Any] = {
            "seconds": self.seconds.to_dict(),
            "bytes": None if self.bytes is None else self.bytes.to_dict(),
            "source": self.source,
        }
        if self.difference is not None:
            data["difference"] = self.difference.to_dict()
        for name, domain in (("domain", self.domain), ("bytes_domain", self.bytes_domain)):
            if domain is not None:
                sizes = {size: [*ends] for size, ends in domain.sizes.items()}
                data[name] = {"sizes": sizes, "techniques": [*domain.techniques]}
        return data

    def sentence(self) -> str:
        """Return a line for people."""
        memory = "" if self.bytes is None else f"; peak memory: {self.bytes}"
        return (
            "Measured before: step times "
            f"{self.seconds}{memory}{f' ({self.source})' if self.source else ''}."
        )


# Of CPU ranks, of which no own file says more: 47 plans on 2 and 4 ranks
# (benchmarks/results/uncertainty.md). The margin keeps their limits at the usual level.
CPU_BYTES = ErrorFigure(median=0.010, p90=0.075, runs=47, above=0.024)
USUAL_MARGIN = 0.05


def sentence_of(accuracy: Accuracy | None) -> str:
    """Return what is known about the error of predictions, as a line for people."""
    return UNKNOWN if accuracy is None else accuracy.sentence()


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %" if share < 0.0995 else f"{100 * share:.0f} %"


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


def _curve(data: Any, *, name: str) -> tuple[CurveKey, CollectiveCurve]:
    entries = read_entries(data, _CURVE, needed=("op", "group_size", "bytes", "seconds"), name=name)
    curve = CollectiveCurve(
        tuple(map(float, entries["bytes"])), entries["seconds"], entries.get("wait_seconds", 0.0)
    )
    return (entries["op"], entries["group_size"], entries.get("stride", 1)), curve


_CURVE: dict[str, ValueReader[Any]] = {
    "op": text,
    "group_size": whole,
    "stride": whole,
    "bytes": list_of(parse_bytes),
    "seconds": list_of(parse_seconds),
    "wait_seconds": parse_seconds,
}
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


def _ranges(data: Any, *, name: str) -> dict[str, tuple[float, float]]:
    # The least and the most of each size
    if not isinstance(data, Mapping):
        raise ValueError(f"{name} maps sizes to the least and the most, got {shown(data)}")
    found = {}
    for key, value in data.items():
        ends = list_of(number)(value, name=f"{name}.{key}")
        if len(ends) != 2:
            raise ValueError(f"{name}.{key} is the least and the most, got {shown(value)}")
        found[text(key, name=name)] = (ends[0], ends[1])
    return found


_domain = record(Domain, sizes=_ranges, techniques=list_of(text))
_error_figure = record(ErrorFigure, median=number, p90=number, runs=whole, above=number)
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
    "accuracy": record(
        Accuracy,
        seconds=_error_figure,
        bytes=_error_figure,
        source=text,
        domain=_domain,
        difference=_error_figure,
        bytes_domain=_domain,
    ),
    "busy_share": number,
}

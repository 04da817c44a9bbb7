"""Cluster, Device, Link: what the cost model knows of the machines, from a data sheet or measured
(`calibrate`).

YAML is a plain mapping, so the files in ``conf/cluster`` are a Hydra config group as well. Sizes
may be text with units (see `units`). Every rate is what a program achieves, not the peak of the
data sheet; each file says how it got there.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from lightning_topt.costs.accuracy import Accuracy
from lightning_topt.costs.cluster_entries import (
    Entries,
    read_accuracy,
    read_collectives,
    read_device,
    read_failures,
    read_link,
    read_nodes,
)
from lightning_topt.costs.collective_curves import COLLECTIVES, CollectiveCurve, CurveKey
from lightning_topt.costs.failures import Failures
from lightning_topt.costs.node_types import (
    ClusterError,
    Device,
    Link,
    NodeType,
    slowest_device,
    slowest_link,
)
from lightning_topt.costs.plain_values import (
    check_plain,
    dump_yaml,
    number,
    one_line,
    parse_yaml,
    read_text,
    shown,
    text,
    whole,
)

__all__ = ["Cluster", "ClusterError", "Device", "Link", "NodeType"]


@dataclass(frozen=True)
class Cluster:
    """Nodes of equal devices; or of several kinds, `nodes` (see `of_nodes`), of which the entries
    here are the slowest.

    `intra` joins the devices of a node, `inter` the nodes (None with a single node), both per rank:
    a node's network is shared by its devices. `collectives` are measured curves by (collective,
    size, stride) of the group, of all groups like it at the same time (`groups.Group`). `overlap`
    is the share of a gradient exchange that really runs beside computation (0 none, 1 all).
    `backend` is torch.distributed's (``"nccl"``, ``"gloo"``). `source` says where the numbers are
    from, `failures` how often devices are lost and what that costs (None: nothing is known of it),
    `accuracy` how far predictions with them were from what was measured (None: nothing was).
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
    nodes: tuple[NodeType, ...] = ()
    failures: Failures | None = None
    accuracy: Accuracy | None = None

    @classmethod
    def of_nodes(cls, nodes: Sequence[NodeType], *, intra: Link, **entries: Any) -> Cluster:
        """Return a cluster of several kinds of nodes, whose ranks are in the order of `nodes`;
        `entries` are the others of a cluster.

        Stages of a pipeline run on the devices of their ranks. All else is as if every device was
        like the slowest, joined as by the slowest `intra`, and as many on a node as divide the
        devices of each.
        """
        nodes = tuple(
            node if node.intra else dataclasses.replace(node, intra=intra) for node in nodes
        )
        return cls(**_common(nodes, intra), nodes=nodes, **entries)

    def __post_init__(self) -> None:
        if self.nodes and any(
            getattr(self, name) != value for name, value in _common(self.nodes, self.intra).items()
        ):
            raise ClusterError("a cluster of several kinds of nodes is made by Cluster.of_nodes")
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
                    f"collectives: ({shown(op)}, {size}, {stride}) must be one of {COLLECTIVES}, "
                    "at least 2 ranks, and a "
                    "stride of at least 1"
                )

    @property
    def num_devices(self) -> int:
        """Devices of all nodes together."""
        return self.devices_per_node * self.num_nodes

    def node_of(self, rank: int) -> tuple[int, int]:
        """Return the kind of the node of a rank, its place in `nodes` (0 without), and the number
        of the node.
        """
        before = 0
        for kind, node in enumerate(self.nodes):
            if rank < node.count * node.devices_per_node:
                return kind, before + rank // node.devices_per_node
            rank, before = rank - node.count * node.devices_per_node, before + node.count
        return 0, before + rank // self.devices_per_node

    def of_kinds(self, kinds: Sequence[int]) -> Cluster:
        """Return a cluster as slow as the slowest of these kinds of nodes, as one of equal
        devices.
        """
        if not self.nodes:
            return self
        common = _common([self.nodes[kind] for kind in kinds], self.intra)
        return dataclasses.replace(self, nodes=(), device=common["device"], intra=common["intra"])

    def to_dict(self) -> dict[str, Any]:
        """Return plain values in base units, as `save` writes them."""
        data = dataclasses.asdict(dataclasses.replace(self, collectives={}))
        for name in ("device", "devices_per_node", "num_nodes") if self.nodes else ("nodes",):
            del data[name]
        if self.accuracy is None:
            del data["accuracy"]
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
        """Read a mapping such as the files in ``conf/cluster``. Raises ClusterError that names the
        wrong entry.
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


def _common(nodes: Sequence[NodeType], intra: Link) -> dict[str, Any]:
    """The entries of a cluster that all `nodes` can be said to have."""
    per_node = math.gcd(*(node.devices_per_node for node in nodes))
    counts = [node.count * node.devices_per_node for node in nodes]
    return {
        "device": slowest_device([node.device for node in nodes], counts),
        "devices_per_node": per_node,
        "num_nodes": sum(counts) // per_node,
        "intra": slowest_link([node.intra or intra for node in nodes]),
    }


def _cluster(data: Any) -> Cluster:
    entries = Entries(data, "cluster")
    name, intra = entries.take("name", text), entries.take("intra", read_link)
    nodes = entries.take("nodes", read_nodes, ())
    if nodes:
        common = _common(nodes, intra)
        make: Callable[..., Cluster] = partial(Cluster.of_nodes, nodes, intra=intra)
    else:
        common = {
            "device": entries.take("device", read_device),
            "devices_per_node": entries.take("devices_per_node", whole),
            "num_nodes": entries.take("num_nodes", whole, 1),
        }
        make = partial(Cluster, **common, intra=intra)
    curves = partial(read_collectives, devices_per_node=common["devices_per_node"])
    cluster = make(
        name=name,
        inter=entries.take("inter", read_link, None),
        collectives=entries.take("collectives", curves, {}),
        overlap=entries.take("overlap", number, 0.0),
        backend=entries.take("backend", text, "nccl"),
        source=entries.take("source", text, ""),
        failures=entries.take("failures", read_failures, None),
        accuracy=entries.take("accuracy", read_accuracy, None),
    )
    entries.finish()
    return cluster

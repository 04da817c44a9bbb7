"""Seconds of a collective: a measured curve, with its wait, where the cluster has one, else the
formulas below.

A group of N ranks (`groups.Group`), V bytes of the whole tensor: the input of reduce_scatter, the
output of all_gather, all shards of all_to_all together, the message of send_recv. a latency, b
bandwidth that one rank gets of a link; d devices per node, s stride, g ranks of the group on a
node. All groups of a mesh axis work at the same time.

    equation                                              function
    all_reduce      2 (N-1) (a + V / (N b))               ring_seconds
    reduce_scatter    (N-1) (a + V / (N b))               ring_seconds
    all_gather        (N-1) (a + V / (N b))               ring_seconds
    broadcast       ceil(log2 N) a + V / b                ring_seconds
    send_recv                    a + V / b                ring_seconds
    all_to_all      (g-1) (a_intra + V / (N^2 b_intra))   all_to_all_seconds
                  + (N-g) (a_inter + V / (N^2 b_inter))

Sources: Patarasuk & Yuan, J. Parallel Distrib. Comput. 69(2), 2009, section 3; Thakur, Rabenseifner
& Gropp, IJHPCA 19(1), 2005, sections 4.1, 4.3 (large messages, pipelined), 4.4, and pairwise
exchange.

    inside a node:     a, b of intra                   bottleneck_link   a ring visits the nodes one
    one rank a node:   a, b of inter                                     after another, so one of
    g > 1 on a node:   a = max(a_intra, a_inter),                        g > 1 ranks a node enters
                       b = min(b_intra, (d / s) b_inter)                 each once, and the s rings
                                                                         on a node share its
                                                                         network: d times b_inter

torch's gloo does not follow them (its reduce_scatter moves as many bytes as an all_reduce):
calibrate there.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from lightning_topt.costs.cluster import Cluster, Link
from lightning_topt.costs.collective_curves import COLLECTIVES
from lightning_topt.costs.groups import Group


@dataclass(frozen=True)
class Collective:
    """One collective of a training step, of every group like `group` at the same time.

    `during` is the pass in which it starts: ``"forward"``, ``"backward"`` or ``"update"`` (the
    optimizer's step). `size` are the bytes of the whole tensor, as in
    `estimate_collective_seconds`. `packed`: it travels together with others of its kind, in as few
    messages as the code that sends them makes.
    """

    during: str
    op: str
    size: float
    group: Group
    packed: bool = False


def estimate_collective_seconds(cluster: Cluster, *, op: str, size: float, group: Group) -> float:
    """Return the seconds of `op` on a tensor of `size` bytes in every group like `group` at the
    same time.

    `size` counts the whole tensor. 0 for one rank or no bytes. Raises ValueError for an unknown
    `op` and for groups that need more ranks than the cluster has devices.
    """
    if op not in COLLECTIVES:
        raise ValueError(f"{op!r} is not one of {COLLECTIVES}")
    check_world_size(cluster, world_size=group.span)
    if group.size == 1 or size <= 0:
        return 0.0
    curve = cluster.collectives.get((op, group.size, group.stride))
    if curve is not None:
        return curve.seconds_at(size) + curve.wait_seconds
    if op == "all_to_all":
        return all_to_all_seconds(cluster, size=size, group=group)
    return ring_seconds(op, size=size, ranks=group.size, link=bottleneck_link(cluster, group=group))


def estimate_wait_seconds(cluster: Cluster, *, op: str, group: Group) -> float:
    """Return what `estimate_collective_seconds` has of waiting for ranks that come later: no work
    for anybody.
    """
    curve = cluster.collectives.get((op, group.size, group.stride))
    return 0.0 if curve is None else curve.wait_seconds


def check_world_size(cluster: Cluster, *, world_size: int) -> None:
    """Raise ValueError unless the cluster has at least `world_size` devices."""
    if not 1 <= world_size <= cluster.num_devices:
        raise ValueError(
            f"{world_size} ranks do not fit the cluster {cluster.name!r} with "
            f"{cluster.num_devices} devices; "
            "describe a larger cluster or ask for fewer devices"
        )


def bottleneck_link(cluster: Cluster, *, group: Group) -> Link:
    """Return what one rank gets of the slowest link that a ring through `group` crosses.

    `inter` is one rank's share of its node's network, so a node has ``devices_per_node`` times that
    for its rings.
    """
    devices = cluster.devices_per_node
    if group.is_inside(devices):
        return cluster.intra
    assert cluster.inter is not None
    if group.ranks_on_node(devices) == 1:
        return cluster.inter
    return Link(
        max(cluster.intra.latency_seconds, cluster.inter.latency_seconds),
        min(
            cluster.intra.bandwidth,
            cluster.inter.bandwidth * devices / group.groups_on_node(devices),
        ),
    )


def ring_seconds(op: str, *, size: float, ranks: int, link: Link) -> float:
    """Return the formula of `op`, any but all_to_all, on `size` bytes; see the table above."""
    if op in ("broadcast", "send_recv"):
        hops = math.ceil(math.log2(ranks)) if op == "broadcast" else 1
        return hops * link.latency_seconds + size / link.bandwidth
    steps = (ranks - 1) * (2 if op == "all_reduce" else 1)
    return steps * (link.latency_seconds + size / (ranks * link.bandwidth))


def all_to_all_seconds(cluster: Cluster, *, size: float, group: Group) -> float:
    """Return the formula of all_to_all: every rank sends a part to each other one, those on its
    node over `intra`.
    """
    part = size / group.size**2
    near = group.ranks_on_node(cluster.devices_per_node)
    seconds = (near - 1) * (cluster.intra.latency_seconds + part / cluster.intra.bandwidth)
    if far := group.size - near:
        assert cluster.inter is not None
        seconds += far * (cluster.inter.latency_seconds + part / cluster.inter.bandwidth)
    return seconds

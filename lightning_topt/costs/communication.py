"""Seconds of a collective in a group of ranks: a measured curve, else the formulas below.

`Group` says which ranks exchange with one another: every `stride`-th one. On two nodes of four
devices:

    Group(8)       (0 1 2 3 4 5 6 7)              packed: the ring enters each node once
    Group(4)       (0 1 2 3) (4 5 6 7)            inside a node
    Group(2, 4)    (0 4) (1 5) (2 6) (3 7)        between nodes: four groups share the network
    Group(2, 2)    (0 2) (1 3) (4 6) (5 7)        inside a node

A measured curve counts with its wait. In the formulas a group has N ranks, and V are bytes of the
whole tensor: the input of reduce_scatter, the output of all_gather, all shards of all_to_all
together, the message of send_recv. a latency, b bandwidth that one rank gets of a link; d devices
per node, s stride, g ranks of the group on a node. All groups of a mesh axis work at the same
time.

    op               seconds                               function
    all_reduce       2 (N-1) (a + V / (N b))               ring_seconds
    reduce_scatter     (N-1) (a + V / (N b))               ring_seconds
    all_gather         (N-1) (a + V / (N b))               ring_seconds
    broadcast        ceil(log2 N) a + V / b                ring_seconds
    send_recv                     a + V / b                ring_seconds
    all_to_all       (g-1) (a_intra + V / (N^2 b_intra))   all_to_all_seconds
                   + (N-g) (a_inter + V / (N^2 b_inter))

    group                of which link (`bottleneck_link`)
    inside a node        a, b of intra
    one rank a node      a, b of inter
    g > 1 on a node      a = max(a_intra, a_inter), b = min(b_intra, (d / s) b_inter)

Of rings the latency is the mean of their hops, n of which are between n nodes. NCCL's trees carry
as many bytes as rings, and have 2 ((g-1) a_intra + ceil(log2 n) a_inter) of latency: an all_reduce
takes whichever is less (`ring_latency`; Sanders, Speck & Traeff, Parallel Computing 35(12), 2009).

Patarasuk & Yuan, J. Parallel Distrib. Comput. 69(2), 2009, section 3; Thakur, Rabenseifner & Gropp,
IJHPCA 19(1), 2005, sections 4.1, 4.3 (large messages, pipelined), 4.4, and pairwise exchange. A
ring visits the nodes one after another. So one of g > 1 ranks a node enters each once, and the s
rings on a node share its network: d times b_inter. torch's gloo does not follow these formulas (its
reduce_scatter moves as many bytes as an all_reduce): calibrate there.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from lightning_topt.costs.cluster import COLLECTIVES, Cluster, Link

_MOST_GROUPS = 32
RING_OPS = ("all_reduce", "reduce_scatter", "all_gather")


def estimate_collective_seconds(cluster: Cluster, *, op: str, size: float, group: Group) -> float:
    """Return the seconds of `op` in every group like `group` at the same time.

    `size` counts the bytes of the whole tensor. 0 for one rank or no bytes. Raises ValueError for
    an unknown `op` and for groups that need more ranks than the cluster has devices.
    """
    if op not in COLLECTIVES:
        raise ValueError(f"{op!r} is not one of {COLLECTIVES}")
    check_world_size(cluster, world_size=group.span)
    if group.size == 1 or size <= 0:
        return 0.0
    curve = cluster.collectives.get((op, group.size, group.stride))
    if curve is not None:  # measured
        return curve.seconds_at(size) + curve.wait_seconds
    if op == "all_to_all":
        return all_to_all_seconds(cluster, size=size, group=group)
    link = bottleneck_link(cluster, group=group)
    if op in RING_OPS:
        link = replace(link, latency_seconds=ring_latency(cluster, op=op, group=group))
    return ring_seconds(op, size=size, ranks=group.size, link=link)


def estimate_wait_seconds(cluster: Cluster, *, op: str, group: Group) -> float:
    """Return the part of `estimate_collective_seconds` that is waiting for later ranks.

    That is no work for anybody.
    """
    curve = cluster.collectives.get((op, group.size, group.stride))
    return 0.0 if curve is None else curve.wait_seconds


@dataclass(frozen=True)
class Collective:
    """One collective of a training step, of every group like `group` at the same time.

    Attributes:
        during: the pass in which it starts: ``"forward"``, ``"backward"`` or ``"update"`` (the
            optimizer's step).
        op: one of `COLLECTIVES`.
        size: bytes of the whole tensor, as in `estimate_collective_seconds`.
        group: the ranks.
    """

    during: str
    op: str
    size: float
    group: Group


# ---- Formulas


def ring_seconds(op: str, *, size: float, ranks: int, link: Link) -> float:
    """Return the formula of `op`, any but all_to_all, on `size` bytes; see the table above."""
    if op in ("broadcast", "send_recv"):
        hops = math.ceil(math.log2(ranks)) if op == "broadcast" else 1
        return hops * link.latency_seconds + size / link.bandwidth
    steps = (ranks - 1) * (2 if op == "all_reduce" else 1)
    return steps * (link.latency_seconds + size / (ranks * link.bandwidth))


def all_to_all_seconds(cluster: Cluster, *, size: float, group: Group) -> float:
    """Return the formula of all_to_all.

    Every rank sends a part to each other one, those on its node over `intra`.
    """
    part = size / group.size**2  # from one rank to one other
    near = group.ranks_on_node(cluster.devices_per_node)
    seconds = (near - 1) * (cluster.intra.latency_seconds + part / cluster.intra.bandwidth)
    if far := group.size - near:
        assert cluster.inter is not None
        seconds += far * (cluster.inter.latency_seconds + part / cluster.inter.bandwidth)
    return seconds


def bottleneck_link(cluster: Cluster, *, group: Group) -> Link:
    """Return what one rank gets of the slowest link that a ring through `group` crosses.

    `inter` is one rank's share of its node's network, so a node has ``devices_per_node`` times that
    for its rings.
    """
    devices = cluster.devices_per_node
    if group.is_inside(devices):
        return cluster.intra
    assert cluster.inter is not None
    if group.ranks_on_node(devices) == 1:  # every hop is between nodes
        return cluster.inter
    return Link(
        max(cluster.intra.latency_seconds, cluster.inter.latency_seconds),
        min(
            cluster.intra.bandwidth,
            cluster.inter.bandwidth * devices / group.groups_on_node(devices),
        ),
    )


def ring_latency(cluster: Cluster, *, op: str, group: Group) -> float:
    """Return the latency of a step of a ring, in the mean over its steps.

    Parts of a message make all hops of the ring but one, at worst all hops between nodes. NCCL
    sends an all_reduce through trees where that takes less.
    """
    hops, near = group.size - 1, group.ranks_on_node(cluster.devices_per_node)
    nodes = group.size // near
    intra, inter = cluster.intra.latency_seconds, 0.0
    if nodes > 1:
        assert cluster.inter is not None
        inter = cluster.inter.latency_seconds
    across = 0 if nodes == 1 else min(nodes, hops)
    latency = ((hops - across) * intra + across * inter) / hops
    if op == "all_reduce" and cluster.backend == "nccl":
        tree = (near - 1) * intra + math.ceil(math.log2(nodes)) * inter
        latency = min(latency, tree / hops)
    return latency


def check_world_size(cluster: Cluster, *, world_size: int) -> None:
    """Raise ValueError unless the cluster has at least `world_size` devices."""
    if not 1 <= world_size <= cluster.num_devices:
        raise ValueError(
            f"{world_size} ranks do not fit the cluster {cluster.name!r} with "
            f"{cluster.num_devices} devices; describe a larger cluster or ask for fewer devices"
        )


# ---- Groups of ranks


@dataclass(frozen=True)
class Group:
    """`size` ranks of distance `stride`.

    The groups of a mesh axis fill all ranks and work at the same time.
    """

    size: int
    stride: int = 1

    @property
    def span(self) -> int:
        """Ranks from one such group to the next that shares none of its positions.

        `stride` groups lie side by side in it.
        """
        return self.size * self.stride

    def is_inside(self, devices_per_node: int) -> bool:
        """Return whether all its ranks share a node of so many devices.

        A node begins with a group.
        """
        return self.span <= devices_per_node

    def ranks_on_node(self, devices_per_node: int) -> int:
        """Return the number of its ranks that share a node."""
        return (
            self.size
            if self.is_inside(devices_per_node)
            else max(devices_per_node // self.stride, 1)
        )

    def groups_on_node(self, devices_per_node: int) -> int:
        """Return how many groups of this kind have ranks on a node; of groups that cross nodes."""
        return min(self.stride, devices_per_node)


def ranks_of_groups(group: Group, world_size: int) -> list[list[int]]:
    """Return the ranks of every group of this kind among `world_size` ranks.

    Their span must divide that number.
    """
    assert world_size % group.span == 0
    firsts = (
        start + offset
        for start in range(0, world_size, group.span)
        for offset in range(group.stride)
    )
    return [list(range(first, first + group.span, group.stride)) for first in firsts]


def mesh_groups(ranks: int, *, devices_per_node: int) -> tuple[Group, ...]:
    """Return the groups that outer x inner meshes of so many ranks have, and that of all ranks.

    The inner axis divides a node or is made of nodes. Kinds of more than 32 groups are left out,
    since it takes long to make so many, but for those of a node's ranks.
    """
    found = {Group(ranks): None}
    for inner in range(2, ranks):
        if ranks % inner == 0 and (devices_per_node % inner == 0 or inner % devices_per_node == 0):
            kinds = Group(inner), Group(ranks // inner, inner)
            found |= {
                k: None
                for k in kinds
                if inner == devices_per_node or ranks // k.size <= _MOST_GROUPS
            }
    return tuple(found) if ranks > 1 else ()

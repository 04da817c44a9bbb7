"""Seconds of a collective: a measured curve where the cluster has one, else the ring formulas.

N ranks, V bytes of the whole tensor (the input of reduce_scatter, the output of all_gather), a latency and b bandwidth
per rank of the slowest link that the ring crosses:

    equation                                     function             source
    all_reduce      2 (N-1) (a + V / (N b))      ring_seconds         Patarasuk & Yuan, J. Parallel Distrib. Comput.
    reduce_scatter    (N-1) (a + V / (N b))      ring_seconds         69(2), 2009, section 3; Thakur, Rabenseifner &
    all_gather        (N-1) (a + V / (N b))      ring_seconds         Gropp, IJHPCA 19(1), 2005, sections 4.1 and 4.4
    broadcast       ceil(log2 N) a + V / b       ring_seconds         pipelined, large messages (same, section 4.3)
    N ranks on m nodes, n per node:              ring_seconds         a ring visits the nodes one after another: all
    b = min(b_intra, n b_inter), a = a_inter                          n network cards of a node carry parallel rings
    n rings at once, each of one rank per node:  estimate_across_seconds   every ring has one rank's share of the network
    b = b_inter, a = a_inter

torch's gloo does not follow them (its reduce_scatter moves as many bytes as an all_reduce): calibrate there.
"""

from __future__ import annotations

import math

from lightning_topt.costs.cluster import COLLECTIVES, Cluster, Link


def estimate_collective_seconds(cluster: Cluster, *, op: str, size: float, world_size: int) -> float:
    """Seconds of `op` on a tensor of `size` bytes over `world_size` ranks packed node by node.

    `size` counts the whole tensor. 0 for one rank or no bytes. Raises ValueError for an unknown `op` and for more ranks
    than the cluster has devices.
    """
    if op not in COLLECTIVES:
        raise ValueError(f"{op!r} is not one of {COLLECTIVES}")
    check_world_size(cluster, world_size=world_size)
    if world_size == 1 or size <= 0:
        return 0.0
    curve = cluster.collectives.get((op, cluster.scope(world_size), world_size))
    if curve is not None:
        return curve.seconds_at(size)
    return ring_seconds(op, size=size, world_size=world_size, link=bottleneck_link(cluster, world_size=world_size))


def estimate_across_seconds(cluster: Cluster, *, op: str, size: float, num_nodes: int) -> float:
    """Seconds of `op` between `num_nodes` nodes, by all devices of a node at once: each with its peers, on `size` bytes.

    Peers are the devices with equal position in their nodes. 0 for one node or no bytes.
    """
    if num_nodes == 1 or size <= 0:
        return 0.0
    assert cluster.inter is not None
    return ring_seconds(op, size=size, world_size=num_nodes, link=cluster.inter)


def check_world_size(cluster: Cluster, *, world_size: int) -> None:
    """Raise ValueError unless the cluster has at least `world_size` devices."""
    if not 1 <= world_size <= cluster.num_devices:
        raise ValueError(
            f"{world_size} ranks do not fit the cluster {cluster.name!r} with {cluster.num_devices} devices; "
            "describe a larger cluster or ask for fewer devices"
        )


def bottleneck_link(cluster: Cluster, *, world_size: int) -> Link:
    """What one rank gets of the slowest link that a ring over `world_size` ranks crosses.

    `inter` is one rank's share of its node's network, so a node has ``devices_per_node`` times that for its rings.
    """
    if cluster.scope(world_size) == "intra":
        return cluster.intra
    assert cluster.inter is not None
    node_bandwidth = cluster.inter.bandwidth * cluster.devices_per_node
    return Link(
        max(cluster.intra.latency_seconds, cluster.inter.latency_seconds),
        min(cluster.intra.bandwidth, node_bandwidth),
    )


def ring_seconds(op: str, *, size: float, world_size: int, link: Link) -> float:
    """The ring formula of `op` on `size` bytes; see the table above."""
    if op == "broadcast":
        return math.ceil(math.log2(world_size)) * link.latency_seconds + size / link.bandwidth
    steps = (world_size - 1) * (2 if op == "all_reduce" else 1)
    return steps * (link.latency_seconds + size / (world_size * link.bandwidth))

"""Seconds of an exchange by datagrams of which a share may be lost (`communication.bounded_loss`).

N ranks, V bytes of the whole tensor, of which each rank sends S = V (N-1) / N twice: as
contributions, of which the share t may be lost, and as sums, of which nothing may. q loss, R round
trip and b bandwidth of the path; d bytes of a datagram.

    equation                                                                    function
    (t)        S / b (1 + max(q - t, 0) / (1 - q)) + R (1/2 + rounds(t))        phase_seconds
    rounds(t)  the least r >= 0 with q^(1 + r) <= max(t, d / S)                 resent_rounds
    exchange   (t) + (0)                                                        bounded_loss_seconds

A receiver that has enough says so; otherwise the sender asks what is missing and sends it again:
one more round trip.
"""

from __future__ import annotations

import math

from lightning_topt.costs.cluster import Cluster, Link
from lightning_topt.costs.communication import bottleneck_link, check_world_size
from lightning_topt.costs.groups import Group
from lightning_topt.costs.node_types import DatagramPath

DATAGRAM_BYTES = 1400


def estimate_bounded_loss_seconds(
    cluster: Cluster, *, size: float, group: Group, tolerance: float
) -> float:
    """Return the seconds of an exchange of `size` bytes in every group like `group` at the same
    time; 0 for one rank.

    Raises ValueError for groups that need more ranks than the cluster has devices.
    """
    check_world_size(cluster, world_size=group.span)
    if group.size == 1 or size <= 0:
        return 0.0
    return bounded_loss_seconds(
        path_of(cluster, group=group), size=size, ranks=group.size, tolerance=tolerance
    )


def bounded_loss_seconds(path: DatagramPath, *, size: float, ranks: int, tolerance: float) -> float:
    """Return the seconds of contributions with loss and of sums without; see the table above."""
    sent = size * (ranks - 1) / ranks
    return phase_seconds(path, sent=sent, tolerance=tolerance) + phase_seconds(
        path, sent=sent, tolerance=0.0
    )


def phase_seconds(path: DatagramPath, *, sent: float, tolerance: float) -> float:
    """Return the seconds until all but the share `tolerance` of what each rank sends has
    arrived.
    """
    again = max(path.loss - tolerance, 0.0) / (1 - path.loss)
    rounds = resent_rounds(path, sent=sent, tolerance=tolerance)
    return sent / path.bandwidth * (1 + again) + path.round_trip_seconds * (0.5 + rounds)


def resent_rounds(path: DatagramPath, *, sent: float, tolerance: float) -> int:
    """Return how often what is missing is sent again."""
    enough = max(tolerance, min(1.0, DATAGRAM_BYTES / sent))
    if path.loss <= enough:
        return 0
    return math.ceil(math.log(enough) / math.log(path.loss) - 1e-9) - 1


def path_of(cluster: Cluster, *, group: Group) -> DatagramPath:
    """Return what one rank gets of the network for datagrams to all others of `group`.

    As measured, else as the links are. Of several ranks on a node each sends the same to all: what
    goes to others on its node does not use the node's network.
    """
    devices = cluster.devices_per_node
    near = group.ranks_on_node(devices)
    if group.is_inside(devices) or near == 1:
        return _measured(bottleneck_link(cluster, group=group))
    assert cluster.inter is not None
    inside, between = _measured(cluster.intra), _measured(cluster.inter)
    far = (group.size - near) / (group.size - 1)
    return DatagramPath(
        max(inside.round_trip_seconds, between.round_trip_seconds),
        max(inside.loss, between.loss),
        min(inside.bandwidth, between.bandwidth / far),
    )


def _measured(link: Link) -> DatagramPath:
    return link.datagrams or DatagramPath(2 * link.latency_seconds, 0.0, link.bandwidth)

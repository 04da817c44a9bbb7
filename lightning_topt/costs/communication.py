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
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cached_property
from itertools import accumulate
from typing import TypeVar

import torch

from lightning_topt.communication.bucket import BucketLayout
from lightning_topt.communication.exchange_method import (
    NO_WORK,
    BucketGradients,
    GradientMethod,
    LocalMethod,
    Work,
)
from lightning_topt.communication.topology import Topology
from lightning_topt.costs.cluster import COLLECTIVES, Cluster, DatagramPath, Link
from lightning_topt.costs.sizes import gradient_bytes
from lightning_topt.graph.op_graph import OpGraph, Parameter

_MOST_GROUPS = 32
RING_OPS = ("all_reduce", "reduce_scatter", "all_gather")
Method = TypeVar("Method", GradientMethod, LocalMethod)


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


# ---- compressed exchanges of full gradients
#
# Seconds and bytes of a compressed exchange of full gradients on a cluster.
#
# What the exchange does is in the `work` of its method. The first steps, which are dense, are not
# predicted.
#
#     equation                                                            function
#     device    max(moved / M, flops / F)                                 device_seconds
#     worker    calls o + sum of the collectives; the exempt gradients'   worker_seconds
#               all-reduce beside the first: latencies at the same time,
#               bytes after one another where they share a network
#
# M memory bandwidth, F FLOP/s, o seconds a kernel costs at least. Passes over memory compete with
# the backward pass: they are in its way. Of what the worker's thread does
# (`communication.hook`: it waits for the network and starts kernels) the share `overlap`
# runs beside it.
#
# Datagrams, of which a share may be lost (`communication.bounded_loss`): N ranks, V bytes of the
# whole tensor, of which each rank sends S = V (N-1) / N twice: as contributions, of which the share
# t may be lost, and as sums, of which nothing may. q loss, R round trip and b bandwidth of the
# path; d bytes of a datagram.
#
#     equation                                                             function
#     (t)        S / b (1 + max(q - t, 0) / (1 - q)) + R (1/2 + rounds(t))  phase_seconds
#     rounds(t)  the least r >= 0 with q^(1 + r) <= max(t, d / S)           resent_rounds
#     exchange   (t) + (0)                                                  bounded_loss_seconds
#
# A receiver that has enough says so; otherwise the sender asks what is missing and sends it again:
# one more round trip.

DATAGRAM_BYTES = 1400
FIRST_BUCKET_BYTES, BUCKET_BYTES = 2**20, 25 * 2**20  # of gradients, as DDP cuts them by default


def make_exchange_model(
    method: GradientMethod, *, graph: OpGraph, cluster: Cluster, world_size: int, stride: int = 1
) -> ExchangeModel:
    """Return the model of `method` on `world_size` ranks.

    Every `stride`-th of those that are packed node by node. What it leaves open is as in a run on
    them. Raises ValueError as `check_exchange`.
    """
    check_exchange(method, cluster=cluster, world_size=world_size, stride=stride)
    return ExchangeModel(method, graph, cluster, _topology(cluster, world_size, stride), stride)


def check_exchange(
    method: GradientMethod, *, cluster: Cluster, world_size: int, stride: int = 1
) -> None:
    """Raise ValueError where there are no `legal_exchanges`."""
    if not legal_exchanges(method, cluster=cluster, world_size=world_size, stride=stride):
        raise ValueError(
            f"{world_size} ranks on nodes of {cluster.devices_per_node} devices cannot exchange "
            f"gradients by {method}: one rank exchanges none, hierarchical needs several nodes "
            "with several ranks each, all equally many, and method='dense' without it is no "
            "exchange of its own"
        )


def legal_exchanges(
    method: Method, *, cluster: Cluster, world_size: int, stride: int = 1
) -> tuple[Method, ...]:
    """Return `method` with everything decided that it leaves open on `world_size` ranks.

    These are every `stride`-th of the ranks that are packed node by node. () where the method
    cannot run on them. Local steps whose nodes train one replica together are not priced, nor run
    by a plan.
    """
    return method.choices(_topology(cluster, world_size, stride)) if world_size > 1 else ()


@dataclass(frozen=True)
class ExchangeModel:
    """The exchange by `method` of the gradients of `graph`; a block counts as one bucket.

    Small blocks share one: each pays a part of the latencies (`_latency_share`). Ranks are laid out
    as `topology` (of rank 0) says.
    """

    method: GradientMethod
    graph: OpGraph
    cluster: Cluster
    topology: Topology
    stride: int = 1  # from one of its ranks to the next

    @cached_property
    def work(self) -> dict[str, Work]:
        """The work for each block."""
        # a block counts as one bucket: where DDP cuts its buckets is not known before the run
        exempt = exempt_parameters(self.graph, self.method.exempt_rules or ())
        return {
            block.name: self._work_of(self.graph.block_parameters(block.name), exempt)
            for block in self.graph.blocks
        }

    def _work_of(self, parameters: Sequence[Parameter], exempt: frozenset[str]) -> Work:
        trainable = tuple(p for p in parameters if p.trainable and p.numel)
        gradients = bucket_of(trainable, exempt=exempt)
        return self.method.work(gradients, self.topology) if trainable else NO_WORK

    def costs_of(self, parameters: Sequence[Parameter]) -> tuple[float, float]:
        """Return seconds of an exchange of `parameters` that nothing hides, and bytes.

        The bytes are what it keeps between steps, and its buffers.
        """
        work = self._work_of(
            parameters, exempt_parameters(self.graph, self.method.exempt_rules or ())
        )
        seconds = self._device_seconds(work) + self._worker_seconds(work)
        return seconds, float(work.kept_bytes + work.buffer_bytes)

    @property
    def process_bytes(self) -> int:
        """Bytes of compiled kernels, beside tensors.

        On the devices that count such bytes (CPUs).
        """
        return self.method.process_bytes if self.cluster.device.process_bytes else 0

    def device_seconds(self, block: str) -> float:
        """Return the seconds of passes over memory."""
        return self._device_seconds(self.work[block])

    def _device_seconds(self, work: Work) -> float:
        return work.moved / self.cluster.device.memory_bandwidth

    def worker_seconds(self, block: str) -> float:
        """Return the seconds of starting kernels and on the network."""
        work = self.work[block]
        smallest = [(where, op, min(size, 1.0)) for where, op, size in work.collectives]
        latencies = replace(
            work, collectives=tuple(smallest), exempt_bytes=min(work.exempt_bytes, 1)
        )
        saved = (1 - self._latency_share) * self._worker_seconds(latencies)
        return max(self._worker_seconds(work) - saved, 0.0)

    @cached_property
    def _latency_share(self) -> float:
        # The part of its latencies that a block pays: DDP may have fewer buckets than blocks
        of_blocks = (self.graph.block_parameters(block.name) for block in self.graph.blocks)
        sizes = [sum(gradient_bytes(p) for p in each if p.trainable) for each in of_blocks]
        count, later = sum(size > 0 for size in sizes), max(sum(sizes) - FIRST_BUCKET_BYTES, 0)
        return min(1.0, (1 + math.ceil(later / BUCKET_BYTES)) / max(count, 1))

    def _worker_seconds(self, work: Work) -> float:
        starting = work.calls * self.cluster.device.op_overhead_seconds
        return starting + self._network_seconds(work)

    def wait_seconds(self, block: str) -> float:
        """Return the part of `worker_seconds` that is waiting for other ranks."""
        work = self.work[block]
        # The exempt gradients' all-reduce, beside the first, is waited for with that.
        calls = [(where, op) for where, op, _ in work.collectives]
        if not calls and work.exempt_bytes:
            calls = [("world", "all_reduce")]
        return self._latency_share * sum(
            estimate_wait_seconds(self.cluster, op=op, group=self._group(where))
            for where, op in calls
        )

    def _network_seconds(self, work: Work) -> float:
        seconds = sum(
            self._seconds(*collective, tolerance=work.tolerance) for collective in work.collectives
        )
        if not work.exempt_bytes:
            return seconds
        # the exempt gradients' all-reduce runs beside the first collective
        exempt = self._seconds("world", "all_reduce", work.exempt_bytes)
        if not work.collectives:
            return exempt
        where, op, _ = work.collectives[0]
        first = self._seconds(*work.collectives[0])
        if where == "node":  # inside the node, while the exempt gradients are between nodes
            return seconds + max(exempt - first, 0.0)
        # What one byte takes is all latency, which both have at the same time.
        latency = min(self._seconds(where, op, 1), self._seconds("world", "all_reduce", 1))
        return seconds + exempt - latency

    def _seconds(self, where: str, op: str, size: float, *, tolerance: float = 0.0) -> float:
        if op == "bounded_loss":
            return estimate_bounded_loss_seconds(
                self.cluster, size=size, group=self._group(where), tolerance=tolerance
            )
        return estimate_collective_seconds(self.cluster, op=op, size=size, group=self._group(where))

    def _group(self, where: str) -> Group:
        topology = self.topology
        groups = {
            "world": Group(topology.world_size, self.stride),
            "node": Group(topology.ranks_per_node, self.stride),
            "across": Group(topology.num_nodes, self.stride * topology.ranks_per_node),
        }
        return groups[where]


def estimate_outer_seconds(work: Work, *, cluster: Cluster, group: Group) -> float:
    """Return the seconds of an outer step of local steps (`LocalMethod.work`).

    Nothing runs beside it: ranks meet between two of their own steps.
    """
    device = cluster.device
    passes = work.moved / device.memory_bandwidth
    network = sum(
        estimate_collective_seconds(cluster, op=op, size=size, group=group)
        for _, op, size in work.collectives
    )
    return passes + work.calls * device.op_overhead_seconds + network


def bucket_of(parameters: Sequence[Parameter], *, exempt: frozenset[str]) -> BucketGradients:
    """Return the gradients of `parameters` as one bucket.

    Those named in `exempt` are sent uncompressed.
    """
    numels = tuple(p.numel for p in parameters)
    layout = BucketLayout(
        names=tuple(p.name for p in parameters),
        offsets=tuple(accumulate(numels[:-1], initial=0)),
        numels=numels,
        shapes=tuple(torch.Size(p.shape) for p in parameters),
        exempt=tuple(p.name in exempt for p in parameters),
    )
    return BucketGradients(layout, tuple(map(gradient_bytes, parameters)))


def exempt_parameters(graph: OpGraph, rules: Sequence[str]) -> frozenset[str]:
    """Return the names of the parameters that `rules` exempt.

    As `communication.exchange_method.exempt_names` finds them in a module.
    """
    kinds: dict[str, set[str]] = {}
    for op in graph.ops:
        for name in op.parameters:
            kinds.setdefault(name, set()).add(op.kind)

    def is_exempt(parameter: Parameter, rule: str) -> bool:
        users = kinds.get(parameter.name, set()).union(
            *(kinds.get(name, set()) for name in parameter.aliases)
        )
        flat, is_bias = len(parameter.shape) < 2, "bias" in parameter.name.rpartition(".")[2]
        if rule == "bias":
            return flat and is_bias
        if rule == "norm":
            return (flat and not is_bias) or any("Norm" in kind for kind in users)
        if rule == "embedding":
            return bool(users & {"Embedding", "EmbeddingBag"})
        return fnmatchcase(parameter.name, rule)

    return frozenset(p.name for p in graph.parameters if any(is_exempt(p, rule) for rule in rules))


def _topology(cluster: Cluster, world_size: int, stride: int) -> Topology:
    local = min(world_size, max(cluster.devices_per_node // stride, 1))
    if world_size % local:  # nodes have not equally many ranks: only the number of ranks counts
        local = 1
    return Topology(world_size // local, local, 0)


# ---- Datagrams of which a share may be lost


def estimate_bounded_loss_seconds(
    cluster: Cluster, *, size: float, group: Group, tolerance: float
) -> float:
    """Return the seconds of an exchange in every group like `group` at the same time.

    Of `size` bytes; 0 for one rank. Raises ValueError for groups that need more ranks than the
    cluster has devices.
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
    """Return the seconds until enough has arrived of what each rank sends.

    That is all but the share `tolerance`.
    """
    # once as sent, then what is lost beyond the tolerance, over and over
    again = max(path.loss - tolerance, 0.0) / (1 - path.loss)
    rounds = resent_rounds(path, sent=sent, tolerance=tolerance)
    return sent / path.bandwidth * (1 + again) + path.round_trip_seconds * (0.5 + rounds)


def resent_rounds(path: DatagramPath, *, sent: float, tolerance: float) -> int:
    """Return how often what is missing is sent again."""
    # without a tolerance: until less than one datagram is missing
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
    # the part of what a rank sends that leaves its node
    far = (group.size - near) / (group.size - 1)
    return DatagramPath(
        max(inside.round_trip_seconds, between.round_trip_seconds),
        max(inside.loss, between.loss),
        min(inside.bandwidth, between.bandwidth / far),
    )


def _measured(link: Link) -> DatagramPath:
    return link.datagrams or DatagramPath(2 * link.latency_seconds, 0.0, link.bandwidth)

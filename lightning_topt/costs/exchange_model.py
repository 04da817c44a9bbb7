"""Seconds and bytes of a compressed exchange of whole gradients on a cluster; what it does is in
the `work` of its method.

    equation                                                            function
    device    max(moved / M, flops / F)                                 ExchangeModel.device_seconds
    worker    calls o + sum of the collectives; the exempt gradients'   ExchangeModel.worker_seconds
              all-reduce beside the first: latencies at the same time,
              bytes after one another where they share a network

M memory bandwidth, F FLOP/s, o seconds a kernel costs at least. Passes over memory compete with the
backward pass: they are in its way. Of what the worker's thread does
(`communication.exchange_worker`: it waits for the network and starts kernels) the share `overlap`
runs beside it. The first steps, which are dense, are not predicted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from itertools import accumulate

import torch

from lightning_topt.communication.bucket import BucketLayout
from lightning_topt.communication.exchange_method import (
    NO_WORK,
    BucketGradients,
    GradientMethod,
    Work,
)
from lightning_topt.communication.topology import Topology
from lightning_topt.costs.cluster import Cluster
from lightning_topt.costs.communication import (
    Collective,
    estimate_collective_seconds,
    estimate_wait_seconds,
)
from lightning_topt.costs.datagrams import estimate_bounded_loss_seconds
from lightning_topt.costs.groups import Group
from lightning_topt.costs.sizes import gradient_bytes
from lightning_topt.graph.op_graph import OpGraph, Parameter


@dataclass(frozen=True)
class ExchangeModel:
    """The exchange by `method` of the gradients of `graph`, on ranks laid out as `topology` (of
    rank 0) says.

    A block counts as one bucket.
    """

    method: GradientMethod
    graph: OpGraph
    cluster: Cluster
    topology: Topology
    stride: int = 1  # from one of its ranks to the next

    @cached_property
    def work(self) -> dict[str, Work]:
        """The work for each block."""
        exempt = exempt_parameters(self.graph, self.method.exempt_rules or ())
        works = {}
        for block in self.graph.blocks:
            trainable = tuple(
                p for p in self.graph.block_parameters(block.name) if p.trainable and p.numel
            )
            gradients = bucket_of(trainable, exempt=exempt)
            works[block.name] = self.method.work(gradients, self.topology) if trainable else NO_WORK
        return works

    @property
    def process_bytes(self) -> int:
        """Bytes beside tensors: of compiled kernels, on the devices that count such bytes
        (CPUs).
        """
        return self.method.process_bytes if self.cluster.device.process_bytes else 0

    def device_seconds(self, block: str) -> float:
        """Return the seconds of passes over memory and of products of matrices."""
        work, device = self.work[block], self.cluster.device
        return max(work.moved / device.memory_bandwidth, work.flops / device.flops_of("float32"))

    def worker_seconds(self, block: str) -> float:
        """Return the seconds of starting kernels and on the network."""
        return self.work[
            block
        ].calls * self.cluster.device.op_overhead_seconds + self._network_seconds(block)

    def wait_seconds(self, block: str) -> float:
        """Return the part of `worker_seconds` that is waiting for other ranks."""
        work = self.work[block]
        # The exempt gradients' all-reduce, beside the first, is waited for with that.
        calls = [(where, op) for where, op, _ in work.collectives] or [
            ("world", "all_reduce")
        ] * bool(work.exempt_bytes)
        return sum(
            estimate_wait_seconds(self.cluster, op=op, group=self._group(where))
            for where, op in calls
        )

    def collectives(self, block: str) -> Iterator[Collective]:
        """Yield what ranks exchange for the gradients of `block`."""
        work = self.work[block]
        if work.exempt_bytes:
            yield Collective("backward", "all_reduce", work.exempt_bytes, self._group("world"))
        for where, op, size in work.collectives:
            yield Collective("backward", op, size, self._group(where))

    def _network_seconds(self, block: str) -> float:
        work = self.work[block]
        seconds = sum(
            self._seconds(*collective, tolerance=work.tolerance) for collective in work.collectives
        )
        if not work.exempt_bytes:
            return seconds
        exempt = self._seconds("world", "all_reduce", work.exempt_bytes)
        if not work.collectives:
            return exempt
        where, op, _ = work.collectives[0]
        first = self._seconds(*work.collectives[0])
        if where == "node":  # inside the node, while the exempt gradients are between nodes
            return seconds + max(exempt - first, 0.0)
        # What one byte takes is all latency.
        return (
            seconds
            + exempt
            - min(self._seconds(where, op, 1), self._seconds("world", "all_reduce", 1))
        )

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


def make_exchange_model(
    method: GradientMethod, *, graph: OpGraph, cluster: Cluster, world_size: int, stride: int = 1
) -> ExchangeModel:
    """Return the model of `method` on `world_size` ranks, every `stride`-th of those that are
    packed node by node.

    Raises ValueError for what is not among `legal_exchanges`.
    """
    if method not in legal_exchanges(method, cluster=cluster, world_size=world_size, stride=stride):
        raise ValueError(
            f"{world_size} ranks on nodes of {cluster.devices_per_node} devices cannot exchange "
            f"gradients by {method}: one "
            "rank exchanges none, hierarchical needs several nodes with several ranks each, all "
            "equally many, and "
            "method='dense' without it is no exchange of its own"
        )
    return ExchangeModel(method, graph, cluster, _topology(cluster, world_size, stride), stride)


def legal_exchanges(
    method: GradientMethod, *, cluster: Cluster, world_size: int, stride: int = 1
) -> tuple[GradientMethod, ...]:
    """Return `method` with everything decided that it leaves open on `world_size` ranks; () where
    it cannot run on them.
    """
    return method.choices(_topology(cluster, world_size, stride)) if world_size > 1 else ()


def bucket_of(parameters: Sequence[Parameter], *, exempt: frozenset[str]) -> BucketGradients:
    """Return the gradients of `parameters`, those named in `exempt` sent whole, as one bucket."""
    numels = tuple(p.numel for p in parameters)
    layout = BucketLayout(
        names=tuple(p.name for p in parameters),
        offsets=tuple(accumulate(numels[:-1], initial=0)),
        numels=numels,
        shapes=tuple(torch.Size(p.shape) for p in parameters),
        exempt=tuple(p.name in exempt for p in parameters),
    )
    return BucketGradients(layout, tuple(map(gradient_bytes, parameters)))


def _topology(cluster: Cluster, world_size: int, stride: int) -> Topology:
    local = _ranks_per_node(cluster, world_size, stride)
    return Topology(world_size // local, local, 0)


def _ranks_per_node(cluster: Cluster, world_size: int, stride: int) -> int:
    """1 where nodes do not have equally many ranks: then only the number of ranks counts."""
    local = min(world_size, max(cluster.devices_per_node // stride, 1))
    return local if world_size % local == 0 else 1


def exempt_parameters(graph: OpGraph, rules: Sequence[str]) -> frozenset[str]:
    """Return the names of the parameters that `rules` exempt, as
    `communication.exchange_method.exempt_names` finds them in a module.
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

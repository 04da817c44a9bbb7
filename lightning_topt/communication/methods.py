"""From the options to the object that exchanges buckets."""

from __future__ import annotations

import logging

import torch

from lightning_topt.communication.bucket import BucketExchange
from lightning_topt.communication.compressors.dense import DenseExchange
from lightning_topt.communication.compressors.half import HalfExchange
from lightning_topt.communication.compressors.hierarchical import HierarchicalExchange
from lightning_topt.communication.compressors.low_rank import LowRankExchange
from lightning_topt.communication.compressors.sign import SignExchange
from lightning_topt.communication.compressors.sparse import SparseExchange
from lightning_topt.communication.node.node_exchange import CollectiveNodeExchange, NodeExchange
from lightning_topt.communication.node.node_memory import SharedMemoryNodeExchange
from lightning_topt.communication.node.page import NodeMemoryUnavailable
from lightning_topt.communication.options import ExchangeOptions
from lightning_topt.communication.topology import Groups, Topology, make_groups

log = logging.getLogger(__name__)

FLAT: dict[str, type[BucketExchange]] = {
    "topk": SparseExchange,
    "dense": DenseExchange,
    "bf16": HalfExchange,
    "fp16": HalfExchange,
    "powersgd": LowRankExchange,
    "sign": SignExchange,
}


def is_hierarchical(options: ExchangeOptions, *, topology: Topology) -> bool:
    """Return whether gradients are summed inside each node first."""
    if options.hierarchical is not None:
        return options.hierarchical
    return options.method in ("topk", "dense") and topology.num_nodes > 1 and topology.ranks_per_node > 1


def make_bucket_exchange(
    options: ExchangeOptions, *, topology: Topology, groups: Groups, device: torch.device
) -> BucketExchange:
    """Collective call where hierarchical: the exchange that `options` ask for."""
    if not is_hierarchical(options, topology=topology):
        return FLAT[options.method](options, topology=topology, groups=groups, device=device)
    node = make_node_exchange(options, topology=topology, groups=groups, device=device)
    return HierarchicalExchange(options, topology=topology, groups=groups, device=device, node=node)


def make_node_exchange(
    options: ExchangeOptions, *, topology: Topology, groups: Groups, device: torch.device
) -> NodeExchange:
    """Collective call: through memory where CPU ranks share one machine, else by collectives."""
    assert groups.node_scatter is not None and groups.node_gather is not None
    if device.type == "cpu" and topology.ranks_per_node > 1:
        try:
            return SharedMemoryNodeExchange(groups.node_gather, timeout_seconds=options.timeout_seconds)
        except NodeMemoryUnavailable as error:
            log.warning("%s; gradients are exchanged inside the node by collectives", error)
    return CollectiveNodeExchange(
        local_rank=topology.local_rank,
        local_size=topology.ranks_per_node,
        scatter_group=groups.node_scatter,
        gather_group=groups.node_gather,
    )


def make_exchange_groups(options: ExchangeOptions, *, topology: Topology) -> Groups:
    """Collective call: the process groups that the exchange of `options` uses."""
    hierarchical = is_hierarchical(options, topology=topology)
    kind = HierarchicalExchange if hierarchical else FLAT[options.method]
    return make_groups(
        topology, num_stages=kind.num_stages, hierarchical=hierarchical, timeout_seconds=options.timeout_seconds
    )

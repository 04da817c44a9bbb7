"""Ranks of one node that train one replica together, for `OuterSteps` between nodes.

Inside a node gradients are averaged in every step, dense, over its fast links; between nodes an
outer step exchanges what each node did. Every local rank exchanges its own shard of the parameters
with the same local rank of the other nodes, all at once, and the shards are gathered inside the
node: what leaves a node is what one rank alone would send.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_topt.communication.node.node_exchange import Waitable, shard_bounds
from lightning_topt.communication.outer_step import Wait
from lightning_topt.communication.own_buckets import OwnBuckets
from lightning_topt.communication.topology import Topology, own_group


class NodeReplicas:
    """This rank's node, and the ranks with its place in the others. Made alike on all ranks, a
    collective call.

    `numel` parameters are cut into one shard per local rank; this rank's is from `start` to `stop`.
    """

    def __init__(self, topology: Topology, *, numel: int, parameters: Sequence[Tensor]) -> None:
        self.topology = topology
        size = topology.ranks_per_node
        members = topology.members
        self.node = own_group(
            [members[first : first + size] for first in range(0, len(members), size)]
        )
        self.across = own_group([members[local::size] for local in range(size)])
        self.bounds = shard_bounds(numel, local_size=size)
        self.start, self.stop = self.bounds[topology.local_rank]
        trained = [parameter for parameter in parameters if isinstance(parameter, nn.Parameter)]
        self._buckets = OwnBuckets(trained)

    def average_gradients(self, *, wait: Wait) -> None:
        """Collective call: gradients in ``.grad`` become the mean of the node's."""
        for bucket in self._buckets.filled():
            flat = bucket.buffer().div_(self.topology.ranks_per_node)
            wait(dist.all_reduce(flat, group=self.node, async_op=True))
        self._buckets.write_back()

    def gather(self, flat: Tensor, *, wait: Wait) -> None:
        """Collective call: fill in the other local ranks' shards of `flat` (n,), of which each has
        its own.
        """
        works: list[Waitable] = []
        for local, (start, stop) in enumerate(self.bounds):
            if stop > start:
                work = dist.broadcast(
                    flat[start:stop], group=self.node, group_src=local, async_op=True
                )
                assert work is not None
                works.append(work)
        for work in works:
            wait(work)

    def whole(self, shard: Tensor, *, wait: Wait) -> Tensor:
        """Collective call: the vector (n,) of which each local rank has its `shard`."""
        flat = torch.zeros(self.bounds[-1][1], device=shard.device)
        flat[self.start : self.stop] = shard
        self.gather(flat, wait=wait)
        return flat

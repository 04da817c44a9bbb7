"""Which ranks share a node, and the process groups of an exchange."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from lightning_topt.communication.rank_watch import time_limit


@dataclass(frozen=True)
class Topology:
    """`num_nodes` nodes of `ranks_per_node` ranks, numbered node by node; `rank` is this one.

    These are all ranks of the run, or one of several equal `parts` of them, each of which exchanges
    by itself. Then `rank` is the position in this rank's part, which is the one with index `part`.
    """

    num_nodes: int
    ranks_per_node: int
    rank: int
    parts: tuple[tuple[int, ...], ...] = ()
    part: int = 0

    def __post_init__(self) -> None:
        if self.num_nodes < 1 or self.ranks_per_node < 1:
            raise ValueError(f"a topology has at least one node and one rank per node; got {self}")
        if not 0 <= self.rank < self.world_size:
            raise ValueError(
                f"rank {self.rank} is not in a topology of {self.num_nodes} nodes x "
                f"{self.ranks_per_node} ranks: the world size is nodes x ranks per node "
                f"({self.world_size})"
            )

    @classmethod
    def from_environment(
        cls, *, rank: int, world_size: int, environment: Mapping[str, str] | None = None
    ) -> Topology:
        """Return what torchrun or SLURM say; without them, all ranks are on one node.

        From LOCAL_WORLD_SIZE, or SLURM_NTASKS_PER_NODE and SLURM_NNODES.

        Raises:
            ValueError: where `world_size` is not a multiple of the ranks per node.
        """
        environment = os.environ if environment is None else environment
        # torchrun, SLURM with tasks per node, SLURM with nodes; else one node
        ranks_per_node = world_size
        if "LOCAL_WORLD_SIZE" in environment:
            ranks_per_node = int(environment["LOCAL_WORLD_SIZE"])
        elif (
            environment.get("SLURM_NTASKS_PER_NODE", "").isdecimal()
            and "SLURM_PROCID" in environment
        ):
            ranks_per_node = int(environment["SLURM_NTASKS_PER_NODE"])
        elif "SLURM_NNODES" in environment and "SLURM_PROCID" in environment:
            ranks_per_node = max(1, world_size // int(environment["SLURM_NNODES"]))
        if world_size % ranks_per_node:
            raise ValueError(
                f"a world size of {world_size} is not nodes x {ranks_per_node} ranks per node: "
                "start equally many ranks on every node, or give the exchange its Topology"
            )
        return cls(world_size // ranks_per_node, ranks_per_node, rank)

    @property
    def world_size(self) -> int:
        """Number of ranks that exchange with this one, itself among them."""
        return self.num_nodes * self.ranks_per_node

    @property
    def members(self) -> tuple[int, ...]:
        """Their ranks in the run."""
        return self.parts[self.part] if self.parts else tuple(range(self.world_size))

    def of_part(self, parts: Sequence[Sequence[int]]) -> Topology:
        """Return the topology of this rank's part of the run.

        `parts` are the ranks of each, in order. Ranks of a part count as of one node each where its
        nodes do not have equally many.
        """
        own = next(index for index, part in enumerate(parts) if self.rank in part)
        members = tuple(tuple(part) for part in parts)
        # ranks of each part on each node
        local = [Counter(rank // self.ranks_per_node for rank in part) for part in members]
        sizes = {size for of_part in local for size in of_part.values()}
        nodes, ranks = (len(local[own]), sizes.pop()) if len(sizes) == 1 else (len(members[own]), 1)
        return Topology(nodes, ranks, members[own].index(self.rank), members, own)

    @property
    def node(self) -> int:
        """This rank's node."""
        return self.rank // self.ranks_per_node

    @property
    def local_rank(self) -> int:
        """This rank's position in its node."""
        return self.rank % self.ranks_per_node

    def check(self, world_size: int) -> None:
        """Raise ValueError unless the topology has `world_size` ranks."""
        if world_size != self.world_size * max(1, len(self.parts)):
            raise ValueError(
                f"the world size is {world_size}, but the topology has {self.num_nodes} nodes x "
                f"{self.ranks_per_node} ranks = {self.world_size}"
            )


@dataclass(frozen=True)
class Groups:
    """Process groups of one exchange, one per stage.

    Within a group all works are issued in bucket order on all ranks.

    - ``world``: all ranks of the topology; one group per stage of the method
      (``GradientMethod.num_stages``);
    - ``exempt``: all ranks; the packed exempt parameters;
    - ``state``: all ranks; checks, checkpoints: only used while no bucket is in flight;
    - ``across``: the ranks with this local rank, in node order (hierarchical only);
    - ``node_scatter``, ``node_gather``: the ranks of this node (hierarchical only).
    """

    world: tuple[dist.ProcessGroup, ...]
    exempt: dist.ProcessGroup
    state: dist.ProcessGroup
    across: dist.ProcessGroup | None = None
    node_scatter: dist.ProcessGroup | None = None
    node_gather: dist.ProcessGroup | None = None


def own_group(parts: Sequence[Sequence[int]]) -> dist.ProcessGroup:
    """Return the one of `parts` (ranks) that this rank is in, as a new group.

    A collective call of all ranks, with equal `parts`, in which each rank is once. The group has
    the time limit of the run's.
    """
    groups = [dist.new_group(list(part), timeout=time_limit()) for part in parts]
    group: dist.ProcessGroup = next(
        g for part, g in zip(parts, groups, strict=True) if dist.get_rank() in part
    )
    return group


def make_groups(
    topology: Topology, *, num_stages: int, hierarchical: bool, timeout_seconds: float
) -> Groups:
    """Collective call: the groups of one exchange, on the backend of the default group."""
    timeout = timedelta(seconds=timeout_seconds)
    parts = [list(part) for part in topology.parts or (topology.members,)]
    this = topology.members[topology.rank]

    def own(groups: list[list[int]]) -> dist.ProcessGroup:
        made: list[dist.ProcessGroup] = [dist.new_group(ranks, timeout=timeout) for ranks in groups]
        return next(group for ranks, group in zip(groups, made, strict=True) if this in ranks)

    # All ranks make all groups, in the same order.
    stages, exempt, state = tuple(own(parts) for _ in range(num_stages)), own(parts), own(parts)
    if not hierarchical:
        return Groups(stages, exempt, state)
    size = topology.ranks_per_node
    # across: equal local ranks of all nodes; nodes: the ranks of each node, twice
    nodes = [
        ranks[start : start + size]
        for ranks in parts
        for start in range(0, topology.world_size, size)
    ]
    across = [ranks[local::size] for ranks in parts for local in range(size)]
    return Groups(stages, exempt, state, own(across), own(nodes), own(nodes))

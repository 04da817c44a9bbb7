"""Which ranks share a node; process groups, which are made and ended here."""

from __future__ import annotations

import atexit
import logging
import os
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from threading import Thread
from time import monotonic

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _world

from lightning_topt.communication.collectives import backend_of, largest_of_ranks
from lightning_topt.communication.rank_watch import time_limit

_ABORT_SECONDS = 10.0  # that an error waits for groups to end
_HOST = "lightning_topt_host"  # how torch describes the group of `host_group`
_hostless: list[bool] = []  # whether there cannot be one
log = logging.getLogger(__name__)


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
    def has_levels(self) -> bool:
        """Whether there are several nodes of several ranks."""
        return self.num_nodes > 1 and self.ranks_per_node > 1

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
    - ``exempt``: all ranks; the packed exempt parameters, in stage 0. The first of ``world`` where
      there is one;
    - ``state``: all ranks; checks, checkpoints: only used by the training thread, while no bucket
      is in flight. One of the others, or that of the run where there is none;
    - ``across``: the ranks with this local rank, in node order (hierarchical only);
    - ``node_scatter``, ``node_gather``: the ranks of this node (hierarchical only);
    - ``made``: those of them that this rank is in and that were made for the exchange.
    """

    world: tuple[dist.ProcessGroup, ...]
    exempt: dist.ProcessGroup
    state: dist.ProcessGroup
    across: dist.ProcessGroup | None = None
    node_scatter: dist.ProcessGroup | None = None
    node_gather: dist.ProcessGroup | None = None
    made: tuple[dist.ProcessGroup, ...] = ()

    def destroy(self) -> None:
        """Destroy what was made, once; alike on all ranks, while nothing is in flight."""
        destroy_groups(self.made)


def destroy_groups(groups: Sequence[dist.ProcessGroup], *, meets: bool = False) -> None:
    """Destroy `groups`; those that are gone already are left out. Alike on all ranks.

    With `meets` all ranks of the run wait for each other first, if any is left: a rank that is done
    would end connections on which others still receive.
    """
    there = _existing(groups)
    if there and meets:
        dist.barrier()
    for group in there:
        dist.destroy_process_group(group)


def at_exit(method: Callable[[], object]) -> Callable[[], None]:
    """Have a bound method called when the process ends; `atexit` alone would keep its object.

    Returns:
        A function that calls it off.
    """
    kept = weakref.WeakMethod(method)

    def call() -> None:
        found = kept()
        if found is not None:
            found()

    atexit.register(call)
    return partial(atexit.unregister, call)


def abort_groups(groups: Sequence[dist.ProcessGroup]) -> list[dist.ProcessGroup]:
    """End all that is under way in `groups`, by one rank alone; return those that stay usable.

    These are on gloo: the end of the process does not wait for them. To be called after an error,
    in whose place it raises none; what does not end soon is left to end by itself.
    """
    there = _existing(groups)
    left = [group for group in there if dist.get_backend(group) == "gloo"]
    # All at once: to end a communicator of NCCL frees memory, which waits for the whole device, and
    # so for what is under way in the others.
    threads = [
        Thread(target=_abort, args=(group,), daemon=True) for group in there if group not in left
    ]
    for thread in threads:
        try:
            thread.start()
        except RuntimeError:  # from Python 3.12 on none begins while the interpreter ends
            thread.run()
    deadline = monotonic() + _ABORT_SECONDS
    for thread in threads:
        if thread.ident is not None:
            thread.join(max(0.0, deadline - monotonic()))
    if late := sum(thread.is_alive() for thread in threads):
        log.warning(
            "%d process groups have not ended within %g s of an error", late, _ABORT_SECONDS
        )
    return left


def _abort(group: dist.ProcessGroup) -> None:
    try:
        group.abort()
    except Exception:
        log.warning("a process group could not be ended after an error", exc_info=True)


def _existing(groups: Sequence[dist.ProcessGroup]) -> list[dist.ProcessGroup]:
    return [group for group in groups if dist.is_initialized() and group in _world.pg_map]


def whole_run() -> dist.ProcessGroup:
    """Return the run's own group."""
    group = dist.group.WORLD
    assert group is not None
    return group


def host_group() -> dist.ProcessGroup | None:
    """Return the group of all ranks that sends memory of the host. A collective call.

    The run's own where that does, else one of gloo, which is made once and goes with the run's.
    None, on all ranks, where one has no network interface for it.
    """
    run = whole_run()
    if backend_of(torch.device("cpu"), run):
        return run
    made = next((group for group in _world.pg_map if group.group_desc == _HOST), None)
    if made is None and not _hostless:
        try:
            made = dist.new_group(backend="gloo", timeout=time_limit(), group_desc=_HOST)
        except RuntimeError as error:  # no network interface, most often
            log.warning("ranks cannot send memory of the host: %s", error)
        if any(largest_of_ranks(made is None)):
            _hostless[:] = [True]
    return None if _hostless else made


def own_group(parts: Sequence[Sequence[int]]) -> dist.ProcessGroup:
    """Return the one of `parts` (ranks) that this rank is in, as a new group.

    A collective call of all ranks, with equal `parts`, in which each rank is once. The group has
    the time limit of the run's.
    """
    group = group_of(parts)
    assert group is not None
    return group


def group_of(
    parts: Sequence[Sequence[int]], *, backend: str | None = None, timeout: timedelta | None = None
) -> dist.ProcessGroup | None:
    """Do as `own_group` does where a rank may be in none of `parts`: None there.

    `backend` and `timeout`: of the group, if not those of the run.
    """
    limit = timeout or time_limit()
    groups = [dist.new_group(list(p), timeout=limit, backend=backend) for p in parts]
    return next((g for part, g in zip(parts, groups, strict=True) if dist.get_rank() in part), None)


def make_groups(
    topology: Topology,
    *,
    num_stages: int,
    hierarchical: bool,
    timeout_seconds: float,
    with_exempt: bool = True,
) -> Groups:
    """Collective call: the groups of one exchange, on the backend of the default group.

    As few as its order of works allows, for a communicator of NCCL is not free: each takes 389 MiB
    of an H100 (measured, NCCL 2.28.9) until it is destroyed. Stages need a group each, because how
    buckets in different stages interleave differs between ranks. The exempt parameters are in
    stage 0, directly before its main work: they share its group. Checks and checkpoints come when
    no bucket is in flight, so every order of works is the same on all ranks, and they share that
    too. The run's own group serves them where there is no other; nothing that the exchange's thread
    issues goes there, as the training thread uses it at any time.

    In all: `num_stages` groups; by nodes three more, and one for the exempt parameters where no
    stage is on all ranks.

    Args:
        topology: which ranks share a node.
        num_stages: stages that use ``world``.
        hierarchical: whether nodes sum first.
        timeout_seconds: of every work on the groups.
        with_exempt: whether there may be exempt parameters; alike on all ranks of the run.
    """
    parts = topology.parts or (topology.members,)
    made: list[dist.ProcessGroup] = []

    def own(groups: Sequence[Sequence[int]]) -> dist.ProcessGroup:
        group = group_of(groups, timeout=timedelta(seconds=timeout_seconds))
        assert group is not None
        made.append(group)
        return group

    # All ranks make all groups, in the same order.
    stages = tuple(own(parts) for _ in range(num_stages))
    if stages:
        shared = stages[0]
    elif with_exempt or len(parts) > 1:
        shared = own(parts)
    else:
        shared = whole_run()
    if not hierarchical:
        return Groups(stages, shared, shared, made=tuple(made))
    size = topology.ranks_per_node
    # across: equal local ranks of all nodes; nodes: the ranks of each node, twice
    nodes = [
        ranks[start : start + size]
        for ranks in parts
        for start in range(0, topology.world_size, size)
    ]
    across = [ranks[local::size] for ranks in parts for local in range(size)]
    by_nodes = (own(across), own(nodes), own(nodes))
    return Groups(stages, shared, shared, *by_nodes, made=tuple(made))

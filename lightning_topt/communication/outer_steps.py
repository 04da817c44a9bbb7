"""Local steps with an outer optimizer: ranks exchange once in many steps (DiLoCo, arXiv 2311.08105,
algorithm 1).

Every rank makes `every` steps of its own optimizer; then, with theta the parameters that all ranks
last agreed on,

    delta = theta - local parameters;  mean = mean of delta over ranks
    momentum = outer_momentum * momentum + mean
    theta = theta - outer_learning_rate * (mean + outer_momentum * momentum)
    (Nesterov, as torch's SGD)

How the mean is taken is the method's (`local_method.LocalMethod.make_mean`).
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_topt.basics.argument_checks import check_real
from lightning_topt.communication.local_method import LocalMethod
from lightning_topt.communication.named_tensors import Named, NamedTensors
from lightning_topt.communication.node.node_exchange import Waitable
from lightning_topt.communication.node_replicas import NodeReplicas
from lightning_topt.communication.outer_gradient import OuterGradient
from lightning_topt.communication.outer_step import (
    OuterMean,
    WholeMean,
    mean_of_buffers,
    outer_update,
    take_from_first,
)
from lightning_topt.communication.peers import GRACE_SECONDS, PeerLostError, PeerMonitor
from lightning_topt.communication.topology import Topology

PAUSE_SECONDS = 1e-3  # between two looks at a work in flight
_made = itertools.count()  # made in the same order on all ranks


@dataclass(frozen=True)
class OuterStatistics:
    """Since the start; bytes are payload of this rank, `dense_bytes` what DDP's ring all-reduce of
    every step had sent.

    `exchange_seconds` includes the wait for slower ranks; `residual_norm` (L2) is 0 where all is
    sent.
    """

    local_steps: int
    outer_steps: int
    bytes_sent: int
    dense_bytes: int
    exchange_seconds: float
    residual_norm: float


class OuterSteps:
    """Trains a replica per rank and brings them together as `method` says; on a module *without*
    DistributedDataParallel.

        outer = OuterSteps(module.named_parameters(), LocalSteps(every=100),
        buffers=module.named_buffers()) for batch in batches:
            loss(module, batch).backward(); optimizer.step(); optimizer.zero_grad();
            outer.after_step()
        outer.synchronize()

    Made alike on all ranks (a collective call: parameters and buffers of rank 0 go to all).
    `parameters` and `buffers` are the trained tensors or (name, tensor) pairs, of one device. After
    an outer step parameters are equal on all ranks bit for bit; buffers of floating point (running
    statistics) become their mean over ranks, others those of rank 0. The state of the ranks' own
    optimizers is never exchanged. Outer state is float32: one or two copies of the parameters, and
    one more where the method has a residual.

    `topology` is that of all ranks, where the method has the ranks of a node train one replica
    (`LocalMethod.hierarchical`); `average_gradients` then comes between ``backward`` and the
    optimizer's step. None: each rank is a node.

    Raises ValueError for methods that differ between ranks, and without parameters.
    """

    def __init__(
        self,
        parameters: Named,
        method: LocalMethod,
        *,
        buffers: Named = (),
        topology: Topology | None = None,
        process_group: dist.ProcessGroup | None = None,
        timeout_seconds: float = 600.0,
    ) -> None:
        self.method, self.group = method, process_group
        self.timeout_seconds = check_real(timeout_seconds, name="timeout_seconds", positive=True)
        self.parameters, self.buffers = NamedTensors(parameters), NamedTensors(buffers)
        if not self.parameters.numel:
            raise ValueError(
                "OuterSteps was given no parameters; an iterator (module.parameters()) can be used "
                "only once"
            )
        _check_equal(
            method.as_mapping() | {"number of elements": self.parameters.numel}, group=process_group
        )
        self.monitor = _make_monitor(process_group)
        for tensor in (*self.parameters.tensors.values(), *self.buffers.tensors.values()):
            take_from_first(tensor, group=process_group, wait=self._wait)
        self.anchor = self.parameters.read()
        self.momentum = torch.zeros_like(self.anchor) if method.outer_momentum else None
        self.replicas: NodeReplicas | None = None
        numel, group = self.parameters.numel, process_group
        if topology is not None and method.joins_nodes(topology):
            assert process_group is None, "a topology is of all ranks"
            topology.check(dist.get_world_size())
            tensors = list(self.parameters.tensors.values())
            self.replicas = NodeReplicas(topology, numel=numel, parameters=tensors)
            numel, group = self.replicas.stop - self.replicas.start, self.replicas.across
        self._mean = method.make_mean(numel, device=self.anchor.device, group=group)
        self.pending_steps = 0  # local steps since the last outer step
        self.local_steps = self.outer_steps = self._other_bytes = 0
        self._exchange_seconds = self._longest_step = 0.0
        self._step_start = time.monotonic()

    @property
    def residual(self) -> Tensor | None:
        """The residual (n,) of this rank, or of its shard where a node has one replica; None where
        all is sent.
        """
        return self._mean.residual

    @property
    def holders(self) -> list[int]:
        """One rank for each separate replica."""
        size = 1 if self.replicas is None else self.replicas.topology.ranks_per_node
        return list(range(0, dist.get_world_size(self.group), size))

    def average_gradients(self) -> None:
        """Collective call, after ``backward``: average the gradients of this node's ranks; nothing
        where each trains alone.

        Raises PeerLostError where a rank is gone.
        """
        if self.replicas is None:
            return
        try:
            self.replicas.average_gradients(wait=self._wait)
        except (RuntimeError, TimeoutError) as error:
            raise self._lost(error) from error

    def after_step(self) -> bool:
        """Call it after each step of the rank's own optimizer; whether an outer step was made.

        Raises what `synchronize` raises.
        """
        self._longest_step = max(self._longest_step, time.monotonic() - self._step_start)
        if self.monitor.look():
            raise self._lost(RuntimeError("another rank reported a failure"))
        self.pending_steps += 1
        self.local_steps += 1
        due = self.pending_steps >= self.method.every
        if due:
            self.synchronize()
        self._step_start = time.monotonic()
        return due

    def synchronize(self) -> None:
        """Collective call: an outer step now, if there was a local step since the last; for the end
        of training.

        Raises FloatingPointError, on all ranks, naming those whose parameters are not finite (all
        parameters then stay as they are), and PeerLostError where a rank is gone or
        `timeout_seconds` pass.
        """
        if not self.pending_steps:
            return
        start = time.perf_counter()
        try:
            self._check_finite()
            mean = self._exchange()
            self._other_bytes += mean_of_buffers(self.buffers, group=self.group, wait=self._wait)
        except (RuntimeError, TimeoutError) as error:
            raise self._lost(error) from error
        coefficient, rate = self.method.outer_momentum, self.method.outer_learning_rate
        outer_update(self.anchor, mean, momentum=self.momentum, coefficient=coefficient, rate=rate)
        self.parameters.write(self.anchor)
        self.pending_steps = 0
        self.outer_steps += 1
        self._exchange_seconds += time.perf_counter() - start

    def _exchange(self) -> OuterMean:
        """The mean over replicas of how far they went."""
        if self.replicas is None:
            return self._mean.mean(OuterGradient(self.parameters, self.anchor), wait=self._wait)
        start, stop, whole = self.replicas.start, self.replicas.stop, torch.zeros_like(self.anchor)
        if start < stop:
            own = OuterGradient(self.parameters, self.anchor, start=start, stop=stop)
            self._mean.mean(own, wait=self._wait).add_to((whole[start:stop], 1.0))
        self.replicas.gather(whole, wait=self._wait)
        return WholeMean(whole)

    def _check_finite(self) -> None:
        rank, world_size = dist.get_rank(self.group), dist.get_world_size(self.group)
        flags = torch.zeros(world_size, dtype=torch.int32, device=self.anchor.device)
        flags[rank] = not self.parameters.is_finite()
        self._wait(dist.all_reduce(flags, group=self.group, async_op=True))
        self._other_bytes += 2 * (world_size - 1) * flags.nbytes // world_size
        ranks = flags.nonzero().flatten().tolist()
        if ranks:
            raise FloatingPointError(
                f"the parameters of rank {', '.join(map(str, ranks))} have NaN or infinities after "
                f"{self.local_steps} local "
                "steps: lower the learning rate, clip gradients, or return to a checkpoint"
            )

    def _wait(self, work: Waitable | None) -> None:
        """Until `work` is done, another rank reports a failure, or `timeout_seconds` pass."""
        assert work is not None
        deadline = time.monotonic() + self.timeout_seconds
        while not work.is_completed():
            if self.monitor.look():
                raise RuntimeError("another rank reported a failure")
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"waited longer than {self.timeout_seconds:g} s for another rank"
                )
            time.sleep(PAUSE_SECONDS)
        work.wait()

    def _lost(self, error: Exception) -> PeerLostError:
        # A survivor may be in a local step when the first one signs in.
        return self.monitor.diagnose(error, grace_seconds=GRACE_SECONDS + 2 * self._longest_step)

    @property
    def statistics(self) -> OuterStatistics:
        """The statistics of what was exchanged so far."""
        world_size = dist.get_world_size(self.group)
        nbytes = sum(tensor.nbytes for tensor in self.parameters.tensors.values())
        return OuterStatistics(
            local_steps=self.local_steps,
            outer_steps=self.outer_steps,
            bytes_sent=self._mean.bytes_sent + self._other_bytes,
            dense_bytes=self.local_steps * 2 * (world_size - 1) * nbytes // world_size,
            exchange_seconds=self._exchange_seconds,
            residual_norm=float(self.residual.norm()) if self.residual is not None else 0.0,
        )

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's outer state, by parameter name. Residuals differ between ranks: save
        one state per rank, or per node where its ranks train one replica (a collective call then).

        Between outer steps the parameters differ as well; `synchronize` first to save one set for
        all.
        """
        state: dict[str, Any] = {"pending_steps": self.pending_steps}
        state |= {"local_steps": self.local_steps, "outer_steps": self.outer_steps}
        for kind, flat in self._flat_state().items():
            if kind == "residual" and self.replicas is not None:
                flat = self.replicas.whole(flat, wait=self._wait)
            state[kind] = {name: part.clone() for name, part in self.parameters.split(flat).items()}
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` gave on this rank; load the parameters themselves too, before
        or after.

        Momentum or residual that the state lacks start at zero. Raises ValueError for the state of
        another model.
        """
        for kind, flat in self._flat_state().items():
            flat.zero_()
            if kind in state:
                whole = torch.zeros_like(self.anchor)
                self.parameters.load(whole, state[kind], what=kind)
                is_shard = kind == "residual" and self.replicas is not None
                flat.copy_(
                    whole[self.replicas.start : self.replicas.stop]
                    if is_shard and self.replicas
                    else whole
                )
        self.pending_steps, self.local_steps = state["pending_steps"], state["local_steps"]
        self.outer_steps = state["outer_steps"]

    def _flat_state(self) -> dict[str, Tensor]:
        flat = {"anchor": self.anchor, "momentum": self.momentum, "residual": self.residual}
        return {kind: tensor for kind, tensor in flat.items() if tensor is not None}


def _check_equal(options: Mapping[str, Any], *, group: dist.ProcessGroup | None) -> None:
    """Collective call: raise ValueError, on all ranks, where `options` differ."""
    everyone: list[Mapping[str, Any]] = [{} for _ in range(dist.get_world_size(group))]
    dist.all_gather_object(everyone, options, group=group)
    for rank, theirs in enumerate(everyone):
        for name, value in theirs.items():
            if value != everyone[0][name]:
                raise ValueError(
                    f"all ranks make the same local steps: {name} is {value!r} on rank {rank} and "
                    f"{everyone[0][name]!r} "
                    "on rank 0"
                )


def _make_monitor(group: dist.ProcessGroup | None) -> PeerMonitor:
    """Ranks are numbered, and named in errors, as in `group`."""
    members = "-".join(map(str, dist.get_process_group_ranks(group or dist.group.WORLD)))
    name = f"lightning_topt/outer_steps/{next(_made)}/{members}"
    store = dist.distributed_c10d.PrefixStore(name, dist.distributed_c10d._get_default_store())
    return PeerMonitor(store, rank=dist.get_rank(group), world_size=dist.get_world_size(group))

"""The DDP communication hook: gradients of `DistributedDataParallel` averaged by an exchange of
one's choice.
"""

# No `from __future__ import annotations`: DDP compares the annotations of a hook with classes.
import itertools
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel

from lightning_topt.communication.agreement import check_equal_options
from lightning_topt.communication.checkpoint import (
    Slices,
    cut_state,
    gather_state,
    joined_state,
    own_state,
)
from lightning_topt.communication.exchange_context import ExchangeSettings
from lightning_topt.communication.exchange_method import GradientMethod
from lightning_topt.communication.module_exchange import ModuleExchange
from lightning_topt.communication.own_buckets import OwnBuckets
from lightning_topt.communication.peers import PeerMonitor
from lightning_topt.communication.rank_watch import within_limit
from lightning_topt.communication.topology import Topology

Merge = Callable[[list[dict[str, dict[str, Tensor]]]], list[dict[str, dict[str, Tensor]]]]
_made = itertools.count()  # exchanges are made in the same order on all ranks


@dataclass(frozen=True)
class ExchangeStatistics:
    """Since the last reset; bytes and seconds are sums over `steps` exchanged steps.

    `bytes_sent` is payload that left this node for others (with one node: this rank), `dense_bytes`
    the same for DDP's own ring all-reduce; `exposed_seconds` is the wait at the end of backward
    passes, `exchange_seconds` the time with a bucket in flight; `residual_norm` (L2, of this rank,
    now) is in units of the unscaled gradient; `density` is that of the next step; `details` are
    more of some methods (`BucketExchange.telemetry`).
    """

    steps: int
    bytes_sent: int
    dense_bytes: int
    exposed_seconds: float
    exchange_seconds: float
    residual_norm: float
    density: float
    details: Mapping[str, float] = field(default_factory=dict)


class CompressedExchange:
    """Exchanges the gradients of one DistributedDataParallel module by `method`; made alike on all
    ranks.

    `topology` comes from the environment if None; `nonfinite`, `timeout_seconds` and `debug` are as
    in `ExchangeSettings`. Where it is one of several parts of the run, `slices` says of which
    parameters these have slices; the state that is saved is of whole parameters. `merge` is for
    parts that have different parameters: a collective call that gives rank 0 the states of all. Set
    `loss_scale` to the GradScaler's scale before each backward pass. Raises ValueError for a world
    size that is not nodes x ranks per node.
    """

    def __init__(
        self,
        method: GradientMethod,
        *,
        topology: Topology | None = None,
        device: torch.device | None = None,
        nonfinite: str = ExchangeSettings.nonfinite,
        timeout_seconds: float = ExchangeSettings.timeout_seconds,
        debug: bool = ExchangeSettings.debug,
        slices: Slices | None = None,
        merge: Merge | None = None,
    ) -> None:
        rank, world_size = dist.get_rank(), dist.get_world_size()
        given = ExchangeSettings(nonfinite, timeout_seconds, debug)
        # Nobody waits for a lost rank longer than the run allows its collective calls.
        self.settings = ExchangeSettings(nonfinite, within_limit(given.timeout_seconds), debug)
        self.device = device or torch.device("cpu")
        self.topology = topology or Topology.from_environment(rank=rank, world_size=world_size)
        self.topology.check(world_size)
        self.method = method.on(self.topology)
        self.slices, self._merge = slices, merge
        self.loss_scale = 1.0
        self._name = f"lightning_topt/exchange/{next(_made)}/{self.topology.part}"
        self._loaded: Mapping[str, Any] | None = None
        self._module: ModuleExchange | None = None
        self._reset_at = (0, 0, 0, 0.0)

    def register(self, ddp: DistributedDataParallel) -> None:
        """Collective call: take over the gradients of `ddp`, once, before its first backward pass.

        Raises TypeError for another wrapper, ValueError where ranks differ in their options or
        topology.
        """
        if not isinstance(ddp, DistributedDataParallel):
            raise TypeError(
                f"gradients of a {type(ddp).__name__} cannot be exchanged compressed: this needs "
                "torch.nn.parallel.DistributedDataParallel (FSDP shards its gradients by "
                "reduce-scatter and has no such hook); "
                "wrap the module in DistributedDataParallel"
            )
        if self._module is not None:
            raise ValueError(
                "this exchange is registered already: make one per DistributedDataParallel module"
            )
        check_equal_options(self.method, self.settings, topology=self.topology)
        self._module = ModuleExchange(
            ddp.module,
            self.method,
            self.settings,
            topology=self.topology,
            device=self.device,
            name=self._name,
            ignored=ddp.parameters_to_ignore,
            # Another choice of entries in each part would make them differ.
            exempt=() if self.slices is None else self.slices.uncut,
        )
        ddp.register_comm_hook(state=self, hook=_hook)
        if self._loaded is not None:
            self.load_state_dict(self._loaded)

    def take_over(self, module: nn.Module, *, ignored: Collection[str] = ()) -> None:
        """Collective call: be ready to `average` the gradients of `module`, which no DDP wraps, but
        for those `ignored`.
        """
        check_equal_options(self.method, self.settings, topology=self.topology)
        self._module = ModuleExchange(
            module,
            self.method,
            self.settings,
            topology=self.topology,
            device=self.device,
            name=self._name,
            ignored=ignored,
        )
        self._buckets = OwnBuckets(list(self._module.parameters.values()))

    def average(self) -> None:
        """Collective call: average the gradients that are in ``.grad``, after `take_over`."""
        module = self._needed()
        for bucket in self._buckets.filled():
            module.submit(bucket, loss_scale=self.loss_scale)
        module.finish_step()
        self._buckets.write_back()

    @property
    def error(self) -> Exception | None:
        """Why the exchange ended (`PeerLostError`, ...), None while it works; `backward` raises
        it.
        """
        return self._module.worker.error if self._module else None

    @property
    def monitor(self) -> PeerMonitor:
        """Says who is gone, also when a collective outside of the exchange fails."""
        return self._needed().worker.monitor

    def step_skipped(self) -> None:
        """Put back into the residual what was sent: the last step's gradients were thrown away (by
        a GradScaler).
        """
        self._needed().put_back()

    def check_parameters(self) -> None:
        """Collective call: raise RuntimeError naming the first parameter that differs between
        ranks.
        """
        self._needed().check_parameters()

    def statistics(self, *, reset: bool = True) -> ExchangeStatistics:
        """Return what was exchanged since the last reset."""
        module = self._needed()
        steps, sent, dense, busy = now = (
            module.step,
            module.exchange.bytes_sent,
            module.dense_bytes,
            module.worker.busy_seconds,
        )
        before = self._reset_at
        exposed = module.exposed_seconds(reset=reset)
        if reset:
            self._reset_at = now
        return ExchangeStatistics(
            steps=steps - before[0],
            bytes_sent=sent - before[1],
            dense_bytes=dense - before[2],
            exposed_seconds=exposed,
            exchange_seconds=busy - before[3],
            residual_norm=module.exchange.residual_norm(),
            density=self.method.density_at(steps),
            details=module.exchange.telemetry(steps=max(1, steps - before[0]), reset=reset),
        )

    def state_dict(self) -> dict[str, Any]:
        """Collective call: the state of all ranks, whole on rank 0 (elsewhere `ranks` is empty).

        `ranks` has one entry per rank, per node where hierarchical: kind ("residual", ...) ->
        parameter name -> tensor.
        """
        module = self._needed()
        module.finish_step()
        own = joined_state(module.exchange.state_dict(), self.slices)
        first = self._merge is not None or not self.topology.part  # all parts have the same
        ranks = (
            gather_state(own, senders=self._holders(), group=module.groups.state) if first else []
        )
        if self._merge is not None:
            ranks = self._merge(ranks)
        return {"step": module.step, "method": self.method.name, "ranks": ranks}

    def own_state_dict(self) -> dict[str, Any]:
        """Return this rank's part of `state_dict`: its entry of `ranks` as `state`, and which of
        the `holders` entries that is.

        `position` is None, and `state` empty, where another rank of the node, or of another part,
        has it. Collective where there are slices.
        """
        module, holders = self._needed(), self._holders()
        module.finish_step()
        position = holders.index(self.topology.rank) if self.topology.rank in holders else None
        state = {} if position is None else joined_state(module.exchange.state_dict(), self.slices)
        if self.topology.part and self._merge is None:
            position, state = None, {}
        return {
            "step": module.step,
            "method": self.method.name,
            "holders": len(holders),
            "position": position,
            "state": state,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what rank 0 saved, given to all ranks; on another number of ranks each gets the
        mean of the residuals.

        Raises ValueError for the state of another method or model.
        """
        if self._module is None:
            self._loaded = state
            return
        if state["method"] != self.method.name:
            raise ValueError(
                f"the saved exchange state is of method={state['method']!r}, this exchange has "
                f"{self.method.name!r}"
            )
        holders, rank = self._holders(), self.topology.rank
        position = self.topology.node if len(holders) < self.topology.world_size else rank
        numels = {name: parameter.numel() for name, parameter in self._module.parameters.items()}
        if self.slices is not None:
            numels = {name: self.slices.numel(name, own) for name, own in numels.items()}
        ranks = (
            state["ranks"]
            if self._merge is None
            else [_known(each, numels) for each in state["ranks"]]
        )
        whole = own_state(ranks, position=position, holders=len(holders), numels=numels)
        own = cut_state(whole, self.slices)
        self._module.finish_step()
        if own:
            self._module.exchange.load_state_dict(own)
        self._module.step = state["step"]
        self._reset_at = (state["step"], *self._reset_at[1:])

    def close(self) -> None:
        """End the exchange's thread and release shared memory; the hook cannot be used any more."""
        if self._module is not None:
            self._module.close()

    def _holders(self) -> list[int]:
        """One rank for each separate state."""
        apart = self.method.sums_in_nodes(self.topology)
        return list(
            range(0, self.topology.world_size, self.topology.ranks_per_node if apart else 1)
        )

    def _needed(self) -> ModuleExchange:
        if self._module is None:
            raise ValueError("register the exchange on a DistributedDataParallel module first")
        return self._module


def _known(
    state: Mapping[str, Mapping[str, Tensor]], numels: Mapping[str, int]
) -> dict[str, dict[str, Tensor]]:
    """Return the part of a state that is of these parameters."""
    return {kind: {name: of[name] for name in of if name in numels} for kind, of in state.items()}


def _hook(exchange: CompressedExchange, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    return exchange._needed().submit(bucket, loss_scale=exchange.loss_scale)

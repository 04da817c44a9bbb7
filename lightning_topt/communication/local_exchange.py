"""Local steps as the exchange of a plan: what strategies and checkpoints ask of any exchange.

    exchange = LocalExchange(LocalSteps(every=50, hierarchical=False), module)
    exchange.follow(optimizer)      # an outer step after every 50 of its own
    exchange.synchronize()          # before an evaluation or a checkpoint
    exchange.leave()                # the optimizer is its own again, replicas are equal

`CompressedExchange` averages gradients in every step; here ranks train alone in between
(`local_sgd.OuterSteps`). Its methods have the names of that class.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lightning_topt.communication.checkpoint import State, gather_state, own_state
from lightning_topt.communication.exchange_method import LocalMethod
from lightning_topt.communication.hook import ExchangeStatistics, equal_parameters
from lightning_topt.communication.local_sgd import OuterSteps
from lightning_topt.communication.rank_watch import RankWatch, within_limit
from lightning_topt.communication.topology import Topology

TIMEOUT_SECONDS = 600.0


class LocalExchange:
    """Lets the replicas of `module` meet by `method`, as often as it says.

    Made alike on all ranks, a collective call: parameters and buffers of rank 0 go to all. Every
    rank trains a replica, or the ranks of a node one together.

    Args:
        method: of local steps.
        module: without a DistributedDataParallel around it.
        ignored: names of parameters and buffers that each rank has for itself.
        topology: of all ranks, where the method may let the ranks of a node train one replica.
        timeout_seconds: how long to wait for another rank; no longer than the run's own limit.
        watch: over all ranks, where there is one.
    """

    error: Exception | None = None  # of a worker: there is none, errors are raised where they arise
    loss_scale = 1.0
    trains_alone = True

    def __init__(
        self,
        method: LocalMethod,
        module: nn.Module,
        *,
        ignored: Collection[str] = (),
        topology: Topology | None = None,
        timeout_seconds: float = TIMEOUT_SECONDS,
        watch: RankWatch | None = None,
    ) -> None:
        self.method = method
        self._module, self._ignored = module, ignored
        # frozen parameters are no part of outer steps: they are made equal here, once
        trained = equal_parameters(module, ignored)
        for name, parameter in module.named_parameters():
            if not parameter.requires_grad and name not in ignored:
                dist.broadcast(parameter.detach(), 0)
        self.outer = OuterSteps(
            trained.items(),
            method,
            buffers=[(n, b) for n, b in module.named_buffers() if n not in ignored],
            topology=topology,
            timeout_seconds=within_limit(timeout_seconds),
            watch=watch,
        )
        self._hooks: list[RemovableHandle] = []
        self._has_ended = False

    # ---- steps -----------------------------------------------------------------------------------

    def follow(self, optimizer: Optimizer) -> None:
        """Count the steps of `optimizer`, which trains the module; every so many, replicas meet.

        Each rank makes every step: a GradScaler that skips one on a rank alone would leave the
        others waiting.

        Raises:
            ValueError: an optimizer is followed already.
        """
        if self._hooks:
            raise ValueError(
                "local steps are steps of one optimizer, and there are several: use one with "
                "several parameter groups, or a plan without local_steps"
            )
        self._hooks.append(optimizer.register_step_post_hook(lambda *_: self.after_step()))

    def after_step(self) -> None:
        """Count a step of the optimizer, where none is followed; replicas meet where it is time."""
        known = self.outer.parameters.tensors
        for name in equal_parameters(self._module, self._ignored):
            if name not in known:
                raise ValueError(
                    f"{name} was frozen when the plan began and is trained now, so ranks would "
                    "never exchange it: begin with it trainable, or start another fit"
                )
        self.outer.after_step()

    def synchronize(self) -> None:
        """Collective call: let replicas meet now, if any step was made since they last did."""
        self.outer.synchronize()

    def leave(self) -> None:
        """Stop following, with replicas that are equal. A collective call, unless it has ended."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        if not self._has_ended:
            self.synchronize()

    # ---- what strategies ask of any exchange -----------------------------------------------------

    def sign_in(self) -> None:
        """Nothing is left to say to ranks that wait: the watch answers by a thread of its own."""

    def step_skipped(self) -> None:
        """Raise RuntimeError: a step that is skipped on one rank alone breaks the count."""
        raise RuntimeError(
            "a GradScaler has skipped a step, and ranks that train alone have to make every step: "
            "use precision bf16-mixed or 32-true"
        )

    def statistics(self, *, reset: bool = True) -> ExchangeStatistics:
        """Return what was exchanged since the start.

        Outer steps are too rare for shorter periods, so that `reset` changes nothing.
        """
        found = self.outer.statistics
        return ExchangeStatistics(
            steps=found.local_steps,
            bytes_sent=found.bytes_sent,
            dense_bytes=found.dense_bytes,
            exposed_seconds=found.exchange_seconds,
            exchange_seconds=found.exchange_seconds,
            residual_norm=found.residual_norm,
            density=self.method.sent_share,
        )

    def state_dict(self) -> dict[str, Any]:
        """Collective call: the outer state of all replicas, complete on rank 0.

        `ranks` has one entry per replica: kind -> parameter name -> tensor. Each has the replica's
        "residual"; the first has what is equal on all ("momentum", "anchor"). Replicas meet before.
        """
        group = dist.group.WORLD
        assert group is not None
        ranks = gather_state(self._own_state(), senders=self.outer.holders, group=group)
        return {"step": self.outer.local_steps, "method": self.method.name, "ranks": ranks}

    def own_state_dict(self) -> dict[str, Any]:
        """Return this rank's part of `state_dict`, as its `state`. A collective call."""
        state, rank, holders = self._own_state(), dist.get_rank(), self.outer.holders
        return {
            "step": self.outer.local_steps,
            "method": self.method.name,
            "holders": len(holders),
            "position": holders.index(rank) if rank in holders else None,
            "state": state if rank in holders else {},
        }

    def _own_state(self) -> State:
        self.synchronize()
        state = self.outer.state_dict()
        kinds = ["residual"]
        if dist.get_rank() == 0:
            kinds.append("momentum")
            # of float32, the anchor is the parameters
            if any(p.dtype != torch.float32 for p in self.outer.parameters.tensors.values()):
                kinds.append("anchor")
        return {kind: state[kind] for kind in kinds if kind in state}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what rank 0 saved, given to all ranks; parameters are loaded before.

        On another number of replicas each gets the mean of the residuals.

        Raises:
            ValueError: for the state of another method or model.
        """
        if state["method"] != self.method.name:
            raise ValueError(
                f"the saved exchange state is of method={state['method']!r}, this exchange has "
                f"{self.method.name!r}"
            )
        parameters = self.outer.parameters.tensors
        ranks = state["ranks"]
        # what is equal on all: beside the anchor, which is the parameters where it was not saved
        anchor = {name: parameter.detach() for name, parameter in parameters.items()}
        shared = {kind: of for kind, of in ranks[0].items() if kind != "residual"}
        # (`LocalStepsStrategy` of 0.1.0 kept that beside `ranks`)
        shared |= {kind: state[kind] for kind in ("anchor", "momentum") if kind in state}
        holders, ranks_here = len(self.outer.holders), dist.get_world_size()
        own = own_state(
            [{kind: of for kind, of in each.items() if kind == "residual"} for each in ranks],
            position=dist.get_rank() * holders // ranks_here,
            holders=holders,
            numels={name: parameter.numel() for name, parameter in parameters.items()},
        )
        steps = state["step"] if "step" in state else state["local_steps"]
        counts = {"pending_steps": 0, "local_steps": steps}
        counts["outer_steps"] = steps // self.method.every
        self.outer.load_state_dict({"anchor": anchor, **shared, **own, **counts})

    def close(self) -> None:
        """Do what `end` does, and destroy process groups; alike on all ranks."""
        self._has_ended = True
        self.outer.close()

    def end(self) -> None:
        """End the watch over ranks; this rank may do so alone. Replicas do not meet any more."""
        self._has_ended = True
        self.outer.end()

"""An engine runs one plan on one rank: it puts the module on the mesh, steps, saves, loads, and takes it back.

A plain object that knows torch, not Lightning; ten lines of plain PyTorch drive it:

    engine = build_engine(plan, module, device=device)
    model = engine.parallelize()                 # call the model through this
    optimizer = torch.optim.AdamW(module.parameters())
    engine.attach_optimizers([optimizer])
    for batch in loader:
        model(batch).backward(); optimizer.step(); optimizer.zero_grad()
    engine.release()                             # the module is whole again
    engine.close()                               # once `exchange_state` is saved, where the plan has a gradient exchange
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from typing_extensions import override

from lightning_topt.communication.hook import CompressedExchange
from lightning_topt.communication.options import ExchangeOptions
from lightning_topt.communication.topology import Topology
from lightning_topt.execution import full_state
from lightning_topt.execution.blocks import check_blocks, check_runs, owned_pieces, owners_of, recomputed_blocks
from lightning_topt.execution.checkpointing import apply_recomputation, remove_recomputation
from lightning_topt.execution.mesh import build_mesh, check_world_size
from lightning_topt.execution.sharded import Sharding, broadcast_buffers
from lightning_topt.optim.parallel_step import ParallelStep, install_parallel_step
from lightning_topt.plan.parallel_plan import ParallelPlan

State = dict[str, Any]


class Engine(ABC):
    """What every way of running a plan can do. `release` undoes `parallelize`; both are collective calls."""

    def __init__(self, plan: ParallelPlan, module: nn.Module, *, device: torch.device) -> None:
        check_world_size(plan, dist.get_world_size())
        check_runs(plan)
        check_blocks(plan, module)
        self.plan, self.module, self.device = plan, module, device
        self.optimizers: list[Optimizer] = []
        self.exchange: CompressedExchange | None = None  # of the plan's gradients, once parallelized

    @abstractmethod
    def parallelize(self) -> nn.Module:
        """Apply the plan to the module in place; returns what forward must be called through."""

    @abstractmethod
    def attach_optimizers(self, optimizers: Sequence[Optimizer]) -> None:
        """Make ``step`` of optimizers that were built over the parallelized module follow the plan."""

    @abstractmethod
    def no_sync(self) -> AbstractContextManager[None]:
        """Within it, backward accumulates gradients and leaves the exchange to a later backward, where that helps."""

    @abstractmethod
    def before_forward(self) -> None:
        """To be called before each forward pass."""

    @abstractmethod
    def module_state(self) -> State:
        """The module's full state on rank 0; other ranks may return a part. A collective call."""

    @abstractmethod
    def load_module_state(self, state: Mapping[str, Any], *, strict: bool = True) -> None:
        """Load a full state."""

    @abstractmethod
    def optimizer_state(self, optimizer: Optimizer) -> State:
        """The optimizer's full state on rank 0; other ranks may return a part. A collective call."""

    @abstractmethod
    def load_optimizer_state(self, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
        """Load a full state; each rank keeps its part."""

    @abstractmethod
    def optimizer_state_to_host(self) -> None:
        """Take the optimizers' state off the device for good: `optimizer_state` still returns it. A collective call."""

    @abstractmethod
    def release(self) -> None:
        """Undo `parallelize` and `attach_optimizers`: the module is whole and plain on every rank."""

    def return_optimizer_state(self, optimizer: Optimizer) -> None:
        """Give an optimizer that is used again after `release` its whole state, on every rank. A collective call."""
        return None

    def exchange_state(self) -> State | None:
        """What the gradient exchange holds back on all ranks, whole on rank 0, also after `release`; None without one.

        A collective call.
        """
        return None if self.exchange is None else self.exchange.state_dict()

    def load_exchange_state(self, state: Mapping[str, Any]) -> None:
        """Take over what rank 0 saved, given to all ranks. Raises ValueError for the state of another method or model."""
        assert self.exchange is not None, "the plan has no gradient exchange"
        self.exchange.load_state_dict(state)

    def close(self) -> None:
        """End what outlives `release`: the thread and the memory of the gradient exchange."""
        if self.exchange is not None:
            self.exchange.close()
            self.exchange = None


class ReplicatedEngine(Engine):
    """Whole gradients on every rank (ZeRO stages 0 and 1), through torch's DistributedDataParallel.

    Where the plan has a gradient exchange, that is its communication hook; see `build_engine`.
    """

    def __init__(
        self,
        plan: ParallelPlan,
        module: nn.Module,
        *,
        device: torch.device,
        wrap: Callable[[nn.Module], nn.Module] | None = None,
        topology: Topology | None = None,
        nonfinite: str = "error",
    ) -> None:
        super().__init__(plan, module, device=device)
        self._wrap = wrap or self._wrap_ddp
        self._topology, self._nonfinite = topology, nonfinite
        self._owners: dict[Tensor, int] = {}
        self._steps: dict[Optimizer, ParallelStep] = {}
        self._model: nn.Module = module

    def _wrap_ddp(self, module: nn.Module) -> nn.Module:
        device_ids = None if self.device.type == "cpu" else [self.device.index]
        return DistributedDataParallel(module.to(self.device), device_ids=device_ids, gradient_as_bucket_view=True)

    @override
    def parallelize(self) -> nn.Module:
        apply_recomputation(self.module, recomputed_blocks(self.plan))
        self._model = self._wrap(self.module)
        if self.plan.gradient_exchange is not None:
            self.exchange = self._register(replace(self.plan.gradient_exchange, nonfinite=self._nonfinite))
        self._owners = owners_of(self.plan, self.module)
        return self._model

    def _register(self, options: ExchangeOptions) -> CompressedExchange:
        assert isinstance(self._model, DistributedDataParallel)
        exchange = CompressedExchange(options, topology=self._topology, device=self.device)
        exchange.register(self._model)
        return exchange

    @override
    def attach_optimizers(self, optimizers: Sequence[Optimizer]) -> None:
        self.optimizers = list(optimizers)
        for optimizer in self.optimizers:
            if pieces := owned_pieces(optimizer, self._owners):
                self._steps[optimizer] = install_parallel_step(optimizer, pieces=pieces)

    @override
    def no_sync(self) -> AbstractContextManager[None]:
        if isinstance(self._model, DistributedDataParallel):
            return self._model.no_sync()
        return nullcontext()

    @override
    def before_forward(self) -> None:
        return None

    @override
    def module_state(self) -> State:
        return self.module.state_dict()

    @override
    def load_module_state(self, state: Mapping[str, Any], *, strict: bool = True) -> None:
        self.module.load_state_dict(state, strict=strict)

    @override
    def optimizer_state(self, optimizer: Optimizer) -> State:
        step = self._steps.get(optimizer)
        if step is None:
            return optimizer.state_dict()
        step.consolidate_state_dict()
        return step.state_dict() if dist.get_rank() == 0 else {}

    @override
    def load_optimizer_state(self, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
        optimizer.load_state_dict(dict(state))

    @override
    def optimizer_state_to_host(self) -> None:
        for optimizer in self.optimizers:
            for values in optimizer.state.values():
                values.update({k: v.cpu() for k, v in values.items() if isinstance(v, Tensor)})

    @override
    def release(self) -> None:
        for step in self._steps.values():
            step.detach()
        remove_recomputation(self.module)
        self._model, self.optimizers = self.module, []


class ShardedEngine(Engine):
    """Sharded gradients, and sharded parameters where the plan says so (ZeRO stages 2 and 3), through torch's FSDP2.

    Optimizers may have been built before `parallelize`: they follow the parameters there and, in `release`, back. Their
    state stays in shards then, for checkpoints, unless it is wanted (`return_optimizer_state`).
    """

    def __init__(self, plan: ParallelPlan, module: nn.Module, *, device: torch.device) -> None:
        super().__init__(plan, module, device=device)
        self._sharding: Sharding | None = None
        self._after: dict[Optimizer, State] = {}  # states once released: in shards, or whole on the host of rank 0
        self._on_host = False

    @property
    def sharding(self) -> Sharding:
        """The applied sharding."""
        assert self._sharding is not None, "parallelize() comes first"
        return self._sharding

    @override
    def parallelize(self) -> nn.Module:
        apply_recomputation(self.module, recomputed_blocks(self.plan))
        mesh = build_mesh(self.plan, self.device)
        self._sharding = Sharding(self.module, self.plan, mesh=mesh, device=self.device)
        return self._sharding.root

    @override
    def attach_optimizers(self, optimizers: Sequence[Optimizer]) -> None:
        self.optimizers = list(optimizers)
        replaced = self.sharding.replaced
        for optimizer in self.optimizers:
            full_state.follow_parameters(optimizer, replaced)

    @override
    def no_sync(self) -> AbstractContextManager[None]:
        # Every backward reduces into the shards: keeping whole gradients until the last one would need the very memory
        # that a sharded plan was chosen to save.
        return nullcontext()

    @override
    def before_forward(self) -> None:
        broadcast_buffers(self.module)

    @override
    def module_state(self) -> State:
        self.sharding.reshard()
        return full_state.gather_module_state(self.module.state_dict())

    @override
    def load_module_state(self, state: Mapping[str, Any], *, strict: bool = True) -> None:
        self.sharding.reshard()
        self.module.load_state_dict(full_state.shard_module_state(state, self.module.state_dict()), strict=strict)

    @override
    def optimizer_state(self, optimizer: Optimizer) -> State:
        if self._on_host:
            return self._after[optimizer]
        state = self._after[optimizer] if optimizer in self._after else optimizer.state_dict()
        return full_state.gather_sharded_optimizer_state(state)

    @override
    def load_optimizer_state(self, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
        optimizer.load_state_dict(full_state.shard_optimizer_state(optimizer, state))

    @override
    def optimizer_state_to_host(self) -> None:
        self._after = {optimizer: self.optimizer_state(optimizer) for optimizer in self.optimizers}
        self._on_host = True

    @override
    def return_optimizer_state(self, optimizer: Optimizer) -> None:
        if self._on_host:
            box = [self._after[optimizer]]
            dist.broadcast_object_list(box, 0)
            optimizer.load_state_dict(box[0])
        else:
            gathered = full_state.gather_sharded_optimizer_state(self._after.pop(optimizer), everywhere=True)
            optimizer.load_state_dict(gathered)

    @override
    def release(self) -> None:
        if self._sharding is not None:
            if not self._on_host:
                self._after = {optimizer: optimizer.state_dict() for optimizer in self.optimizers}
            back = {new: original for original, new in self._sharding.replaced.items()}
            for optimizer in self.optimizers:
                optimizer.state.clear()
                full_state.follow_parameters(optimizer, back)
            self._sharding.remove()
            self._sharding = None
        remove_recomputation(self.module)
        self.optimizers = []


def build_engine(
    plan: ParallelPlan,
    module: nn.Module,
    *,
    device: torch.device,
    wrap: Callable[[nn.Module], nn.Module] | None = None,
    topology: Topology | None = None,
    nonfinite: str = "error",
) -> Engine:
    """The engine that runs `plan`.

    `wrap` replaces the default DistributedDataParallel wrapping of replicated plans. `topology` (None: from the environment)
    and `nonfinite` (see `ExchangeOptions`) are for their gradient exchange.
    Raises PlanError when the plan does not belong to this module or this number of ranks.
    """
    if not plan.keeps_gradients_whole:
        return ShardedEngine(plan, module, device=device)
    return ReplicatedEngine(plan, module, device=device, wrap=wrap, topology=topology, nonfinite=nonfinite)

"""This is what every technique is to the planner and the engine, which share the registry of
techniques and nothing else.

A technique takes care of some entries of an `OpConfig` (its storage, its recomputation, ...), in
one file with three faces:

    what is legal            claims, check, configs
    what it costs            takes_part, collectives, lifetimes, plan_lifetimes, add_seconds,
                             plan_seconds, update_share, result_bytes
    how it is applied        apply, which returns how to undo it

Adding one takes its own file and one line of the registry.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from lightning_topt.communication.exchange_method import GradientMethod
from lightning_topt.communication.hook import CompressedExchange
from lightning_topt.communication.topology import Topology, own_group
from lightning_topt.costs.communication import Collective
from lightning_topt.costs.lifetimes import Lifetime
from lightning_topt.costs.training_step import TrainingStep
from lightning_topt.graph.joint_module import JointModule
from lightning_topt.graph.mesh_axes import Mesh
from lightning_topt.graph.op_config import OpConfig
from lightning_topt.graph.op_graph import Block, Parameter
from lightning_topt.optim.parallel_step import ParallelStep
from lightning_topt.techniques.tensor_parallel.split_parameters import SplitTensor


@dataclass(frozen=True)
class RunOptions:
    """`RunOptions` are what a run brings besides its plan.

    `ddp` are arguments of torch's DistributedDataParallel; `hook` with its `hook_state` is the
    user's communication hook for it. `topology` (None: from the environment) and `nonfinite` (see
    `ExchangeSettings`) are for the plan's gradient exchange.
    """

    ddp: Mapping[str, Any] = field(default_factory=dict)
    hook: Callable[..., Any] | None = None
    hook_state: Any = None
    topology: Topology | None = None
    nonfinite: str = "error"


@dataclass
class ParallelModel:
    """A module while techniques are applied to it, in the order of the registry.

    `configs` has the placement of every block by its name (``""``: all outside the named ones),
    `parameters` the module's own parameters by block and name (all names of a tied one). `root` is
    what forward is to be called through: techniques replace it by a wrapper around it. With several
    microbatches, random numbers and buffers of each are the caller's affair, and so are buffers
    where `joint` modules run the batches of several ranks.
    """

    module: nn.Module
    mesh: Mesh
    configs: Mapping[str, OpConfig]
    parameters: Mapping[str, Mapping[str, nn.Parameter]]
    device: torch.device
    root: nn.Module
    exchange: GradientMethod | None = None
    options: RunOptions = field(default_factory=RunOptions)
    # slices that are parameters now
    split: Mapping[Tensor, SplitTensor] = field(default_factory=dict)
    # for arguments, before other hooks see them
    before_block: Callable[[nn.Module, Any, Any], Any] | None = None
    num_microbatches: int = 1
    joint: Sequence[JointModule] = ()

    def blocks_of(self, technique: Technique) -> list[str]:
        """Return the names of the blocks that `technique` takes care of something of."""
        return [
            name for name, config in self.configs.items() if technique.claims(config, self.mesh)
        ]

    def parameters_where(self, condition: Callable[[OpConfig], bool]) -> dict[str, nn.Parameter]:
        """Return the parameters of the blocks whose placement meets `condition`, by all their
        names.
        """
        chosen = [
            self.parameters[block] for block, config in self.configs.items() if condition(config)
        ]
        return {name: parameter for of_block in chosen for name, parameter in of_block.items()}

    @cached_property
    def data_group(self) -> dist.ProcessGroup | None:
        """The ranks among which the batch is split, with this one; None where these are all. Made
        by the first look, which is a collective call.
        """
        if not self.mesh.tensor_axes and not self.mesh.pipeline_axes:
            return None
        return own_group(self.mesh.groups_along(self.mesh.data_axes))

    def device_mesh(self, *, inner: int) -> DeviceMesh:
        """Return the ranks that split the batch as a mesh of the module's device: rows of `inner`
        neighbours, one dim where one row has them all.

        A collective call. Beside DDP its groups are its own: the collective calls of both may then
        run in any order.
        """
        kind, parts = self.device.type, self.mesh.groups_along(self.mesh.data_axes)
        if inner == self.mesh.data_parallel_size:
            beside_ddp = any(has_whole_gradients(config) for config in self.configs.values())
            group = own_group(parts) if beside_ddp or self.mesh.tensor_axes else dist.group.WORLD
            assert group is not None
            return DeviceMesh.from_group(group, kind, mesh_dim_names=("data",))
        rows = [torch.tensor(part).view(-1, inner) for part in parts]
        groups = [
            own_group([ranks for of_part in rows for ranks in of_part.T.tolist()]),
            own_group([ranks for of_part in rows for ranks in of_part.tolist()]),
        ]
        own = next(of_part for of_part in rows if dist.get_rank() in of_part)
        return DeviceMesh.from_group(
            groups, kind, mesh=own, mesh_dim_names=("data_replicate", "data_shard")
        )

    def broadcast(self, tensors: Iterable[Tensor]) -> None:
        """Move `tensors` to the module's device; those of the first rank that splits the batch
        count. A collective call.
        """
        once = list({id(tensor): tensor for tensor in tensors}.values())
        with torch.no_grad():
            for tensor in once:
                tensor.data = tensor.data.to(self.device).contiguous()
            group = self.data_group
            for work in [
                dist.broadcast(t.data, group=group, group_src=0, async_op=True) for t in once
            ]:
                work.wait()


def _leave_alone(_: Optimizer) -> ParallelStep | None:
    return None


@dataclass(frozen=True)
class Applied:
    """An `Applied` is what a technique did to a model. All members are collective calls where the
    technique communicates.

    `undo` gives the module back as it was, in reverse order of application. `replaced` has the
    parameter in the place of each original one. `attach` makes the step of an optimizer over the
    parameters follow, and returns the step that shares it over ranks, if there is one. Within
    `no_sync` gradients are accumulated and their exchange left to a later backward, where that
    helps. `reshard` releases gathered parameters. `split` says how parameters, which stay the same
    objects, are cut along tensor axes; forward and backward must run within `around_step`, and what
    a step returns goes through `whole`. `joined` makes them whole for as long as its context lasts.
    After ``take_turns(True)`` all ranks of a tensor group run the same batch, where otherwise each
    runs its own.
    """

    undo: Callable[[], None]
    replaced: Mapping[Tensor, Tensor] = field(default_factory=dict)
    split: Mapping[Tensor, SplitTensor] = field(default_factory=dict)
    around_step: Callable[[], AbstractContextManager[Any]] = nullcontext
    whole: Callable[[Any], Any] = lambda value: value
    attach: Callable[[Optimizer], ParallelStep | None] = _leave_alone
    no_sync: Callable[[], AbstractContextManager[Any]] = nullcontext
    reshard: Callable[[], None] = lambda: None
    joined: Callable[[], AbstractContextManager[Any]] = nullcontext
    exchange: CompressedExchange | None = None
    take_turns: Callable[[bool], None] = lambda turns: None


def replaced_by(applied: Iterable[Applied]) -> dict[Tensor, Tensor]:
    """Return the parameter that is now in the place of each original one, techniques in the order
    of their application.
    """
    found: dict[Tensor, Tensor] = {}
    for each in applied:
        later = dict(each.replaced)
        found = {original: later.pop(now, now) for original, now in found.items()} | later
    return found


@dataclass
class BlockSeconds:
    """`BlockSeconds` are what techniques add to the computation of a block, in seconds.

    Exchanges are split into foreground (in the way of computation) and background (beside it, on
    the network); gathers come before the forward and before the backward of the block, its
    reduction starts after its backward; `reduce_last` comes once all reductions are over.
    `recompute` is forward computation within backward, `update` the optimizer step and what follows
    it, `broadcast` the exchange of its results.
    """

    recompute: float = 0.0
    # in forward, in backward
    gather_foreground: list[float] = field(default_factory=lambda: [0.0, 0.0])
    gather_background: list[float] = field(default_factory=lambda: [0.0, 0.0])
    reduce_foreground: float = 0.0
    reduce_background: float = 0.0
    reduce_last: float = 0.0
    update: float = 0.0
    broadcast: float = 0.0


@dataclass(frozen=True)
class Neighbours:
    """The blocks with sharded gradients around one of them, in the order of forward: after whose
    reduction, with whose gather, its buffers go. None: there is none, or (`previous`) all before it
    are reduced when the backward pass is over.
    """

    previous: str | None = None
    following: str | None = None


ALONE = Neighbours()


class Technique(ABC):
    """One way of training a model on several ranks."""

    @property
    @abstractmethod
    def name(self) -> str:
        """The name that people call it."""

    @abstractmethod
    def claims(self, config: OpConfig, mesh: Mesh) -> frozenset[str]:
        """Return the entries of `config` that the technique takes care of on `mesh`: ``"storage"``,
        ``"recompute"``, ...
        """

    def check(  # noqa: B027
        self, mesh: Mesh, configs: Mapping[str, OpConfig], exchange: GradientMethod | None
    ) -> None:
        """Raise ValueError for what the technique cannot do in a plan of these blocks; by default
        there is nothing.
        """

    # ---- what is legal ---------------------------------------------------------------------------

    def configs(
        self, step: TrainingStep, block: Block, so_far: Sequence[OpConfig]
    ) -> list[OpConfig]:
        """Return the configurations that it makes legal for `block`, beside those of earlier
        techniques, `so_far`; none by default: a plan's stages, and slices of parameters, are found
        by searches of their own.
        """
        return []

    # ---- what it costs ---------------------------------------------------------------------------

    def takes_part(self, step: TrainingStep, config: OpConfig) -> bool:
        """Return whether it adds to the costs of blocks under `config`; by default it does not."""
        return False

    def collectives(self, step: TrainingStep, block: str, config: OpConfig) -> Iterator[Collective]:
        """Yield what ranks exchange in a step for a block under `config`; nothing by default.

        The seconds of exchanges in `add_seconds` are those of these collectives.
        """
        return iter(())

    def lifetimes(
        self, step: TrainingStep, block: str, config: OpConfig, beside: Neighbours
    ) -> Iterator[Lifetime]:
        """Yield what a block under `config`, between the sharded blocks `beside` it, keeps in
        memory; nothing by default.
        """
        return iter(())

    def plan_lifetimes(self, step: TrainingStep, blocks: Collection[str]) -> Iterator[Lifetime]:
        """Yield what a plan that places `blocks` by this technique keeps beside what each of them
        does; nothing by default.
        """
        return iter(())

    def add_seconds(  # noqa: B027
        self, seconds: BlockSeconds, step: TrainingStep, block: str, config: OpConfig
    ) -> None:
        """Add to `seconds` what a block under `config` takes beside the computation of its
        operators; nothing by default.
        """

    def plan_seconds(self, step: TrainingStep, blocks: Collection[str]) -> float:
        """Return the seconds of the update that a plan takes beside what each of `blocks` does;
        none by default.
        """
        return 0.0

    def update_share(self, step: TrainingStep, parameter: Parameter, config: OpConfig) -> float:
        """Return the largest share of `parameter` that one rank updates at once, as far as this
        technique decides it.

        By default it does not: 1.
        """
        return 1.0

    def result_bytes(self, step: TrainingStep, parameter: Parameter, config: OpConfig) -> float:
        """Return the bytes of the buffer in which the updated `parameter` travels; none by
        default.
        """
        return 0.0

    # ---- how it is applied -----------------------------------------------------------------------

    @abstractmethod
    def apply(self, model: ParallelModel) -> Applied | None:
        """Do its part of the plan to `model`, in place; None where it has none. A collective
        call.
        """


def has_whole_gradients(config: OpConfig) -> bool:
    """Return whether every rank holds the whole gradients after the backward pass."""
    return not config.storage.sharded_axes("gradients")


def has_data_axes(mesh: Mesh) -> bool:
    """Return whether the batch is split along axes of `mesh`, and something runs along all
    others.
    """
    return bool(mesh.data_axes) and has_known_axes(mesh)


def has_known_axes(mesh: Mesh) -> bool:
    """Return whether every axis of `mesh` is one of data, of tensors or of stages."""
    return len(mesh.data_axes) + len(mesh.tensor_axes) + len(mesh.pipeline_axes) == len(mesh.axes)

"""The interface of a technique, as the planner and the engine see it.

A technique takes care of some entries of an `OpConfig` (its storage, its recomputation, ...). It is
one class in one module, with three faces:

    what is legal            claims, check, configs
    what it costs            takes_part, lifetimes, plan_lifetimes, add_seconds, plan_seconds,
                             update_share, result_bytes
    how it is applied        apply, which returns how to undo it

A new one takes its own module and one line of the registry. What a technique did to a module is its
`Applied`; the engine, and a `PipelineRun`, see those of a plan as one (`AppliedTechniques`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import debug as tensor_debug
from torch.distributed.tensor._redistribute import _gen_transform_infos
from torch.optim import Optimizer

from lightning_topt.communication.exchange_method import GradientMethod, LocalMethod
from lightning_topt.communication.hook import CompressedExchange
from lightning_topt.communication.rank_watch import RankWatch
from lightning_topt.communication.topology import Topology, own_group
from lightning_topt.costs.lifetimes import Lifetime
from lightning_topt.costs.training_step import TrainingStep
from lightning_topt.graph.mesh_axes import Mesh
from lightning_topt.graph.op_config import OpConfig
from lightning_topt.graph.op_graph import Block, Parameter
from lightning_topt.optim.parallel_step import ParallelStep
from lightning_topt.techniques.agreed_gathers import CalledBlocks
from lightning_topt.techniques.tensor_parallel.split_parameters import SplitTensor

if TYPE_CHECKING:
    from lightning_topt.communication.local_sgd import OuterSteps


FirstValues = None | str | Path | Mapping[str, str | Path]


@dataclass(frozen=True)
class RunOptions:
    """What a run brings besides its plan.

    Args:
        ddp: arguments of torch's DistributedDataParallel
        hook: the user's communication hook for it, with its `hook_state`
        topology: of the plan's gradient exchange; None: from the environment
        nonfinite: what the exchange does with gradients that are not finite, see `ExchangeSettings`
        watch: over the ranks of the run
        gather_dtype: of autocast, under which steps run: matrices in shards are gathered in it, as
            the plan says; None: in their own
        first_values: files of weights for a module on the meta device, or these by submodule; None:
            its methods give it values
        is_manual: backward passes and updates run inside of the root's forward
    """

    ddp: Mapping[str, Any] = field(default_factory=dict)
    hook: Callable[..., Any] | None = None
    hook_state: Any = None
    topology: Topology | None = None
    nonfinite: str = "error"
    watch: RankWatch | None = None
    gather_dtype: torch.dtype | None = None
    first_values: FirstValues = None
    is_manual: bool = False


@dataclass
class ParallelModel:
    """A module while techniques are applied to it, in the order of the registry.

    Args:
        module: the user's module
        mesh: the mesh of the plan
        configs: placement of every block by its name; ``""`` is all outside the named ones
        parameters: the module's own parameters by block and name, under all names of a tied one
        device: where the module runs
        root: what forward is called through; techniques replace it by a wrapper around it
        exchange: the plan's gradient exchange
        options: what the run brings besides the plan
        float32_gathers: the matrices that `gather_dtype` is not for
        split: how parameters that are slices now were cut
        before_block: moves the arguments of a block before other hooks see them
        num_microbatches: with several, the caller keeps random numbers and buffers of each
        stage_group: the ranks that split the batch with this one under a plan with stages
        made_groups: process groups that `own_group` made; the engine destroys them
        local_steps: how ranks that train alone meet; None: gradients are averaged in every step
        rows: this rank's part of parameters on the meta device, which FSDP2 takes there
        called: follows what FSDP2 gathers, once blocks are sharded
    """

    module: nn.Module
    mesh: Mesh
    configs: Mapping[str, OpConfig]
    parameters: Mapping[str, Mapping[str, nn.Parameter]]
    device: torch.device
    root: nn.Module
    exchange: GradientMethod | None = None
    options: RunOptions = field(default_factory=RunOptions)
    float32_gathers: Collection[str] = ()
    split: Mapping[Tensor, SplitTensor] = field(default_factory=dict)
    before_block: Callable[[nn.Module, Any, Any], Any] | None = None
    num_microbatches: int = 1
    stage_group: dist.ProcessGroup | None = None
    made_groups: list[dist.ProcessGroup] = field(default_factory=list)
    local_steps: LocalMethod | None = None
    rows: dict[Tensor, Tensor] = field(default_factory=dict)
    called: CalledBlocks | None = None

    def blocks_of(self, technique: Technique) -> list[str]:
        """Return the names of the blocks that `technique` takes care of something of."""
        return [
            name for name, config in self.configs.items() if technique.claims(config, self.mesh)
        ]

    def parameters_where(self, condition: Callable[[OpConfig], bool]) -> dict[str, nn.Parameter]:
        """Return the parameters of blocks whose placement meets `condition`, by all their names."""
        chosen = [
            self.parameters[block] for block, config in self.configs.items() if condition(config)
        ]
        return {name: parameter for of_block in chosen for name, parameter in of_block.items()}

    @cached_property
    def data_group(self) -> dist.ProcessGroup | None:
        """The ranks that split the batch with this one; None if that is all ranks.

        The first access creates the group, which is a collective call.
        """
        if self.stage_group is not None:
            return self.stage_group
        if not self.mesh.tensor_axes and not self.mesh.pipeline_axes:
            return None
        return self.own_group(self.mesh.groups_along(self.mesh.data_axes))

    def own_group(self, parts: Sequence[Sequence[int]]) -> dist.ProcessGroup:
        """Return the one of `parts` (ranks) that this rank is in, as a group of the plan.

        It lasts until the engine is closed. A collective call.
        """
        self.made_groups.append(group := own_group(parts))
        return group

    def device_mesh(self, *, inner: int) -> DeviceMesh:
        """Return the ranks that split the batch as a mesh of rows of `inner` neighbours.

        The mesh has one dim if one row holds them all, else two. A collective call. Beside DDP the
        mesh gets groups of its own, so that collectives of both may run in any order.
        """
        kind, parts = self.device.type, self.mesh.groups_along(self.mesh.data_axes)
        # one row: all data ranks share one tensor
        if inner == self.mesh.data_parallel_size:
            beside_ddp = any(has_unsharded_gradients(config) for config in self.configs.values())
            needs_own = beside_ddp or self.mesh.tensor_axes
            group = self.own_group(parts) if needs_own else dist.group.WORLD
            assert group is not None
            return DeviceMesh.from_group(group, kind, mesh_dim_names=("data",))
        # several rows (row, rank): shards along a row, replicas down a column
        rows = [torch.tensor(part).view(-1, inner) for part in parts]
        groups = [
            self.own_group([ranks for of_part in rows for ranks in of_part.T.tolist()]),
            self.own_group([ranks for of_part in rows for ranks in of_part.tolist()]),
        ]
        own = next(of_part for of_part in rows if dist.get_rank() in of_part)
        return DeviceMesh.from_group(
            groups, kind, mesh=own, mesh_dim_names=("data_replicate", "data_shard")
        )

    def broadcast(
        self, tensors: Iterable[Tensor], *, among: dist.ProcessGroup | None = None
    ) -> None:
        """Move `tensors` to the module's device, with the values of the first data rank.

        `among`: with those of the first of these ranks. A collective call.
        """
        once = list({id(tensor): tensor for tensor in tensors if not tensor.is_meta}.values())
        with torch.no_grad():
            for tensor in once:
                tensor.data = tensor.data.to(self.device)
            # what is contiguous travels as it is, the rest (channels-last) through a copy
            sent = [(tensor, tensor.data.contiguous()) for tensor in once]
            # all start before the first is waited for
            group = among or self.data_group
            for work in [
                dist.broadcast(t, group=group, group_src=0, async_op=True) for _, t in sent
            ]:
                work.wait()
            for tensor, values in sent:
                if not tensor.is_contiguous():
                    tensor.data.copy_(values)


def forget_meshes() -> None:
    """Empty DTensor's caches.

    DTensor takes meshes of the same ranks for equal, and gives a later one's tensors the mesh that
    it has seen first: with groups that may be gone, or as another rank in a fake group.
    """
    for name in (
        "_clear_sharding_prop_cache",
        "_clear_python_sharding_prop_cache",
        "_clear_fast_path_sharding_prop_cache",
    ):
        if (clear := getattr(tensor_debug, name, None)) is not None:
            clear()
    _gen_transform_infos.cache_clear()


def _leave_alone(_: Optimizer) -> ParallelStep | None:
    return None


@dataclass(frozen=True)
class Applied:
    """What a technique did to a model. Members are collective calls if the technique communicates.

    Args:
        undo: restores the module; called in reverse order of application
        replaced: the parameter in the place of each original one
        split: how parameters, which stay the same objects, are cut along tensor axes
        around_step: context that forward and backward must run in
        whole: makes what a step returns unsharded
        attach: makes an optimizer over the parameters follow; returns the step that shares its work
            over ranks, if there is one
        no_sync: context in which gradients are accumulated, and their exchange left to a later
            backward, if that helps
        reshard: releases gathered parameters
        meet: gets ready for a collective call that all ranks make in a step
        joined: context in which the parameters are unsharded
        exchange: the compressed gradient exchange, or that of replicas that train alone
    """

    undo: Callable[[], None] = lambda: None
    replaced: Mapping[Tensor, Tensor] = field(default_factory=dict)
    split: Mapping[Tensor, SplitTensor] = field(default_factory=dict)
    around_step: Callable[[], AbstractContextManager[Any]] = nullcontext
    whole: Callable[[Any], Any] = lambda value: value
    attach: Callable[[Optimizer], ParallelStep | None] = _leave_alone
    no_sync: Callable[[], AbstractContextManager[Any]] = nullcontext
    reshard: Callable[[], None] = lambda: None
    meet: Callable[[], None] = lambda: None
    joined: Callable[[], AbstractContextManager[Any]] = nullcontext
    exchange: CompressedExchange | OuterSteps | None = None


@final
class AppliedTechniques:
    """What each technique did, in the order of application; it is undone in the reverse order.

    `parameters` are those of the module before, by block and name. Methods are collective calls
    where techniques communicate.
    """

    def __init__(self, parameters: Mapping[str, Mapping[str, nn.Parameter]]) -> None:
        self._parameters = parameters
        self._applied: list[Applied] = []
        # How original parameters are cut along tensor axes, and the slices of present ones.
        self.split: dict[Tensor, SplitTensor] = {}
        self._slices: dict[Tensor, int] = {}
        self._is_joined = False

    def add(self, applied: Applied) -> None:
        """Add what the next technique did."""
        self._applied.append(applied)
        self.split.update(applied.split)
        # By present parameters, which callers have.
        now = self.replaced
        self._slices = {now[original]: how.slices for original, how in self.split.items()}

    def undo(self) -> None:
        """Give the module back as it was."""
        for applied in reversed(self._applied):
            applied.undo()
        self._applied, self.split, self._slices = [], {}, {}

    # ---- parameters ------------------------------------------------------------------------------

    @property
    def has_shards(self) -> bool:
        """Whether parameters are in shards or slices now."""
        return any(applied.replaced or applied.split for applied in self._applied)

    @property
    def replaced(self) -> dict[Tensor, Tensor]:
        """The parameter that is now in the place of each original one."""
        found: dict[Tensor, Tensor] = {}
        for applied in self._applied:
            # what a later technique replaced again is found under its original, the rest is new
            later = dict(applied.replaced)
            found = {original: later.pop(now, now) for original, now in found.items()} | later
        return found

    @property
    def attach(self) -> list[Callable[[Optimizer], ParallelStep | None]]:
        """The functions that make the step of an optimizer follow, one for each technique."""
        return [applied.attach for applied in self._applied]

    def slices_of(self, parameter: Tensor) -> int:
        """Return into how many slices along tensor axes a present parameter is cut."""
        return self._slices.get(parameter, 1)

    def split_names(self) -> dict[str, SplitTensor]:
        """Return how parameters are cut now, by their names; none are within `joined`."""
        if self._is_joined:
            return {}
        # Names of original parameters are those of present ones.
        named = (item for of_block in self._parameters.values() for item in of_block.items())
        return {name: self.split[parameter] for name, parameter in named if parameter in self.split}

    @contextmanager
    def joined(self) -> Generator[None]:
        """Unshard parameters in slices within."""
        with _entered(applied.joined for applied in self._applied):
            self._is_joined = True
            try:
                yield
            finally:
                self._is_joined = False

    def reshard(self) -> None:
        """Free gathered parameters."""
        for applied in self._applied:
            applied.reshard()

    def meet(self) -> None:
        """Get ready for a collective call that all ranks make in a step."""
        for applied in self._applied:
            applied.meet()

    # ---- steps -----------------------------------------------------------------------------------

    def around_step(self) -> AbstractContextManager[None]:
        """Return the context required around forward and backward."""
        return _entered(applied.around_step for applied in self._applied)

    def no_sync(self) -> AbstractContextManager[None]:
        """Return a context in which backward accumulates gradients without their exchange.

        A later backward exchanges them; techniques whose shards that would not help do it at once.
        """
        return _entered(applied.no_sync for applied in self._applied)

    @contextmanager
    def around_microbatch(self, is_last: bool) -> Generator[None]:
        """Run forward and backward of one microbatch within; the last one exchanges gradients."""
        # Gradients of all but the last are only added up.
        with nullcontext() if is_last else self.no_sync(), self.around_step():
            yield

    def whole(self, value: Any) -> Any:
        """Return what a step returned, with unsharded tensors; within `around_step`."""
        for applied in self._applied:
            value = applied.whole(value)
        return value


@contextmanager
def _entered(contexts: Iterable[Callable[[], AbstractContextManager[Any]]]) -> Generator[None]:
    # Enter what `contexts` make, in their order
    with ExitStack() as stack:
        for make in contexts:
            stack.enter_context(make())
        yield


@dataclass
class BlockSeconds:
    """Seconds that techniques add to the computation of a block.

    Exchanges have a foreground part, during which computation waits, and a background part beside
    it on the network. Gathers come before the forward and before the backward of the block. Its
    reduction starts after its backward; `reduce_last` comes once all reductions are over.
    `recompute` is forward computation within backward, `update` the optimizer step and what follows
    it, `broadcast` the exchanges of its results and with owners of parameters. `kernels` are those
    of forward and backward, relative to eager mode.
    """

    kernels: tuple[float, float] = (1.0, 1.0)
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
    """The blocks with sharded gradients around one of them, in the order of forward.

    The buffers of a block go after the reduction of `previous`, and with the gather of `following`.
    None: there is no such block. For `previous`, None also means that all before it are reduced
    when backward is over.
    """

    previous: str | None = None
    following: str | None = None


ALONE = Neighbours()


class Technique(ABC):
    """One way of training a model on several ranks."""

    name: str  # in messages and reports

    def claims(self, config: OpConfig, mesh: Mesh) -> frozenset[str]:
        """Return the entries of `config` that it takes care of on `mesh`, such as ``"storage"``.

        None by default.
        """
        return frozenset()

    def check(  # noqa: B027
        self, mesh: Mesh, configs: Mapping[str, OpConfig], exchange: GradientMethod | None
    ) -> None:
        """Raise ValueError for what it cannot do in a plan of these blocks; by default nothing."""

    # ---- what is legal ---------------------------------------------------------------------------

    def configs(
        self, step: TrainingStep, block: Block, so_far: Sequence[OpConfig]
    ) -> list[OpConfig]:
        """Return the configurations that it makes legal for `block`; none by default.

        `so_far` are those of earlier techniques. Stages of a plan, and slices of parameters, are
        found by searches of their own.
        """
        return []

    # ---- what it costs ---------------------------------------------------------------------------

    def takes_part(self, step: TrainingStep, config: OpConfig) -> bool:
        """Return whether it adds to the costs of blocks under `config`: by default if it claims."""
        return bool(self.claims(config, step.mesh))

    def lifetimes(
        self, step: TrainingStep, block: str, config: OpConfig, beside: Neighbours
    ) -> Iterator[Lifetime]:
        """Yield what a block under `config` keeps in memory; nothing by default.

        `beside` are the sharded blocks around it.
        """
        return iter(())

    def plan_lifetimes(self, step: TrainingStep, blocks: Collection[str]) -> Iterator[Lifetime]:
        """Yield memory of a plan that places `blocks` so, beyond that of each block."""
        return iter(())

    def add_seconds(  # noqa: B027
        self, seconds: BlockSeconds, step: TrainingStep, block: str, config: OpConfig
    ) -> None:
        """Add to `seconds` what a block takes beside its operators; nothing by default."""

    def plan_seconds(self, step: TrainingStep, blocks: Collection[str]) -> float:
        """Return seconds of the update beyond those of each of `blocks`; none by default."""
        return 0.0

    def update_share(self, step: TrainingStep, parameter: Parameter, config: OpConfig) -> float:
        """Return the largest share of `parameter` that one rank updates at once; 1 by default."""
        return 1.0

    def result_bytes(self, step: TrainingStep, parameter: Parameter, config: OpConfig) -> float:
        """Return the bytes of the buffer in which the updated `parameter` travels; 0 by default."""
        return 0.0

    # ---- how it is applied -----------------------------------------------------------------------

    @abstractmethod
    def apply(self, model: ParallelModel) -> Applied | None:
        """Do its part of the plan to `model`, in place; return None if it has none.

        A collective call.
        """


def restore_forward(holder: Any, kind: type[Any]) -> None:
    """Give `holder` its forward again, where one of this `kind` is in its place on the instance."""
    replaced = vars(holder).get("forward")
    if isinstance(replaced, kind):
        del holder.__dict__["forward"]
        # an attribute of the user's, or of another technique, was there before
        if getattr(holder, "forward", None) != replaced.forward:
            holder.forward = replaced.forward


def has_unsharded_gradients(config: OpConfig) -> bool:
    """Return whether every rank holds unsharded gradients after the backward pass."""
    return not config.storage.sharded_axes("gradients")


def shard_axes(config: OpConfig, *, is_trained: bool) -> tuple[int, ...]:
    """Return the axes along which a parameter is in shards between steps.

    FSDP2 keeps them with their gradients, also at level 2. A frozen one has none.
    """
    return config.storage.sharded_axes("gradients" if is_trained else "parameters")


def has_data_axes(mesh: Mesh) -> bool:
    """Return whether the batch is split along axes of `mesh`, and every axis is known."""
    return bool(mesh.data_axes) and has_known_axes(mesh)


def has_known_axes(mesh: Mesh) -> bool:
    """Return whether every axis of `mesh` is one of data, of tensors or of stages."""
    return len(mesh.data_axes) + len(mesh.tensor_axes) + len(mesh.pipeline_axes) == len(mesh.axes)

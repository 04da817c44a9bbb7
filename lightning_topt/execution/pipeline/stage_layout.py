"""What stages do and keep: parts of a step, parameters, buffers; and the groups of their ranks.

StepFlows             the calls of a step, the stage of each, what crosses between stages; traced
                      once for every kind of step and signature of a microbatch
PipelineGroups        this rank's place in the mesh: its pipeline, its data and tensor ranks
StageLayout           what each stage needs, and the ranks of a pipeline that hold it
NonLocalParameters    parameters that no stage of this rank needs: they give their memory back
StageBuffers          all ranks keep buffers, and the stage that changes one has it right
"""

from __future__ import annotations

from collections.abc import (
    Callable,
    Collection,
    Generator,
    Hashable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lightning_topt.communication.collectives import backend_of, travel_device
from lightning_topt.communication.topology import abort_groups, at_exit, destroy_groups, group_of
from lightning_topt.execution.pipeline.stage_pass import RandomOrder, StagePass
from lightning_topt.graph.flow_trace import trace_flow
from lightning_topt.graph.mesh_axes import Mesh
from lightning_topt.graph.step_flow import LeafSpec, StepFlow, TensorRef, assign_calls
from lightning_topt.graph.structures import PLAIN, tensors_in
from lightning_topt.techniques.ddp_wrapper import send_buffers

Pair = tuple[int, int]  # of ranks: sender, receiver
Step = Callable[[nn.Module, Any], Any]
_KEPT = 64  # flows that are known; others are made again
AT_ONCE = 8  # parameters that travel at the same time


@dataclass(frozen=True)
class Crossings:
    """Tensors that cross between stages in a microbatch.

    `targets` has the stages that need each, `specs` all about it but its elements, and
    `stage_of_call` the stage of each call.
    """

    targets: Mapping[TensorRef, tuple[int, ...]]
    specs: Mapping[TensorRef, LeafSpec]
    stage_of_call: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class StageFlow:
    """A step's flow, cut into stages, and the passes of this rank's stages on it.

    `stage_of_call` has the stage of each call, `crossings` what crosses between stages.
    """

    flow: StepFlow
    stage_of_call: tuple[int, ...]
    crossings: Crossings
    passes: StagePass

    @property
    def is_kept(self) -> bool:
        """Whether it serves later steps with microbatches of the same signature."""
        return not self.flow.reads_values


class StepFlows:
    """The flows of steps of `module`, on `device`; `stages` name the blocks of each stage.

    `of` traces: all ranks must ask for the same, in the same order. Once techniques are applied,
    `whole` makes split tensors full, and parameters are unsharded within
    `unsharded`. With `shares_casts` microbatches share 16-bit casts of parameters (`StagePass`).
    """

    def __init__(
        self,
        module: nn.Module,
        stages: Sequence[Collection[str]],
        *,
        device: torch.device,
        order: RandomOrder | None = None,
        shares_casts: bool = True,
    ) -> None:
        self._module, self._device, self._shares_casts = module, device, shares_casts
        self._stages = [tuple(blocks) for blocks in stages]
        self.order = RandomOrder() if order is None else order
        self.whole: Callable[[Any], Any] = lambda value: value
        self.unsharded: Callable[[], AbstractContextManager[Any]] = nullcontext
        self._submodules = list(module.modules())
        self._known: dict[Hashable, StageFlow] = {}
        # The modules of each stage in the first step, those in no named block too.
        self._modules: list[tuple[str, ...]] = []

    @property
    def units(self) -> list[str]:
        """The named blocks."""
        return [block for blocks in self._stages for block in blocks]

    def of(self, step: Step, microbatches: Sequence[object]) -> list[StageFlow]:
        """Return the flow of `step` on each microbatch."""
        # Modes of modules and frozen parameters may change what a step calls.
        modes = (
            tuple([submodule.training for submodule in self._submodules]),
            tuple([parameter.requires_grad for parameter in parameters_in(self._submodules)]),
        )
        # A step is known by its code, or by its class.
        function = getattr(step, "__func__", step)
        code: Hashable = getattr(function, "__code__", type(step).__qualname__)
        common = (code, torch.is_grad_enabled(), modes)
        found = []
        for microbatch in microbatches:
            key = (common, signature(microbatch))
            flow = self._known.get(key)
            if flow is None:
                flow = self._trace(step, microbatch)
                if flow.is_kept:
                    if len(self._known) >= _KEPT:
                        del self._known[next(iter(self._known))]
                    self._known[key] = flow
            found.append(flow)
        return found

    def _trace(self, step: Step, microbatch: object) -> StageFlow:
        with self.unsharded():
            flow = trace_flow(self._module, step, microbatch, units=self.units, device=self._device)
        # Blocks of each stage. In later steps units stay where the first step had them, and some
        # may be missing.
        stages = self._stages
        if self._modules:
            called = {call.module for call in flow.calls}
            stages = [tuple(name for name in names if name in called) for names in self._modules]
        stage_of_call = assign_calls(flow, stages)
        if not self._modules:
            # For each stage, the modules that only this stage calls.
            users: dict[str, set[int]] = {}
            for call, stage in zip(flow.calls, stage_of_call, strict=True):
                users.setdefault(call.module, set()).add(stage)
            self._modules = [
                tuple(name for name, where in users.items() if where == {stage})
                for stage in range(len(self._stages))
            ]
        # What crosses between stages, and the passes that make and use it.
        targets = flow.crossings(stage_of_call)
        crossings = Crossings(targets, {ref: flow.spec(ref) for ref in targets}, stage_of_call)
        passes = StagePass(
            self._module,
            flow,
            stage_of_call,
            units=self.units,
            device=self._device,
            order=self.order,
            whole=lambda value: self.whole(value),  # known once techniques have been applied
            shares_casts=self._shares_casts,
        )
        return StageFlow(flow, stage_of_call, crossings, passes)


def signature(value: object) -> Hashable:
    """Return all about a microbatch that a flow may depend on.

    That are shapes and dtypes of its tensors, and its other values; of floats the type alone.
    """
    if isinstance(value, Tensor):
        return tuple(value.shape), value.dtype, value.requires_grad
    if isinstance(value, float | complex):
        return type(value).__name__
    if isinstance(value, PLAIN):
        return value
    if isinstance(value, Mapping):
        return type(value), tuple((key, signature(item)) for key, item in value.items())
    if isinstance(value, list | tuple):
        return type(value), tuple(map(signature, value))
    return type(value), tuple(map(signature, tensors_in(value)))


def parameters_in(modules: Iterable[nn.Module]) -> Iterator[nn.Parameter]:
    """Yield the own parameters of each of `modules`; one that several share more than once.

    To walk all modules anew takes longer than a small pass.
    """
    for module in modules:
        for parameter in module._parameters.values():
            if parameter is not None:
                yield parameter


def loss_of_step(result: object) -> Tensor:
    """Return the loss that a step returned. Raises ValueError where it is none."""
    if not isinstance(result, Tensor) or result.numel() != 1:
        raise ValueError(
            "a step under a plan with stages returns its loss, one number, for every microbatch; "
            f"got {type(result).__name__}"
        )
    return result


# ---- ranks ---------------------------------------------------------------------------------------


class PipelineGroups:
    """This rank's place in the mesh, and the process groups of a plan with stages.

    Making it, and its methods, are collective calls of all ranks, but for `abort`.

    Attributes:
        mesh: the plan's.
        rank: the place along the pipeline.
        pipeline: the ranks of this pipeline.
        pipeline_group: their group.
        host_group: the same ranks on gloo, for values that are in memory of the host.
        data_group: the ranks that run the same stages on other parts of the batch, or this alone.
        data: the same; None: one part.
        data_rank: this rank's part.
        tensor: the ranks that hold slices of the same stages; None without tensor axes.
    """

    def __init__(self, mesh: Mesh) -> None:
        self.mesh, rank = mesh, dist.get_rank()
        self.rank, self.data_rank = mesh.pipeline_rank(rank), mesh.data_rank(rank)
        self.pipeline = tuple(mesh.pipeline_of(rank))
        self._made: list[dist.ProcessGroup] = []
        self._call_off: Callable[[], None] | None = None
        # Groups are made in the same order on all ranks.
        pipelines = mesh.groups_along(mesh.pipeline_axes)
        self.pipeline_group = self.own(pipelines)
        self.host_group = self.on_host(pipelines, self.pipeline_group)
        self.data_group = self.own(mesh.groups_along(mesh.data_axes))
        self.data = self.data_group if mesh.data_parallel_size > 1 else None
        self.tensor = self.own(mesh.groups_along(mesh.tensor_axes)) if mesh.tensor_axes else None

    def make(
        self, parts: Sequence[Sequence[int]], *, backend: str | None = None
    ) -> dist.ProcessGroup | None:
        """Return the one of `parts` (ranks) that this rank is in as a group, if there is one.

        It lasts as long as the others.
        """
        if (group := group_of(parts, backend=backend)) is not None:
            self._keep([*self._made, group])
        return group

    def own(self, parts: Sequence[Sequence[int]]) -> dist.ProcessGroup:
        """Do as `make` does where each rank is in one of `parts`."""
        group = self.make(parts)
        assert group is not None
        return group

    def on_host(
        self, parts: Sequence[Sequence[int]], group: dist.ProcessGroup
    ) -> dist.ProcessGroup:
        """Return a group on gloo of the ranks of `group`, this rank's of `parts`; it may be that.

        Raises RuntimeError, with the way out, where none can be made.
        """
        if backend_of(torch.device("cpu"), group) == "gloo":
            return group
        try:
            made = self.make(parts, backend="gloo")
        except RuntimeError as error:
            raise RuntimeError(
                "a pipeline needs a process group on gloo beside NCCL's, and it could not be made: "
                "set GLOO_SOCKET_IFNAME to the network interface by which the machines reach each "
                f"other, such as eth0, on all of them ({error})"
            ) from error
        assert made is not None
        return made

    def destroy(self) -> None:
        """Destroy all groups but that of the data ranks. Nothing may be under way on any rank."""
        destroy_groups([group for group in self._made if group is not self.data], meets=True)
        # Optimizers collect their states there, until `close`.
        self._keep([] if self.data is None else [self.data])

    def close(self) -> None:
        """Destroy what is left, where nothing of the plan is asked for any more."""
        destroy_groups(self._made, meets=True)
        self._keep([])

    def abort(self) -> None:
        """End what is under way, after an error: else the device, and so the process, waits."""
        self._keep(abort_groups(self._made))

    def _keep(self, groups: list[dist.ProcessGroup]) -> None:
        # Have `groups` aborted at the end of the process, as long as there are any.
        # Without one `atexit` lets go of all, whose threads and descriptors end with them.
        if self._call_off is not None:
            self._call_off()
        self._call_off = at_exit(self.abort) if groups else None
        self._made = groups

    @contextmanager
    def at_any_time(self) -> Generator[dist.ProcessGroup]:
        """Yield the group of the pipeline, made anew for this where it has been destroyed."""
        if self.pipeline_group in self._made:
            yield self.pipeline_group
            return
        group = self.own(self.mesh.groups_along(self.mesh.pipeline_axes))
        yield group
        self._keep([other for other in self._made if other is not group])
        destroy_groups([group], meets=True)

    @property
    def saves(self) -> bool:
        """Whether this rank's pipeline is that of rank 0, which writes checkpoints."""
        return 0 in self.pipeline

    def sharing(self, holders: Iterable[Sequence[int]]) -> dict[tuple[int, ...], dist.ProcessGroup]:
        """Return for each of `holders` that this rank is in the group of its ranks.

        `holders` are sets of ranks of a pipeline. A group has those of all data ranks. A
        collective call of all ranks, with equal `holders`.
        """
        mesh, found = self.mesh, {}
        for places in sorted({tuple(sorted(places)) for places in holders}):
            # All ranks make all groups, in the same order.
            for ranks in mesh.groups_along([*mesh.pipeline_axes, *mesh.data_axes]):
                sharing = [rank for rank in ranks if mesh.pipeline_rank(rank) in places]
                if (group := self.make([sharing])) is not None:
                    found[places] = group
        return found


@dataclass(frozen=True)
class StageLayout:
    """What each stage needs: stage s runs on rank ``rank_of_stage[s]`` of a pipeline.

    ``parameters[s]`` are the parameters that it needs, by their first names in the module. Those
    that no stage needs are on all ranks. `buffers` has the stage that changes each buffer which
    one changes.
    """

    rank_of_stage: tuple[int, ...]
    parameters: tuple[frozenset[str], ...]
    buffers: Mapping[str, int]

    @classmethod
    def of_flow(
        cls,
        flow: StepFlow,
        stage_of_call: Sequence[int],
        module: nn.Module,
        *,
        rank_of_stage: Sequence[int],
    ) -> StageLayout:
        """Return the layout of `module` for a step with the calls of `flow`."""
        # First names: a parameter that several modules share is one.
        names = {parameter: name for name, parameter in module.named_parameters()}
        needed: list[set[str]] = [set() for _ in rank_of_stage]
        for call, stage in zip(flow.calls, stage_of_call, strict=True):
            needed[stage] |= {
                names[parameter] for parameter in module.get_submodule(call.module).parameters()
            }
            # Parameters that code around the call reads.
            needed[stage] |= call.reads
        needed[-1] |= flow.end_reads
        return cls(
            tuple(rank_of_stage),
            tuple(map(frozenset, needed)),
            written_buffers(flow, stage_of_call),
        )

    def stages_of(self, name: str) -> tuple[int, ...]:
        """Return the stages that need the parameter `name`; none where nothing does."""
        return tuple(stage for stage, needed in enumerate(self.parameters) if name in needed)

    def holders(self, name: str) -> tuple[int, ...]:
        """Return the ranks of the pipeline that keep a parameter, the owner first; none: all."""
        return tuple(dict.fromkeys(self.rank_of_stage[stage] for stage in self.stages_of(name)))


def written_buffers(flow: StepFlow, stage_of_call: Sequence[int]) -> dict[str, int]:
    """Return the stage that changes each buffer which a step changes; of several the last."""
    found = {
        name: stage
        for call, stage in zip(flow.calls, stage_of_call, strict=True)
        for name in call.writes
    }
    return found | dict.fromkeys(flow.end_writes, max(stage_of_call, default=0))


# ---- parameters ----------------------------------------------------------------------------------


def place_parameters(
    module: nn.Module, layout: StageLayout, groups: PipelineGroups, *, device: torch.device
) -> NonLocalParameters:
    """Give all ranks the parameters and buffers of rank 0, and free those that stages do not need.

    A collective call of all ranks.
    """
    parameters = dict(module.named_parameters())
    holders = {name: ranks for name in parameters if (ranks := layout.holders(name))}
    placed = NonLocalParameters(module, holders=holders, group=groups.pipeline_group, device=device)

    def from_rank_0(tensor: Tensor) -> Tensor:
        # broadcasts need contiguous memory: others are sent as a copy, which is written back
        sent = tensor.contiguous()
        dist.broadcast(sent, 0)
        return tensor if sent is tensor else tensor.copy_(sent)

    for name, parameter in parameters.items():
        # Broadcasts need all parameters; the memory of others is freed below.
        of_first = from_rank_0(parameter.data.to(device))
        parameter.data = parameter.data if name in placed.names else of_first
    for buffer in module.buffers():
        buffer.data = from_rank_0(buffer.data.to(device))
    placed.free()
    return placed


class NonLocalParameters:
    """Parameters of `module` that this rank does not keep; `names` has their names.

    They stay the same objects and give their memory back. Their elements are one NaN, so that a
    wrong use shows. They have no gradients, and optimizers pass over them.

    ``holders[name]`` are the ranks of `group`, this pipeline, that keep a parameter, its owner
    first; all keep those without an entry. Methods are collective calls of `group`, but for `free`
    and `skipped_by_loading`.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        holders: Mapping[str, tuple[int, ...]],
        group: dist.ProcessGroup,
        device: torch.device,
    ) -> None:
        self._module, self.group, self.device = module, group, device
        self.holders, self._rank = dict(holders), dist.get_rank(group)
        self.owners = {name: ranks[0] for name, ranks in holders.items()}
        self.names = frozenset(name for name, ranks in holders.items() if self._rank not in ranks)
        self._is_unsharded = False

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """The parameters that the module has now, by their first names."""
        return dict(self._module.named_parameters())

    def free(self) -> None:
        """Give their memory back."""
        parameters = self.parameters
        for name in self.names:
            parameter = parameters[name]
            # One element, expanded to the shape: autograd and optimizers see the same parameter.
            numeric = parameter.is_floating_point() or parameter.is_complex()
            value = torch.full(
                (), float("nan") if numeric else 0, dtype=parameter.dtype, device=self.device
            )
            parameter.data = value.expand(parameter.shape)
            parameter.grad = None

    @torch.no_grad()
    def restore(self) -> None:
        """Let every rank have all parameters, as their owners do."""
        parameters, all_names = self.parameters, list(self.owners)
        for start in range(0, len(all_names), AT_ONCE):
            names = all_names[start : start + AT_ONCE]
            for name in names:
                if name in self.names:
                    parameter = parameters[name]
                    parameter.data = torch.empty(
                        parameter.shape, dtype=parameter.dtype, device=self.device
                    )
            # A few at a time: all at once would need the memory of all copies.
            works = [
                dist.broadcast(
                    parameters[name].data,
                    group=self.group,
                    group_src=self.owners[name],
                    async_op=True,
                )
                for name in names
            ]
            for work in works:
                work.wait()
        self.names = frozenset()

    @contextmanager
    def unsharded(self) -> Generator[None]:
        """Let every rank have all parameters within, and free those that it does not keep after."""
        # `restore` empties `names`: put them back before memory is freed.
        names = self.names
        self.restore()
        self._is_unsharded = True
        try:
            yield
        finally:
            self._is_unsharded, self.names = False, names
            self.free()

    @contextmanager
    def gathered_on_first(self) -> Generator[None]:
        """Let the first rank of the pipeline have all parameters within.

        Those of other ranks are in host memory: a device may have no room for all.
        """
        # what the first rank has in their places now, to put back
        before, parameters, where = {}, self.parameters, travel_device(self.group)
        missing = (
            ()
            if self._is_unsharded
            else (name for name, ranks in self.holders.items() if 0 not in ranks)
        )
        # The owner sends each, the first rank receives it into host memory.
        for name in sorted(missing):
            if self._rank == 0 and name in self.names:
                parameter = parameters[name]
                value = torch.empty(parameter.shape, dtype=parameter.dtype, device=where)
                dist.recv(value, group=self.group, group_src=self.owners[name])
                before[name], parameter.data = parameter.data, value.cpu()
            elif self._rank == self.owners[name]:
                value = parameters[name].data.to(where).contiguous()
                dist.send(value, group=self.group, group_dst=0)
        try:
            yield
        finally:
            for name, value in before.items():
                parameters[name].data = value

    def skipped_by_loading(self) -> TorchFunctionMode:
        """Return a mode within which ``load_state_dict`` leaves them alone."""
        parameters = self.parameters
        return _SkipCopies({id(parameters[name]) for name in self.names})


class _SkipCopies(TorchFunctionMode):
    def __init__(self, parameters: set[int]) -> None:
        super().__init__()
        self._parameters = parameters

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.copy_ and id(args[0]) in self._parameters:
            return args[0]
        return func(*args, **(kwargs or {}))


# ---- buffers -------------------------------------------------------------------------------------


class StageBuffers:
    """The buffers of `module` that stages change. Methods are collective calls of all ranks."""

    def __init__(self, module: nn.Module, layout: StageLayout, groups: PipelineGroups) -> None:
        self._module, self._layout, self._groups = module, layout, groups
        self._written = dict(layout.buffers)
        self._changed = False

    def begin_step(self, flows: Sequence[StageFlow]) -> None:
        """Begin a step of training with the buffers of the first data rank, as DDP does."""
        was_changed = self._changed
        self.changed_by(flows)
        # Those of this rank's stages, from the first of its data ranks.
        if self._groups.data is not None and was_changed:
            named = dict(self._module.named_buffers())
            own = (
                named[name]
                for name, stage in sorted(self._written.items())
                if self._layout.rank_of_stage[stage] == self._groups.rank
            )
            send_buffers(own, self._groups.data)

    def changed_by(self, flows: Sequence[StageFlow]) -> None:
        """Remember which buffers steps with these flows change. No collective call."""
        for flow in {id(flow): flow for flow in flows}.values():
            self._written |= written_buffers(flow.flow, flow.stage_of_call)
        self._changed = bool(self._written)

    def sync(self) -> None:
        """Give all ranks the buffers that stages have changed, from the first data rank."""
        if not self._changed:
            return
        # From the pipeline of rank 0, each by the rank whose stage changes it.
        named, first = dict(self._module.named_buffers()), self._groups.mesh.pipeline_of(0)
        for name, stage in sorted(self._written.items()):
            dist.broadcast(named[name].data, first[self._layout.rank_of_stage[stage]])
        self._changed = False


def average_over_data_ranks(
    module: nn.Module, groups: PipelineGroups
) -> list[tuple[nn.SyncBatchNorm, Any]]:
    """Let SyncBatchNorm average over the ranks that run the same stages, instead of all ranks.

    Other ranks do not run these modules, and would be waited for. A collective call of all ranks.

    Returns:
        The modules that this changes, each with its `process_group` before.
    """
    # Modules with a group of the user's own keep it.
    everyone = dist.group.WORLD
    of_batches = (each for each in module.modules() if isinstance(each, nn.SyncBatchNorm))
    found = [
        (each, each.process_group) for each in of_batches if each.process_group in (None, everyone)
    ]
    if found:
        for each, _ in found:
            each.process_group = groups.data_group
    return found

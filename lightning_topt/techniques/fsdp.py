"""Sharded gradients and parameters (ZeRO levels 2 and 3), through torch's FSDP2.

    technique      tensors are sharded along
    FullSharding   all data axes
    HybridSharding the last of several data axes (inside a node); the others hold replicas of the
                   shards (between nodes)

Under hybrid sharding, parameters are gathered and gradients scattered inside the inner groups.
Between these only the shards of gradients travel, in one all-reduce per step however many
microbatches it has (Zhao et al., arXiv 2304.11277, section 3.2.2; Zhang et al., "MiCS", arXiv
2205.00119).

Both techniques may shard blocks of one model, each on its own mesh, beside blocks that DDP handles.
All share one root, which FSDP2 needs to order its gathers. It is the outermost wrapper: DDP's if
there is one, else a `ShardedModule`. Costs are in `fsdp_costs`.

[Note: 16 bits] Under precision ``bf16-mixed`` and ``16-mixed`` matrices are gathered in 16 bits,
through FSDP2's `MixedPrecisionPolicy`, and gradients are reduced in float32: a block of level 3
moves 2 x 2 + 4 bytes of each parameter in a step, where float32 moves 12. These are the matrices
that autocast rounds to 16 bits before it uses them, in products and convolutions, so that nothing
changes, bit for bit: the traced step says so of each (`Parameter.narrow`), and a plan names the
others (`float32_gathers`). What the step reads otherwise (tables, tied heads), what it uses several
times, whose gradients add up in float32, vectors, and weights of recurrent layers are gathered in
float32. Inputs of blocks are not cast.

[Note: manual optimization] A step that optimizes manually runs backward passes and updates inside
of the root's forward. What stays gathered after a forward misses updates, and whether a gradient is
wanted. So blocks have level 3, which gathers for each call anew. Loose parameters stay whole, with
shared states at most.

[Note: offload] What a plan offloads leaves the device between uses: shards of parameters, gradients
and states. On accelerators FSDP2's `CPUOffloadPolicy` keeps them in the memory of the host, where
the optimizer runs. On CPUs they are in files (`optim.mapped_memory`).

[Note: other modules] Ranks whose steps call different blocks are named, or agree on each gather:
`agreed_gathers`.

Frozen parameters have no gradient and no state to shard. At level 2 every rank keeps them whole, so
that nothing of them travels; level 3 shards them with all others.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import _composable_state
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle
from typing_extensions import override

from lightning_topt.communication.collectives import AllGather, ReduceScatter, backend_of
from lightning_topt.communication.topology import group_of
from lightning_topt.costs.lifetimes import Lifetime
from lightning_topt.costs.sizes import ROOT, gradient_bytes, shard_share
from lightning_topt.costs.training_step import TrainingStep
from lightning_topt.graph.mesh_axes import Mesh
from lightning_topt.graph.op_config import OpConfig, Storage
from lightning_topt.graph.op_graph import Block, Parameter
from lightning_topt.optim.mapped_memory import empty_in_file, in_file, is_in_file
from lightning_topt.optim.shard_step import as_dtensor, on_mesh
from lightning_topt.techniques.agreed_gathers import AgreedGathers, CalledBlocks
from lightning_topt.techniques.ddp_wrapper import send_buffers
from lightning_topt.techniques.fsdp_costs import (
    ShardedBlock,
    add_fsdp_seconds,
    gathered_lifetimes,
    gradient_lifetimes,
    plan_lifetimes,
    shard_lifetimes,
)
from lightning_topt.techniques.optimizer_sharding import excess, share_step
from lightning_topt.techniques.sharding_checks import (
    DTensorRules,
    check_parameters,
    set_replaced,
    watch,
)
from lightning_topt.techniques.technique import (
    ALONE,
    Applied,
    BlockSeconds,
    Neighbours,
    ParallelModel,
    Technique,
    has_data_axes,
    has_unsharded_gradients,
    shard_axes,
)


class FsdpTechnique(Technique):
    """Gradients, and at level 3 parameters, are sharded along some of the data axes."""

    @abstractmethod
    def axes(self, mesh: Mesh) -> tuple[int, ...]:
        """Return the axes that tensors are sharded along; none if the mesh does not suit."""

    @override
    def claims(self, config: OpConfig, mesh: Mesh) -> frozenset[str]:
        axes, level = self.axes(mesh), config.storage.level
        if not axes or level < 2:
            return frozenset()
        is_own = config.storage == Storage.zero(
            level, axes=len(mesh.axes), over=axes, offload=config.storage.offload
        )
        return frozenset({"storage"}) if is_own else frozenset()

    # ---- what is legal ---------------------------------------------------------------------------

    @override
    def configs(
        self, step: TrainingStep, block: Block, so_far: Sequence[OpConfig]
    ) -> list[OpConfig]:
        mesh, axes = step.mesh, self.axes(step.mesh)
        if not axes or mesh.data_parallel_size == 1:
            return []
        # updates must be elementwise, gradients uncompressed, and nothing tied to another block
        if not step.optimizer.elementwise or step.exchange is not None or block.name in step.tied:
            return []
        # FSDP2's root is needed until the end of the step: releasing its parameters saves nothing.
        levels: tuple[int, ...] = (2,) if block.name == ROOT else (2, 3)
        if step.graph.is_manual:  # see [Note: manual optimization]
            levels = () if block.name == ROOT else (3,)
        parameters = step.parameters(block.name)
        if block.name != ROOT and parameters and not any(p.trainable for p in parameters):
            levels = (3,)  # level 2 would be as level 0: there is nothing to shard
        # What is offloaded, for want of memory, is released as early as it can be.
        has_place = step.on_gloo or step.cluster.device.host_bandwidth
        is_whole = mesh.tensor_axes or step.optimizer.owned
        offloaded = levels[-1:] if step.offloads and has_place and not is_whole else ()
        return [
            OpConfig.zero(level, axes=len(mesh.axes), over=axes, offload=offload)
            for several, offload in ((levels, False), (offloaded, True))
            for level in several
        ]

    # ---- what it costs ---------------------------------------------------------------------------

    @override
    def lifetimes(
        self, step: TrainingStep, block: str, config: OpConfig, beside: Neighbours
    ) -> Iterator[Lifetime]:
        sharded = self._sharded(step, block, config, beside)
        yield from shard_lifetimes(sharded)
        yield from gathered_lifetimes(sharded)
        yield from gradient_lifetimes(sharded)

    @override
    def plan_lifetimes(self, step: TrainingStep, blocks: Collection[str]) -> Iterator[Lifetime]:
        yield from plan_lifetimes(step, blocks, axes=self.axes(step.mesh))
        # of what ranks own, how much more the busiest has than an even share
        states = excess(step, blocks, names=step.optimizer.owned)
        yield step.phases.always("optimizer state", states)

    @override
    def plan_seconds(self, step: TrainingStep, blocks: Collection[str]) -> float:
        return excess(step, blocks, step.update_seconds, names=step.optimizer.owned)

    @override
    def add_seconds(
        self, seconds: BlockSeconds, step: TrainingStep, block: str, config: OpConfig
    ) -> None:
        add_fsdp_seconds(seconds, self._sharded(step, block, config, ALONE))

    @override
    def update_share(self, step: TrainingStep, parameter: Parameter, config: OpConfig) -> float:
        if config.storage.offload and not step.on_gloo:
            return 0.0  # the host does it
        if parameter.name in step.optimizer.owned:
            return 1.0
        return shard_share(parameter, step.mesh.ranks_along(self.axes(step.mesh)))

    @override
    def result_bytes(self, step: TrainingStep, parameter: Parameter, config: OpConfig) -> float:
        # what is sent, what arrives, and the rows
        if parameter.name not in step.optimizer.owned:
            return 0.0
        return 3 * gradient_bytes(parameter) / step.mesh.ranks_along(self.axes(step.mesh))

    # ---- how it is applied -----------------------------------------------------------------------

    @override
    def apply(self, model: ParallelModel) -> Applied | None:
        """Shard its blocks, with rank 0's values, as in DDP.

        Blocks whose parameters are sharded release the gathered ones after forward, the others
        after backward.
        """
        if not (blocks := model.blocks_of(self)):
            return None
        inner = model.mesh.ranks_along(self.axes(model.mesh))
        sharding = _Sharding(model, blocks, model.device_mesh(inner=inner))
        ranks, group = model.mesh.data_parallel_size, model.data_group
        return Applied(
            undo=sharding.undo,
            replaced=sharding.replaced(),
            reshard=sharding.reshard,
            meet=_called_blocks(model).meet,
            # updates of full parameters have owners
            attach=lambda optimizer: share_step(optimizer, ranks=ranks, group=group),
        )

    def _sharded(
        self, step: TrainingStep, block: str, config: OpConfig, beside: Neighbours
    ) -> ShardedBlock:
        storage, axes = config.storage, self.axes(step.mesh)
        return ShardedBlock(step, block, storage.level, axes, beside, storage.offload)


class FullSharding(FsdpTechnique):
    """Gradients, and at level 3 parameters, are sharded along all data axes."""

    name = "full sharding"

    @override
    def axes(self, mesh: Mesh) -> tuple[int, ...]:
        return mesh.data_axes if has_data_axes(mesh) else ()


class HybridSharding(FsdpTechnique):
    """Gradients, and at level 3 parameters, are sharded along the last of several data axes."""

    name = "hybrid sharding"

    @override
    def axes(self, mesh: Mesh) -> tuple[int, ...]:
        return mesh.data_axes[-1:] if has_data_axes(mesh) and len(mesh.data_axes) > 1 else ()

    @override
    def apply(self, model: ParallelModel) -> Applied | None:
        if (applied := super().apply(model)) is None:
            return None
        named = [
            model.module.get_submodule(name) if name else model.root
            for name in model.blocks_of(self)
        ]
        modules = [module for module in named if isinstance(module, FSDPModule)]
        return replace(applied, no_sync=lambda: _within_groups(modules))


@contextmanager
def _within_groups(modules: Sequence[FSDPModule]) -> Generator[None]:
    # Scatter gradients inside the inner groups only, without the all-reduce between these.
    # The shards stay there; the next backward outside adds them to its own exchange.
    for module in modules:
        # each sharded module is in the list itself
        module.set_requires_all_reduce(False, recurse=False)
    try:
        yield
    finally:
        for module in modules:
            module.set_requires_all_reduce(True, recurse=False)


class ShardedModule(nn.Module):
    """The root of a module without DDP; it gathers and releases the loose parameters.

    It is a wrapper, so that a call of `module` from inside (`self(x)` in a training step) passes no
    hook twice. Where callbacks call `module` themselves (`gather_outside`), it gathers, too.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self._runs = self._has_gathered = False

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Give every rank rank 0's buffers, as DDP does, and call the wrapped module."""
        self._runs = True
        try:
            return self._forward(*args, **kwargs)
        finally:
            self._runs = False

    def gather_outside(self) -> list[RemovableHandle]:
        """Gather the loose parameters for calls of the module from outside; return the hooks."""

        def before(*_: Any) -> None:
            is_in_backward = torch._C._current_graph_task_id() != -1
            if self._runs or is_in_backward or not isinstance(self, FSDPModule):
                return
            state = self._get_fsdp_state()
            state._lazy_init()  # this is the root, whatever runs first
            groups = state._fsdp_param_groups
            if groups and not any(group.is_unsharded for group in groups):
                self._has_gathered = True
                self.unshard()

        def after(*_: Any) -> None:
            if self._has_gathered and isinstance(self, FSDPModule):
                self._has_gathered = False
                self.reshard()

        return [
            self.module.register_forward_pre_hook(before, prepend=True),
            self.module.register_forward_hook(after, always_call=True),
        ]

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        send_buffers(self.module.buffers())
        return self.module(*args, **kwargs)


class _Sharding:
    # Some blocks of one model under FSDP2, and the way back to the plain module.

    def __init__(self, model: ParallelModel, blocks: Sequence[str], mesh: DeviceMesh) -> None:
        self.module = model.module
        self._before: dict[nn.Module, _Snapshot] = {}
        self._hooks: list[RemovableHandle] = []
        self._originals = {
            name: p for block in blocks for name, p in _to_shard(model, block).items()
        }
        check_parameters(self._originals)
        self._strides = {p: p.stride() for p in self._originals.values()}
        # The others have nothing to shard. And FSDP2 keeps modules in dictionaries, in which
        # metrics are lost: their hash changes with their state.
        for name in filter(None, blocks):
            if _to_shard(model, name):
                self._shard_block(model, name, mesh)
            else:
                model.broadcast(model.parameters[name].values())
        # The root is on the mesh of the loose parameters, or else of the first sharded block.
        sharded = [
            name for name, config in model.configs.items() if not has_unsharded_gradients(config)
        ]
        if ("" if "" in sharded else sharded[0]) in blocks:
            self._shard_root(model, mesh, filter(None, sharded), in_shards="" in blocks)
            self._hooks += _under_autocast(model, model.module)
        self.root = model.root
        self._rules = DTensorRules()
        set_replaced(self._originals.values(), True)

    def _shard_block(self, model: ParallelModel, name: str, mesh: DeviceMesh) -> None:
        # order: remember the plain module, get rank 0's values to the device, then shard
        block, named = model.module.get_submodule(name), _to_shard(model, name)
        self._remember(block.modules())
        model.broadcast([*model.parameters[name].values(), *block.buffers()])
        kept = {*model.parameters[name].values()} - {*named.values()}
        self._shard(
            model,
            block,
            mesh,
            named,
            after_forward=_in_shards(model, name),
            offload=model.configs[name].storage.offload,
            ignored=kept or None,
        )
        _called_blocks(model).follow(name, block)
        self._hooks += _under_autocast(model, block)
        if (before := model.before_block) is not None:
            hook = block.register_forward_pre_hook(before, prepend=True, with_kwargs=True)
            self._hooks.append(hook)

    def _shard_root(
        self, model: ParallelModel, mesh: DeviceMesh, others: Iterable[str], *, in_shards: bool
    ) -> None:
        # Put FSDP2 around the root; it shards the loose parameters if they are `in_shards`. All
        # `others` are sharded blocks
        if not isinstance(model.root, DistributedDataParallel):
            whole = model.parameters_where(has_unsharded_gradients).values()
            model.broadcast([*whole, *model.module.buffers()])
            model.root = ShardedModule(model.module)
        # FSDP2 changes the root and all modules outside of sharded blocks
        elsewhere = {
            submodule for name in others for submodule in model.module.get_submodule(name).modules()
        }
        self._remember(
            [model.root, *(module for module in model.module.modules() if module not in elsewhere)]
        )
        # of the parameters outside, those that are not sharded are ignored
        loose = _to_shard(model, "") if in_shards else {}
        if in_shards:
            model.broadcast(model.parameters[""].values())
        ignored = {p for of_block in model.parameters.values() for p in of_block.values()} - set(
            loose.values()
        )
        self._shard(
            model,
            model.root,
            mesh,
            loose,
            after_forward=in_shards and _in_shards(model, ""),
            offload=in_shards and model.configs[""].storage.offload,
            ignored=ignored,
        )
        self._hooks += _called_blocks(model).follow_root(model.root)
        if isinstance(model.root, ShardedModule):
            self._hooks += model.root.gather_outside()

    def _shard(
        self,
        model: ParallelModel,
        block: nn.Module,
        mesh: DeviceMesh,
        named: Mapping[str, nn.Parameter],
        *,
        after_forward: bool,
        offload: bool,
        ignored: set[nn.Parameter] | None = None,
    ) -> None:
        # Shard the parameters `named`, which FSDP2 gathers when `block` is called
        with torch.no_grad():
            for parameter in named.values():
                parameter.data = parameter.data.contiguous()  # FSDP2 takes no other
        dtype = model.options.gather_dtype
        wide = {named.get(name) for name in model.float32_gathers}  # under any name of it
        narrow = {
            name
            for name, p in named.items()
            if dtype
            and p.dim() > 1
            and p.dtype == torch.float32
            and p not in wide
            and not p._backward_hooks  # which may return what 16 bits do not hold
        }
        # said, for what None means differs between releases of torch: as under ddp
        reduced_as = next((p.dtype for p in named.values() if p.requires_grad), None)
        policy = MixedPrecisionPolicy(
            dtype if narrow else None, reduced_as, cast_forward_inputs=False
        )
        to_host = offload and model.device.type != "cpu"
        # takes over the parameters: DTensors of the shards are in their places now
        sharded = fully_shard(
            block,
            mesh=mesh,
            reshard_after_forward=after_forward,
            ignored_params=ignored,
            mp_policy=policy,
            offload_policy=CPUOffloadPolicy() if to_host else OffloadPolicy(),
        )
        for parameter in named.values():
            # Optimizers and the user's code may hold the original Parameter objects (they come back
            # in `undo`); their memory must not stay.
            parameter.data = torch.empty(0, dtype=parameter.dtype, device=parameter.device)
            parameter.grad = None
        # under gloo our own collectives take the place of those that FSDP2 calls
        if backend_of(model.device, mesh.get_group(mesh.ndim - 1)) == "gloo":
            # has the interface, without torch's private base
            sharded.set_custom_all_gather(AllGather())  # type: ignore[arg-type]
            sharded.set_custom_reduce_scatter(ReduceScatter())  # type: ignore[arg-type]
            if mesh.ndim == 2:
                # FSDP2 would average along both dims with ReduceOp.AVG, which gloo's all-reduce
                # lacks in older releases.
                sharded.set_force_sum_reduction_for_comms(True)
        now = dict(model.module.named_parameters())
        names: dict[Tensor, str] = {now[name]: name for name in named if name in now}
        watch(block, names, self._originals, narrow)
        # What is on the meta device gets this rank's rows; where these are uneven FSDP2 pads them.
        for group in sharded._get_fsdp_state()._fsdp_param_groups:
            for param in group.fsdp_params:
                shard: Any = param.sharded_param
                if (rows := model.rows.pop(self._originals[names[shard]], None)) is not None:
                    own = as_dtensor(rows, shard)
                    param._setattr_on_modules(nn.Parameter(own, shard.requires_grad))
                    param.reset_sharded_param()
            if offload and not to_host:
                _move_to_files(group)

    def _remember(self, modules: Iterable[nn.Module]) -> None:
        self._before.update({module: _Snapshot(module) for module in modules})

    def replaced(self) -> dict[Tensor, Tensor]:
        # Return the sharded parameter in the place of each original one.
        now = dict(self.module.named_parameters(remove_duplicate=False))
        return {original: now[name] for name, original in self._originals.items()}

    @torch.no_grad()
    def undo(self) -> None:
        # Restore the unsharded parameters (on the CPU), in the same Parameter objects.
        # A collective call.
        set_replaced(self._originals.values(), False)
        # gather first: it needs FSDP2 as it is
        whole: dict[nn.Parameter, Tensor] = {}
        self.reshard()
        now = dict(self.module.named_parameters(remove_duplicate=False))
        for name, original in self._originals.items():
            # a tied parameter is gathered once
            if original not in whole:
                parameter: Tensor = now[name]
                if isinstance(parameter, DTensor):
                    parameter = on_mesh(parameter).full_tensor()
                whole[original] = parameter.detach().cpu()
        # then take FSDP2 off, and fill the original Parameter objects
        for hook in self._hooks:
            hook.remove()
        self._rules.close()
        for module, snapshot in self._before.items():
            snapshot.restore(module)
        for original, full in whole.items():
            # in the order of memory that the parameter had (channels-last)
            original.data = full.new_empty_strided(full.shape, self._strides[original]).copy_(full)
            original.grad = None
            vars(original).pop("_fsdp_orig_uid", None)

    def reshard(self) -> None:
        # Release all gathered parameters; the next forward gathers what the shards then hold.
        for module in self.root.modules():
            if isinstance(module, FSDPModule):
                module.reshard()


def _to_shard(model: ParallelModel, block: str) -> dict[str, nn.Parameter]:
    # The parameters of `block` that get sharded: at level 2 those that are trained
    config = model.configs[block]
    return {
        name: parameter
        for name, parameter in model.parameters[block].items()
        if shard_axes(config, is_trained=parameter.requires_grad)
    }


@torch.no_grad()
def _move_to_files(group: Any) -> None:
    # Keep the shards of an FSDP2 group in files, and gradients from the end of backward on
    for param in group.fsdp_params:
        data, local = param._sharded_param_data, param.sharded_param._local_tensor
        data = data if is_in_file(data) else in_file(data)
        # as `FSDPParam.reset_sharded_param` does it
        param._sharded_param_data = data
        rows = data.view(param.padded_sharded_param_size)
        param.sharded_param._local_tensor = rows.narrow(0, 0, len(local))
    plain, files = group.post_backward, dict[Any, Tensor]()

    def post_backward(*args: Any) -> None:
        plain(*args)
        for param in group.fsdp_params:
            if (gradient := param.sharded_param.grad) is None:
                continue
            local = gradient._local_tensor
            if param not in files:
                files[param] = empty_in_file(local.shape, local.dtype)
            if local.data_ptr() != files[param].data_ptr():
                gradient._local_tensor = files[param].copy_(local)

    group.post_backward = post_backward


def _called_blocks(model: ParallelModel) -> CalledBlocks:
    # What follows the gathers of all techniques, made at the first call, which is collective
    if model.called is None:
        options, mesh = model.options, model.mesh
        if options.ddp.get("find_unused_parameters") and not options.is_manual:
            group = group_of(mesh.groups_along(mesh.data_axes), backend="gloo")
            assert group is not None
            model.made_groups.append(group)
            model.called = AgreedGathers(model.configs, group)
        else:
            model.called = CalledBlocks(
                model.configs, model.data_group, is_manual=options.is_manual
            )
    return model.called


def _in_shards(model: ParallelModel, block: str) -> bool:
    return bool(model.configs[block].storage.sharded_axes("parameters"))


def _under_autocast(model: ParallelModel, module: nn.Module) -> list[RemovableHandle]:
    # Let `module` run under autocast where callbacks call it outside of a step: its matrices, which
    # are in 16 bits then, meet inputs in float32. With gradients it is a region of a step in which
    # the user has switched autocast off: an error says so
    if (dtype := model.options.gather_dtype) is None:
        return []
    entered: list[torch.autocast] = []

    def enter(*_: Any) -> None:
        if torch.is_grad_enabled():
            return
        entered.append(torch.autocast(model.device.type, dtype, cache_enabled=False))
        entered[-1].__enter__()

    def leave(*_: Any) -> None:
        if entered:
            entered.pop().__exit__(None, None, None)

    return [
        module.register_forward_pre_hook(enter),
        module.register_forward_hook(leave, always_call=True),
    ]


class _Snapshot:
    # What FSDP2 changes on one module: class, hooks, parameters and attributes.

    def __init__(self, module: nn.Module) -> None:
        self.cls = module.__class__
        self.keys = set(module.__dict__)
        self.parameters = dict(module._parameters)
        self.hooks = {name: set(hooks) for name, hooks in _hooks(module)}

    def restore(self, module: nn.Module) -> None:
        module.__class__ = self.cls
        # only what FSDP2 added; what user code set meanwhile stays
        for name in set(module.__dict__) - self.keys:
            if name.startswith(("__composable_api_state_key", "_is_fsdp", "_fsdp")):
                del module.__dict__[name]
        for name, hooks in _hooks(module):
            for key in set(hooks) - self.hooks[name]:
                if (getattr(hooks[key], "__module__", None) or "").startswith("torch.distributed."):
                    del hooks[key]
                    # what torch notes about it beside it
                    for option in ("with_kwargs", "always_called"):
                        module.__dict__.get(f"{name}_{option}", {}).pop(key, None)
        module._parameters.update(self.parameters)
        _composable_state._module_state_mapping.pop(module, None)


def _hooks(module: nn.Module) -> Iterator[tuple[str, dict[int, Any]]]:
    for name, value in module.__dict__.items():
        if name.endswith("_hooks") and isinstance(value, dict):
            yield name, value

"""Blocks of a module sharded by torch's FSDP2, on the mesh of a technique, and the way back to a
plain module.

Several techniques may shard blocks of one model, each on its own mesh, beside blocks that DDP
handles. All of them have one root, the outermost wrapper, which FSDP2 needs to order its gathers:
DDP's where there is one, else a `ShardedModule`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import _composable_state
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from lightning_topt.communication.collectives import AllGather, ReduceScatter
from lightning_topt.techniques.technique import Applied, ParallelModel, has_whole_gradients

_MESSAGE_BYTES = 250 << 20  # DDP's


class ShardedModule(nn.Module):
    """The root of a module without DDP: its forward calls `module`, whose loose parameters it
    gathers and releases.

    The root is a wrapper so that a call of `module` from inside (`self(x)` in a training step)
    passes no hook twice.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Give every rank rank 0's buffers (BatchNorm statistics), as DDP does, and call the
        wrapped module.
        """
        _broadcast_buffers(self.module)
        return self.module(*args, **kwargs)


def shard_blocks(model: ParallelModel, blocks: Sequence[str], *, mesh: DeviceMesh) -> Applied:
    """Shard the named blocks of `model` on `mesh`. Rank 0's values count, as in DDP. A collective
    call.

    Blocks whose parameters are sharded release the gathered ones after forward, the others after
    backward.
    """
    applied = _Sharding(model, blocks, mesh)
    return Applied(undo=applied.undo, replaced=applied.replaced(), reshard=applied.reshard)


def sharded_modules(model: ParallelModel, blocks: Sequence[str]) -> list[nn.Module]:
    """Return what FSDP2 knows the named blocks of `model` as."""
    modules = [model.module.get_submodule(name) if name else model.root for name in blocks]
    return [module for module in modules if isinstance(module, FSDPModule)]


class _Sharding:
    def __init__(self, model: ParallelModel, blocks: Sequence[str], mesh: DeviceMesh) -> None:
        self.module = model.module
        self._before: dict[nn.Module, _Snapshot] = {}
        self._hooks: list[RemovableHandle] = []
        self._originals = {
            name: p for block in blocks for name, p in model.parameters[block].items()
        }
        # Nothing to shard in the others, and FSDP2 keeps modules in dictionaries, which metrics
        # (their hash changes with their state) get lost in.
        for name in (name for name in blocks if name and model.parameters[name]):
            self._shard_block(model, name, mesh)
        if _holder_of_root(model) in blocks:
            self._shard_root(model, mesh, in_shards="" in blocks)
        self.root = model.root

    def _shard_block(self, model: ParallelModel, name: str, mesh: DeviceMesh) -> None:
        block = model.module.get_submodule(name)
        self._remember(block.modules())
        model.broadcast([*model.parameters[name].values(), *block.buffers()])
        _shard(block, mesh, model.parameters[name].values(), after_forward=_in_shards(model, name))
        if (before := model.before_block) is not None:
            hook = block.register_forward_pre_hook(before, prepend=True, with_kwargs=True)
            self._hooks.append(hook)

    def _shard_root(self, model: ParallelModel, mesh: DeviceMesh, *, in_shards: bool) -> None:
        if not isinstance(model.root, DistributedDataParallel):
            whole = model.parameters_where(has_whole_gradients).values()
            model.broadcast([*whole, *model.module.buffers()])
            model.root = ShardedModule(model.module)
        others = [
            name
            for name, config in model.configs.items()
            if name and not has_whole_gradients(config)
        ]
        elsewhere = {
            submodule for name in others for submodule in model.module.get_submodule(name).modules()
        }
        self._remember(
            [model.root, *(module for module in model.module.modules() if module not in elsewhere)]
        )
        loose = list(model.parameters[""].values()) if in_shards else []
        model.broadcast(loose)
        ignored = {p for of_block in model.parameters.values() for p in of_block.values()} - set(
            loose
        )
        _shard(
            model.root,
            mesh,
            loose,
            after_forward=in_shards and _in_shards(model, ""),
            ignored=ignored,
        )

    def _remember(self, modules: Iterable[nn.Module]) -> None:
        self._before.update({module: _Snapshot(module) for module in modules})

    def replaced(self) -> dict[Tensor, Tensor]:
        """Return the sharded parameter in the place of each original one."""
        now = dict(self.module.named_parameters(remove_duplicate=False))
        return {original: now[name] for name, original in self._originals.items()}

    @torch.no_grad()
    def undo(self) -> None:
        """Give the module its whole parameters back (on the CPU), in the same Parameter objects. A
        collective call.
        """
        whole: dict[nn.Parameter, Tensor] = {}
        self.reshard()
        now = dict(self.module.named_parameters(remove_duplicate=False))
        for name, original in self._originals.items():
            if original not in whole:
                parameter = now[name]
                full = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
                whole[original] = full.detach().cpu()
        for hook in self._hooks:
            hook.remove()
        for module, snapshot in self._before.items():
            snapshot.restore(module)
        for original, full in whole.items():
            original.data, original.grad = full, None
            vars(original).pop("_fsdp_orig_uid", None)

    def reshard(self) -> None:
        """Release all gathered parameters, so that the next forward gathers what the shards then
        hold.
        """
        for module in self.root.modules():
            if isinstance(module, FSDPModule):
                module.reshard()


def _holder_of_root(model: ParallelModel) -> str:
    """The block on whose mesh the root is: the loose parameters' own, or that of the first sharded
    block.
    """
    sharded = [name for name, config in model.configs.items() if not has_whole_gradients(config)]
    return "" if "" in sharded else sharded[0]


def _in_shards(model: ParallelModel, block: str) -> bool:
    return bool(model.configs[block].storage.sharded_axes("parameters"))


def _shard(
    module: nn.Module,
    mesh: DeviceMesh,
    originals: Iterable[nn.Parameter],
    *,
    after_forward: bool,
    ignored: set[nn.Parameter] | None = None,
) -> None:
    sharded = fully_shard(
        module, mesh=mesh, reshard_after_forward=after_forward, ignored_params=ignored
    )
    for parameter in originals:
        # Optimizers and the user's code may hold the original Parameter objects (they come back in
        # `undo`); their memory must not stay.
        parameter.data, parameter.grad = (
            torch.empty(0, dtype=parameter.dtype, device=parameter.device),
            None,
        )
    if dist.get_backend(mesh.get_group(mesh.ndim - 1)) == "gloo":
        sharded.set_custom_all_gather(AllGather())  # type: ignore[arg-type]  # the interface, without torch's private base
        sharded.set_custom_reduce_scatter(ReduceScatter())  # type: ignore[arg-type]
        if mesh.ndim == 2:
            # FSDP2 would average along both dims with ReduceOp.AVG, which gloo's all-reduce lacks
            # in older releases.
            sharded.set_force_sum_reduction_for_comms(True)


class _Snapshot:
    """A `_Snapshot` is what FSDP2 changes on one module: its class, hooks, parameters and
    attributes.
    """

    def __init__(self, module: nn.Module) -> None:
        self.cls = module.__class__
        self.keys = set(module.__dict__)
        self.parameters = dict(module._parameters)
        self.hooks = {name: set(hooks) for name, hooks in _hooks(module)}

    def restore(self, module: nn.Module) -> None:
        module.__class__ = self.cls
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


def _broadcast_buffers(module: nn.Module) -> None:
    """In few large messages."""
    buffers = [buffer for buffer in module.buffers() if buffer.numel()]
    if buffers:
        dist._broadcast_coalesced(  # type: ignore[attr-defined]
            dist.distributed_c10d._get_default_group(), buffers, _MESSAGE_BYTES, 0
        )

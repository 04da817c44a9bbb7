"""Sharded gradients and parameters (ZeRO-2, ZeRO-3) through torch's FSDP2, and the way back to a plain module."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import _composable_state
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from lightning_topt.communication.collectives import AllGather, ReduceScatter
from lightning_topt.plan.parallel_plan import ParallelPlan

_MESSAGE_BYTES = 250 << 20  # DDP's


class ShardedModule(nn.Module):
    """The root of a sharded module: its forward calls `module`, whose loose parameters it gathers and releases.

    The root is a wrapper so that a call of `module` from inside (`self(x)` in a training step) passes no hook twice.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the wrapped module."""
        return self.module(*args, **kwargs)


class Sharding:
    """Applies a sharded plan to a module in place, and takes it back with `remove`.

    Blocks of ZeRO stage 3 release their gathered parameters after forward, those of stage 2 after backward.
    Rank 0's parameters and buffers are the ones that count, as in DDP.
    """

    def __init__(self, module: nn.Module, plan: ParallelPlan, *, mesh: DeviceMesh, device: torch.device) -> None:
        self.module = module
        self._device = device
        self._before = {submodule: _Snapshot(submodule) for submodule in module.modules()}
        self._parameters = dict(module.named_parameters(remove_duplicate=False))
        stages = {block.block: block.config.storage.level for block in plan.blocks}
        for name, stage in stages.items():
            # Nothing to shard in the others, and FSDP2 keeps modules in dictionaries, which metrics (their hash changes
            # with their state) get lost in.
            if name and next(module.get_submodule(name).parameters(), None) is not None:
                self._shard(module.get_submodule(name), mesh, stage)
        self.root = ShardedModule(module)
        self._shard(self.root, mesh, stages[""])

    @property
    def replaced(self) -> dict[Tensor, Tensor]:
        """The sharded parameter in the place of each original one."""
        now = dict(self.module.named_parameters(remove_duplicate=False))
        return {original: now[name] for name, original in self._parameters.items()}

    def _shard(self, module: nn.Module, mesh: DeviceMesh, stage: int) -> None:
        originals = [p for p in module.parameters() if not isinstance(p, DTensor)]
        _broadcast([*originals, *module.buffers()], self._device)
        sharded = fully_shard(module, mesh=mesh, reshard_after_forward=stage == 3)
        for parameter in originals:
            # Optimizers and the user's code may hold the original Parameter objects (they come back in `remove`); their
            # memory must not stay.
            parameter.data, parameter.grad = torch.empty(0, dtype=parameter.dtype, device=self._device), None
        if dist.get_backend(mesh.get_group()) == "gloo":
            sharded.set_custom_all_gather(AllGather())  # type: ignore[arg-type]  # the interface, without torch's private base
            sharded.set_custom_reduce_scatter(ReduceScatter())  # type: ignore[arg-type]

    @torch.no_grad()
    def remove(self) -> None:
        """Give the module its whole parameters back (on the CPU), in the same Parameter objects. A collective call."""
        whole: dict[nn.Parameter, Tensor] = {}
        self.reshard()
        for name, parameter in self.module.named_parameters(remove_duplicate=False):
            original = self._parameters[name]
            if original not in whole:
                full = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
                whole[original] = full.detach().cpu()
        for submodule, snapshot in self._before.items():
            snapshot.restore(submodule)
        for original, full in whole.items():
            original.data, original.grad = full, None

    def reshard(self) -> None:
        """Release all gathered parameters, so that the next forward gathers what the shards then hold."""
        for submodule in self.root.modules():
            if isinstance(submodule, FSDPModule):
                submodule.reshard()


class _Snapshot:
    """What FSDP2 changes on one module: its class, hooks, parameters and attributes."""

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
        module._parameters.update(self.parameters)
        _composable_state._module_state_mapping.pop(module, None)


def _hooks(module: nn.Module) -> Iterator[tuple[str, dict[int, Any]]]:
    for name, value in module.__dict__.items():
        if name.endswith("_hooks") and isinstance(value, dict):
            yield name, value


@torch.no_grad()
def _broadcast(tensors: list[Tensor], device: torch.device) -> None:
    for tensor in tensors:
        tensor.data = tensor.data.to(device).contiguous()
    for work in [dist.broadcast(tensor.data, 0, async_op=True) for tensor in tensors]:
        work.wait()


def broadcast_buffers(module: nn.Module) -> None:
    """Give every rank rank 0's buffers (BatchNorm statistics), as DDP does before each forward: in few large messages."""
    buffers = [buffer for buffer in module.buffers() if buffer.numel()]
    if buffers:
        dist._broadcast_coalesced(  # type: ignore[attr-defined]
            dist.distributed_c10d._get_default_group(), buffers, _MESSAGE_BYTES, 0
        )

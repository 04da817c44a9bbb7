"""Data parallelism: every rank has all parameters and whole gradients, averaged by torch's DistributedDataParallel (DDP).

It also averages the whole gradients of blocks whose optimizer state is sharded (ZeRO level 1). Parameters with sharded
gradients are beside it in the same model: DDP ignores them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from lightning_topt.communication.options import ExchangeOptions
from lightning_topt.graph.mesh_axes import Mesh
from lightning_topt.graph.op_config import OpConfig, Storage
from lightning_topt.techniques.technique import (
    Applied,
    ParallelModel,
    Technique,
    has_only_data_axes,
    has_whole_gradients,
)


class DataParallel(Technique):
    """Nothing is sharded (ZeRO level 0)."""

    @property
    @override
    def name(self) -> str:
        return "data parallelism"

    @override
    def claims(self, config: OpConfig, mesh: Mesh) -> frozenset[str]:
        whole = has_only_data_axes(mesh) and config.storage == Storage.zero(0, axes=len(mesh.axes))
        return frozenset({"storage"}) if whole else frozenset()

    @override
    def check(self, mesh: Mesh, configs: Mapping[str, OpConfig], exchange: ExchangeOptions | None) -> None:
        return None

    @override
    def apply(self, model: ParallelModel) -> Applied | None:
        """Wrap the module in DDP, unless it is."""
        whole = model.parameters_where(has_whole_gradients)
        sharded = model.parameters_where(lambda config: not has_whole_gradients(config))
        if not isinstance(model.root, DistributedDataParallel):
            if sharded and not any(parameter.requires_grad for parameter in whole.values()):
                return None  # DDP takes no module in which it has nothing to average
            _move(model, whole)
            options, ignored = model.options, _names_for_ddp(sharded)
            model.root = wrap_in_ddp(model.module, device=model.device, arguments=options.ddp, ignored=ignored)
            register_hook(model.root, options.hook, options.hook_state)
        return Applied(undo=lambda: None, no_sync=model.root.no_sync)


def wrap_in_ddp(
    module: nn.Module, *, device: torch.device, arguments: Mapping[str, Any], ignored: Collection[str] = ()
) -> DistributedDataParallel:
    """Return `module`, which is on `device`, in torch's DDP with its `arguments`, without the parameters named `ignored`."""
    device_ids = None if device.type == "cpu" else [device.index]
    with _ignoring(module, ignored), _side_stream(device):
        return DistributedDataParallel(module, device_ids=device_ids, **arguments)


def register_hook(ddp: DistributedDataParallel, hook: Callable[..., Any] | None, state: Any) -> None:
    """Let the user's communication hook, if there is one, average the gradients of `ddp`."""
    if hook is not None:
        ddp.register_comm_hook(state=state, hook=hook)


@contextmanager
def _ignoring(module: nn.Module, names: Collection[str]) -> Generator[None, None, None]:
    """DDP reads what it is to ignore from an attribute of the module; what the user has there stays."""
    attribute, before = "_ddp_params_and_buffers_to_ignore", dict(vars(module))
    if names:
        setattr(module, attribute, [*before.get(attribute, ()), *names])
    try:
        yield
    finally:
        if names and attribute in before:
            setattr(module, attribute, before[attribute])
        elif names:
            delattr(module, attribute)


@contextmanager
def _side_stream(device: torch.device) -> Generator[None, None, None]:
    """DDP on CUDA is to be made on a side stream (pytorch.org/docs/stable/notes/cuda.html, "CUDA Graphs")."""
    if device.type != "cuda":
        yield
        return
    with torch.cuda.stream(torch.cuda.Stream(device)):  # type: ignore[no-untyped-call]
        yield


def _names_for_ddp(names: Collection[str]) -> list[str]:
    # DDP asks for a parameter of the module itself as "scale" in one place and as ".scale" in another.
    return [*names, *(f".{name}" for name in names if "." not in name)]


@torch.no_grad()
def _move(model: ParallelModel, whole: Mapping[str, nn.Parameter]) -> None:
    """To the device, but for what is to be sharded: that may be too large to be there whole."""
    for tensor in (*whole.values(), *model.module.buffers()):
        tensor.data = tensor.data.to(model.device)

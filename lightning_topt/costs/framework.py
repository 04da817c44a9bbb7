"""Seconds that the host takes for a kernel of a training step: modules, autograd, Python, the launch.

    equation                                                      function                where
    t = (step of small layers - their kernels alone) / kernels    measure_framework       CPUs, beside the kernel itself
    h = step of small layers / kernels                            measure_launch          accelerators, ahead of the kernel
    s = (step of blocks under FSDP2 - without it) / exchanges     measure_sharded_blocks  CPUs, beside the exchange itself

A kernel that is measured alone (`calibrate.measure_kernels`) is called without a module around it and without a graph. On
accelerators the host does this ahead of the device, and it costs nothing while the device is busy (`compute`): layers so small
that the device waits for the host show how long it takes.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import _composable_state
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from lightning_topt.communication.collectives import AllGather, ReduceScatter, all_gather_into, reduce_scatter_into
from lightning_topt.costs.ranks import world_size
from lightning_topt.costs.timing import time_call

_LAYERS, _WIDTH, _ROWS = 24, 8, 4
_LEAST = 1e-6
_BLOCKS, _BLOCK_PARAMETERS, _ROUNDS = 4, (2, 12), 6  # of sharded blocks
_KERNELS = 8  # of each: product, norm, activation; in backward two products, a sum, and those of norm and activation


def measure_framework(device: torch.device, *, budget_seconds: float = 0.05) -> float:
    """Return the seconds per kernel, from a step of small layers; 0 on devices other than CPUs."""
    if device.type != "cpu":
        return 0.0
    linear, step = _small_layers(device)
    x = torch.ones(_ROWS, _WIDTH)
    whole = time_call(step, device=device, budget_seconds=0.7 * budget_seconds)
    alone = time_call(_kernels_of(linear, x), device=device, budget_seconds=0.3 * budget_seconds)
    return max(whole / _LAYERS - alone, _LEAST) / _KERNELS


def measure_launch(device: torch.device, *, budget_seconds: float = 0.05) -> float:
    """Return the host's seconds per kernel, from a step of small layers on an accelerator; 0 on CPUs."""
    if device.type == "cpu":
        return 0.0
    _, step = _small_layers(device)
    return time_call(step, device=device, budget_seconds=budget_seconds) / (_LAYERS * _KERNELS)


def measure_sharded_blocks(device: torch.device) -> tuple[float, float]:
    """Return what torch's FSDP2 adds to one gather or reduction of a block, in seconds: (a block, each of its parameters).

    Beside the exchange itself: hooks, copies of tiny tensors, autograd. 0 for one rank, and off CPUs. Collective.
    """
    if device.type != "cpu" or world_size() == 1:
        return 0.0, 0.0
    few, many = (_sharded_excess(parameters) for parameters in _BLOCK_PARAMETERS)
    each = max(many - few, 0.0) / (_BLOCK_PARAMETERS[1] - _BLOCK_PARAMETERS[0])
    return max(few - _BLOCK_PARAMETERS[0] * each, _LEAST), each


def _sharded_excess(parameters: int) -> float:
    """Seconds by which FSDP2 prolongs a step of tiny blocks, for each exchange: a block has two gathers and a reduction."""
    model = nn.Sequential(*(_Block(parameters) for _ in range(_BLOCKS)))
    x = torch.ones(_WIDTH, requires_grad=True)
    plain = _step_seconds(model, x)
    group = dist.group.WORLD
    assert group is not None
    mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("data",))
    for module in (*model, model):
        sharded = fully_shard(module, mesh=mesh)
        sharded.set_custom_all_gather(AllGather())  # as plans have it
        sharded.set_custom_reduce_scatter(ReduceScatter())
    shard = torch.ones(parameters * -(-_WIDTH // world_size()))
    whole = torch.ones(len(shard) * world_size())
    exchanges = [partial(all_gather_into, whole, shard), partial(reduce_scatter_into, shard, whole)]
    gather, reduce = (statistics.median(_seconds(call) for _ in range(4 * _ROUNDS)) for call in exchanges)
    excess = (_step_seconds(model, x) - plain) / (3 * _BLOCKS) - (2 * gather + reduce) / 3
    for module in (*model, model):  # hooks and states refer to one another: they would stay
        _composable_state._module_state_mapping.pop(module, None)
    return excess


class _Block(nn.Module):
    def __init__(self, parameters: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList([torch.ones(_WIDTH) for _ in range(parameters)])

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.weights:
            x = x * weight
        return x


def _step_seconds(model: nn.Module, x: Tensor) -> float:
    """The median of a few forward and backward passes; the first ones set up what is sharded."""

    def step() -> None:
        with torch.inference_mode(False), torch.enable_grad():
            torch.autograd.backward(model(x).sum())

    return statistics.median([_seconds(step) for _ in range(_ROUNDS + 2)][2:])


def _seconds(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _small_layers(device: torch.device) -> tuple[nn.Linear, Callable[[], None]]:
    """One of the layers, and a forward and backward pass through all of them."""
    linears = [nn.Linear(_WIDTH, _WIDTH, device=device) for _ in range(_LAYERS)]
    norms = [nn.LayerNorm(_WIDTH, device=device) for _ in range(_LAYERS)]
    pairs = zip(linears, norms, strict=True)
    model = nn.Sequential(*(module for linear, norm in pairs for module in (linear, norm, nn.GELU())))
    x = torch.ones(_ROWS, _WIDTH, device=device)

    def step() -> None:
        with torch.inference_mode(False), torch.enable_grad():
            torch.autograd.backward(model(x).sum())
        model.zero_grad()

    return linears[0], step


def _kernels_of(linear: nn.Linear, x: Tensor) -> Callable[[], None]:
    aten, weight, bias = torch.ops.aten, linear.weight.detach(), linear.bias.detach()
    ones = torch.ones(_WIDTH)
    _, mean, deviation = aten.native_layer_norm(x, [_WIDTH], ones, ones, 1e-5)

    def call() -> None:
        with torch.no_grad():
            aten.addmm(bias, x, weight)
            aten.native_layer_norm(x, [_WIDTH], ones, ones, 1e-5)
            aten.gelu(x)
            aten.gelu_backward(x, x)
            aten.native_layer_norm_backward(x, x, [_WIDTH], mean, deviation, ones, ones, [True, True, True])
            aten.mm(x, weight)
            aten.mm(x.t(), x)
            aten.sum(x, [0])

    return call

"""Seconds that the host takes for a kernel of a training step: modules, autograd, Python, the
launch.

    equation                                   function           where
    t = (step of small layers                  measure_framework  CPUs, beside the kernel itself
         - their kernels alone) / kernels
    h = step of small layers / kernels         measure_launch     accelerators, ahead of the kernel

A kernel that is measured alone (`calibrate.measure_kernels`) is called without a module around it
and without a graph. On accelerators the host does this ahead of the device, and it costs nothing
while the device is busy (`compute`): layers so small that the device waits for the host show how
long it takes.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from lightning_topt.costs.timing import time_call

_LAYERS, _WIDTH, _ROWS = 24, 8, 4
_LEAST = 1e-6
# of each: product, norm, activation; in backward two products, a sum, and those of norm and
# activation
_KERNELS = 8


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
    """Return the host's seconds per kernel, from a step of small layers on an accelerator; 0 on
    CPUs.
    """
    if device.type == "cpu":
        return 0.0
    _, step = _small_layers(device)
    return time_call(step, device=device, budget_seconds=budget_seconds) / (_LAYERS * _KERNELS)


def _small_layers(device: torch.device) -> tuple[nn.Linear, Callable[[], None]]:
    """One of the layers, and a forward and backward pass through all of them."""
    linears = [nn.Linear(_WIDTH, _WIDTH, device=device) for _ in range(_LAYERS)]
    norms = [nn.LayerNorm(_WIDTH, device=device) for _ in range(_LAYERS)]
    pairs = zip(linears, norms, strict=True)
    model = nn.Sequential(
        *(module for linear, norm in pairs for module in (linear, norm, nn.GELU()))
    )
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
            aten.native_layer_norm_backward(
                x, x, [_WIDTH], mean, deviation, ones, ones, [True, True, True]
            )
            aten.mm(x, weight)
            aten.mm(x.t(), x)
            aten.sum(x, [0])

    return call

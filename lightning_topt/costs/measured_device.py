"""Time what one device does while all ranks are at work: matrix products, memory, small operators,
the host around kernels.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import psutil
import torch

from lightning_topt.costs.framework import measure_framework, measure_launch
from lightning_topt.costs.node_types import Device
from lightning_topt.costs.ranks import average, world_size
from lightning_topt.costs.timing import time_call

_MATRIX_SIZES = {"cpu": (256, 512, 1024), "cuda": (2048, 4096, 8192)}
_BYTES_MOVED = 1 << 26  # of the memory bandwidth measurement: far more than a cache holds
# Beside their tensors, training ranks of GPTs of 3 to 50 M parameters kept 4 to 14 MiB: objects of
# DDP and the optimizer, buffers of gloo, small blocks on the C heap
# (benchmarks/results/memory_limits.md). torch counts no such bytes on CUDA.
_CPU_PROCESS_BYTES = 9 << 20

Timer = Callable[[], dict[Any, float]]


class ProductTimer:
    """Times products of square matrices by dtype and size: of as many sizes as five calls each take
    less than five times the budget. The first call finds out which.
    """

    def __init__(self, device: torch.device, *, budget_seconds: float) -> None:
        self.device = device
        self.dtypes = [
            torch.float32,
            torch.bfloat16,
            *((torch.float16,) if device.type == "cuda" else ()),
        ]
        self._each = budget_seconds / len(self.dtypes)
        self._sizes: dict[torch.dtype, list[int]] = {}

    def __call__(self) -> dict[Any, float]:
        """Seconds by dtype and size, the same on every rank. Collective."""
        found: dict[Any, float] = {}
        for dtype in self.dtypes:
            for size in self._sizes.get(
                dtype, _MATRIX_SIZES["cpu" if self.device.type == "cpu" else "cuda"]
            ):
                found[str(dtype).removeprefix("torch."), size] = seconds = self._seconds(
                    dtype, size
                )
                if (
                    dtype not in self._sizes and seconds * 8 > self._each
                ):  # the next size has twice the rows and columns
                    break
            self._sizes.setdefault(
                dtype, [n for name, n in found if name == str(dtype).removeprefix("torch.")]
            )
        return found

    def _seconds(self, dtype: torch.dtype, size: int) -> float:
        left, right = (torch.rand(size, size, device=self.device).to(dtype) for _ in range(2))
        product = partial(torch.mm, left, right, out=torch.empty_like(left))
        sizes = len(_MATRIX_SIZES["cpu"])
        return average([time_call(product, device=self.device, budget_seconds=self._each / sizes)])[
            0
        ]


def device_timers(device: torch.device, *, budget_seconds: float) -> dict[str, Timer]:
    """Return timers of `device`: seconds of products by dtype and size, per byte moved, per small
    operator, and what the host takes around a kernel. Every rank calls each of them at the same
    time.
    """

    def copies() -> dict[Any, float]:
        source = torch.ones(_BYTES_MOVED // 8, device=device)
        target = torch.empty_like(source)
        copying = time_call(
            lambda: target.copy_(source), device=device, budget_seconds=0.2 * budget_seconds
        )
        return {"byte": average([copying / (2 * source.nbytes)])[0]}

    def small() -> dict[Any, float]:
        tiny = torch.zeros(1, device=device)
        overhead = time_call(
            lambda: tiny.add_(1), device=device, budget_seconds=0.2 * budget_seconds
        )
        return {"call": average([overhead])[0]}

    def host() -> dict[Any, float]:
        if device.type != "cpu":
            return {
                "launch": average([measure_launch(device, budget_seconds=0.2 * budget_seconds)])[0]
            }
        return {
            "kernel": average([measure_framework(device, budget_seconds=0.2 * budget_seconds)])[0]
        }

    products = ProductTimer(device, budget_seconds=0.6 * budget_seconds)
    return {"products": products, "copies": copies, "small": small, "host": host}


def measured_device(
    device: torch.device,
    times: Mapping[Any, Mapping[Any, float]],
    *,
    page_fault_seconds_per_byte: float,
) -> Device:
    """Return the device with the rates that `times`, of `device_timers`, say; the rate of a dtype
    is that of its best size.
    """
    rates: dict[str, float] = {}
    for (dtype, size), seconds in times["products"].items():
        rates[dtype] = max(rates.get(dtype, 0.0), product_flops(size) / seconds)
    return Device(
        name=_device_name(device),
        memory_bytes=device_memory_bytes(device),
        flops=rates,
        memory_bandwidth=1 / times["copies"]["byte"],
        op_overhead_seconds=times["small"]["call"],
        page_fault_seconds_per_byte=page_fault_seconds_per_byte,
        framework_seconds=times["host"].get("kernel", 0.0),
        launch_seconds=times["host"].get("launch", 0.0),
        process_bytes=_CPU_PROCESS_BYTES if device.type == "cpu" else 0,
    )


def product_flops(size: int) -> float:
    """Return the FLOPs of a product of two square matrices."""
    return 2.0 * size**3


def device_memory_bytes(device: torch.device) -> int:
    """Return what one rank may use, in bytes: the device's memory, or an equal share of the
    machine's.
    """
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return int(psutil.virtual_memory().total // world_size())


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.machine()} CPU, {torch.get_num_threads()} thread(s) per rank"
